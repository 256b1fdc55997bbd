"""``plan.json``: what is written is read, and what cannot be followed is refused in words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cordillera import topology
from cordillera.errors import PlanError
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.plan_file import plan_text, read_plan, read_schedule, read_written_plan
from cordillera.planning.language.plans import Plan
from cordillera.planning.language.step import simulate_step
from cordillera.planning.language.workload import PRODUCTION_ORDER, Layout, Workload
from cordillera.planning.pipeline.schedules import Schedule, interleaved, one_forward_one_backward
from cordillera.workflows import planning as commands
from tests.fuzzing import damaged, survives

MODEL = {
    "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "gated": True, "vocabulary": 272,
    "fused_attention": True,
}  # fmt: skip


def content_of(layout: Layout, schedule: Schedule, order: tuple[str, ...] = PRODUCTION_ORDER, **model: Any) -> Any:
    """What the planner writes of one layout with a schedule, for steps of four sequences."""
    workload = Workload(name="small", sequence=64, batch=4, model={**MODEL, **model})
    explorer = Explorer(workload, topology.load("a100-node"), devices=layout.devices)
    job = explorer.job(layout, order, {})
    plan = Plan(layout, order, {}, schedule, simulate_step(job, schedule), workload.flops, 1.0)
    return {"workload": workload.model_dump(mode="json"), "plans": [plan.to_json()]}


def write_plan(path: Path, layout: Layout, schedule: Schedule | None = None, **model: Any) -> Path:
    """A ``plan.json`` of one layout, by default with 1F1B."""
    count = 4 // (layout.data * layout.microbatch)
    path.write_text(
        plan_text(content_of(layout, schedule or one_forward_one_backward(layout.pipeline, count), **model))
    )
    return path


def test_a_search_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        "sequence = 64\nbatch = 4\n[model]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in MODEL.items())
    )
    done = commands.plan(tmp_path / "small.toml", "a100-node", tmp_path / "p", devices=2)
    assert isinstance(done, commands.Planned)
    best, found = done.found.best, read_written_plan(done.files["plan.json"])
    assert (found.layout, found.order, found.workload) == (best.layout, best.order, done.explorer.workload)
    assert found.schedule == best.schedule
    assert found.microbatches == best.layout.data * best.schedule.microbatches
    content = commands.read_plan(done.files["plan.json"])
    assert content["schema"] == 1
    assert [plan["seconds"] for plan in content["plans"]] == [plan.seconds for plan in done.found.plans[:10]]


def test_every_kind_of_schedule_comes_back(tmp_path: Path) -> None:
    schedule, layout = interleaved(2, 4, 2, group=4), Layout(pipeline=2, chunks=2)
    found = read_written_plan(write_plan(tmp_path / "plan.json", layout, schedule))
    assert found.schedule == schedule
    assert found.order == PRODUCTION_ORDER


def _changed(change: Callable[[dict[str, Any]], object]) -> str:
    content = content_of(Layout(pipeline=2), one_forward_one_backward(2, 4))
    change(content)
    return plan_text(content)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda c: c.update(schema=2),
            r"plan\.json: is of version 2, this library reads 1\n  -> name a plan.json of `cordillera plan`",
        ),
        (lambda c: c.update(workload={"tables": []}), "is the plan of a recommendation model"),
        (lambda c: c.update(plans=[]), "plans: must have at least 1 entry"),
        (lambda c: c["plans"][0].pop("schedule"), r"plans\[0\]\.schedule: is missing"),
        (lambda c: c["plans"][0]["mesh"].update(names=["rows"]), r"plans\[0\]\.mesh\.names\[0\]: must be"),
        (lambda c: c["plans"][0]["layout"].update(pipeline=4), "the schedule has 2 ranks, its layout 4"),
        (lambda c: c["plans"][0]["layout"].update(chunks=2), "the schedule has 2 stages, its layout 4"),
        (lambda c: c["plans"][0]["layout"].update(data=2), "the schedule has 4 microbatches, its layout 2"),
        (lambda c: c["plans"][0]["layout"].update(tensor=3), "tensor 3 does not divide heads 4"),
        (lambda c: c["plans"][0]["schedule"].update(csv="hello"), "'hello' is not an action"),
        (lambda c: c["plans"][0]["schedule"].update(csv="0F0,0F999999999"), "999999999 has none before it"),
        (lambda c: c["plans"][0]["schedule"].update(csv=""), "stages are missing"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_words(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    (tmp_path / "plan.json").write_text(_changed(change))
    with pytest.raises(PlanError, match=said):
        read_written_plan(tmp_path / "plan.json")


def test_a_file_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not exist"):
        read_plan(tmp_path / "plan.json")
    path = write_plan(tmp_path / "plan.json", Layout(pipeline=2))
    whole = path.read_text()
    for text, said in (
        (whole.replace('"pipeline": 2', '"pipeline": 4'), "does not fit its checksum"),
        (json.dumps({"schema": 1}), "holds no checksum"),
        (whole[:-40], "is not JSON"),
        ("[]", "is not a JSON object"),
        (json.dumps({"plans": []}), "is another kind of file: it does not say of which version it is"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=said):
            read_written_plan(path)


def test_sealed_nonsense_ends_in_words_in_bounded_time(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    rng = random.Random(1)
    whole = json.dumps(content_of(Layout(pipeline=2), one_forward_one_backward(2, 4))).encode()
    words = [b"null", b"-1", b"999999999", b'"0F999999999"', b"[]", b"{}", b"1e300"]
    for _ in range(fuzz_inputs(60)):
        try:
            content = json.loads(damaged(whole, rng, words))
        except ValueError:
            continue
        if isinstance(content, dict):
            (tmp_path / "plan.json").write_text(plan_text(content))
            survives(lambda: read_written_plan(tmp_path / "plan.json"), repr(content)[:2000])


def test_a_schedule_is_checked_before_it_is_taken_in() -> None:
    schedule = one_forward_one_backward(2, 3)
    assert read_schedule(schedule.to_csv(), "1f1b") == schedule
    with pytest.raises(PlanError, match="microbatch 5 has none before it"):
        read_schedule("0F5,0B5", "odd")
