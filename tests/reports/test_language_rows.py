"""Rows, captions and tiles of a language report, from records that are small enough to compute by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cordillera.distributed.mesh import ParallelConfig
from cordillera.reports.charts import Axis
from cordillera.reports.language import card, comparison, headline, run, warnings
from cordillera.run import Run
from cordillera.training.language.records import LanguageRecords
from tests.training.sample_language_runs import Record, make_evaluation, make_language_run, make_model

GIB = 2.0**30


def train(step: int, **values: Any) -> Record:
    return {"kind": "train", "step": step, "tokens": 100 * step, "steps": 10, **values}


def evaluated(step: int, loss: float, split: str = "validation") -> Record:
    return {"kind": "evaluation", "split": split, "step": step, "tokens": 1000 * step, **make_evaluation(loss)}


def read(folder: Path, records: list[Record], steps: int = 1000, model: Record | None = None) -> LanguageRecords:
    """The records of a run whose ``evaluation.json`` is missing."""
    made = make_language_run(folder / "run", steps, records)
    (made.folder / "evaluation.json").unlink()
    if model is not None:
        made.write_json("model.json", model)
    return LanguageRecords(Run(made.folder))


def test_shares_of_problems_are_no_losses_of_text(tmp_path: Path) -> None:
    """GRPO's evaluations hold the share that was not solved; its objective may rise, and no text is learnt by heart."""
    solved = [evaluated(10 * n, 1 - share) | {"solved": share} for n, share in enumerate((0.5, 0.72, 0.6), 1)]
    steps = [train(n, loss=0.01 * n) for n in range(1, 101)]
    records = read(tmp_path, [*steps, *solved], model={**make_model(), "objective": "grpo"})
    said = " ".join(warnings.find_warnings(records))
    assert "by heart" not in said
    assert "is rising" not in said
    tile = headline._loss(records)
    assert tile is not None
    assert tile[-1].startswith("share of problems not solved")
    assert tile[-1].endswith("problems; lower is better")
    loss = next(one for one in run._learning(records) if one is not None and one.heading == "Loss")
    assert "validation" not in [name for _, name in loss.key]


@pytest.mark.parametrize(("number", "shown"), [(8, "All 8"), (9, "The newest 8 of 9")])
def test_the_newest_evaluations_are_listed_by_step_and_the_lowest_is_marked(
    tmp_path: Path, number: int, shown: str
) -> None:
    losses = {100 * n: 3.0 - 0.1 * n if n < 6 else 3.0 for n in range(1, number + 1)}
    records = [evaluated(step, loss) for step, loss in reversed(losses.items())]
    found = run._validations(read(tmp_path, records))
    steps = sorted(losses)[-8:]
    assert found["shown"] == shown
    assert [(name, lowest) for name, lowest, _ in found["rows"]] == [(f"{step}", step == 500) for step in steps]
    bits = losses[500] / math.log(2) / 4.4
    assert found["rows"][steps.index(500)][2] == ["500k", "2.5000", f"{math.exp(2.5):.4g}", f"{bits:.4f}"]


def test_evaluations_of_several_splits_name_theirs_and_have_a_lowest_each(tmp_path: Path) -> None:
    records = [evaluated(200, 2.0), evaluated(100, 1.0, "code"), evaluated(200, 3.0, "code"), evaluated(100, 2.5)]
    records.append({**evaluated(7, 9.0), "step": None})
    rows = run._validations(read(tmp_path, records))["rows"]
    assert rows[0][0] == "validation, step unknown", "what has no place comes first"
    assert {(name, lowest) for name, lowest, _ in rows[1:]} == {
        ("validation, step 200", True),
        ("validation, step 100", False),
        ("code, step 100", True),
        ("code, step 200", False),
    }
    assert run._validations(read(tmp_path / "none", [train(1)])) == {}


