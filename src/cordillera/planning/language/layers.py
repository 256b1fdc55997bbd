"""Cost of a layer on one device: seconds of its parts, parameters and bytes of activations.

All figures are derived from shapes, none is fitted; :class:`cordillera.cost.CostModel` gives the seconds of the shapes.
"""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from cordillera.cost import CostModel
from cordillera.planning.language.workload import BYTES, Layout, Transformer, Workload

_FUSED_SOFTMAX = 4  # Megatron-LM's masked softmax kernel takes a multiple of this number of score matrices
_UNFUSED_SOFTMAX = 104  # bytes per score, over all passes, if that kernel cannot be used
_CHOICE = 8  # bytes of the choice of an expert that are kept: its weight and its place
_LOGIT_TRAFFIC = 52  # bytes per logit: cross entropy in 32 bits, forwards and backwards


class LayerSeconds(NamedTuple):
    """Seconds of one layer, or a part of the model, for one microbatch on one device.

    Attributes:
        forward: Seconds of the forward.
        again: Seconds of recomputing the forward.
        input_gradient: Seconds of the gradient of the input.
        weight_gradient: Seconds of the gradient of the weights and its accumulation.
        tensor: Part of these seconds spent in collectives over the tensor-parallel devices.
        gather: Part of these seconds spent waiting for weights and gradients that are cut over copies.
        exchange: Part of these seconds spent in exchanges of tokens between devices that share a layer's experts.
        context: Part of these seconds spent in gathers over the devices that share a sequence.
    """

    forward: float = 0.0
    again: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    tensor: float = 0.0
    gather: float = 0.0
    exchange: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.again + self.input_gradient + self.weight_gradient

    @property
    def communication(self) -> float:
        """Part of :attr:`total` spent in collectives that are not hidden behind computation."""
        return self.tensor + self.gather + self.exchange + self.context

    def times(self, count: float) -> LayerSeconds:
        """Return the seconds of ``count`` executions one after the other."""
        return LayerSeconds(*[seconds * count for seconds in self])

    def plus(self, other: LayerSeconds) -> LayerSeconds:
        """Return the seconds of both, one after the other."""
        return LayerSeconds(*map(add, self, other))

    def at_least(self, floor: float) -> LayerSeconds:
        """Scale all seconds up to a total of ``floor``, the time that the host needs, if they are shorter."""
        if self.total >= floor or self.total == 0:
            return self
        by = floor / self.total
        return self._replace(
            forward=self.forward * by,
            again=self.again * by,
            input_gradient=self.input_gradient * by,
            weight_gradient=self.weight_gradient * by,
        )


def held_weights(model: Transformer, layout: Layout) -> tuple[float, float]:
    """Return the mean number of parameters of a layer of ``model`` on one device of a ``layout``.

    Returns:
        Those that all copies share, and those of experts.
    """
    e, share = model.experts, model.mixed_share
    plain = float(model.matrices * model.hidden * (model.ffn or 4 * model.hidden))
    if e is None:
        return (model.attention_weights + plain) / layout.tensor, 0.0
    mixed = float(model.matrices * model.hidden * e.count * e.ffn)
    rest = model.feed_forward_weights(e.every - 1) - mixed  # shared expert and router
    own = model.attention_weights + share * rest + (1 - share) * plain
    return own / layout.tensor, share * mixed / layout.tensor / layout.expert


def activation_bytes(workload: Workload, layout: Layout) -> float:
    """Return the bytes of activations of one layer for one microbatch of a ``workload`` in a ``layout``, on one device.

    Source: Korthikanti et al. 2022, table 2. With fused attention no scores are kept. A gated feed-forward net keeps
    two more tensors of its width, or only the two inputs of its product if that is fused. Selective recomputation keeps
    no scores or, with fused attention, nothing inside the feed-forward nets. Experts keep what
    :func:`cordillera.kernels.moe.expert_mlp` keeps with the policy ``AB``.
    """
    model, t = workload.model, layout.tensor
    tokens = workload.sequence / layout.context * layout.microbatch
    full = tokens * model.hidden
    if layout.recompute == "full":
        return 2.0 * full / (t if layout.sequence_parallel else 1)
    dense, routed = _tokens_widths(model)
    # norms' inputs, block inputs, dropouts' masks
    own = (10.0 if model.dropout else 8.0) * full / (t if layout.sequence_parallel else 1)
    kept = (4.0 if model.fused_ffn else 8.0) if model.gated else 4.0
    busiest = model.experts.imbalance if model.experts is not None else 1.0
    ffn = kept * dense + (4.0 if model.gated else 2.0) * routed * busiest
    if recomputes_ffn(model, layout):
        ffn = 0.0
    cut = tokens * ((4.0 * model.queries + ffn) / t + 4.0 * model.held_keys(t))
    if model.experts is not None:
        own += _CHOICE * tokens * model.mixed_share * model.experts.active
    scores = 0.0
    if layout.recompute == "none" and not model.fused_attention:
        scores = 5.0 * model.heads * tokens * workload.sequence / t
    return own + cut + scores


