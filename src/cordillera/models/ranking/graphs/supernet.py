"""A supernet: one set of weights for all graphs of a space of blocks, trained by architectures drawn at random.

Every drawn architecture is computed with the weights that it needs and no others, cut out of the shared ones, so a norm
sees the numbers that are there in the architecture and no masked ones, and an architecture that is cut out scores
exactly as it does in the supernet. Source: Zhang et al. 2023 (NASRec, arXiv 2207.07187), section 4; its supernet masks
after the norms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.counting import forward_flops
from cordillera.models.ranking.base import DeepConfig, DeepModel, check_finite
from cordillera.models.ranking.graphs.blocks import BlocksConfig, block_genes, graph_of
from cordillera.models.ranking.graphs.config import GraphConfig, digest
from cordillera.models.ranking.graphs.graph import GraphBody
from cordillera.models.ranking.graphs.nodes import AxisParts, GraphNode
from cordillera.models.ranking.heads import Heads

_FLOPS_SAMPLES = 256
_KEPT = 256  # architectures whose modules are kept


class SupernetConfig(DeepConfig):
    """Settings of a supernet, which is trained to compare architectures and not to be served.

    Attributes:
        blocks: Space of the architectures.
        paths: Number of architectures that a batch trains, each with an equal part of its samples.
        draw: ``uniform``: every value of a decision is as likely; ``learnt``: their probabilities are learnt along
            with the weights (Dong and Yang 2019, arXiv 1910.04465: one path, straight-through gradients).
        flops: Target of the expected FLOPs an example, with ``learnt``; None for none.
        flops_weight: Weight of the loss ``max(0, E[FLOPs] / flops - 1)``.
    """

    name: Literal["supernet"] = "supernet"
    blocks: BlocksConfig = BlocksConfig()
    paths: int = Field(4, ge=1, le=1024)
    draw: Literal["uniform", "learnt"] = "uniform"
    flops: int | None = Field(None, ge=1)
    flops_weight: float = Field(0.1, ge=0)

    _finite_weight = field_validator("flops_weight")(check_finite)

    @model_validator(mode="after")
    def _has_no_mods(self) -> SupernetConfig:
        if self.mods:
            raise ValueError("mods: a supernet has none; train the architecture that is found with them")
        if self.flops is not None and self.draw != "learnt":
            raise ValueError("flops: needs draw = 'learnt'")
        for rows in self.blocks.rows if "token_mixing" in self.blocks.embeddings else ():
            if self.embedding_dim % rows:
                raise ValueError(f"blocks.rows ({rows}) must divide embedding_dim ({self.embedding_dim}): token_mixing")
        return self

    def graph(self, values: Mapping[str, Any]) -> GraphConfig:
        """Return the architecture of one value for each decision."""
        nodes, output = graph_of(self.blocks, values)
        kept = {key: getattr(self, key) for key in ("embedding_dim", "embedding_init", "head_mlp", "dropout")}
        return GraphConfig(nodes=nodes, output=output, **kept)


class _Cut(nn.Module):
    """Body and heads of one architecture without weights of their own."""

    def __init__(self, config: GraphConfig, features: FeatureSpec) -> None:
        super().__init__()
        self.body = GraphBody(config, len(features.dense), len(features.sparse))
        inputs = sum(size for _, size in self.body.output_axis)
        self.heads = Heads(features.tasks, inputs, config.head_mlp, config.dropout)

    def forward(self, dense: Tensor, embeddings: Tensor, gates: Mapping[str, Tensor] | None = None) -> Tensor:
        return self.heads(self.body(dense, embeddings, gates))

    def axes(self) -> dict[str, tuple[AxisParts, ...]]:
        """Return the dimensions of all parameters, by name."""
        found = {}
        for name, parameter in self.named_parameters():
            known: tuple[AxisParts, ...] | None = None
            parts = name.split(".")
            if parts[0] == "body":
                node = self.body.nodes[parts[2]]
                assert isinstance(node, GraphNode)
                known = node.axes.get(".".join(parts[3:]))
            elif parts[3:] == ["0", "weight"] or parts[3:] == ["layers", "0", "weight"]:
                known = ((("", parameter.shape[0]),), self.body.output_axis)
            found[name] = known or tuple((("", size),) for size in parameter.shape)
        return found


class Supernet(DeepModel):
    """Weights that all architectures of a space share.

    In training, every batch is divided among a few architectures that are drawn at random, by the number of batches
    before and the seed of the weights' initialisation. In evaluation, the architecture of :meth:`choose` is computed,
    by default the largest of the most connected ones.
    """

    Config = SupernetConfig
    config: SupernetConfig
    steps: Tensor
    seed: Tensor
    flops_of_values: Tensor

    def __init__(self, config: SupernetConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        super().__init__(config, features, tables)
        self.genes = [gene for gene in block_genes(config.blocks) if len(gene.values) > 1]
        self.fixed = {gene.name: gene.values[0] for gene in block_genes(config.blocks) if len(gene.values) == 1}
        self.layout: dict[str, list[dict[str, int]]] = {}
        self.shared = nn.ParameterDict()
        self._make_shared()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seed", torch.randint(2**31, ()))
        self.chosen = config.graph(next(_widest(config.blocks)))
        self._cuts: dict[str, _Cut] = {}
        self.preferences: nn.ParameterList | None = None
        if config.draw == "learnt":
            self.preferences = nn.ParameterList(torch.zeros(len(gene.values)) for gene in self.genes)
        if config.flops is not None:
            self._fit_flops()
        self.heads = nn.Identity()  # an architecture's heads are among the shared weights

    def _make_shared(self) -> None:
        """Make the shared weights, large enough for every architecture, with first values as those usually have."""
        sizes: dict[str, list[dict[str, int]]] = {}
        first: dict[str, Tensor] = {}
        configs = {digest(one): one for one in map(self.config.graph, _widest(self.config.blocks))}
        for config in configs.values():
            cut = _Cut(config, self.features)
            for name, axes in cut.axes().items():
                known = sizes.setdefault(name, [{} for _ in axes])
                for dimension, axis in zip(known, axes, strict=True):
                    for part, size in axis:
                        dimension[part] = max(size, dimension.get(part, 0))
            first |= {name: value for name, value in cut.named_parameters() if name not in first}
        for name, dimensions in sizes.items():
            starts = [[0, *itertools.accumulate(one.values())] for one in dimensions]
            self.layout[name] = [dict(zip(one, of, strict=False)) for one, of in zip(dimensions, starts, strict=True)]
            values = first[name].detach().flatten()
            shape = [of[-1] for of in starts]
            self.shared[_key(name)] = nn.Parameter(values[torch.randint(len(values), shape)])

    def weights_of(self, cut: _Cut) -> dict[str, Tensor]:
        """Cut the weights of an architecture out of the shared ones; gradients go back into these.

        Raises:
            KeyError: If there are none of a node's.
        """
        found = {}
        for name, axes in cut.axes().items():
            if _key(name) not in self.shared:
                raise KeyError(name)
            weight = self.shared[_key(name)]
            for place, (axis, starts) in enumerate(zip(axes, self.layout[name], strict=True)):
                parts = [weight.narrow(place, starts[part], size) for part, size in axis]
                weight = parts[0] if len(parts) == 1 else torch.cat(parts, place)
            found[name] = weight.contiguous()
        return found

    # FLOPs

    def _fit_flops(self) -> None:
        """Fit FLOPs as a sum over decisions, by least squares over random architectures."""
        random, rows, counts = np.random.default_rng(0), [], []
        widths = (len(self.features.dense), len(self.features.sparse))
        inputs = (torch.zeros(1, widths[0]), torch.zeros(1, widths[1], self.config.embedding_dim))
        with torch.random.fork_rng(devices=[]):
            for _ in range(_FLOPS_SAMPLES):
                chosen = [int(random.integers(len(gene.values))) for gene in self.genes]
                picked = {gene.name: gene.values[index] for gene, index in zip(self.genes, chosen, strict=True)}
                cut = _Cut(self.config.graph({**self.fixed, **picked}), self.features)
                rows.append(self._one_hot(chosen))
                counts.append(forward_flops(cut.eval(), *inputs))
        fitted = np.linalg.lstsq(np.stack(rows), np.array(counts, dtype=np.float64), rcond=None)[0]
        self.register_buffer("flops_of_values", torch.from_numpy(fitted).float())

    def _one_hot(self, chosen: Sequence[int]) -> np.ndarray:
        parts = [np.eye(len(gene.values))[index] for gene, index in zip(self.genes, chosen, strict=True)]
        return np.concatenate([*parts, np.ones(1)])

    def expected_flops(self) -> Tensor:
        """Return the expected forward FLOPs an example of an architecture drawn by the learnt preferences.

        FLOPs are taken to be a sum over decisions, which they are not exactly.
        """
        assert self.preferences is not None
        chances = [functional.softmax(one, 0) for one in self.preferences]
        return torch.cat([*chances, self.flops_of_values.new_ones(1)]) @ self.flops_of_values

    # Architectures

    def _cut(self, config: GraphConfig) -> _Cut:
        """Return the modules of an architecture; their parameters hold no numbers."""
        name = digest(config)
        if name not in self._cuts:
            if len(self._cuts) >= _KEPT:
                del self._cuts[next(iter(self._cuts))]
            with torch.random.fork_rng(devices=[]):
                cut = _Cut(config, self.features).to(self.steps.device)
            for module in cut.modules():
                for key, parameter in module.named_parameters(recurse=False):
                    setattr(module, key, nn.Parameter(torch.empty_like(parameter, device="meta")))
            self._cuts[name] = cut
        return self._cuts[name]

    def choose(self, config: GraphConfig) -> None:
        """Compute an architecture of the space in evaluation."""
        self.chosen = config

    def stand_alone(self, config: GraphConfig) -> dict[str, Tensor]:
        """Return the weights, without tables, of the model ``graph`` of an architecture: its ``state_dict``.

        The model scores exactly as the supernet does with this architecture.
        """
        return {name: value.detach().clone() for name, value in self.weights_of(self._cut(config)).items()}

    def draw(self, random: np.random.Generator) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Draw a value for each decision; return them with a factor of 1 for each, through which preferences learn."""
        values, factors = dict(self.fixed), {}
        for place, gene in enumerate(self.genes):
            if self.preferences is None:
                index = int(random.integers(len(gene.values)))
            else:
                chances = functional.softmax(self.preferences[place], 0)
                noise = torch.from_numpy(random.gumbel(size=len(gene.values)))
                index = int((chances.detach().double().log() + noise).argmax())
                factors[gene.name] = 1 + (chances[index] - chances[index].detach())
            values[gene.name] = gene.values[index]
        return values, factors

    def score(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if not self.training:
            return self._score(self.chosen, dense, embeddings, None)
        random = np.random.default_rng([int(self.seed), int(self.steps)])
        self.steps += 1
        parts = min(self.config.paths, max(1, len(dense)))
        scores = []
        for part, rows in zip(dense.tensor_split(parts), embeddings.tensor_split(parts), strict=True):
            values, factors = self.draw(random)
            config = self.config.graph(values)
            scores.append(self._score(config, part, rows, _gates(config, factors) if factors else None))
        found = torch.cat(scores)
        if self.config.flops is None:
            return found
        excess = functional.relu(self.expected_flops() / self.config.flops - 1)
        joined: Tensor = _WithLoss.apply(found, self.config.flops_weight * excess)
        return joined

    def chances(self) -> dict[str, list[float]]:
        """Return the learnt probabilities of the values of each decision, by its name; empty with uniform draws."""
        if self.preferences is None:
            return {}
        pairs = zip(self.genes, self.preferences, strict=True)
        return {gene.name: functional.softmax(one.detach().double(), 0).tolist() for gene, one in pairs}

    def _score(
        self, config: GraphConfig, dense: Tensor, embeddings: Tensor, gates: Mapping[str, Tensor] | None
    ) -> Tensor:
        cut = self._cut(config).train(self.training)
        found: Tensor = functional_call(cut, self.weights_of(cut), (dense, embeddings, gates))
        return found


class _WithLoss(torch.autograd.Function):
    """Returns scores as they are; in the backward pass, a loss is differentiated with them, with weight 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


def _key(name: str) -> str:
    return name.replace(".", "/")


def _gates(config: GraphConfig, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the product of the factors of the decisions about each node, by its name; ``""`` for the heads."""
    gates = {"": factors["heads"]} if "heads" in factors else {}
    for node in config.nodes:
        block = node.name[1:].partition("_")[0]
        kinds: tuple[str, ...] = ("embeddings", "rows", "embeddings_read")
        if node.gives_vector:
            kinds = ("vector", "width", "vector_reads")
        if node.name.endswith(("_added_fm", "_embed")):
            kinds = (node.name.rpartition("_")[2],)
        keys = ["dense_rows"] if node.name == "dense_rows" else [f"{block}.{kind}" for kind in kinds]
        found = [factors[key] for key in [*keys, "norm"] if key in factors]
        if found and not node.name.endswith(("_left", "_right", "_sum")):
            gates[node.name] = torch.stack(found).prod()
    return gates


def _widest(blocks: BlocksConfig) -> Iterator[dict[str, Any]]:
    """Yield choices of the widest sizes in which every node occurs with every input that it can have.

    For each block, every kind of it is combined with every kind of those before; blocks after it give nothing if they
    may.
    """
    widest: dict[str, Any] = {gene.name: gene.values[-1] for gene in block_genes(blocks)}
    widest |= {"norm": max(blocks.norms), "dense_rows": max(blocks.dense_rows)}
    widest["heads"] = next(one for one in ("inputs", "all", "last") if one in blocks.heads)
    for number in range(1, blocks.count + 1):
        widest |= {f"{number}.width": max(blocks.widths), f"{number}.rows": max(blocks.rows)}
    kinds = _kinds(blocks)
    nothing = tuple("none" if "none" in ops else ops[0] for ops in (blocks.vector, blocks.embeddings))
    for number in range(1, blocks.count + 1):
        for before, own in itertools.product(kinds if number > 1 else kinds[:1], kinds):
            values = dict(widest)
            for place in range(1, blocks.count + 1):
                kind = before if place < number else own if place == number else (*nothing, False, False)
                keys = ("vector", "embeddings", "embed", "fm")
                values |= {f"{place}.{key}": one for key, one in zip(keys, kind, strict=True)}
            yield values


def _kinds(blocks: BlocksConfig) -> list[tuple[str, str, bool, bool]]:
    """Return operations of a block, with ``embed`` and ``fm``, that have every node and everything that blocks give."""
    count = max(len(blocks.vector), len(blocks.embeddings))
    vectors: list[str] = list(blocks.vector)
    rows: list[str] = list(blocks.embeddings)
    pairs = [(vectors[place % len(vectors)], rows[place % len(rows)]) for place in range(count)]
    of_each = [[op for op in ops if is_none == (op == "none")] for ops in (vectors, rows) for is_none in (True, False)]
    no_vector, vector, no_rows, some_rows = (next(iter(found), None) for found in of_each)
    for of_vector, of_rows in itertools.product((no_vector, vector), (no_rows, some_rows)):
        if of_vector is not None and of_rows is not None:
            pairs.append((of_vector, of_rows))
    fms = (False, True) if blocks.fm else (False,)
    return [(*pair, blocks.embed, fm) for pair, fm in itertools.product(dict.fromkeys(pairs), fms)]
