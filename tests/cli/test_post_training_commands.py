"""Post-training by commands: a reward model, the best answers, what is learnt from them, a judgement, a mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cordillera.recipe import dump
from cordillera.run import Run
from tests.training.post_training_runs import DATA, make_start, post_recipe


@pytest.fixture
def folder(cli: Any, tmp_path: Path) -> Path:
    """Folder of a start, prompts, and a recipe of each objective."""
    make_start(tmp_path)
    for name in DATA:
        recipe = post_recipe(tmp_path, name, tmp_path / "start", training={"steps": 2})
        (tmp_path / f"{name}.toml").write_text(dump(recipe))
    lines = (tmp_path / "problems.jsonl").read_text().splitlines()[:4]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.slow
def test_models_are_tuned_weighed_and_averaged_by_commands(cli: Any, folder: Path) -> None:
    for name in ("reward", "dpo", "grpo"):
        done = cli("train", f"{name}.toml", "--run", f"runs/{name}", "--quiet")
        assert done.code == 0, done.err
        assert (folder / f"runs/{name}/report.html").is_file()
        evaluated = cli("evaluate", f"runs/{name}")
        assert evaluated.code == 0, evaluated.err
        assert cli("train", f"runs/{name}", "--resume", "-q").code == 0

    arguments = ("--reward", "runs/reward", "--prompts", "prompts.jsonl", "--max-new-tokens", 4, "--dtype", "float32")
    best = cli("best-of", "start", *arguments, "--out", "best.jsonl", "-n", 3, "-q")
    assert best.code == 0, best.err
    rows = [json.loads(line) for line in Path("best.jsonl").read_text().splitlines()]
    assert [len(row["rewards"]) for row in rows] == [3] * 4
    assert re.search(r"4 prompts, 3 answers each", best.out)
    assert cli("best-of", "start", *arguments, "--out", "best.jsonl", "-n", 3, "-q").out == best.out
    assert "not of 4" in cli("best-of", "start", *arguments, "--out", "best.jsonl", "-n", 4, "-q").err
    refused = cli("best-of", "start", *arguments[2:], "--reward", "start", "--out", "other.jsonl", "-q")
    assert refused.code != 0
    assert "is no reward model" in refused.err

    learnt = cli("train", "sft.toml", "--run", "runs/sft", "--set", "data.path=best.jsonl", "-q")
    assert learnt.code == 0, learnt.err
    assert Run("runs/sft").read_json("model.json")["objective"] == "sft"
    judged = cli("judge", "runs/sft", "start", *arguments, "-q")
    assert judged.code == 0, judged.err
    assert re.search(r"runs/sft wins [\d.]+ % of 4 prompts \(95 % interval .*\)", judged.out.replace("\n", " "))
    told = json.loads(cli("judge", "runs/sft", "start", *arguments, "--json").out)
    assert f"wins {100 * told['rate']:.1f} % of {told['prompts']} prompts" in judged.out
    assert len(told["rewards"]) == len(told["interval"]) == 2
    made = cli("average", "runs/sft", "start", "--out", "mean")
    assert made.code == 0, made.err
    assert "mean of 2: mean" in made.out
    assert (folder / "mean/model.safetensors").is_file()
    assert cli("average", "runs/reward", "--out", "none").code != 0
    said = cli("generate", "runs/dpo", "1 sea?", "-n", 4, "--temperature", 0, "-q")
    assert said.code == 0, said.err
    assert cli("generate", "runs/reward", "1 sea?", "-q").code != 0


@pytest.mark.slow
def test_a_drafter_is_trained_on_own_chats_and_used_by_commands(cli: Any, folder: Path) -> None:
    written = cli("write-chats", "start", "own.jsonl", "-n", 12, "--max-new-tokens", 8, "--dtype", "float32", "-q")
    assert written.code == 0, written.err
    assert re.search(r"12 chats in own\.jsonl; \d+ questions were dropped", written.out)
    assert len(Path("own.jsonl").read_text(encoding="utf-8").splitlines()) == 12
    done = cli("train", "draft.toml", "--run", "runs/draft", "--set", "data.path=own.jsonl", "--quiet")
    assert done.code == 0, done.err
    report = Path("runs/draft/report.html").read_text(encoding="utf-8")
    assert "first drafts right" in report
    assert cli("evaluate", "runs/draft").code == 0
    made = cli("export-drafter", "runs/draft", "draft.safetensors")
    assert made.code == 0, made.err
    asked = ("generate", "start", "1 sea?", "-n", 12, "--temperature", 0, "--dtype", "float32", "-q")
    plain = cli(*asked, "--drafter", "none")
    for drafter in ("draft.safetensors", "ngram+draft.safetensors"):
        said = cli(*asked, "--drafter", drafter)
        assert (said.code, said.out) == (0, plain.out), said.err
    assert cli("average", "runs/draft", "start", "--out", "mean").code == 0
    # a run of a drafter is the model that it drafts for
    assert cli("generate", "runs/draft", *asked[2:], "--drafter", "none").out == plain.out
    for wrong, words in (
        (("export-drafter", "runs/draft", "draft.bin"), "end its name in .safetensors"),
        (("export-drafter", "start", "other.safetensors"), "has no drafter"),
        ((*asked, "--drafter", "eagle"), "unknown drafter 'eagle'"),
        ((*asked, "--drafter", "start/step.safetensors+ngram"), "unknown drafter"),
    ):
        refused = cli(*wrong)
        assert refused.code != 0
        assert words in " ".join(refused.err.split())
    learnt = cli("train", "sft.toml", "--run", "runs/sft", "-q")
    assert learnt.code == 0, learnt.err
    other = cli("generate", "runs/sft", *asked[2:], "--drafter", "draft.safetensors")
    assert other.code != 0
    assert "was trained for another model" in " ".join(other.err.split())


@pytest.mark.parametrize("name", ["sft", "reward", "dpo", "grpo"])
def test_a_recipe_of_post_training_that_is_shown_is_a_recipe_again(cli: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "data.jsonl").write_text("")
    text = (
        f'[objective]\nname = "{name}"\n[data]\npath = "data.jsonl"\n[model]\nname = "llama"\npreset = "llama-debug"\n'
    )
    (tmp_path / "mine.toml").write_text(text + "[model.adapter]\nrank = 3\n")
    shown = cli("recipe", "show", "mine.toml", "--set", "training.steps=7")
    assert shown.code == 0, shown.err
    assert f'name = "{name}"' in shown.out
    (tmp_path / "again.toml").write_text(shown.out)
    again = cli("recipe", "show", "again.toml")
    assert again.out == shown.out
    assert "steps = 7" in again.out
    wrong = cli("recipe", "show", "mine.toml", "--set", "objective.name=gpo")
    assert wrong.code != 0
    assert "objective.name: must be one of sft, reward, dpo, grpo, draft" in wrong.err