def test_the_time_is_cut_into_parts_that_add_up(tmp_path: Path) -> None:
    times = {"seconds": 5.0, "exposed_seconds": 1.0, "data_seconds": 1.5, "communication_seconds": 4.0}
    records = [train(10, **times), train(20, **times), train(30, exposed_seconds=99.0)]
    records += [{"kind": "checkpoint", "step": 20, "seconds": 4.0}, evaluated(20, 2.0) | {"seconds": 1.0}]
    found = run._times(read(tmp_path, records))
    assert [(name, seconds, part) for _, name, _, seconds, part in found["rows"]] == [
        ("Computing", "5.0 s", "33.3 %"),
        ("Exposed communication", "2.0 s", "13.3 %"),
        ("Waiting for data", "3.0 s", "20.0 %"),
        ("Checkpoints", "4.0 s", "26.7 %"),
        ("Validation", "1.0 s", "6.7 %"),
    ]
    assert [style for style, *_ in found["rows"]] == ["f0", "f1", "f2", "f3", "f4"]
    assert "Communication took 8.0 s in all, of which 75 % was hidden" in found["text"]
    assert "overlap" not in found["text"]


@pytest.mark.parametrize(
    ("exposed", "communication", "overlap", "hidden"),
    [(7.0, 7.0, False, "0 %"), (7.5, 7.0, True, "0 %"), (0.0, 2.0, False, "100 %"), (0.0, 0.0, False, None)],
)
def test_parts_that_overlap_or_hide_are_told(
    tmp_path: Path, exposed: float, communication: float, overlap: bool, hidden: str | None
) -> None:
    values = {"seconds": 10.0, "data_seconds": 3.0, "exposed_seconds": exposed, "communication_seconds": communication}
    found = run._times(read(tmp_path, [train(10, **values)]))
    assert ("They overlap" in found["text"]) == overlap
    assert ("Communication took" in found["text"]) == (hidden is not None)
    assert hidden is None or f"of which {hidden} was hidden" in found["text"]
    assert found["rows"][0][3] == f"{max(0.0, 7.0 - exposed):.1f} s"


def test_memory_is_told_where_it_was_largest_and_as_it_is_at_the_end(tmp_path: Path) -> None:
    held = [GIB, 3 * GIB, 3 * GIB, None, 2 * GIB]
    records = [train(10 * n, memory_bytes=size) for n, size in enumerate(held, 1)]
    model = make_model(replicate=2, shard=2, tensor=2) | {"parameters": 2**28}
    found = run._memory(read(tmp_path, records, model=model))
    assert found["facts"][:2] == [("Most", "3 GiB, first at step 20"), ("At the end", "2 GiB")]
    # four numbers of four bytes for each parameter; each copy of the model is over four ranks
    assert found["facts"][2][1].startswith("1 GiB a rank if shared evenly")
    assert ">GiB<" in found["chart"].chart.svg(1)
    small = run._memory(read(tmp_path / "small", [train(10 * n, memory_bytes=GIB * n / 4) for n in (1, 2, 3)]))
    assert ">MiB<" in small["chart"].chart.svg(1)
    assert small["facts"][1] == ("At the end", "768 MiB")


@pytest.mark.parametrize("unit", range(5))
def test_sizes_are_in_the_largest_unit_that_they_fill(unit: int) -> None:
    name = ("bytes", "KiB", "MiB", "GiB", "TiB")[unit]
    assert run._bytes(1024.0**unit) == f"1 {name}"
    assert run._bytes(999 * 1024.0**unit) == f"999 {name}"
    assert run._bytes(1.5 * 1024.0**unit) == (f"1.5 {name}" if unit else "2 bytes")
    if unit:
        assert run._bytes(1023 * 1024.0 ** (unit - 1)) == f"0.999 {name}"


