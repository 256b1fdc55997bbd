"""``cordillera train --plan``: a run by a plan is the run with the same section typed by hand, or refused in words."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.distributed.mesh import ParallelConfig
from cordillera.errors import PlanError, RecipeError, RunError
from cordillera.planning.language.workload import Layout
from cordillera.planning.pipeline.schedules import Schedule, interleaved, zero_bubble_v
from cordillera.recipe import LanguageRecipe
from cordillera.run import Run, recipe_state
from cordillera.training.language import followed_plan
from cordillera.workflows import language, language_recipes
from cordillera.workflows.language_recipes import follow_plan
from tests.cli.test_language_commands import RECIPE, losses, weights, write_text
from tests.distributed.processes import needs_gloo
from tests.planning.test_plan_file import MODEL, write_plan

PLANNED = RECIPE.replace("layers = 2", "layers = 4").replace("steps = 12", "steps = 4")


@pytest.fixture
def recipe(cli: Any, tmp_path: Path) -> Path:
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "small.toml").write_text(PLANNED.replace("deadline_s = 60", "deadline_s = 120"))
    return tmp_path / "small.toml"


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@needs_gloo
@pytest.mark.slow
def test_a_planned_run_is_the_run_that_is_typed_by_hand(cli: Any, recipe: Path, tmp_path: Path) -> None:
    workload = "sequence = 64\nbatch = 4\n[model]\n"
    (tmp_path / "work.toml").write_text(workload + "".join(f"{k} = {json.dumps(v)}\n" for k, v in MODEL.items()))
    planned = cli("plan", "work.toml", "a100-node", "--devices", 2, "--out", "p")
    assert planned.code == 0, planned.err
    assert "train by it: cordillera train RECIPE --plan p/plan.json" in planned.out
    best = json.loads(Path("p/plan.json").read_text())["plans"][0]
    assert best["layout"]["pipeline"] == 2

    done = cli("train", recipe, "--plan", "p/plan.json", "--run", "planned", "--nproc", 2, "-q")
    assert done.code == 0, done.err
    written = recipes.load(tmp_path / "planned")
    assert isinstance(written, LanguageRecipe)
    chunks, microbatches = best["layout"]["chunks"], 4 // best["layout"]["microbatch"]
    assert written.parallel.make_schedule(microbatches).to_csv() == best["schedule"]["csv"]
    assert written.packing.microbatches == microbatches

    (tmp_path / "typed.toml").write_text(
        recipe.read_text().replace(
            "[packing]", f"[packing]\nmicrobatches = {microbatches}\nbound = {384 // microbatches}"
        )
        + f"pipeline = 2\nschedule = 'interleaved'\nchunks = {chunks}\ntable = {json.dumps(best['schedule']['csv'])}\n"
    )
    typed = cli("train", "typed.toml", "--run", "typed", "-q")
    assert typed.code == 0, typed.err
    assert losses(tmp_path / "planned") == losses(tmp_path / "typed")
    assert same_weights(tmp_path / "planned", tmp_path / "typed")


@needs_gloo
@pytest.mark.slow
def test_a_planned_run_goes_on_without_its_plan_and_on_another_mesh(cli: Any, recipe: Path, tmp_path: Path) -> None:
    split = re.sub(r"(\d+)B(\d+)", r"\1I\2,\1W\2", interleaved(2, 2, 2).to_csv())
    path = write_plan(
        tmp_path / "plan.json", Layout(pipeline=2, data=2, shards=2, chunks=2), Schedule.from_csv(split, "split")
    )
    steps = ("-q", "--set", "training.steps=8")
    done = cli("train", recipe, "--plan", path, "--run", "planned", "--nproc", 4, *steps)
    assert done.code == 0, done.err
    assert "<dt>Schedule</dt><dd>planned</dd>" in (tmp_path / "planned/report.html").read_text()
    alone = cli("train", recipe, "--run", "alone", *steps, "--set", "packing.microbatches=4")
    assert alone.code == 0, alone.err
    assert losses(tmp_path / "planned") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)

    path.unlink()
    meshes = {"again": (), "moved": ("--set", "parallel.pipeline=1", "--set", "parallel.table=none")}
    for name, mesh in meshes.items():
        shutil.copytree(tmp_path / "planned", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints/step-000000008")
        resumed = cli("train", name, "--resume", "-q", *mesh)
        assert resumed.code == 0, resumed.err
    assert same_weights(tmp_path / "again", tmp_path / "planned")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@needs_gloo
@pytest.mark.slow
def test_ends_that_hold_an_embedding_alone_train_as_one_process_does(cli: Any, tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl")
    (tmp_path / "small.toml").write_text(RECIPE.replace("steps = 12", "steps = 4"))  # two layers
    ends = {"pipeline": 2, "schedule": "interleaved", "chunks": 2}  # four stages
    for name, mesh in {"alone": {}, "ends": ends}.items():
        options = [word for key, value in mesh.items() for word in ("--set", f"parallel.{key}={value}")]
        done = cli("train", "small.toml", "--run", name, "-q", "--set", "packing.microbatches=4", *options)
        assert done.code == 0, done.err
    assert losses(tmp_path / "ends") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


PIPELINE = Layout(pipeline=2)


@pytest.mark.parametrize(
    ("layout", "model", "changes", "said"),
    [
        (PIPELINE, {}, ["parallel.pipeline=1"], [
            "parallel.pipeline: plan.json says pipeline 2, the recipe says 1: remove parallel.pipeline from the recipe "
            "or plan again"]),
        (PIPELINE, {}, ["parallel.schedule=gpipe", "parallel.order=['data','tensor','context','pipeline']"], [
            "says schedule 1f1b, the recipe says gpipe", "says order tensor, context, pipeline, data, the"]),
        (PIPELINE, {}, ["packing.microbatches=3"], ["packing.microbatches: plan.json says microbatches 4, the"]),
        (PIPELINE, {}, ["packing.tokens=512"], ["batch 4 x sequence 64 = 256 tokens, the recipe says 512"]),
        (PIPELINE, {}, ["packing.context=128"], ["sequence 64, the recipe says 128"]),
        (PIPELINE, {"layers": 2, "tied": False}, [], [
            "model.layers: plan.json says 2, the recipe's model has 4: plan", "model.tied: plan.json says false"]),
        (PIPELINE, {"gated": False, "fused_attention": False}, [], ["model.gated", "model.fused_attention"]),
        (PIPELINE, {"experts": {"count": 4, "active": 1, "ffn": 64}}, [], ["model.experts: plan.json says 4"]),
    ],
)  # fmt: skip
def test_what_the_recipe_says_otherwise_is_refused_with_its_key(
    cli: Any, recipe: Path, tmp_path: Path, layout: Layout, model: dict[str, Any], changes: list[str], said: list[str]
) -> None:
    write_plan(tmp_path / "plan.json", layout, **model)
    failed = cli("train", recipe, "--plan", "plan.json", *(part for one in changes for part in ("--set", one)))
    assert failed.code == 2
    for text in said:
        assert text in failed.err
    assert not Path("runs").exists()


def test_all_differences_are_told_at_once(cli: Any, recipe: Path, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", PIPELINE, hidden=64)
    with pytest.raises(RecipeError) as caught:
        follow_plan(recipes.load(recipe, ["packing.tokens=512", "parallel.tensor=2"]), path)
    assert [key for key, _ in caught.value.problems] == [
        "model.hidden", "model.head_dim", "packing.tokens", "parallel.tensor"
    ]  # fmt: skip


def test_what_the_recipe_says_alike_or_a_plan_leaves_open_is_kept(cli: Any, recipe: Path, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", PIPELINE)
    alike = ["parallel.pipeline=2", "parallel.schedule=1f1b", "parallel.sharding=adaptive", "packing.microbatches=4"]
    found = follow_plan(recipes.load(recipe, [*alike, "parallel.backend=cordillera"]), path, 2)
    assert (found.parallel.pipeline, found.parallel.sharding, found.parallel.deadline_s) == (2, "adaptive", 120)
    assert found.parallel.backend == "cordillera"
    again = recipes.validate(json.loads(found.model_dump_json()))
    assert follow_plan(again, path, 2) == again == found  # a resolved recipe states every key


@pytest.mark.parametrize(
    ("launched", "options", "said"),
    [
        ({}, ["--nproc", 1], ["the plan is for 4 devices; this launch has 1", "--nproc 4"]),
        ({}, [], ["the plan is for 4 devices; this machine has 1 processors", "--nproc 4"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, [], [
            "the plan is for 4 devices; this launch has 2", "torchrun --nproc-per-node 4"]),
    ],
)  # fmt: skip
def test_a_plan_for_more_devices_than_processes_is_refused(
    cli: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: Any, options: Any, said: Any
) -> None:
    write_plan(tmp_path / "plan.json", Layout(pipeline=2, data=2))
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(followed_plan, "usable_cores", lambda: 1)
    failed = cli("train", recipe, "--plan", "plan.json", *options)
    assert failed.code == 2
    for text in said:
        assert text in failed.err


def test_files_and_recipes_that_training_cannot_follow_are_refused(cli: Any, recipe: Path, tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", PIPELINE)
    assert (
        "--plan: plans are for language models; give --nproc N"
        in cli("train", "movielens-wukong", "--plan", "plan.json").err
    )
    (tmp_path / "run").mkdir()
    assert "a resumed run keeps its plan" in cli("train", "run", "--resume", "--plan", "plan.json").err
    path.write_text(path.read_text().replace("small", "large"))
    assert "does not fit its checksum" in cli("train", recipe, "--plan", "plan.json").err
    assert "does not exist" in cli("train", recipe, "--plan", "nothing.json").err
    (tmp_path / "shop.toml").write_text(
        "batch = 64\ndense = 4\nbottom = [16]\ntop = [16, 1]\n[[tables]]\nrows = 1000\ndim = 16\n"
    )
    made = cli("plan", "shop.toml", "a100-node", "--devices", 2, "--only", "placement", "--out", "shop")
    assert made.code == 0, made.err
    assert "train by it" not in made.out
    assert "is the plan of a recommendation model" in cli("train", recipe, "--plan", "shop/plan.json").err


def test_the_command_that_began_a_planned_run_goes_on_with_it(
    cli: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_plan(tmp_path / "plan.json", PIPELINE)
    other = write_plan(tmp_path / "other.json", Layout(tensor=2, sequence_parallel=True))
    run = Run.create(tmp_path / "planned", recipes.dump(follow_plan(recipes.load(recipe), path, 2)))
    resumed: list[Path] = []

    def stop(what: Run, folder: Path, **options: Any) -> None:
        resumed.append(what.folder)
        raise RunError("that is enough")

    monkeypatch.setattr(workflows, "train", stop)
    command = ("train", recipe, "--run", run.folder, "--resume", "--nproc", 2, "--plan")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert "error: that is enough\n" in cli(*command, path).err
    assert not [one for one in told if "differs" in str(one.message)]
    with pytest.warns(UserWarning, match=r"goes on with its own recipe, from .* differs: .*parallel\.tensor: 1 -> 2"):
        assert "error: that is enough\n" in cli(*command, other).err
    assert resumed == [run.folder] * 2
    alone = cli("train", run.folder, "--run", run.folder, "--resume", "--plan", path)
    assert "a resumed run keeps its plan" in alone.err


def test_a_mesh_that_cannot_train_is_refused_as_if_typed_by_hand(cli: Any, recipe: Path, tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", Layout(tensor=4, sequence_parallel=True), kv_heads=1, head_dim=6)
    narrow = ("--set", "model.kv_heads=1", "--set", "model.head_dim=6")
    failed = cli("train", recipe, "--plan", "plan.json", "--nproc", 4, *narrow)
    assert failed.code == 2
    assert "tensor 4: 4 ranks that share a head do not divide its width 6" in failed.err


@needs_gloo
@pytest.mark.slow
def test_a_planned_run_of_more_ranks_than_key_heads_is_that_of_one_process(
    cli: Any, recipe: Path, tmp_path: Path
) -> None:
    write_plan(tmp_path / "plan.json", Layout(tensor=2, sequence_parallel=True), kv_heads=1)
    one_head = ("-q", "--set", "model.kv_heads=1")
    done = cli("train", recipe, "--plan", "plan.json", "--run", "planned", "--nproc", 2, *one_head)
    assert done.code == 0, done.err
    alone = cli("train", recipe, "--run", "alone", *one_head, "--set", "packing.microbatches=4")
    assert alone.code == 0, alone.err
    assert losses(tmp_path / "planned") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_a_pipeline_is_refused_on_gpus(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = follow_plan(recipes.load(recipe, ["device=cuda"]), write_plan(tmp_path / "plan.json", PIPELINE), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"parallel\.pipeline: is for CPUs only"):
        language.train(found, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_table_for_other_microbatches_is_refused_before_any_work(cli: Any, recipe: Path, tmp_path: Path) -> None:
    grouped = interleaved(2, 4, 2, group=4)
    path = write_plan(tmp_path / "plan.json", Layout(pipeline=2, chunks=2), grouped)
    found = follow_plan(recipes.load(recipe), path, 2)
    assert found.parallel.table == grouped.to_csv()
    assert recipes.validate(json.loads(found.model_dump_json())) == found
    (tmp_path / "written.toml").write_text(recipes.dump(found))
    assert recipes.load(tmp_path / "written.toml", {"name": found.name}) == found
    fewer = found.model_copy(update={"packing": found.packing.model_copy(update={"microbatches": 2})})
    with pytest.raises(PlanError, match=r"parallel\.table: is a schedule of 4 microbatches, each copy .* has 2"):
        language.train(fewer, tmp_path / "run")
    refused = cli("train", "written.toml", "--set", "parallel.pipeline=1")
    assert "table is for pipeline 2 with 4 stages" in refused.err


@pytest.mark.parametrize("splits", [True, False])
def test_a_table_that_splits_backwards_is_not_compiled(recipe: Path, tmp_path: Path, splits: bool) -> None:
    """Whether the table splits decides, not the family that the recipe names beside it."""
    table = zero_bubble_v(2, 4) if splits else interleaved(2, 4, 2, group=4)
    given = {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "table": table.to_csv()}
    found = recipes.load(recipe, {f"parallel.{key}": value for key, value in given.items()})
    assert isinstance(found, LanguageRecipe)
    compiled = found.model_copy(
        update={
            "training": found.training.model_copy(update={"compile": True}),
            "packing": found.packing.model_copy(update={"microbatches": 4}),
        }
    )
    if not splits:
        language_recipes.check_trainable(compiled, None)
        return
    with pytest.raises(PlanError, match=r"parallel\.table: splits backwards, and a compiled block's backward cannot"):
        language_recipes.check_trainable(compiled, None)


def test_a_recipe_takes_a_plain_mesh_and_is_written_without_a_warning(recipe: Path) -> None:
    found = recipes.load(recipe)
    assert isinstance(found, LanguageRecipe)
    made = LanguageRecipe(data=found.data, model=found.model, parallel=ParallelConfig(context=2))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recipe_state(made)["parallel"]["context"] == 2
