"""Drafts of the next tokens, which the model checks all in one pass (Leviathan et al. 2023; Miao et al. 2024).

A draft is a tree: each of its tokens follows the last token of the text or another drafted token. The model computes
which token it would generate after each of them; where that is one that was drafted, the next is known too. The text is
the one that the model writes without drafts, token for token: drafts only change how many passes it takes.
"""

from __future__ import annotations

import heapq
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cordillera.kernels.attention.decoding import MOST_TOKENS
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama


class DraftTree(NamedTuple):
    """Drafted tokens, parents before children.

    Attributes:
        tokens: Ids; siblings differ.
        parents: Place of the token that each one follows; -1 for the last token of the text.
        chances: Probability, by the drafter's estimate, that the model generates the token and those before it; at most
            that of its parent.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]


NOTHING = DraftTree([], [], [])
"""The tree without a token."""


class Drafter(Protocol):
    """What drafts the continuation of one text."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the text; the first call passes the prompt."""

    def propose(self, most: int, deepest: int) -> DraftTree:
        """Return a tree of up to ``most`` tokens and up to ``deepest`` levels."""


@runtime_checkable
class ReadsFeatures(Protocol):
    """A drafter that reads what the model computes for the tokens of the text."""

    def see(self, position: int, features: Tensor) -> None:
        """Take note of the features of tokens of the text, ``[n, taps x hidden]``; the first is at ``position``.

        They come in order, before :meth:`Drafter.add` gives the tokens that follow. Some may be left out, as those of a
        prompt's beginning that another text had read.
        """


class DraftsTogether(Protocol):
    """What drafts for several texts at a time."""

    def propose(self, drafters: Any, most: int, room: int, deepest: Sequence[int]) -> list[DraftTree | Exception]:
        """Return the tree of each text, or what failed.

        Args:
            drafters: Drafters of the texts.
            most: Largest number of tokens of a tree.
            room: Number of tokens of all trees, beyond which the less likely ones are not asked for.
            deepest: Largest number of levels of each tree.
        """


@runtime_checkable
class IsDraftedTogether(Protocol):
    """A drafter whose text is drafted together with others.

    Attributes:
        together: Drafter shared by all texts.
    """

    together: DraftsTogether


_LONGEST_MATCH = 8
# Estimates of how often the next token is among the drafted ones after a match of 1 to 8 tokens, and their weight.
_PRIORS, _PRIOR_WEIGHT = (0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85), 4.0
_VOTE = 3.0  # weight of a place per token of its match, as a power
_LEAST = 0.01  # least probability of a token that is worth drafting