def test_what_happened_is_told_in_order_with_neighbours_of_a_kind_together(tmp_path: Path) -> None:
    records: list[Record] = [
        {"kind": "checkpoint", "step": 10, "seconds": 2.0, "bytes": 2048},
        *({"kind": "skipped", "step": 11 + n, "loss": None if n < 2 else 2.0, "gradient_norm": None} for n in range(3)),
        *({"kind": "checkpoint", "step": 100 * n, "seconds": n / 2, "bytes": 1024 * n} for n in range(1, 7)),
        {"kind": "resumed", "step": 600, "world": 4},
        *({"kind": "checkpoint", "step": 1000 * n, "seconds": None} for n in range(1, 8)),
    ]
    found = run._events(read(tmp_path, records))
    assert found["first"] == [
        ("Checkpoint", "10", "training stood still for 2.0 s; 2 KiB"),
        ("Skipped", "11, 12, 13", "loss not finite in 2; gradient norm not finite"),
        ("Checkpoints", "100, 200, 300, 400, 500, 600", "training stood still for 10.5 s in all; 6 KiB each at most"),
        ("Resumed", "600", "on 4 processes"),
        ("Checkpoints", "1,000 to 7,000 (7 of them)", ""),
    ]
    assert (found["later"], found["left_out"]) == ([], 0)


def test_a_long_list_of_events_is_cut_twice(tmp_path: Path) -> None:
    records = [{"kind": ("skipped", "resumed")[n % 2], "step": n} for n in range(210)]
    found = run._events(read(tmp_path, records))
    assert [at for _, at, _ in found["first"]] == [f"{n}" for n in range(12)]
    assert [at for _, at, _ in found["later"]] == [f"{n}" for n in range(12, 200)]
    assert found["left_out"] == 10


def test_events_stand_at_the_first_record_of_their_step_or_later(tmp_path: Path) -> None:
    records = [train(30), train(10), train(20), train(25) | {"tokens": None}]
    steps = (5, 10, 11, 20, 30, 31)
    records += [{"kind": "resumed", "step": step} for step in steps]
    found = read(tmp_path, records)
    assert run._places_of(found, "resumed", "step") == list(steps)
    assert run._places_of(found, "resumed", "tokens") == [1000, 1000, 2000, 2000, 3000, 3000]
    assert run._places_of(found, "skipped", "tokens") == []


@pytest.mark.parametrize("times", [3, 4])
def test_a_few_resumptions_are_named_in_the_chart_and_many_are_not(tmp_path: Path, times: int) -> None:
    records = [train(10 * n, loss=3.0 - n / 10) for n in range(1, 10)]
    records += [{"kind": "resumed", "step": 10 * n} for n in range(1, times + 1)]
    loss, *_ = run._learning(read(tmp_path, records))
    assert loss is not None
    assert loss.chart.svg(1).count(">resumed<") == (3 if times == 3 else 0)
    assert "training tokens" in loss.chart.svg(1)
    untold = [one | {"tokens": 0} for one in records]
    loss, *_ = run._learning(read(tmp_path / "untold", untold))
    assert loss is not None
    assert ">step<" in loss.chart.svg(1)


def test_skipped_steps_are_dots_at_the_top_of_the_chart_of_norms(tmp_path: Path) -> None:
    records = [train(10 * n, gradient_norm=2.0) for n in (1, 2, 3)]
    records += [{"kind": "skipped", "step": step} for step in (10, 20)]
    norms = run._norms(read(tmp_path, records), Axis.to([30]), "step", "step")
    assert norms is not None
    dots = re.findall(r'<circle class="dot s1" cx="([\d.]+)" cy="([\d.]+)"', norms.chart.svg(1))
    assert [float(x) for x, _ in dots] == pytest.approx([norms.chart.x(x) for x in (10, 20)], abs=0.01)
    assert [float(y) for _, y in dots] == pytest.approx([norms.chart.top] * 2, abs=0.01)


def test_a_logarithmic_axis_shows_all_but_what_is_above_the_first_losses() -> None:
    x = Axis.log(1, 1000)
    limits, is_cut = run._frame([5.0, 6.0, 5.5, 3.0, 2.0], x)
    assert not is_cut
    assert limits[0] < 2.0 < 6.0 < limits[1]
    limits, is_cut = run._frame([5.0, math.nan, 6.0, 5.5, 6.5, 2.0], x)
    assert is_cut
    assert limits[0] < 2.0 < 6.0 < limits[1] < 6.5


