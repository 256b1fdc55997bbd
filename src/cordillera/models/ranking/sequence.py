"""Models that read histories in order: target attention, and HSTU's blocks; an MLP over all inputs follows.

Each history is summarised, for the candidate of its sample, to one embedding in place of the sum of its rows. Nothing
is padded: attention runs over the packed rows. Neighbouring samples with the same history (the candidates of one
request) share it: its rows are looked up and encoded once.

Source: target attention as in DIN (Zhou et al. 2018, arXiv 1706.06978), with a softmax over several heads as in
transformers; blocks of HSTU (Zhai et al. 2024, arXiv 2402.17152, section 3.2), without its bias by relative time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import DataError
from cordillera.jagged import JaggedBatch, JaggedTensor, choose_features, offsets_from_lengths
from cordillera.kernels.attention.jagged import jagged_attention
from cordillera.kernels.attention.jagged_call import JaggedMask
from cordillera.models.ranking.dnn import DNN, TrunkConfig


class SequenceConfig(TrunkConfig):
    """Settings of models that read histories.

    Attributes:
        sequences: List features that are read in order, oldest entry first, each with attention of its own.
        candidate: Feature with one value a sample, and the table of the sequences: what is compared with their entries.
        heads: Heads of the attention.
        head_dim: Width of a head.
        positions: Number of latest positions with a learned vector each; older entries share one.
    """

    sequences: tuple[str, ...] = Field(("history",), min_length=1)
    candidate: str = "item_id"
    heads: int = Field(2, ge=1, le=256)
    head_dim: int = Field(16, ge=1, le=1024)
    positions: int = Field(64, ge=1, le=2**20)


class TargetAttentionConfig(SequenceConfig):
    """Settings of target attention."""

    name: Literal["target-attention"] = "target-attention"


class HSTUConfig(SequenceConfig):
    """Settings of HSTU.

    Attributes:
        blocks: Number of blocks.
        window: Number of latest entries that an entry sees; None for all before it.
    """

    name: Literal["hstu"] = "hstu"
    blocks: int = Field(2, ge=1, le=256)
    window: int | None = Field(None, ge=1)


class SharedHistories(NamedTuple):
    """Histories of a batch, those that neighbouring samples share once.

    Attributes:
        values: Ids of the distinct histories, one after another, ``[T]``.
        offsets: ``int64 [G + 1]``; history ``g`` is ``values[offsets[g]:offsets[g + 1]]``.
        of_sample: History of each sample, ascending, ``int64 [B]``.
        weights: Weights of the values, ``[T]``, or None.
    """

    values: Tensor
    offsets: Tensor
    of_sample: Tensor
    weights: Tensor | None


def share_histories(histories: JaggedTensor) -> SharedHistories:
    """Find neighbouring samples of ``histories`` with equal ids and weights."""
    lengths = histories.lengths.long()
    if not len(lengths):
        return SharedHistories(histories.values, histories.offsets.long(), lengths, histories.weights)
    of_value = torch.repeat_interleave(lengths)
    before = torch.arange(len(of_value), device=lengths.device) - lengths[of_value]
    differs = torch.cat([lengths.new_ones(1, dtype=torch.bool), lengths.diff() != 0])
    # compared where the history before is as long, so that it lies that many values earlier
    compared = ~differs[of_value]
    at = compared.nonzero()[:, 0]
    unequal = histories.values[at] != histories.values[before[at]]
    if histories.weights is not None:
        unequal |= histories.weights[at] != histories.weights[before[at]]
    differs[of_value[at[unequal]]] = True
    kept = differs.nonzero()[:, 0]
    chosen = differs[of_value]
    return SharedHistories(
        histories.values[chosen],
        offsets_from_lengths(lengths[kept]),
        differs.cumsum(0) - 1,
        None if histories.weights is None else histories.weights[chosen],
    )


class HistoryEncoder(nn.Module):
    """Summaries ``[B, d]`` of histories for candidates ``[B, d]``."""

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.positions = nn.Embedding(config.positions, config.embedding_dim)
        nn.init.normal_(self.positions.weight, std=0.02)

    def placed(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Add the vectors of positions, counted from the latest, to the ``rows [T, d]`` between ``offsets [G + 1]``."""
        lengths = offsets.diff()
        of_row = torch.repeat_interleave(lengths)
        age = offsets[1:][of_row] - 1 - torch.arange(len(of_row), device=offsets.device)
        return rows + self.positions(age.clamp(max=self.positions.num_embeddings - 1)).to(rows.dtype)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))


