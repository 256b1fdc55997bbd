"""Drafts from a small model that reads the features of the model it drafts for."""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate, count, islice

import torch
from torch import Tensor, nn

from cordillera.kernels.attention.decoding import MOST_TOKENS
from cordillera.kernels.dense.few_rows import MOST_ROWS, FewRowsLinear, use_few_rows
from cordillera.kernels.dense.packed_rows import is_fast
from cordillera.kernels.dense.tiled_products import takes
from cordillera.models.language.draft_model import DraftModel
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama, few_rows_of
from cordillera.models.language.rope import rope_table
from cordillera.numerics.quantization.packed_linear import PackedLinear, pack_rows
from cordillera.numerics.sites import replace, sites
from cordillera.serving.language.speculation import NOTHING, DraftTree, tree_of

_WIDTH = 3  # candidate tokens per place
_EXPANDED = 3  # places per level of a text that a head expands
_LEAST = 0.02  # least probability of a token that is worth verifying
_WORTH = 0.2  # least probability of a place, and least sum per level and text, for another pass of a head
_WAITING = 128  # most pairs that wait for a request for drafts; earlier ones are dropped
_REMEMBERED = 4096  # pairs of a text after which its cache is cleared
_BINS, _PRIOR_WEIGHT = 20, 20.0

_Path = tuple[int, ...]
_Likely = list[tuple[int, float]]  # tokens after a place, with their probabilities


def _packed(weight: Tensor) -> nn.Module:
    """Return a layer with four bits per weight, or the layer itself if its shape or values do not allow it."""
    if takes(*weight.shape) and weight.isfinite().all():
        return PackedLinear(pack_rows(weight, 4))
    return FewRowsLinear(nn.Parameter(weight, requires_grad=False))


