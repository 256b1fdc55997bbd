"""Effects of bit flips on a trained ranking model: ``cordillera inject RUN``."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordillera.data.ranking.features import RankingBatch
from cordillera.distributed.job.job import stopped_by_signals
from cordillera.embeddings.cached_tables import CachedEmbeddingTables
from cordillera.errors import DataError, NumericsError
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.dlrm import DLRM
from cordillera.numerics.faults.bit_flips import INT4, BitLayout, Region, corrupted, regions_of
from cordillera.numerics.faults.fault_model import Component, FaultModel
from cordillera.numerics.faults.replay import Replay, Threshold, Touched
from cordillera.numerics.faults.vulnerability import Campaign
from cordillera.reports.ranking.injection import advice, injection_page
from cordillera.run import Run, write_atomically
from cordillera.workflows.processes import Say, silent
from cordillera.workflows.trained import check_fixed_tables, recipe_of, restore_model, splits_of, with_threads

INJECTIONS = 8192
_MOST_INJECTIONS = 1 << 20
_DLRM = {"bottom": "bottom MLP", "top": "top MLP", "heads": "top MLP"}


@dataclass(frozen=True)
class InjectionConfig:
    """Settings of an injection.

    Attributes:
        injections: Number of faults of the component with the widest numbers, rounded up so that every bit position of
            every component gets equally many. None for 8,192, or with a ``half_width`` for as many as that needs, up to
            a million.
        half_width: Half width of every component's PVF interval at which to end; None for no such end.
        faults: Model of one fault.
        components: Names of the components to hit; empty for all.
        seed: Seed of the faults and of the choice of samples.
        samples: Number of rows of the test split on which every fault is tried.
        threshold: Click probability from which a score counts as positive.
    """

    injections: int | None = None
    half_width: float | None = None
    faults: FaultModel = field(default_factory=FaultModel)
    components: tuple[str, ...] = ()
    seed: int = 0
    samples: int = 256
    threshold: float = 0.5


@dataclass
class InjectionOutcome:
    """Result of :func:`inject`.

    Attributes:
        interrupted: Whether a signal ended it early; the results until then are written.
        files: Paths of ``injection.json`` and ``injection.html`` in the run's folder.
    """

    content: dict[str, Any]
    interrupted: bool
    files: tuple[Path, Path]


class TableFaults:
    """Outputs of the samples (``batch``) that read a corrupted row of a model's embedding tables.

    Args:
        embeddings: Embeddings of the samples from the intact tables, ``[B, F, D]``.
        rows: Function from stored rows ``[M, ...]`` to their embeddings ``[M, D]``. Default: the identity.
    """

    def __init__(
        self,
        model: RankingModel,
        batch: RankingBatch,
        embeddings: Tensor,
        rows: Callable[[Tensor], Tensor] = lambda stored: stored,
    ) -> None:
        sparse, features = batch.sparse, model.features
        self.model, self.batch, self.embeddings, self.rows = model, batch, embeddings, rows
        self.offsets, lengths = sparse.offsets.to(torch.int64), sparse.lengths.to(torch.int64)
        sizes = list(features.tables.values())
        starts = dict(zip(features.tables, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        first = torch.tensor([starts[feature.table] for feature in features.sparse], dtype=torch.int64)
        is_mean = torch.tensor([feature.pooling == "mean" for feature in features.sparse])
        bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T]
        self.row_of = sparse.values + first[bag // len(batch)]
        share = torch.where(is_mean[bag // len(batch)], lengths[bag].reciprocal(), torch.ones(()))
        self.weights = share if sparse.weights is None else share * sparse.weights
        self.bag_of = bag
        self.by_row = self.row_of.argsort(stable=True)
        self.sorted_rows = self.row_of[self.by_row].contiguous()

    def __call__(self, region: Region, bits: Tensor) -> Touched:
        """Compute the outputs under faults at ``int64 [M, k]`` addresses; the addresses of a fault lie in one row."""
        batch_size = len(self.batch)
        places, masks = region.locate(bits)
        width = region.stored.shape[-1]
        row = (places[:, 0] // width).contiguous()
        owner = region.owner.detach()
        stored = corrupted(owner[row], places % width + region.first_column, masks)
        # All lookups that read the row of a fault.
        low, high = (torch.searchsorted(self.sorted_rows, row, right=right) for right in (False, True))
        fault, value = _ranges(low, high)
        bag = self.bag_of[self.by_row[value]]
        pairs, pair = torch.unique(fault * batch_size + bag % batch_size, return_inverse=True)
        fault_of, sample_of = pairs // batch_size, pairs % batch_size
        # All distinct bags with such a lookup, and all of their lookups.
        bags = torch.unique(pair * len(self.offsets) + bag)
        pair, bag = bags // len(self.offsets), bags % len(self.offsets)
        of_bag, value = _ranges(self.offsets[bag], self.offsets[bag + 1])
        hit = fault_of[pair[of_bag]]
        with torch.no_grad():
            is_hit = (self.row_of[value] == row[hit]).unsqueeze(-1)
            vectors = torch.where(is_hit, self.rows(stored)[hit], self.rows(owner[self.row_of[value]]))
            pooled = vectors.new_zeros(len(bags), vectors.shape[-1])
            pooled.index_add_(0, of_bag, vectors * self.weights[value].unsqueeze(-1))
            embeddings = self.embeddings[sample_of]
            embeddings[pair, bag // batch_size] = pooled.to(embeddings.dtype)
            return Touched(fault_of, sample_of, self.model.score(self.batch.dense[sample_of], embeddings))


def _ranges(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the range, and the number, for every number of the ranges ``[low, high)`` in order."""
    counts = high - low
    of = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return of, torch.arange(len(of)) - (counts.cumsum(0) - counts - low)[of]


