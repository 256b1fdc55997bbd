"""Spaces of architectures: genes with values, and the recipe keys that they stand for."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cordillera.errors import DataError, RecipeError
from cordillera.files import TOML_BYTES, parse_toml, read_text
from cordillera.models.ranking.base import Size
from cordillera.models.ranking.graphs.config import DENSE, EMBEDDINGS, NodeConfig, without_unread
from cordillera.toml_files import explain, known_keys

Genome = tuple[int, ...]
"""Index of the chosen value of every gene."""

Scalar = bool | int | float | str | tuple[int, ...]

_ENUMERATED = 200_000  # genomes that are gone through one by one to find what is left of a space


class BlocksConfig(BaseModel):
    """Settings of a space of graphs: a sequence of blocks, each of one operation of vectors and one of embeddings.

    Both operations of a block read earlier blocks, or the inputs. The heads read the last block that gives anything.

    Attributes:
        count: Number of blocks.
        vector: Operations that a block's vector may come from; ``gate`` is of two linear layers; ``none`` gives none.
        widths: Lengths of vectors.
        embeddings: Operations that a block's embeddings may come from; ``none`` gives none.
        rows: Numbers of embeddings.
        connections: ``any``: a block reads any of the earlier blocks and of the inputs; ``chain``: it reads the block
            before, alone or with the inputs.
        embed: Whether a block's vector may be added to its embeddings, as two more embeddings.
        fm: Whether a factorisation machine over a block's embeddings may be added to its vector.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(3, ge=1, le=16)
    vector: tuple[Literal["linear", "gate", "cross", "dot", "fm", "none"], ...] = ("linear", "gate", "cross", "dot")
    widths: tuple[Size, ...] = (32, 64, 128)
    embeddings: tuple[
        Literal["mix", "fmb", "attention", "embedding_cross", "token_mixing", "none"], ...
    ] = ("mix", "fmb", "attention", "token_mixing", "none")  # fmt: skip
    rows: tuple[Size, ...] = (4, 8, 16)
    connections: Literal["any", "chain"] = "any"
    embed: bool = False
    fm: bool = False

    @model_validator(mode="after")
    def _is_not_empty(self) -> BlocksConfig:
        for key in ("vector", "widths", "embeddings", "rows"):
            values = getattr(self, key)
            if not values:
                raise ValueError(f"{key}: name at least one")
            if len(set(values)) < len(values):
                raise ValueError(f"{key}: names a value twice")
        if self.vector == ("none",) and self.embeddings == ("none",):
            raise ValueError("vector and embeddings: both are none")
        return self


class SpaceConfig(BaseModel):
    """Settings of a search space, the content of the file of ``--space``.

    Attributes:
        blocks: Graphs that blocks make; without it, the recipe's model is searched.
        choices: Values to choose from, by the key of a recipe: ``"model.layers" = [1, 2, 3]``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks: BlocksConfig | None = None
    choices: dict[str, Annotated[tuple[Scalar, ...], Field(min_length=1)]] = {}

    @model_validator(mode="after")
    def _offers_something(self) -> SpaceConfig:
        if self.blocks is None and not self.choices:
            raise ValueError("is empty: give [blocks], [choices] or both")
        for key, values in self.choices.items():
            if key.partition(".")[0] not in ("model", "training", "tables"):
                raise ValueError(f"choices: {key!r} is no key of model, training or tables")
            if len({json.dumps(value) for value in values}) < len(values):
                raise ValueError(f"choices: {key!r} names a value twice")
        return self


@dataclass(frozen=True)
class Gene:
    """One decision: its name and the values to choose from, and whether these are ordered numbers."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the values are numbers, of which near ones are alike."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


