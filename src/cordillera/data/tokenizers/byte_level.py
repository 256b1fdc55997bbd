"""Tokenizer of UTF-8 bytes, which needs no file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from cordillera.data.tokenizers.pairs.byte_pairs import BytePairs, byte_letters
from cordillera.data.tokenizers.tokenizer import Tokenizer

BYTES = "bytes"
"""Name of the tokenizer in recipes."""

_SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer whose ids 0 to 255 are the bytes, 256 begins a text and 257 ends it."""
    special = {name: 256 + i for i, name in enumerate(_SPECIAL)}
    bos, eos = special.values()
    return Tokenizer(
        kind="bytes",
        path=Path(BYTES),
        encode_plain=_encode,
        token_bytes=[*(bytes([byte]) for byte in range(256)), *(name.encode() for name in special)],
        special_tokens=special,
        bos_id=bos,
        eos_id=eos,
        stop_ids=(eos,),
        adds_bos=True,
        chat_format=None,
        fingerprint=hashlib.sha256(repr((BYTES, special)).encode()).hexdigest(),
    )


def byte_pairs() -> BytePairs:
    """Return the same tokenizer as a byte-pair encoding without merges."""
    ends = {name: 256 + i for i, name in enumerate(_SPECIAL)}
    rule = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return BytePairs(Path(BYTES), byte_letters(), [], ends, {}, None, rule, False)


def _encode(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]
