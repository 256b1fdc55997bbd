"""Parallelism of a Llama stage over many processes, applied from outside without changes to the model.

The order matters. Matrices are split first; then the split blocks are compiled; then whole blocks are wrapped for
recomputation; then weights are sharded, so that a block's weights are gathered once for both of its forwards. The split
of a sequence is given with each microbatch.

Source: Grattafiori et al. 2024, section 3.3.2; Shoeybi et al. 2019 (Megatron-LM), section 3, for the split of matrices;
Korthikanti et al. 2022, section 4.2.2, for activations between them; Zhao et al. 2023 (FSDP), sections 3 and 4.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.dtensors import is_sharded
from cordillera.distributed.expert_parallel import ExpertRanks
from cordillera.distributed.fsdp.traffic import record_weight_traffic
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.tensor_parallel import (
    TensorRanks,
    cut_bias,
    cut_embedding,
    cut_head,
    cut_linear,
    enter_after,
    join_outputs,
    sum_over_ranks,
)
from cordillera.distributed.vocabulary_loss import IGNORED
from cordillera.errors import PlanError
from cordillera.models.language.llama import Core, FeedForward, LlamaConfig
from cordillera.models.language.stages import LlamaStage
from cordillera.numerics.formats.precision import Precision, compute_dtype


def check_fit(model: LlamaConfig, parallel: ParallelConfig) -> None:
    """Check that the sizes of ``model`` can be split over a mesh of the sizes of ``parallel``.

    Raises:
        PlanError: If a size does not fit; the message names all of them.
    """
    wrong = [
        f"{name} ({getattr(model, name)}) is not divisible by tensor ({parallel.tensor})"
        for name in ("heads", "ffn", "vocabulary")
        if getattr(model, name) % parallel.tensor
    ]
    if model.kv_heads % parallel.tensor and parallel.tensor % model.kv_heads:
        wrong.append(f"kv_heads ({model.kv_heads}) and tensor ({parallel.tensor}): neither divides the other")
    elif model.head_width % (sharers := _sharers(model, parallel)):
        wrong.append(
            f"the width of a head ({model.head_width}) is not divisible by the {sharers} ranks of tensor "
            f"({parallel.tensor}) that share each of kv_heads ({model.kv_heads})"
        )
    if model.layers + 2 < parallel.stages or (model.layers < parallel.stages and parallel.pipeline == 1):
        wrong.append(
            f"layers ({model.layers}) are fewer than the stages ({parallel.stages}) of pipeline {parallel.pipeline}, "
            "of which the first and the last may hold none"
        )
    if (experts := model.experts) is not None:
        ranks = parallel.shard * parallel.context
        if parallel.tensor > 1:
            wrong.append(f"experts are not split by matrices, and tensor is {parallel.tensor}")
        if parallel.experts == "exchange" and experts.count % ranks:
            wrong.append(
                f"{experts.count} experts are not divisible by shard x context ({parallel.shard} x {parallel.context})"
            )
    if wrong:
        raise PlanError("; ".join(wrong), where="mesh", remedy="smaller sizes of the mesh, or another model")


def _sharers(model: LlamaConfig, parallel: ParallelConfig) -> int:
    """Return the number of tensor ranks that share each key-value head."""
    return max(1, parallel.tensor // model.kv_heads)


def parallelize(
    stage: LlamaStage,
    mesh: ProcessMesh,
    precision: Precision = "fp32",
    ledger: Ledger | None = None,
    compiles: bool = False,
) -> None:
    """Split a stage over the processes of ``mesh``, in place; its weights are allocated but not filled.

    Weights stay in 32 bits, and their gradients are summed over all ranks without division. Blocks compute in
    ``precision``.

    Args:
        stage: Stage on the meta device, which is changed.
        ledger: Ledger that counts the traffic of weights and of split matrices; None to count nothing.
        compiles: Whether blocks are compiled, except attention's core and communication.
    """
    parallel = mesh.config
    ranks = None
    if parallel.tensor > 1:
        links = Collectives(mesh.tensor.get_group(), ledger or Ledger(), parallel.deadline_s)
        neighbours = None
        if (sharers := _sharers(stage.config, parallel)) > 1:
            neighbours = Collectives(mesh.tensor_neighbours(sharers), links.ledger, parallel.deadline_s)
        ranks = TensorRanks(mesh.tensor, links, parallel.sequence, neighbours)
        _cut_matrices(stage, ranks)
    if compiles:
        from cordillera.models.language.compiling import compile_blocks  # torch's compiler takes a second to import

        compile_blocks(stage, ranks)
    if parallel.recompute != "none":
        for block in stage.blocks:
            _recompute(block if parallel.recompute == "full" else block.feed_forward)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # this import takes a second

    param_dtype = None if precision == "fp32" else compute_dtype(precision)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    in_full = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    held = _divide_experts(stage, mesh, ledger or Ledger()) if parallel.experts == "exchange" else set()
    for layer in stage.experts.values():
        fully_shard(layer.router, mesh=mesh.weights, reshard_after_forward=parallel.reshards, mp_policy=in_full)
    for block in stage.blocks:
        fully_shard(
            block,
            mesh=mesh.weights,
            reshard_after_forward=parallel.reshards,
            mp_policy=policy,
            ignored_params=held,
        )
    fully_shard(stage, mesh=mesh.weights, mp_policy=policy, reshard_after_forward=False, ignored_params=held)
    for module in stage.modules():
        if is_sharded(module):
            # losses are already divided by the tokens of the whole iteration
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if ledger is not None:
        record_weight_traffic(stage, mesh.weights, ledger)
    stage.to_empty(device=mesh.device_type)


def reduce_after(stage: LlamaStage, is_last: bool, reshards: bool) -> None:
    """Set, before a stage's backward, whether gradients are reduced over ranks after it.

    Until then each rank accumulates whole gradients, so that there is one reduction for all microbatches.

    Args:
        is_last: Whether the backward is the last one of a step.
        reshards: Whether weights are freed after a backward that is not the last.
    """
    assert is_sharded(stage)
    stage.set_requires_gradient_sync(is_last)
    stage.set_is_last_backward(is_last)
    stage.set_reshard_after_backward(is_last or reshards)


def free_weights(stage: LlamaStage) -> None:
    """Free the gathered weights, so that each rank holds only its part; needed after a forward without a backward."""
    for module in stage.modules():
        if is_sharded(module):
            module.reshard()


def _divide_experts(stage: LlamaStage, mesh: ProcessMesh, ledger: Ledger) -> set[nn.Parameter]:
    """Leave each rank its part of the experts, to which tokens are sent; return these weights."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    weights = mesh.weights
    links = Collectives(weights.get_group("fsdp"), ledger, mesh.config.deadline_s)
    placements = [Shard(0) if name == "fsdp" else Replicate() for name in weights.mesh_dim_names or ()]
    held = set()
    for layer in stage.experts.values():
        for name in ("gate", "up", "down"):
            whole = getattr(layer, name)
            part = whole.new_empty(len(whole) // links.size, *whole.shape[1:])
            own = nn.Parameter(DTensor.from_local(part, weights, placements, run_check=False))
            setattr(layer, name, own)
            held.add(own)
        layer.products = ExpertRanks(links, layer.router.config.count)
    return held


def _recompute(module: nn.Module) -> None:
    """Wrap a module so that only its inputs are stored in the forward, and the backward recomputes it."""
    inner = module.forward

    def forward(*given: Any) -> Any:
        return checkpoint(inner, *given, use_reentrant=False)

    module.forward = forward


def _cut_matrices(stage: LlamaStage, ranks: TensorRanks) -> None:
    """Split each half of a block, first matrices by outputs and then one by inputs, so that it needs one sum."""

    def tokens(offsets: Tensor, table: tuple[Tensor, Tensor], core: Core | None = None) -> int:
        return len(table[0])

    for block in stage.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        assert isinstance(feed_forward, FeedForward)
        for linear in (attention.query, attention.key, attention.value, feed_forward.gate, feed_forward.up):
            cut_linear(linear, ranks, 0)
        keys: tuple[nn.Module, ...] = (attention.key, attention.value)
        if attention.has_bias:
            for bias in (attention.query_bias, attention.key_bias, attention.value_bias):
                cut_bias(bias, ranks)
            keys = (attention.key_bias, attention.value_bias)
        if ranks.neighbours is not None:
            for module in keys:
                join_outputs(module, ranks)
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
    """Reduce over ranks the gradients that split backwards left, as these bypass the hooks that would reduce them.

    The reduction is a part of a whole backward, so this runs one for a token that predicts nothing. Every rank that
    shares weights of the ``stage`` must call this.
    """
    reduce_after(stage, True, True)
    weight = next(stage.parameters())
    if stage.is_first:
        given = torch.zeros(1, dtype=torch.int64, device=weight.device)
    else:
        given = torch.zeros(1, stage.config.hidden, device=weight.device, requires_grad=True)
    labels = torch.full((1,), IGNORED, device=weight.device)
    (stage(given, torch.tensor([0, 1]), None, labels).sum() * 0.0).backward()