def components_of(model: RankingModel) -> list[Component]:
    """Return a ranking model's weights in parts that are reported together: the tables, and each module.

    The heads of a DLRM count as the last layers of the top MLP. For tables with rows in few bits, the scales and the
    cached rows are separate parts.
    """
    names = _DLRM if isinstance(model, DLRM) else {}
    groups: dict[str, list[Region]] = {}
    for region in regions_of(model):
        child = region.name.split(".")[0]
        groups.setdefault(names.get(child, child), []).append(region)
    if isinstance(model.tables, CachedEmbeddingTables):
        groups = {
            **_cached_regions(model.tables),
            **{name: found for name, found in groups.items() if name != "tables"},
        }
    return [Component.of(name, regions) for name, regions in groups.items()]


def _cached_regions(tables: CachedEmbeddingTables) -> dict[str, list[Region]]:
    """Return the memory of tables with rows in few bits: codes, scales with biases, and float32 rows in the cache."""
    form, payload = tables.form, tables.payload
    layouts = {
        "fp32": BitLayout.of(torch.float32),
        "fp16": BitLayout.of(torch.float16),
        "int8": BitLayout.of(torch.uint8),
        "int4": INT4,
    }
    codes = payload.shape[1] - form.row_parameters
    regions = {"tables": [Region.of("tables.payload", payload, layouts[form.name], slice(0, codes))]}
    if form.row_parameters:
        layout = BitLayout.of(torch.float32 if form.row_parameters == 8 else torch.float16)
        regions["table scales"] = [Region.of("tables.scales", payload, layout, slice(codes, payload.shape[1]))]
    if tables.cache.lines.numel():
        regions["table cache"] = [Region.of("tables.cache.lines", tables.cache.lines)]
    return regions


def replay_of(model: RankingModel, batch: RankingBatch, threshold: float = 0.5) -> Replay:
    """Return a judge of faults: a fault matters if a score, computed in float32, crosses a ``threshold`` in (0, 1).

    The scores are those of ``model`` in evaluation mode for the samples of ``batch``.

    Raises:
        DataError: If the threshold is out of range.
        NumericsError: If no score of the intact model is a number.
    """
    if not 0 < threshold < 1:
        raise DataError(f"must lie between 0 and 1, got {threshold}", where="threshold")
    decision = Threshold(math.log(threshold / (1 - threshold)))
    if not model.features.sparse or not model.pools_all:
        return Replay(lambda: model(batch), decision)
    with torch.no_grad():
        embeddings = model.tables(batch.sparse)
    return Replay(
        lambda: model(batch),
        decision,
        suffix=lambda: model.score(batch.dense, embeddings),
        lookups={"tables.weight": TableFaults(model, batch, embeddings)},
    )


