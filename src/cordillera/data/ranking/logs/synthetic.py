"""Synthetic click log whose true probabilities are known.

Every feature has a latent vector. Weighted sums of these vectors form a few slots; a factorisation machine over the
slots gives the logit its second-order part, and a factorisation machine over products of slots its fourth-order part,
as in a stack of two interaction layers (Zhang et al. 2024, section 3). A linear part is what logistic regression can
learn. Labels are drawn from the probabilities, so no model reaches a better normalised entropy than the probabilities
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from pydantic import BaseModel, ConfigDict, Field

from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature, Schema
from cordillera.data.ranking.logs.click_logs import RowChunk, list_series
from cordillera.data.ranking.logs.columns import RowPlace

_BLOCK = 16_384
_CHUNK = 131_072
_PILOT_ROWS = 32_768
_SLOT_BITS = 17
_LATENT_ROWS = 65_536
_SECONDS = 1_600_000_000


class SyntheticConfig(BaseModel):
    """Settings of a synthetic click log.

    Attributes:
        rows: Number of rows of all splits together.
        seed: Seed of the teacher and of the rows. Equal settings give equal rows, whatever the size of chunks.
        dense: Number of dense features, standard normal.
        categorical: Number of categorical features.
        lists: Number of list features, of 0 to ``list_length`` entries.
        list_length: Number of entries of the longest list.
        smallest_vocabulary: Number of ids of the smallest categorical feature.
        largest_vocabulary: Number of ids of the largest categorical feature and of every list feature; sizes between
            grow geometrically.
        zipf: Exponent of the ids' popularity.
        concentration: Strength of features with few ids: a feature of ``n`` ids has strength ``n ** -concentration``.
        rank: Width of the latent vectors.
        slots: Number of weighted sums of latent vectors that interact.
        linear: Standard deviation of the first-order part of the logit.
        second: Standard deviation of the second-order part of the logit.
        fourth: Standard deviation of the fourth-order part of the logit.
        bias: Mean of the logit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int = Field(1_000_000, ge=1, le=10**12)
    seed: int = Field(0, ge=0)
    dense: int = Field(13, ge=0, le=10**4)
    categorical: int = Field(26, ge=1, le=10**4)
    lists: int = Field(2, ge=0, le=10**4)
    list_length: int = Field(5, ge=1, le=10**4)
    smallest_vocabulary: int = Field(5, ge=2, le=10**8)
    largest_vocabulary: int = Field(200, ge=2, le=10**8)
    zipf: float = Field(1.05, ge=0, le=100)
    concentration: float = Field(0.5, ge=0, le=100)
    rank: int = Field(4, ge=1, le=10**4)
    slots: int = Field(4, ge=2, le=10**4)
    linear: float = Field(0.7, ge=0, le=100)
    second: float = Field(1.2, ge=0, le=100)
    fourth: float = Field(1.0, ge=0, le=100)
    bias: float = Field(-1.0, ge=-100, le=100)

    def vocabularies(self) -> list[int]:
        """Return the number of ids of every categorical feature."""
        sizes = np.geomspace(self.smallest_vocabulary, self.largest_vocabulary, self.categorical)
        return [int(size) for size in np.maximum(2, np.round(sizes))]

    def log_schema(self) -> Schema:
        """Return the features and the one task, ``click``; ids are rows already, dense values need no transform."""
        return Schema(
            dense=tuple(DenseFeature(name=f"I{i + 1}", transform="none", missing="refuse") for i in range(self.dense)),
            categorical=tuple(
                CategoricalFeature(name=f"C{i + 1}", encoding="identity", num_embeddings=size)
                for i, size in enumerate(self.vocabularies())
            ),
            lists=tuple(
                ListFeature(
                    name=f"L{i + 1}",
                    encoding="identity",
                    num_embeddings=self.largest_vocabulary,
                    max_length=self.list_length,
                )
                for i in range(self.lists)
            ),
            labels=("click",),
            timestamp="timestamp",
        )


