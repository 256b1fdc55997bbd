"""Training steps on long histories beside the same models on padded ones: the part ``histories``.

The padded models place every history, and its candidates, at the end of a row as long as the longest of the batch, and
compute all of its layers over all places. Rows of tables are looked up for true entries alone, as in ours, which is to
the padded models' favour. ``same kernel`` gives our attention the padded rows; ``products`` computes attention with
torch's products; ``fused`` with torch's fused attention and a mask of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _tables import print_notes
from _timing import interleave, times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from cordillera import recipe as recipes
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.embeddings.tables import EmbeddingTables
from cordillera.kernels.attention.jagged import jagged_attention
from cordillera.kernels.attention.jagged_call import JaggedMask
from cordillera.models.ranking import ModelConfig, build
from cordillera.models.ranking.sequence import (
    HSTU,
    HSTUConfig,
    SequenceModel,
    SharedHistories,
    TargetAttention,
    TargetAttentionConfig,
)
from cordillera.recipe import RankingRecipe
from cordillera.training.optimizers import build_adamw, embedding_tables
from cordillera.training.ranking.tasks.losses import weighted_loss

REQUESTS, ROUNDS, ASKED, WITHIN = 64, 5, 2.5, 1e-5
CANDIDATES = 32  # of a request


@dataclass(frozen=True)
class Case:
    """A model on a log.

    Attributes:
        model: Name of the model.
        requests: Requests of a batch.
        longest: Length at which histories are cut.
        peers: Padded models beside ours.
        window: Window of HSTU; None for whole histories.
    """

    model: str
    requests: int
    longest: int
    peers: tuple[str, ...]
    window: int | None = None


CASES = tuple(
    case
    for requests in (4, 16)
    for case in (
        Case("hstu", requests, 8192, ("same kernel",), 256),
        Case("hstu", requests, 8192, ("same kernel",)),
        Case("hstu", requests, 1024, ("same kernel", "products")),
        Case("target-attention", requests, 8192, ("fused",)),
    )
)


@dataclass(frozen=True)
class Padding:
    """Places of ragged rows at the ends of padded ones.

    Attributes:
        places: Place of each row, ``int64 [T]``.
        count: Number of padded rows ``G``.
        longest: Their length ``N``.
    """

    places: Tensor
    count: int
    longest: int

    @classmethod
    def of(cls, lengths: Tensor) -> Padding:
        """Return the padding of rows of ``lengths [G]``, one after another."""
        longest, row = int(lengths.max()), torch.repeat_interleave(lengths)
        ends = torch.arange(1, len(lengths) + 1) * longest
        return cls(torch.arange(len(row)) + (ends - lengths.cumsum(0))[row], len(lengths), longest)

    def pad(self, x: Tensor) -> Tensor:
        """Place rows ``[T, ...]`` among zeros, ``[G * N, ...]``."""
        return x.new_zeros(self.count * self.longest, *x.shape[1:]).index_copy(0, self.places, x)

    def filled(self) -> Tensor:
        """Return which places are filled, ``bool [G * N]``."""
        return torch.zeros(self.count * self.longest, dtype=torch.bool).index_fill_(0, self.places, True)


class PaddedHSTU(HSTU):
    """HSTU over padded rows; keys of empty places have values of zero, which weigh nothing in a sum of SiLUs."""

    products = False

    def forward(self, rows: Tensor, histories: SharedHistories, candidates: Tensor) -> Tensor:
        lengths = histories.offsets.diff()
        own = torch.bincount(histories.of_sample, minlength=len(lengths))
        ends = (lengths + own).cumsum(0)
        of_row = torch.repeat_interleave(lengths)
        before = ends - lengths - own  # of each history
        rows_at = torch.arange(len(rows)) + (before - histories.offsets[:-1])[of_row]
        candidates_at = torch.arange(len(candidates)) + histories.offsets[1:][histories.of_sample]
        padding = Padding.of(lengths + own)
        x = candidates.new_zeros(len(rows) + len(candidates), rows.shape[1])
        x = x.index_copy(0, rows_at, self.placed(rows, histories.offsets)).index_copy(0, candidates_at, candidates)
        x, filled = padding.pad(x), padding.filled()
        offsets = torch.arange(padding.count + 1) * padding.longest
        hidden = self._hidden(padding, own) if self.products else None
        for block in self.blocks:
            x = self._block(block, x, offsets, own, filled, hidden)
        return x.index_select(0, padding.places[candidates_at])

    def _hidden(self, padding: Padding, own: Tensor) -> Tensor:
        """Return which keys a query does not see, ``bool [G, 1, N, N]``."""
        place = torch.arange(padding.longest)
        causal = (place[:, None] >= place)[None]
        is_candidate = place >= padding.longest - own[:, None]  # [G, N]
        others = is_candidate[:, :, None] & is_candidate[:, None] & (place[:, None] != place)
        return ~(causal & ~others)[:, None]

    def _block(
        self, block: nn.Module, x: Tensor, offsets: Tensor, own: Tensor, filled: Tensor, hidden: Tensor | None
    ) -> Tensor:
        u, v, q, k = functional.silu(block.into(block.norm_in(x))).chunk(4, -1)  # type: ignore[operator]
        v = v * filled[:, None]
        q, k, v = (part.unflatten(-1, (self.heads, self.head_dim)) for part in (q, k, v))
        if hidden is None:
            mask = JaggedMask(causal=True, window=self.window, candidates=own)
            found, _ = jagged_attention(q, k, v, offsets, mask=mask, score="silu", divisor=block.divisor)
        else:
            q, k, v = (part.unflatten(0, (len(own), -1)).transpose(1, 2) for part in (q, k, v))
            scores = functional.silu(q @ k.mT * self.head_dim**-0.5) / block.divisor
            found = (scores.masked_fill(hidden, 0.0) @ v).transpose(1, 2).flatten(0, 1)
        return x + block.out(block.norm_out(found.flatten(1)) * u)  # type: ignore[operator]


class HSTUOfProducts(PaddedHSTU):
    """Padded, with torch's products."""

    products = True


