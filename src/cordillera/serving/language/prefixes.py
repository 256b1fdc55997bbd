"""Keys and values of prompts that were read, for later prompts that begin alike.

Prompts are read in parts of a fixed number of tokens, counted from their beginning, and only whole parts are shared, or
whole prompts. What a text takes from here is therefore what reading its own prompt would have given, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cordillera.kernels.attention.decoding import MOST_TOKENS
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama

PART = 256
"""Tokens of a part, a multiple of the tokens of a page."""
_SHORT = 48  # most tokens that the kernel for few rows reads faster, in several calls, than layers do in one
_WHOLE_PROMPTS = 64  # whole prompts whose logits are kept


def next_part(model: Llama, unread: int) -> int:
    """Return the number of tokens that ``model`` reads next, of ``unread`` tokens of a prompt."""
    return min(unread, MOST_TOKENS if model.few is not None and unread <= _SHORT else PART)


class Prefix(NamedTuple):
    """The beginning of a prompt that was read before.

    Attributes:
        pages: Pages that hold its keys and values.
        length: Number of its tokens.
        logits: Logits after its last token, ``[1, vocabulary]``, if it is the whole prompt.
    """

    pages: list[int]
    length: int
    logits: Tensor | None


class _Part(NamedTuple):
    number: int
    pages: list[int]
    logits: Tensor | None


class Prefixes:
    """Parts of prompts that were read; those that were not used for longest are forgotten first.

    Args:
        cache: Cache whose pages hold them.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        # A part is found by the number of the part before it, and its tokens.
        self._parts: OrderedDict[tuple[int, tuple[int, ...]], _Part] = OrderedDict()
        self._count = 0

    def find(self, prompt: Sequence[int]) -> Prefix:
        """Return the longest beginning of a prompt that was read before, possibly of no token."""
        pages: list[int] = []
        before, length, logits = 0, 0, None
        found = []
        for start in range(0, len(prompt), PART):
            key = (before, tuple(prompt[start : start + PART]))
            part = self._parts.get(key)
            if part is None:
                break
            is_end = start + PART >= len(prompt)
            if is_end and part.logits is None:
                break  # at least one token is read, for its logits
            found.append(key)
            pages += part.pages
            before, length, logits = part.number, start + len(key[1]), part.logits if is_end else None
        for key in reversed(found):  # evict a part before its predecessors
            self._parts.move_to_end(key)
        return Prefix(pages, length, logits)

    def add(self, prompt: Sequence[int], pages: Sequence[int], logits: Tensor) -> None:
        """Keep a prompt that was read.

        Args:
            prompt: Its tokens.
            pages: Pages that hold their keys and values.
            logits: Logits after its last token, ``[1, vocabulary]``.
        """
        if not self._cache.decodes:  # a page is a whole sequence
            return
        before, keys = 0, []
        for start in range(0, len(prompt), PART):
            key = (before, tuple(prompt[start : start + PART]))
            is_end = start + PART >= len(prompt)
            part = self._parts.get(key)
            if part is None:
                own = list(pages[start // self._cache.page : self._cache.pages_for(start + len(key[1]))])
                self._cache.hold(own)
                self._count += 1
                part = _Part(self._count, own, None)
            self._parts[key] = part._replace(logits=logits.clone()) if is_end else part
            keys.append(key)
            before = part.number
        for key in reversed(keys):
            self._parts.move_to_end(key)
        with_logits = [key for key, part in self._parts.items() if part.logits is not None]
        for key in with_logits[: max(0, len(with_logits) - _WHOLE_PROMPTS)]:
            self._parts[key] = self._parts[key]._replace(logits=None)

    def forget(self) -> bool:
        """Forget the part that was not used for longest; return whether there was one."""
        if not self._parts:
            return False
        _, part = self._parts.popitem(last=False)
        self._cache.release(part.pages)
        return True
