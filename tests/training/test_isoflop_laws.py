"""Laws have the exponent of the surface, intervals hold it as often as they say, and doubts are spoken."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import DataError
from cordillera.training.scaling.isoflop import IsoFlopRun, isoflops
from cordillera.training.scaling.isoflop_chart import plot
from cordillera.training.scaling.isoflop_laws import fit_laws, study
from tests.training.loss_surface import CHINCHILLA, best_parameters, surface_runs

BUDGETS = [6e18, 6e19, 6e20, 6e21]
# Grattafiori et al. 2024, section 3.2.1: D*(C) = A C^alpha, and what the paper reads from it at 3.8e25 FLOPs.
ALPHA, SCALE, TARGET, TOKENS, PARAMETERS = 0.53, 0.29, 3.8e25, 16.55e12, 402e9


def runs_on_law(alpha: float, scale: float) -> list[IsoFlopRun]:
    runs = []
    for budget in np.geomspace(6e18, 1e22, 6):
        best = scale * budget**alpha
        for tokens in best * np.geomspace(0.25, 4, 6):
            parameters = round(budget / 6 / tokens)
            loss = 2 + 0.1 * math.log10(tokens / best) ** 2
            runs.append(IsoFlopRun(f"{budget} {tokens}", budget, parameters, parameters, round(tokens), loss))
    return runs


def test_llama_3s_printed_constants_do_not_give_its_printed_tokens() -> None:
    """They give 10.5T; 16.55T ask for alpha = 0.538. 402B parameters at 6 FLOPs each lie within 6 % of the budget."""
    result = study(runs_on_law(ALPHA, SCALE), target=TARGET)
    assert result.laws["tokens"].exponent == pytest.approx(ALPHA, abs=1e-6)
    assert result.laws["tokens"].line.scale == pytest.approx(SCALE, rel=1e-4)
    assert result.forecast is not None
    assert result.forecast.values["tokens"][0] == pytest.approx(10.47e12, rel=1e-3)
    needed = math.log(TOKENS / SCALE) / math.log(TARGET)
    assert needed == pytest.approx(0.5378, abs=5e-5)
    result = study(runs_on_law(needed, SCALE), target=TARGET)
    assert result.forecast is not None
    assert result.forecast.values["tokens"][0] == pytest.approx(TOKENS, rel=1e-3)
    assert result.forecast.values["parameters"][0] == pytest.approx(PARAMETERS, rel=0.06)
    assert result.forecast.factor == pytest.approx(3800, rel=1e-6)
    assert "3.8k times the largest budget that was trained: an extrapolation" in result.summary


@given(st.floats(0.2, 0.6), st.floats(0.2, 0.6), st.floats(2.5, 8))
@settings(max_examples=25)
def test_the_surfaces_exponent_is_recovered(a: float, b: float, span: float) -> None:
    """The minimum of a parabola is off that of the surface by the same factor for every budget."""
    laws, _ = fit_laws(isoflops(surface_runs(BUDGETS, a=a, b=b, span=span)), resamples=10)
    assert laws["tokens"].exponent == pytest.approx(a / (a + b), rel=2e-3)
    assert laws["parameters"].exponent == pytest.approx(b / (a + b), rel=2e-3)


def test_a_grid_of_four_sizes_and_four_budgets_recovers_the_exponent_within_two_percent() -> None:
    truth = CHINCHILLA["a"] / (CHINCHILLA["a"] + CHINCHILLA["b"])
    for seed in range(20):
        laws, _ = fit_laws(isoflops(surface_runs(BUDGETS, sizes=4, noise=5e-4, seed=seed)), resamples=10)
        assert laws["tokens"].exponent == pytest.approx(truth, rel=0.02)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("budgets", "sizes", "noise"), [(3, 5, 0.005), (4, 4, 0.01)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(budgets: int, sizes: int, noise: float) -> None:
    truth = CHINCHILLA["a"] / (CHINCHILLA["a"] + CHINCHILLA["b"])
    places = np.geomspace(6e18, 6e21, budgets)
    best = places[-1] / 6 / best_parameters(places[-1], **CHINCHILLA)
    hits = {"exponent": 0, "optimum": 0, "forecast": 0}
    repetitions = 200
    for seed in range(repetitions):
        laws, _ = fit_laws(isoflops(surface_runs(places, sizes, noise=noise, seed=seed)), resamples=300, seed=seed)
        law = laws["tokens"]
        hits["exponent"] += law.exponent_low <= truth <= law.exponent_high
        hits["optimum"] += law.optima_low[-1] <= best <= law.optima_high[-1]
        _, low, high = law.predict(1e24)
        hits["forecast"] += low <= best * (1e24 / places[-1]) ** truth <= high
    for what, count in hits.items():
        assert 0.9 <= count / repetitions <= 0.99, what


def test_more_noise_makes_wider_intervals_and_equal_seeds_equal_ones() -> None:
    widths = []
    for noise in (0.001, 0.01):
        curves = isoflops(surface_runs(BUDGETS, noise=noise))
        laws, _ = fit_laws(curves, seed=5)
        again, _ = fit_laws(curves, seed=5)
        assert again == laws
        other, _ = fit_laws(curves, seed=6)
        assert other["tokens"].exponent_low != laws["tokens"].exponent_low
        widths.append(laws["tokens"].exponent_high - laws["tokens"].exponent_low)
    assert widths[1] > 5 * widths[0]


def test_the_interval_widens_with_the_distance_of_extrapolation() -> None:
    law = fit_laws(isoflops(surface_runs(BUDGETS, noise=0.005)))[0]["tokens"]
    value, low, high = law.predict(np.array([6e20, 1e23, 1e26]))
    assert (low < value).all()
    assert (value < high).all()
    assert (np.diff(high / low) > 0).all()


def test_forecasts_say_how_far_they_reach() -> None:
    runs = surface_runs(BUDGETS)
    for target, factor, words in [
        (BUDGETS[0] / 2, 0.5, "0.5 times the smallest budget that was trained: an extrapolation"),
        (1e20, 1.0, "within the budgets that were trained"),
        (BUDGETS[-1] * 100, 100.0, "100 times the largest budget that was trained: an extrapolation"),
    ]:
        result = study(runs, target=target)
        assert result.forecast is not None
        assert result.forecast.factor == pytest.approx(factor)
        assert words in result.summary


def test_laws_of_parameters_that_cross_are_called_out() -> None:
    """Small models: the embedding's part falls with size, and a power law lets it fall below nothing."""
    runs = [replace(run, non_embedding=round(run.parameters**2 / 1e10)) for run in surface_runs(BUDGETS)]
    assert not any("passes that of all" in warning for warning in study(runs, target=6e21).warnings)
    assert any("passes that of all" in warning for warning in study(runs, target=1e25).warnings)