class NGramDrafter:
    """Drafts what followed the last tokens of the text where they occurred before (Saxena 2023; Oliaro et al. 2024).

    Earlier places vote for their continuations, which form a tree; places with more tokens in common with the end of
    the text weigh more. How often such drafts are right is counted while the text is written.

    Args:
        longest: Largest number of tokens that are compared.
        places: Largest number of earlier places that vote: those with the longest matches, then the most recent.
    """

    def __init__(self, longest: int = 5, places: int = 12) -> None:
        self.longest, self.places = longest, places
        self._tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(longest)]  # [n - 1]: ends of n-grams
        self._right = [_PRIOR_WEIGHT * prior for prior in _PRIORS]
        self._tried = [_PRIOR_WEIGHT] * _LONGEST_MATCH
        self._drafted: dict[tuple[int, ...], tuple[int, set[int]]] = {}  # length of the match and candidates, by path

    def add(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the text."""
        path: tuple[int, ...] = ()
        for token in tokens:
            if path not in self._drafted:
                break
            length, following = self._drafted[path]
            self._tried[length - 1] += 1
            self._right[length - 1] += token in following
            path = (*path, token)
        self._drafted = {}
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in range(1, min(self.longest, end) + 1):
                self._ends[n - 1].setdefault(tuple(self._tokens[end - n :]), []).append(end)

    def propose(self, most: int, deepest: int) -> DraftTree:
        """Return up to ``most`` of the likeliest tokens, up to ``deepest`` levels; nothing if the last token is new."""
        found = DraftTree([], [], [])
        order = count()  # parents come before children of equal chance
        heap: list[tuple[float, int, int, int, tuple[int, ...], list[tuple[int, int]]]] = []

        def follow(chance: float, parent: int, path: tuple[int, ...], voters: list[tuple[int, int]]) -> None:
            votes: dict[int, list[tuple[int, int]]] = {}
            for end, matched in voters:
                if end < len(self._tokens):
                    votes.setdefault(self._tokens[end], []).append((end + 1, matched + 1))
            if not votes:
                return
            length = min(max(matched for _, matched in voters), _LONGEST_MATCH)
            self._drafted[path] = (length, set(votes))
            weights = {token: sum(_VOTE**matched for _, matched in own) for token, own in votes.items()}
            chance *= self._right[length - 1] / self._tried[length - 1] / sum(weights.values())
            for token, own in votes.items():
                if chance * weights[token] >= _LEAST:
                    heapq.heappush(heap, (-chance * weights[token], next(order), token, parent, path, own))

        follow(1.0, -1, (), self._matches())
        while heap and len(found.tokens) < most:
            chance, _, token, parent, path, voters = heapq.heappop(heap)
            found.tokens.append(token)
            found.parents.append(parent)
            found.chances.append(-chance)
            if len(path) + 1 < deepest:
                follow(-chance, len(found.tokens) - 1, (*path, token), voters)
        return found

    def _matches(self) -> list[tuple[int, int]]:
        """Earlier places that continue the last tokens: index of the token that follows, and length of the match."""
        end, found = len(self._tokens), dict[int, int]()
        for n in range(min(self.longest, end), 0, -1):
            for place in reversed(self._ends[n - 1].get(tuple(self._tokens[end - n :]), ())):
                if len(found) == self.places:
                    return list(found.items())
                if place < end:
                    found.setdefault(place, n)
        return list(found.items())


def tree_of(chances: Mapping[tuple[int, ...], float], most: int) -> DraftTree:
    """Return the tree of the ``most`` likeliest paths; with each path, those to its earlier tokens are given.

    Args:
        chances: Chance of each path from the end of the text, at most that of the path to the token before.
    """
    found = DraftTree([], [], [])
    places: dict[tuple[int, ...], int] = {(): -1}
    for path in sorted(chances, key=lambda path: (-chances[path], len(path)))[:most]:
        places[path] = len(found.tokens)
        found.tokens.append(path[-1])
        found.parents.append(places[path[:-1]])
        found.chances.append(chances[path])
    return found


def joined(trees: Sequence[DraftTree], most: int) -> DraftTree:
    """Return up to ``most`` of the likeliest tokens of trees laid over each other; a token has its largest chance."""
    trees = [tree for tree in trees if tree.tokens]
    if len(trees) < 2:
        return trees[0] if trees else NOTHING
    chances: dict[tuple[int, ...], float] = {}
    for tree in trees:
        for path, chance in zip(paths(tree), tree.chances, strict=True):
            chances[tuple(path)] = max(chance, chances.get(tuple(path), 0.0))
    return tree_of(chances, most)


_RETRY = 32  # passes after which a rejected level is tried again
_FORGET = 0.95  # decay of earlier measurements with each pass
_TRIALS = 3  # first passes of a level before it is judged
_INHERITED = 0.2  # weight of measurements with other numbers of texts


@dataclass
class _LevelRate:
    """Tokens and seconds of the passes of a level, weighted towards recent ones, and the number of passes."""

    worth: float = 0.0
    seconds: float = 0.0
    passes: int = 0


class DraftLevels:
    """How many of the drafters to ask, by the tokens a second that passes gave so far.

    Level ``k`` asks the first ``k`` drafters, level 0 none. Each level is tried at first, and again from time to time.
    Numbers of texts are grouped by powers of two; a group starts from the measurements of the others.

    Args:
        drafters: Number of drafters.
        costs: Times of passes over 1, 2, ... tokens, in any unit.
    """

    def __init__(self, drafters: int, costs: Sequence[float]) -> None:
        self._most, self._costs = drafters, costs
        self._load = 0.0  # seconds of passes; their cost by the table
        self._cost = 0.0
        self._known: dict[int, list[_LevelRate]] = {}  # rates of all levels, by bucket of texts
        self._passes: dict[int, int] = {}

    def choose(self, texts: int) -> int:
        """Return the level of the next pass over ``texts`` texts."""
        if not 0 < texts <= len(self._costs):
            return 0
        known = self._of(texts)
        self._passes[texts.bit_length()] = count = self._passes.get(texts.bit_length(), 0) + 1
        levels = range(self._most, -1, -1)
        for level in levels:
            if known[level].passes < _TRIALS:
                return level
        if count >= _RETRY and count % _RETRY <= self._most:
            return count % _RETRY
        return max(levels, key=lambda level: known[level].worth / known[level].seconds)

    def note(self, texts: int, level: int, rows: int, tokens: float, drafting: float, passing: float) -> None:
        """Take note of a pass.

        Args:
            texts: Number of texts.
            level: Level of the pass.
            rows: Number of tokens that it read.
            tokens: Number of tokens that it gave.
            drafting: Seconds of drafting.
            passing: Seconds of the pass.
        """
        if rows > len(self._costs):
            return
        self._load = _FORGET * self._load + passing
        self._cost = _FORGET * self._cost + self._costs[rows - 1]
        own = self._of(texts)[level]
        # texts that come or go, and a machine that is busy at times, change all levels alike
        own.worth = _FORGET * own.worth + tokens * self._costs[texts - 1] / texts
        own.seconds = _FORGET * own.seconds + (drafting + passing) * self._cost / self._load
        own.passes += 1

    def _of(self, texts: int) -> list[_LevelRate]:
        number = texts.bit_length()
        if number not in self._known:
            near = min(self._known, key=lambda other: abs(other - number), default=None)
            others = [_LevelRate() for _ in range(self._most + 1)] if near is None else self._known[near]
            self._known[number] = [
                _LevelRate(_INHERITED * one.worth, _INHERITED * one.seconds, one.passes) for one in others
            ]
        return self._known[number]


@dataclass(frozen=True)
class Speculation:
    """How texts are drafted.

    Attributes:
        drafters: Functions that make the drafters of a text, those that take less time first. Their trees are laid over
            each other.
        costs: Time of a pass over 1, 2, ... tokens, in any unit, as :func:`measure_costs` returns it. A pass takes as
            many drafted tokens as give the most expected tokens for its time, possibly none.
        taps: Numbers of the model's blocks whose outputs drafters read; empty for none.
        levels: Chooses how many of the drafters are asked; None to ask all, always.
    """

    drafters: Sequence[Callable[[], Drafter]]
    costs: Sequence[float]
    taps: tuple[int, ...] = ()
    levels: DraftLevels | None = None


class TextDrafters:
    """The drafters of one text; a drafter that fails is dropped with a warning, as generation does not need it.

    Args:
        name: Name of the text in warnings.
        makers: Functions that make the drafters.
        prompt: Tokens of the text so far.
    """

    def __init__(self, name: str, makers: Sequence[Callable[[], Drafter]], prompt: Sequence[int]) -> None:
        self._name = name
        self._drafters: list[Drafter | None] = [None] * len(makers)
        for place, make in enumerate(makers):
            with self._dropping(place):
                drafter = make()
                drafter.add(prompt)
                self._drafters[place] = drafter

    def add(self, tokens: Sequence[int]) -> None:
        """Pass new tokens of the text to all drafters."""
        for place, drafter in enumerate(self._drafters):
            if drafter is not None:
                with self._dropping(place):
                    drafter.add(tokens)

    def see(self, position: int, taps: Mapping[int, Tensor], rows: Sequence[int] | slice) -> None:
        """Give drafters that read features those of tokens from ``position`` on: ``rows`` of ``taps``."""
        for place, drafter in enumerate(self._drafters):
            if isinstance(drafter, ReadsFeatures):
                with self._dropping(place):
                    drafter.see(position, torch.cat([tapped[rows] for tapped in taps.values()], 1))

    @staticmethod
    def propose(
        texts: Sequence[TextDrafters], level: int, vocabulary: int, most: int, room: int, deepest: Sequence[int]
    ) -> list[DraftTree]:
        """Return the trees of texts, each from the first drafters of its text.

        Args:
            texts: Drafters of each text.
            level: Number of drafters to ask.
            vocabulary: Number of ids.
            most: Largest number of tokens of a tree.
            room: Number of drafted tokens of all texts that a pass can take.
            deepest: Largest number of levels of each tree.
        """
        found: list[list[DraftTree]] = [[] for _ in texts]
        for place in range(level):
            drafters = {number: one for number, text in enumerate(texts) if (one := text._drafters[place]) is not None}
            for number, tree in _asked(drafters, most, room, deepest).items():
                with texts[number]._dropping(place):
                    if isinstance(tree, Exception):
                        raise tree
                    found[number].append(checked(tree, vocabulary, most, deepest[number]))
        return [joined(trees, most) for trees in found]

    @contextmanager
    def _dropping(self, place: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._drafters[place] = None
            warnings.warn(f"{self._name} goes on without a drafter, which failed: {error}", stacklevel=5)


def _asked(
    drafters: Mapping[int, Drafter], most: int, room: int, deepest: Sequence[int]
) -> dict[int, DraftTree | Exception]:
    """Return the trees of the drafters of some texts, by the number of the text, or what failed."""
    found = dict[int, DraftTree | Exception]()
    groups = dict[int, tuple[DraftsTogether, list[int]]]()
    for number, drafter in drafters.items():
        if isinstance(drafter, IsDraftedTogether):
            groups.setdefault(id(drafter.together), (drafter.together, []))[1].append(number)
            continue
        try:
            found[number] = drafter.propose(most, deepest[number])
        except Exception as error:
            found[number] = error
    for together, numbers in groups.values():
        own = [drafters[number] for number in numbers]
        try:
            trees = together.propose(own, most, room, [deepest[number] for number in numbers])
        except Exception as error:
            trees = [error] * len(own)
        found.update(zip(numbers, trees, strict=True))
    return found


def checked(tree: DraftTree, vocabulary: int, most: int, deepest: int) -> DraftTree:
    """Return a tree that a drafter proposed.

    Args:
        tree: The tree.
        vocabulary: Number of ids.
        most: Largest number of tokens.
        deepest: Largest number of levels.

    Raises:
        ValueError: If lists differ in length, a parent does not come before its child, siblings are equal, an id is not
            a token, a chance is not from 0 to that of the parent, or there are too many tokens or levels.
    """
    tokens, parents, chances = tree
    if not len(tokens) == len(parents) == len(chances) <= most:
        raise ValueError(f"{len(tokens)} tokens, {len(parents)} parents, {len(chances)} chances, at most {most}")
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise ValueError("siblings are equal")
    depths: list[int] = []
    for place, (token, parent, chance) in enumerate(zip(tokens, parents, chances, strict=True)):
        if not (-1 <= parent < place and 0 <= token < vocabulary):
            raise ValueError(f"token {place} is {token}, after {parent}")
        if not 0 <= chance <= (1.0 if parent < 0 else chances[parent]):
            raise ValueError(f"token {place} has the chance {chance}")
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths[-1] > deepest:
            raise ValueError(f"token {place} is at level {depths[-1]}, at most {deepest}")
    return tree


def choose(trees: Sequence[DraftTree], costs: Sequence[float]) -> list[DraftTree]:
    """Return the parts of trees, of one text each, that give the most expected tokens for the time of a pass.

    Args:
        trees: Trees as :func:`checked` returns them.
        costs: Time of a pass over 1, 2, ... tokens; a pass over more tokens than that takes no drafts.
    """
    nodes = sorted(
        ((-chance, place, text) for text, tree in enumerate(trees) for place, chance in enumerate(tree.chances))
    )[: max(0, len(costs) - len(trees))]
    best, most, expected = 0, 0.0, float(len(trees))
    if len(trees) <= len(costs):
        most = expected / costs[len(trees) - 1]
    for number, (chance, _, _) in enumerate(nodes, 1):
        expected -= chance
        if expected / costs[len(trees) + number - 1] > most:
            best, most = number, expected / costs[len(trees) + number - 1]
    kept: list[list[int]] = [[] for _ in trees]
    for _, place, text in nodes[:best]:
        kept[text].append(place)
    return [part_of(tree, sorted(places)) for tree, places in zip(trees, kept, strict=True)]


def part_of(tree: DraftTree, places: Sequence[int]) -> DraftTree:
    """Return the tree of the tokens of ``tree`` at ``places``, which increase and hold the parent of each."""
    found = {-1: -1, **{place: number for number, place in enumerate(places)}}
    return DraftTree(
        [tree.tokens[place] for place in places],
        [found[tree.parents[place]] for place in places],
        [tree.chances[place] for place in places],
    )


def paths(tree: DraftTree) -> list[list[int]]:
    """Return the tokens from the root to each token of a tree, itself included."""
    found: list[list[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append([token] if parent < 0 else [*found[parent], token])
    return found


@torch.inference_mode()
def measure_costs(model: Llama, context: int = 64, rounds: int = 3) -> list[float]:
    """Measure the time of passes of ``model`` over 1 to 32 tokens, in seconds.

    Args:
        context: Number of tokens before them.
        rounds: Number of passes over each of 1, 2, 4, 8, 16 and 32 tokens, the fastest of which counts; the rest is
            interpolated.
    """
    weight, texts = model.embedding.weight, MOST_ROWS // MOST_TOKENS
    context = min(context, max(0, model.config.context - MOST_TOKENS))
    cache = KVCache(model.config, texts, context + MOST_TOKENS, weight.dtype, weight.device)
    sizes = [2**n for n in range(int(math.log2(MOST_ROWS)) + 1)]

    def elapsed(rows: int) -> float:
        tokens = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        offsets = torch.tensor([min(rows, MOST_TOKENS * n) for n in range(texts + 1)])
        start = time.perf_counter()
        top = model.logits(model.hidden(tokens, offsets, cache=cache)).argmax(-1)
        top.tolist()  # waits for a GPU
        seconds = time.perf_counter() - start
        cache.keep([min(length, context) for length in cache.lengths])
        return seconds

    while cache.lengths[0] < context:  # a few tokens at a time, to limit memory
        elapsed(MOST_ROWS)
    elapsed(MOST_ROWS)
    found = [math.inf] * len(sizes)
    for _ in range(rounds):  # alternate the sizes, so that a disturbance affects all of them
        found = [min(best, elapsed(rows)) for best, rows in zip(found, sizes, strict=True)]
    found = [max(found[: number + 1]) for number in range(len(found))]  # more tokens never cost less
    costs = found[:1]
    for (few, many), (low, high) in zip(pairwise(sizes), pairwise(found), strict=True):
        costs += [low + (high - low) * (rows - few) / (many - few) for rows in range(few + 1, many + 1)]
    return costs
