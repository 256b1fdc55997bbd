"""Comparisons pair runs by seed, and say so when there is nothing to conclude."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from cordillera.errors import DataError
from cordillera.reports.ranking.comparison import compare, mean_interval
from cordillera.reports.studies import comparison_page
from cordillera.run import Run
from cordillera.training.ranking.evaluation import Evaluation, evaluate
from cordillera.training.ranking.paired_change import ScoredSamples, paired_differences
from tests.training.sample_runs import batches, click_data, make_run


def evaluation(noise: float, tasks: tuple[str, ...] = ("click",)) -> Evaluation:
    """One test split, scored with more or less noise."""
    logits, labels = click_data(0, 800, len(tasks))
    random = np.random.default_rng(int(noise * 1e6))
    scores = logits + noise * random.normal(size=logits.shape).astype(np.float32)
    return evaluate(lambda batch: batch.dense, batches(scores.astype(np.float32), labels), tasks)


def family(folder: Path, model: str, noises: dict[int, float]) -> list[Run]:
    return [
        make_run(folder / f"{model}-{seed}", seed=seed, model=model, evaluation=evaluation(noise))
        for seed, noise in noises.items()
    ]


def test_runs_of_one_recipe_are_one_row_and_differences_are_paired_by_seed(tmp_path: Path) -> None:
    base = family(tmp_path, "dlrm", {1: 0.9, 2: 1.2, 3: 1.0})
    other = family(tmp_path, "wukong", {3: 0.5, 1: 0.4, 2: 0.6})
    result = compare([*base, *other])
    assert [(row.model, row.seeds) for row in result.rows] == [("dlrm", [1, 2, 3]), ("wukong", [3, 1, 2])]

    def ne(runs: list[Run]) -> dict[int, float]:
        evaluations = [Evaluation.from_json((run.folder / "evaluation.json").read_text()) for run in runs]
        return {int(run.name[-1]): e.metrics()["click"]["ne"] for run, e in zip(runs, evaluations, strict=True)}

    first, second = ne(base), ne(other)
    percent = np.array([100 * (second[seed] / first[seed] - 1) for seed in (1, 2, 3)])
    found = result.rows[1].differences["click"]["relative_ne"]
    expected = stats.t.interval(0.95, 2, percent.mean(), stats.sem(percent))
    assert (found.value, found.low, found.high) == pytest.approx((percent.mean(), *expected))
    assert found.count == 3
    assert found.excludes_zero
    assert result.rows[0].differences == {}
    assert result.rows[1].parameters == 412_345
    assert result.rows[1].examples_per_second == pytest.approx(61_000, rel=0.05)


def test_one_seed_gives_a_difference_without_interval_and_says_so(tmp_path: Path) -> None:
    result = compare([*family(tmp_path, "dlrm", {1: 0.9}), *family(tmp_path, "wukong", {1: 0.4})])
    found = result.rows[1].differences["click"]["auc"]
    assert found.value > 0
    assert math.isnan(found.low)
    assert not found.excludes_zero
    assert any("One seed gives no interval" in note for note in result.notes)


def test_without_a_common_seed_there_is_no_difference(tmp_path: Path) -> None:
    result = compare([*family(tmp_path, "dlrm", {1: 0.9}), *family(tmp_path, "wukong", {2: 0.4})])
    assert result.rows[1].differences == {}
    assert any("share no seed" in note for note in result.notes)


def test_seeds_that_differences_are_over_are_named(tmp_path: Path) -> None:
    base, other = family(tmp_path, "dlrm", {1: 0.9, 2: 1.0}), family(tmp_path, "wukong", {1: 0.4, 2: 0.5, 3: 0.6})
    result = compare([*base, *other])
    assert result.rows[1].differences["click"]["auc"].count == 2
    assert any("are over the seeds that both have (1, 2)" in note for note in result.notes)


def test_undefined_metrics_stay_undefined(tmp_path: Path) -> None:
    def dead() -> Evaluation:
        logits, labels = click_data(0, 50, 1)
        return evaluate(lambda batch: batch.dense, batches(logits, labels * 0), ["click"])

    runs = [make_run(tmp_path / f"r{seed}", seed=seed, evaluation=dead()) for seed in (1, 2)]
    result = compare(runs)
    assert math.isnan(result.rows[0].metrics["click"]["ne"].value)
    assert "undefined" in result.to_markdown()
    assert json.loads(result.to_json())["rows"][0]["metrics"]["click"]["ne"]["value"] is None


def test_the_table_reads_the_same_in_all_forms(tmp_path: Path) -> None:
    names = ("click", "buy|now")
    runs = [make_run(tmp_path / f"m{s}", names, seed=s, evaluation=evaluation(0.1 * s, names)) for s in (1, 2)]
    result = compare(runs)
    markdown = result.to_markdown()
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert "buy\\|now" in lines[3]
    assert {line.replace("\\|", "").count("|") for line in lines} == {12}
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.to_table())
    assert "buy|now" in console.export_text()
    assert json.loads(result.to_json())["tasks"] == list(names)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run"):
        compare([])
    a = make_run(tmp_path / "a", seed=1, evaluation=evaluation(0.1))
    twin = make_run(tmp_path / "b", seed=1, evaluation=evaluation(0.2))
    with pytest.raises(DataError, match="same recipe and seed"):
        compare([a, twin])
    elsewhere = make_run(tmp_path / "c", seed=2)
    with pytest.raises(DataError, match="evaluated on other data"):
        compare([a, elsewhere])
    other_task = make_run(tmp_path / "d", ("buy",), seed=2, evaluation=evaluation(0.1, ("buy",)))
    with pytest.raises(DataError, match="share no task"):
        compare([a, other_task])
    (twin.folder / "evaluation.json").unlink()
    with pytest.raises(DataError, match=r"has no evaluation\.json"):
        compare([twin])


def test_mean_intervals_are_students() -> None:
    low, high = stats.t.interval(0.9, 3, 2.5, stats.sem([1, 2, 3, 4]))
    found = mean_interval([1, 2, 3, 4], 0.9)
    assert (found.value, found.low, found.high, found.count) == pytest.approx((2.5, low, high, 4))
    assert math.isnan(mean_interval([]).value)
    assert math.isnan(mean_interval([1.0, math.nan]).value)


def scored(noise: float) -> tuple[Evaluation, ScoredSamples]:
    """A file's samples, scored with more or less noise."""
    logits, labels = click_data(1, 900, 1)
    scores = (logits + noise * np.random.default_rng(8).normal(size=logits.shape)).astype(np.float32)
    found = evaluate(lambda batch: batch.dense, batches(scores, labels), ["click"], split="week.csv")
    return found, ScoredSamples(("click",), scores, labels.astype(np.float32))