class ModelDrafts:
    """A drafter and the model that it drafts for; :meth:`start` begins a text.

    Texts are drafted together. How often drafts are right is counted over all of them, by the probability that the
    drafter gives them. There is memory for the pairs of 32 texts; one more text takes that of a text that is not being
    drafted, which starts with an empty cache when it is drafted again.

    Args:
        draft: Drafter, in the dtype of the model. On CPUs its linear layers are replaced by those for few rows, with
            four bits a weight where that is faster: a draft need not be exact.
        model: Model whose features it reads.
    """

    def __init__(self, draft: DraftModel, model: Llama) -> None:
        self.draft, self.model = draft, model
        self.taps = draft.taps
        weight, count = model.embedding.weight, draft.config.vocabulary
        packs = is_fast() and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        head: nn.Module | None = model.head
        self.head: nn.Module
        if isinstance(head, PackedLinear) and takes(count, head.in_features):
            self.head = head.first(count)
        else:
            rows = (head.weight if isinstance(head, nn.Linear) else weight)[:count]
            self.head = _packed(rows) if packs else FewRowsLinear(nn.Parameter(rows, requires_grad=False))
        for name, layer in sites(draft).items() if packs else ():
            replace(draft, name, _packed(layer.weight))
        use_few_rows(draft)
        draft.few = few_rows_of(draft.layers)
        with torch.inference_mode():  # compile the kernels of a prompt now rather than during a text
            draft.fused(weight.new_zeros(MOST_ROWS + 1, len(self.taps) * weight.shape[1]))
        self._config = model.config.model_copy(update={"layers": draft.config.layers})
        self._most = min(model.config.context, _REMEMBERED)
        capacity = self._most + 2 * MOST_TOKENS
        self._cache = KVCache(self._config, MOST_ROWS, capacity, weight.dtype, weight.device)
        self._owners: list[weakref.ref[ModelDrafter] | None] = [None] * MOST_ROWS  # owner of each cache sequence
        self._lock = threading.Lock()
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

    @torch.inference_mode()
    def propose(
        self, drafters: Sequence[ModelDrafter], most: int, room: int, deepest: Sequence[int]
    ) -> list[DraftTree | Exception]:
        """Return the tree of each text, or what failed; nothing for a text without features.

        Args:
            drafters: Drafters of up to 32 texts.
            most: Largest number of tokens of a tree.
            room: Number of tokens of all trees, beyond which the less likely ones are not asked for.
            deepest: Largest number of levels of each tree.
        """
        found: list[DraftTree | Exception] = [NOTHING] * len(drafters)
        with self._lock:
            asked = [number for number, drafter in enumerate(drafters) if drafter.ready() >= 1]
            if asked:
                self._seat([drafters[number] for number in asked])
                asked.sort(key=lambda number: drafters[number].slot)
                depths = [min(deepest[number], self.draft.config.length) for number in asked]
                draft = self._by_head if self.draft.mask is None else self._by_block
                for number, tree in zip(asked, draft([drafters[n] for n in asked], most, room, depths), strict=True):
                    found[number] = tree
        return found

    def _seat(self, drafters: Sequence[ModelDrafter]) -> None:
        """Give texts a sequence of the cache each."""
        for drafter in drafters:
            if drafter.slot >= 0:
                continue
            owners = [None if owner is None else owner() for owner in self._owners]
            drafter.slot = (
                owners.index(None)
                if None in owners
                else next(slot for slot, owner in enumerate(owners) if owner not in drafters)
            )
            if (other := owners[drafter.slot]) is not None:
                other.slot = -1
            self._owners[drafter.slot] = weakref.ref(drafter)
            self._cache.clear(drafter.slot)

    def _read(self, drafters: Sequence[ModelDrafter], unknown: Sequence[int] | None = None) -> list[Tensor]:
        """Read the pairs of texts that wait, and in a block tokens that are ``unknown``.

        Returns:
            Features of the last pair of each text and of its unknown tokens, ``[1 + unknown, hidden]``.
        """
        taken = [drafter.take() for drafter in drafters]
        keeps = [len(tokens) for tokens, _ in taken]
        features = list(self.draft.fused(torch.cat([tapped for _, tapped in taken])).split(keeps))
        embedded = self._embed([token for tokens, _ in taken for token in tokens])
        if unknown is not None and self.draft.mask is not None:
            parts = list[Tensor]()
            for number, known in enumerate(embedded.split(keeps)):
                parts += [known, self.draft.mask.expand(unknown[number], -1)]
                features[number] = torch.cat([features[number], features[number][-1:].expand(unknown[number], -1)])
            embedded = torch.cat(parts)
        for drafter, own in zip(drafters, features, strict=True):
            if self._cache.lengths[drafter.slot] + len(own) > self._most:
                self._cache.clear(drafter.slot)
        x = self._run(drafters, embedded, features, keeps=keeps)
        return [rows[kept - 1 :] for rows, kept in zip(x.split([len(own) for own in features]), keeps, strict=True)]

    def _run(
        self,
        drafters: Sequence[ModelDrafter],
        embedded: Tensor,
        features: Sequence[Tensor],
        parents: Sequence[list[int]] | None = None,
        keeps: Sequence[int] | None = None,
    ) -> Tensor:
        """Run the drafter on rows that follow what is cached of texts; keep the keys and values of the first ones."""
        added, kept, of_slot = [0] * MOST_ROWS, list(self._cache.lengths), [list[int]() for _ in range(MOST_ROWS)]
        for number, drafter in enumerate(drafters):
            added[drafter.slot] = len(features[number])
            kept[drafter.slot] += 0 if keeps is None else keeps[number]
            of_slot[drafter.slot] = [] if parents is None else parents[number]
        offsets = torch.tensor([0, *accumulate(added)])
        step = self._cache.extend(offsets, None if parents is None else of_slot)
        table = rope_table(self._config, step.positions)
        cores = [step.core(layer) for layer in range(self.draft.config.layers)]
        x: Tensor = self.draft(embedded, torch.cat(list(features)), offsets, table, cores, step.few_rows())
        if keeps is not None:
            step.commit()
            self._cache.keep(kept)
        return x

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        embedding = self.model.embedding
        return embedding(torch.tensor(tokens, device=embedding.weight.device))

    def _likely(self, x: Tensor) -> list[_Likely]:
        """Return the likeliest tokens after each row."""
        shares = self.head(self.draft.norm(x)).float().softmax(-1)
        values, ids = shares.topk(min(_WIDTH, shares.shape[1]), -1)
        return [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]

    def _by_block(
        self, drafters: Sequence[ModelDrafter], most: int, room: int, deepest: Sequence[int]
    ) -> list[DraftTree | Exception]:
        rows = self._read(drafters, [depth - 1 for depth in deepest])
        likely, found = iter(self._likely(torch.cat(rows))), list[DraftTree | Exception]()
        for drafter, depth in zip(drafters, deepest, strict=True):
            levels = list(islice(likely, depth))
            try:
                found.append(self._of_block(drafter, levels, most))
            except Exception as error:
                found.append(error)
        return found

    def _of_block(self, drafter: ModelDrafter, levels: list[_Likely], most: int) -> DraftTree:
        chances: dict[_Path, float] = {}
        order = count()
        following: list[tuple[float, int, _Path]] = [(-1.0, -1, ())]
        while following and len(chances) < most:  # expand the likeliest path first
            chance, _, path = heapq.heappop(following)
            if path:
                chances[path] = -chance
            if len(path) == len(levels):
                continue
            for token, probability in levels[len(path)]:
                own = -chance * self.chance(probability)
                if own >= _LEAST:
                    drafter.note(path, token, probability)
                    heapq.heappush(following, (-own, next(order), (*path, token)))
        return tree_of(chances, most)

    def _by_head(
        self, drafters: Sequence[ModelDrafter], most: int, room: int, deepest: Sequence[int]
    ) -> list[DraftTree | Exception]:
        trees = [_Growing(drafter, x, most) for drafter, x in zip(drafters, self._read(drafters), strict=True)]
        active = trees
        for level in range(1, max(deepest) + 1):
            likely = iter(self._likely(torch.cat([tree.x for tree in active])))
            for tree in active:
                tree.take(list(islice(likely, len(tree.new))))
            # a token is worth going on from if it is among those that the pass has room for
            known = sorted((chance for tree in trees for path, chance in tree.chances.items() if path), reverse=True)
            least = max(_WORTH, known[room - 1] if room <= len(known) else 0.0)
            active = [
                tree
                for tree, depth in zip(trees, deepest, strict=True)
                if tree in active and level < depth and tree.go_on(level, least)
            ]
            reached = sum(tree.chances[path] for tree in active for path in tree.new)
            if not active or reached < _WORTH * len(trees):
                break
            embedded = self._embed([path[-1] for tree in active for path, _ in tree.places])
            parents = [[parent for _, parent in tree.places] for tree in active]
            x = self._run([tree.drafter for tree in active], embedded, [tree.before for tree in active], parents)
            for tree, rows in zip(active, x.split([len(tree.places) for tree in active]), strict=True):
                tree.x = rows[-len(tree.new) :]
        return [tree.found() for tree in trees]


