"""Fits keep the sign of the data, know how sure they are, and refuse what shows no law."""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from cordillera.errors import DataError, RunError
from cordillera.training.scaling.power_law import MeasuredRun, fit_power_law, measure, plot, study
from tests.training.sample_runs import make_run

# Wukong, Table 5: GFLOP an example and relative log loss in percent, first task.
WUKONG = [(0.53, -0.35), (1.25, -0.45), (2.12, -0.53), (5.6, -0.60), (22.23, -0.67), (61, -0.70), (108, -0.76)]
DLRM = [(1.37, -0.11), (3.85, -0.23), (7.29, -0.28), (14.61, -0.32), (31, -0.37), (71.2, -0.36)]


def test_wukongs_own_table_gives_a_falling_law_where_its_printed_formula_rises() -> None:
    law = fit_power_law(*zip(*WUKONG, strict=True), floor=-100.0)
    assert law.exponent_high < 0
    assert law.exponent == pytest.approx(-0.00071, abs=5e-6)
    assert law.scale == pytest.approx(99.56, abs=5e-3)
    printed = -100 + 99.56 * np.array([0.53, 108]) ** 0.00071
    assert printed[1] > printed[0]
    table = [value for _, value in WUKONG]
    assert table[-1] < table[0]
    assert fit_power_law(*zip(*DLRM, strict=True), floor=-100.0).exponent_high < 0


@given(st.floats(0.01, 2), st.floats(-0.6, 0.6).filter(lambda b: abs(b) > 1e-3), st.sampled_from([0.0, 0.5, -3.0]))
@settings(max_examples=50)
def test_an_exact_law_is_recovered_with_its_sign(scale: float, exponent: float, floor: float) -> None:
    x = np.geomspace(1, 1000, 5)
    law = fit_power_law(x, floor + scale * x**exponent, floor=floor)
    assert law.exponent == pytest.approx(exponent, abs=1e-8)
    assert law.scale == pytest.approx(scale, rel=1e-7)
    assert law.r_squared == pytest.approx(1.0, abs=1e-6)
    assert law.decades == pytest.approx(3.0)
    assert np.abs(law.residuals).max() < 1e-9 * (1 + abs(floor) + max(law.y))


def test_the_interval_is_that_of_ordinary_least_squares() -> None:
    random = np.random.default_rng(0)
    x = np.geomspace(1e6, 1e9, 8)
    y = 0.9 * x**-0.02 * np.exp(random.normal(0, 0.002, 8))
    law = fit_power_law(x, y)
    line = stats.linregress(np.log(x), np.log(y))
    half = stats.t.ppf(0.975, 6) * line.stderr
    assert (law.exponent_low, law.exponent_high) == pytest.approx((line.slope - half, line.slope + half), rel=1e-9)
    assert law.r_squared == pytest.approx(line.rvalue**2)


def test_the_interval_covers_the_true_exponent_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    x = np.geomspace(1, 100, 6)
    hits = 0
    for _ in range(400):
        law = fit_power_law(x, x**-0.1 * np.exp(random.normal(0, 0.01, 6)), resamples=0)
        hits += law.exponent_low <= -0.1 <= law.exponent_high
    assert 0.92 <= hits / 400 <= 0.98


def test_repeating_seeds_does_not_make_sizes() -> None:
    x = [1.0, 10.0, 100.0, 1000.0]
    y = [0.9, 0.85, 0.83, 0.78]
    once = fit_power_law(x, y)
    often = fit_power_law(x * 10, y * 10)
    assert (often.exponent_low, often.exponent_high) == pytest.approx((once.exponent_low, once.exponent_high))
    assert often.repetitions == [10] * 4
    with pytest.raises(DataError, match="2 sizes cannot show a law"):
        fit_power_law([1.0, 10.0] * 5, [0.9, 0.8] * 5)


def test_noise_does_not_become_a_law() -> None:
    random = np.random.default_rng(2)
    law = fit_power_law(np.geomspace(1, 100, 5), 0.8 + random.normal(0, 0.001, 5))
    assert law.exponent_low < 0 < law.exponent_high


def test_seed_interval_is_seeded_and_needs_two_seeds_a_size() -> None:
    random = np.random.default_rng(3)
    x = np.repeat(np.geomspace(1, 100, 5), 4)
    y = x**-0.1 * np.exp(random.normal(0, 0.01, x.size))
    a, b = fit_power_law(x, y, seed=1), fit_power_law(x, y, seed=1)
    assert a == b
    assert a.seed_low < a.exponent < a.seed_high
    assert math.isnan(fit_power_law(x[::4], y[::4]).seed_low)


