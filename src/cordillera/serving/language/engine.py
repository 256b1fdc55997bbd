"""An engine that continues many texts at a time: requests come and go while others are written.

Each step reads prompts that wait, up to a number of tokens, and then takes one pass over the texts that are being
written, with drafts. Texts of prompts are read one by one, so that a text does not depend on those beside it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.attention.decoding import MOST_TOKENS
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Cache, Llama, LlamaConfig
from cordillera.serving.language.guided import Guide
from cordillera.serving.language.sampler import Sampling, draw_noise, sample
from cordillera.serving.language.speculation import (
    NOTHING,
    Drafter,
    DraftTree,
    Speculation,
    checked,
    choose,
)

TOGETHER = 16
"""Texts that are written at a time where nothing else is said: as many tokens of a pass are left for drafts."""

Finish = Literal["stop", "length"]
_FORCED = 0.95  # chance that the model spells what a form allows in one way only with the drafted tokens


class Generated(NamedTuple):
    """One new token.

    Attributes:
        sequence: Number of the request that the token continues.
        token: Id of the token.
        finish: Reason why the text ends here: ``stop`` (a stop token) or ``length``; None while it continues.
        forward: Number of the pass, of those that gave tokens to this text, from 0.
    """

    sequence: int
    token: int
    finish: Finish | None
    forward: int


@dataclass
class _Text:
    """A request, and what has become of it."""

    number: int
    unread: list[int]
    left: int
    stop: frozenset[int]
    sampling: Sampling
    guide: Guide | None = None
    drafter: Drafter | None = None
    slot: int = -1  # of the cache; -1 while it waits
    pages: int = 0
    forwards: int = 0


class Engine:
    """Texts that a model continues together, each as if it were alone.

    Args:
        model: The model.
        texts: Most texts that are written at a time, at most 32; others wait, and are taken in their order.
        capacity: Most tokens of a text; None for the model's context.
        room: Memory for keys and values, in tokens. A text takes as many as its prompt and its limit have together, and
            waits until there are; None for ``texts`` times the capacity. CPUs use memory once it is needed.
        chunk: Number of tokens of prompts after which a step reads no further prompt.
        speculation: How tokens are drafted; None for one token of a text a pass. A drafter that fails is not asked
            again, which is said in a warning.
        vocabulary: Number of drawable ids, which are 0 to ``vocabulary - 1``, for vocabularies larger than their
            tokenizer. None for all.

    Raises:
        DataError: If ``texts`` is not from 1 to 32.
    """

    def __init__(
        self,
        model: Llama,
        *,
        texts: int = TOGETHER,
        capacity: int | None = None,
        room: int | None = None,
        chunk: int = 512,
        speculation: Speculation | None = None,
        vocabulary: int | None = None,
    ) -> None:
        if not 1 <= texts <= MOST_ROWS:
            raise DataError(f"{texts} is not from 1 to {MOST_ROWS}", where="texts")
        weight = model.embedding.weight
        self.model, self.chunk, self.speculation = model, chunk, speculation
        self.vocabulary = vocabulary or model.config.vocabulary
        self.capacity = min(capacity or model.config.context, model.config.context)
        self._drafts = 0 if speculation is None else MOST_TOKENS  # tokens of a text that are drafted and not its own
        self._cache = KVCache(model.config, texts, self.capacity + self._drafts, weight.dtype, weight.device, room)
        self._pages = self._cache.free_pages
        self._slots: list[_Text | None] = [None] * texts
        self._waiting: deque[_Text] = deque()
        self._count = 0
        self._ready: list[Generated] = []  # new tokens that no step has returned yet

    @property
    def waiting(self) -> int:
        """Number of requests whose prompts are not yet read."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of texts that are being written."""
        return sum(text is not None for text in self._slots)

    @property
    def pages_in_use(self) -> int:
        """Number of pages of keys and values that texts hold; 0 when nothing runs."""
        return self._pages - self._cache.free_pages

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
        guide: Guide | None = None,
    ) -> int:
        """Add a request and return its number, from 0 in the order of calls.

        Args:
            prompt: Token ids.
            max_new_tokens: Largest number of new tokens; fewer if the capacity ends.
            stop: Ids of tokens that end the text.
            sampling: Settings of sampling; None for the defaults of
                :class:`~cordillera.serving.language.sampler.Sampling`.
            guide: New guide of the form that the text keeps to; None for any text. Its end is one of ``stop``.

        Raises:
            DataError: If the prompt is empty, as long as the capacity or longer, or holds an id that is not a token;
                ``max_new_tokens`` is below 1; or there is not enough room even if nothing else runs.
        """
        check_prompt(self.model.config, prompt, max_new_tokens, f"request {self._count}", self.capacity)
        left = min(max_new_tokens, self.capacity - len(prompt))
        pages = self._cache.pages_for(len(prompt) + left - 1 + self._drafts)  # the last token is never read
        if pages > self._pages:
            raise DataError(
                f"needs {pages} pages of keys and values, there are {self._pages}",
                where=f"request {self._count}",
                remedy="ask for fewer tokens, or give the engine more room",
            )
        text = _Text(self._count, list(prompt), left, frozenset(stop), sampling or Sampling(), guide, pages=pages)
        self._count += 1
        self._waiting.append(text)
        return text.number

    def cancel(self, number: int) -> bool:
        """End a request and free its memory; return whether it was waiting or running."""
        for text in self._waiting:
            if text.number == number:
                self._waiting.remove(text)
                return True
        for running in self._slots:
            if running is not None and running.number == number:
                self._end(running)
                return True
        return False

    def step(self) -> list[Generated]:
        """Read prompts that wait, then take a pass over the texts that are being written.

        Returns:
            New tokens, in the order of passes and texts; nothing if there is nothing to do.

        Raises:
            DataError: If logits are not finite. The texts of that pass are ended without a further token; what earlier
                passes of the step gave is returned by the next one.
        """
        budget = self.chunk
        while budget > 0 and (text := self._next()) is not None:
            budget -= len(text.unread)
            self._advance([text], [NOTHING])
        if going := [text for text in self._slots if text is not None]:
            self._advance(going, self._propose(going))
        found, self._ready = self._ready, []
        return found

    def _next(self) -> _Text | None:
        """Give the first of the waiting texts a slot, if there are one and enough pages."""
        if not self._waiting or None not in self._slots:
            return None
        taken = sum(text.pages for text in self._slots if text is not None)
        if taken + self._waiting[0].pages > self._pages:
            return None
        text = self._waiting.popleft()
        text.slot = self._slots.index(None)
        self._slots[text.slot] = text
        if self.speculation is not None:
            with _dropping(text):
                text.drafter = self.speculation.drafter()
                text.drafter.add(text.unread)
        return text

    def _end(self, text: _Text) -> None:
        self._slots[text.slot] = None
        self._cache.clear(text.slot)

    def _propose(self, going: list[_Text]) -> list[DraftTree]:
        """Return a tree for each text."""
        trees = [NOTHING] * len(going)
        if self.speculation is None:
            return trees
        most = min(MOST_TOKENS - 1, len(self.speculation.costs) - len(going))
        for number, text in enumerate(going):
            deepest = text.left - 1  # the pass itself gives one more
            if most < 1 or deepest < 1:
                continue
            if text.guide is not None and (forced := text.guide.forced(min(most, deepest))):
                trees[number] = DraftTree(
                    forced, list(range(-1, len(forced) - 1)), [_FORCED**level for level in range(1, len(forced) + 1)]
                )
            elif text.drafter is not None:
                with _dropping(text):
                    tree = checked(text.drafter.propose(most, deepest), self.vocabulary, most, deepest)
                    trees[number] = tree if text.guide is None else text.guide.prune(tree)
        return choose(trees, self.speculation.costs) if any(tree.tokens for tree in trees) else trees

    def _advance(self, texts: list[_Text], trees: list[DraftTree]) -> None:
        """Take a pass over the unread tokens of texts and their trees."""
        try:
            new = self._pass(texts, trees)
        except BaseException:
            for text in texts:
                self._end(text)
            raise
        for text, tokens in zip(texts, new, strict=True):
            for token in tokens:
                text.left -= 1
                finish: Finish | None = "stop" if token in text.stop else None if text.left else "length"
                self._ready.append(Generated(text.number, token, finish, text.forwards))
                if finish:
                    self._end(text)
                    break
            else:
                text.unread = tokens[-1:]
                if text.guide is not None:
                    text.guide.add(tokens)
                if text.drafter is not None:
                    with _dropping(text):
                        text.drafter.add(tokens)
            text.forwards += 1

    @torch.inference_mode()
    def _pass(self, texts: list[_Text], trees: list[DraftTree]) -> list[list[int]]:
        """Return the next tokens of texts, after the model has read what is unread of them and then the trees.

        The cache then holds the drafted tokens that were right, and not the last of the new tokens.
        """
        cache, device = self._cache, self.model.embedding.weight.device
        before = list(cache.lengths)
        of_slot = {text.slot: (text, tree) for text, tree in zip(texts, trees, strict=True)}
        rows: list[list[int]] = []
        parents: list[list[int]] = []
        asked: list[int] = []
        start = 0
        for slot in range(len(before)):
            text, tree = of_slot.get(slot, (None, NOTHING))
            unread = [] if text is None else text.unread
            rows.append(unread + tree.tokens)
            parents.append(_parents(len(unread), tree))
            if text is not None:  # the last token and the drafts after it
                asked += range(start + len(unread) - 1, start + len(rows[-1]))
            start += len(rows[-1])
        view: Cache = cache.branching(parents) if any(tree.tokens for tree in trees) else cache
        tokens = torch.tensor([token for row in rows for token in row], device=device)
        offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows]))
        hidden = self.model.hidden(tokens, offsets, cache=view)
        logits = self.model.logits(hidden[torch.tensor(asked, device=device)])[:, : self.vocabulary]
        drawn = iter(_draw(logits, [of_slot[slot] for slot in sorted(of_slot)], before))
        found: dict[int, list[int]] = {}
        kept: list[list[int]] = [[] for _ in before]
        for slot in sorted(of_slot):
            text, tree = of_slot[slot]
            after = [next(drawn) for _ in range(1 + len(tree.tokens))]  # what follows the last token and each draft
            pairs = zip(tree.parents, tree.tokens, strict=True)
            children = {pair: place for place, pair in enumerate(pairs)}
            place, found[slot] = -1, [after[0]]
            kept[slot] = list(range(len(text.unread)))
            while (place := children.get((place, found[slot][-1]), -2)) >= 0:
                kept[slot].append(len(text.unread) + place)
                found[slot].append(after[1 + place])
        if view is not cache:
            cache.keep(before, kept)
        return [found[text.slot] for text in texts]


