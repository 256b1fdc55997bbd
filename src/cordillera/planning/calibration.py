"""Constants of the cost model from measured step times, and the accuracy of predictions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from pydantic import ValidationError

from cordillera.cost import Calibration, CostModel, calibration_for
from cordillera.errors import PlanError
from cordillera.measurements import Cells, Measurements
from cordillera.mistakes import explain
from cordillera.planning.language.job import Estimate, PlannedJob
from cordillera.planning.language.workload import Layout, Transformer, Workload
from cordillera.planning.network.mesh import Mesh
from cordillera.topology import Topology

# Fitted constants and their bounds, above which no kernel and no library has been seen. For network cards, 0.75 is "a
# bit low" (github.com/NVIDIA/nccl/issues/495); rows slowed by faults must not pull their share below 0.70.
BOUNDS = {
    "matrix": (0.60, 0.95),
    "memory": (0.60, 0.85),
    "port": (0.60, 0.80),
    "network": (0.70, 0.95),
    "collective_s": (0.0, 400e-6),
}
_SCALE = 0.05  # log ratio beyond which a row is downweighted, because some nodes were slow
_TIE = 0.01  # relative difference below which plans tie; ties are broken by the smallest microbatch

# Columns of a file of measurements: its own names, and those of the files that vTrain published.
COLUMNS = {
    "model": ("model", "parameters (billion)"),
    "layers": ("layers", "# layers"),
    "hidden": ("hidden", "hidden size"),
    "heads": ("heads", "attention heads"),
    "sequence": ("sequence", "sequence length"),
    "batch": ("batch", "global batch"),
    "microbatch": ("microbatch", "micro batch"),
    "tensor": ("tensor", "tensor parallelism"),
    "data": ("data", "data parallelism"),
    "pipeline": ("pipeline", "pipeline parallelism"),
    "milliseconds": ("milliseconds", "iteration time (ms)"),
}
_OPTIONAL = {"chunks": 1, "vocabulary": 51_200, "kv_heads": None, "ffn": None}
_RECOMPUTE = {"": "full", "none": "none", "selective": "selective", "full": "full"}
_YES = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
_COUNTS = [*(name for name in COLUMNS if name not in ("model", "milliseconds")), *_OPTIONAL]
_MODEL = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
MOST_ROWS = 5_000  # a fit predicts every row several hundred times


@dataclass(frozen=True)
class MeasuredStep:
    """A measured training step; rows are grouped by the name of the ``model``."""

    model: str
    workload: Workload
    layout: Layout
    seconds: float


def read(path: str | Path) -> list[MeasuredStep]:
    """Read measured steps of Megatron-LM-like training (1F1B, full recomputation) from a CSV file.

    The file has the columns of :data:`COLUMNS`, by either name. The columns ``recompute`` (none, selective, full),
    ``sequence_parallel`` (0 or 1), ``chunks``, ``vocabulary``, ``kv_heads`` and ``ffn`` are optional.

    Raises:
        PlanError: If the file cannot be read or holds mistakes; the message names line and column of each.
    """
    others = [*_OPTIONAL, "recompute", "sequence_parallel"]
    columns = {**COLUMNS, **{name: (name,) for name in others}}
    table = Measurements.read(path, columns, ["model", *others])
    found = [_measurement(table, line, cells) for line, cells in table.rows()]
    table.check()
    if len(found) > MOST_ROWS:
        raise PlanError(f"holds {len(found):,} measurements, at most {MOST_ROWS:,} are fitted", where=table.source)
    return [one for one in found if one is not None]


def _measurement(table: Measurements, line: int, cells: Cells) -> MeasuredStep | None:
    """Return the measured step of a row; None if the row holds mistakes, which are recorded."""
    before = table.mistakes
    name = table.text(line, cells, "model") if "model" in table.names else ""
    milliseconds = table.number(line, cells, "milliseconds", most=1e12, least=1e-6)
    recompute: Any = table.choice(line, cells, "recompute", _RECOMPUTE) if "recompute" in table.names else "full"
    cut: Any = table.choice(line, cells, "sequence_parallel", _YES) if "sequence_parallel" in table.names else False
    counts: dict[str, Any] = {}
    for column in _COUNTS:
        default = column in _OPTIONAL and not cells.get(column)
        counts[column] = _OPTIONAL[column] if default else table.count(line, cells, column)
    if milliseconds is None or table.mistakes > before:
        return None
    try:
        workload = Workload(
            model=Transformer(**{key: counts[key] for key in _MODEL}),
            sequence=counts["sequence"],
            batch=counts["batch"],
        )
    except ValidationError as error:
        for place, message in explain(error.errors(), lambda at: (), ""):
            table.wrong(line, message, place.removeprefix("model."))
        return None
    layout = Layout(
        **{key: counts[key] for key in ("tensor", "data", "pipeline", "microbatch", "chunks")},
        recompute=recompute,
        sequence_parallel=cut,
    )
    for problem in layout.problems(workload):
        table.wrong(line, problem)
    return MeasuredStep(name or f"{workload.model.parameters / 1e9:.1f}B", workload, layout, milliseconds / 1e3)


def predict(measurement: MeasuredStep, topology: Topology, cost: CostModel) -> Estimate:
    """Return the analytic estimate of a ``measurement`` on a ``topology``; ``cost`` is the model of its devices."""
    mesh = Mesh.of(topology, measurement.layout)
    return PlannedJob(measurement.workload, mesh, measurement.layout, cost).estimate()


def fit(
    measurements: Sequence[MeasuredStep], topology: Topology, start: Calibration | None = None, provenance: str = ""
) -> Calibration:
    """Fit the constants of :data:`BOUNDS` to measured steps.

    The fit is a least squares of the logarithm of predicted over measured time with Cauchy's loss, so that rows from
    slow nodes have little influence.

    Args:
        measurements: Measured steps on ``topology``, at least as many as constants.
        topology: Cluster of the measurements.
        start: Other constants; None for the defaults.
        provenance: Origin of the measurements.

    Raises:
        PlanError: If there are too few measurements.
    """
    names = list(BOUNDS)
    if len(measurements) < len(names):
        raise PlanError(
            f"{len(measurements)} measurements for {len(names)} constants", where="calibration", remedy="measure more"
        )
    base = start or calibration_for(topology.device)
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    measured = np.log([one.seconds for one in measurements])

    def with_values(unit: np.ndarray) -> Calibration:
        return base.model_copy(update=dict(zip(names, (low + (high - low) * unit).tolist(), strict=True)))

    def residuals(unit: np.ndarray) -> np.ndarray:
        cost = CostModel(topology.device, with_values(unit))
        return np.log([predict(one, topology, cost).seconds for one in measurements]) - measured

    begin = np.clip((np.array([getattr(base, name) for name in names]) - low) / (high - low), 0.05, 0.95)
    found = scipy.optimize.least_squares(
        residuals, begin, bounds=(0, 1), loss="cauchy", f_scale=_SCALE, diff_step=1e-3, max_nfev=80
    )
    fitted = with_values(found.x)
    error = float(np.mean(np.abs(np.expm1(residuals(found.x)))))
    note = provenance or f"{len(measurements)} measured steps on {topology.name}"
    return fitted.model_copy(update={"provenance": note, "error": error})


@dataclass(frozen=True)
class CalibrationAccuracy:
    """Accuracy of predictions for measured steps.

    Attributes:
        rows: Number of rows.
        error: Mean absolute error, relative to the measured time.
        median: Median of the absolute errors.
        tau: Kendall's rank correlation of predicted and measured, the mean over the models whose own is known.
        regret: Measured time of the plan that would be chosen, relative to that of the best, for the worst model.
        tau_by_model: Rank correlation of each model; NaN for fewer than two rows, and if all tie.
        error_by_model: Mean absolute error of each model.
        regret_by_model: Regret of each model.
    """

    rows: int
    error: float
    median: float
    tau: float
    regret: float
    tau_by_model: dict[str, float]
    error_by_model: dict[str, float]
    regret_by_model: dict[str, float]


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's rank correlation; NaN for fewer than two pairs, of which scipy would warn, and if all tie."""
    return float(scipy.stats.kendalltau(*zip(*pairs, strict=True)).statistic) if len(pairs) > 1 else math.nan