class TargetAttention(HistoryEncoder):
    """Softmax attention of a candidate over the entries of its history."""

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__(config)
        width = config.heads * config.head_dim
        self.query = nn.Linear(config.embedding_dim, width)
        self.key, self.value = nn.Linear(config.embedding_dim, width), nn.Linear(config.embedding_dim, width)
        self.out = nn.Linear(width, config.embedding_dim)

    def forward(self, rows: Tensor, histories: SharedHistories, candidates: Tensor) -> Tensor:
        x = self.placed(rows, histories.offsets)
        q, k, v = (self._split(part) for part in (self.query(candidates), self.key(x), self.value(x)))
        one_each = torch.arange(len(candidates) + 1, device=candidates.device)
        found, _ = jagged_attention(
            q, k, v, histories.offsets,
            q_offsets=one_each, kv_index=histories.of_sample, longest=_longest(histories.offsets, 1),
        )  # fmt: skip
        return self.out(found.flatten(1))


class HSTU(HistoryEncoder):
    """Blocks of HSTU over a history followed by its candidates, which do not see each other.

    Attributes:
        blocks: The blocks.
        window: Number of latest entries that an entry sees; None for all before it.
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(HSTUBlock(config) for _ in range(config.blocks))
        self.window = config.window

    def forward(self, rows: Tensor, histories: SharedHistories, candidates: Tensor) -> Tensor:
        lengths = histories.offsets.diff()
        own = torch.bincount(histories.of_sample, minlength=len(lengths))  # candidates of each history
        offsets = offsets_from_lengths(lengths + own)
        # histories are followed by their candidates, which stand in the order of samples
        of_row = torch.repeat_interleave(lengths)
        rows_at = torch.arange(len(rows), device=rows.device) + (offsets[:-1] - histories.offsets[:-1])[of_row]
        sample = torch.arange(len(candidates), device=rows.device)
        candidates_at = sample + histories.offsets[1:][histories.of_sample]
        order = torch.cat([rows_at, candidates_at]).argsort()
        x = torch.cat([self.placed(rows, histories.offsets), candidates]).index_select(0, order)
        mask = JaggedMask(causal=True, window=self.window, candidates=own)
        longest = _longest(offsets)
        for block in self.blocks:
            x = block(x, offsets, mask, longest)
        return x.index_select(0, candidates_at)


class HSTUBlock(nn.Module):
    """One block of HSTU (its equations 1 to 3); shares are divided by the number of positions."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.divisor = config.heads, config.head_dim, float(config.positions)
        width = config.heads * config.head_dim
        self.norm_in, self.norm_out = nn.LayerNorm(config.embedding_dim), nn.LayerNorm(width)
        self.into = nn.Linear(config.embedding_dim, 4 * width)
        self.out = nn.Linear(width, config.embedding_dim)

    def forward(self, x: Tensor, offsets: Tensor, mask: JaggedMask, longest: int | None) -> Tensor:
        u, v, q, k = functional.silu(self.into(self.norm_in(x))).chunk(4, -1)
        q, k, v = (part.unflatten(-1, (self.heads, self.head_dim)) for part in (q, k, v))
        found, _ = jagged_attention(q, k, v, offsets, mask=mask, score="silu", divisor=self.divisor, longest=longest)
        return x + self.out(self.norm_out(found.flatten(1)) * u)