def test_a_fitted_floor_is_found_or_called_undetermined() -> None:
    x = np.geomspace(1, 1e4, 9)
    law = fit_power_law(x, 0.7 + 0.2 * x**-0.35, floor=None)
    assert law.floor == pytest.approx(0.7, abs=1e-5)
    assert law.exponent == pytest.approx(-0.35, abs=1e-4)
    assert law.floor_fitted
    assert law.predict(x) == pytest.approx(law.y, abs=1e-6)
    straight = fit_power_law(x, 1.0 - 0.01 * np.log(x), floor=None)
    assert any("bound" in warning for warning in straight.warnings)
    with pytest.raises(DataError, match="at least 4"):
        fit_power_law([1, 2, 4], [0.9, 0.8, 0.75], floor=None)
    with pytest.raises(DataError, match="no room"):
        fit_power_law(x, 0.7 + 0.2 * x**-0.35, floor=None, floor_bounds=(0.9, 0.95))


def test_short_spans_and_few_sizes_are_called_out() -> None:
    law = fit_power_law([1, 2, 4], [0.9, 0.88, 0.865])
    assert any("0.60 decades" in warning for warning in law.warnings)
    assert any("one degree of freedom" in warning for warning in law.warnings)
    assert [line.split(":")[0] for line in law.summary.splitlines()[1:]] == ["warning", "warning"]
    assert not fit_power_law([1, 4, 16, 64], [0.9, 0.88, 0.865, 0.85]).warnings


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1, 2, 3], "one length"),
        ([0, 1, 2], [1, 1, 1], "point 0"),
        ([1, 2, 3], [1, math.nan, 1], "point 1"),
        ([1, 2, 3], [1, 1, math.inf], "point 2"),
        ([1, 2, 3], [0.9, 0.5, 0.4], "not above the floor"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x: list[float], y: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit_power_law(x, y, floor=0.45)


@pytest.mark.parametrize("floor", [0.5, None])
def test_the_band_holds_the_law_and_widens_outwards(floor: float | None) -> None:
    random = np.random.default_rng(4)
    x = np.geomspace(1, 1000, 8)
    law = fit_power_law(x, 0.5 + 0.3 * x**-0.3 + random.normal(0, 0.002, 8), floor=floor)
    low, high = law.band(x)
    assert (low < law.predict(x)).all()
    assert (law.predict(x) < high).all()
    far_low, far_high = law.band(np.array([1e-2]))
    assert far_high[0] - far_low[0] > high[0] - low[0]


def test_the_band_is_the_interval_of_a_regression_whose_intercept_lies_there() -> None:
    random = np.random.default_rng(8)
    x = np.geomspace(1, 1000, 7)
    y = 0.5 + 0.3 * x**-0.3 * np.exp(random.normal(0, 0.01, 7))
    law = fit_power_law(x, y, floor=0.5, level=0.9)
    for place in (0.1, 20.0, 3e4):
        line = stats.linregress(np.log(x / place), np.log(y - 0.5))
        half = stats.t.ppf(0.95, 5) * line.intercept_stderr
        low, high = law.band(place)
        assert float(law.predict(place)) == pytest.approx(0.5 + math.exp(line.intercept), rel=1e-9)
        assert (low - 0.5, high - 0.5) == pytest.approx(
            (math.exp(line.intercept - half), math.exp(line.intercept + half)), rel=1e-9
        )


def test_a_fitted_floor_has_the_covariance_and_the_band_of_scipys_curve_fit() -> None:
    random = np.random.default_rng(9)
    x = np.geomspace(1, 1e4, 9)
    y = 0.7 + 0.2 * x**-0.35 + random.normal(0, 5e-4, 9)
    law = fit_power_law(x, y, floor=None, level=0.9)
    logs = np.log(x)
    centre = logs.mean()

    def formula(log: np.ndarray, floor: float, start: float, exponent: float) -> np.ndarray:
        return floor + np.exp(start + exponent * (log - centre))

    best, covariance = optimize.curve_fit(formula, logs, y, p0=(0.6, -3.0, -0.3), xtol=1e-14, ftol=1e-14)
    assert (law.floor, law.exponent) == pytest.approx((best[0], best[2]), rel=1e-5)
    assert np.array(law.covariance) == pytest.approx(covariance, rel=1e-3)
    quantile = stats.t.ppf(0.95, 9 - 3)
    half = quantile * math.sqrt(covariance[2, 2])
    assert (law.exponent_low, law.exponent_high) == pytest.approx((best[2] - half, best[2] + half), rel=1e-3)
    residual = y - formula(logs, *best)
    assert law.residuals == pytest.approx(residual, abs=1e-7)
    assert law.r_squared == pytest.approx(1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum(), rel=1e-6)
    assert not law.warnings
    for place in (1e-1, 50.0, 1e6):
        steps = 1e-6 * np.eye(3)
        gradient = [(formula(np.log(place), *(best + d)) - formula(np.log(place), *(best - d))) / 2e-6 for d in steps]
        wide = quantile * math.sqrt(gradient @ covariance @ gradient)
        low, high = law.band(place)
        assert (high - low) / 2 == pytest.approx(wide, rel=1e-3)
        assert (high + low) / 2 == pytest.approx(formula(np.log(place), *best), rel=1e-6)


@pytest.mark.parametrize(
    ("true", "bounds", "found", "at_bound"),
    [
        (-3.0, None, -3.0, False),  # below zero: searched below the smallest value
        (-0.1, None, -0.1, False),  # some values above zero, some below
        (0.0, None, 0.0, True),
        (-0.5, None, -0.5, False),
        (0.7, (0.0, 0.65), 0.65, True),
        (0.7, (0.705, 0.8), 0.705, True),
        (0.7, (0.65, 5.0), 0.7, False),
    ],
)
def test_a_fitted_floor_is_searched_within_its_bounds(
    true: float, bounds: tuple[float, float] | None, found: float, at_bound: bool
) -> None:
    x = np.geomspace(1, 1e4, 9)
    law = fit_power_law(x, true + 0.2 * x**-0.35, floor=None, floor_bounds=bounds)
    assert law.floor == pytest.approx(found, abs=1e-5)
    assert any("bound" in warning for warning in law.warnings) == at_bound


def test_without_bounds_a_floor_lies_at_most_ten_spreads_below_values_that_are_not_positive() -> None:
    """A straight line in the logarithm has no floor: the search ends at its bound."""
    x = np.geomspace(1, 1e4, 5)
    for top in (0.0, 0.25):  # the smallest value is below zero, or zero
        y = top - 0.25 * np.linspace(0, 1, 5)
        law = fit_power_law(x, y, floor=None)
        assert law.floor == pytest.approx(y.min() - 10 * 0.25, abs=1e-3)
        assert any("bound" in warning for warning in law.warnings)


def test_equal_values_are_a_flat_law_of_which_no_share_is_explained() -> None:
    law = fit_power_law([1.0, 10.0, 100.0, 1000.0], [1.0] * 4)
    assert (law.scale, law.exponent, law.exponent_low, law.exponent_high) == (1.0, 0.0, 0.0, 0.0)
    assert math.isnan(law.r_squared)
    assert law.residuals == [0.0] * 4


def test_the_seed_interval_is_that_of_all_ways_to_draw_the_seeds() -> None:
    """Three sizes of two seeds have 4 ** 3 equally likely draws, which are listed here."""
    x, floor = np.geomspace(1, 100, 3), 0.25
    pairs = [(0.90, 0.97), (0.81, 0.84), (0.70, 0.78)]
    law = fit_power_law(np.repeat(x, 2), np.array(pairs).ravel(), floor=floor, level=0.8, resamples=20_000)
    slopes = []
    for draw in itertools.product(range(4), repeat=3):
        means = [(pair[code // 2] + pair[code % 2]) / 2 for pair, code in zip(pairs, draw, strict=True)]
        slopes.append(np.polyfit(np.log(x), np.log(np.array(means) - floor), 1)[0])
    low, high = np.quantile(slopes, [0.1, 0.9], method="inverted_cdf")
    assert (law.seed_low, law.seed_high) == pytest.approx((low, high), abs=2e-3)


def test_draws_of_seeds_below_the_floor_are_passed_over() -> None:
    x, floor = np.repeat([1.0, 10.0, 100.0], 2), 0.5
    law = fit_power_law(x, [0.9, 0.9, 0.8, 0.8, 0.45, 0.75], floor=floor, resamples=200)
    slopes = [
        np.polyfit(np.log([1.0, 10.0, 100.0]), np.log(np.array([0.9, 0.8, last]) - floor), 1)[0] for last in (0.6, 0.75)
    ]
    assert (law.seed_low, law.seed_high) == pytest.approx(tuple(slopes), rel=1e-9)
    assert math.isnan(fit_power_law(x, [0.9, 0.9, 0.8, 0.8, 0.45, 0.75], floor=floor, resamples=0).seed_low)


def test_a_studys_table_shows_the_law_beside_the_means() -> None:
    points = [MeasuredRun("one", f, v, s) for f, v in ((1e6, 0.9), (4e6, 0.8), (16e6, 0.78)) for s in (0, 1)]
    result = study(points, level=0.5)
    law = result.laws["one"]
    assert law.level == 0.5
    columns = [list(column.cells) for column in result.to_table().columns]
    assert columns[1] == ["1,000,000", "4,000,000", "16,000,000"]
    assert columns[2] == ["0.90000", "0.80000", "0.78000"]
    assert columns[3] == ["2"] * 3
    assert [float(text) for text in columns[4]] == pytest.approx(law.predict([1e6, 4e6, 16e6]), abs=1e-5)
    assert [float(text) for text in columns[5]] == pytest.approx(
        [mean - fit for mean, fit in zip([0.9, 0.8, 0.78], law.predict([1e6, 4e6, 16e6]), strict=True)], abs=1e-5
    )


def test_a_study_fits_every_model_and_names_those_it_cannot(tmp_path: Path) -> None:
    points = [MeasuredRun("wukong", f, 0.8 * f**-0.02, s) for f in (1e6, 4e6, 16e6, 64e6) for s in (0, 1)]
    points += [MeasuredRun("a <b>", f, 0.85, 0) for f in (1e6, 4e6)]
    result = study(points)
    assert list(result.laws) == ["wukong"]
    assert "2 sizes" in result.failures["a <b>"]
    assert "wukong" in result.summary
    assert json.loads(result.to_json())["laws"]["wukong"]["exponent"] == pytest.approx(-0.02)
    assert result.to_table().row_count == 4
    references = {"far": 9.0, "deep": -7.0, "near": 0.6}
    plot(result, [tmp_path / "a.png", tmp_path / "a.svg"], bayes=0.5, references=references)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "a.svg").read_text()
    assert "Bayes-optimal" in svg
    assert "wukong: exponent" in svg
    assert "far: 9, above the frame" in svg
    assert "deep: -7, below the frame" in svg
    assert "near: " not in svg  # it has a line of its own
    plot(result, [tmp_path / "b.svg"], bayes=0.5, references=references)
    assert (tmp_path / "b.svg").read_text() == svg
    dark = svg[svg.index("@media (prefers-color-scheme: dark)") : svg.index("</style>")]
    ElementTree.fromstring(svg)
    for kind, colour in set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", svg.replace(dark, ""))):
        (shown,) = re.findall(rf'"{kind}: {colour}"\]{{{kind}: (#[0-9a-f]{{6}}) !important}}', dark)
        is_ground = colour in ("#ffffff", "#dde2e8")
        assert (sum(bytes.fromhex(shown[1:])) < 3 * 96) == is_ground, "dark grounds, light lines and texts"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.svg"]


def test_a_short_axis_has_several_labels(tmp_path: Path) -> None:
    points = [MeasuredRun("dcn", flops, value, 0) for flops, value in ((66e3, 0.9), (150e3, 0.89), (418e3, 0.87))]
    plot(study(points), [tmp_path / "a.svg"])
    assert set(re.findall(r">(\d+ k)<", (tmp_path / "a.svg").read_text())) == {"70 k", *(f"{n}00 k" for n in "1234")}


def test_measurements_come_from_run_folders(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", seed=3, flops=600)
    (found,) = measure([run])
    assert (found.model, found.flops, found.seed) == ("wukong", 600.0, 3)
    assert 0.5 < found.value < 1
    run.write_json("model.json", {"name": "wukong"})
    with pytest.raises(DataError, match="'training_flops'"):
        measure([run])
    (run.folder / "evaluation.json").unlink()
    with pytest.raises(RunError, match="let the run finish first"):
        measure([run])