def accuracy(measurements: Iterable[MeasuredStep], predicted: Iterable[float]) -> CalibrationAccuracy:
    """Compare ``predicted`` seconds with ``measurements``, in the same order.

    A planner chooses the plan that is predicted fastest; among those within 1 % of it, one with the smallest
    microbatch, which needs the least memory.
    """
    pairs = list(zip(measurements, predicted, strict=True))
    errors = [abs(seconds / one.seconds - 1) for one, seconds in pairs]
    taus, by_model, regrets = {}, {}, {}
    for name in dict.fromkeys(one.model for one, _ in pairs):
        group = [(one, seconds) for one, seconds in pairs if one.model == name]
        by_model[name] = statistics.fmean(abs(seconds / one.seconds - 1) for one, seconds in group)
        taus[name] = _correlation([(one.seconds, seconds) for one, seconds in group])
        fastest = min(seconds for _, seconds in group)
        alike = [(one.layout.microbatch, seconds, one) for one, seconds in group if seconds <= fastest * (1 + _TIE)]
        picked = min(alike, key=lambda entry: entry[:2])[2]
        regrets[name] = picked.seconds / min(one.seconds for one, _ in group)
    known = [tau for tau in taus.values() if not math.isnan(tau)]
    return CalibrationAccuracy(
        len(pairs),
        statistics.fmean(errors),
        statistics.median(errors),
        statistics.fmean(known) if known else math.nan,
        max(regrets.values()),
        taus,
        by_model,
        regrets,
    )