def recomputes_ffn(model: Transformer, layout: Layout) -> bool:
    """Return whether the backward computes the feed-forward nets again, and nothing else, in a ``layout``.

    Fused attention keeps little, so that selective recomputation of such a ``model`` is that of the feed-forward nets.
    """
    return layout.recompute == "selective" and model.fused_attention


def head_activation_bytes(workload: Workload, layout: Layout) -> float:
    """Return the bytes that the output embedding and the loss keep for one microbatch of a ``workload``, on one device.

    They are the logits in 32 bits and the input of the head, for a device of a ``layout``.
    """
    tokens = workload.sequence / layout.context * layout.microbatch
    return tokens * (4.0 * workload.model.vocabulary + 2.0 * workload.model.hidden) / layout.tensor


def _tokens_widths(model: Transformer) -> tuple[float, float]:
    """Return the widths of the dense nets and of the experts that a token passes, as means over layers."""
    plain, share, e = float(model.ffn or 4 * model.hidden), model.mixed_share, model.experts
    if e is None:
        return plain, 0.0
    return plain * (1 - share) + e.shared_ffn * share, e.active * e.ffn * share


def _linear_seconds(
    model: Transformer, layout: Layout, cost: CostModel, rows: float
) -> tuple[float, float, float, float]:
    """Return the seconds of a layer's matrix products with weights: forward, input gradient and weight gradient.

    The last value is the part of the forward in the feed-forward nets. All are means over layers. With balanced
    routing, the experts of a device get as many tokens as if each of its own tokens stayed, and each expert gets as
    many as the others; on the busiest device they get more by the model's imbalance. They are computed in one kernel.
    The router is never in FP8.
    """
    t, up, e, share = layout.tensor, 2 if model.gated else 1, model.experts, model.mixed_share
    nets = [(1.0 - share, rows, float(model.ffn or 4 * model.hidden), 1.0)]  # how often, rows, width, count
    if e is not None:
        held = e.count / layout.expert
        each = rows * e.active / held * e.imbalance
        nets += [(share, rows, float(e.shared_ffn), 1.0), (share, each, float(e.ffn), held)]
    all_fp8, ffn_fp8 = layout.fp8 == "linear", layout.fp8 != "none"
    layers = [
        (1.0, (rows, (model.queries + 2 * model.keys) / t, model.hidden, 1.0, all_fp8)),
        (1.0, (rows, model.hidden, model.queries / t, 1.0, all_fp8)),
    ]
    of_attention = len(layers)
    for often, each, width, count in nets:
        if often and width:
            layers.append((often, (each, up * width / t, model.hidden, count, ffn_fp8)))
            layers.append((often, (each, model.hidden, width / t, count, ffn_fp8)))
    if e is not None:
        layers.append((share, (rows, e.count, model.hidden, 1.0, False)))  # the router, which all devices have whole
    passes = [[often * seconds for seconds in cost.linear(*shape)] for often, shape in layers]
    forward, of_input, of_weight = (sum(part) for part in zip(*passes, strict=True))
    return forward, of_input, of_weight, sum(part[0] for part in passes[of_attention:])


