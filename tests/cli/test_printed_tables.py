"""Tables and lines of commands, filled by hand: every figure stands under its heading, in the right unit."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from cordillera import workflows
from cordillera.cli import _show, data, inject, probe, quantize, train, watch
from cordillera.cli import plan as planning
from cordillera.numerics.dispatch.plan import KernelChoice
from cordillera.numerics.inference.drift import Alarm
from cordillera.numerics.inference.selection import Change
from cordillera.planning.language.what_if import Case
from cordillera.planning.ranking.workload import Recommender
from cordillera.reports.plan_comparison import TrainingBudget
from cordillera.workflows.planning import Calibrated, Planned, PlannedRecommender, compare

from .test_printing import cells


class Layout(SimpleNamespace):
    """Degrees of a plan, with a short name."""

    def __str__(self) -> str:
        return "tensor=8"


def plan(seconds: float, error: float | None = None, **values: Any) -> SimpleNamespace:
    """A plan of a language and of a recommendation model at once."""
    layout = Layout(recompute="full", fp8="none", shard_weights=False, expert=1)
    step = SimpleNamespace(memory_bytes=12.6e9)
    some = {"layout": layout, "across": "data", "schedule": SimpleNamespace(name="1f1b"), "utilisation": 0.456}
    return SimpleNamespace(
        seconds=seconds,
        error=error and error / seconds,
        error_s=error,
        samples_per_s=4.5e6,
        step=step,
        flops=3e18,
        cut="in rows",
        **some,
        **values,
    )


def planned(kind: type, *seconds: float, base: float = 9.0, what_if: tuple[Case, ...] = ()) -> Any:
    """What a search found, without the search."""
    plans = [plan(one) for one in seconds]
    found = SimpleNamespace(
        own=(), plans=plans, best=plans[0], interrupted=False, simulated=1234, estimated=5678, layouts=91, seconds=2.5
    )
    cost = SimpleNamespace(calibration=SimpleNamespace(provenance="measured", described="measured"), products=None)
    model = SimpleNamespace(gated=False, parameters=7.5e9, experts=None)
    work = SimpleNamespace(name="work", batch=500, sequence=4000, model=model)
    explorer = SimpleNamespace(
        workload=work, topology=SimpleNamespace(name="cluster"), cost=cost, devices=2048, base_source="published",
        constants="measured",
    )  # fmt: skip
    if kind is PlannedRecommender:
        explorer.workload = Recommender.model_construct(name="work")
    one = kind.__new__(kind)
    files = {"plan.html": Path("p/plan.html"), "plan.json": Path("p/plan.json")}
    for name, value in {
        "found": found, "production": plan(base), "explorer": explorer, "what_if": what_if, "files": files,
        "compared": {},
    }.items():  # fmt: skip
        object.__setattr__(one, name, value)
    return one


def test_plans_of_language_models_are_listed_with_the_production_like_one_last() -> None:
    made = planned(Planned, 1.2345, 2.0, 3.0, 4.0, 5.0, 6.0)
    made.found.plans[0] = plan(1.2345, error=0.05)
    table = planning._list_layouts("title", made)
    rows = cells(table)
    assert rows[0] == ["", "layout", "recompute", "across", "schedule", "step", "±", "MFU", "GB"]
    assert [row[0] for row in rows[1:]] == [*"12345", "base"]
    assert [row[5] for row in rows[1:]] == ["1.234 s", "2.000 s", "3.000 s", "4.000 s", "5.000 s", "9.000 s"]
    assert rows[1][2:5] + rows[1][6:] == ["full", "data", "1f1b", "0.05 s", "45.6 %", "13"]


def test_plans_of_recommendation_models_are_listed_in_milliseconds() -> None:
    table = planning._list_tables("title", planned(PlannedRecommender, 0.0125, base=0.5))
    rows = cells(table)
    assert rows[0] == ["", "layout", "schedule", "step", "samples/s", "GB"]
    assert [[row[0], *row[3:]] for row in rows[1:]] == [
        ["1", "12.50 ms", "4.50 M", "13"],
        ["base", "500.00 ms", "4.50 M", "13"],
    ]
    assert table.caption == "tables of the best plan: in rows"


def test_errors_of_steps_have_two_digits_or_whole_seconds() -> None:
    shown = {0.00123: "1.2 ms", 0.0456: "0.046 s", 9.87: "9.9 s", 12.3: "12 s", 150.4: "150 s", 1234.0: "1,234 s"}
    assert {seconds: planning._error(seconds) for seconds in shown} == shown


@pytest.mark.parametrize(("seconds", "step"), [(1.0, "1.000 s"), (0.9999, "999.90 ms"), (20.0, "20.000 s")])
def test_clusters_are_compared_by_step_and_by_what_is_trained_in_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, step: str
) -> None:
    monkeypatch.setattr("cordillera.topology.load", lambda name: None)
    for kind, unit, speed in (
        (Planned, "tokens", "100,000" if seconds == 20 else f"{500 * 4000 / seconds / 1e6:.2f} M"),
        (PlannedRecommender, "samples", "4.50 M"),
    ):
        one = planned(kind, seconds)
        budget = TrainingBudget(1e12) if kind is Planned else None
        cases = [("a.toml", None), ("b", None)]
        monkeypatch.setattr("cordillera.workflows.planning.plan", lambda *_, found=one, **options: found)
        found = compare("w.toml", cases, tmp_path, budget)
        planning._show_several(_show.CommandOutput(False), "w.toml", found, budget, tmp_path, bool(budget))
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "w on 2 clusters"
        days = "days  device hours  " if budget else ""
        assert re.sub(" {2,}", "  ", lines[1]) == f"cluster  layout  devices  step  {unit}/s  {days}GB a device"
        spent = f"{5.787037 * seconds:,.1f}  {284444.44 * seconds:,.0f}  " if budget else ""
        row = f"b  {one.found.best.layout}  2,048  {step}  {speed}  {spent}13"
        assert re.sub(" {2,}", "  ", lines[3].strip()) == row


def test_a_plan_is_printed_with_its_gain_its_cases_and_its_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cordillera.reports.language.plan.reasons", lambda best, base: ["it is shorter"])
    monkeypatch.setattr("cordillera.reports.ranking.plan.reasons", lambda best, base: ["it is smaller"])
    cases = (Case("one thing", 4.0, 8), Case("another", 0.999, 8, "so"), Case("a third", 1.0, 8))
    one = planned(Planned, 2.0, base=5.0, what_if=cases)
    one.found.interrupted = True
    planning._show(_show.CommandOutput(False), one, TrainingBudget(1e12))
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("interrupted: this is the best until then") :] == [
        "interrupted: this is the best until then",
        "2.50 times as fast as the production-like plan (base), both simulated:",
        "  it is shorter",
        "the error of 2.000 s is not known",
        "with one thing: 4.000 s (-50.00 %)",
        "with another: 999.00 ms (+100.20 %) so",
        "with a third: 1.000 s (+100.00 %)",
        "5,678 layouts estimated, 1,234 steps simulated in 2.5 s",
        "base: published",
        "constants: measured",
        "workload: 7.50 billion parameters, 2,000,000 tokens and 3e+18 FLOPs a step",
        "1,000,000 tokens/s; 1T tokens take 11.6 days without failures, 568,889 device hours",
        "report: p/plan.html",
    ]
    one.explorer.workload.model.experts = SimpleNamespace(count=8)  # on one device or on several
    planning._show(_show.CommandOutput(False), one, TrainingBudget(1e12))
    assert "the error of 2.000 s is not known: no measured step had experts\n" in capsys.readouterr().out
    planning._show(_show.CommandOutput(False), planned(PlannedRecommender, 0.5), None)
    out = capsys.readouterr().out
    assert "interrupted" not in out
    assert "18.00 times" in out
    assert "91 layouts, 1,234 steps simulated" in out


def test_a_calibration_is_printed_with_the_rows_furthest_off(capsys: pytest.CaptureFixture[str]) -> None:
    quality = SimpleNamespace(
        rows=7, error=0.05, tau=0.9, regret=1.02, error_by_model={"a": 0.04, "b": 0.0},
        tau_by_model={"a": 0.8, "b": math.nan}, regret_by_model={"a": 1.01, "b": 1.0},
    )  # fmt: skip
    ratios = (1.0, 1.5, 0.4, 1.2, 0.9, 1.01, 3.0)
    rows = [(SimpleNamespace(model=f"m{n}", layout="l", seconds=2.0), 2.0 * by) for n, by in enumerate(ratios)]
    constants = SimpleNamespace(matrix=0.8, memory=0.7, port=0.6, network=0.9, collective_s=1e-5)
    planning._calibrate(_show.CommandOutput(False), Calibrated(constants, quality, rows, Path("c.json")))  # type: ignore[arg-type]
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.splitlines()]
    first = lines.index("furthest off:") + 1
    assert lines[first : first + 5] == [
        "m6 l: 2.000 s measured, 6.000 s predicted (+200.0 %)",
        "m2 l: 2.000 s measured, 0.800 s predicted (-60.0 %)",
        "m1 l: 2.000 s measured, 3.000 s predicted (+50.0 %)",
        "m3 l: 2.000 s measured, 2.400 s predicted (+20.0 %)",
        "m4 l: 2.000 s measured, 1.800 s predicted (-10.0 %)",
    ]
    assert lines[first + 5] == "constants: matrix 0.8, memory 0.7, port 0.6, network 0.9, collective_s 1e-05"
    shown = [re.findall(r"[\w.%]+", line) for line in lines if re.match(r"(a|b|all) +\d", line)]
    assert shown == [
        ["a", "4.00", "%", "0.800", "1.010"],
        ["b", "0.00", "%", "undefined", "1.000"],
        ["all", "5.00", "%", "0.900", "1.020"],
    ]


def test_what_is_left_to_measure_ends_the_command_with_its_own_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(own=(), products="9 products", new=1234, too_large=2000, left=0)
    seen: list[Any] = []

    def measure(shapes: Any, path: Path, *, on_product: Any) -> SimpleNamespace:
        on_product((2, 3, 4, 5), 1, len(shapes))
        seen.append((shapes, path))
        return found

    monkeypatch.setattr("cordillera.kernels.products.measure_table", measure)
    planning._measure(_show.CommandOutput(False), [(2, 3, 4, 5)], Path("p.csv"))
    assert capsys.readouterr().out.splitlines() == [
        "9 products, 1,234 of them now",
        "2,000 more do not fit this device's memory and are left to the formula",
        "use it with --products p.csv",
    ]
    found.left, found.too_large = 1, 0
    with pytest.raises(typer.Exit) as stop:
        planning._measure(_show.CommandOutput(False), [(2, 3, 4, 5)], Path("p.csv"))
    assert stop.value.exit_code == 130
    out = capsys.readouterr().out
    assert "interrupted, 1 more are to be measured" in out
    assert "do not fit" not in out
    assert "use it" not in out


@pytest.mark.parametrize(
    ("low", "mean", "high", "verdict"),
    [
        (-1e-4, 1e-4, 2e-4, "within the budget"),
        (1e-4, 2e-4, 3e-4, "not shown to be within the budget"),
        (2e-4, 3e-4, 4e-4, "not shown to be within the budget"),
        (2.1e-4, 3e-4, 4e-4, "above the budget"),
    ],
)
def test_the_change_of_a_quantisation_is_within_the_budget_above_it_or_neither(
    low: float, mean: float, high: float, verdict: str
) -> None:
    selection = SimpleNamespace(options={}, alone={}, evaluated=(1, 2, 3))
    change = Change(mean, low, high)
    outcome: Any = SimpleNamespace(
        selection=selection, layers=[], bytes=(3, 1), ne=(1.0, 1.0), seconds=(1.0, 1.0), searched=change,
        confirmed=change, sweep=12,
    )  # fmt: skip
    summary = cells(quantize._summary(outcome, 2e-4))
    assert [row[0] for row in summary[4:]] == ["NE, searched", "NE, test split", "evaluations"]
    assert all(row[3].endswith(f"; {verdict}") for row in summary[4:6])
    assert summary[6][2:] == ["3", "a sweep of all options: 12"]


def test_vulnerability_is_in_per_cent_with_shares_of_what_is_silent() -> None:
    def rate(value: float, low: float = math.nan, high: float = math.nan) -> dict[str, float]:
        return {"value": value, "low": low, "high": high}

    one = {"name": "top", "injections": 12_345, "pvf": rate(0.02, 0.01, 0.04), "silent": rate(0.015)}
    none = {"name": "bottom", "injections": 3, "pvf": rate(0.0, 0.0, 0.1), "silent": rate(0.0), "detected": rate(0.0)}
    empty = {"name": "empty", "injections": 0, **dict.fromkeys(("pvf", "silent", "detected"), rate(math.nan))}
    content = {"fault": {"name": "single bit"}, "samples": 1000, "split": "test"}
    table = inject._table(content | {"components": [one | {"detected": rate(0.005)}, none, empty]})
    assert table.title == "single bit faults on 1,000 samples of the test split"
    assert cells(table)[1:] == [
        ["top", "12,345", "2 %", "1 to 4 %", "75 % / 25 %"],
        ["bottom", "3", "0 %", "0 to 10 %", ""],
        ["empty", "0", "undefined", "", ""],
    ]


@pytest.mark.parametrize("purpose", ["inference", "training"])
def test_kernels_of_a_plan_stand_under_their_headings(purpose: str) -> None:
    expected = {"ms": 1.2345, "times_fp32": 2.345, "accuracy": {"sqnr_db": 33.33}}
    choices = [
        KernelChoice("top", "forward", 64, 10, 20, "bf16", "", expected),
        KernelChoice("head", "forward", 64, 1, 20, "fp32", "no faster one", expected),
        KernelChoice("rest", "forward", 64, 1, 20, "fp32", "unknown", {}),
    ]
    profile: Any = SimpleNamespace(plan=SimpleNamespace(purpose=purpose, choices=choices))
    rows = cells(probe._table(profile))
    product = ["forward"] if purpose == "training" else []
    assert rows[0] == ["layer", *(["product"] if product else []), "rows", "outputs x inputs", "kernel", "ms",
                       "times fp32", "dB", ""]  # fmt: skip
    assert rows[1:] == [
        ["top", *product, "64", "10 x 20", "bf16", "1.234", "2.35", "33.3", ""],
        ["head", *product, "64", "1 x 20", "fp32", "1.234", "2.35", "", "no faster one"],
        ["rest", *product, "64", "1 x 20", "fp32", "", "", "", "unknown"],
    ]


def test_alarms_have_a_probability_down_to_a_smallest_one() -> None:
    rows = cells(watch._table([Alarm("price", "mean", 1.23456, 2.0, 0.00123), Alarm("age", "share", 0.5, 0.25, 1e-99)]))
    assert rows[1:] == [["price", "mean", "1.235", "2", "0.001"], ["age", "share", "0.5", "0.25", "< 1e-99"]]


@pytest.mark.parametrize("alarms", [0, 2, 3])
def test_watching_ends_with_a_status_that_scripts_see(
    cli: Any, monkeypatch: pytest.MonkeyPatch, alarms: int, tmp_path: Path
) -> None:
    if alarms == 3:
        (tmp_path / "run/quantized").mkdir(parents=True)
    found = SimpleNamespace(
        own=(),
        alarms=[Alarm("price", "mean", 1.0, 2.0, 0.001)] * alarms,
        lacks="user",
        samples=1234,
        watched=5,
        checks=6000,
    )
    asked: list[Any] = []
    monkeypatch.setattr(
        "cordillera.workflows.drift.watch", lambda run, file, *, false_alarms: asked.append(false_alarms) or found
    )
    done = cli("watch", "run", "file.csv", "--false-alarms", 0.01)
    assert done.code == (1 if alarms else 0)
    assert asked == [0.01]
    assert "no column 'user'" in done.out
    moved = "no alarm"
    if alarms:
        moved = f"{alarms} moved\n  -> first check that the file has the columns and units of the training data; "
        moved += "if it has, train on recent data, with training.start = 'run'"
        moved += ", and quantise that run\n" if alarms == 3 else "\n"
    assert f"1,234 samples, 5 numbers and shares watched by 6,000 checks: {moved}" in done.out


def outcome(ended: str, **values: Any) -> SimpleNamespace:
    report = SimpleNamespace(
        ended=ended, progress=SimpleNamespace(step=1234, tokens=5_000_000, best_step=None), seconds=20.0,
        evaluation=None, probing_seconds=0.0,
    )  # fmt: skip
    run = SimpleNamespace(folder=Path("runs/a"), recipe_file=Path("runs/a/recipe.toml"))
    return SimpleNamespace(report=report, evaluation=None, run=run, **values)


@pytest.mark.parametrize(
    ("ended", "said"), [("finished", "finished"), ("early", "stopped early"), ("exhausted", "the text ended")]
)
def test_the_end_of_training_says_how_it_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ended: str, said: str
) -> None:
    recipe = SimpleNamespace(training=SimpleNamespace(patience=None), data=SimpleNamespace(held_out=None))
    monkeypatch.setattr("cordillera.recipe.load", lambda path: recipe)
    one: Any = outcome(ended)
    train._print(_show.CommandOutput(False), one, False, False)
    assert capsys.readouterr().out == f"{said} after 1,234 steps in 20.0 s\n"
    train._print(_show.CommandOutput(False), one, True, False)
    assert capsys.readouterr().out == f"{said} after 1,234 steps (20.0 s since it was resumed)\n"
    one.report.probing_seconds = 0.5
    train._print(_show.CommandOutput(False), one, False, False)
    assert "probing its layers took 0.50 s of that, 2.5 %" in capsys.readouterr().out
    language: Any = workflows.LanguageOutcome.__new__(workflows.LanguageOutcome)
    object.__setattr__(language, "report", one.report)
    records = [{"kind": "train", "step": 1200, "loss": 0.5, "accuracy": 1.0, "margin": None}, {"kind": "checkpoint"}]
    recipe.model, recipe.training = SimpleNamespace(vocabulary=9), SimpleNamespace(steps=9, warmup_steps=3)
    object.__setattr__(language, "run", SimpleNamespace(metrics=lambda: records, recipe_file=one.run.recipe_file))
    train._print(_show.CommandOutput(False), language, False, False)
    assert capsys.readouterr().out.splitlines() == [
        "step 1,200, in training: loss 0.5000, accuracy 1.0000",
        "nothing is held out: documents stay whole (data.unit = 'line', or data.validation)",
        f"{said} after 1,234 steps in 20.0 s, 5,000,000 tokens",
    ]


def test_an_interrupted_training_says_how_it_goes_on(cli: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stopped(what: Any, run: Any, **options: Any) -> SimpleNamespace:
        asked.append((run, options["processes"], options["changes"]))
        return outcome("interrupted")

    monkeypatch.setattr(workflows, "train", stopped)
    done = cli("train", recipe, "--run", "runs/a", "--nproc", 2, "-q")
    assert done.code == 130
    assert done.out.splitlines() == [
        "interrupted at step 1,234; everything is saved",
        "  -> continue with: cordillera train runs/a --resume",
    ]
    assert asked == [(Path("runs/a"), 2, ())]


def splits(**facts: Any) -> Any:
    one = {"split": "time", "rows": {"train": 12_000, "validation": 10, "test": 20}, "times": {"train": [0, 86_399]}}
    one["positives"] = {part: {"click": 0.125, "buy": None} for part in ("train", "validation", "test")}
    return SimpleNamespace(facts=one | facts)


def test_splits_are_listed_with_their_rows_shares_and_times() -> None:
    table = data._split_table(splits())
    assert table.title == "split by time"
    assert cells(table) == [
        ["split", "rows", "click = 1", "buy = 1", "first", "last"],
        ["train", "12,000", "12.5 %", "", "1970-01-01 00:00:00", "1970-01-01 23:59:59"],
        ["validation", "10", "12.5 %", "", "", ""],
        ["test", "20", "12.5 %", "", "", ""],
    ]
    assert data._time(1_700_000_000_000_000_000) == "1700000000000000000", "nanoseconds are outside of the calendar"


def test_features_are_listed_with_their_encoding_table_and_gaps() -> None:
    schema = SimpleNamespace(
        numbers=[SimpleNamespace(name="price", transform="log")],
        categorical=[SimpleNamespace(name="user", encoding="hash")],
        lists=[SimpleNamespace(name="seen", encoding="identity")],
    )
    sparse = [
        SimpleNamespace(name="user", is_list=False, pooling="sum", table="people"),
        SimpleNamespace(name="seen", is_list=True, pooling="mean", table="items"),
    ]
    one = splits(blanks={"price": 0.25, "seen": 0.0}, unseen={"test": {"user": 0.031}})
    one.encoder = SimpleNamespace(schema=schema)
    one.features = SimpleNamespace(sparse=sparse, tables={"people": 1000, "items": 2_000_000})
    assert cells(data._feature_table(one)) == [
        ["feature", "kind", "encoding", "table", "rows", "blank", "unseen"],
        ["price", "dense", "log", "", "", "25.0 %", ""],
        ["user", "id", "hash", "people", "1,000", "", "3.1 %"],
        ["seen", "list, mean", "identity", "items", "2,000,000", "0.0 %", ""],
    ]


def test_facts_of_a_model_have_commas_and_few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"rows": 49_152, "base": 1e4, "share": 0.25, "name": "a"}
    monkeypatch.setattr("cordillera.data.tokenizers.load.asset_facts", lambda file: facts)
    columns = [list(map(str, column.cells)) for column in data._asset_table(Path("f")).columns]
    assert columns == [list(facts), ["49,152", "10000", "0.25", "a"]]


def test_a_progress_bar_follows_steps_and_the_best_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    bar: Any = SimpleNamespace(
        tasks={7: SimpleNamespace(total=None)},
        reset=lambda task, **values: (seen.append(values), setattr(bar.tasks[task], "total", values["total"])),
        update=lambda task, **values: seen.append(values),
    )

    @_show.contextlib.contextmanager
    def progress(out: Any, quiet: bool) -> Any:
        yield bar, 7, print

    monkeypatch.setattr(_show, "progress_bar", progress)
    with _show.training_progress(_show.console()) as (on_step, _):
        on_step({}, SimpleNamespace(step=5, best_text=""), 10)
        on_step({}, SimpleNamespace(step=6, best_text="best NE 0.8123"), 10)
        on_step({}, SimpleNamespace(step=1), 10)
    assert seen == [
        {"total": 10, "completed": 5},
        {"completed": 5, "description": "training"},
        {"completed": 6, "description": "training  best NE 0.8123"},
        {"total": 10, "completed": 1},
        {"completed": 1, "description": "training"},
    ]
    seen.clear()
    with _show.answering_progress(_show.console(), what="faults a bit position") as on_round:
        on_round(3, 9)
    assert seen == [{"total": 9}, {"completed": 3, "description": "faults a bit position"}]


def test_seconds_that_are_no_number_are_not_printed_as_one() -> None:
    shown = [planning._seconds(value) for value in (1.5, 0.25, -1e-9, math.nan)]
    assert shown == ["1.500 s", "250.00 ms", "0.00 ms", "undefined ms"]
