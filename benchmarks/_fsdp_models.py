"""A Llama sharded in units of several blocks by the project's own code, on fake tensors or in processes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from cordillera.distributed.fsdp.sharding_law import CollectiveCounts, Unit
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.models.language import stages
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.parallelize import parallelize
from cordillera.models.language.stages import LlamaStage
from cordillera.numerics.formats.precision import Precision

TOKENS = 16


class Chain(nn.Module):
    """Blocks that are gathered together."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *others)
        return x


def make_stage(config: LlamaConfig, stage: int, stages: int, blocks_per_unit: int) -> LlamaStage:
    """Return a stage on the meta device, with its blocks in units."""
    with torch.device("meta"):
        made = LlamaStage(Llama(config), stage, stages)
    blocks: list[Any] = list(made.blocks)
    if blocks_per_unit > 1:
        made.layers = nn.ModuleDict(
            {
                str(first): Chain(blocks[first : first + blocks_per_unit])
                for first in range(0, len(blocks), blocks_per_unit)
            }
        )
    return made


def units_of(stage: LlamaStage) -> tuple[list[Unit], Unit]:
    """Return the units and the root of a stage that is not sharded yet."""
    within = {id(weight) for unit in stage.layers.values() for weight in unit.parameters()}
    units = [Unit.of(weight.shape for weight in unit.parameters()) for unit in stage.layers.values()]
    return units, Unit.of(weight.shape for weight in stage.parameters() if id(weight) not in within)


def attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Compute attention of one document; fake tensors have no values, and the project's kernels read ``offsets``."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def step(stage: LlamaStage, tokens: int = TOKENS) -> None:
    """Run forward and backward of one document."""
    positions = torch.arange(tokens)
    given = positions if stage.is_first else torch.zeros(tokens, stage.config.hidden, requires_grad=True)
    stage(given, torch.tensor([0, tokens]), positions, positions, attention).sum().backward()


class Tracker(FSDPMemTracker):
    """Tracker of the peak of parameters, which may differ from the overall peak."""

    def __init__(self, stage: LlamaStage) -> None:
        super().__init__(stage)
        self.parameters = 0  # bytes
        self.gathers = 0  # bytes that all-gathers write
        self.calls: Counter[str] = Counter()

    @property
    def collectives(self) -> CollectiveCounts:
        """Numbers of collectives that were called."""
        kinds = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
        assert not self.calls.keys() - set(kinds), self.calls
        return CollectiveCounts(*(self.calls[kind] for kind in kinds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.endswith(("c10d", "c10d_functional")):
            self.calls[func._schema.name.partition("::")[2]] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        kind = self._ref_class
        for held in self._curr_mem_snap.values():
            self.parameters = max(self.parameters, held.get(kind.SHARDED_PARAM, 0) + held.get(kind.UNSHARDED_PARAM, 0))
            self.gathers = max(self.gathers, held.get(kind.ALL_GATHER, 0))


@contextmanager
def fake_processes(world: int) -> Iterator[None]:
    """Make this process the first of many that do not exist."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            warnings.filterwarnings("ignore", ".*returned a view tensor")
            yield
    finally:
        dist.destroy_process_group()


def track(stage: LlamaStage, parallel: ParallelConfig, precision: Precision = "fp32") -> Tracker:
    """Return what torch's tracker records in a step on fake tensors, within ``fake_processes``."""
    summed = mock.patch.object(stages, "summed_cross_entropy", lambda hidden, weight, *_: (hidden @ weight.T).sum())
    mesh = ProcessMesh(parallel)
    with FakeTensorMode(allow_non_fake_inputs=True), summed:  # the loss reads the labels' values
        parallelize(stage, mesh, precision)
        with (tracker := Tracker(stage)):
            step(stage)
    return tracker