def _draw(logits: Tensor, texts: list[tuple[_Text, DraftTree]], lengths: list[int]) -> list[int]:
    """Draw what follows the last token of each text and each of its drafts, by ``logits [n, vocabulary]`` of these."""
    found: list[int] = []
    start = 0
    for text, tree in texts:
        rows = logits[start : start + 1 + len(tree.tokens)]
        start += len(rows)
        noise = None
        if text.guide is not None:
            rows = rows.masked_fill(~text.guide.allowed(tree).to(rows.device), -torch.inf)
        if text.sampling.temperature > 0:
            first = lengths[text.slot] + len(text.unread)  # position of the token that follows
            levels = [0, *_levels(tree)]
            drawn = [
                draw_noise(text.sampling.seed, first + level, logits.shape[1], logits.device)
                for level in range(max(levels) + 1)
            ]
            noise = torch.stack([drawn[level] for level in levels])
        found += sample(rows, text.sampling, noise).tolist()
    return found


def _parents(size: int, tree: DraftTree) -> list[int]:
    """Parents of a row of ``size`` tokens and of the tree after it, as a cache takes them."""
    return [*range(-1, size - 1), *(size + parent if parent >= 0 else size - 1 for parent in tree.parents)]


def _levels(tree: DraftTree) -> list[int]:
    """Level of each token of a tree, from 1."""
    found: list[int] = []
    for parent in tree.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


