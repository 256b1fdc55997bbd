"""Rows, captions and notes of ranking reports, from records that are small enough to compute by hand."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cordillera.errors import DataError
from cordillera.numbers import size_text
from cordillera.planning.ranking.exchange import CAUSES, STREAMS
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.reports.ranking import comparison, placement, plan, run, scores
from cordillera.reports.ranking.material import Material, _warnings, interval_text, mean_over_tasks, share_of_time
from cordillera.run import Run, RunStatus
from cordillera.training.ranking.evaluation import (
    CalibrationBin,
    Evaluation,
    ScoreHistogram,
    Segment,
    TaskEvaluation,
)
from tests.training.sample_runs import make_evaluation, make_run

SMALL = make_evaluation(examples=300, users=20)


def read(
    folder: Path, train: Sequence[Mapping[str, Any]] = (), evaluations: Sequence[tuple[int, float | None]] = (),
    changes: Mapping[str, str] | None = None, tasks: Sequence[str] = ("click",),
) -> Material:  # fmt: skip
    """A run without a test evaluation; evaluations are steps with the NE of their tasks, each 0.1 above the last."""
    made = make_run(folder / "run", evaluation=SMALL)
    (made.folder / "evaluation.json").unlink()
    lines = [{"kind": "train", "loss": 0.5, **record} for record in train]
    for step, ne in evaluations:
        found = {task: {"ne": None if ne is None else ne + n / 10} for n, task in enumerate(tasks)}
        lines.append({"kind": "evaluation", "step": step, "examples": 100 * step, "tasks": found, "seconds": 2.0})
    (made.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = (made.folder / "recipe.toml").read_text()
    for old, new in (changes or {}).items():
        assert old in text
        text = text.replace(old, new)
    (made.folder / "recipe.toml").write_text(text)
    return Material(Run(made.folder))


@pytest.mark.parametrize(
    ("nes", "patience", "note"),
    [
        ([0.9, 0.8, 0.85, 0.86], 2, "2 validations after step 2,000 brought no better NE"),
        ([0.9, 0.8, 0.85], 2, None),
        ([0.9, 0.8, 0.8, 0.8], 3, None),
        ([0.9, 0.8, 0.85], None, "lowest at step 2,000 (0.8000, at the end 0.8500)"),
        ([0.9, 0.85, 0.8], None, None),
        ([0.9, None, 0.95], None, "lowest at step 1,000 (0.9000, at the end 0.9500)"),
    ],
)
def test_the_best_validation_is_the_first_lowest_and_its_place_is_told(
    tmp_path: Path, nes: list[float | None], patience: int | None, note: str | None
) -> None:
    changes = {"patience = 2": "" if patience is None else f"patience = {patience}"}
    material = read(tmp_path, evaluations=[(1000 * n, ne) for n, ne in enumerate(nes, 1)], changes=changes)
    assert material.best is not None
    known = [ne for ne in nes if ne is not None]
    assert material.best["step"] == 1000 * (1 + nes.index(min(known)))
    texts = " ".join(material.warnings)
    assert ("Training stopped early" in texts or "not the best" in texts) == (note is not None)
    assert note is None or note in texts


def test_the_best_validation_is_of_the_metric_by_which_weights_are_kept(tmp_path: Path) -> None:
    metrics = [{"ne": 0.9, "auc": 0.6}, {"ne": 0.8, "auc": 0.8}, {"ne": 0.7, "auc": 0.7}]
    changes = {"patience = 2": 'stop_on = "auc"'}
    material = read(tmp_path, evaluations=[(10, 0.9), (20, 0.8), (30, 0.7)], changes=changes)
    for record, one in zip(material.evaluations, metrics, strict=True):
        record["tasks"] = {"click": one}
    assert material.best is material.evaluations[1]
    (told,) = [text for text in _warnings(material) if "not the best" in text]
    assert "validation AUC was highest at step 20 (0.8000, at the end 0.7000)" in told
    assert "the step with the highest AUC. At step 20: 0.8000." in str(run._learning(material))
    unknown = read(tmp_path / "other", changes={"patience = 2": "stop_on = [1]"})
    assert unknown.best_words == ("NE", "lowest")


def test_ne_is_averaged_over_tasks_and_waiting_over_time() -> None:
    assert mean_over_tasks({"tasks": {"a": {"ne": 0.5}, "b": {"ne": 1.0}, "c": {"ne": 0.6}}}) == pytest.approx(0.7)
    assert math.isnan(mean_over_tasks({"tasks": {"a": {"ne": 0.5}, "b": {}}}))
    records = [
        {"data_fraction": 0.5, "seconds": 1.0},
        {"data_fraction": 0.1, "seconds": 3.0},
        {"data_fraction": math.nan, "seconds": 100.0},
    ]
    assert share_of_time(records) == pytest.approx(0.8 / 4)
    assert math.isnan(share_of_time([{"data_fraction": 0.5, "seconds": 0.0}]))
    assert [interval_text(pair) for pair in ((0.12344, 0.5), None)] == ["0.1234 to 0.5000", ""]


@pytest.mark.parametrize(("share", "is_warned"), [(0.1, False), (0.125, True)])
def test_waiting_for_data_is_warned_of_above_a_tenth(tmp_path: Path, share: float, is_warned: bool) -> None:
    records = [{"step": 1, "data_fraction": share, "seconds": 1.0}]
    texts = " ".join(read(tmp_path, records).warnings)
    assert ("12 % of the training time went into waiting" in texts) == is_warned


@pytest.mark.parametrize("step", [0, 2**63 - 1, -1, 2**63, True, 1.0, "1"])
def test_steps_are_counts(tmp_path: Path, step: Any) -> None:
    if type(step) is int and 0 <= step < 2**63:
        (record,) = read(tmp_path, [{"step": step}]).train
        assert record["step"] == step
        assert record["examples"] == record["end"] == float(step)
    else:
        with pytest.raises(DataError, match="is no count"):
            read(tmp_path, [{"step": step}])


def test_speed_is_told_with_its_median_its_waiting_and_its_time(tmp_path: Path) -> None:
    speeds = [100.0, 300.0, 200.0, 500.0]
    train = [
        {"step": n, "examples": 10 * n, "examples_per_second": speed, "data_fraction": n / 10, "seconds": 30.0}
        for n, speed in enumerate(speeds, 1)
    ]
    train.append({"step": 9, "examples": 90, "seconds": 1000.0})
    found = run._throughput(read(tmp_path, train, [(1, 0.9), (2, 0.8)]))
    assert found["text"] == "2 min 0 s of training; 4.0 s of validation"
    speed, waiting = found["charts"]
    assert speed.caption == "Median 300 examples per second, without the first record, which holds the start."
    two = run._throughput(read(tmp_path / "two", train[:2]))["charts"][0]
    assert two.caption == "Median 300 examples per second, without the first record, which holds the start."
    assert waiting.caption == "25.0 % of the training time in all."
    assert waiting.chart._y == pytest.approx((0.0, 46.0)), "40 % at most, and air above"
    low = run._throughput(read(tmp_path / "low", [{**one, "data_fraction": 0.01} for one in train]))
    assert low["charts"][1].chart._y == pytest.approx((0.0, 10.5)), "the line at 10 % is always in sight"
    assert low["text"] == "2 min 0 s of training"
    several = [{**one, "exposed_fraction": 0.5, "sent_bytes": 1_500_000} for one in train]
    found = run._throughput(read(tmp_path / "several", several))
    assert found["text"] == "2 min 0 s of training; the first process sent 6.0 MB to others"
    assert found["charts"][2].caption == "50.0 % of the training time in all."


def test_learning_is_drawn_over_examples_with_a_chart_for_each_task(tmp_path: Path) -> None:
    train = [{"step": n, "examples": 100 * n} for n in (1, 2, 3)]
    found = run._learning(read(tmp_path, train, [(1, 0.9), (2, 0.8), (4, 0.85)], tasks=("a", "b")))
    loss, *rest = found
    assert loss is not None
    assert loss.chart._x == (0.0, 400.0)
    assert loss.caption == "Mean of the batches since the last record."
    for figure, text in zip(rest, ("0.8000", "0.9000"), strict=True):
        assert figure is not None
        assert f"averaged over tasks. At step 2: {text}." in figure.caption
        assert f"best mean: {text}" in figure.chart.svg(1)
    assert run._learning(read(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("step", "status", "text"),
    [(0, None, ""), (1200, None, "1,200"), (5, (1300, 2000), "1,300 of 2,000"), (5, (2000, 2000), "2,000")],
)
def test_steps_are_told_with_their_total_until_training_is_complete(
    tmp_path: Path, step: int, status: tuple[int, int] | None, text: str
) -> None:
    material = read(tmp_path, [{"step": step}, {"step": step // 2}])
    material.status = None if status is None else RunStatus("finished", *status)
    assert run._steps(material) == text


def test_features_with_unseen_values_are_named_from_a_thousandth_on() -> None:
    assert run._unseen({"test": {"a": 0.001, "b": 0.0009, "c": 0.25}}) == "a 0.1\u00a0%, c 25.0\u00a0%"
    assert run._unseen({"test": {"b": 0.0}}) == "none"
    assert run._unseen(None) == run._unseen({"test": 3}) == ""


def test_results_of_one_task_are_tiles_and_of_several_a_table(tmp_path: Path) -> None:
    material = read(tmp_path)
    metrics = {"ne": 0.8, "auc": 0.75, "calibration": 1.02, "log_loss": 0.4, "base_rate": 0.3}
    gauc = {"gauc": 0.7, "gauc_groups": 1234.0, "gauc_excluded_groups": 5.0}
    one = TaskEvaluation(metrics | gauc, intervals={"ne": (0.7, 0.9), "gauc": (0.6, 0.8)})
    material.evaluation = Evaluation("test", 12_345, 1.0, 10.0, {"a": one}, level=0.9)
    found = run._results(material)
    assert found["basis"] == "12,345 examples of the test split. Intervals: 90 %, samples are taken as independent."
    assert [tile[:3] for tile in found["tiles"]] == [
        ("NE", "0.8000", "90 %: 0.7000 to 0.9000"),
        ("AUC", "0.7500", "no interval"),
        ("Calibration", "1.0200", "no interval"),
    ]
    assert found["more"] == (
        "log loss 0.4000; GAUC 0.7000 (0.6000 to 0.8000) over 1,234 groups, 5 with one class left out; base rate 0.3000"
    )
    material.evaluation = Evaluation("test", 9, 1.0, 10.0, {"a": one, "b": TaskEvaluation(metrics)})
    found = run._results(material)
    assert found["heads"] == ["Task", "NE", "AUC", "Calibration", "GAUC", "Log loss", "Base rate"]
    assert found["rows"]["a"] == [
        ("0.8000", "0.7000 to 0.9000"), ("0.7500", ""), ("1.0200", ""), ("0.7000", "0.6000 to 0.8000"),
        ("0.4000", ""), ("0.3000", ""),
    ]  # fmt: skip
    assert found["rows"]["b"][3] == ("undefined", "")
    top = {"ndcg": 0.31, "recall": 0.25, "mrr": 0.2}
    top |= {"ranking_k": 5.0, "ranking_groups": 1230.0, "ranking_excluded_groups": 9.0}
    ranked = TaskEvaluation(metrics | top, intervals={"ndcg": (0.3, 0.32)})
    material.evaluation = Evaluation("test", 9, 1.0, 10.0, {"a": ranked}, level=0.9)
    assert run._results(material)["more"] == (
        "log loss 0.4000; of the top 5 of each group by score NDCG 0.3100 (0.3000 to 0.3200), Recall 0.2500, "
        "MRR 0.2000 over 1,230 groups, 9 without a positive left out; base rate 0.3000"
    )
    material.evaluation = Evaluation("test", 9, 1.0, 10.0, {"b": TaskEvaluation(metrics), "a": ranked})
    assert run._results(material)["heads"][5:8] == ["NDCG@5", "Recall@5", "MRR@5"]
    validated = run._results(read(tmp_path / "v", evaluations=[(1000, 0.9), (2000, 0.8)]))
    assert validated["basis"] == "Validation split, best step 2,000."
    assert run._results(read(tmp_path / "none")) == {}


def test_calibration_counts_the_bins_whose_prediction_is_outside() -> None:
    bins = [
        CalibrationBin(10, 10.0, prediction, rate, low, high)
        for prediction, rate, low, high in (
            *((0.1, 0.2, 0.15, 0.3), (0.2, 0.2, 0.2, 0.3), (0.3, 0.3, 0.2, 0.3), (0.5, 0.3, 0.2, 0.4)),
        )
    ]
    figure = scores._calibration(TaskEvaluation({}, calibration=bins))
    assert figure is not None
    assert "2 of 4 bins have a mean prediction outside" in figure.caption
    assert figure.chart._x == figure.chart._y == pytest.approx((0.0, 0.54))
    assert scores._calibration(TaskEvaluation({})) is None


def test_scores_are_shares_of_their_class() -> None:
    histogram = ScoreHistogram([-2.0, -1.0, 0.0, 1.0], [1.0, 3.0, 0.0], [0.0, 0.0, 0.0])
    figure = scores._histogram(TaskEvaluation({}, histogram=histogram))
    assert figure is not None
    assert figure.chart._x == (-2.0, 1.0)
    assert figure.chart._y == pytest.approx((0.0, 81.0)), "three quarters, and air above"


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-6.0, 3.0), (-14.0, 10.0), (2.0, 2.5), (-0.3, 0.3)])
def test_ticks_of_probabilities_stand_at_their_logits_apart_from_one_another(low: float, high: float) -> None:
    ticks = scores._probability_ticks(low, high)
    assert ticks
    places = [place for place, _ in ticks]
    assert places == sorted(places)
    assert all(low <= place <= high for place in places)
    assert all(b - a > (high - low) / 9 for a, b in itertools.pairwise(places))
    for place, text in ticks:
        assert 1 / (1 + math.exp(-place)) == pytest.approx(float(text))


def test_small_segments_are_listed_but_do_not_widen_the_scale() -> None:
    overall = TaskEvaluation({"ne": 0.8, "auc": 0.7})
    segments = {
        "x": Segment(30, False, {"t": {"ne": 0.9, "auc": 0.6, "base_rate": 0.25, "calibration": 1.1}},
                     {"t": {"ne": (0.85, 0.95)}}),
        "y": Segment(10, True, {"t": {"ne": 9.0, "auc": 0.1}}),
    }  # fmt: skip
    evaluation = Evaluation("test", 40, 1.0, 1.0, {"t": overall}, {"f": segments})
    x, y = scores.segments(evaluation)["f"]["t"]
    assert (x["share"], y["share"], x["examples"], y["is_small"]) == (0.75, 0.25, 30, True)
    assert (x["base_rate"], x["calibration"], y["base_rate"]) == ("0.250", "1.100", "undefined")
    assert x["metrics"][0][:2] == ("0.9000", "0.8500 to 0.9500")
    only = Evaluation("test", 40, 1.0, 1.0, {"t": overall}, {"f": {"x": segments["x"]}})
    assert scores.segments(only)["f"]["t"][0]["metrics"] == x["metrics"], "the small segment changes no strip"
    assert scores.segments(None) == {}


def placed(folder: Path, tables: int, reasons: str = "") -> dict[str, Any]:
    shapes = {f"t{n}": (1000 * n, 8) for n in range(1, tables + 1)}
    parts = [TablePart(name, 0, rows, 0, 8, (n % 2,)) for n, (name, (rows, _)) in enumerate(shapes.items())]
    shapes["copied"] = (10, 4)
    parts.append(TablePart("copied", 0, 10, 0, 4, (0, 1)))
    folder.mkdir()
    (folder / "recipe.toml").write_text("seed = 0\n")
    (folder / placement.PLACEMENT_FILE).write_text(Placement(2, shapes, tuple(parts)).to_text())
    if reasons:
        (folder / placement.REASONS_FILE).write_text(reasons)
    return placement.placed_tables(Run(folder))


def test_tables_are_listed_by_size_with_bytes_ranks_and_reasons(tmp_path: Path) -> None:
    found = placed(tmp_path / "a", 3, "t2: it is hot: very\nno reason\n")
    assert found["rows"] == [
        ("t3", "3,000 x 8", "96 kB", "0", "whole"),
        ("t2", "2,000 x 8", "64 kB", "1", "it is hot: very"),
        ("t1", "1,000 x 8", "32 kB", "0", "whole"),
        ("copied", "10 x 4", "160 B", "all", "whole, on every rank"),
    ]
    assert [name for _, name in found["key"]] == ["t3", "t2", "t1", "copied"]
    (tmp_path / "a" / placement.PLACEMENT_FILE).unlink()
    assert placement.placed_tables(Run(tmp_path / "a")) == {}, "a run of one process has none"


def test_a_run_that_goes_on_elsewhere_shows_no_earlier_placement_and_no_earlier_reasons(tmp_path: Path) -> None:
    before = placed(tmp_path / "a", 1, "t1: it is hot\n")
    run = Run(tmp_path / "a")
    run.recipe_file.write_text('[parallel]\nprocesses = 2\nplacement = "auto"\n')
    assert placement.placed_tables(run) == before
    run.recipe_file.write_text('[parallel]\nprocesses = 2\nplacement = "own.json"\n')
    assert [row[-1] for row in placement.placed_tables(run)["rows"]] == ["whole", "whole, on every rank"]
    run.recipe_file.write_text("[parallel]\nprocesses = 1\n")
    assert placement.placed_tables(run) == {}


@pytest.mark.parametrize(("tables", "last"), [(7, "copied"), (8, "2 smaller"), (10, "4 smaller")])
def test_one_table_more_than_there_are_colours_keeps_its_name(tmp_path: Path, tables: int, last: str) -> None:
    found = placed(tmp_path / "a", tables)
    assert len(found["key"]) == 8
    assert found["key"][-1][1] == last
    assert len(found["rows"]) == tables + 1


def test_bytes_of_a_rank_are_those_of_its_parts(tmp_path: Path) -> None:
    shapes = {"a": (100, 8), "b": (10, 8), "c": (20, 4)}
    parts = (
        *(TablePart("a", 0, 60, 0, 8, (0,)), TablePart("a", 60, 40, 0, 4, (0,)), TablePart("a", 60, 40, 4, 4, (1,))),
        *(TablePart("b", 0, 10, 0, 8, (0,)), TablePart("c", 0, 20, 0, 4, (0, 1))),
    )
    one = Placement(2, shapes, parts)
    assert placement._held(one, 0, ["a"]) == {"a": 4.0 * (60 * 8 + 40 * 4), "": 4.0 * (80 + 80)}
    assert placement._held(one, 1, ["a"]) == {"a": 4.0 * 160, "": 4.0 * 80}
    assert placement._ranks(one, "a") == "all"
    assert placement._ranks(one, "b") == "0"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_600, "1 MB"),
        (2.5e6, "2.5 MB"),
        (4e9, "4 GB"),
        (2e12, "2 TB"),
    ],
)
def test_bytes_of_tables_are_in_the_largest_unit_that_they_fill(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_comparison_has_every_figure_under_its_heading(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"r{n}", seed=1, model=name, evaluation=make_evaluation(seed=3), flops=600 * (n + 1))
        for n, name in enumerate(("dlrm", "dcn"))
    ]
    runs[1].write_status("interrupted", 3, 10)
    found = comparison.compare(runs)
    headings, lines = found.cells()
    row = dict(zip(headings, lines[1], strict=True))
    metrics = found.rows[1].metrics["click"]
    assert row == {
        "run": "r1 (not finished)", "seeds": "1", "NE": f"{metrics['ne'].value:.4f}", "NE diff": "+0.00 %",
        "AUC": f"{metrics['auc'].value:.4f}", "calibration": f"{metrics['calibration'].value:.4f}",
        "AUC diff": "+0.0000", "dense parameters": "412,345", "training FLOPs": "1,200",
        "examples/s": f"{found.rows[1].examples_per_second:,.0f}",
        "NDCG": f"{metrics['ndcg'].value:.4f}", "recall": f"{metrics['recall'].value:.4f}",
        "MRR": f"{metrics['mrr'].value:.4f}",
    }  # fmt: skip
    assert "NDCG, recall and MRR: of the top 10 of each group by score." in found.notes
    assert lines[0][headings.index("run")] == "r0"
    assert lines[0][headings.index("NE diff")] == ""


def test_estimates_have_brackets_only_with_an_interval() -> None:
    mean = comparison.SeedMean(0.5, 0.25, 0.75, 3)
    assert comparison._estimate(mean, 2) == "0.50 [0.25, 0.75]"
    assert comparison._estimate(mean, 1, signed=True, unit=" %") == "+0.5 % [+0.2, +0.8]"
    assert comparison._estimate(comparison.SeedMean(0.5), 2) == "0.50"
    assert comparison._estimate(None, 2) == ""
    assert [comparison.SeedMean(0, low, high).excludes_zero for low, high in ((1, 2), (-2, -1), (0, 1), (-1, 0))] == [
        *(True, True, False, False),
    ]
    assert comparison._markdown("a|b\\c\nd") == "a\\|b\\\\c d"


def planned(seconds: float, crossed: Mapping[str, float], copies: int = 1, schedule: str = "plain") -> Any:
    step = SimpleNamespace(parts=dict.fromkeys(CAUSES, seconds / len(CAUSES)), crossed=crossed)
    layout = SimpleNamespace(copies=copies)
    return SimpleNamespace(seconds=seconds, step=step, layout=layout, schedule=schedule)


def test_a_plan_says_in_what_it_differs_and_nothing_else() -> None:
    base = planned(2.0, {"host": 9e9, "region": 5e9, "world": 0.0})
    assert plan.reasons(base, base) == ["Nothing that was searched is faster than the production-like plan."]
    same = planned(1.0, base.step.crossed)
    assert len(plan.reasons(same, base)) == len(CAUSES)
    other = planned(1.0, {"host": 9e9, "region": 1e9, "world": 0.0}, copies=2, schedule="late")
    sentences = plan.reasons(other, base)[len(CAUSES) :]
    assert sentences[0] == "Exchanged between parts of a region: 5.0 GB a step to 1.0 GB."
    assert sentences[1].startswith("Tables: ")
    assert sentences[2:] == ["Order of a step: late; production-like: plain."]


def test_a_trace_names_the_thread_of_every_stream_in_one_process() -> None:
    timeline: Any = [
        SimpleNamespace(name=f"{stream} it", cause=cause, stream=stream, start=0.5 * n, seconds=0.25)
        for n, (stream, cause) in enumerate(zip(STREAMS, CAUSES, strict=False))
    ]
    events = json.loads(plan.chrome_trace(timeline))["traceEvents"]
    threads = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    assert {one["pid"] for one in events} == {0}
    assert sorted(threads.values()) == sorted(STREAMS)
    drawn = [one for one in events if one["ph"] == "X"]
    assert [(threads[one["tid"]], one["ts"], one["dur"]) for one in drawn] == [
        (stream, 5e5 * n, 2.5e5) for n, stream in enumerate(STREAMS)
    ]
