"""Spaces of architectures: genes with values, and the recipe keys that they set."""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cordillera.errors import DataError, RecipeError
from cordillera.files import TOML_BYTES, parse_toml, read_text
from cordillera.mistakes import explain, known_keys
from cordillera.models.ranking.graphs.blocks import BlocksConfig, Gene, block_genes, graph_of
from cordillera.models.ranking.graphs.config import short_digest

Genome = tuple[int, ...]
"""Index of the chosen value of every gene."""

Scalar = bool | int | float | str | tuple[int, ...]

_ENUMERATED = 200_000  # genomes that are gone through one by one to find what is left of a space


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


class SearchSpace:
    """A search space: genomes, and the architectures that they encode.

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
            genes += block_genes(config.blocks)
        self.fixed = {gene.name: gene.values[0] for gene in genes if len(gene.values) == 1}
        self.genes = tuple(gene for gene in genes if len(gene.values) > 1)
        self._ids: dict[Genome, str] = {}

    @property
    def size(self) -> int:
        """Number of genomes; several genomes may encode one architecture."""
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
        """Return the recipe's keys and values that a genome encodes."""
        values = self.decode(genome)
        found: dict[str, Any] = {}
        if self.config.blocks is not None:
            nodes, output = graph_of(self.config.blocks, values)
            plain = [node.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for node in nodes]
            found["model"] = {**self.base, "name": "graph", "nodes": plain, "output": list(output)}
        for key in self.config.choices:
            value = values[key]
            found[key] = list(value) if isinstance(value, tuple) else value
        return found

    def identify(self, genome: Genome) -> str:
        """Return the name of an architecture, 16 hexadecimal digits; genomes of equal architectures have equal ones."""
        if genome not in self._ids:
            self._ids[genome] = short_digest(self.overrides(genome))
        return self._ids[genome]

    def sample(self, random: np.random.Generator) -> Genome:
        """Draw a genome uniformly."""
        return tuple(int(random.integers(len(gene.values))) for gene in self.genes)

    def mutate(self, genome: Genome, random: np.random.Generator, changes: int = 1) -> Genome:
        """Return a genome with new values of exactly ``changes`` genes, or of all genes if there are fewer."""
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
            close = difflib.get_close_matches(str(source), shipped_spaces(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            why = f"is neither a shipped space ({', '.join(shipped_spaces())}) nor a file{hint}"
            raise RecipeError(str(source), [("space", why)], "search space")
        return SpaceConfig.model_validate(parse_toml(text, str(source)))
    except DataError as error:
        raise RecipeError(str(source), [("file", error.what)], "search space") from error
    except ValidationError as error:
        found: Any = error.errors(include_url=False)
        problems = explain(found, lambda where: known_keys(SpaceConfig, where), "file")
        raise RecipeError(str(source), problems, "search space") from error