def test_runs_that_scored_the_same_samples_have_intervals_over_them(tmp_path: Path) -> None:
    runs = [
        *family(tmp_path, "dlrm", {1: 0.9}),
        *family(tmp_path, "wukong", {1: 0.4}),
        *family(tmp_path, "dcn", {2: 9}),
    ]
    found, samples = zip(*map(scored, (0.9, 0.4, 2.0)), strict=True)
    result = compare(runs, found, samples=samples)
    paired, unit = paired_differences([(samples[1], samples[0])], "click")
    assert result.rows[1].over_samples == {"click": paired}
    assert (result.unit, unit) == ("sample", "sample")
    assert result.rows[2].over_samples["click"]["auc"].high < 0  # though it shares no seed with the first
    assert result.rows[0].over_samples == {}
    headings, lines = result.cells()
    row = dict(zip(headings, lines[1], strict=True))
    assert "NE diff" not in row
    ne = paired["relative_ne"]
    assert row["NE diff (samples)"] == f"{ne.value:+.2f} % [{ne.low:+.2f}, {ne.high:+.2f}]"
    assert row["calibration diff (samples)"].startswith(f"{paired['calibration'].value:+.4f} [")
    text = result.to_markdown()
    assert "wukong-1 is better than dlrm-1 by the NE of click: -" in text
    assert "dcn-2 is worse than dlrm-1 by the NE of click: +" in text
    assert "how much they would vary with other samples of the same kind, not with other seeds" in text
    assert json.loads(result.to_json())["rows"][1]["over_samples"]["click"]["relative_ne"]["low"] == ne.low
    page = comparison_page(result)
    assert "Differences of NE (samples)" in page
    assert f"{ne.low:+.2f} to {ne.high:+.2f}" in page
    same = compare(runs[:2], [found[0]] * 2, samples=[samples[0]] * 2)
    assert any("wukong-1 is neither better nor worse than dlrm-1" in note for note in same.notes)