class _Growing:
    """Tree of a text that a head drafts level by level.

    Attributes:
        chances: Chance of each drafted path.
        new: Paths whose next tokens are to be drafted, all of one level.
        x: Features after them, ``[n, hidden]``.
        places: Tokens that the head goes on from: the path to each, and the place of the one before it.
        before: Features before these, ``[places, hidden]``.
    """

    def __init__(self, drafter: ModelDrafter, x: Tensor, most: int) -> None:
        self.drafter, self.x, self._most = drafter, x, most
        self.chances: dict[_Path, float] = {(): 1.0}
        self.new: list[_Path] = [()]
        self.places: list[tuple[_Path, int]] = []
        self.before = x[:0]
        self._error: Exception | None = None

    def take(self, likely: list[_Likely]) -> None:
        """Take note of the likeliest tokens after ``new``."""
        try:
            for path, own in zip(self.new, likely, strict=True):
                for token, probability in own:
                    chance = self.chances[path] * self.drafter.together.chance(probability)
                    if chance >= _LEAST:
                        self.drafter.note(path, token, probability)
                        self.chances[(*path, token)] = chance
        except Exception as error:
            self._error = error

    def go_on(self, level: int, least: float) -> bool:
        """Choose the paths of a level to go on from, with at least a chance of ``least``; return whether there are."""
        if self._error is not None:
            return False
        best = [path for path, chance in self.chances.items() if len(path) == level and chance >= least]
        best = sorted(best, key=lambda path: -self.chances[path])[:_EXPANDED]
        if not best or len(self.places) + len(best) > MOST_TOKENS:
            return False
        of_new = {path: row for row, path in enumerate(self.new)}
        known = {path: place for place, (path, _) in enumerate(self.places)}
        self.before = torch.cat([self.before, self.x[[of_new[path[:-1]] for path in best]]])
        self.places += [(path, known.get(path[:-1], -1)) for path in best]
        self.new = best
        return True

    def found(self) -> DraftTree | Exception:
        """Return the tree, or what failed."""
        if self._error is not None:
            return self._error
        return tree_of({path: chance for path, chance in self.chances.items() if path}, self._most)


