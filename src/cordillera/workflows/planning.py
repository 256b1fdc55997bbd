"""Functions behind ``cordillera plan``: search for plans or fit a calibration, and write the results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cordillera import topology as clusters
from cordillera.cost import SHIPPED, Calibration, CostModel, Products, ProductShape, calibration_for
from cordillera.errors import Interrupted, PlanError, printable
from cordillera.files import check_writable, read_sealed, sealed_json, write
from cordillera.mistakes import meant
from cordillera.partition import Weights
from cordillera.planning import calibration as calibrations
from cordillera.planning import workloads
from cordillera.planning.changes import edits, with_changes
from cordillera.planning.language import operators
from cordillera.planning.language import what_if as faults
from cordillera.planning.language.explorer import Explorer
from cordillera.planning.language.own_layout import OwnLayout, read_layout
from cordillera.planning.language.plan_file import plan_text
from cordillera.planning.language.plan_file import read_plan as read_plan
from cordillera.planning.language.plans import Exploration, Plan
from cordillera.planning.language.workload import Fp8, Workload
from cordillera.planning.ranking.explorer import RecommenderExplorer, TableExploration, TablePlan
from cordillera.planning.ranking.towers import Similarities, TowerAim, TowerPlan, plan_towers
from cordillera.planning.ranking.workload import Recommender
from cordillera.planning.search import ALL, SearchDimension
from cordillera.planning.sensitivity import Sensitivity, sensitivity
from cordillera.planning.units import warn_of_units
from cordillera.reports.language import plan as export
from cordillera.reports.plan_comparison import ComparedPlan, TrainingBudget, with_scaling
from cordillera.reports.ranking import plan as recommender_export

if TYPE_CHECKING:
    from cordillera.run import Run

SEARCHED = "searched"
"""Name of the plan of a search beside a person's own layouts."""


@dataclass(frozen=True)
class Planned:
    """Results of planning a language model.

    Attributes:
        what_if: Steps of the best plan after each requested change of the cluster and each requested fault.
        files: Paths of the written files, by kind; empty if none of a person's own layouts fits the memory.
        compared: Plans of other searches, by name.
    """

    explorer: Explorer
    found: Exploration
    production: Plan
    what_if: list[faults.Case]
    files: dict[str, Path]
    compared: dict[str, Plan] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRecommender:
    """Results of planning a recommendation model; see :class:`Planned` for the fields."""

    explorer: RecommenderExplorer
    found: TableExploration
    production: TablePlan
    what_if: list[faults.Case]
    files: dict[str, Path]
    compared: dict[str, TablePlan] = field(default_factory=dict)


def _changed(cluster: str | Path, changes: Iterable[str]) -> clusters.Topology:
    told = [*changes]
    changed, topology = edits(told), clusters.load(cluster)
    if not changed:
        return topology
    # its own description may be of what was changed
    described = {"description": f"{topology.name} with {', '.join(told)}"}
    return with_changes(topology, changed).model_copy(update=described)


def _shipped_for(device: clusters.Device, cluster: str | Path) -> Calibration:
    """Return the shipped constants for a device; warn if they were measured on another device."""
    found = calibration_for(device)
    if device.name not in SHIPPED:
        remedy = "--calibrate fits constants to measured steps; until then, do not rank it against other devices"
        warnings.warn(f"{cluster}: {found.provenance}; {remedy}", stacklevel=4)
    return found


def _constants(calibration: str | Path | None, device: clusters.Device, cluster: str | Path) -> Calibration:
    """Return the constants of a file; those that it leaves out, all without a file, are as shipped for the device."""
    if calibration is None:
        return _shipped_for(device, cluster)
    given, found = read_calibration(calibration), calibration_for(device)
    told = {name: getattr(given, name) for name in given.model_fields_set}
    named = ", ".join(sorted(told.keys() - {"provenance", "error"}))
    origin = f"{found.provenance}; {named} by {printable(Path(calibration).name)}" if named else found.provenance
    return found.model_copy(update={"provenance": origin, "error": None, **told})


