"""Drafts from a small model that reads the features of the model it drafts for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor, nn

from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.attention.decoding import MOST_TOKENS
from cordillera.kernels.dense.few_rows import FewRowsLinear, use_few_rows
from cordillera.models.language.draft_model import DraftModel
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama, rope_table
from cordillera.serving.language.speculation import NOTHING, DraftTree, tree_of

_WIDTH = 3  # likeliest tokens after each place that are considered
_EXPANDED = 3  # places of a level that a head goes on from
_LEAST = 0.02  # chance of a token that is worth checking
_WORTH = 0.2  # chance of a place that is worth another pass of a head
_READ_AT_ONCE = 32  # pairs that wait; with more, they are read without a proposal
_BINS, _PRIOR_WEIGHT = 20, 20.0


class ModelDrafts:
    """A drafter and the model that it drafts for; :meth:`start` begins a text.

    How often drafts are right is counted over all texts, by the probability that the drafter gives them.

    Args:
        draft: Drafter, in the dtype of the model; on CPUs its linear layers are replaced by those for few rows.
        model: Model whose features it reads.
        capacity: Most tokens of a text; None for the model's context.
    """

    def __init__(self, draft: DraftModel, model: Llama, capacity: int | None = None) -> None:
        self.draft, self.model = draft, model
        self.taps = draft.taps
        self.capacity = min(capacity or model.config.context, model.config.context)
        weight = model.embedding.weight if model.head is None else model.head.weight
        self.head = FewRowsLinear(nn.Parameter(weight[: draft.config.vocabulary], requires_grad=False))
        use_few_rows(draft)
        self.cache_config = model.config.model_copy(update={"layers": draft.config.layers})
        self._tried = [_PRIOR_WEIGHT] * _BINS
        self._right = [_PRIOR_WEIGHT * (place + 0.5) / _BINS for place in range(_BINS)]

    def start(self) -> ModelDrafter:
        """Begin a text."""
        return ModelDrafter(self)

    def chance(self, probability: float) -> float:
        """Return how often drafts are right to which the drafter gives a ``probability``."""
        place = min(_BINS - 1, int(_BINS * probability))
        return self._right[place] / self._tried[place]

    def count(self, probability: float, is_right: bool) -> None:
        """Take note of whether a draft was right."""
        place = min(_BINS - 1, int(_BINS * probability))
        self._tried[place] += 1
        self._right[place] += is_right


class ModelDrafter:
    """Drafter of one text; see :class:`ModelDrafts`.

    The drafter's keys and values of pairs that the text holds stay; those of drafted ones are dropped. Pairs whose
    features nobody computed, as those of a prompt's shared beginning, are left out.
    """

    def __init__(self, drafts: ModelDrafts) -> None:
        self._drafts = drafts
        weight = drafts.model.embedding.weight
        self._cache = KVCache(drafts.cache_config, 1, drafts.capacity + 2 * MOST_TOKENS, weight.dtype, weight.device)
        self._tokens: list[int] = []
        self._next = 0  # first pair that was not read
        self._tapped: list[Tensor] = []  # outputs of the tapped blocks of the tokens from there on
        self._count = 0  # of these tokens
        self._drafted: dict[tuple[int, ...], dict[int, float]] = {}  # path: probabilities of what was drafted after it

    def add(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the text goes on with."""
        path: tuple[int, ...] = ()
        for token in tokens:
            for drafted, probability in self._drafted.get(path, {}).items():
                self._drafts.count(probability, drafted == token)
            path = (*path, token)
        self._drafted = {}
        self._tokens += tokens

    @torch.inference_mode()
    def see(self, position: int, features: Tensor) -> None:
        """Take note of the features of tokens of the text, ``[n, taps x hidden]``; the first is at ``position``."""
        if position != self._next + self._count:
            self._next, self._tapped, self._count = position, [], 0
        self._tapped.append(features)
        self._count += len(features)
        if self._ready() > _READ_AT_ONCE:  # of a prompt, which is read when it comes
            tokens, fused = self._take()
            self._run(self._embed(tokens), fused, None, len(tokens))

    def _ready(self) -> int:
        """Return the number of pairs that can be read."""
        return min(self._count, len(self._tokens) - 1 - self._next)

    def _take(self) -> tuple[list[int], Tensor]:
        """Return the tokens and fused features of the pairs that can be read, and go on after them."""
        ready, tapped = self._ready(), torch.cat(self._tapped)
        tokens = self._tokens[self._next + 1 : self._next + 1 + ready]
        self._next, self._tapped, self._count = self._next + ready, [tapped[ready:]], self._count - ready
        return tokens, self._drafts.draft.fused(tapped[:ready])

    @torch.inference_mode()
    def propose(self, most: int, deepest: int) -> DraftTree:
        """Return a tree of up to ``most`` tokens and up to ``deepest`` levels; nothing without features."""
        if self._ready() < 1:
            return NOTHING
        deepest = min(deepest, self._drafts.draft.config.length)
        tokens, features = self._take()
        if self._drafts.draft.mask is not None:
            return self._by_block(tokens, features, most, deepest)
        return self._by_head(tokens, features, most, deepest)

    def _run(self, embedded: Tensor, features: Tensor, parents: list[int] | None, keeps: int) -> Tensor:
        """Run the drafter on rows that follow what is cached; keep the keys and values of the first ``keeps``."""
        draft, count = self._drafts.draft, len(embedded)
        offsets = offsets_from_lengths(torch.tensor([count]))
        before = self._cache.lengths[0]
        step = self._cache.extend(offsets, None if parents is None else [parents])
        table = rope_table(self._drafts.cache_config, step.positions)
        cores = [step.core(layer) for layer in range(draft.config.layers)]
        x = draft(embedded, features, offsets, table, cores)
        if keeps:
            step.commit()
            self._cache.keep([before + keeps])
        return x

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        embedding = self._drafts.model.embedding
        return embedding(torch.tensor(tokens, device=embedding.weight.device))

    def _likely(self, x: Tensor) -> list[list[tuple[int, float]]]:
        """Return the likeliest tokens after each row, with their probabilities."""
        shares = self._drafts.head(self._drafts.draft.norm(x)).float().softmax(-1)
        values, ids = shares.topk(min(_WIDTH, shares.shape[1]), -1)
        return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]

    def _by_block(self, tokens: list[int], features: Tensor, most: int, deepest: int) -> DraftTree:
        mask, unknown = self._drafts.draft.mask, deepest - 1
        assert mask is not None
        embedded = torch.cat([self._embed(tokens), mask.expand(unknown, -1)])
        x = self._run(embedded, torch.cat([features, features[-1:].expand(unknown, -1)]), None, len(tokens))
        levels = self._likely(x[len(tokens) - 1 :])
        chances: dict[tuple[int, ...], float] = {}
        order = count()
        following: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, -1, ())]
        while following and len(chances) < most:  # the likeliest path is gone on from first
            chance, _, path = heapq.heappop(following)
            if path:
                chances[path] = -chance
            if len(path) == deepest:
                continue
            for token, probability in levels[len(path)]:
                own = -chance * self._drafts.chance(probability)
                if own >= _LEAST:
                    self._drafted.setdefault(path, {})[token] = probability
                    heapq.heappush(following, (-own, next(order), (*path, token)))
        return tree_of(chances, most)

    def _by_head(self, tokens: list[int], features: Tensor, most: int, deepest: int) -> DraftTree:
        x = self._run(self._embed(tokens), features, None, len(tokens))[-1:]
        # places that the head went on from: path, parent among them, features of what comes before them
        places: list[tuple[tuple[int, ...], int]] = []
        before = x[:0]
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        new: list[tuple[int, ...]] = [()]
        for level in range(1, deepest + 1):
            for path, likely in zip(new, self._likely(x), strict=True):
                for token, probability in likely:
                    own = chances[path] * self._drafts.chance(probability)
                    if own >= _LEAST:
                        self._drafted.setdefault(path, {})[token] = probability
                        chances[(*path, token)] = own
            if level == deepest:
                break
            frontier = [path for path in chances if len(path) == level and chances[path] >= _WORTH]
            frontier = sorted(frontier, key=lambda path: -chances[path])[:_EXPANDED]
            if not frontier or len(places) + len(frontier) > MOST_TOKENS:
                break
            of_new = {path: row for row, path in enumerate(new)}
            known = {path: place for place, (path, _) in enumerate(places)}
            before = torch.cat([before, x[[of_new[path[:-1]] for path in frontier]]])
            places += [(path, known.get(path[:-1], -1)) for path in frontier]
            embedded = self._embed([path[-1] for path, _ in places])
            x = self._run(embedded, before, [parent for _, parent in places], 0)[-len(frontier) :]
            new = frontier
        del chances[()]
        return tree_of(chances, most)