class ModelDrafter:
    """Drafter of one text; see :class:`ModelDrafts`.

    The drafter's keys and values of pairs that the text holds stay; those of drafted ones are dropped. Pairs are read
    when drafts are asked for; of a long prompt the last ones only. Pairs without computed features, such as those
    of a prompt's shared prefix, are left out.

    Attributes:
        together: Drafter shared by this text and others.
        slot: Sequence of its cache that holds the text's pairs; -1 if there is none.
    """

    def __init__(self, drafts: ModelDrafts) -> None:
        self.together, self.slot = drafts, -1
        self._tokens: list[int] = []
        self._next = 0  # first unread pair
        self._tapped: list[Tensor] = []  # outputs of the tapped blocks from that token on
        self._count = 0  # number of these tokens
        self._drafted: dict[_Path, dict[int, float]] = {}  # probabilities of drafted tokens, by path

    def add(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the text."""
        path: _Path = ()
        for token in tokens:
            for drafted, probability in self._drafted.get(path, {}).items():
                self.together.count(probability, drafted == token)
            path = (*path, token)
        self._drafted = {}
        self._tokens += tokens

    def note(self, path: _Path, token: int, probability: float) -> None:
        """Take note of a drafted token, to learn whether it was right."""
        self._drafted.setdefault(path, {})[token] = probability

    def see(self, position: int, features: Tensor) -> None:
        """Take note of the features of tokens of the text, ``[n, taps x hidden]``; the first is at ``position``."""
        if position != self._next + self._count:
            self._next, self._tapped, self._count = position, [], 0
        self._tapped.append(features)
        self._count += len(features)
        if self._count > 2 * _WAITING:  # pairs of a prompt, or of a text without requests for drafts
            self._tapped = [torch.cat(self._tapped)[-_WAITING:].clone()]
            self._next, self._count = self._next + self._count - _WAITING, _WAITING

    def ready(self) -> int:
        """Return the number of pairs that can be read."""
        return min(self._count, len(self._tokens) - 1 - self._next)

    def take(self) -> tuple[list[int], Tensor]:
        """Return the tokens of the pairs that can be read and the outputs of tapped blocks, and go on after them."""
        ready, tapped = self.ready(), torch.cat(self._tapped)
        tokens = self._tokens[self._next + 1 : self._next + 1 + ready]
        self._next, self._tapped, self._count = self._next + ready, [tapped[ready:]], self._count - ready
        return tokens, tapped[:ready]

    def propose(self, most: int, deepest: int) -> DraftTree:
        """Return a tree of up to ``most`` tokens and up to ``deepest`` levels; nothing without features."""
        (found,) = self.together.propose([self], most, most, [deepest])
        if isinstance(found, Exception):
            raise found
        return found