def plan(
    workload: str | Path,
    cluster: str | Path,
    folder: str | Path,
    *,
    devices: int | None = None,
    only: SearchDimension | Iterable[SearchDimension] = ALL,
    changes: Iterable[str] = (),
    what_if: Iterable[str] = (),
    slow: float | None = None,
    jitter: float | None = None,
    lose: Iterable[str] = (),
    calibration: str | Path | None = None,
    products: str | Path | None = None,
    layouts: Iterable[str] = (),
    fp8: Fp8 | None = None,
    compare: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Planned | PlannedRecommender:
    """Search for the best plan and write ``plan.json``, ``plan.html`` and ``trace.json``.

    An interrupt (Ctrl-C) ends the search; the plans found so far are written. With ``layouts``, these are evaluated
    and nothing is searched; the best of those that fit the memory is written, and nothing if none does.

    Args:
        workload: Shipped name or path of a TOML file.
        cluster: Shipped name or path of a TOML file.
        folder: Folder of the files.
        devices: Number of devices to use; None for all.
        only: Dimensions to search.
        changes: Changes of the cluster before the search: ``region.distance_km=100``.
        what_if: Changes of the cluster under which the best plan is simulated again.
        slow: Factor of the time that one device takes; see :func:`cordillera.planning.language.what_if.slow_device`.
        jitter: Jitter of latencies; see :func:`cordillera.planning.language.what_if.jittered`.
        lose: Domains whose loss is planned for by another search: ``building``, ``building:1``. If none finds a plan,
            a warning says so.
        calibration: JSON file of constants; what it leaves out, and all with None, is as shipped for the device.
        products: CSV file of matrix products measured on the device, see :class:`cordillera.cost.Products`; None to use
            the constants alone.
        layouts: A person's own layouts to evaluate instead of a search; see
            :func:`cordillera.planning.language.own_layout.read_layout`.
        fp8: Matrix products in FP8; see :class:`cordillera.planning.language.workload.Layout`. None for what the
            workload says.
        compare: Whether to search each dimension alone as well, and show the plans side by side; with ``layouts``,
            whether to search as well.
        progress: Function called with a sentence from time to time.

    Raises:
        PlanError: If a file is wrong or the job is impossible.
    """
    files = {name: Path(folder) / name for name in ("plan.json", "plan.html", "trace.json")}
    check_writable(*files.values())
    work, topology = workloads.load(workload), _changed(cluster, changes)
    warn_of_units(topology, cluster)
    asked = {text: with_changes(topology, edits([text])) for text in what_if}
    faults.check(slow, jitter)
    domains = list(lose)
    for domain in domains:
        faults.survivors(topology, domain)  # an unknown domain is refused before the search
    constants = _constants(calibration, topology.device, cluster)
    table = Products.read(products) if products is not None else None
    if isinstance(work, Recommender) and (slow is not None or jitter is not None or domains):
        raise PlanError("are not known for recommendation models", where="slow, jitter, lose", remedy="--what-if is")
    work = _in_precision(work, fp8)
    free, explorer = _checked(only, devices), _explorer(work, topology, constants, table, devices, progress)
    stated = _own_layouts(layouts, work, explorer.devices)
    _check_devices(asked, explorer.devices)
    try:
        base = explorer.production()
        found = explorer.evaluate_all(stated) if stated else explorer.explore(free)
    except KeyboardInterrupt:  # in a search, which keeps what it has found, this is no error
        raise Interrupted("before a plan was found; nothing is written", where="plan") from None
    fits, changed = bool(found.plans or not stated), None  # a search that finds nothing is an error of found.best
    compared: dict[str, Any] = {}
    cases: list[faults.Case] = []
    try:
        if fits:
            for case in _cases(explorer, found.best, asked, slow, jitter):
                cases.append(case)
            changed = sensitivity(explorer, {"this plan": found.best, "production-like": base})
        if not found.interrupted:  # an interrupt also cancels the other searches
            for domain in domains if fits else ():
                cases += _tried(f"{domain} lost", partial(faults.lost, explorer, found.best, domain, free, progress))
            compared = _compared(explorer, found, compare, free)
    except KeyboardInterrupt:
        found.interrupted = True
    made = PlannedRecommender if isinstance(work, Recommender) else Planned
    planned = made(explorer, found, base, cases, files if fits else {}, compared)
    if fits:
        _write(planned, compared, changed)
    return planned


@dataclass
class PlanComparison:
    """Plans of one workload for several clusters or numbers of devices.

    Attributes:
        rows: Best plan of each case, in order, or why there is none.
        plans: Results of the searches, by the name of their folder.
        problems: Errors of the cases for which there is no plan, by name.
        interrupted: Whether a search was interrupted; its row shows the best until then, and those after it are left
            out.
    """

    rows: list[ComparedPlan] = field(default_factory=list)
    plans: dict[str, Planned | PlannedRecommender] = field(default_factory=dict)
    problems: dict[str, PlanError] = field(default_factory=dict)
    interrupted: bool = False

    def problem(self, name: str) -> PlanError:
        """Return the error of a case with its ``name`` as the place; clusters have the name of their cases already."""
        one = self.problems[name]
        where = name if name.startswith(one.where or "") else f"{name}: {one.where}"
        return PlanError(one.what, where=where, remedy=one.remedy)


def compare(
    workload: str | Path,
    cases: Sequence[tuple[str, int | None]],
    folder: str | Path,
    budget: TrainingBudget | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> PlanComparison:
    """Plan a workload for several cases; the files of each are in a folder of its own.

    Args:
        workload: Shipped name or path of a TOML file.
        cases: Clusters, each with a number of devices; None for all of them.
        folder: Folder of the cases' folders.
        budget: Training of which the rows hold days and device hours; None to leave these out.
        progress: Function called with a sentence from time to time.
        options: Other arguments of :func:`plan`.

    Raises:
        PlanError: If a cluster is unknown, a case is named twice, or there is no plan for any of them.
    """
    several = len({cluster for cluster, _ in cases}) < len(cases)
    names = [Path(cluster).stem + f"-{devices}" * bool(several and devices) for cluster, devices in cases]
    for name, (cluster, devices) in zip(names, cases, strict=True):
        clusters.load(cluster)  # an unknown one is refused before the first search
        if names.count(name) > 1:
            number = f" with {devices:,} devices" if several and devices else ""
            raise PlanError(
                f"is named twice{number}",
                where=f"cluster {Path(cluster).stem!r}",
                remedy="name each cluster and number once, and give their files different names",
            )
    check_writable(Path(folder) / "comparison.html")
    made = PlanComparison()
    for name, (cluster, devices) in zip(names, cases, strict=True):
        shown = None if progress is None else partial(_named, progress, name)
        try:
            one = plan(workload, cluster, Path(folder) / name, devices=devices, progress=shown, **options)
        except Interrupted:
            if not made.plans:
                raise
            made.interrupted = True
            break
        except PlanError as error:
            made.problems[name] = error
            made.rows.append(ComparedPlan(Path(cluster).stem, "none, see below", devices))
            continue
        made.plans[name] = one
        if one.files:
            made.rows.append(ComparedPlan.of(Path(cluster).stem, one.explorer, one.found.best, budget))
        else:
            made.rows.append(ComparedPlan(Path(cluster).stem, "none that fits", one.explorer.devices))
        if one.found.interrupted:
            made.interrupted = True
            break
    made.rows[:] = with_scaling(made.rows)
    if not made.plans:
        raise made.problem(next(iter(made.problems)))
    return made


def _named(progress: Callable[[str], None], name: str, text: str) -> None:
    progress(f"{name}: {text}")


def _checked(only: str | Iterable[SearchDimension], devices: int | None) -> list[SearchDimension]:
    """Return the dimensions to search, if there are such ones, and there are devices."""
    chosen: list[Any] = [only] if isinstance(only, str) else list(only)
    if unknown := sorted(set(chosen) - set(ALL)):
        what = f"{unknown[0]!r} is not searched{meant(unknown[0], ALL)}"
        raise PlanError(what, where="only", remedy=f"choose of {', '.join(ALL)}")
    if devices is not None and devices < 1:
        raise PlanError(f"must be at least 1, got {devices}", where="devices", remedy="leave it out for all")
    return chosen


def _in_precision(work: Workload | Recommender, fp8: Fp8 | None) -> Workload | Recommender:
    if fp8 is None:
        return work
    if isinstance(work, Recommender):
        raise PlanError("is not known for recommendation models", where="fp8", remedy="leave it out")
    if fp8 not in get_args(Fp8):
        raise PlanError(f"{fp8!r} is no choice", where="fp8", remedy=", ".join(get_args(Fp8)))
    return work.model_copy(update={"fp8": fp8})


def _explorer(
    work: Workload | Recommender,
    topology: clusters.Topology,
    constants: Calibration,
    table: Products | None,
    devices: int | None,
    progress: Callable[[str], None] | None,
) -> Any:
    """Return the explorer of a workload; both kinds have the same interface."""
    if not isinstance(work, Recommender):
        return Explorer(work, topology, constants, products=table, devices=devices, progress=progress)
    if table is not None:
        raise _no_products("products")
    return RecommenderExplorer(work, topology, constants, devices=devices, progress=progress)


def _own_layouts(texts: Iterable[str], work: Workload | Recommender, devices: int) -> list[OwnLayout]:
    texts = list(texts)
    if texts and isinstance(work, Recommender):
        raise PlanError("are not known for recommendation models", where="layouts", remedy="leave them out")
    return [read_layout(text, devices, work) for text in texts if isinstance(work, Workload)]


def _check_devices(asked: Mapping[str, clusters.Topology], devices: int) -> None:
    for text, other in asked.items():
        if other.devices < devices:
            raise PlanError(
                f"leaves {other.devices:,} devices for a plan on {devices:,}",
                where=f"what_if {text}",
                remedy="--set plans for the smaller cluster",
            )


def _cases(
    explorer: Any, best: Any, asked: Mapping[str, clusters.Topology], slow: float | None, jitter: float | None
) -> Iterator[faults.Case]:
    """Simulate the best plan again under every requested change and fault."""
    for text, other in asked.items():
        yield from _tried(text, partial(faults.again, explorer, best, text, other))
    if slow is not None:
        yield faults.slow_device(explorer, best, slow)
    if jitter is not None:
        yield faults.jitter(explorer, best, jitter)


def _tried(what: str, simulate: Callable[[], faults.Case]) -> list[faults.Case]:
    """Return the case of a change or a loss; warn and return nothing if no plan is possible, as the best plan stays."""
    try:
        return [simulate()]
    except PlanError as error:
        warnings.warn(f"with {what}: {error.what}", stacklevel=3)
        return []


def _compared(explorer: Any, found: Any, compare: bool, only: Iterable[SearchDimension]) -> dict[str, Any]:
    """Return the best plans of other searches, by name, to compare with ``found``; none unless ``compare``.

    Beside a person's own layouts, that is a search of ``only`` some dimensions; otherwise one of each dimension alone.
    An interrupt of a search is raised.
    """
    if not compare:
        return {}
    if getattr(found, "own", ()):
        return {SEARCHED: _searched(explorer, only)}
    alone = getattr(found, "alone", {})
    return {f"{one} alone": alone[one] if one in alone else _searched(explorer, [one]) for one in ALL}


def _searched(explorer: Any, only: Iterable[SearchDimension]) -> Any:
    """Return the best plan of a search of ``only`` some dimensions; an interrupt of the search is raised."""
    found = explorer.explore(only)
    if found.interrupted:
        raise KeyboardInterrupt
    return found.best


def _write(planned: Planned | PlannedRecommender, compared: Mapping[str, Any], changed: Sensitivity | None) -> None:
    """Write the files of a search, which show the plans of smaller searches and the effects of other networks."""
    shown: Any = recommender_export if isinstance(planned, PlannedRecommender) else export
    seen, cases = (planned.explorer, planned.found, planned.production), planned.what_if
    text, page = plan_text(shown.to_json(*seen, cases)), shown.page(*seen, compared, changed, cases)
    trace = shown.chrome_trace(planned.found.best.step.timeline)
    write(dict(zip(planned.files.values(), (text, page, trace), strict=True)))


def _no_products(option: str) -> PlanError:
    return PlanError("is not known for recommendation models", where=option, remedy="--calibration is")


def products_needed(workload: str | Path, cluster: str | Path, changes: Iterable[str] = ()) -> list[ProductShape]:
    """Return the matrix products to measure on a device of the cluster, for ``products`` of :func:`plan`.

    ``workload``, ``cluster`` and ``changes`` are those of :func:`plan`; the change ``host.members=4`` leaves out tensor
    parallelism over eight.

    Raises:
        PlanError: If a file is wrong, or the workload is a recommendation model.
    """
    work, topology = workloads.load(workload), _changed(cluster, changes)
    if isinstance(work, Recommender):
        raise _no_products("measure")
    return operators.shapes(work, topology.device, min(topology.sizes[0]))


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration, written by :func:`calibrate` or by hand without a checksum.

    Raises:
        PlanError: If the file does not exist, does not match its checksum, or holds mistakes; the message names all of
            them.
    """
    content = read_sealed(path, error=PlanError)
    if "plans" in content:
        raise PlanError(
            "is a plan, not a calibration", where=str(path), remedy="`plan --calibrate FILE CLUSTER` writes one"
        )
    return clusters.validate(Calibration, content, str(path))


@dataclass(frozen=True)
class Calibrated:
    """Fitted constants, their accuracy on the fitted rows, and every measured step with its predicted seconds."""

    constants: Calibration
    accuracy: calibrations.CalibrationAccuracy
    rows: list[tuple[calibrations.MeasuredStep, float]]
    file: Path


def calibrate(measurements: str | Path, cluster: str | Path, folder: str | Path) -> Calibrated:
    """Fit the constants to measured steps and write ``calibration.json``.

    Args:
        measurements: CSV file; see :func:`cordillera.planning.calibration.read`.
        cluster: Cluster on which they were made: shipped name or path of a TOML file.
        folder: Folder of the file.

    Raises:
        PlanError: If a file is wrong.
    """
    file = Path(folder) / "calibration.json"
    check_writable(file)
    topology, rows = clusters.load(cluster), calibrations.read(measurements)
    if topology.groups:
        raise PlanError("constants are fitted to one kind of devices", where=topology.name, remedy="leave groups out")
    for row in rows:
        if row.layout.devices > topology.devices:
            raise PlanError(
                f"{row.layout} takes {row.layout.devices:,} devices, {topology.name} has {topology.devices:,}",
                where=str(measurements),
            )
    name = printable(Path(measurements).name)
    try:
        fitted = calibrations.fit(rows, topology, calibration_for(topology.device), f"{name} on {topology.name}")
    except KeyboardInterrupt:
        raise Interrupted("before the constants were found; nothing is written", where="plan --calibrate") from None
    cost = CostModel(topology.device, fitted)
    predicted = [calibrations.predict(row, topology, cost).seconds for row in rows]
    write({file: sealed_json(fitted.model_dump(mode="json"))})
    return Calibrated(fitted, calibrations.accuracy(rows, predicted), list(zip(rows, predicted, strict=True)), file)


def shipped() -> Mapping[str, Mapping[str, str]]:
    """Return the names of the workloads and clusters in the package, with their descriptions."""
    return {"workloads": workloads.names(), "clusters": clusters.shipped()}


def towers(
    run: Path | str,
    count: int,
    *,
    aim: TowerAim = "coherent",
    balance: float = 1.2,
    dimensions: int = 2,
    samples: int = 8192,
    seed: int = 0,
) -> tuple[TowerPlan, tuple[Path, Path]]:
    """Divide the embedded features of a trained ranking model, the probe, among towers; write the plan and its page.

    Similarities and lookups are those of the first samples of the shuffled training split, so that no other split
    has a part in the towers. Tables count with the bytes of their rows as float32.

    Args:
        run: Folder of the probe's run.
        count: Number of towers.
        aim: ``coherent`` or ``diverse`` towers.
        balance: Largest load of a tower relative to the mean, for bytes, lookups and features.
        dimensions: Number of coordinates of the map of features.
        samples: Least number of samples to look at.
        seed: Seed of the map and the clustering.

    Returns:
        The plan, and the paths of ``towers.json`` and ``towers.html`` in the run's folder.

    Raises:
        RunError: If it is no run of a ranking model.
        PlanError: If the model has no embeddings to compare, or fewer tables than towers.
        DataError: If the data has changed since the run was trained.
    """
    from cordillera.reports.ranking.towers import towers_page
    from cordillera.run import Run, write_atomically

    probe = Run(run)
    features, tables, similarities, loads, source = _looked_at(probe, samples)
    plan = plan_towers(
        features, tables, similarities, loads, count,
        aim=aim, balance=balance, dimensions=dimensions, seed=seed, source=source,
    )  # fmt: skip
    files = (probe.folder / "towers.json", probe.folder / "towers.html")
    write_atomically(files[0], plan.to_text())
    write_atomically(files[1], towers_page(plan))
    return plan, files


def _looked_at(
    probe: Run, samples: int
) -> tuple[list[str], list[str], Weights, dict[str, list[float]], dict[str, Any]]:
    """Return names, tables, similarities and loads of a probe's features, and where they come from."""
    import torch

    from cordillera.models.ranking.base import DeepModel
    from cordillera.workflows.scores import some_batches
    from cordillera.workflows.trained import (
        check_fixed_tables,
        recipe_of,
        restore_model_with_checkpoint,
        splits_of,
        with_threads,
    )

    recipe = recipe_of(probe)
    check_fixed_tables(recipe, "a division among towers")
    with with_threads(recipe.threads), torch.no_grad():
        splits = splits_of(probe, recipe)
        _, model, checkpoint = restore_model_with_checkpoint(probe, splits.features, torch.device("cpu"))
        features, rows = splits.features.sparse, splits.features.tables
        if not isinstance(model, DeepModel):
            raise PlanError(
                f"a {recipe.model.name} model has no embeddings of features to compare",
                where=str(probe.folder),
                remedy="train DLRM, DCN-V2, DHEN, DNN or Wukong as a probe",
            )
        found, lookups = Similarities(len(features)), [0.0] * len(features)
        for batch in some_batches(splits.train, recipe, samples):
            found.add(model.tables(batch.sparse).float().numpy())
            for number, feature in enumerate(features):
                lookups[number] += batch.sparse[feature.name].values.numel()
    tables = [feature.table for feature in features]
    row_bytes = 4.0 * model.tables.embedding_dim
    loads = {
        "table bytes": [row_bytes * rows[name] * (name not in tables[:at]) for at, name in enumerate(tables)],
        "lookups a sample": [count / found.samples for count in lookups],
    }
    source = {"run": probe.name, "data": splits.folder.name, "step": checkpoint.step, "samples": found.samples}
    return [feature.name for feature in features], tables, found.mean(), loads, source
