"""The workload: a model's shapes, its batch, and how both are cut over devices.

All figures are counted, none is fitted: parameters, FLOPs, and the layers of every stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.errors import PlanError
from cordillera.partition import divisors
from cordillera.topology import Label, Numeric, Words

# Limits that keep the cost and the results of a prediction finite: layers and experts are visited in turn, and
# products of sizes are floats.
Layers = Annotated[int, Numeric, Field(ge=1, le=4096)]
WorkloadCount = Annotated[int, Numeric, Field(ge=1, le=1 << 32)]
Bytes = Annotated[float, Numeric, Field(ge=0, le=1e6, allow_inf_nan=False)]
Recompute = Literal["none", "selective", "full"]
Fp8 = Literal["none", "ffn", "linear"]

PRODUCTION_ORDER = ("tensor", "context", "pipeline", "data")
"""Order of the dimensions on a cluster, innermost first; the last crosses the outermost links."""

BYTES = 2  # bytes of a weight, an activation and its gradient in 16 bits


class Experts(BaseModel):
    """A mixture of experts in place of the feed-forward net.

    Attributes:
        count: Number of experts of a layer.
        active: Number of experts that a token is sent to.
        ffn: Width of an expert.
        shared_ffn: Width of the expert that all tokens are sent to; 0 for none.
        every: Period in layers: one of this many layers has experts, the others a plain feed-forward net.
        imbalance: Tokens that the busiest device's experts get, relative to the mean over devices; 1 for balanced
            routing. The others wait for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: WorkloadCount
    active: WorkloadCount
    ffn: WorkloadCount
    shared_ffn: Annotated[int, Numeric, Field(ge=0, le=1 << 32)] = 0
    every: WorkloadCount = 1
    imbalance: Annotated[float, Numeric, Field(ge=1, le=1e6, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _has_as_many(self) -> Experts:
        if self.active > self.count:
            raise ValueError(f"{self.active} active of {self.count} experts")
        if self.imbalance > self.count:
            raise ValueError(
                f"an imbalance of {self.imbalance:g} is more than all tokens on one of {self.count} experts"
            )
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
        fused_ffn: Whether the activation of a gated feed-forward net is one kernel that keeps its two inputs alone, and
            computes their product again in the backward (xformers' SwiGLU); otherwise each of its results is kept.
        dropout: Whether residuals pass a dropout, whose mask is kept.
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
    fused_ffn: bool = False
    dropout: bool = True
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

    def held_keys(self, ranks: int) -> float:
        """Return the width of the keys that one of ``ranks`` attends to: whole heads, shared if there are fewer."""
        return max(self.keys / ranks, self.head)

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
        """Return the FLOPs of a token's forward and backward in a sequence of ``sequence`` tokens.

        Recomputation and masked scores are not counted.
        """
        return 6.0 * self.active_parameters + 6.0 * self.layers * sequence * self.queries


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
        shard_weights: Whether weights are gathered layer by layer (FSDP); otherwise they stay whole, and only optimizer
            state is cut (ZeRO-1).
        shard_gradients: Whether gradients are cut as well while weights stay whole (ZeRO-2, or FSDP that does not
            reshard after the forward): they are scattered whenever a pipeline rank leaves a stage, so that only those
            of a stage are whole at a time, or with one stage per rank those of a layer.
        chunks: ``v``, number of stages of one pipeline rank.
        microbatch: Number of sequences of a microbatch on one copy.
        sequence_parallel: Whether norms and dropouts are also cut over the tensor-parallel devices.
        recompute: Parts of the forward that are computed again in the backward.
        overlap_gradients: Whether gradients are reduced during the backward of the last microbatch.
        fp8: Matrix products with factors in FP8: those of feed-forward nets and experts (``ffn``), or those of all
            ``linear`` layers but the router and the head. Weights, what is kept and what is sent stay in 16 bits.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1
    shards: int = 1
    shard_weights: bool = False
    shard_gradients: bool = False
    chunks: int = 1
    microbatch: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    overlap_gradients: bool = False
    fp8: Fp8 = "none"

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
        elif self.tensor > keys and model.head % (self.tensor // keys):
            sharers = self.tensor // keys
            found.append(
                f"tensor {self.tensor}: {sharers} ranks that share a head do not divide its width {model.head}"
            )
        if ffn % self.tensor:
            found.append(f"tensor {self.tensor} does not divide ffn {ffn}{_nearest(self.tensor, ffn)}")
        if self.context > 1 and workload.sequence % (2 * self.context):
            nearest = _nearest(self.context, workload.sequence // 2) if workload.sequence % 2 == 0 else ": 1 would"
            found.append(
                f"context {self.context} does not cut {workload.sequence} tokens into two equal parts each{nearest}"
            )
        if self.stages > model.layers + 2 or (self.stages > model.layers and self.pipeline == 1):
            found.append(
                f"{self.stages} stages are more than {model.layers} layers and a stage for each embedding: "
                f"{model.layers} would do"
            )
        if workload.batch % cuts:
            found.append(
                f"data {self.data} x microbatch {self.microbatch} does not divide batch {workload.batch}"
                f"{_nearest(cuts, workload.batch)}"
            )
        if self.data % self.shards:
            found.append(f"shards {self.shards} does not divide data {self.data}{_nearest(self.shards, self.data)}")
        if self.shard_weights and self.shard_gradients:
            found.append("shard_weights cuts gradients too: leave shard_gradients out")
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
        words += [f"ZeRO2-{self.shards}"] if self.shard_gradients else []
        words += [f"v{self.chunks}"] if self.chunks > 1 else []
        return " ".join([*words, f"mb{self.microbatch}", *([f"FP8-{self.fp8}"] if self.fp8 != "none" else [])])


def _nearest(value: int, of: int) -> str:
    return f": {min(divisors(of), key=lambda d: (abs(d - value), d))} would"


class PublishedLayout(BaseModel):
    """A layout with which others trained the model.

    Attributes:
        devices: Number of devices.
        layout: Degrees of parallelism.
        source: Where it is published.
        teraflops: Published FLOPs per second of the model's own arithmetic on one device, in units of 1e12; None if
            they are not published.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: WorkloadCount
    layout: Layout
    source: Words
    teraflops: Annotated[float, Numeric, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _takes_its_devices(self) -> PublishedLayout:
        if self.layout.devices != self.devices:
            raise ValueError(f"the layout takes {self.layout.devices:,} devices, not {self.devices:,}")
        return self


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
        reduction_bytes: Bytes of a parameter's gradient when it is added up over microbatches and reduced over copies.
        published: Layouts with which others trained the model, the best known ones.
        fp8: What a search computes in FP8; see :class:`Layout`.
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
    reduction_bytes: Annotated[Bytes, Field(ge=0.01)] = 2.0
    published: tuple[PublishedLayout, ...] = ()
    fp8: Fp8 = "none"

    @property
    def flops(self) -> float:
        """FLOPs of the model's own arithmetic in a step."""
        return self.batch * self.sequence * self.model.flops_per_token(self.sequence)


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """Return the number of ``layers`` of each of ``stages``, as equal as possible, with the fewest at both ends.

    Both ends also carry an embedding (Llama 3, section 3.3.2, takes a layer from each). With one or two stages more
    than layers, the ends hold an embedding alone, first the last one, whose head takes longer.
    """
    fewest, more = divmod(layers, stages)
    if not more:
        return [fewest] * stages
    inside_out = sorted(range(stages), key=lambda stage: (-min(stage, stages - 1 - stage), stage))
    counts = [fewest] * stages
    for stage in inside_out[:more]:
        counts[stage] += 1
    return counts
