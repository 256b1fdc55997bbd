"""Compilation of a Llama's blocks by ``torch.compile``, with one graph for all blocks and any number of tokens.

Attention's core, which reads where documents begin, and communication are excluded: a graph ends before them and
another begins after them. Blocks have the same code and pass their weights as inputs, so the first block's graphs serve
all blocks of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cordillera.distributed.tensor_parallel import TensorRanks
from cordillera.errors import PlanError
from cordillera.models.language.llama import Core
from cordillera.models.language.moe import ExpertLayer
from cordillera.models.language.stages import LlamaStage


def check_compiler(device_type: str) -> None:
    """Check that a compiler for ``cpu`` or ``cuda`` is available, which would otherwise fail later.

    Raises:
        PlanError: If there is no compiler for the device.
    """
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise PlanError(
                "there is no C++ compiler, which compiling for CPUs takes",
                where="compile",
                remedy="install g++ or clang++, name one in the environment variable CXX, or do not compile",
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise PlanError(
            f"there is no Triton for {device_type}", where="compile", remedy="install triton, or do not compile"
        )


def compile_blocks(stage: LlamaStage, ranks: TensorRanks | None = None) -> None:
    """Compile each block's forward, and with it its backward, when it is first called.

    Matrices of the ``stage`` are already split over ``ranks``, which are changed too; weights are not yet sharded.
    """
    if ranks is not None:
        ranks.enter = torch.compiler.disable(ranks.enter)  # type: ignore[method-assign]
        ranks.leave = torch.compiler.disable(ranks.leave)  # type: ignore[method-assign]
        ranks.join = torch.compiler.disable(ranks.join)  # type: ignore[method-assign]
    for block in stage.blocks:
        block.attention.core = _Outside(block.attention.core)
        if isinstance(block.feed_forward, ExpertLayer):
            block.feed_forward.forward = torch.compiler.disable(block.feed_forward.forward)  # type: ignore[method-assign]
        block.forward = _Compiled(block.forward)  # type: ignore[method-assign]


class _Outside:
    """Attention core that is called from compiled code but not compiled."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        return self._core(q, k, v, offsets)


class _Compiled:
    """Forward of a block; not compiled for zero or one token, as torch would create a separate graph for each."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._plain, self._compiled = forward, torch.compile(forward, dynamic=True)

    def __call__(
        self, x: Tensor, offsets: Tensor, table: Any, core: Core | None = None, has_target: Tensor | None = None
    ) -> Tensor:
        forward = self._compiled if len(x) > 1 else self._plain
        return forward(x, offsets, table, None if core is None else _Outside(core), has_target)
