"""The workload: a model's shapes, its batch, and how both are cut over devices.

All figures are counted, none is fitted: parameters, FLOPs, bytes of activations and of state, and the seconds that
:class:`cordillera.cost.CostModel` gives for the shapes on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.cost import CostModel
from cordillera.errors import PlanError
from cordillera.partition import divisors
from cordillera.topology import Label, Numeric, Words

# Limits that keep the cost and the results of a prediction finite: layers and experts are visited in turn, and
# products of sizes are floats.
Layers = Annotated[int, Numeric, Field(ge=1, le=4096)]
WorkloadCount = Annotated[int, Numeric, Field(ge=1, le=1 << 32)]
Bytes = Annotated[float, Numeric, Field(ge=0, le=1e6, allow_inf_nan=False)]
Recompute = Literal["none", "selective", "full"]

BYTES = 2  # bytes of a weight, an activation and its gradient in 16 bits
_GRADIENT_TRAFFIC = 6  # bytes per weight and microbatch: read gradient, read sum, write sum, in 16 bits each
_FUSED_SOFTMAX = 4  # Megatron-LM's masked softmax kernel takes a multiple of this number of score matrices
_UNFUSED_SOFTMAX = 104  # bytes per score, over all passes, if that kernel cannot be used
_CHOICE = 8  # bytes of the choice of an expert that are kept: its weight and its place
_LOGIT_TRAFFIC = 52  # bytes per logit: cross entropy in 32 bits, forwards and backwards


class Experts(BaseModel):
    """A mixture of experts in place of the feed-forward net.

    Attributes:
        count: Number of experts of a layer.
        active: Number of experts that a token is sent to.
        ffn: Width of an expert.
        shared_ffn: Width of the expert that all tokens are sent to; 0 for none.
        every: Period in layers: one of this many layers has experts, the others a plain feed-forward net.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: WorkloadCount
    active: WorkloadCount
    ffn: WorkloadCount
    shared_ffn: Annotated[int, Numeric, Field(ge=0, le=1 << 32)] = 0
    every: WorkloadCount = 1

    @model_validator(mode="after")
    def _has_as_many(self) -> Experts:
        if self.active > self.count:
            raise ValueError(f"{self.active} active of {self.count} experts")
        return self