@pytest.mark.parametrize(
    ("validated", "limits"), [([], (1.88, 4.12)), ([3.0], (1.88, 4.12)), ([1.0, 2.0], (0.94, 4.12))]
)
def test_the_axis_fits_losses(tmp_path: Path, validated: list[float], limits: tuple[float, float]) -> None:
    records = [train(10 * n, loss=5.0 - n) for n in (1, 2, 3)]
    records += [evaluated(n, loss) for n, loss in enumerate(validated, 1)]
    loss = next(one for one in run._learning(read(tmp_path, records)) if one is not None and one.heading == "Loss")
    assert loss.chart is not None
    assert loss.chart._y == pytest.approx(limits)


def test_the_evaluation_before_the_first_step_is_drawn_in_long_runs_too(tmp_path: Path) -> None:
    records = [train(step, loss=3.0, accuracy=0.5) for step in (1, 10, 1000)]
    validated = [evaluated(place, loss) | {"accuracy": 0.25 * loss} for place, loss in ((0, 4.0), (100, 2.0))]
    for held_out, places in ((validated, ["56", "466"]), (validated[1:], ["466"])):
        loss, shares, *_ = run._learning(read(tmp_path / f"{len(held_out)}", [*records, *held_out]))
        for one in (loss, shares):
            assert one is not None
            assert one.chart is not None
            assert re.findall(r'<circle class="dot s1" cx="([\d.]+)"', one.chart.svg(1)) == places
            assert one.chart._x == pytest.approx((0, 100_000) if len(held_out) == 2 else (2, 5))


def test_captions_give_means_over_steps_and_over_time(tmp_path: Path) -> None:
    records = [
        train(10, imbalance=1.0, delay=1.0, mfu=0.2, tokens_per_second=100.0, flops_per_second=1e6, seconds=1.0),
        train(40, imbalance=2.0, delay=5.0, mfu=0.4, tokens_per_second=500.0, flops_per_second=3e6, seconds=3.0),
    ]
    records[1]["steps"] = 30
    found = read(tmp_path, records)
    imbalance, delay = run._balance(found)
    assert imbalance is not None
    assert delay is not None
    assert "over the mean's: 1.750 on average." in imbalance.caption
    assert "for balance's sake: 4.00 on average." in delay.caption
    _, mfu = run._speed(found)
    assert mfu is not None
    assert ">40<" in mfu.chart.svg(1) or ">40.0<" in mfu.chart.svg(1)
    tiles = {name: rest for name, *rest in headline.headline(found)["tiles"]}
    assert tiles["Tokens a second"][:2] == ["400", "median record 500"]
    assert tiles["MFU"][:2] == ["35.0\u00a0%", "2.5M of 7.14M FLOP/s"]


def test_tiles_count_tokens_steps_time_and_resumptions(tmp_path: Path) -> None:
    records = [train(10, documents=3, seconds=60.0, skipped=1), train(20, documents=7, seconds=65.0, skipped=2)]
    events: list[Record] = [
        {"kind": "checkpoint", "step": 20, "seconds": 4.0},
        {"kind": "resumed", "step": 10},
        evaluated(20, 2.0) | {"seconds": 3600.0},
    ]
    model = make_model() | {"parameters": 500}

    def tiles(folder: str, *more: Record, steps: int) -> dict[str, list[str]]:
        found = read(tmp_path / folder, [*records, *events, *more], steps, model)
        return {name: rest for name, *rest in headline.headline(found)["tiles"]}

    cut = tiles("cut", steps=21)
    assert cut["Tokens trained"] == ["2k", "7 documents in 20 of 21 steps", "4 tokens a parameter"]
    assert cut["Steps skipped"][:2] == ["2", "of 20"]
    beside = "beside 1 h 0 min of validation and 4.0 s of checkpoints"
    assert cut["Training time"] == ["2 min 5 s", beside, "resumed once"]
    assert cut["Validation loss"][:2] == ["2.0000", f"perplexity 7.389, {2 / math.log(2) / 4.4:.4f} bits a byte"]
    assert cut["Validation loss"][2] == "nats a token over 1,048,576 tokens; lower is better"
    whole = tiles("whole", {"kind": "resumed", "step": 20}, steps=20)
    assert whole["Tokens trained"][1] == "7 documents in 20 steps"
    assert whole["Training time"][2] == "resumed 2 times"


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ({"name": "llama", "parameters": 1500, "world": 1}, "Llama of 1.5k parameters on one process"),
        ({"name": "llama", "parameters": 1500, "world": 4000}, "Llama of 1.5k parameters on 4,000 processes"),
        ({"parameters": 2e6}, "Llama of 2M parameters"),
        ({"name": "my model"}, "My model"),
    ],
)
def test_a_title_says_model_size_and_processes(tmp_path: Path, model: Record, title: str) -> None:
    assert run._title(read(tmp_path, [], model=model)) == title