class SearchSpace:
    """A search space: genomes, and the architectures that they stand for.

    Args:
        config: Settings of the space.
        model: The recipe's ``[model]`` section, whose ``embedding_dim``, ``embedding_init``, ``head_mlp``, ``dropout``
            and mods graphs take over.

    Attributes:
        genes: Decisions with at least two values.
    """

    def __init__(self, config: SpaceConfig, model: Mapping[str, Any]) -> None:
        self.config = config
        kept = ("embedding_dim", "embedding_init", "head_mlp", "dropout", "mods", "norm_block")
        self.base = {key: model[key] for key in kept if key in model}
        genes = [Gene(key, values) for key, values in config.choices.items()]
        if config.blocks is not None:
            genes += _block_genes(config.blocks)
        self.fixed = {gene.name: gene.values[0] for gene in genes if len(gene.values) == 1}
        self.genes = tuple(gene for gene in genes if len(gene.values) > 1)
        self._ids: dict[Genome, str] = {}

    @property
    def size(self) -> int:
        """Number of genomes, several of which may stand for one architecture."""
        return math.prod(len(gene.values) for gene in self.genes)

    def decode(self, genome: Genome) -> dict[str, Any]:
        """Return the chosen values by the name of the gene.

        Raises:
            ValueError: If the genome is not of this space.
        """
        if len(genome) != len(self.genes):
            raise ValueError(f"a genome of this space has {len(self.genes)} genes, got {len(genome)}")
        chosen = {gene.name: gene.values[index] for gene, index in zip(self.genes, genome, strict=True)}
        return {**self.fixed, **chosen}

    def overrides(self, genome: Genome) -> dict[str, Any]:
        """Return the recipe's keys, with their values, that a genome stands for."""
        values = self.decode(genome)
        found: dict[str, Any] = {}
        if self.config.blocks is not None:
            nodes, output = _graph(self.config.blocks, values)
            plain = [node.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for node in nodes]
            found["model"] = {**self.base, "name": "graph", "nodes": plain, "output": list(output)}
        for key in self.config.choices:
            value = values[key]
            found[key] = list(value) if isinstance(value, tuple) else value
        return found

    def identify(self, genome: Genome) -> str:
        """Return the name of an architecture, 16 hexadecimal digits; genomes of equal architectures have equal ones."""
        if genome not in self._ids:
            text = json.dumps(self.overrides(genome), sort_keys=True, separators=(",", ":"))
            self._ids[genome] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._ids[genome]

    def sample(self, random: np.random.Generator) -> Genome:
        """Draw a genome uniformly."""
        return tuple(int(random.integers(len(gene.values))) for gene in self.genes)

    def mutate(self, genome: Genome, random: np.random.Generator, changes: int = 1) -> Genome:
        """Return a genome of which exactly ``changes`` genes, or all if there are fewer, have another value."""
        mutated = list(genome)
        for place in random.choice(len(self.genes), min(changes, len(self.genes)), replace=False):
            mutated[place] = (mutated[place] + 1 + int(random.integers(len(self.genes[place].values) - 1))) % len(
                self.genes[place].values
            )
        return tuple(mutated)

    def enumerate(self) -> Iterator[Genome]:
        """Go through all genomes, the last gene fastest."""
        return itertools.product(*(range(len(gene.values)) for gene in self.genes))

    def unseen(self, seen: set[str], random: np.random.Generator, tries: int = 200) -> Genome | None:
        """Draw a genome of an architecture that is not ``seen``; None if there is none left.

        In spaces of more than 200,000 genomes, None may also mean that few are left.
        """
        for _ in range(tries):
            genome = self.sample(random)
            if self.identify(genome) not in seen:
                return genome
        if self.size > _ENUMERATED:
            return None
        left = [genome for genome in self.enumerate() if self.identify(genome) not in seen]
        return left[int(random.integers(len(left)))] if left else None

    def features(self, genome: Genome) -> np.ndarray:
        """Return a genome as numbers ``[n]`` in 0 to 1, for regressions: ranks of ordered values, others one-hot."""
        parts: list[float] = []
        for gene, index in zip(self.genes, genome, strict=True):
            if gene.is_ordered:
                parts.append(index / (len(gene.values) - 1))
            else:
                parts += [float(index == one) for one in range(len(gene.values))]
        return np.array(parts)


def _block_genes(config: BlocksConfig) -> list[Gene]:
    genes = []
    for block in range(1, config.count + 1):
        earlier = range(block)
        if config.connections == "chain":
            sources: list[tuple[int, ...]] = [(block - 1,)] if block == 1 else [(block - 1,), (0, block - 1)]
        else:
            sources = [one for size in range(1, block + 1) for one in itertools.combinations(earlier, size)]
        genes += [
            Gene(f"{block}.vector", config.vector),
            Gene(f"{block}.width", config.widths),
            Gene(f"{block}.vector_reads", tuple(sources)),
            Gene(f"{block}.embeddings", config.embeddings),
            Gene(f"{block}.rows", config.rows),
            Gene(f"{block}.embeddings_read", tuple(sources)),
        ]
        genes += [Gene(f"{block}.embed", (False, True))] if config.embed else []
        genes += [Gene(f"{block}.fm", (False, True))] if config.fm else []
    return genes