class Transformer(BaseModel):
    """Shapes of a decoder.

    Attributes:
        layers: ``L``, number of layers.
        hidden: ``h``, width of the model.
        heads: Number of query heads.
        kv_heads: Number of key and value heads; None for as many as ``heads``.
        head_dim: Width of a head; None for ``h / heads``.
        ffn: Width of the feed-forward net; None for ``4 h``.
        gated: Whether the feed-forward net has a gate (SwiGLU), a third matrix.
        vocabulary: ``V``, number of tokens.
        tied: Whether output and input embeddings are one matrix.
        fused_attention: Whether attention is one kernel that keeps no scores and skips masked ones; otherwise it is
            matrix products with a masked softmax in between, as in Megatron-LM in 2021.
        experts: Mixture of experts; None for a dense model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: Layers
    hidden: WorkloadCount
    heads: WorkloadCount
    kv_heads: WorkloadCount | None = None
    head_dim: WorkloadCount | None = None
    ffn: WorkloadCount | None = None
    gated: bool = False
    vocabulary: WorkloadCount = 51_200
    tied: bool = True
    fused_attention: bool = False
    experts: Experts | None = None

    @model_validator(mode="after")
    def _divides(self) -> Transformer:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads ({self.heads}) do not divide hidden ({self.hidden}); give head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads ({self.kv_heads}) do not divide heads ({self.heads})")
        return self

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return (self.kv_heads or self.heads) * self.head

    @property
    def matrices(self) -> int:
        """Number of matrices of a feed-forward net."""
        return 3 if self.gated else 2

    @property
    def mixed_share(self) -> float:
        """Share of the layers that have experts."""
        return self.layers // self.experts.every / self.layers if self.experts is not None else 0.0

    @property
    def attention_weights(self) -> int:
        """Number of parameters of a layer's attention."""
        return self.hidden * (2 * self.queries + 2 * self.keys)

    def feed_forward_weights(self, layer: int) -> int:
        """Return the number of parameters of a layer's feed-forward net, with all experts and the router."""
        e = self.experts
        if e is None or (layer + 1) % e.every:
            return self.matrices * self.hidden * (self.ffn or 4 * self.hidden)
        return self.hidden * (self.matrices * (e.count * e.ffn + e.shared_ffn) + e.count)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, without norms and biases."""
        layers = sum(self.attention_weights + self.feed_forward_weights(layer) for layer in range(self.layers))
        return layers + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses, without the lookup of the input embedding."""
        e, total = self.experts, self.vocabulary * self.hidden
        for layer in range(self.layers):
            total += self.attention_weights + self.feed_forward_weights(layer)
            if e is not None and not (layer + 1) % e.every:
                total -= self.hidden * self.matrices * e.ffn * (e.count - e.active)
        return total

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs of a token's forward and backward in a ``sequence`` of so many tokens.

        Recomputation and masked scores are not counted.
        """
        return 6.0 * self.active_parameters + 6.0 * self.layers * sequence * self.queries


class Workload(BaseModel):
    """A training job.

    Attributes:
        name: Display name.
        description: Description in one sentence.
        source: Origin of the figures.
        model: Model to train.
        sequence: Number of tokens of a sequence.
        batch: Sequences per step, over all devices.
        weight_bytes: Bytes of a parameter in computation.
        gradient_bytes: Bytes of a parameter's gradient.
        optimizer_bytes: Bytes of the optimizer state of a parameter, including a master copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Label = "workload"
    description: Words = ""
    source: Words = ""
    model: Transformer
    sequence: WorkloadCount
    batch: WorkloadCount
    weight_bytes: Annotated[Bytes, Field(ge=0.01)] = 2.0
    gradient_bytes: Annotated[Bytes, Field(ge=0.01)] = 4.0
    optimizer_bytes: Bytes = 12.0

    @property
    def flops(self) -> float:
        """FLOPs of the model's own arithmetic in a step."""
        return self.batch * self.sequence * self.model.flops_per_token(self.sequence)


