"""Growth of the best split of compute: power laws through the minima of IsoFLOP curves, with intervals.

The law is ``D*(C) = A C^alpha`` (Grattafiori et al. 2024, section 3.2.1, figure 3). The paper prints (alpha, A) =
(0.53, 0.29) and 16.55T tokens at 3.8e25 FLOPs; the printed constants give 10.5T there, and the printed tokens require
alpha = 0.538.

Intervals come from a bootstrap of residuals. A budget has too few runs for some of them to be drawn twice, so the sizes
stay, and every run's distance from its parabola is drawn from those of all budgets, which are assumed to be equally
noisy. Distances are divided by ``sqrt(1 - leverage)``, and the draws are stretched by the ratio of Student's to the
normal quantile; without this, intervals of few runs would be too narrow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray
from rich.table import Table

from cordillera.errors import DataError
from cordillera.training.ranking.evaluation import jsonable
from cordillera.training.scaling.isoflop import (
    FEWEST_SIZES,
    QUANTITIES,
    IsoFlopCurve,
    IsoFlopRun,
    along,
    amount,
    design,
    isoflops,
    power,
    projection,
)
from cordillera.training.scaling.power_law import PowerLaw, fit_power_law

_Floats = NDArray[np.float64]
_FEWEST_BUDGETS = 3


@dataclass(frozen=True)
class ComputeLaw:
    """Optimal amount of a quantity (a key of :data:`QUANTITIES`) for every budget: ``A C^alpha``.

    Attributes:
        line: Fit over budgets; its own interval reflects the scatter of the budgets about the line.
        exponent_low: Lower bound of the exponent's interval over runs, to ``exponent_high``; NaN if no run is left to
            estimate noise.
        optima_low: Lower bounds of the budgets' own optima, to ``optima_high``.
        level: Confidence level of all intervals.
        draws: ``float64 [2, R]``: log of the value at the line's centre, and exponent, of every resample.
    """

    quantity: str
    line: PowerLaw
    exponent_low: float
    exponent_high: float
    optima_low: list[float]
    optima_high: list[float]
    level: float
    draws: _Floats = field(repr=False, compare=False)

    @property
    def exponent(self) -> float:
        """``alpha``, exponent of the law."""
        return self.line.exponent

    def predict(self, compute: Any) -> tuple[_Floats, _Floats, _Floats]:
        """Return the law and the bounds of its interval over runs (not of a new study) at ``compute`` FLOPs."""
        log = np.log(np.asarray(compute, dtype=np.float64)) - self.line.centre
        low, high = _ends(self.draws[0] + self.draws[1] * log[..., None], self.level)
        return self.line.predict(compute), _exp(low), _exp(high)

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON, without the draws."""
        return {
            "quantity": QUANTITIES[self.quantity],
            "scale": self.line.scale,
            "exponent": self.exponent,
            "exponent_interval_over_runs": [self.exponent_low, self.exponent_high],
            "exponent_interval_by_scatter": [self.line.exponent_low, self.line.exponent_high],
            "level": self.level,
            "budgets": self.line.x,
            "optima": self.line.y,
            "optima_low": self.optima_low,
            "optima_high": self.optima_high,
        }


def _ends(draws: _Floats, level: float) -> tuple[_Floats, _Floats]:
    if not draws.shape[-1]:
        nothing = np.full(draws.shape[:-1], math.nan)
        return nothing, nothing
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return low, high


def _exp(log: _Floats) -> _Floats:
    with np.errstate(over="ignore"):  # an infinite bound is valid
        return np.exp(log)