def _popularity(size: int, exponent: float) -> np.ndarray:
    """Make a table of 2^17 or more slots in which ids occur by Zipf's law, each at least once."""
    slots = 1 << max(_SLOT_BITS, (8 * size - 1).bit_length())
    shares = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    counts = np.maximum(1, np.floor(shares / shares.sum() * (slots - size)).astype(np.int64))
    counts[0] += slots - counts.sum()
    return np.repeat(np.arange(size, dtype=np.int32), counts)


class Teacher:
    """True click probability of a row of features."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        random = np.random.default_rng([config.seed, 0])
        sizes = [*config.vocabularies(), *([config.largest_vocabulary] * config.lists)]
        fields = len(sizes) + config.dense
        width = config.slots * config.rank
        # Popular logs have few strong fields and many weak ones. Here the fields with few ids are strong, since vectors
        # of many ids cannot be learnt from the rows of one pass.
        strength = np.array([*sizes, *([self.config.smallest_vocabulary] * config.dense)]) ** -config.concentration
        mix = random.standard_normal((fields, config.slots)) * (strength / np.linalg.norm(strength))[:, None]
        tables = []
        # Ids of a very large feature share a bounded number of vectors.
        rows = [min(size, _LATENT_ROWS) for size in sizes]
        for index, size in enumerate(rows):
            latent = random.standard_normal((size, config.rank))
            first = random.standard_normal((size, 1)) / np.sqrt(fields)
            slots = (mix[index][:, None] * latent[:, None, :]).reshape(size, width)
            tables.append(np.concatenate([slots, first], axis=1))
        self.rows = np.array(rows)
        self.starts = np.cumsum([0, *rows[:-1]])
        self.table = torch.from_numpy(np.concatenate(tables).astype(np.float32))
        latent = random.standard_normal((config.dense, config.rank))
        first = random.standard_normal((config.dense, 1)) / np.sqrt(fields)
        slots = (mix[len(sizes) :][:, :, None] * latent[:, None, :]).reshape(config.dense, width)
        self.dense = np.concatenate([slots, first], axis=1).astype(np.float32)
        self.pairs = random.standard_normal((config.slots, config.slots)).astype(np.float32)
        self.pairs = np.triu(self.pairs, 1)
        self.quads = np.triu(random.standard_normal((config.slots, config.slots)), 1).astype(np.float32)
        popularity = {size: _popularity(size, config.zipf) for size in set(sizes) | {config.largest_vocabulary}}
        self.tables = [popularity[size] for size in sizes[: config.categorical]]
        self.list_table = popularity[config.largest_vocabulary]
        self.means, self.scales = np.zeros(3), np.ones(3)
        parts = self._parts(*self._features(np.random.default_rng([config.seed, 1]), _PILOT_ROWS))
        self.means, self.scales = parts.mean(axis=0), np.maximum(parts.std(axis=0), 1e-12)

    def _features(
        self, random: np.random.Generator, rows: int
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        config = self.config
        dense = random.standard_normal((rows, config.dense), dtype=np.float32)
        ids = np.empty((rows, config.categorical), dtype=np.int32)
        for index, table in enumerate(self.tables):
            ids[:, index] = table[random.integers(0, len(table), rows, dtype=np.uint32)]
        lists = []
        for _ in range(config.lists):
            lengths = random.integers(0, config.list_length + 1, rows)
            draws = random.integers(0, len(self.list_table), int(lengths.sum()), dtype=np.uint32)
            lists.append((self.list_table[draws], lengths))
        return dense, ids, lists

    def _parts(self, dense: np.ndarray, ids: np.ndarray, lists: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """First-, second- and fourth-order part of the logits, standardised, ``float64 [N, 3]``."""
        config, rows = self.config, len(ids)
        count = config.categorical
        bags = torch.from_numpy(ids % self.rows[:count] + self.starts[:count])
        sums = torch.nn.functional.embedding_bag(bags, self.table, mode="sum")
        for index, (values, lengths) in enumerate(lists):
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]]))
            entries = torch.from_numpy(values % self.rows[count + index] + self.starts[count + index])
            sums += torch.nn.functional.embedding_bag(entries, self.table, offsets, mode="mean")
        total = sums.numpy() + dense @ self.dense
        slots = total[:, :-1].reshape(rows, config.slots, config.rank)
        second = np.einsum("nar,nbr,ab->n", slots, slots, self.pairs, optimize=True)
        # Products of neighbouring slots are the rows of the second machine.
        products = slots * np.roll(slots, 1, axis=1)
        fourth = np.einsum("nar,nbr,ab->n", products, products, self.quads, optimize=True)
        parts = np.stack([total[:, -1], second, fourth], axis=1).astype(np.float64)
        return (parts - self.means) / self.scales

    def block(self, number: int, rows: int = _BLOCK) -> pl.DataFrame:
        """Return the first ``rows`` of block ``number``: features, true ``probability``, drawn label."""
        config = self.config
        random = np.random.default_rng([config.seed, 2, number])
        dense, ids, lists = self._features(random, _BLOCK)
        parts = self._parts(dense, ids, lists)
        logits = config.bias + parts @ np.array([config.linear, config.second, config.fourth])
        probability = 1 / (1 + np.exp(-logits))
        clicks = (random.random(_BLOCK) < probability).astype(np.uint8)
        columns: dict[str, Any] = {f"I{i + 1}": dense[:, i] for i in range(config.dense)}
        columns |= {f"C{i + 1}": ids[:, i] for i in range(config.categorical)}
        for index, (values, lengths) in enumerate(lists):
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            columns[f"L{index + 1}"] = list_series(values, offsets)
        columns["timestamp"] = _SECONDS + number * _BLOCK + np.arange(_BLOCK)
        columns["click"], columns["probability"] = clicks, probability
        return pl.DataFrame(columns).head(rows)


@dataclass
class SyntheticLog:
    """Rows of a :class:`SyntheticConfig`."""

    config: SyntheticConfig
    facts: dict[str, Any] = field(default_factory=lambda: {"source": "made", "terms": "none: the rows are made"})
    probability: str | None = "probability"

    def __post_init__(self) -> None:
        self.schema = self.config.log_schema()

    def fingerprint(self) -> str:
        """Return the settings as text."""
        return f"synthetic 1 {self.config.model_dump_json()}"

    def chunks(self, columns: Sequence[str] | None = None, *, chunk_rows: int = _CHUNK) -> Iterator[RowChunk]:
        """Iterate over frames in order, with at least the named ``columns``; rows do not depend on ``chunk_rows``."""
        if columns is not None and set(columns) == {"timestamp"}:
            for start in range(0, self.config.rows, _CHUNK):
                times = np.arange(start, min(start + _CHUNK, self.config.rows)) + _SECONDS
                yield pl.DataFrame({"timestamp": times}), RowPlace("synthetic", start + 1)
            return
        teacher = Teacher(self.config)
        waiting: list[pl.DataFrame] = []
        held = given = 0
        for start in range(0, self.config.rows, _BLOCK):
            frame = teacher.block(start // _BLOCK, min(_BLOCK, self.config.rows - start))
            waiting.append(frame if columns is None else frame.select(columns))
            held += len(frame)
            if held < chunk_rows and start + _BLOCK < self.config.rows:
                continue
            joined = pl.concat(waiting) if len(waiting) > 1 else waiting[0]
            last = start + _BLOCK >= self.config.rows
            cut = held if last else held // chunk_rows * chunk_rows
            for first in range(0, cut, chunk_rows):
                part = joined.slice(first, min(chunk_rows, cut - first))
                yield part, RowPlace("synthetic", given + 1)
                given += len(part)
            waiting, held = [joined.slice(cut)] if cut < held else [], held - cut