def test_fewer_than_three_budgets_show_no_law_but_their_optima(tmp_path: Path) -> None:
    for count, words in [(1, "1 budget with an optimum"), (2, "2 budgets with an optimum")]:
        runs = surface_runs(BUDGETS[:count])
        with pytest.raises(DataError, match=words):
            fit_laws(isoflops(runs))
        result = study(runs, target=1e22)
        assert result.laws == {}
        assert result.forecast is None
        assert f"No law: {words}" in result.summary
        assert result.to_table().row_count == count
        plot(result, [tmp_path / "few.svg"])


@pytest.mark.slow
def test_curves_without_an_optimum_are_passed_over_and_explained(tmp_path: Path) -> None:
    good = surface_runs(BUDGETS, noise=1e-3)
    one_sided = [run for run in surface_runs([6e22]) if run.parameters > best_parameters(6e22, **CHINCHILLA)]
    result = study([*good, *one_sided, *surface_runs([6e23], sizes=2)], left_out={"hot": "its loss was not finite"})
    assert result.laws == study(good).laws
    assert "At 6e22 FLOPs: its minimum would lie at" in result.summary
    assert "At 6e23 FLOPs: 2 sizes are too few" in result.summary
    assert "Left out: hot (its loss was not finite)" in result.summary
    content = json.loads(result.to_json())
    assert content["laws"]["tokens"]["exponent"] == result.laws["tokens"].exponent
    assert [curve["optimum"] is None for curve in content["curves"]] == [False] * 4 + [True] * 2
    plot(result, [tmp_path / "a.png", tmp_path / "a.svg"], title="a <study>")
    plot(result, [tmp_path / "b.svg"], title="a <study>")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.svg").read_text()
    assert svg.count("no optimum") == 2


def test_three_sizes_a_budget_leave_no_interval() -> None:
    result = study(surface_runs(BUDGETS, sizes=3), target=1e23)
    assert math.isnan(result.laws["tokens"].exponent_low)
    assert any("there is no interval" in warning for warning in result.warnings)
    assert json.loads(result.to_json())["forecast"]["values"]["tokens"][1] is None
    assert "nan" not in result.summary


def test_doubts_are_spoken() -> None:
    def warned(runs: list[IsoFlopRun], words: str) -> bool:
        return any(words in warning for warning in study(runs).warnings)

    quiet = surface_runs(BUDGETS, noise=1e-3)
    assert study(quiet).warnings == []
    assert warned(surface_runs([1e18, 2e18, 4e18], noise=1e-3), "budgets span 0.60 decades")
    assert warned(surface_runs(BUDGETS[:3], sizes=4), "only 3 runs more")
    four, five = surface_runs(BUDGETS, sizes=4), surface_runs([*BUDGETS, 6e22], sizes=4)
    assert warned(four, "only 4 runs more than the parabolas need")
    assert not warned(five, "than the parabolas need")
    one = [*surface_runs(BUDGETS[:1], sizes=4), *surface_runs(BUDGETS[1:3], sizes=3)]
    assert warned(one, "only 1 run more than")
    loud = surface_runs(BUDGETS, noise=0.1, seed=1)
    assert warned(loud, "opened downwards")
    assert warned(loud, "leaves the trained range") or warned(loud, "opened downwards")
    # One budget trained worse with few tokens: its minimum moves, while its parabola fits as well as before.
    tilted = [
        replace(run, loss=run.loss - 0.1 * math.log10(run.tokens)) if run.compute == BUDGETS[1] else run
        for run in quiet
    ]
    assert warned(tilted, "scatter about the line more")


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_a_target_that_is_no_budget_is_refused(target: float) -> None:
    with pytest.raises(DataError, match="no number of FLOPs"):
        study(surface_runs(BUDGETS), target=target)