@dataclass(frozen=True)
class Layout:
    """How a job is cut over devices.

    Attributes:
        tensor: Devices over which every layer's matrices are cut (TP).
        context: Devices over which every sequence is cut (CP).
        expert: Devices over which the experts of a layer are spread (EP), which are part of the data-parallel ones.
        pipeline: Devices over which layers are spread (PP).
        data: Number of copies of the model, sharded or not (DP).
        shards: Number of consecutive copies over which weights, gradients and optimizer state are cut.
        shard_weights: Whether weights are gathered layer by layer (FSDP); otherwise only optimizer state is cut
            (ZeRO-1).
        chunks: ``v``, number of stages of one pipeline rank.
        microbatch: Number of sequences of a microbatch on one copy.
        sequence_parallel: Whether norms and dropouts are also cut over the tensor-parallel devices.
        recompute: Parts of the forward that are computed again in the backward.
        overlap_gradients: Whether gradients are reduced during the backward of the last microbatch.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1
    shards: int = 1
    shard_weights: bool = False
    chunks: int = 1
    microbatch: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    overlap_gradients: bool = False

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.pipeline * self.chunks

    def microbatches(self, workload: Workload) -> int:
        """Return the number of microbatches of a step on one copy."""
        return workload.batch // (self.data * self.microbatch)

    def problems(self, workload: Workload) -> list[str]:
        """Return the reasons why the layout is impossible, each with a possible number; empty if it is possible."""
        model, found = workload.model, []
        for name in ("tensor", "context", "expert", "pipeline", "data", "shards", "chunks", "microbatch"):
            if getattr(self, name) < 1:
                found.append(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if found:
            return found
        keys, ffn, cuts = model.kv_heads or model.heads, model.ffn or 4 * model.hidden, self.data * self.microbatch
        if model.heads % self.tensor:
            found.append(
                f"tensor {self.tensor} does not divide heads {model.heads}{_nearest(self.tensor, model.heads)}"
            )
        elif keys % self.tensor and self.tensor % keys:
            found.append(
                f"tensor {self.tensor} and kv_heads {keys}: neither divides the other{_nearest(self.tensor, keys)}"
            )
        if ffn % self.tensor:
            found.append(f"tensor {self.tensor} does not divide ffn {ffn}{_nearest(self.tensor, ffn)}")
        if self.context > 1 and workload.sequence % (2 * self.context):
            nearest = _nearest(self.context, workload.sequence // 2) if workload.sequence % 2 == 0 else ": 1 would"
            found.append(
                f"context {self.context} does not cut {workload.sequence} tokens into two equal parts each{nearest}"
            )
        if self.stages > model.layers:
            found.append(f"{self.stages} stages are more than {model.layers} layers: {model.layers} would do")
        if workload.batch % cuts:
            found.append(
                f"data {self.data} x microbatch {self.microbatch} does not divide batch {workload.batch}"
                f"{_nearest(cuts, workload.batch)}"
            )
        if self.data % self.shards:
            found.append(f"shards {self.shards} does not divide data {self.data}{_nearest(self.shards, self.data)}")
        if self.sequence_parallel and self.tensor == 1:
            found.append("sequence_parallel needs tensor above 1")
        if self.expert > 1 and model.experts is None:
            found.append("expert above 1 needs a model with experts")
        elif self.expert > 1 and model.experts is not None:
            count = model.experts.count
            if count % self.expert:
                found.append(f"expert {self.expert} does not divide {count} experts{_nearest(self.expert, count)}")
            if self.data % self.expert:
                found.append(f"expert {self.expert} does not divide data {self.data}{_nearest(self.expert, self.data)}")
        return found

    def check(self, workload: Workload) -> None:
        """Check that the layout is possible.

        Raises:
            PlanError: If it is not; the message lists every reason.
        """
        problems = self.problems(workload)
        if problems:
            raise PlanError("; ".join(problems), where=str(self))

    def __str__(self) -> str:
        words = [f"TP{self.tensor}", f"PP{self.pipeline}", f"DP{self.data}"]
        words[1:1] = [f"CP{self.context}"] if self.context > 1 else []
        words += [f"EP{self.expert}"] if self.expert > 1 else []
        words += [f"FSDP{self.shards}"] if self.shard_weights else []
        words += [f"v{self.chunks}"] if self.chunks > 1 else []
        return " ".join([*words, f"mb{self.microbatch}"])


def _nearest(value: int, of: int) -> str:
    return f": {min(divisors(of), key=lambda d: (abs(d - value), d))} would"


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return the number of ``layers`` of each of ``stages``, as equal as possible, with the fewest at both ends.

    Both ends also carry an embedding (Llama 3, section 3.3.2, takes a layer from each).
    """
    fewest, more = divmod(layers, stages)
    if not more:
        return [fewest] * stages
    inside_out = sorted(range(stages), key=lambda stage: (-min(stage, stages - 1 - stage), stage))
    counts = [fewest] * stages
    for stage in inside_out[:more]:
        counts[stage] += 1
    return counts


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer, or a part of the model, for one microbatch on one device.

    Attributes:
        forward: Seconds of the forward.
        again: Seconds of recomputing the forward.
        input_gradient: Seconds of the gradient of the input.
        weight_gradient: Seconds of the gradient of the weights and its accumulation.
        tensor: Part of these seconds spent in collectives over the tensor-parallel devices.
        gather: Part of these seconds spent waiting for weights and gradients that are cut over copies.
    """

    forward: float = 0.0
    again: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    tensor: float = 0.0
    gather: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.again + self.input_gradient + self.weight_gradient

    def times(self, count: float) -> LayerSeconds:
        """Return the seconds of ``count`` executions one after the other."""
        return LayerSeconds(
            self.forward * count,
            self.again * count,
            self.input_gradient * count,
            self.weight_gradient * count,
            self.tensor * count,
            self.gather * count,
        )

    def plus(self, other: LayerSeconds) -> LayerSeconds:
        """Return the seconds of both, one after the other."""
        return LayerSeconds(
            self.forward + other.forward,
            self.again + other.again,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.tensor + other.tensor,
            self.gather + other.gather,
        )

    def at_least(self, floor: float) -> LayerSeconds:
        """Scale all seconds up to a total of ``floor``, the time that the host needs, if they are shorter."""
        if self.total >= floor or self.total == 0:
            return self
        by = floor / self.total
        return LayerSeconds(
            self.forward * by, self.again * by, self.input_gradient * by, self.weight_gradient * by, self.tensor
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

    Source: Korthikanti et al. 2022, table 2; with fused attention no scores are kept, and a gated feed-forward net
    keeps two more tensors of its width. Experts keep what :func:`cordillera.kernels.moe.expert_mlp` keeps with the
    policy ``AB``.
    """
    model, t = workload.model, layout.tensor
    tokens = workload.sequence / layout.context * layout.microbatch
    full = tokens * model.hidden
    if layout.recompute == "full":
        return 2.0 * full / (t if layout.sequence_parallel else 1)
    dense, routed = _tokens_widths(model)
    own = 10.0 * full / (t if layout.sequence_parallel else 1)  # norms' inputs, dropouts' masks, block inputs
    ffn = (8.0 if model.gated else 4.0) * dense + (4.0 if model.gated else 2.0) * routed
    cut = tokens * (4.0 * model.queries + 4.0 * model.keys + ffn) / t
    if model.experts is not None:
        own += _CHOICE * tokens * model.mixed_share * model.experts.active
    scores = 0.0
    if layout.recompute == "none" and not model.fused_attention:
        scores = 5.0 * model.heads * tokens * workload.sequence / t
    return own + cut + scores