def test_samples_of_one_class_give_no_interval_and_say_so(tmp_path: Path) -> None:
    runs = [*family(tmp_path, "dlrm", {1: 0.9}), *family(tmp_path, "wukong", {1: 0.4})]
    scores = np.zeros((30, 1), np.float32)
    found = evaluate(lambda batch: batch.dense, batches(scores, scores), ["click"])
    result = compare(runs, [found] * 2, samples=[ScoredSamples(("click",), scores, scores)] * 2)
    assert result.unit is None
    assert "NE diff" in result.cells()[0]
    assert any("the NE of click has no interval over these samples" in note for note in result.notes)


def test_intervals_over_seeds_and_over_samples_stand_side_by_side(tmp_path: Path) -> None:
    runs = [*family(tmp_path, "dlrm", {1: 0.9, 2: 0.8}), *family(tmp_path, "wukong", {1: 0.4, 2: 0.5})]
    found, samples = zip(*map(scored, (0.9, 0.8, 0.4, 0.5)), strict=True)
    result = compare(runs, found, samples=samples)
    headings, lines = result.cells()
    row = dict(zip(headings, lines[1], strict=True))
    assert {"NE diff", "NE diff (samples)"} <= row.keys()
    assert row["NE diff"].partition(" [")[0] == row["NE diff (samples)"].partition(" [")[0]
    assert row["NE diff"] != row["NE diff (samples)"]
    assert result.rows[1].ne_difference("click") == result.rows[1].over_samples["click"]["relative_ne"]
    alone = compare(runs)
    assert alone.rows[1].ne_difference("click") == alone.rows[1].differences["click"]["relative_ne"]
    assert compare(runs[1:3]).rows[1].ne_difference("click") is None


def test_comparisons_and_records_are_tables_of_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    runs = [*family(tmp_path, "dlrm", {1: 0.9}), *family(tmp_path, "wukong", {1: 0.4})]
    headings, lines = compare(runs).cells()
    assert list(pandas.DataFrame(lines, columns=headings)["run"]) == ["dlrm-1", "wukong-1"]
    records = pandas.json_normalize(list(runs[0].metrics()))  # as docs/own-logs.md has it
    assert records["tasks.click.ne"].notna().any()


def test_one_recipe_trained_again_on_new_data_is_compared_on_a_file(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=1, evaluation=evaluation(0.1)) for name in ("monday", "sunday")]
    with pytest.raises(DataError, match="same recipe and seed"):
        compare(runs)
    found, samples = zip(*map(scored, (0.9, 0.4)), strict=True)
    assert [row.name for row in compare(runs, found, samples=samples).rows] == ["monday", "sunday"]
    with pytest.raises(DataError, match="same recipe and seed"):
        compare([runs[0]] * 2, found, samples=samples)


def test_other_seeds_on_new_data_are_no_repetitions(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"day-{seed}", seed=seed, evaluation=evaluation(0.1)) for seed in (1, 2)]
    found, samples = zip(*map(scored, (0.9, 0.4)), strict=True)
    assert [row.seeds for row in compare(runs, found, samples=samples).rows] == [[1, 2]]
    for run in runs:
        model = json.loads((run.folder / "model.json").read_text())
        model["data"] = {**model.get("data", {}), "fingerprint": run.name}
        (run.folder / "model.json").write_text(json.dumps(model))
    assert [row.name for row in compare(runs, found, samples=samples).rows] == ["day-1", "day-2"]


def test_runs_on_other_data_are_all_named(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", seed=1, evaluation=evaluation(0.1))]
    runs += [make_run(tmp_path / f"b{seed}", seed=seed) for seed in (2, 3)]
    with pytest.raises(DataError, match=r"b2: was evaluated on other data than a: .*\(and so were b3\)") as error:
        compare(runs)
    assert error.value.remedy is not None
    assert "--file FILE" in error.value.remedy
    assert "leave out b2, b3" in error.value.remedy
