"""Curves have their minimum where the surface has it, or say why they show none and what to run next."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import DataError, RunError
from cordillera.run import Run
from cordillera.training.scaling.isoflop import IsoFlopRun, along, amount, isoflops, measure_language, power
from tests.training.loss_surface import CHINCHILLA, best_parameters, surface_runs

BUDGETS = [6e18, 6e19, 6e20, 6e21]


def parabola_runs(
    budget: float, best: float, depth: float = 0.1, sizes: int = 5, span: float = 4.0
) -> list[IsoFlopRun]:
    """Losses exactly on a parabola over log tokens whose minimum is at ``best``."""
    runs = []
    for index, tokens in enumerate(np.round(best * np.geomspace(1 / span, span, sizes))):
        parameters = round(budget / 6 / tokens)
        loss = 2.0 + depth * math.log10(tokens / best) ** 2
        runs.append(IsoFlopRun(f"{budget:g} {index}", budget, parameters, parameters, int(tokens), loss))
    return runs


@given(st.floats(1e6, 1e12), st.floats(1e-3, 10), st.integers(3, 8), st.floats(1.5, 30))
@settings(max_examples=50)
def test_the_minimum_of_a_parabola_is_found(best: float, depth: float, sizes: int, span: float) -> None:
    budget = 6 * best**2 / 20
    (curve,) = isoflops(parabola_runs(budget, best, depth, sizes, span))
    assert curve.optimum is not None
    assert curve.optimum.tokens == pytest.approx(best, rel=1e-6)
    assert curve.optimum.loss == pytest.approx(2.0, abs=1e-9)
    assert curve.optimum.parameters == pytest.approx(budget / 6 / best, rel=1e-2)
    assert curve.predict([run.tokens for run in curve.runs]) == pytest.approx([r.loss for r in curve.runs], abs=1e-9)
    assert curve.budget == pytest.approx(budget)


def test_curves_are_those_of_numpys_polynomials_and_their_order_does_not_depend_on_that_of_runs() -> None:
    runs = surface_runs(BUDGETS, noise=0.01)
    curves = isoflops(runs)
    assert [curve.budget for curve in curves] == pytest.approx(BUDGETS)
    assert isoflops(runs[::-1]) == curves
    for curve in curves:
        x = np.log10([run.tokens for run in curve.runs])
        y = [run.loss for run in curve.runs]
        polynomial = np.polynomial.Polynomial.fit(x, y, 2).convert()
        (place,) = polynomial.deriv().roots()
        assert curve.optimum is not None
        assert curve.optimum.tokens == pytest.approx(10**place, rel=1e-6)
        assert curve.optimum.loss == pytest.approx(polynomial(place), rel=1e-9)


def test_runs_whose_compute_differs_a_little_are_of_one_budget() -> None:
    random = np.random.default_rng(0)
    runs = [replace(run, compute=run.compute * random.uniform(0.97, 1.03)) for run in surface_runs([1e18, 2e18, 4e18])]
    assert [len(curve.runs) for curve in isoflops(runs)] == [6, 6, 6]
    assert len(isoflops(runs, tolerance=1e-6)) == len(runs)
    chain = [replace(run, compute=run.compute * 1.08**index) for index, run in enumerate(surface_runs([1e18]))]
    with pytest.raises(DataError, match="too closely to be told apart as budgets"):
        isoflops(chain)


def test_a_minimum_outside_the_trained_range_is_refused_and_the_runs_that_would_show_it_are_named() -> None:
    """The advice is followed here: the runs that it asks for give the budget its optimum."""
    for shift, word, relation in [(20.0, "smaller", "above the most"), (1 / 20, "larger", "below the fewest")]:
        runs = surface_runs([6e20], span=2.0, shift=shift)
        for _ in range(8):
            (curve,) = isoflops(runs)
            if curve.optimum:
                break
            assert curve.refusal is not None
            assert f"train {word} models at this budget" in curve.refusal
            assert relation in curve.refusal or "opens downwards" in curve.refusal
            wanted = curve.refusal.rsplit("about ", 1)[1].split(" parameters")[0]
            parameters = float(wanted[:-1]) * {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[wanted[-1]]
            part = parameters / best_parameters(6e20, **CHINCHILLA)
            runs += surface_runs([6e20], sizes=2, span=1.01, shift=part)
        assert curve.optimum is not None
        assert curve.refusal is None
        assert curve.optimum.parameters == pytest.approx(best_parameters(6e20, **CHINCHILLA), rel=0.5)


def test_smaller_models_than_their_vocabulary_are_not_asked_for() -> None:
    runs = [replace(run, non_embedding=0.3 * run.parameters) for run in surface_runs([6e20], span=2.0, shift=20.0)]
    (curve,) = isoflops(runs)
    assert curve.refusal is not None
    assert "the vocabulary alone takes" in curve.refusal
    assert "take a larger budget, or a smaller vocabulary" in curve.refusal
    assert "train smaller" not in curve.refusal


def test_a_parabola_that_opens_downwards_is_refused() -> None:
    runs = [replace(run, loss=4 - run.loss) for run in parabola_runs(6e18, 1e9)]
    (curve,) = isoflops(runs)
    assert curve.optimum is None
    assert curve.refusal is not None
    assert "opens downwards" in curve.refusal
    assert "train" in curve.refusal


def test_two_sizes_are_no_curve_and_seeds_make_no_sizes() -> None:
    two = surface_runs([6e18], sizes=2)
    (curve,) = isoflops([*two, *(replace(run, name=f"{run.name} again", loss=run.loss + 0.01) for run in two)])
    assert curve.optimum is None
    assert curve.refusal == "2 sizes are too few for a parabola; train at least 1 more at this budget, better 3"
    assert curve.coefficients == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_diverged_runs_and_copies_are_left_out_and_named(loss: float) -> None:
    runs = surface_runs([6e18])
    (clean,) = isoflops(runs)
    diverged = replace(runs[2], name="hot", loss=loss)
    copy = replace(runs[3], name="z copy")
    (curve,) = isoflops([diverged, *runs, copy])
    assert curve.runs == clean.runs
    assert curve.optimum == clean.optimum
    assert curve.left_out["hot"] == "diverged: its loss is not finite"
    assert runs[3].name in curve.left_out["z copy"]
    (nothing,) = isoflops([diverged])
    assert nothing.refusal is not None
    assert nothing.refusal.startswith("0 sizes are too few")


@pytest.mark.parametrize("key", ["compute", "parameters", "non_embedding", "tokens"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_runs_without_size_or_cost_are_refused(key: str, value: float) -> None:
    runs = surface_runs([6e18])
    with pytest.raises(DataError, match=rf"run 6e\+18 1: {key} must be above 0"):
        isoflops([*runs[:1], replace(runs[1], **{key: value})])


def test_nothing_and_a_mixture_of_counts_are_refused() -> None:
    with pytest.raises(DataError, match="there are no runs"):
        isoflops([])
    runs = surface_runs([6e18])
    with pytest.raises(DataError, match="some runs count the FLOPs of attention"):
        isoflops([*runs, replace(runs[0], counts_attention=False)])


def test_amounts_and_powers_are_for_people() -> None:
    assert [amount(x) for x in (950, 12_300, 402e9, 16.55e12)] == ["950", "12.3k", "402B", "16.6T"]
    assert [power(x) for x in (3e13, 3.8e25, 1e10, 2.27e20)] == ["3e13", "3.8e25", "1e10", "2.27e20"]
    assert (power(0.0), power(1.5e-7)) == ("0e0", "1.5e-7")
    assert [power(x) for x in (9.99e10, 1.004e9, 1.253e13, 2.13e-5)] == ["1e11", "1e9", "1.25e13", "2.13e-5"]


def language_run(folder: Path, *, loss: float | None = 2.5, windows: int = 4, tied: bool = True) -> Run:
    """300 steps of 1,000 tokens at 6,100 FLOPs a token with attention, 6,000 without."""
    run = Run.create(folder, "name = 'small'\n")
    config = {"vocabulary": 10, "hidden": 8, "tied": tied}
    run.write_json("model.json", {"name": "llama", "config": config, "parameters": 1080, "flops_per_token": 6000})
    for window in range(windows):
        seconds = 0.5 + 0.1 * window
        speed = 60_000 / seconds
        record = {"step": 60 * (window + 1), "tokens": 60_000 * (window + 1), "seconds": seconds, "steps": 60}
        run.log({"kind": "train", **record, "tokens_per_second": speed, "flops_per_second": 6100 * speed})
        run.log({"kind": "checkpoint", "step": 60 * (window + 1)})
    evaluation = {"kind": "language", "split": "validation", "step": 300, "tokens": 300_000, "loss": loss}
    run.write_json("evaluation.json", evaluation)
    return run


def test_runs_are_measured_from_their_folders_with_true_flops(tmp_path: Path) -> None:
    """The last window was not recorded, and a resumed one counts clocks of its second part only."""
    runs = [language_run(tmp_path / "a"), language_run(tmp_path / "b", loss=None, tied=False)]
    runs[0].log({"kind": "train", "step": 290, "seconds": 0.1, "tokens_per_second": 5e4, "flops_per_second": 3.05e8})
    first, second = measure_language(runs)
    assert first == IsoFlopRun("a", pytest.approx(6100 * 300_000), 1080, 1000, 300_000, 2.5)  # type: ignore[arg-type]
    assert second.non_embedding == 920
    assert math.isnan(second.loss)
    (curve,) = isoflops([first, second])
    assert list(curve.left_out) == ["b"]


def test_runs_without_records_put_all_on_flops_without_attention(tmp_path: Path) -> None:
    measured = measure_language([language_run(tmp_path / "a"), language_run(tmp_path / "b", windows=0)])
    assert [run.compute for run in measured] == [6000 * 300_000] * 2
    assert not any(run.counts_attention for run in measured)


def test_what_is_no_finished_language_run_is_refused(tmp_path: Path) -> None:
    run = language_run(tmp_path / "a")
    evaluation = run.read_json("evaluation.json")
    run.write_json("evaluation.json", {"tasks": {}})
    with pytest.raises(DataError, match="not of a language model"):
        measure_language([run])
    run.write_json("evaluation.json", {key: value for key, value in evaluation.items() if key != "tokens"})
    with pytest.raises(DataError, match="does not hold 'tokens'"):
        measure_language([run])
    (run.folder / "evaluation.json").unlink()
    with pytest.raises(RunError, match="let the run finish first"):
        measure_language([run])


@pytest.mark.parametrize(
    ("factor", "place", "relation", "kind"),
    [
        (1.4, "about 11.2B", "above the most of a run (8B)", "smaller"),
        (3.9, "about 31.2B", "above the most of a run (8B)", "smaller"),
        (1e5, "beyond 800B", "above the most of a run (8B)", "smaller"),
        (1 / 12, "about 667M", "below the fewest of a run (2B)", "larger"),
        (1e-5, "beyond 20M", "below the fewest of a run (2B)", "larger"),
    ],
)
def test_advice_leads_past_a_near_minimum_and_a_few_times_towards_a_far_one(
    factor: float, place: str, relation: str, kind: str
) -> None:
    """The runs take 2B to 8B tokens; the minimum lies at ``factor`` times 8B."""
    best, budget = 8e9 * factor, 6e20
    runs = []
    for tokens in (2e9, 3e9, 5e9, 8e9):
        size = round(budget / 6 / tokens)
        loss = 2 + 0.1 * math.log10(tokens / best) ** 2
        runs.append(IsoFlopRun(f"{tokens:g}", budget, size, size, int(tokens), loss))
    (curve,) = isoflops(runs)
    assert curve.optimum is None
    assert curve.refusal is not None
    head, advice = curve.refusal.split(": outside what was trained; ")
    assert head == f"its minimum would lie at {place} tokens, {relation}"
    assert advice.startswith(f"train {kind} models at this budget too, {'down' if factor > 1 else 'up'} to about ")
    parameters, tokens = (
        float(word[:-1]) * {"k": 1e3, "M": 1e6, "B": 1e9}[word[-1]]
        for word in (advice.split(" parameters on ")[0].split()[-1], advice.split(" parameters on ")[1].split()[0])
    )
    assert parameters * tokens == pytest.approx(budget / 6, rel=0.01)
    reach = tokens / 8e9 if factor > 1 else 2e9 / tokens
    far = best / 8e9 if factor > 1 else 2e9 / best
    assert reach == pytest.approx(4, rel=0.01) if far > 4 else far < reach <= 4


def test_quantities_along_a_budget_are_numpys_interpolation_and_go_on_straight() -> None:
    tokens, sizes = [100, 200, 200, 800], [900, 500, 300, 70]
    runs = [IsoFlopRun(str(i), 1e6, n, n - 10, t, 1.0) for i, (t, n) in enumerate(zip(tokens, sizes, strict=True))]
    x = np.log([100, 200, 800])
    for name, removed in (("parameters", 0), ("non_embedding", 10)):
        logs = np.log(np.array(sizes) - removed)
        y = np.array([logs[0], logs[1:3].mean(), logs[3]])
        at = np.log([[100.0, 150.0, 200.0], [300.0, 799.0, 800.0]])
        assert along(runs, name, at) == pytest.approx(np.interp(at, x, y))
        below, above = along(runs, name, np.log(np.array([50.0, 3200.0])))
        assert below == pytest.approx(y[0] - (y[1] - y[0]))  # half the tokens: one step of the first line back
        assert above == pytest.approx(y[2] + (y[2] - y[1]))


def test_one_size_is_too_few_and_equal_parabolas_of_line_are_refused() -> None:
    (curve,) = isoflops(surface_runs([6e18], sizes=1))
    assert curve.refusal == "1 size is too few for a parabola; train at least 2 more at this budget, better 4"
    flat = [replace(run, loss=3.0) for run in parabola_runs(6e18, 1e9)]
    (curve,) = isoflops(flat)
    assert curve.optimum is None or curve.optimum.loss == pytest.approx(3.0)