class _GraphBuilder:
    """Nodes of blocks, and what each block gives."""

    def __init__(self) -> None:
        self.nodes: list[NodeConfig] = []
        self.vectors: list[list[str]] = [[DENSE]]
        self.embeddings: list[list[str]] = [[EMBEDDINGS]]

    def add(self, name: str, op: str, inputs: list[str], **settings: Any) -> str:
        self.nodes.append(NodeConfig.model_validate({"name": name, "op": op, "inputs": inputs, **settings}))
        return name

    def gathered(self, given: list[list[str]], blocks: tuple[int, ...]) -> list[str]:
        """Return what the blocks give, or the inputs if they give nothing."""
        return [name for block in blocks for name in given[block]] or list(given[0])

    def add_vector(self, block: int, op: str, width: int, reads: tuple[int, ...]) -> None:
        vectors, rows = self.gathered(self.vectors, reads), self.gathered(self.embeddings, reads)
        name, both = f"b{block}_{op}", vectors + rows
        if op == "none":
            self.vectors.append([])
            return
        if op == "gate":
            sides = [
                self.add(f"b{block}_{side}", "linear", both, width=width, norm=False) for side in ("left", "right")
            ]
            self.add(name, "gate", sides, width=width)
        elif op == "linear":
            self.add(name, "linear", both, width=width, activation="relu")
        else:
            self.add(name, op, rows if op == "fm" else both, width=width)
        self.vectors.append([name])

    def add_embeddings(self, block: int, op: str, rows: int, reads: tuple[int, ...]) -> None:
        if op == "none":
            self.embeddings.append([])
            return
        inputs = self.gathered(self.embeddings, reads)
        self.embeddings.append([self.add(f"b{block}_{op}", op, inputs, rows=rows)])


def _graph(config: BlocksConfig, values: Mapping[str, Any]) -> tuple[tuple[NodeConfig, ...], tuple[str, ...]]:
    """Make the nodes and the output of the graph of a genome's values; what nothing reads is left out."""
    made = _GraphBuilder()
    for block in range(1, config.count + 1):
        of = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{block}.")}
        made.add_vector(block, of["vector"], of["width"], of["vector_reads"])
        made.add_embeddings(block, of["embeddings"], of["rows"], of["embeddings_read"])
        vector, rows = made.vectors[block], made.embeddings[block]
        if of.get("fm") and rows:
            added = made.add(f"b{block}_added_fm", "fm", rows, width=of["width"])
            total = [made.add(f"b{block}_sum", "sum", [*vector, added], width=of["width"])] if vector else [added]
            made.vectors[block] = total
        if of.get("embed") and vector:
            rows.append(made.add(f"b{block}_embed", "embed", vector, rows=2))
    for block in range(config.count, -1, -1):
        output = (*made.vectors[block], *made.embeddings[block])
        if output:
            break
    return without_unread(made.nodes, output), output


def shipped_spaces() -> list[str]:
    """Return the names of the spaces that ship with the library."""
    return sorted(one.name[:-5] for one in resources.files("cordillera.spaces").iterdir() if one.name.endswith(".toml"))


def load_space(source: str | Path) -> SpaceConfig:
    """Read a search space: the name of a shipped one, or a TOML file.

    Raises:
        RecipeError: If there is none, or it is not valid; the message lists every mistake.
    """
    try:
        if str(source) in shipped_spaces():
            text = (resources.files("cordillera.spaces") / f"{source}.toml").read_text(encoding="utf-8")
        elif Path(source).is_file():
            text = read_text(Path(source), limit=TOML_BYTES)
        else:
            why = f"is neither a shipped space ({', '.join(shipped_spaces())}) nor a file"
            raise RecipeError(str(source), [("space", why)], "search space")
        return SpaceConfig.model_validate(parse_toml(text, str(source)))
    except DataError as error:
        raise RecipeError(str(source), [("file", error.what)], "search space") from error
    except ValidationError as error:
        found: Any = error.errors(include_url=False)
        problems = explain(found, lambda where: known_keys(SpaceConfig, where), "file")
        raise RecipeError(str(source), problems, "search space") from error