def inject(
    run: Run | Path | str,
    config: InjectionConfig | None = None,
    *,
    on_round: Callable[[int, int], object] = lambda done, total: None,
    say: Say = silent,
) -> InjectionOutcome:
    """Flip bits in the weights of a trained ranking model and count outputs that become wrong.

    Weights are hit as they are stored and used in float32. The results go to ``injection.json`` and ``injection.html``
    in the run's folder, also after Ctrl-C or SIGTERM.

    Args:
        config: Settings of the injection; None for the defaults.
        on_round: Function called with the number of faults done and the total, per bit position.

    Raises:
        RunError: If it is not a run of a ranking model.
        CheckpointError: If there is no checkpoint, or it is corrupt.
        DataError: If the data is not available, there is no test split, or ``samples`` or ``threshold`` is out of
            range.
        NumericsError: If a component is unknown, a fault is wider than a number, or ``half_width`` is out of range.
    """
    run = run if isinstance(run, Run) else Run(run)
    config = config or InjectionConfig()
    recipe = recipe_of(run)
    check_fixed_tables(recipe, "injecting faults")
    if config.samples < 1 or (config.injections is not None and config.injections < 1):
        raise DataError("at least one sample and one injection are needed", where="samples, injections")
    if config.half_width is not None and not 0 < config.half_width < 1:
        raise NumericsError(f"must be above zero and below one, got {config.half_width}", where="half_width")
    say(f"data: {recipe.data.label}")
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        if not len(splits.test):
            raise DataError("there is no test split to try faults on", where=recipe.data.label)
        _, model = restore_model(run, splits.features, torch.device("cpu"))
        random = np.random.default_rng([config.seed, 1])
        chosen = np.sort(random.choice(len(splits.test), min(config.samples, len(splits.test)), replace=False))
        components = _chosen(components_of(model), config.components)
        replay = replay_of(model, splits.test.batch(chosen), config.threshold)
        campaign = Campaign(components, replay, config.faults, seed=config.seed)
        say(f"model: {', '.join(f'{one.name} {one.num_bits // 8:,} bytes' for one in components)}")
        stop, began = threading.Event(), time.perf_counter()
        with stopped_by_signals(stop):
            finished = campaign.run(
                _rounds(campaign, config), half_width=config.half_width, stop=stop.is_set, on_round=on_round
            )
    results = [result.to_json() for result in campaign.found.values()]
    content = {
        "run": run.name,
        "fault": {"name": config.faults.name, "bits": config.faults.bits, "burst": config.faults.burst},
        "seed": config.seed,
        "split": "test",
        "samples": replay.inputs,
        "samples_left_out": replay.skipped,
        "threshold": config.threshold,
        "half_width": config.half_width,
        "interrupted": not finished,
        "rounds": campaign.rounds,
        "judged": replay.judged,
        "judged_again_by_flipping": replay.repeated,
        "judged_one_by_one": replay.one_by_one,
        "seconds": time.perf_counter() - began,
        "components": results,
        "advice": advice(results),
    }
    file = run.write_json("injection.json", content)
    page = run.folder / "injection.html"
    write_atomically(page, injection_page(content))
    return InjectionOutcome(content, not finished, (file, page))


def _chosen(components: Sequence[Component], names: Sequence[str]) -> list[Component]:
    known = {component.name.lower(): component for component in components}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise NumericsError(
            f"there is no component {unknown[0]!r}",
            where="component",
            remedy=f"one of {', '.join(component.name for component in components)}",
        )
    wanted = {name.lower() for name in names} or set(known)
    return [component for name, component in known.items() if name in wanted]


def _rounds(campaign: Campaign, config: InjectionConfig) -> int:
    """Return the number of faults per bit position, at least two because one has no spread."""
    positions = max((len(result.strata) for result in campaign.found.values()), default=1) or 1
    injections = config.injections or (INJECTIONS if config.half_width is None else _MOST_INJECTIONS)
    return max(2, -(-injections // positions))