def _tokens_widths(model: Transformer) -> tuple[float, float]:
    """Return the widths of the dense nets and of the experts that a token passes, as means over layers."""
    plain, share, e = float(model.ffn or 4 * model.hidden), model.mixed_share, model.experts
    if e is None:
        return plain, 0.0
    return plain * (1 - share) + e.shared_ffn * share, e.active * e.ffn * share


def _linear_seconds(model: Transformer, layout: Layout, cost: CostModel, rows: float) -> tuple[float, float, float]:
    """Return the seconds of a layer's matrix products with weights: forward, input gradient and weight gradient.

    They are means over layers. Routing is balanced, so that the experts of a device get as many tokens as if each of
    its own tokens stayed, and each expert gets as many as the others; they are computed in one kernel.
    """
    t, up, e, share = layout.tensor, 2 if model.gated else 1, model.experts, model.mixed_share
    nets = [(1.0 - share, rows, float(model.ffn or 4 * model.hidden), 1.0)]  # how often, rows, width, count
    if e is not None:
        held = e.count / layout.expert
        nets += [(share, rows, float(e.shared_ffn), 1.0), (share, rows * e.active / held, float(e.ffn), held)]
    layers = [
        (1.0, (rows, (model.queries + 2 * model.keys) / t, model.hidden, 1.0)),
        (1.0, (rows, model.hidden, model.queries / t, 1.0)),
    ]
    for often, each, width, count in nets:
        if often and width:
            layers.append((often, (each, up * width / t, model.hidden, count)))
            layers.append((often, (each, model.hidden, width / t, count)))
    if e is not None:
        layers.append((share, (rows, e.count, model.hidden, 1.0)))  # the router, which all devices have whole
    forward, of_input, of_weight = (
        sum(often * seconds for (often, _), seconds in zip(layers, part, strict=True))
        for part in zip(*(cost.linear(*shape) for _, shape in layers), strict=True)
    )
    return forward, of_input, of_weight


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
    forward, of_input, of_weight = _linear_seconds(model, layout, cost, rows)
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
        gathered = model.experts.active * x * model.mixed_share
        pointwise += cost.stream(3.0 * gathered + x * model.mixed_share)  # read, written, read again, summed
        pointwise_back += cost.stream(6.0 * gathered + 2.0 * x * model.mixed_share)  # so are gradients, and rows again
    accumulate = cost.stream(_GRADIENT_TRAFFIC * sum(held_weights(model, layout)))
    again = 0.0
    if layout.recompute == "full":
        again = forward + core + pointwise + 2.0 * reduce
    elif layout.recompute == "selective" and not model.fused_attention:
        again = core
    return LayerSeconds(
        forward=forward + core + pointwise + 2.0 * reduce,
        again=again,
        input_gradient=of_input + core_back + pointwise_back + 2.0 * reduce,
        weight_gradient=of_weight + accumulate,
        tensor=reduce * (6.0 if layout.recompute == "full" else 4.0),
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
