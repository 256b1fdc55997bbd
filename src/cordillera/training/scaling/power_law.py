"""Power laws of quality against compute: fits of NE (or a loss) to FLOPs, with confidence intervals.

The law is ``y = floor + a * x ** b``. The exponent keeps the sign that the data gives it: a loss that falls with
compute has ``b < 0``. Wukong (Zhang et al. 2024) prints its fit as ``y = -100 + 99.56 x ** 0.00071`` for the relative
log loss in percent over GFLOP per example; with that sign the loss would rise with compute, whereas its own Table 5
falls. The law that its table supports is ``y = -100 + 99.56 x ** -0.00071``: the same figures with the opposite sign.

Seeds of one size are averaged before the fit, and the interval of the exponent comes from the scatter of sizes about
the line, so ten seeds of three sizes count as three points. The variation due to seeds alone is reported separately.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
from numpy.typing import NDArray
from rich.table import Table

from cordillera.errors import DataError
from cordillera.run import Run, read_recipe
from cordillera.training.ranking.evaluation import Evaluation, jsonable, number

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_Floats = NDArray[np.float64]
_FEWEST_SIZES = 3
_COLOURS = ("#1f5fa8", "#b8520f", "#2a7d4f", "#7a4aa8", "#8a6d00", "#b03060")
_STYLE: Any = {
    "svg.hashsalt": "cordillera",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of models are not formulas
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_DARK = {  # colours of drawings, and what stands for them where dark pages are preferred
    "#ffffff": "#1e2129", "#000000": "#a3b0be", "#dde2e8": "#3a4552", "#44505c": "#a3b0be", "#5a6672": "#a3b0be",
    "#1f5fa8": "#6fb1f2", "#b8520f": "#f2a15f", "#2a7d4f": "#6fcf97", "#7a4aa8": "#c39bea",
}  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class MeasuredRun:
    """Trained model of a family; one law is fitted to each family.

    Attributes:
        flops: Training FLOPs per example (any unit, the same for all).
        value: NE or a loss.
        seed: Number of the repetition, or None.
    """

    model: str
    flops: float
    value: float
    seed: int | None = None


@dataclass(frozen=True)
class PowerLaw:
    """The fit ``y = floor + scale * x ** exponent``.

    Attributes:
        exponent: ``b``, with the sign that the data has.
        exponent_low: Lower bound of the exponent's interval (Student's t over sizes), to ``exponent_high``.
        floor: Limit at infinite compute.
        floor_fitted: Whether the floor was fitted rather than given.
        seed_low: Lower bound of the exponent's percentile interval under resampling of seeds within each size, to
            ``seed_high``; NaN unless every size has at least two.
        level: Confidence level of both intervals.
        r_squared: R squared of the size means: of ``log(y - floor)`` with a given floor, of ``y`` with a fitted one.
        residuals: ``y``, the mean of each size in ``x``, minus the law.
        decades: ``log10`` of the ratio of the largest to the smallest size.
        warnings: Reasons why the fit may mean less than it seems.
        centre: Mean of ``log(x)``.
        covariance: Covariance of ``(floor, log(scale * exp(centre) ** exponent), exponent)``.
    """

    scale: float
    exponent: float
    exponent_low: float
    exponent_high: float
    floor: float
    floor_fitted: bool
    seed_low: float
    seed_high: float
    level: float
    r_squared: float
    x: list[float]
    y: list[float]
    residuals: list[float]
    repetitions: list[int]
    decades: float
    warnings: list[str]
    centre: float
    covariance: list[list[float]]

    def predict(self, x: Any) -> _Floats:
        """Return the law at ``x`` (an array or a number)."""
        return self.floor + self.scale * np.asarray(x, dtype=np.float64) ** self.exponent

    def band(self, x: Any) -> tuple[_Floats, _Floats]:
        """Return the bounds of the interval of the law itself (not of new runs) at ``x``."""
        distance = np.log(np.asarray(x, dtype=np.float64)) - self.centre
        above = self.predict(x) - self.floor
        covariance = np.array(self.covariance)
        degrees = len(self.x) - (3 if self.floor_fitted else 2)
        quantile = float(scipy.stats.t.ppf((1 + self.level) / 2, degrees))
        if self.floor_fitted:
            slope = np.stack([np.ones_like(above), above, above * distance])
            half = quantile * np.sqrt(np.einsum("i...,ij,j...->...", slope, covariance, slope))
            return self.floor + above - half, self.floor + above + half
        slope = np.stack([np.ones_like(above), distance])
        half = quantile * np.sqrt(np.einsum("i...,ij,j...->...", slope, covariance[1:, 1:], slope))
        return self.floor + above * np.exp(-half), self.floor + above * np.exp(half)

    @property
    def summary(self) -> str:
        """The fit in a line of text, followed by one line per warning."""
        floor = (
            f"{self.floor:.6g}{' (fitted)' if self.floor_fitted else ''} + " if self.floor or self.floor_fitted else ""
        )
        return (
            f"y = {floor}{self.scale:.6g} * x^{self.exponent:.5g}; exponent {100 * self.level:g} % interval "
            f"[{self.exponent_low:.5g}, {self.exponent_high:.5g}], {len(self.x)} sizes over {self.decades:.2f} decades"
            f", R^2 {self.r_squared:.3f}" + "".join(f"\nwarning: {warning}" for warning in self.warnings)
        )


# One derivation from points to law: checks, fit and intervals share nearly all of their values.
def fit_power_law(
    x: Sequence[float],
    y: Sequence[float],
    *,
    floor: float | None = 0.0,
    floor_bounds: tuple[float, float] | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> PowerLaw:
    """Fit ``y = floor + a * x ** b``.

    With a given floor, the fit is an ordinary least squares of ``log(mean y - floor)`` on ``log x``, one point per
    size, with Student's interval and ``sizes - 2`` degrees of freedom. With a fitted floor, it is a least squares in
    ``y`` (in log space a floor going to minus infinity would always fit best), with the interval from the Jacobian and
    ``sizes - 3`` degrees.

    Args:
        x: FLOPs of each run, positive. Runs with equal ``x`` are repetitions of one size.
        y: NE or loss of each run.
        floor: A known floor (the Bayes-optimal NE; 0 for a plain power law), or None to fit it.
        floor_bounds: Bounds of a fitted floor. Default: from 0 to the smallest mean ``y``, or from ten times the spread
            of the means below that mean if it is not positive.
        level: Confidence level.
        resamples: Number of draws of the bootstrap over seeds (given floor only).
        seed: Seed of those draws.

    Raises:
        DataError: If lengths differ, values are not finite or not positive where they must be, there are fewer than
            three sizes (four with a fitted floor), or a mean lies at or below the floor.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if xs.ndim != 1 or xs.shape != ys.shape:
        raise DataError(
            f"x and y must be lists of one length, got shapes {xs.shape} and {ys.shape}", where="scaling law"
        )
    if not (np.isfinite(xs).all() and np.isfinite(ys).all() and (xs > 0).all()):
        wrong = int(np.flatnonzero(~(np.isfinite(xs) & np.isfinite(ys) & (xs > 0)))[0])
        raise DataError(
            f"point {wrong} is ({xs[wrong]}, {ys[wrong]}); FLOPs must be positive and values finite",
            where="scaling law",
            remedy="leave out runs that diverged and say so",
        )
    sizes, place = np.unique(xs, return_inverse=True)
    needed = _FEWEST_SIZES + (floor is None)
    if sizes.size < needed:
        raise DataError(
            f"{sizes.size} sizes cannot show a law with {needed - 1} parameters; at least {needed} are needed",
            where="scaling law",
            remedy="train more sizes" + (", or give the floor" if floor is None else ""),
        )
    repetitions = np.bincount(place)
    means = np.bincount(place, weights=ys) / repetitions
    logs = np.log(sizes)
    decades = float((logs[-1] - logs[0]) / math.log(10))
    warnings = []
    if decades < 1:
        warnings.append(f"the sizes span {decades:.2f} decades of FLOPs; less than one says little about a law")
    if sizes.size == needed:
        warnings.append(f"{sizes.size} sizes leave one degree of freedom, so the interval is very wide")
    if floor is None:
        floor, start, exponent, covariance, at_bound = _fit_floor(logs, means, floor_bounds)
        if at_bound:
            warnings.append(f"the fitted floor sits on its bound ({floor:.6g}); the data does not determine it")
        degrees, fitted = sizes.size - 3, True
    else:
        _above(means, floor, sizes)
        start, exponent, covariance = _least_squares(logs, np.log(means - floor))
        degrees, fitted = sizes.size - 2, False
    centre = float(logs.mean())
    half = float(scipy.stats.t.ppf((1 + level) / 2, degrees)) * math.sqrt(covariance[2, 2])
    scale = math.exp(start - exponent * centre)
    law = floor + np.exp(start + exponent * (logs - centre))
    if fitted:
        r_squared = _r_squared(means, law)
        seeds = (math.nan, math.nan)
    else:
        r_squared = _r_squared(np.log(means - floor), np.log(law - floor))
        seeds = _seed_interval(logs, ys, place, repetitions, floor, level, resamples, seed)
    return PowerLaw(
        scale=scale,
        exponent=exponent,
        exponent_low=exponent - half,
        exponent_high=exponent + half,
        floor=float(floor),
        floor_fitted=fitted,
        seed_low=seeds[0],
        seed_high=seeds[1],
        level=level,
        r_squared=r_squared,
        x=sizes.tolist(),
        y=means.tolist(),
        residuals=(means - law).tolist(),
        repetitions=repetitions.tolist(),
        decades=decades,
        warnings=warnings,
        centre=centre,
        covariance=covariance.tolist(),
    )


