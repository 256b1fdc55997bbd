"""What flipped bits do to a trained ranking model: ``cordillera inject RUN``."""

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
from cordillera.numerics.faults.vulnerability import Campaign, Vulnerability
from cordillera.reports.ranking.injection import advice, injection_page
from cordillera.run import Run, write_atomically
from cordillera.workflows._say import Say, silent
from cordillera.workflows.trained import load_model, recipe_of, splits_of, with_threads

INJECTIONS = 8192
_MOST_INJECTIONS = 1 << 20
_DLRM = {"bottom": "bottom MLP", "top": "top MLP", "heads": "top MLP"}


@dataclass(frozen=True)
class InjectionConfig:
    """What is injected.

    Attributes:
        injections: Faults of the component with the widest numbers, rounded up so that every bit position of every
            component gets as many; None for 8,192, or with a ``half_width`` for as many as that takes, a million at
            most.
        half_width: End as soon as every component's PVF is known to plus or minus this.
        faults: What one fault is.
        components: Names of those to hit; none for all.
        seed: Of the faults and of the choice of samples.
        samples: Rows of the test split that every fault is tried on.
        threshold: The click probability at which a score becomes a yes.
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
    """What :func:`inject` found.

    Attributes:
        found: By component.
        content: Of ``injection.json``.
        interrupted: Whether a signal ended it early; what was found until then is written all the same.
        files: ``injection.json`` and ``injection.html`` in the run's folder.
    """

    found: dict[str, Vulnerability]
    content: dict[str, Any]
    interrupted: bool
    files: tuple[Path, Path]


class TableFaults:
    """The outputs of those samples that read a corrupted row of a model's embedding tables.

    Args:
        model: The model.
        batch: The samples.
        embeddings: What the intact tables give for them, ``[B, F, D]``.
        rows: Of stored rows ``[M, ...]``, the embeddings ``[M, D]`` that they stand for. Default: as they are.
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
        """Compute them.

        Args:
            region: The tables' weight or a part of its rows.
            bits: ``int64 [M, k]`` addresses; those of a fault lie in one row.
        """
        batch_size = len(self.batch)
        places, masks = region.locate(bits)
        width = region.stored.shape[-1]
        row = (places[:, 0] // width).contiguous()
        owner = region.owner.detach()
        stored = corrupted(owner[row], places % width + region.first_column, masks)
        # every value that reads the row of a fault
        low, high = (torch.searchsorted(self.sorted_rows, row, right=right) for right in (False, True))
        fault, value = _ranges(low, high)
        bag = self.bag_of[self.by_row[value]]
        pairs, pair = torch.unique(fault * batch_size + bag % batch_size, return_inverse=True)
        fault_of, sample_of = pairs // batch_size, pairs % batch_size
        # every bag that holds such a value, once, and all of its values
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
    """All whole numbers of the ranges ``[low, high)``, one range after another: of which range each is, and it."""
    counts = high - low
    of = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return of, torch.arange(len(of)) - (counts.cumsum(0) - counts - low)[of]


def components_of(model: RankingModel) -> list[Component]:
    """A ranking model's weights in parts that are reported together: the tables, and each module of the model.

    Args:
        model: The model. Of a DLRM the heads count as the top MLP's last layers. Of tables whose rows are kept in few
            bits, the scales and the cached rows are parts of their own.
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
    """The memory of tables with rows in few bits: codes, scales with biases, and float32 rows in the cache."""
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
    """Judges faults of a ranking model by the side of a threshold on which its scores fall, computed in float32.

    Args:
        model: In evaluation mode.
        batch: Samples.
        threshold: A probability in (0, 1).

    Raises:
        DataError: the threshold is no such probability.
        NumericsError: no score of the intact model is a number.
    """
    if not 0 < threshold < 1:
        raise DataError(f"must lie between 0 and 1, got {threshold}", where="threshold")
    with torch.no_grad():
        embeddings = model.tables(batch.sparse) if model.features.sparse else None
    if embeddings is None:
        return Replay(lambda: model(batch), Threshold(math.log(threshold / (1 - threshold))))
    return Replay(
        lambda: model(batch),
        Threshold(math.log(threshold / (1 - threshold))),
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

    Writes ``injection.json`` and ``injection.html`` into the run's folder. Weights are hit as they are stored and used
    in float32. Ctrl-C or SIGTERM ends the injections; what was found is written.

    Args:
        run: The run or its folder.
        config: What is injected.
        on_round: Told how many faults a bit position are done, of how many.
        say: Called with one line of text at each stage.

    Raises:
        RunError: it is not a run of a ranking model.
        CheckpointError: there is no checkpoint, or it is corrupt.
        DataError: the data cannot be had, there is no test split, or ``samples`` or ``threshold`` make no sense.
        NumericsError: an unknown component, a fault wider than a number, or a half-width that is no share.
    """
    run = run if isinstance(run, Run) else Run(run)
    config = config or InjectionConfig()
    recipe = recipe_of(run)
    if config.samples < 1 or (config.injections is not None and config.injections < 1):
        raise DataError("at least one sample and one injection are needed", where="--samples, --injections")
    if config.half_width is not None and not 0 < config.half_width < 1:
        raise NumericsError(f"must be above zero and below one, got {config.half_width}", where="--half-width")
    say(f"data: {recipe.data.label}")
    with with_threads(recipe.threads):
        splits = splits_of(run, recipe)
        if not len(splits.test):
            raise DataError("there is no test split to try faults on", where=recipe.data.label)
        _, model = load_model(run, splits.features, torch.device("cpu"))
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
    return InjectionOutcome(campaign.found, content, not finished, (file, page))


def _chosen(components: Sequence[Component], names: Sequence[str]) -> list[Component]:
    known = {component.name.lower(): component for component in components}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise NumericsError(
            f"there is no component {unknown[0]!r}",
            where="--component",
            remedy=f"one of {', '.join(component.name for component in components)}",
        )
    wanted = {name.lower() for name in names} or set(known)
    return [component for name, component in known.items() if name in wanted]


def _rounds(campaign: Campaign, config: InjectionConfig) -> int:
    """Faults a bit position, at least two: one has no spread."""
    positions = max((len(result.strata) for result in campaign.found.values()), default=1) or 1
    injections = config.injections or (INJECTIONS if config.half_width is None else _MOST_INJECTIONS)
    return max(2, -(-injections // positions))