@contextmanager
def _dropping(text: _Text) -> Iterator[None]:
    """Drop the drafter of a text if it fails, whatever it raises: the text does not need it."""
    try:
        yield
    except Exception as error:
        text.drafter = None
        warnings.warn(f"request {text.number} goes on without drafts, as its drafter failed: {error}", stacklevel=4)


def check_prompt(
    config: LlamaConfig, prompt: Sequence[int], max_new_tokens: int, where: str, capacity: int | None = None
) -> None:
    """Check that a model of ``config`` can continue ``prompt``.

    Args:
        where: Name of the prompt in errors.
        capacity: Most tokens of the text; None for the context.

    Raises:
        DataError: If the prompt is empty, too long or holds an id that is not a token; ``max_new_tokens`` is below 1.
    """
    capacity = config.context if capacity is None else capacity
    if max_new_tokens < 1:
        raise DataError(f"{max_new_tokens} is not a number of tokens", where="max_new_tokens", remedy="ask for some")
    if not prompt:
        raise DataError("holds no token", where=where, remedy="begin it with the begin-of-text token")
    if len(prompt) >= capacity:
        raise DataError(
            f"has {len(prompt)} tokens; with at least one more it does not fit the context of {capacity}",
            where=where,
            remedy="shorten it, or use a model with a longer context",
        )
    for place, token in enumerate(prompt):
        if not 0 <= token < config.vocabulary:
            raise DataError(
                f"token {place} is {token}, not an id from 0 to {config.vocabulary - 1}",
                where=where,
                remedy="use the tokenizer that belongs to the model",
            )
