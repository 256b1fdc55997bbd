"""Reports are one safe file, complete when the run is and honest when it is not."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from cordillera.errors import DataError
from cordillera.numbers import compact
from cordillera.reports.charts import POINTS, Axis, Chart, nice_ticks, padded
from cordillera.reports.ranking.run import render, write_report
from cordillera.run import Run
from cordillera.training.ranking.evaluation import evaluate
from tests.training.sample_runs import batches, click_data, make_evaluation, make_run

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.mark.parametrize("tasks", [("click",), ("income", "married", "gain")])
def test_a_report_is_one_self_contained_well_formed_file(tmp_path: Path, tasks: tuple[str, ...]) -> None:
    run = make_run(tmp_path / "run", tasks)
    path = write_report(run)
    assert path == run.folder / "report.html"
    content = path.read_text()
    assert len(content) < 1_000_000
    page = Page(content)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert "url(" not in re.sub(r"url\(#c\d+\)", "", content)
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert "prefers-color-scheme: dark" in content
    assert "@media print" in content
    assert not list(run.folder.glob(".report*"))


def test_the_report_shows_what_the_run_holds(tmp_path: Path) -> None:
    result = make_evaluation()
    said = Page(render(make_run(tmp_path / "my-run", evaluation=result))).said()
    metrics, intervals = result.metrics()["click"], result.tasks["click"].intervals
    for name in ("ne", "auc", "calibration"):
        assert f"{metrics[name]:.4f}" in said
        assert f"{intervals[name][0]:.4f} to {intervals[name][1]:.4f}" in said
    expected = [
        *("my-run", "Wukong on movielens-100k", "For research; no redistribution", "312 of 10,000 test rows"),
        *("412,345", "61,824", "200,000", "1,200,000", "2.13.0+cpu", "seed = 0", "cordillera train recipe.toml"),
        *("best 0.8748", "stopped early", "under 18", "few", "4.0 % of the training time"),
    ]
    for text in expected:
        assert text in said, text


def test_every_task_is_shown(tmp_path: Path) -> None:
    tasks = ("income", "married", "gain")
    page = Page(render(make_run(tmp_path / "run", tasks)))
    for task in tasks:
        assert f"Validation NE: {task}" in page.said()
    titles = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(titles) == 1 + 3 + 2 * 3 + 2


@pytest.mark.parametrize("steps", [5 * POINTS, 10 * POINTS])
def test_a_chart_says_how_many_records_a_point_stands_for(tmp_path: Path, steps: int) -> None:
    """One record is written every five steps."""
    said = Page(render(make_run(tmp_path / "run", steps=steps))).said()
    expected = "Mean of the batches since the last record" if steps == 5 * POINTS else "Mean of 2 records a point"
    assert expected in said


def test_charts_have_names_for_those_who_cannot_see_them(tmp_path: Path) -> None:
    page = Page(render(make_run(tmp_path / "run")))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        if tag == "svg":
            if attributes.get("aria-hidden"):
                continue
            assert attributes["role"] == "img"
            assert len(attributes["aria-label"] or "") > 10


def test_untrusted_names_stay_text(tmp_path: Path) -> None:
    evil = "\"><script>alert(1)</script><b a='&[/x]{{ 1 }}"
    logits, labels = click_data(0, 300, 2)
    result = evaluate(
        lambda batch: batch.dense,
        batches(logits, labels),
        [evil, "plain"],
        segments={evil + "f": (np.arange(300) % 2, [evil + "v", ""])},
    )
    run = make_run(tmp_path / "r", (evil, "plain"), evaluation=result)
    card = json.loads((run.folder / "model.json").read_text())
    card["name"] = card["data"]["facts"]["terms"] = card["data"]["facts"]["warnings"][0] = evil
    card["config"] = {evil: evil}
    (run.folder / "model.json").write_text(json.dumps(card))
    (run.folder / "environment.json").write_text(json.dumps({"processor": evil, "libraries": {evil: evil}}))
    (run.folder / "recipe.toml").write_text(f"description = {json.dumps(evil)}\n# {evil}\n")
    page = Page(render(run))
    assert not {tag for tag, _ in page.tags} & {"script", "b"}
    assert page.said().count("<script>alert(1)</script>") > 10
    assert "(blank)" in page.said()


def test_an_unfinished_run_has_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("evaluation.json", "model.json", "environment.json"):
        (run.folder / name).unlink()
    said = Page(render(run)).said()
    assert "test split has not been evaluated" in said
    assert "no model.json" in said
    assert "0.8748" in said
    (run.folder / "metrics.jsonl").unlink()
    assert "Nothing has been evaluated yet" in Page(render(Run(run.folder))).said()


def test_what_is_undefined_is_called_undefined(tmp_path: Path) -> None:
    logits, labels = click_data(0, 100, 1)
    result = evaluate(lambda batch: batch.dense, batches(logits, labels * 0), ["click"])
    run = make_run(tmp_path / "run", evaluation=result)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train" and line["step"] in (50, 55):
            line["loss"] = None
        if line["kind"] == "evaluation" and line["step"] == 75:
            line["tasks"]["click"]["ne"] = None
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = render(run)
    said = Page(page).said()
    assert "undefined" in said
    assert "Undefined on the test split for task click: NE (no positive labels)" in said
    assert "2 of 120 records of the training loss are not finite" in said
    assert "NE was undefined or infinite in 1 of 8 validations" in said
    assert "nan" not in re.sub(r"<style>.*</style>", "", page, flags=re.DOTALL).lower().replace("finance", "")


def test_infinite_metrics_do_not_break_charts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = (run.folder / "metrics.jsonl").read_text()
    first = next(line for line in text.splitlines() if '"evaluation"' in line)
    broken = json.loads(first)
    broken["tasks"]["click"]["ne"] = "Infinity"
    (run.folder / "metrics.jsonl").write_text(text.replace(first, json.dumps(broken)))
    assert "1 of 8 validations" in Page(render(run)).said()


@pytest.mark.slow
def test_long_runs_keep_reports_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=80_000)
    assert len(render(run)) < 150_000


def test_progressive_windows_are_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with open(run.folder / "metrics.jsonl", "a") as file:
        for end in (1000, 2000, 3000):
            record = {"kind": "progressive", "step": end // 100, "begin": end - 1000, "end": end}
            file.write(json.dumps(record | {"tasks": {"click": {"ne": 0.9 - end / 1e5}}}) + "\n")
    assert "Predict, then train" in Page(render(run)).said()


def test_broken_files_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.folder / "model.json").write_text("{")
    with pytest.raises(DataError, match=r"model\.json: is not JSON"):
        write_report(run)
    assert not (run.folder / "report.html").exists()


def test_equal_runs_give_equal_reports(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert render(run) == render(run)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.871, 0.913), (0, 612_345), (-3, 17), (1e-9, 3e-9)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 4 <= len(ticks) <= 10
    assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in ticks)


def test_ranges_hold_the_values() -> None:
    assert padded([]) == (0.0, 1.0)
    assert padded([math.nan, 2.0])[0] < 2.0 < padded([math.nan, 2.0])[1]
    assert nice_ticks(1, 1) == [1]


def test_counts_are_short() -> None:
    assert [compact(value) for value in (0, 950, 12_345, 999_999, 4e6, 1.7e9, math.nan)] == [
        "0", "950", "12.3k", "1M", "4M", "1.7G", "n/a",
    ]  # fmt: skip


def test_lines_break_where_values_are_missing() -> None:
    chart = Chart("t", "d", Axis((0, 3)), Axis((0, 1)), ("x", "y"))
    chart.line([0, 1, 2, 3], [0.1, math.nan, 0.3, 0.4])
    path = re.search(r'class="line s0" d="([^"]+)"', chart.svg(1))
    assert path is not None
    assert path.group(1).count("M") == 2


def test_the_best_possible_ne_is_drawn_where_it_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    card = json.loads((run.folder / "model.json").read_text())
    card["data"]["facts"] |= {"bayes_ne": 0.81, "bayes_ne_by_split": {"validation": 0.82}}
    card["data"]["facts"]["unseen"] = {"test": {"user": 0.874, "hour": 0.0}}
    (run.folder / "model.json").write_text(json.dumps(card))
    said = Page(render(run)).said()
    assert "Bayes-optimal" in said
    assert "0.81" in said
    assert "user 87.4 %" in said


@pytest.mark.parametrize("has_groups", [True, False])
def test_several_tasks_have_columns_of_groups_if_any_has_them(tmp_path: Path, has_groups: bool) -> None:
    logits, labels = click_data(0, 2000, 2)
    groups = np.random.default_rng(0).integers(0, 50, 2000) if has_groups else None
    tasks = ("click", "buy")
    found = evaluate(lambda batch: batch.dense, batches(logits, labels, groups=groups), tasks)
    page = render(make_run(tmp_path / "run", tasks, evaluation=found))
    head = re.search(r"<tr><th scope=\"col\">Task</th>.*?</tr>", page, re.DOTALL)
    assert head is not None
    names = re.findall(r"<th scope=\"col\">(.*?)</th>", head.group())
    gauc = ["GAUC"] if has_groups else []
    top = ["NDCG@10", "Recall@10", "MRR@10"] if has_groups else []
    assert names == ["Task", "NE", "AUC", "Calibration", *gauc, "Log loss", *top, "Base rate"]