@pytest.mark.parametrize(("world", "command"), [(1, "recipe.toml<"), (2, "recipe.toml --nproc 2<")])
def test_the_command_names_its_processes(tmp_path: Path, world: int, command: str) -> None:
    made = make_language_run(tmp_path / "run", records=[])
    made.write_json("model.json", make_model(shard=world))
    assert f"cordillera train {command}" in run.render(made)


@pytest.mark.parametrize(
    ("sizes", "rows", "columns", "text"),
    [
        ({"shard": 16}, 1, 16, ""),
        ({"shard": 17}, 1, 16, "16 of 17 ranks."),
        ({"shard": 4, "tensor": 2}, 2, 4, ""),
        ({"shard": 2, "tensor": 4}, 2, 4, ""),
        ({"shard": 20, "tensor": 18}, 16, 16, "256 of 360 ranks."),
        ({"shard": 100_000}, 1, 16, "16 of 100,000 ranks."),
        ({"shard": 100_001}, 0, 0, None),
        ({}, 0, 0, None),
    ],
)
def test_the_table_of_ranks_is_wide_rather_than_high(
    sizes: dict[str, int], rows: int, columns: int, text: str | None
) -> None:
    found = card._ranks(ParallelConfig(**sizes))
    assert len(found.get("rows", ())) == rows
    assert all(len(row) == len(found["heads"]) == columns + 1 for row in found.get("rows", ()))
    assert found.get("text") == text


def test_facts_are_told_with_counts_before_their_nouns() -> None:
    facts = {
        "path": "a/*.txt", "folder": "/cache", "documents": 1200, "dropped": 0, "fingerprint": "0123456789abcdef",
        "share": 0.5, "report": {"near_duplicate": 3, "empty": 0}, "none": {"kept": 0}, "mixed": True,
    }  # fmt: skip
    expected = "a/*.txt, 1,200 documents, fingerprint 0123456789ab, 0.5 share, report: 3 near duplicate, mixed yes"
    assert card._told(facts) == expected
    assert card._told([{"kept": 1}, {"kept": 0}, {"name": "b"}]) == "1 kept; b"
    assert [card._value(value) for value in (True, False, 1e5, 1e-5, 12345, None)] == [
        *("yes", "no", "100,000", "1e-05", "12,345", ""),
    ]


def test_parallelism_tells_what_the_mesh_has(tmp_path: Path) -> None:
    def told(**sizes: Any) -> dict[str, str]:
        model = make_model(**sizes)
        return dict(card._parallelism(read(tmp_path / str(len(list(tmp_path.iterdir()))), [], model=model),
                                      ParallelConfig(**sizes)))  # fmt: skip

    plain = told(shard=1)
    assert (plain["Processes"], plain["Mesh"]) == ("1", "one process")
    assert not {"Schedule", "Stages", "Sequences are cut"} & set(plain)
    mesh = told(pipeline=2, context=3, tensor=4)
    assert (mesh["Processes"], mesh["Stages"]) == ("24", "2")
    assert set(mesh["Mesh"].split(" \u00d7 ")) == {"pipeline 2", "context 3", "tensor 4"}
    assert mesh["Schedule"] == ParallelConfig(pipeline=2).schedule
    assert "Keys and values by" in mesh