def _above(means: _Floats, floor: float, sizes: _Floats) -> None:
    if (means <= floor).any():
        wrong = int(np.flatnonzero(means <= floor)[0])
        raise DataError(
            f"the mean at {sizes[wrong]:g} FLOPs is {means[wrong]:.6g}, which is not above the floor {floor:.6g}",
            where="scaling law",
            remedy="check that the floor is of the same test set, or fit it (floor = None)",
        )


def _least_squares(logs: _Floats, targets: _Floats) -> tuple[float, float, _Floats]:
    """Return the value at the centre, the slope, and the covariance of (no floor, value, slope)."""
    distance = logs - logs.mean()
    spread = float(distance @ distance)
    start, slope = float(targets.mean()), float(distance @ targets) / spread
    residual = targets - start - slope * distance
    noise = float(residual @ residual) / (logs.size - 2)
    return start, slope, np.diag([0.0, noise / logs.size, noise / spread])


def _fit_floor(
    logs: _Floats, means: _Floats, bounds: tuple[float, float] | None
) -> tuple[float, float, float, _Floats, bool]:
    span = float(means.max() - means.min()) or abs(float(means[0])) or 1.0
    smallest = float(means.min())
    low, high = bounds or (0.0 if smallest > 0 else smallest - 10 * span, smallest)
    high = min(high, smallest)
    if not low < high:
        raise DataError(
            f"the floor's bounds ({low:g}, {high:g}) leave no room below the smallest mean {smallest:.6g}",
            where="scaling law",
        )
    distance = logs - logs.mean()

    def errors(parameters: _Floats) -> _Floats:
        floor, start, exponent = parameters
        return (floor + np.exp(start + exponent * distance) - means) / span

    best = None
    for share in (0.02, 0.3, 0.7, 0.97):
        floor = low + share * (high - low)
        # Only a starting point; the smallest mean may lie on the upper bound, hence the small margin.
        start, exponent, _ = _least_squares(logs, np.log(means - floor + 1e-3 * span))
        limits = ([low, -np.inf, -np.inf], [high, np.inf, np.inf])
        found = scipy.optimize.least_squares(
            errors,
            [floor, start, exponent],
            bounds=limits,
            x_scale=[span, 1.0, 1.0],
            xtol=1e-14,
            ftol=1e-14,
            gtol=1e-14,
            max_nfev=2000,
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None  # there is more than one start
    floor, start, exponent = best.x
    noise = 2 * best.cost / (logs.size - 3)
    covariance = noise * np.linalg.pinv(best.jac.T @ best.jac)
    at_bound = min(floor - low, high - floor) < 1e-6 * (high - low)
    return float(floor), float(start), float(exponent), covariance, bool(at_bound)


def _r_squared(values: _Floats, law: _Floats) -> float:
    total = float(((values - values.mean()) ** 2).sum())
    return 1 - float(((values - law) ** 2).sum()) / total if total > 0 else math.nan


def _seed_interval(
    logs: _Floats,
    ys: _Floats,
    place: NDArray[np.int64],
    repetitions: NDArray[np.int64],
    floor: float,
    level: float,
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    if int(repetitions.min()) < 2 or resamples < 1:
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    draws = np.empty((resamples, logs.size))
    for size in range(logs.size):
        values = ys[place == size]
        draws[:, size] = values[random.integers(0, values.size, (resamples, values.size))].mean(axis=1)
    usable = draws[(draws > floor).all(axis=1)]
    if not usable.size:
        return math.nan, math.nan
    distance = logs - logs.mean()
    slopes = np.log(usable - floor) @ distance / float(distance @ distance)
    low, high = np.quantile(slopes, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class ScalingStudy:
    """Laws of several models for one metric, by FLOPs in ``unit``.

    Attributes:
        laws: Laws by model; models whose law could not be fitted are in ``failures``, with the reason.
    """

    measurements: list[MeasuredRun]
    laws: dict[str, PowerLaw]
    failures: dict[str, str] = field(default_factory=dict)
    metric: str = "NE"
    unit: str = "training FLOPs an example"

    def to_json(self) -> str:
        """Return strict JSON; NaN becomes null."""
        return json.dumps(jsonable(asdict(self)), indent=1, allow_nan=False)

    def to_table(self) -> Table:
        """Return a table for the terminal: sizes with mean, seeds and residual."""
        table = Table(box=None, pad_edge=False)
        for heading in ("model", self.unit, self.metric, "seeds", "law", "residual"):
            table.add_column(heading, justify="left" if heading == "model" else "right")
        for model, law in self.laws.items():
            rows = zip(law.x, law.y, law.repetitions, law.residuals, strict=True)
            for x, y, count, residual in rows:
                table.add_row(model, f"{x:,.0f}", f"{y:.5f}", str(count), f"{y - residual:.5f}", f"{residual:+.5f}")
        return table

    @property
    def summary(self) -> str:
        """One line of text per model."""
        lines = [f"{model}: {law.summary}" for model, law in self.laws.items()]
        return "\n".join([*lines, *(f"{model}: no law ({why})" for model, why in self.failures.items())])


def measure(runs: Sequence[Run]) -> list[MeasuredRun]:
    """Read training FLOPs and test NE, the mean over tasks, from finished ``runs``.

    Raises:
        RunError: If a run lacks ``model.json`` or ``evaluation.json``, or one is damaged.
        DataError: If a file lacks a number.
    """
    measurements = []
    for run in runs:
        card, name = run.read_json("model.json"), "evaluation.json"
        evaluation = Evaluation.from_object(run.read_json(name), str(run.folder / name))
        try:
            values = [task.metrics["ne"] for task in evaluation.tasks.values()]
            flops = number(card["training_flops"])
        except KeyError as error:
            raise DataError(f"does not hold {error}", where=str(run.folder)) from error
        seed = read_recipe(run)[1].get("seed")
        measurements.append(MeasuredRun(str(card.get("name")), flops, math.fsum(values) / len(values), seed))
    return measurements


def study(
    measurements: Sequence[MeasuredRun],
    *,
    floor: float | None = 0.0,
    metric: str = "NE",
    unit: str = "training FLOPs an example",
    level: float = 0.95,
) -> ScalingStudy:
    """Fit one law per model, in the order in which models first appear in ``measurements``.

    ``floor`` and ``level`` are those of :func:`fit_power_law`; ``metric`` and ``unit`` (of the FLOPs) are for labels.
    """
    laws, failures = {}, {}
    for model in dict.fromkeys(entry.model for entry in measurements):
        members = [entry for entry in measurements if entry.model == model]
        try:
            x, y = [entry.flops for entry in members], [entry.value for entry in members]
            laws[model] = fit_power_law(x, y, floor=floor, level=level)
        except DataError as error:
            failures[model] = error.what
    return ScalingStudy(list(measurements), laws, failures, metric, unit)


def plot(
    result: ScalingStudy,
    paths: Sequence[Path],
    *,
    bayes: float | None = None,
    references: Mapping[str, float] | None = None,
    title: str | None = None,
) -> None:
    """Draw the measurements of all models with their laws and the intervals of the laws into files at ``paths``.

    Args:
        result: Study to draw.
        paths: Files to write; the suffix chooses the format (``.png``, ``.svg``).
        bayes: Value of the best possible model, drawn as a line.
        references: Further horizontal lines, by label.
        title: Title above the drawing.
    """
    save_figure(lambda: _draw(result, bayes, references or {}, title), paths)


def save_figure(draw: Callable[[], Figure], paths: Sequence[Path]) -> None:
    """Write the figure from ``draw`` to each of ``paths`` in the common style; equal drawings give equal files.

    The suffix chooses the format (``.png``, ``.svg``). An SVG is dark where the reader prefers dark pages.
    """
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        for path in paths:
            # Saving adjusts the layout, so each file gets its own figure and does not depend on the others.
            figure = draw()
            beside = path.with_name(f".{path.name}.tmp")
            # Without a date, equal measurements give equal files.
            metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
            try:
                figure.savefig(beside, format=path.suffix[1:], dpi=160, metadata=metadata)
                if path.suffix == ".svg":
                    text = beside.read_text(encoding="utf-8")
                    beside.write_text(text.replace("</style>", f"{_dark_style()}</style>", 1), encoding="utf-8")
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)


def label_axis(axis: Axis, text: Callable[[float], str]) -> None:
    """Label a logarithmic ``axis`` at as many round numbers as fit its range, each written by ``text``."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    many = (1, 2, 3, 4, 5, 7) if decades < 1 else (1, 2, 5) if decades < 2 else (1, 3) if decades < 4 else (1,)
    axis.set_major_locator(LogLocator(subs=many, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


def _dark_style() -> str:
    """Return style rules that replace the colours of a drawing for readers who prefer dark pages."""
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}: {dark} !important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    ]
    return "\n@media (prefers-color-scheme: dark) {text{fill: #e7ecf2}" + "".join(rules) + "}\n"


def _draw(result: ScalingStudy, bayes: float | None, references: Mapping[str, float], title: str | None) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.6, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    models = list(dict.fromkeys(entry.model for entry in result.measurements))
    lines = dict(references) | ({} if bayes is None else {"Bayes-optimal": bayes})
    values = [entry.value for entry in result.measurements if math.isfinite(entry.value)]
    # A reference far from the measurements would compress them; it is named in the legend instead.
    reach = 3 * (max(values) - min(values))
    near = {label: value for label, value in lines.items() if min(values) - reach <= value <= max(values) + reach}
    for label, value in near.items():
        axes.axhline(value, color="#5a6672", linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(label, (0, value), xycoords=("axes fraction", "data"), xytext=(4, 4),
                      textcoords="offset points", color="#44505c", fontsize=9.5)  # fmt: skip
    for index, model in enumerate(models):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        members = [entry for entry in result.measurements if entry.model == model]
        sizes = sorted({entry.flops for entry in members})
        means = [np.mean([entry.value for entry in members if entry.flops == size]) for size in sizes]
        if len(members) > len(sizes):
            axes.scatter([entry.flops for entry in members], [entry.value for entry in members], s=9, color=colour,
                         alpha=0.4, linewidths=0, zorder=2)  # fmt: skip
        label = model
        if model in result.laws:
            law = result.laws[model]
            grid = np.geomspace(sizes[0], sizes[-1], 100)
            axes.plot(grid, law.predict(grid), color=colour, linewidth=1.8, zorder=3)
            low, high = law.band(grid)
            axes.fill_between(grid, low, high, color=colour, alpha=0.13, linewidth=0, zorder=1)
            label = f"{model}: exponent {law.exponent:.3g} [{law.exponent_low:.3g}, {law.exponent_high:.3g}]"
        axes.plot(sizes, means, linestyle="none", marker=marker, markersize=6.5, color=colour, label=label, zorder=4)
    # A wide band (three sizes) must not compress the points, so the frame follows the data.
    values += near.values()
    air = 0.12 * (max(values) - min(values)) or 0.01
    axes.set_ylim(min(values) - air, max(values) + air)
    label_axis(axes.xaxis, EngFormatter())
    axes.grid(axis="y", color="#dde2e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(result.unit)
    axes.set_ylabel(result.metric)
    if title:
        axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    for label in lines.keys() - near.keys():
        side = "above" if lines[label] > max(values) else "below"
        axes.plot([], [], linestyle="none", label=f"{label}: {lines[label]:.4g}, {side} the frame")
    figure.legend(fontsize=9.5, loc="outside lower left", edgecolor="none")  # keeps the lines visible
    return figure
