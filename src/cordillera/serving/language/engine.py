"""An engine that continues many texts at a time: requests come and go while others are written.

Each step reads some of the prompts that wait, and then takes one pass over the texts that are being written, with
drafts. Prompts are read one by one, in parts that depend on the prompt alone, so that a text does not depend on those
beside it. When memory runs out, the text that came last waits outside until there is some again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
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
from cordillera.serving.language.prefixes import PART, Prefix, Prefixes, next_part
from cordillera.serving.language.sampler import Sampling, TokenChance, draw_noise, penalized, sample, token_chances
from cordillera.serving.language.speculation import (
    NOTHING,
    DraftTree,
    Speculation,
    TextDrafters,
    choose,
    paths,
)

TOGETHER = 16
"""Texts that are written at a time where nothing else is said: as many tokens of a pass are left for drafts."""

Finish = Literal["stop", "length", "error"]
_FORCED = 0.95  # assumed acceptance of drafted tokens where a form allows only one text


class Generated(NamedTuple):
    """One new token.

    Attributes:
        sequence: Number of the request that the token continues.
        token: Id of the token; -1 if the text failed.
        finish: Reason why the text ends here: ``stop`` (a stop token), ``length``, or ``error``; None while it
            continues.
        forward: Number of the pass, of those that gave tokens to this text, from 0.
        chance: How likely the token was, if the request asks for that.
        error: Error that ended the text, if it failed.
    """

    sequence: int
    token: int
    finish: Finish | None
    forward: int
    chance: TokenChance | None = None
    error: Exception | None = None


@dataclass
class EngineCounts:
    """Numbers since an engine was made.

    Attributes:
        passes: Passes over texts that are being written.
        prompt_tokens: Tokens of prompts that began to be continued.
        shared_tokens: Tokens of these that were not read again.
        tokens: Generated tokens.
        drafted: Drafted tokens that were checked.
        accepted: Drafted tokens that were right.
        set_aside: Times that a text had to wait outside of the cache.
    """

    passes: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    set_aside: int = 0


@dataclass(eq=False)
class _Text:
    """A request and its state."""

    number: int
    prompt: list[int]
    left: int
    stop: frozenset[int]
    sampling: Sampling
    guide: Guide | None = None
    logprobs: int | None = None
    drafters: TextDrafters | None = None
    slot: int = -1  # slot of the cache; -1 while it waits
    unread: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    aside: tuple[Tensor, int] | None = None  # keys and values of a preempted text
    forwards: int = 0


class _New(NamedTuple):
    """Tokens that a pass gave to a text, how likely they were, or why there are none."""

    tokens: list[int]
    chances: list[TokenChance] | None = None
    error: Exception | None = None


class Engine:
    """Texts that a model continues together, each as if it were alone.

    Args:
        model: The model.
        texts: Most texts that are written at a time, at most 32; others wait, and are taken in their order.
        capacity: Most tokens of a text; None for the model's context.
        room: Memory for keys and values, in tokens; None for ``texts`` times the capacity. CPUs use memory once it is
            needed. Keys and values of prompts stay, for prompts that begin alike, until their room is needed.
        chunk: Number of tokens of prompts after which a step reads no further part of one.
        speculation: How tokens are drafted; None for one token of a text a pass. A drafter that fails is not asked
            again, which is said in a warning.
        vocabulary: Number of drawable ids, which are 0 to ``vocabulary - 1``, for vocabularies larger than their
            tokenizer. None for all.

    Attributes:
        counts: Numbers since the engine was made.

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
        chunk: int = PART,
        speculation: Speculation | None = None,
        vocabulary: int | None = None,
    ) -> None:
        if not 1 <= texts <= MOST_ROWS:
            raise DataError(f"{texts} is not from 1 to {MOST_ROWS}", where="texts")
        weight = model.embedding.weight
        self.model, self.chunk, self.speculation = model, chunk, speculation
        self.vocabulary = vocabulary or model.config.vocabulary
        self.capacity = min(capacity or model.config.context, model.config.context)
        self.counts = EngineCounts()
        drafts = 0 if speculation is None else MOST_TOKENS
        self._cache = KVCache(model.config, texts, self.capacity + drafts, weight.dtype, weight.device, room)
        self._pages = self._cache.free_pages
        self._prefixes = Prefixes(self._cache)
        self._slots: list[_Text | None] = [None] * texts
        self._reading: _Text | None = None  # text whose prompt is being read
        self._waiting: deque[_Text] = deque()
        self._count = 0
        self._level = 0  # drafters asked in the current pass
        self._ready: list[Generated] = []  # new tokens that no step has returned yet

    @property
    def waiting(self) -> int:
        """Number of requests that are not yet begun, or wait outside of the cache."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of texts that are being read or written."""
        return sum(text is not None for text in self._slots)

    @property
    def pages_in_use(self) -> int:
        """Number of pages of keys and values that texts hold; 0 when nothing runs."""
        return len({page for table in self._cache.tables for page in table})

    @property
    def pages(self) -> int:
        """Number of pages of keys and values that there are."""
        return self._pages

    def add(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
        guide: Guide | None = None,
        logprobs: int | None = None,
    ) -> int:
        """Add a request and return its number, from 0 in the order of calls.

        Args:
            prompt: Token ids.
            max_new_tokens: Largest number of new tokens; fewer if the capacity ends.
            stop: Ids of tokens that end the text.
            sampling: Settings of sampling; None for the defaults of
                :class:`~cordillera.serving.language.sampler.Sampling`.
            guide: New guide of the form that the text keeps to; None for any text. Its end is one of ``stop``.
            logprobs: Number of most likely tokens whose log probabilities each new token holds, beside its own; None
                for no log probabilities.

        Raises:
            DataError: If the prompt is empty, as long as the capacity or longer, or holds an id that is not a token;
                ``max_new_tokens`` is below 1; or there is not enough room even if nothing else runs.
        """
        check_prompt(self.model.config, prompt, max_new_tokens, f"request {self._count}", self.capacity)
        left = min(max_new_tokens, self.capacity - len(prompt))
        pages = self._cache.pages_for(len(prompt) + left - 1)  # the last token is never cached
        if pages > self._pages:
            raise DataError(
                f"needs {pages} pages of keys and values, there are {self._pages}",
                where=f"request {self._count}",
                remedy="ask for fewer tokens, or give the engine more room",
            )
        text = _Text(self._count, list(prompt), left, frozenset(stop), sampling or Sampling(), guide, logprobs)
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
        """Read some of the prompts that wait, then take a pass over the texts that are being written.

        Returns:
            New tokens, in the order of passes and texts; nothing if there is nothing to do. A text that fails, such as
            by logits that are not finite, ends with an error; if a whole pass fails, each of its texts does.
        """
        budget = self.chunk
        while budget > 0 and (text := self._reading or self._next()) is not None:
            budget -= self._read(text)
        if going := self._going():
            began = time.perf_counter()
            trees = dict(zip((text.number for text in going), self._propose(going), strict=True))
            if going := self._with_room(trees):
                drafted, tokens = time.perf_counter(), self.counts.tokens
                self._advance(going, [trees[text.number] for text in going])
                self.counts.passes += 1
                if self.speculation is not None and self.speculation.levels is not None:
                    rows = sum(1 + len(trees[text.number].tokens) for text in going)
                    gained = self.counts.tokens - tokens
                    seconds = (drafted - began, time.perf_counter() - drafted)
                    self.speculation.levels.note(len(going), self._level, rows, gained, *seconds)
        found, self._ready = self._ready, []
        return found

    def _going(self) -> list[_Text]:
        return [text for text in self._slots if text is not None and text is not self._reading]

    def _next(self) -> _Text | None:
        """Give waiting texts slots and pages, until there are none or a text is to be read; return that one."""
        while self._waiting and None in self._slots:
            text, slot = self._waiting[0], self._slots.index(None)
            if text.aside is not None:
                content, length = text.aside
                if not self._may_enter(text, lambda: content.shape[2]):  # noqa: B023 -- called at once
                    return None
                self._cache.load(slot, content, length)
            else:
                prefix = self._prefixes.find(text.prompt)
                self._cache.share(slot, prefix.pages, prefix.length)  # before other prefixes are evicted
                unread = len(text.prompt) - prefix.length
                if not self._may_enter(text, lambda: self._cache.pages_needed(slot, unread)):  # noqa: B023
                    self._cache.clear(slot)
                    return None
            self._slots[slot], text.slot = self._waiting.popleft(), slot
            if text.aside is None:
                self._begin(text, prefix)
            text.aside = None
            if not text.written and text.unread:
                self._reading = text
                return text
        return None

    def _may_enter(self, text: _Text, pages: Callable[[], int]) -> bool:
        """Return whether a text finds the pages that it begins with, and one to grow by if it shares the cache."""
        now = len(text.prompt) + len(text.written)
        grows = self.running > 0 and self._cache.pages_for(now + text.left) > self._cache.pages_for(now)
        return self._has_room(lambda: pages() + grows)

    def _begin(self, text: _Text, prefix: Prefix) -> None:
        text.unread = text.prompt[prefix.length :]
        self.counts.prompt_tokens += len(text.prompt)
        self.counts.shared_tokens += prefix.length
        if self.speculation is not None:
            text.drafters = TextDrafters(f"request {text.number}", self.speculation.drafters, text.prompt)
        if prefix.logits is not None:
            with torch.inference_mode():
                self._book(text, self._follow(text, NOTHING, prefix.logits, prefix.length)[0])

    def _read(self, text: _Text) -> int:
        """Read the next part of a prompt, if there is room; return its number of tokens."""
        count = next_part(self.model, len(text.unread))
        while not self._has_room(lambda: self._cache.pages_needed(text.slot, count)):
            if self._set_aside() is text:
                return count
        if count == len(text.unread):
            self._reading = None
            self._advance([text], [NOTHING])
            return count
        try:
            tokens = torch.tensor(text.unread[:count], device=self.model.embedding.weight.device)
            lengths = [count if slot == text.slot else 0 for slot in range(len(self._slots))]
            before, taps = self._cache.lengths[text.slot], self._taps()
            with torch.inference_mode():
                self.model.hidden(tokens, offsets_from_lengths(torch.tensor(lengths)), cache=self._cache, taps=taps)
            if text.drafters is not None and taps is not None:
                text.drafters.see(before, taps, slice(None))
        except Exception as error:
            self._fail(text, error)
        else:
            text.unread = text.unread[count:]
        return count

    def _has_room(self, needed: Callable[[], int]) -> bool:
        """Forget prompts until enough pages are free; return whether they are."""
        while self._cache.free_pages < needed():
            if not self._prefixes.forget():
                return False
        return True

    def _with_room(self, trees: dict[int, DraftTree]) -> list[_Text]:
        """Return the texts of the next pass; where room lacks, first drafts are dropped, then texts set aside."""

        def needed() -> int:
            new = {text.slot: 1 + len(trees[text.number].tokens) for text in self._going()}
            return sum(self._cache.pages_needed(slot, count) for slot, count in new.items())

        if not self._has_room(needed):
            trees.update(dict.fromkeys(trees, NOTHING))
        while not self._has_room(needed):
            self._set_aside()
        return self._going()

    def _set_aside(self) -> _Text:
        """Take the text that came last out of the cache, to go on when there is room; return it."""
        text = max((text for text in self._slots if text is not None), key=lambda text: text.number)
        text.aside = self._cache.unload(text.slot)
        self._leave(text)
        self._waiting.appendleft(text)
        self.counts.set_aside += 1
        return text

    def _leave(self, text: _Text) -> None:
        self._slots[text.slot] = None
        text.slot = -1
        if self._reading is text:
            self._reading = None

    def _end(self, text: _Text) -> None:
        self._cache.clear(text.slot)
        self._leave(text)

    def _fail(self, text: _Text, error: Exception) -> None:
        self._ready.append(Generated(text.number, -1, "error", text.forwards, error=error))
        self._end(text)

    def _propose(self, going: list[_Text]) -> list[DraftTree]:
        """Return a tree for each text; texts whose form fails end."""
        trees = [NOTHING] * len(going)
        if self.speculation is None:
            return trees
        room = len(self.speculation.costs) - len(going)
        most = min(MOST_TOKENS - 1, room)
        levels = self.speculation.levels
        self._level = len(self.speculation.drafters) if levels is None else levels.choose(len(going))
        asked = list[tuple[int, TextDrafters]]()
        for number, text in enumerate(going):
            deepest = text.left - 1  # the pass itself adds one token
            if most < 1 or deepest < 1:
                continue
            with self._failing(text):
                forced = [] if text.guide is None else text.guide.forced(min(most, deepest))
                if forced:
                    chances = [_FORCED**level for level in range(1, len(forced) + 1)]
                    trees[number] = DraftTree(forced, list(range(-1, len(forced) - 1)), chances)
                elif text.drafters is not None:
                    asked.append((number, text.drafters))
        depths = [going[number].left - 1 for number, _ in asked]
        drafters = [one for _, one in asked]
        drafted = TextDrafters.propose(drafters, self._level, self.vocabulary, most, room, depths)
        for (number, _), tree in zip(asked, drafted, strict=True):
            guide = going[number].guide
            with self._failing(going[number]):
                trees[number] = tree if guide is None else guide.prune(tree)
        return choose(trees, self.speculation.costs) if any(tree.tokens for tree in trees) else trees

    @contextmanager
    def _failing(self, text: _Text) -> Iterator[None]:
        """End a text with the error that is raised in the block."""
        try:
            yield
        except Exception as error:
            self._fail(text, error)

    def _advance(self, texts: list[_Text], trees: list[DraftTree]) -> None:
        """Take a pass over the unread tokens of texts and their trees."""
        try:
            new = self._pass(texts, trees)
        except Exception as error:
            new = [_New([], error=error) for _ in texts]
        except BaseException:
            for text in texts:
                self._end(text)
            raise
        for text, own in zip(texts, new, strict=True):
            self._book(text, own)

    def _book(self, text: _Text, new: _New) -> None:
        """Record the tokens that a pass gave to a text."""
        if new.error is not None:
            self._fail(text, new.error)
            return
        for token, chance in zip(new.tokens, new.chances or repeat(None, len(new.tokens)), strict=True):
            text.left -= 1
            self.counts.tokens += 1
            finish: Finish | None = "stop" if token in text.stop else None if text.left else "length"
            self._ready.append(Generated(text.number, token, finish, text.forwards, chance))
            if finish:
                self._end(text)
                return
        text.written += new.tokens
        text.unread = new.tokens[-1:]
        text.forwards += 1
        if text.drafters is not None:
            text.drafters.add(new.tokens)
        if text.guide is not None:
            with self._failing(text):
                text.guide.add(new.tokens)

    @torch.inference_mode()
    def _pass(self, texts: list[_Text], trees: list[DraftTree]) -> list[_New]:
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
        taps = self._taps()
        hidden = self.model.hidden(tokens, offsets, cache=view, taps=taps)
        logits = self.model.logits(hidden[torch.tensor(asked, device=device)])[:, : self.vocabulary]
        found: dict[int, _New] = {}
        kept: list[list[int]] = [[] for _ in before]
        start = 0
        for slot in sorted(of_slot):
            text, tree = of_slot[slot]
            size, own = len(text.unread), logits[start : start + 1 + len(tree.tokens)]
            start += len(own)
            found[slot], right = self._follow(text, tree, own, before[slot] + size)
            kept[slot] = [*range(size), *(size + place for place in right)]
            if text.drafters is not None and taps is not None:
                begin = int(offsets[slot])
                text.drafters.see(before[slot], taps, [begin + place for place in kept[slot]])
            self.counts.drafted += len(tree.tokens)
            self.counts.accepted += len(right)
            if not text.written and found[slot].error is None:
                self._prefixes.add(text.prompt, cache.tables[slot], own)
        if view is not cache:
            cache.keep(before, kept)
        return [found[text.slot] for text in texts]

    def _taps(self) -> dict[int, Tensor] | None:
        """Return where the model puts the features that drafters read, if they read any."""
        if self.speculation is None or not self.speculation.taps:
            return None
        return dict.fromkeys(self.speculation.taps, self._cache.data.new_empty(0))

    def _follow(self, text: _Text, tree: DraftTree, logits: Tensor, position: int) -> tuple[_New, list[int]]:
        """Draw what follows a text, and where it is a drafted token, what follows that; return the right drafts too.

        Args:
            logits: After the text and each token of the tree, ``[1 + n, vocabulary]``.
            position: Number of tokens before the one that follows the text.
        """
        try:
            after = _draw(logits, text, tree, position)
            children = {pair: n for n, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
            place, tokens, right = -1, [after[0]], list[int]()
            while (place := children.get((place, tokens[-1]), -2)) >= 0:
                right.append(place)
                tokens.append(after[1 + place])
            if text.logprobs is None:
                return _New(tokens), right
            rows = logits[[0, *(1 + place for place in right)]]
            return _New(tokens, token_chances(rows, tokens, text.logprobs)), right
        except Exception as error:
            return _New([], error=error), []


def _draw(logits: Tensor, text: _Text, tree: DraftTree, position: int) -> list[int]:
    """Draw what follows a text and each token of its tree; see :meth:`Engine._follow`."""
    sampling, noise = text.sampling, None
    logits = penalized(logits, sampling, [text.written + path for path in [[], *paths(tree)]], text.prompt)
    if text.guide is not None:
        logits = logits.masked_fill(~text.guide.allowed(tree).to(logits.device), -torch.inf)
    if sampling.temperature > 0:
        levels = [0, *_levels(tree)]
        drawn = [
            draw_noise(sampling.seed, position + level, logits.shape[1], logits.device)
            for level in range(max(levels) + 1)
        ]
        noise = torch.stack([drawn[level] for level in levels])
    return sample(logits, sampling, noise).tolist()


def _parents(size: int, tree: DraftTree) -> list[int]:
    """Parents of a row of ``size`` tokens and of the tree after it, as a cache takes them."""
    return [*range(-1, size - 1), *(size + parent if parent >= 0 else size - 1 for parent in tree.parents)]


def _levels(tree: DraftTree) -> list[int]:
    """Level of each token of a tree, from 1."""
    found: list[int] = []
    for parent in tree.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


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
            f"has {len(prompt):,} tokens; with at least one more it does not fit the context of {capacity:,}",
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
