"""Training iterations of chats, or of pairs of a chosen and a rejected one, the same on every rank."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordillera.data.language.batches import IGNORED, DocumentPart, Microbatches, PackedTokens, TextIteration
from cordillera.data.language.chats.tokens import ANSWER, END, TokenisedChat
from cordillera.errors import DataError
from cordillera.partition import imbalance

LEARNS = frozenset({ANSWER, END})
"""Kinds of tokens that are learnt by default."""

_ORDER = 3
"""Purpose of a random stream, as a key that gives it its own numbers."""

ChatPair = tuple[TokenisedChat, ...]
"""A chat, or a chosen and a rejected one."""


class ChatMicrobatches(Microbatches):
    """Microbatches of chats, packed on first access.

    Each has ``labels``, the next token where that is learnt, and as values of its ``documents`` the number of the
    ``item``, ``int64 [B]``, and ``is_chosen``, ``bool [B]``, which is False for the second chat of a pair. Chats of a
    pair are neighbours, the chosen one first. In a microbatch without chats, ``item`` is -1.

    Args:
        items: Chats or pairs.
        parts: Location of each chat of each microbatch; ``source`` is its place in its item, ``document`` the number of
            the item.
        learns: Kinds of tokens that are learnt.
        values: Further values of the documents by name, ``[items, 2]`` each, for an item's first and second chat.
    """

    def __init__(
        self,
        items: Sequence[ChatPair],
        parts: Sequence[Sequence[DocumentPart]],
        learns: Collection[int] = LEARNS,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__((), parts)
        self.items, self._learns, self.values = items, learns, dict(values or {})

    def neighbours(self, first: int, count: int) -> ChatMicrobatches:
        """Return ``count`` freshly packed microbatches from ``first`` on, fewer at the end."""
        return ChatMicrobatches(self.items, self.parts[first : first + count], self._learns, self.values)

    def _pack(self, parts: Sequence[DocumentPart]) -> PackedTokens:
        if not parts:
            nothing = {"item": torch.tensor([-1]), "is_chosen": torch.tensor([False])}
            return PackedTokens(torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([IGNORED]), nothing)
        chats = [self.items[part.document][part.source] for part in parts]
        offsets = np.cumsum([0, *(part.length for part in parts)])
        documents = {
            "item": torch.tensor([part.document for part in parts]),
            "is_chosen": torch.tensor([part.source == 0 for part in parts]),
        }
        places = [part.document for part in parts], [part.source for part in parts]
        documents |= {name: values[places] for name, values in self.values.items()}
        return PackedTokens(
            torch.from_numpy(np.concatenate([chat.tokens for chat in chats]).astype(np.int64)),
            torch.from_numpy(offsets),
            torch.from_numpy(np.concatenate([_labels(chat, self._learns) for chat in chats])),
            documents,
        )


def _labels(chat: TokenisedChat, learns: Collection[int]) -> np.ndarray:
    labels = np.full(len(chat.tokens), IGNORED, np.int64)
    labels[:-1] = np.where(np.isin(chat.kinds[1:], list(learns)), chat.tokens[1:], IGNORED)
    return labels


def held_out_chats(items: Sequence[ChatPair], *, most: int, learns: Collection[int] = LEARNS) -> ChatMicrobatches:
    """Pack chats or pairs for evaluation, in the order of ``items``; pairs stay whole.

    Args:
        most: Largest number of tokens of a microbatch.
        learns: Kinds of tokens that are predicted.

    Raises:
        DataError: an item is longer than ``most``, or has nothing to predict.
    """
    _check(items, most, learns)
    packed: list[list[DocumentPart]] = []
    room = 0
    for number, item in enumerate(items):
        if _length(item) > room:
            packed.append([])
            room = most
        packed[-1] += _parts(number, item)
        room -= _length(item)
    return ChatMicrobatches(items, packed, learns)


class ChatBatches(Iterator[TextIteration]):
    """Iterations over chats or pairs, endless or for a number of epochs; items are never divided.

    Every item comes once per epoch, and no iteration holds items of two epochs. An iteration takes items until the next
    one would exceed ``tokens``, and gives the longest first to the microbatch that has the fewest tokens. An item that
    does not fit waits for the next iteration, which places it before new ones.

    Args:
        items: Chats or pairs, at least one.
        tokens: Largest number of tokens of an iteration; an item that is longer has an iteration of its own.
        microbatches: Number of microbatches of an iteration.
        most: Largest number of tokens of a microbatch.
        seed: Seed of the orders.
        epochs: Number of passes over the items; None for no end.
        shuffle: Whether every epoch has a random order of its own.
        learns: Kinds of tokens that are learnt.

    Attributes:
        values: Further values of the documents, as in :class:`ChatMicrobatches`.

    Raises:
        DataError: there are no items or microbatches, the tokens do not fit into the microbatches, or an item is too
            long or has nothing to learn.
    """

    def __init__(
        self,
        items: Sequence[ChatPair],
        *,
        tokens: int,
        microbatches: int,
        most: int,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
        learns: Collection[int] = LEARNS,
    ) -> None:
        if not items:
            raise DataError("there are no chats to learn from", where="data")
        if microbatches < 1 or not 1 <= tokens <= microbatches * most:
            raise DataError(
                f"{tokens} tokens do not fit into {microbatches} microbatches of at most {most}",
                where="packing.tokens",
                remedy="more microbatches, or a longer packing.bound",
            )
        _check(items, most, learns)
        self.items, self.tokens, self.microbatches, self.most = items, tokens, microbatches, most
        self.seed, self.epochs, self.shuffle, self.learns = seed, epochs, shuffle, frozenset(learns)
        self.values: dict[str, Tensor] = {}
        self._lengths = [_length(item) for item in items]
        self._number = self._epoch = self._taken = 0
        self._waiting: list[tuple[int, int]] = []  # numbers of items, and of the iterations in which they came
        self._order = self._order_of(0)

    def __iter__(self) -> ChatBatches:
        return self

    def __next__(self) -> TextIteration:
        if self._taken == len(self.items) and not self._waiting:
            self._epoch, self._taken = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        if self.epochs is not None and self._epoch >= self.epochs:
            self._epoch, self._taken = self.epochs - 1, len(self.items)
            raise StopIteration
        candidates = self._take()
        bins, self._waiting = self._place(candidates)
        placed = set(itertools.chain(*bins))
        waited = sum((self._number - came) * self._lengths[item] for item, came in candidates if item in placed)
        parts = [[part for item in one for part in _parts(item, self.items[item])] for one in bins]
        lengths = [[part.length for part in one] for one in parts]
        self._number += 1
        return TextIteration(
            self._number - 1,
            ChatMicrobatches(self.items, parts, self.learns, self.values),
            lengths,
            imbalance([sum(one) for one in lengths]),
            waited / sum(self._lengths[item] for item in placed),
        )

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.items))
        random = np.random.Generator(np.random.PCG64([self.seed, _ORDER, epoch]))
        return random.permutation(len(self.items))

    def _take(self) -> list[tuple[int, int]]:
        """Items that wait, and the next ones of the epoch while all have at most ``tokens`` together."""
        found = list(self._waiting)
        total = sum(self._lengths[item] for item, _ in found)
        while self._taken < len(self.items):
            item = int(self._order[self._taken])
            if found and total + self._lengths[item] > self.tokens:
                break
            found.append((item, self._number))
            total += self._lengths[item]
            self._taken += 1
        return found

    def _place(self, candidates: list[tuple[int, int]]) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Items of each microbatch, and those that found no room."""
        bins: list[list[int]] = [[] for _ in range(self.microbatches)]
        loads = [0] * self.microbatches
        left = []
        for item, came in sorted(candidates, key=lambda one: (one[1], -self._lengths[one[0]])):
            place = loads.index(min(loads))
            if loads[place] + self._lengths[item] > self.most:
                left.append((item, came))
                continue
            bins[place].append(item)
            loads[place] += self._lengths[item]
        return bins, left

    @cached_property
    def _identity(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for item in self.items:
            for chat in item:
                digest.update(np.array([len(item), len(chat.tokens)], "<i8").tobytes())
                digest.update(chat.tokens.astype("<i4").tobytes() + chat.kinds.astype("i1").tobytes())
        settings = [self.tokens, self.most, self.seed, self.epochs, self.shuffle, sorted(self.learns)]
        return {"items": digest.hexdigest(), "settings": hashlib.sha256(repr(settings).encode()).hexdigest()}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, fit for JSON, equal on every rank."""
        return {
            **self._identity,
            "number": self._number,
            "epoch": self._epoch,
            "taken": self._taken,
            "waiting": [list(one) for one in self._waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position of the same items and settings; the number of microbatches may differ.

        Raises:
            DataError: the state belongs to other items or settings, or is damaged; the iterations stay unchanged.
        """
        for name, expected in self._identity.items():
            if state.get(name) != expected:
                raise DataError(
                    f"the saved position belongs to other {name}",
                    where=f"state of the chats, {name}",
                    remedy="go on with what it was saved with, or start anew",
                )
        try:
            number, epoch, taken = int(state["number"]), int(state["epoch"]), int(state["taken"])
            waiting = [(int(item), int(came)) for item, came in state["waiting"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the saved position is damaged ({error!r})", where="state of the chats") from None
        order = self._order_of(epoch) if epoch >= 0 else np.zeros(0, np.int64)
        seen = set(order[: max(taken, 0)].tolist())
        is_sound = number >= 0 and 0 <= taken <= len(order) and len({item for item, _ in waiting}) == len(waiting)
        if not is_sound or not all(item in seen and 0 <= came < number for item, came in waiting):
            raise DataError("the saved position is damaged: its counts do not agree", where="state of the chats")
        self._number, self._epoch, self._taken = number, epoch, taken
        self._waiting, self._order = waiting, order


def _length(item: ChatPair) -> int:
    return sum(len(chat.tokens) for chat in item)


def _parts(number: int, item: ChatPair) -> list[DocumentPart]:
    return [DocumentPart(place, number, 0, len(chat.tokens)) for place, chat in enumerate(item)]


def _check(items: Sequence[ChatPair], most: int, learns: Collection[int]) -> None:
    """Refuse an item that does not fit into a microbatch, or one of whose chats has nothing to learn."""
    for number, item in enumerate(items):
        if _length(item) > most:
            raise DataError(
                f"{_length(item)} tokens do not fit into a microbatch of at most {most}",
                where=f"chat {number}",
                remedy="a shorter data.max_length, or a longer packing.bound",
            )
        if not item or not all(np.isin(chat.kinds[1:], list(learns)).any() for chat in item):
            raise DataError("the chat has nothing to learn", where=f"chat {number}")