class SequenceModel(DNN):
    """MLP over all inputs, with histories that are summarised for the candidate of the sample.

    Attributes:
        histories: Encoder of each history.
        places: Position of each history among ``features.sparse``.
        candidate: Position of the candidate among them.

    Raises:
        DataError: If the features named by the configuration are absent or do not fit together, or the tables give
            sums of bags only.
    """

    config: SequenceConfig
    pools_all = False

    def __init__(self, config: SequenceConfig, features: FeatureSpec, tables: TablesConfig) -> None:
        _check_features(config, features)
        super().__init__(config, features, tables)
        self.tables.unpooled(config.candidate, torch.zeros(0, dtype=torch.int64))  # raises errors early
        self.histories = nn.ModuleList(self._encoder() for _ in config.sequences)
        names = [feature.name for feature in features.sparse]
        self.places = [names.index(name) for name in config.sequences]
        self.candidate = names.index(config.candidate)

    def _encoder(self) -> HistoryEncoder:
        raise NotImplementedError

    def look_up(self, batch: RankingBatch) -> Tensor:
        """Look up pooled features, and summaries of histories in their places."""
        found = list(self.tables(_emptied(batch.sparse, self.places)).unbind(1))
        for place, name, encoder in zip(self.places, self.config.sequences, self.histories, strict=True):
            histories = share_histories(batch.sparse[name])
            rows = self.tables.unpooled(name, histories.values)
            if histories.weights is not None:
                rows = rows * histories.weights[:, None].to(rows.dtype)
            found[place] = encoder(rows, histories, found[self.candidate]).to(rows.dtype)
        return torch.stack(found, 1)


class TargetAttentionModel(SequenceModel):
    """Each history is summarised by attention of the candidate over its entries."""

    Config = TargetAttentionConfig

    def _encoder(self) -> HistoryEncoder:
        return TargetAttention(self.config)


class HSTUModel(SequenceModel):
    """Each history is summarised by HSTU's blocks over its entries and the candidate."""

    Config = HSTUConfig

    def _encoder(self) -> HistoryEncoder:
        assert isinstance(self.config, HSTUConfig)
        return HSTU(self.config)


def _longest(offsets: Tensor, least: int = 0) -> int | None:
    """Longest of the sequences, or ``least``; None on CPUs, where attention looks itself."""
    return None if offsets.device.type == "cpu" else max([least, *offsets.diff().tolist()])


def _check_features(config: SequenceConfig, features: FeatureSpec) -> None:
    known = {feature.name: feature for feature in features.sparse}
    for key, names in (("candidate", (config.candidate,)), ("sequences", config.sequences)):
        for name in names:
            if name not in known:
                raise DataError(
                    f"no sparse feature {name!r}", where=f"model.{key}", remedy=f"one of {', '.join(known)}"
                )
            if known[name].is_list != (key == "sequences"):
                what = "a list" if known[name].is_list else "one value"
                raise DataError(f"feature {name!r} has {what} in each sample", where=f"model.{key}")
            if known[name].table != known[config.candidate].table:
                raise DataError(
                    f"feature {name!r} has not the table of {config.candidate!r}",
                    where=f"model.{key}",
                    remedy="name features of one vocabulary",
                )
    if len(set(config.sequences)) < len(config.sequences):
        raise DataError(f"a feature stands twice: {', '.join(config.sequences)}", where="model.sequences")


def _emptied(sparse: JaggedBatch, places: Sequence[int]) -> JaggedBatch:
    """The batch with empty bags of the features at some positions."""
    kept = [place for place in range(len(sparse.keys)) if place not in places]
    chosen, lengths = choose_features(sparse, kept), sparse.lengths.view(len(sparse.keys), -1).clone()
    lengths[list(places)] = 0
    offsets = offsets_from_lengths(lengths.flatten()).to(sparse.offsets.dtype)
    return JaggedBatch(sparse.keys, chosen.values, offsets, chosen.weights)
