"""A stage of a Llama over many processes, applied from outside: the model does not know of it.

The order matters: matrices are cut first, then blocks are compiled as they are cut, then recomputation is put around
whole blocks, then weights are sharded, so that a block's weights are gathered once for both its forwards. What cuts a
sequence is given with each microbatch.

Source: Grattafiori et al. 2024, section 3.3.2; Shoeybi et al. 2019 (Megatron-LM), section 3, for how matrices are cut;
Korthikanti et al. 2022, section 4.2.2, for activations between them; Zhao et al. 2023 (FSDP), sections 3 and 4.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.fsdp.traffic import record_weight_traffic
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.tensor_parallel import (
    TensorRanks,
    cut_embedding,
    cut_head,
    cut_linear,
    enter_after,
    sum_over_ranks,
)
from cordillera.distributed.vocabulary_loss import IGNORED
from cordillera.errors import PlanError
from cordillera.models.language.llama import Core, LlamaConfig
from cordillera.models.language.stages import LlamaStage
from cordillera.numerics.formats.precision import Precision, compute_dtype


def check_fit(model: LlamaConfig, parallel: ParallelConfig) -> None:
    """Refuse a cut that the model's sizes do not allow.

    Args:
        model: Its sizes.
        parallel: The cut.

    Raises:
        PlanError: Names everything that does not fit.
    """
    wrong = [
        f"{name} ({getattr(model, name)}) is not divisible by tensor ({parallel.tensor})"
        for name in ("heads", "kv_heads", "ffn", "vocabulary")
        if getattr(model, name) % parallel.tensor
    ]
    if model.layers < parallel.stages:
        wrong.append(
            f"layers ({model.layers}) are fewer than the stages ({parallel.stages}) of pipeline {parallel.pipeline}"
        )
    if wrong:
        raise PlanError("; ".join(wrong), where="mesh", remedy="smaller sizes of the mesh, or another model")


def parallelize(
    stage: LlamaStage,
    mesh: ProcessMesh,
    precision: Precision = "fp32",
    ledger: Ledger | None = None,
    compiles: bool = False,
) -> None:
    """Cut a stage over the processes of a mesh. Its weights are not filled.

    Weights stay in 32 bits, and gradients are added up in them over all ranks, without being divided.

    Args:
        stage: On the meta device; changed.
        mesh: Of all processes.
        precision: In which blocks compute.
        ledger: Gets the traffic of weights and of cut matrices; None for none.
        compiles: Whether blocks are compiled, apart from attention's core and what ranks send one another.
    """
    parallel = mesh.config
    ranks = None
    if parallel.tensor > 1:
        links = Collectives(mesh.tensor.get_group(), ledger or Ledger(), parallel.deadline_s)
        ranks = TensorRanks(mesh.tensor, links, parallel.sequence)
        _cut_matrices(stage, ranks)
    if compiles:
        from cordillera.models.language.compiling import compile_blocks  # torch's compiler takes a second to import

        compile_blocks(stage, ranks)
    if parallel.recompute != "none":
        for block in stage.blocks:
            _recompute(block if parallel.recompute == "full" else block.feed_forward)
    param_dtype = None if precision == "fp32" else compute_dtype(precision)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in stage.blocks:
        fully_shard(block, mesh=mesh.weights, reshard_after_forward=parallel.reshards, mp_policy=policy)
    fully_shard(stage, mesh=mesh.weights, mp_policy=policy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # losses are divided by the tokens of the whole iteration already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if ledger is not None:
        record_weight_traffic(stage, mesh.weights, ledger)
    stage.to_empty(device=mesh.device_type)


def reduce_after(stage: LlamaStage, is_last: bool, reshards: bool) -> None:
    """Say before a stage's backward whether gradients are reduced over ranks after it.

    Until then they stay whole on each rank and are added up there: one reduction for all microbatches.

    Args:
        stage: Parallelised.
        is_last: Whether it is the last backward of a step.
        reshards: Whether weights are freed after a backward that is not.
    """
    assert isinstance(stage, FSDPModule)
    stage.set_requires_gradient_sync(is_last)
    stage.set_is_last_backward(is_last)
    stage.set_reshard_after_backward(is_last or reshards)


def free_weights(stage: LlamaStage) -> None:
    """Let each rank have its part of the weights alone, as a backward does and a forward without one does not.

    Args:
        stage: Parallelised.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _recompute(module: nn.Module) -> None:
    """Keep of a forward what it is given, and compute it again in the backward."""
    inner = module.forward

    def forward(*given: Any) -> Any:
        return checkpoint(inner, *given, use_reentrant=False)

    module.forward = forward


def _cut_matrices(stage: LlamaStage, ranks: TensorRanks) -> None:
    """Each half of a block has matrices cut by outputs, then one by inputs, and needs one sum."""

    def tokens(offsets: Tensor, table: tuple[Tensor, Tensor], core: Core | None = None) -> int:
        return len(table[0])

    for block in stage.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        for linear in (attention.query, attention.key, attention.value, feed_forward.gate, feed_forward.up):
            cut_linear(linear, ranks, 0)
        for linear in (attention.output, feed_forward.down):
            cut_linear(linear, ranks, 1)
        sum_over_ranks(attention, ranks, tokens)
        sum_over_ranks(feed_forward, ranks)
    if hasattr(stage, "embedding"):
        cut_embedding(stage.embedding, ranks)
    if stage.is_last:
        if stage.head is not None:
            cut_head(stage.head, ranks)
        enter_after(stage.norm, ranks)
        stage.vocabulary_links = ranks.links


def reduce_now(stage: LlamaStage) -> None:
    """Reduce over ranks what split backwards left on each: they go around what would reduce it after them.

    It is done by the whole backward of a token that predicts nothing, to which it belongs.

    Args:
        stage: Parallelised; every rank that shares its weights calls it.
    """
    reduce_after(stage, True, True)
    weight = next(stage.parameters())
    if stage.is_first:
        given = torch.zeros(1, dtype=torch.int64, device=weight.device)
    else:
        given = torch.zeros(1, stage.config.hidden, device=weight.device, requires_grad=True)
    labels = torch.full((1,), IGNORED, device=weight.device)
    (stage(given, torch.tensor([0, 1]), None, labels).sum() * 0.0).backward()