class PaddedTargetAttention(TargetAttention):
    """Target attention over padded histories, fused, all candidates of a history at once."""

    def forward(self, rows: Tensor, histories: SharedHistories, candidates: Tensor) -> Tensor:
        padding = Padding.of(histories.offsets.diff())
        groups = Padding.of(torch.bincount(histories.of_sample, minlength=padding.count))
        x, filled = padding.pad(self.placed(rows, histories.offsets)), padding.filled()
        q = self._split(self.query(groups.pad(candidates)))
        k, v = self._split(self.key(x)), self._split(self.value(x))
        q, k, v = (part.unflatten(0, (padding.count, -1)).transpose(1, 2) for part in (q, k, v))
        mask = filled.view(padding.count, 1, 1, -1)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1)
        return self.out(found.index_select(0, groups.places).flatten(1))


PADDED: dict[str, type[nn.Module]] = {
    "same kernel": PaddedHSTU, "products": HSTUOfProducts, "fused": PaddedTargetAttention
}  # fmt: skip


class Steps:
    """Training steps of one model, in fp32: forward, backward, AdamW and the update of the tables."""

    def __init__(self, recipe: RankingRecipe, features: FeatureSpec, peer: str | None) -> None:
        torch.manual_seed(recipe.seed)
        self.model = build(recipe.model, features, recipe.tables)
        assert isinstance(self.model, SequenceModel)
        if peer is not None:
            for encoder in self.model.histories:
                encoder.__class__ = PADDED[peer]
        self.tables: dict[str, EmbeddingTables] = embedding_tables(self.model)
        rate = recipe.training.learning_rate
        self.optimizer = build_adamw(self.model, learning_rate=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def take(self, batch: RankingBatch) -> float:
        """Take a step and return its loss."""
        assert batch.labels is not None
        loss, _ = weighted_loss(self.model(batch), batch.labels, batch.weights, None)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for tables in self.tables.values():
            tables.update()
        return float(loss.detach())


def recipe_of(case: Case, folder: Path, quick: bool) -> RankingRecipe:
    """Return the recipe of a case; its data is prepared in ``folder``."""
    sizes = ["requests=64", "candidates=4", "median=20"] if quick else [f"requests={8 * REQUESTS}"]
    changes = [f"data.histories.{size}" for size in (*sizes, f"longest={case.longest}")]
    changes += [f"data.cache_dir={folder}", f"data.batch_size={32 if quick else case.requests * CANDIDATES}"]
    found = recipes.load("histories-hstu", changes)
    assert isinstance(found, RankingRecipe)
    assert isinstance(found.model, HSTUConfig)
    model: ModelConfig = found.model.model_copy(update={"window": case.window})
    if case.model == "target-attention":
        shared = TargetAttentionConfig.model_fields.keys() - {"name"}
        model = TargetAttentionConfig(**{key: getattr(found.model, key) for key in shared})
    return found.model_copy(update={"model": model})


def batches_of(data: DataConfig, count: int) -> tuple[FeatureSpec, list[RankingBatch]]:
    """Return the features and the first batches of a log."""
    split = prepare(data, progress=False).train
    loaded: Iterator[RankingBatch] = Loader(split, data.batch_size, prefetch=0).epoch()
    return split.features, [batch for batch, _ in zip(loaded, range(count), strict=False)]


def _measured(case: Case, folder: Path, quick: bool) -> dict[str, Any]:
    recipe = recipe_of(case, folder, quick)
    count = 2 if quick else REQUESTS // case.requests
    features, batches = batches_of(recipe.data, count)
    contenders = {name: Steps(recipe, features, None if name == "ours" else name) for name in ("ours", *case.peers)}
    losses = {name: [steps.take(batch) for batch in batches] for name, steps in contenders.items()}
    apart = {
        name: max(abs(a / b - 1) for a, b in zip(losses["ours"], losses[name], strict=True)) for name in case.peers
    }
    assert max(apart.values()) < WITHIN, apart

    def epoch(steps: Steps) -> None:
        for batch in batches:
            steps.take(batch)

    calls: dict[str, Callable[[], None]] = {name: partial(epoch, steps) for name, steps in contenders.items()}
    timings = interleave(calls, rounds=2 if quick else ROUNDS)
    lengths = torch.cat([batch.sparse["history"].lengths for batch in batches]).view(count, -1).double()
    fills = (lengths.mean(1) / lengths.amax(1), lengths.square().mean(1) / lengths.amax(1).square())
    return {
        "model": case.model, "requests": case.requests, "longest": case.longest, "window": case.window,
        "losses": losses, "apart": apart,
        "fill": float(fills[0].mean()), "fill_squared": float(fills[1].mean()),
        "seconds": {name: timing.to_json() for name, timing in timings.items()},
        "times_faster": {name: times_faster(timings["ours"], timings[name]).to_json() for name in case.peers},
    }  # fmt: skip


def measure_histories(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Time training steps of the recipe ``histories-hstu`` and of target attention, ragged and padded."""
    cases = [replace(case, longest=64) for case in (CASES[2], CASES[3])] if quick else list(CASES)
    rows = [_measured(case, folder, quick) for case in cases]
    table = Table(title="training steps, times faster than padded (measured)", title_justify="left")
    for heading in (
        "model",
        "requests",
        "longest",
        "window",
        "fill",
        "squared",
        "padded",
        "times faster",
        "losses apart",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "padded") else "right")
    for row in rows:
        for name, ratio in row["times_faster"].items():
            fills = (f"{row[key]:.2f}" for key in ("fill", "fill_squared"))
            apart = f"{row['apart'][name]:.1e}"
            table.add_row(
                row["model"],
                str(row["requests"]),
                f"{row['longest']:,}",
                str(row["window"] or ""),
                *fills,
                name,
                f"{ratio['median']:.2f}",
                apart,
            )
    console.print(table)
    print_notes(console, notes := ["fill is that of batches: their mean length relative to their longest"])
    conditions = {"requests": REQUESTS, "candidates": CANDIDATES, "asked": ASKED, "within": WITHIN}
    return {"evidence": "measured", "conditions": conditions, "rows": rows, "notes": notes}
