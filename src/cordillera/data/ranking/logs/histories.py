"""Synthetic log of requests with long histories, whose true probabilities are known.

Items belong to kinds that are no feature. The entries of a user's history stay at one kind for a while, then go on to
another that the user prefers. A click depends on the kind of the latest entry, which the order of entries tells, and on
the share of the candidate's kind in the whole history, which their sum tells too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordillera.data.ranking.features import CategoricalFeature, ListFeature, Schema
from cordillera.data.ranking.logs.click_logs import RowChunk, list_series
from cordillera.data.ranking.logs.columns import RowPlace

_BLOCK = 256  # requests; each block has random numbers of its own
_SECONDS = 1_600_000_000
_PREFERENCE = 0.3  # concentration of the Dirichlet distribution of a user's kinds: users prefer a few
_FOLLOWING = 0.5  # share of candidates of the kind of the latest entry


class HistoriesConfig(BaseModel):
    """Settings of a synthetic log of requests.

    Attributes:
        requests: Number of requests of all splits together, one second apart.
        candidates: Number of rows of a request, which share its history.
        seed: Seed of the rows. A log of fewer requests is the beginning of a longer one.
        items: Number of items.
        kinds: Number of kinds of items.
        median: Median length of a history.
        spread: Standard deviation of the logarithm of the length, which is normal; 0 for equal lengths.
        longest: Length at which histories are cut.
        stay: Probability that an entry is of the kind of the entry before it.
        latest: What the logit gains if the candidate is of the kind of the latest entry.
        taste: What the logit gains if the whole history is of the candidate's kind; for a part of it in proportion.
        bias: Logit without either.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int = Field(2048, ge=1, le=10**9)
    candidates: int = Field(32, ge=1, le=10**4)
    seed: int = Field(0, ge=0)
    items: int = Field(256, ge=2, le=10**8)
    kinds: int = Field(8, ge=2, le=10**4)
    median: float = Field(500.0, ge=1, le=1e6)
    spread: float = Field(1.2, ge=0, le=10)
    longest: int = Field(8192, ge=1, le=10**6)
    stay: float = Field(0.8, ge=0, le=1)
    latest: float = Field(2.0, ge=-100, le=100)
    taste: float = Field(2.0, ge=-100, le=100)
    bias: float = Field(-1.5, ge=-100, le=100)

    @model_validator(mode="after")
    def _each_kind_has_items(self) -> HistoriesConfig:
        if self.kinds > self.items:
            raise ValueError(f"kinds ({self.kinds}) must be at most items ({self.items})")
        return self

    def log_schema(self) -> Schema:
        """Return the candidate, the history that shares its table, and the one task, ``click``."""
        identity: dict[str, Any] = {"table": "item_id", "encoding": "identity", "num_embeddings": self.items}
        return Schema(
            categorical=(CategoricalFeature(name="item_id", **identity),),
            lists=(ListFeature(name="history", max_length=self.longest, **identity),),
            labels=("click",),
            timestamp="timestamp",
        )


@dataclass
class HistoriesLog:
    """Rows of a :class:`HistoriesConfig`."""

    config: HistoriesConfig
    facts: dict[str, Any] = field(default_factory=lambda: {"source": "made", "terms": "none: the rows are made"})
    probability: str | None = "probability"

    def __post_init__(self) -> None:
        self.schema = self.config.log_schema()

    def fingerprint(self) -> str:
        """Return the settings as text."""
        return f"histories 1 {self.config.model_dump_json()}"

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[RowChunk]:
        """Iterate over frames of 256 requests each."""
        each = self.config.candidates
        for first in range(0, self.config.requests, _BLOCK):
            requests = min(_BLOCK, self.config.requests - first)
            place = RowPlace("histories", first * each + 1)
            if columns is not None and set(columns) == {"timestamp"}:
                yield pl.DataFrame({"timestamp": self._times(first, requests)}), place
                continue
            frame = self._block(first).head(requests * each)
            yield frame if columns is None else frame.select(columns), place

    def _times(self, first: int, requests: int) -> np.ndarray:
        return _SECONDS + np.repeat(np.arange(first, first + requests), self.config.candidates)

    def _block(self, first: int) -> pl.DataFrame:
        """Draw the rows of the 256 requests from ``first`` on."""
        config = self.config
        random = np.random.default_rng([config.seed, first // _BLOCK])
        lengths = np.exp(np.log(config.median) + config.spread * random.standard_normal(_BLOCK)).round()
        offsets = np.concatenate([[0], np.cumsum(lengths.clip(1, config.longest).astype(np.int64))])
        kinds = self._kinds_of_entries(offsets, random)
        wanted, logits = self._candidates(kinds, offsets, random)
        probability = 1 / (1 + np.exp(-logits))
        entries, copies = self._items(kinds, random), np.repeat(np.diff(offsets), config.candidates)
        rows = np.concatenate([[0], np.cumsum(copies)])
        first_entry = np.repeat(offsets[:-1], config.candidates)
        source = np.arange(rows[-1]) + np.repeat(first_entry - rows[:-1], copies)
        return pl.DataFrame(
            {
                "item_id": self._items(wanted, random),
                "history": list_series(entries[source], rows),
                "timestamp": self._times(first, _BLOCK),
                "click": (random.random(len(wanted)) < probability).astype(np.uint8),
                "probability": probability,
            }
        )

    def _kinds_of_entries(self, offsets: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Draw the kind of every entry; ``offsets [257]`` are the offsets of the histories."""
        config, entries = self.config, np.arange(offsets[-1])
        moves = random.random(len(entries)) >= config.stay
        moves[offsets[:-1]] = True
        preferred = np.cumsum(random.dirichlet(np.full(config.kinds, _PREFERENCE), _BLOCK), axis=1)
        drawn = np.empty(len(entries), dtype=np.int64)
        for request, (start, end) in enumerate(pairwise(offsets)):
            drawn[start:end] = np.searchsorted(preferred[request], random.random(end - start))
        return drawn.clip(max=config.kinds - 1)[np.maximum.accumulate(np.where(moves, entries, 0))]

    def _candidates(
        self, kinds: np.ndarray, offsets: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the kinds of the candidates, some equal to the latest entry's; return kinds and logits."""
        config, request = self.config, np.repeat(np.arange(_BLOCK), self.config.candidates)
        latest = kinds[offsets[1:] - 1][request]
        follows = random.random(len(request)) < _FOLLOWING
        wanted = np.where(follows, latest, random.integers(0, config.kinds, len(request)))
        of_entry = np.repeat(np.arange(_BLOCK), np.diff(offsets))
        counts = np.bincount(of_entry * config.kinds + kinds, minlength=_BLOCK * config.kinds)
        share = counts.reshape(_BLOCK, config.kinds)[request, wanted] / np.diff(offsets)[request]
        return wanted, config.bias + config.latest * (wanted == latest) + config.taste * share

    def _items(self, kinds: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Draw an item of each kind: those whose remainder is the kind, equally often."""
        config = self.config
        of_kind = (config.items - kinds + config.kinds - 1) // config.kinds
        return (kinds + config.kinds * random.integers(0, of_kind)).astype(np.int32)