def fit_laws(
    curves: Sequence[IsoFlopCurve], *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[dict[str, ComputeLaw], list[str]]:
    """Fit the growth of optimal tokens and parameters with compute.

    Args:
        curves: Curves; those without an optimum are ignored.
        level: Confidence level.
        resamples: Number of draws of the bootstrap.
        seed: Seed of those draws; equal seeds give equal intervals.

    Returns:
        Laws by the keys of :data:`QUANTITIES`, and warnings why they may mean less than they seem.

    Raises:
        DataError: If fewer than three budgets show an optimum.
    """
    shown = [curve for curve in curves if curve.optimum is not None]
    if len(shown) < _FEWEST_BUDGETS:
        of = "" if len(shown) == len(curves) else f" of {len(curves)}"
        raise DataError(
            f"{len(shown)}{of} budget{'s' * (len(curves) != 1)} with an optimum cannot show how it grows with compute; "
            f"at least {_FEWEST_BUDGETS} are needed, better five over two decades",
            where="IsoFLOP",
            remedy="mend the curves without an optimum, or train more budgets",
        )
    budgets = np.array([curve.budget for curve in shown])
    places, degrees, failed = _resample(shown, resamples, seed)  # log tokens [budgets, R]
    stretch = math.nan
    if degrees:
        stretch = float(scipy.stats.t.ppf((1 + level) / 2, degrees) / scipy.stats.norm.ppf((1 + level) / 2))
    log_budgets = np.log(budgets)
    distance = log_budgets - log_budgets.mean()
    laws = {}
    for name in QUANTITIES:
        optima = np.array([getattr(curve.optimum, name) for curve in shown])
        drawn = np.stack([along(curve.runs, name, place) for curve, place in zip(shown, places, strict=True)])
        drawn = np.log(optima)[:, None] + stretch * (drawn - np.log(optima)[:, None])
        draws = np.stack([drawn.mean(axis=0), distance @ drawn / float(distance @ distance)])
        low, high = _ends(draws[1], level)
        lows, highs = map(_exp, _ends(drawn, level))
        # The warnings of a fit over sizes do not fit budgets.
        line = replace(fit_power_law(budgets.tolist(), optima.tolist(), level=level), warnings=[])
        laws[name] = ComputeLaw(name, line, float(low), float(high), lows.tolist(), highs.tolist(), level, draws)
    return laws, _warnings(shown, laws["tokens"], places, degrees, failed)


def _resample(curves: Sequence[IsoFlopCurve], resamples: int, seed: int) -> tuple[_Floats, int, float]:
    """Return optimal log tokens per budget and usable resample, degrees of freedom, and the share of unusable ones."""
    projections, pool = [], []
    for curve in curves:
        x = np.log10([run.tokens for run in curve.runs]) - curve.centre
        residuals = np.array([run.loss for run in curve.runs]) - design(x) @ curve.coefficients
        projections.append(projection(x))
        slack = 1 - np.einsum("ij,ji->i", design(x), projections[-1])
        is_free = slack > 1e-9
        pool.append(residuals[is_free] / np.sqrt(slack[is_free]))
    degrees = sum(len(curve.runs) - FEWEST_SIZES for curve in curves)
    if degrees == 0:
        return np.empty((len(curves), 0)), 0, 0.0
    residuals = np.concatenate(pool)
    residuals -= residuals.mean()
    random = np.random.default_rng(seed)
    places = np.empty((len(curves), resamples))
    usable = np.ones(resamples, dtype=bool)
    for row, (curve, matrix) in enumerate(zip(curves, projections, strict=True)):
        drawn = residuals[random.integers(0, residuals.size, (len(curve.runs), resamples))]
        _, c1, c2 = np.array(curve.coefficients)[:, None] + matrix @ drawn
        usable &= c2 > 0
        places[row] = (curve.centre - c1 / (2 * np.where(c2 > 0, c2, 1.0))) * math.log(10)
    return places[:, usable], degrees, 1 - float(usable.mean())


def _warnings(
    curves: Sequence[IsoFlopCurve], law: ComputeLaw, places: _Floats, degrees: int, failed: float
) -> list[str]:
    warnings = []
    if law.line.decades < 1:
        warnings.append(f"the budgets span {law.line.decades:.2f} decades; less than one says little about a law")
    if degrees == 0:
        warnings.append("every budget has three runs, through which a parabola always goes: there is no interval")
        return warnings
    if degrees < 5:
        plural = "run" if degrees == 1 else "runs"
        warnings.append(f"only {degrees} {plural} more than the parabolas need: the intervals are rough")
    if failed > 0.01:
        warnings.append(
            f"in {100 * failed:.0f} % of the resamples a parabola opened downwards; they are missing from the "
            "intervals, which are too narrow by that"
        )
    if not places.size:
        return warnings
    for curve, low, high in zip(curves, law.optima_low, law.optima_high, strict=True):
        fewest, most = curve.range
        if not fewest <= low <= high <= most:
            warnings.append(
                f"the optimum at {power(curve.budget)} FLOPs is not pinned down: its interval, {amount(low)} to "
                f"{amount(high)} tokens, leaves the trained range"
            )
    residuals = np.log(law.line.y) - np.log(law.line.predict(law.line.x))
    scatter = float(residuals @ residuals) / (len(curves) - 2)
    expected = float(places.var(axis=1).mean())
    if expected > 0 and scipy.stats.f.sf(scatter / expected, len(curves) - 2, degrees) < 0.01:
        warnings.append(
            "the optima scatter about the line more than the noise of the runs explains; trust the interval by scatter"
        )
    return warnings


@dataclass(frozen=True)
class Forecast:
    """Best split of an untrained budget.

    Attributes:
        factor: Ratio to the nearest budget with an optimum; 1 between the smallest and the largest.
        values: For each quantity, the law and the bounds of its interval over runs.
    """

    compute: float
    factor: float
    values: dict[str, tuple[float, float, float]]

    @property
    def summary(self) -> str:
        """The forecast in one sentence."""

        def told(name: str) -> str:
            value, low, high = self.values[name]
            least = "below 1" if low < 1 else amount(low)
            interval = "" if math.isnan(low) else f" [{least}, {amount(high)}]"
            return f"{amount(value)} {QUANTITIES[name]}{interval}"

        where = "within the budgets that were trained"
        if self.factor != 1:
            end = "largest" if self.factor > 1 else "smallest"
            where = f"{amount(self.factor)} times the {end} budget that was trained: an extrapolation"
        return f"At {power(self.compute)} FLOPs ({where}): " + ", ".join(map(told, self.values))


@dataclass(frozen=True)
class IsoFlopStudy:
    """Curves, in ascending order of budget, laws and forecast of a study.

    Attributes:
        laws: Laws by the keys of :data:`QUANTITIES`; empty if ``failure`` gives a reason.
        warnings: Reasons why the laws may mean less than they seem.
        left_out: Reason for each run that was not fitted, by name.
        forecast: Forecast at the target budget; None without one.
        counts_attention: Whether FLOPs count attention.
    """

    curves: list[IsoFlopCurve]
    laws: dict[str, ComputeLaw]
    failure: str | None
    warnings: list[str]
    left_out: dict[str, str]
    forecast: Forecast | None
    counts_attention: bool

    def to_json(self) -> str:
        """Return strict JSON; NaN becomes null."""
        content = {
            **vars(self),
            "curves": [asdict(curve) for curve in self.curves],
            "laws": {name: law.to_dict() for name, law in self.laws.items()},
            "forecast": None if self.forecast is None else asdict(self.forecast),
            "summary": self.summary,
        }
        return json.dumps(jsonable(content), indent=1, allow_nan=False)

    def to_table(self) -> Table:
        """Return a table of the budgets with their optima, for the terminal."""
        table = Table(title="optimum of each budget", title_justify="left")
        for heading in ("FLOPs", "runs", "tokens", "interval", "parameters", "no embeddings", "loss"):
            table.add_column(heading, justify="right")
        law = self.laws.get("tokens")
        intervals = iter(zip(law.optima_low, law.optima_high, strict=True) if law else ())
        for curve in self.curves:
            head, optimum = (power(curve.budget), str(len(curve.runs))), curve.optimum
            if optimum is None:
                table.add_row(*head, "none", "", "", "", "")
                continue
            low, high = next(intervals, (math.nan, math.nan))
            tokens, *sizes = (amount(getattr(optimum, name)) for name in QUANTITIES)
            interval = "" if math.isnan(low) else f"{amount(low)} to {amount(high)}"
            table.add_row(*head, tokens, interval, *sizes, f"{optimum.loss:.4f}")
        return table

    @property
    def summary(self) -> str:
        """The results in plain sentences, one per line."""
        lines = []
        fitted = sum(len(curve.runs) for curve in self.curves)
        budgets = [curve.budget for curve in self.curves]
        flops = "training FLOPs" if self.counts_attention else "training FLOPs without attention"
        plural = "budget" if len(budgets) == 1 else "budgets"
        lines.append(
            f"{fitted} runs in {len(budgets)} {plural}, {power(min(budgets))} to {power(max(budgets))} {flops} (C)."
        )
        for name, law in self.laws.items():
            interval = "no interval over runs"
            if not math.isnan(law.exponent_low):
                interval = f"{100 * law.level:g} % interval over runs [{law.exponent_low:.3f}, {law.exponent_high:.3f}]"
            scale = f"{law.line.scale:.3g}" if 0.01 <= law.line.scale < 1000 else power(law.line.scale)
            scatter = f"[{law.line.exponent_low:.3f}, {law.line.exponent_high:.3f}]"
            lines.append(
                f"Optimal {QUANTITIES[name]}: {scale} * C^{law.exponent:.3f}; exponent's {interval}, "
                f"by the scatter of {len(law.line.x)} budgets {scatter}."
            )
        if self.failure:
            lines.append(f"No law: {self.failure}.")
        if self.forecast is not None:
            lines.append(self.forecast.summary + ".")
        lines += [f"At {power(curve.budget)} FLOPs: {curve.refusal}." for curve in self.curves if curve.refusal]
        lines += [f"Left out: {name} ({why})." for name, why in self.left_out.items()]
        lines += [f"warning: {warning}." for warning in self.warnings]
        return "\n".join(lines)


def study(
    runs: Sequence[IsoFlopRun],
    *,
    target: float | None = None,
    left_out: Mapping[str, str] | None = None,
) -> IsoFlopStudy:
    """Fit curves and laws; if the runs show no law, give the reason.

    Args:
        runs: Runs of several budgets.
        target: FLOPs for which to predict the best split; None for none.
        left_out: Reasons for runs without a measurement, which the summary names.

    Raises:
        DataError: If :func:`isoflops` refuses the runs, or the target is not positive.
    """
    if target is not None and not (math.isfinite(target) and target > 0):
        raise DataError(f"{target} is no number of FLOPs", where="IsoFLOP target", remedy="above 0, like 3.8e25")
    curves = isoflops(runs)
    laws: dict[str, ComputeLaw] = {}
    warnings: list[str] = []
    failure, forecast = None, None
    try:
        laws, warnings = fit_laws(curves)
    except DataError as error:
        failure = error.what
    if laws and target is not None:
        values = {}
        for name, law in laws.items():
            value, low, high = law.predict(target)
            values[name] = float(value), float(low), float(high)
        smallest, *_, largest = laws["tokens"].line.x
        forecast = Forecast(target, target / min(max(target, smallest), largest), values)
        if values["non_embedding"][0] > values["parameters"][0]:
            warnings.append(
                f"at {power(target)} FLOPs the law of parameters without embeddings passes that of all: embeddings "
                "weigh much in models as small as these, so neither reaches so far"
            )
    missing = dict(left_out or {})
    for curve in curves:
        missing |= curve.left_out
    return IsoFlopStudy(curves, laws, failure, warnings, missing, forecast, runs[0].counts_attention)