def test_a_rise_is_one_beyond_noise_and_one_per_cent() -> None:
    """Against means and standard errors of NumPy, for rises around the limit."""
    random = np.random.default_rng(0)
    seen = set()
    for number in range(200):
        size, noise = int(random.integers(2, 6)), 10.0 ** random.uniform(-4, -0.5)
        rise = 10.0 ** random.uniform(-3, 0)
        left_out = int(random.integers(0, 10)) if size < 3 else 0
        centres = np.concatenate([np.full(left_out, 9.0), np.repeat(np.r_[3.0, np.full(8, 2.0), 2.0 + rise], size)])
        losses = centres + noise * random.standard_normal(len(centres))
        blocks = losses[len(losses) - 10 * (len(losses) // 10) :].reshape(10, -1)
        means, errors = blocks.mean(1), blocks.std(1, ddof=1) / math.sqrt(blocks.shape[1])
        best = means.argmin()
        limit = max(3 * math.hypot(errors[best], errors[-1]), 0.01 * means[best])
        found = warnings._rise([{"loss": float(loss)} for loss in losses])
        assert (found is not None) == (means[-1] - means[best] > limit), number
        assert found is None or found == pytest.approx((means[best], means[-1]))
        seen.add(found is not None)
    assert seen == {True, False}
    assert warnings._rise([{"loss": 1.0 + n // 18} for n in range(19)]) is None, "two losses a tenth are needed"
    assert warnings._rise([{"loss": 1.0 + n // 18} for n in range(20)]) == (1.0, 2.0)


@pytest.mark.parametrize(("last", "is_warned"), [(2.02, False), (2.021, True), (1.5, False)])
def test_a_validation_loss_that_rises_by_more_than_one_per_cent_is_warned_of(
    tmp_path: Path, last: float, is_warned: bool
) -> None:
    found = read(tmp_path, [train(300, loss=1.0), evaluated(100, 2.0), evaluated(200, last)])
    texts = " ".join(warnings.find_warnings(found))
    assert ("The loss on validation was lowest at step 100 (2.0000)" in texts) == is_warned


def test_losses_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    bad = [evaluated(100 * n, 2.0) | {"loss": None} for n in (1, 2)]
    found = read(tmp_path, [train(300, loss=1.0), train(310), *bad, evaluated(300, 2.0)])
    texts = " ".join(warnings.find_warnings(found))
    assert "1 of 2 records of the training loss are not finite" in texts
    assert "2 of 3 losses on validation are not finite" in texts
    assert "at an unknown step" not in texts


def test_the_final_evaluation_may_be_older_than_the_end(tmp_path: Path) -> None:
    records = [train(300, loss=1.0)]
    made = make_language_run(tmp_path / "run", 300, records)
    for step, said in ((299, True), (300, False), (301, False)):
        made.write_json("evaluation.json", {"kind": "language", "step": step, **make_evaluation(2.0)})
        texts = " ".join(warnings.find_warnings(LanguageRecords(made)))
        assert (f"is of step {step}; training has gone on to step 300." in texts) == said


def test_a_comparison_has_every_figure_under_its_heading(tmp_path: Path) -> None:
    records = [
        train(10, tokens_per_second=1000.0, mfu=0.1, seconds=1.0),
        train(30, tokens_per_second=3000.0, mfu=0.3, seconds=3.0),
    ]
    folders = [make_language_run(tmp_path / name, 30, records) for name in "ab"]
    for folder, loss in zip(folders, (2.0, 1.5), strict=True):
        folder.write_json("evaluation.json", {"kind": "language", "split": "v", "step": 30, **make_evaluation(loss)})
        folder.write_json("model.json", make_model(shard=3) | {"parameters": 4321})
    found = comparison.compare_language(folders)
    headings, lines = found.cells()
    assert dict(zip(headings, lines[1], strict=True)) == {
        "run": "b", "loss": "1.5000", "diff": "-0.5000", "perplexity": "4.482", "MFU": "25.0 %", "tokens": "3k",
        "bits/byte": f"{1.5 / math.log(2) / 4.4:.4f}", "tokens/s": "2.5k", "parameters": "4,321", "processes": "3",
    }  # fmt: skip
    assert lines[0][2] == "", "the first has no difference"
