"""Reports of language runs are one safe file that says what the run's files hold, and what they do not."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cordillera.distributed.mesh import DIMENSIONS, ParallelConfig, ranks_of
from cordillera.errors import DataError, RunError
from cordillera.reports.charts import LINEAR, POINTS, Axis, Series, log_ticks, stacked_bar
from cordillera.reports.language.run import _norms, render, write_language_report
from cordillera.reports.language.warnings import find_warnings
from cordillera.run import Run
from cordillera.training.language.records import LanguageRecords, mean, share, total
from tests.reports.test_plan_page import browse, with_look
from tests.reports.test_ranking_report import Page
from tests.training.sample_language_runs import (
    Record,
    make_evaluation,
    make_language_run,
    make_model,
    make_records,
    write_records,
)

SECTIONS = ["Learning", "Balance of the data", "Speed", "Memory", "Events", "The model", "How to reproduce"]


def headings(page: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<h2>(.*?)</h2>", page)]


def warned(run: Run) -> str:
    return " ".join(find_warnings(LanguageRecords(run)))


def changed(records: list[Record], **changes: Any) -> list[Record]:
    """Records whose training says otherwise; a function is of the record."""
    return [
        record | {key: new(record) if callable(new) else new for key, new in changes.items()}
        if record["kind"] == "train"
        else record
        for record in records
    ]


def test_a_report_is_one_self_contained_well_formed_file(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "run")
    path = write_language_report(run)
    assert path == run.folder / "report.html"
    content = path.read_text()
    page = Page(content)
    assert headings(content) == SECTIONS
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert "url(" not in re.sub(r"url\(#c\d+\)", "", content)
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert not list(run.folder.glob(".report*"))
    assert render(run) == content


def test_everything_drawn_or_scrolled_has_a_name(tmp_path: Path) -> None:
    page = Page(render(make_language_run(tmp_path / "run")))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 9  # three of learning, two of balance, two of speed and its bar, memory
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert attributes["aria-label"]
    scrolled = [attributes for _, attributes in page.tags if attributes.get("class") == "scroll"]
    assert len(scrolled) == 4
    assert all(one.get("tabindex") == "0" and one.get("role") == "group" and one.get("aria-label") for one in scrolled)


def test_the_report_shows_what_the_run_holds(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "my-run")
    records = [record for record in make_records(1000) if record["kind"] == "train"]
    seconds = sum(record["seconds"] for record in records)
    speed = sum(record["tokens_per_second"] * record["seconds"] for record in records) / seconds
    said = Page(render(run)).said()
    loss = 1.9 + 0.36
    expected = [
        *("my-run", "Llama of 135M parameters on 4 processes", f"{loss:.4f}", f"perplexity {math.exp(loss):,.4g}"),
        *(f"{loss / math.log(2) / 4.4:.4f} bits a byte", "131M", "61,000 documents in 1,000 steps"),
        *(f"{speed / 1000:.1f}k", f"{100 * speed * 8.4e8 / 1e14:.1f} %", "of 1,000", "resumed once"),
        *(f"{seconds // 60:.0f} min", "497, 498", "loss not finite; gradient norm not finite", "on 4 processes"),
        *(
            "134,515,008",
            "shard 2 \u00d7 context 2",
            "bf16",
            "per document",
            "smollm2, fingerprint 3f1a9c0be2d4, 49,152 vocab size",
        ),
        *("letters/*.txt, 411,833 documents", "report: 420,000 documents, 412,345 kept, dropped: 7,655 empty"),
        *("cordillera train recipe.toml --nproc 4", "seed = 0", "2.13.0+cpu", "71 % was hidden", "clip"),
        *("Evaluated on the validation split at step 1,000",),
    ]
    assert "near duplicate" not in said
    assert "/cache" not in said
    for text in expected:
        assert text in said, text
    assert "Not recorded" not in said
    assert "skipped steps: 2." in render(run), "for readers who cannot see the chart"
    assert '<ul class="notes"' not in render(run)


def test_the_bar_adds_up_to_the_time(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "run")
    records = make_records(1000)
    train = [record for record in records if record["kind"] == "train"]
    stepping = sum(record["seconds"] for record in train)
    exposed, waiting = (sum(record[key] for record in train) for key in ("exposed_seconds", "data_seconds"))
    stood = sum(record["seconds"] for record in records if record["kind"] == "checkpoint")
    validating = sum(record["seconds"] for record in records if record["kind"] == "evaluation")
    expected = [stepping - exposed - waiting, exposed, waiting, stood, validating]
    (bar,) = re.findall(r'<svg class="bar".*?</svg>', render(run))
    found = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', bar)]
    whole, at = sum(expected), 0.0
    assert len(found) == 5
    for (x, width), seconds in zip(found, expected, strict=True):
        assert x == pytest.approx(1000 * at / whole, abs=0.02)
        assert width == pytest.approx(1000 * seconds / whole, abs=0.02)
        at += seconds
    assert "overlap" not in Page(render(run)).said()
    write_records(run, changed(records, exposed_seconds=lambda one: one["seconds"], data_seconds=1.0))
    assert "They overlap" in Page(render(run)).said()


def test_empty_parts_of_a_bar_are_left_out() -> None:
    bar = stacked_bar("<t>", [("s0", 3.0), ("s1", 0.0), ("s2", 1.0), ("s3", math.nan), ("s4", -1.0)])
    assert re.findall(r'class="(s\d)" x="([\d.]+)" y="0" width="([\d.]+)"', bar) == [
        ("s0", "0", "750"),
        ("s2", "750", "250"),
    ]
    assert "<t>" not in bar


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss": lambda one: None if one["step"] > 980 else one["loss"]}, "2 of 100 records of the training loss"),
        ({"loss": lambda one: one["loss"] + one["step"] / 300}, "training loss is rising"),
        ({"skipped": 11}, "11 of 1,000 steps were skipped"),
        ({"imbalance": 1.31}, "1.31 times the work"),
        ({"data_seconds": lambda one: 0.12 * one["seconds"]}, "12 % of the training time went into waiting for data"),
        ({"exposed_seconds": lambda one: 0.4 * one["seconds"]}, "40 % of the training time went into communication"),
        ({"mfu": 0.123}, "12.3 % of the devices' peak"),
        ({"mfu": 1.6}, "160 % of the devices' peak (MFU), which cannot be"),
    ],
)
def test_what_is_worth_a_look_is_said(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    run = make_language_run(tmp_path / "run")
    assert warned(run) == ""
    write_records(run, changed(make_records(1000), **changes))
    assert text in warned(run)
    assert len(find_warnings(LanguageRecords(run))) == 1
    assert text in Page(render(run)).said()


def test_limits_of_warnings_are_not_warned_of(tmp_path: Path) -> None:
    at = {"imbalance": 1.2, "mfu": 0.2, "skipped": 10}
    records = changed(make_records(1000), **at, seconds=1.0, data_seconds=0.1, exposed_seconds=0.3)
    assert warned(make_language_run(tmp_path / "run", records=records)) == ""
    noisy = changed(make_records(1000), loss=lambda one: 2.0 + 0.3 * math.sin(one["step"]))
    assert "rising" not in warned(make_language_run(tmp_path / "noisy", records=noisy))


def test_validation_is_judged(tmp_path: Path) -> None:
    records = [record for record in make_records(1000) if record["kind"] != "evaluation"]
    losses = [2.4, 2.2, 2.3]
    for number, loss in enumerate(losses, 1):
        place = {"step": 300 * number, "tokens": 300 * number * 131_072}
        records.append({"kind": "evaluation", "split": "validation", **place, **make_evaluation(loss)})
    run = make_language_run(tmp_path / "run", records=records)
    assert "lowest at step 600 (2.2000) and is 2.3000 at the end" in warned(run)
    page = render(run)
    assert page.count('<span class="tag">lowest</span>') == 1
    (run.folder / "evaluation.json").unlink()
    said = Page(render(run)).said()
    assert "figures are of the last one, at step 900" in said
    assert "2.3000" in said
    write_records(run, [record for record in records if record["kind"] != "evaluation"])
    said = Page(render(run)).said()
    assert "No validation" in said
    assert "Not recorded: validation loss." in said
    run.write_json("evaluation.json", {"kind": "language", "split": "books", "step": 500, **make_evaluation(2.5)})
    said = Page(render(run)).said()
    assert "Books loss 2.5000" in said
    assert "is of step 500; training has gone on to step 1,000" in said


@pytest.mark.parametrize(
    ("ended", "why", "said"),
    [
        ("failed", "the loss was lost", "training failed at step 105 of 1,000. the loss was lost"),
        ("interrupted", "", "training was interrupted at step 105 of 1,000; it can be resumed"),
        (None, "", "training runs, or was killed; its newest checkpoint is of step 104 of 1,000"),
    ],
)
def test_a_run_that_has_not_finished_says_so_first_and_counts_its_steps(
    tmp_path: Path, ended: str | None, why: str, said: str
) -> None:
    """Records of training end at step 100; five steps were skipped since."""
    records = make_records(100) + [{"kind": "skipped", "step": 101 + n, "tokens": 13e6, "loss": None} for n in range(5)]
    run = make_language_run(tmp_path / "run", 1000, records)
    (run.folder / "evaluation.json").unlink()
    run.write_status(ended, 105, 1000, why)
    (run.checkpoints / "step-000000104").mkdir(parents=True)
    text = Page(render(run)).said()
    assert f"This run is not finished: {said}" in text
    assert text.index("not finished") < text.index("Tokens trained")
    assert "105 of 1,000 steps" in text
    assert re.search(r"Steps skipped\D*\d+\s*of 105", text), text
    run.write_status("finished", 105, 105)
    assert "not finished" not in Page(render(run)).said()


def test_a_loss_that_is_not_finite_is_told_by_name(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "run")
    run.write_json("evaluation.json", {"kind": "language", "split": "validation", "step": 1000, "loss": None})
    text = Page(render(run)).said()
    assert "Validation loss not finite NaN or infinity" in " ".join(text.split())
    assert "is NaN or infinite: the model is of no use" in text


def test_several_splits_are_several_lines(tmp_path: Path) -> None:
    records = make_records(1000)
    records += [record | {"split": "code"} for record in records if record["kind"] == "evaluation"]
    page = render(make_language_run(tmp_path / "run", records=records))
    assert '<path class="line s1"' in page
    assert '<path class="line s2"' in page
    assert "code, step 1,000" in Page(page).said()


def test_shares_of_right_answers_are_drawn_where_they_were_measured(tmp_path: Path) -> None:
    assert "Right answers" not in render(make_language_run(tmp_path / "plain"))
    records = changed(make_records(1000), accuracy=0.75)
    records = [one | {"measures": {"accuracy": 0.5}} if one["kind"] == "evaluation" else one for one in records]
    run = make_language_run(tmp_path / "run", records=records)
    run.write_json("model.json", make_model() | {"objective": "dpo"})
    said = " ".join(Page(render(run)).said().split())
    assert "better answers preferred, training" in said
    assert "better answers preferred, validation" in said
    assert "nats a pair" in said
    assert "nats a token" not in said


def test_a_run_without_anything_has_a_report_that_says_so(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "run", records=[])
    for name in ("evaluation.json", "model.json", "environment.json", "metrics.jsonl"):
        (run.folder / name).unlink()
    page = render(run)
    said = Page(page).said()
    assert headings(page) == ["Results", "How to reproduce"]
    missing = ("Nothing has been trained yet", "No validation", "no model.json", "no environment.json")
    for text in (*missing, "gradient norm", "MFU", "memory", "checkpoints"):
        assert text in said, text
    assert "<svg" not in page


@pytest.mark.parametrize("key", sorted(set(make_records(100)[0]) - {"kind"}))
def test_what_was_not_recorded_is_left_out(tmp_path: Path, key: str) -> None:
    run = make_language_run(tmp_path / "run", records=changed(make_records(100), **{key: None}))
    page = render(run)
    Page(page)
    named = {
        "loss": "training loss", "gradient_norm": "gradient norm", "mfu": "MFU", "imbalance": "imbalance",
        "memory_bytes": "memory", "data_seconds": "waiting for data", "delay": "token delay",
    }  # fmt: skip
    if key in named:
        assert named[key] in re.search(r"Not recorded: ([^<]*)\.</p>", page)[1].split(", ")  # type: ignore[index]
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<style>.*</style>", "", page, flags=re.DOTALL))


def test_one_record_is_told_and_not_drawn(tmp_path: Path) -> None:
    record = make_records(100)[0]
    page = render(make_language_run(tmp_path / "run", records=[record]))
    assert "<circle" not in page
    told = re.findall(r'<p class="only">([^<]+)</p>', page)
    assert len(told) == 8
    assert f"training tokens {record['tokens']:,}: training {record['loss']:.4g} (nats a token)" in told
    assert headings(page) == [name for name in SECTIONS if name != "Events"]


def test_without_a_peak_arithmetic_is_shown_instead_of_mfu(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "run", records=changed(make_records(1000), mfu=None))
    said = Page(render(run)).said()
    assert "no MFU: the devices' peak is not known" in said
    assert "devices' peak (MFU)" not in said
    assert "Useful arithmetic of all processes together" in said


NUMBERS = st.one_of(st.none(), st.floats(min_value=0), st.floats(0.001, 1e6), st.integers(0, 10**7), st.just(math.nan))


@st.composite
def some_records(draw: st.DrawFn) -> list[Record]:
    known = make_records(100)
    kinds = {record["kind"]: list(record) for record in known}
    records = []
    for kind in draw(st.lists(st.sampled_from([*kinds, "other"]), max_size=12)):
        keys = [key for key in kinds.get(kind, ["step"]) if key not in ("kind", "split")]
        records.append({"kind": kind} | draw(st.dictionaries(st.sampled_from(keys), NUMBERS)))
    return records


@given(records=some_records())
@settings(max_examples=40)
def test_any_numbers_give_a_page_without_nan(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    run = make_language_run(tmp_path_factory.mktemp("any") / "run", records=[])
    write_records(run, records)
    page = render(run)
    Page(page)
    body = re.sub(r"<style>.*</style>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b", body, re.IGNORECASE)
    for drawing in re.findall(r"<svg.*?</svg>", body, re.DOTALL):
        assert not re.search(r"\binf", re.sub(r"<(desc|title).*?</\1>|aria-label=\"[^\"]*\"", "", drawing))


def test_untrusted_texts_stay_text(tmp_path: Path) -> None:
    evil = "\"><script>alert(1)</script><b a='&"
    records = make_records(100)
    records += [record | {"split": evil} for record in records if record["kind"] == "evaluation"]
    run = make_language_run(tmp_path / "run", records=records)
    card = make_model()
    card["name"] = evil
    card["config"] = {evil: evil}
    card["data"] = {evil: {evil: [evil]}, "warnings": [evil]}
    run.write_json("model.json", card)
    run.write_json("environment.json", {"processor": evil, "libraries": {evil: evil}})
    run.write_json("evaluation.json", {"kind": "language", "split": evil, "step": 100, **make_evaluation(2.0)})
    (run.folder / "recipe.toml").write_text(f"description = {json.dumps(evil)}\nseed = {json.dumps(evil)}\n# {evil}\n")
    page = Page(render(run))
    assert not {tag for tag, _ in page.tags} & {"script", "b"}
    assert page.said().count("<script>alert(1)</script>") > 10


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("model.json", "{", DataError, r"model\.json: is not JSON"),
        ("model.json", "[1]", DataError, r"model\.json: is not a JSON object"),
        ("model.json", '{"mesh": 3}', DataError, r"model\.json: mesh is not an object"),
        ("model.json", '{"mesh": {"shard": 0}}', DataError, r"model\.json, mesh: shard: must be at least 1, got 0"),
        ("model.json", '{"parameters": "many"}', DataError, r"model\.json: parameters is no number: 'many'"),
        ("environment.json", b"\xff\xfe", DataError, r"environment\.json, line 1, column 1: is not UTF-8"),
        ("evaluation.json", '{"loss": 2.0}', DataError, r"evaluation\.json: is not an evaluation of a language model"),
        ("evaluation.json", '{"kind": "language", "loss": [2]}', DataError, r"evaluation\.json: loss is no number"),
        ("metrics.jsonl", '{"kind": "train"}\nnot so\n{}\n', RunError, r"metrics\.jsonl, line 2: is not JSON"),
        ("metrics.jsonl", '{"kind": "train"}\n[]\n{}\n', RunError, r"metrics\.jsonl, line 2: is not a JSON object"),
        ("metrics.jsonl", '{"kind": "train", "loss": "2"}\n', DataError, r"metrics\.jsonl, line 1: loss is no number"),
        ("metrics.jsonl", '{"kind": "train", "step": true}\n', DataError, r"line 1: step is no number: 'True'"),
        ("metrics.jsonl", '{"kind": "train", "tokens": -3}\n', DataError, r"line 1: tokens is negative: -3"),
        ("metrics.jsonl", b'{"kind": "\xff"}\n', RunError, r"metrics\.jsonl, line 1, column 11: is not UTF-8"),
        ("metrics.jsonl", '{"kind": "train", "step": ' + "9" * 5000 + "}\n{}\n", RunError, r"line 1: is not JSON"),
        ("environment.json", "[" * 100_000, DataError, r"environment\.json: is not usable JSON"),
        ("recipe.toml", "a = ", DataError, r"recipe\.toml: is not TOML"),
        ("recipe.toml", b"\xff", DataError, r"recipe\.toml, line 1, column 1: is not UTF-8"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, name: str, content: str | bytes, error: type[Exception], message: str
) -> None:
    run = make_language_run(tmp_path / "run", records=make_records(100))
    (run.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (run.folder / "status.json").unlink()  # which knows how many records there were
    with pytest.raises(error, match=message):
        write_language_report(run)
    assert not (run.folder / "report.html").exists()


def test_numbers_beyond_all_bounds_are_infinite(tmp_path: Path) -> None:
    records = changed(make_records(100), gradient_norm=10**400, loss=1e305)
    run = make_language_run(tmp_path / "run", records=records)
    assert {record["gradient_norm"] for record in LanguageRecords(run).train} == {math.inf}
    assert "10 of 10 records of the training loss are not finite" in Page(render(run)).said()


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "run", records=make_records(100))
    whole = render(run)
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 11')
    assert render(run) == whole


def test_long_runs_keep_reports_small(tmp_path: Path) -> None:
    records = make_records(60_000)
    records += [{"kind": kind, "step": step} for step in range(3000) for kind in ("skipped", "resumed")]
    page = render(make_language_run(tmp_path / "run", 60_000, records))
    assert len(page) < 200_000
    assert "more stand in metrics.jsonl" in page


@given(seed=st.integers(0, 1000), size=st.integers(401, 3000), is_log=st.booleans())
@settings(max_examples=15)
def test_thinned_lines_stay_among_their_points(seed: int, size: int, is_log: bool) -> None:
    random = np.random.default_rng(seed)
    xs, ys = (10 ** random.uniform(0, 6, size)).tolist(), random.normal(size=size).tolist()
    axis = Axis.log(1, 1e6) if is_log else Axis((0, 1e6))
    thin_xs, thin_ys = Series("s", "s0", xs, ys).places(axis, LINEAR)
    places = [axis.place(x) for x in xs]
    low, high = min(places), max(places)
    assert len(thin_xs) <= POINTS + 1
    for x, y in zip(thin_xs, thin_ys, strict=True):  # a mean of points less than two widths away
        near = [b for a, b in zip(places, ys, strict=True) if abs(a - x) < 2 * (high - low) / POINTS]
        assert min(near) - 1e-9 <= y <= max(near) + 1e-9
    broken = Series("s", "s0", xs, [math.nan, *ys[1:]]).places(axis, LINEAR)[1]
    assert sum(map(math.isnan, broken)) == 1


@given(low=st.floats(-6, 14), span=st.floats(0.5, 12))
@example(low=-0.109375, span=0.5)
def test_ticks_of_logarithms_are_round_and_inside(low: float, span: float) -> None:
    ticks = log_ticks(low, low + span)
    assert 1 <= len(ticks) <= 8
    for place, _ in ticks:
        assert low - 1e-6 <= place <= low + span + 1e-6
        digits = 10 ** (place - math.floor(place + 1e-9))
        if span >= 1:  # on shorter axes these may be too few
            assert any(math.isclose(digits, round_, rel_tol=1e-6) for round_ in (1, 2, 5))


@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 4},
        {"tensor": 4},
        {"context": 2, "shard": 2},
        {"pipeline": 2, "replicate": 2, "tensor": 2, "context": 3},
        {"context": 2, "shard": 2, "order": ("tensor", "data", "context", "pipeline")},
    ],
)
def test_every_rank_stands_at_its_place(tmp_path: Path, sizes: dict[str, Any]) -> None:
    run = make_language_run(tmp_path / "run", records=make_records(100))
    run.write_json("model.json", make_model(**sizes))
    table = re.search(r'<table class="ranks">.*?</table>', render(run), re.DOTALL)[0]  # type: ignore[index]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]
    mesh = ParallelConfig(**sizes)
    ranks, names = ranks_of(mesh)
    found = {}
    for name, *cells in rows[1:]:
        for head, cell in zip(rows[0][1:], cells, strict=True):
            words = f"{name}, {head}".split(", ")
            place = dict.fromkeys(DIMENSIONS, 0) | {w.split()[0]: int(w.split()[1]) for w in words if w != "rank"}
            found[int(cell)] = tuple(place[one] for one in names)
    assert sorted(found) == list(range(mesh.world))
    assert all(int(ranks[place]) == rank for rank, place in found.items())


def test_large_meshes_are_shown_in_part(tmp_path: Path) -> None:
    run = make_language_run(tmp_path / "run", records=make_records(100))
    run.write_json("model.json", make_model(shard=128, tensor=8, pipeline=4))
    page = render(run)
    assert "128 of 4,096 ranks." in page
    assert len(page) < 100_000
    run.write_json("model.json", make_model(shard=2**20))
    assert '<table class="ranks">' not in render(run)


def test_sums_and_means_are_over_what_is_known() -> None:
    nan = math.nan
    records = [
        {"a": 1.0, "seconds": 2.0},
        {"a": nan, "seconds": 3.0},
        {"a": 4.0, "seconds": 6.0},
        {"a": 9.0, "seconds": nan},
    ]
    assert total(records, "a") == 14
    assert mean(records, "a", "seconds") == pytest.approx((1 * 2 + 4 * 6) / 8)
    assert share(records, "a") == pytest.approx(5 / 8)
    assert math.isnan(total([{"a": nan}], "a"))
    assert math.isnan(mean([], "a", "seconds"))


@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_it_all_within_the_page(tmp_path: Path, width: int) -> None:
    run = make_language_run(tmp_path / "run")
    run.write_json("model.json", make_model(replicate=2, shard=2, pipeline=2, context=2, tensor=2))
    page = tmp_path / "report.html"
    page.write_text(with_look(render(run)))
    dump = browse(page, f"--window-size={width},3000", "--dump-dom")
    found: dict[str, Any] = json.loads(unescape(re.search(r'data-found="([^"]*)"', dump)[1]))  # type: ignore[index]
    assert found["headings"] == SECTIONS
    assert found["width"] <= found["window"]
    assert found["texts"] > 80
    assert found["beyond"] == []
    assert found["covered"] == []


@pytest.mark.parametrize(
    ("first", "limits"), [(29.0, (0.0, 31.9)), (31.0, (math.log10(1 / 1.3), math.log10(31 * 1.3)))]
)
def test_gradient_norms_over_a_wide_range_have_a_logarithmic_axis(
    tmp_path: Path, first: float, limits: tuple[float, float]
) -> None:
    norms = iter([first, *[1.0] * 100])
    records = changed(make_records(600), gradient_norm=lambda record: next(norms))
    run = make_language_run(tmp_path / "run", records=records)
    drawn = _norms(LanguageRecords(run), Axis.to([600]), "step", "steps")
    assert drawn is not None
    assert drawn.chart._y == pytest.approx(limits)
    assert "2 % of them were above the clip" in drawn.caption  # 1 of 60, with a clip of 1