def layer_seconds(workload: Workload, layout: Layout, cost: CostModel, reduce: float) -> LayerSeconds:
    """Return the seconds of one layer of ``workload`` for one microbatch on one device.

    They include matrix products by their shapes, attention, memory traffic (norms, biases, activations, residuals,
    dropouts, in bytes counted from Megatron-LM's kernels; rows that are gathered for experts and combined),
    gradient accumulation, and the collectives of tensor parallelism: two in the forward, two in the backward.

    Args:
        workload: Workload with the shapes.
        layout: Degrees of parallelism.
        cost: Cost model of the device.
        reduce: Seconds of one all-reduce of a microbatch's activations over the tensor-parallel devices.
    """
    model, t = workload.model, layout.tensor
    rows = layout.microbatch * workload.sequence / layout.context
    ffn = sum(_tokens_widths(model))
    forward, of_input, of_weight, of_nets = _linear_seconds(model, layout, cost, rows)
    if model.fused_attention:
        core = cost.attention(2.0 * rows * workload.sequence * model.queries / t)  # half of the scores are masked
        core_back = 2.5 * core
    else:
        count = layout.microbatch * model.heads / t / layout.context
        both = cost.product(workload.sequence, workload.sequence, model.head, count)
        both += cost.product(workload.sequence, model.head, workload.sequence, count)
        scores = BYTES * count * workload.sequence**2
        core = both + cost.stream(4.0 * scores)  # softmax over unmasked scores, dropout
        core_back = 2.0 * both + cost.stream(4.5 * scores)
        if layout.microbatch * model.heads // layout.tensor % _FUSED_SOFTMAX:
            core_back += cost.stream(_UNFUSED_SOFTMAX * count * workload.sequence**2)
    x = BYTES * rows * model.hidden
    own = x / t if layout.sequence_parallel else x
    wide = BYTES * rows * ffn * (1.5 if model.gated else 1.0) / t
    pointwise = cost.stream(11.0 * own + 6.0 * x / t + 2.0 * wide)
    pointwise_back = cost.stream(17.0 * own + 3.0 * x / t + 3.0 * wide)
    if model.experts is not None:
        gathered = model.experts.active * x * model.mixed_share * model.experts.imbalance
        pointwise += cost.stream(3.0 * gathered + x * model.mixed_share)  # read, written, read again, summed
        pointwise_back += cost.stream(6.0 * gathered + 2.0 * x * model.mixed_share)  # gradients, and rows once more
    # read the gradient in 16 bits, read the sum, write the sum
    accumulate = cost.stream((BYTES + 2.0 * workload.reduction_bytes) * sum(held_weights(model, layout)))
    again, collectives = 0.0, 4.0
    if layout.recompute == "full":
        again, collectives = forward + core + pointwise + 2.0 * reduce, 6.0
    elif recomputes_ffn(model, layout):
        again, collectives = of_nets + cost.stream(2.0 * wide) + reduce, 5.0
    elif layout.recompute == "selective":
        again = core
    return LayerSeconds(
        forward=forward + core + pointwise + 2.0 * reduce,
        again=again,
        input_gradient=of_input + core_back + pointwise_back + 2.0 * reduce,
        weight_gradient=of_weight + accumulate,
        tensor=reduce * collectives,
    ).at_least(cost.calibration.layer_s)


def embedding_seconds(workload: Workload, layout: Layout, cost: CostModel, reduce: float) -> LayerSeconds:
    """Return the seconds of the input embedding for one microbatch on the first stage.

    The arguments ``workload``, ``layout``, ``cost`` and ``reduce`` are those of :func:`layer_seconds`.
    """
    x = BYTES * layout.microbatch * workload.sequence / layout.context * workload.model.hidden
    return LayerSeconds(forward=cost.stream(3.0 * x) + reduce, weight_gradient=cost.stream(3.0 * x), tensor=reduce)


def head_seconds(workload: Workload, layout: Layout, cost: CostModel, reduce: float) -> LayerSeconds:
    """Return the seconds of the output embedding and the loss for one microbatch on the last stage.

    The arguments ``workload``, ``layout``, ``cost`` and ``reduce`` are those of :func:`layer_seconds`.
    """
    rows, own = layout.microbatch * workload.sequence / layout.context, workload.model.vocabulary / layout.tensor
    forward, of_input, of_weight = cost.linear(rows, own, workload.model.hidden)
    loss = cost.stream(_LOGIT_TRAFFIC * rows * own)
    return LayerSeconds(forward + loss, 0.0, of_input + reduce, of_weight, reduce)
