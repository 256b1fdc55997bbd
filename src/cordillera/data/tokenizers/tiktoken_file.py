"""Llama 3's own file, ``tokenizer.model``: tokens in base64 with their ranks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cordillera.data.tokenizers.chat import Llama3Chat
from cordillera.data.tokenizers.pairs.byte_pairs import LLAMA3_WORDS, BytePairs, byte_letters
from cordillera.data.tokenizers.pairs.splitters import split_name, split_rule
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from cordillera.files import JSON_BYTES

MAX_CHARACTERS = 400_000
"""Number of characters of the blocks into which Llama 3 cuts longer texts (llama-models, ``llama3/tokenizer.py``)."""

MAX_RUN = 25_000
"""Number of characters at which Llama 3 cuts runs of white space, or of anything else."""

LLAMA3_BASE_TOKENS = 128_000
_LLAMA3_NAMES = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
_LLAMA3_SPECIAL_TOKENS = 256
_USED = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_SPLITTER = "llama-bpe"


def pieces(text: str) -> Iterator[str]:
    """Cut a text as Llama 3 does: blocks of 400,000 characters, runs of at most 25,000. Cuts affect ids."""
    for start in range(0, len(text), MAX_CHARACTERS):
        block = text[start : start + MAX_CHARACTERS]
        if len(block) <= MAX_RUN:
            yield block
            continue
        begin = 0
        for run in re.finditer(r"\s+|\S+", block):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield block[begin:cut]
                begin = cut
        yield block[begin:]


def read_tiktoken(path: Path) -> Tokenizer:
    """Read Llama 3's tokenizer.

    Raises:
        DataError: the file is damaged, or of another model.
    """
    import tiktoken

    content, ranks = _read(path)
    special = _special(len(ranks))
    encoding = tiktoken.Encoding(path.name, pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=special)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [[token for part in pieces(text) for token in encoding.encode_ordinary(part)] for text in texts]

    return Tokenizer(
        kind="tiktoken",
        path=path,
        encode_plain=encode,
        token_bytes=[*ranks, *(name.encode() for name in special)],
        special_tokens=special,
        bos_id=special["<|begin_of_text|>"],
        eos_id=special["<|end_of_text|>"],
        stop_ids=tuple(special[name] for name in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
        adds_bos=True,
        chat_format=Llama3Chat(),
        fingerprint=hashlib.sha256(content).hexdigest(),
    )


def read_tiktoken_pairs(path: Path) -> BytePairs:
    """Read the same tokenizer as merges. Runs of more than 25,000 characters, which it cuts, get other ids."""
    _, ranks = _read(path)
    letters = {byte: letter for letter, byte in byte_letters().items()}
    vocabulary = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    return BytePairs(
        path=path,
        vocabulary=vocabulary,
        merges=_merges(vocabulary),
        special=_special(len(ranks)),
        words={},
        normalizer=None,
        pre_tokenizer=split_rule(_SPLITTER, path),
        ignore_merges=True,
    )


def tiktoken_content(pairs: BytePairs) -> str | None:
    """Return the content of a ``tokenizer.model`` with the same ids as ``pairs``; None if there is none.

    There is one if the vocabulary splits texts as Llama 3's does, merges in the order of ids, and has Llama 3's special
    tokens; reserved ones, which had other numbers in Llama 3.0, may have any names.
    """
    plain = {name: token for name, token in pairs.vocabulary.items() if name not in pairs.special}
    wanted = _special(len(plain))
    found = {token: name for name, token in pairs.special.items()}
    if pairs.words or pairs.normalizer is not None or not pairs.ignore_merges or len(plain) > LLAMA3_BASE_TOKENS:
        return None
    if sorted(plain.values()) != list(range(len(plain))) or sorted(found) != sorted(wanted.values()):
        return None
    if any(found[i] != name and (name in _USED or "reserved_special" not in found[i]) for name, i in wanted.items()):
        return None
    try:
        if split_name(pairs.pre_tokenizer, pairs.path, len(pairs.merges), pairs.ignore_merges) != _SPLITTER:
            return None
    except DataError:
        return None
    if [tuple(pair) for pair in pairs.merges] != _merges(plain):
        return None
    letters = byte_letters()
    in_order = sorted(plain, key=plain.__getitem__)
    tokens = (base64.b64encode(bytes(letters[letter] for letter in name)).decode() for name in in_order)
    return "".join(f"{token} {rank}\n" for rank, token in enumerate(tokens))


def _merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges, in order, of a vocabulary whose pairs are merged when together they are a token, the lowest id first."""
    found = list[tuple[str, str]]()
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        splits = ((token[:size], token[size:]) for size in range(1, len(token)))
        pairs = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        found += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return found


def _special(first: int) -> dict[str, int]:
    reserved = [f"<|reserved_special_token_{2 + i}|>" for i in range(_LLAMA3_SPECIAL_TOKENS - len(_LLAMA3_NAMES))]
    return {name: first + i for i, name in enumerate([*_LLAMA3_NAMES, *reserved])}


def _read(path: Path) -> tuple[bytes, dict[bytes, int]]:
    """Content of the file, and the ranks in it."""
    if path.stat().st_size > JSON_BYTES:
        raise DataError(f"is larger than {JSON_BYTES:,} bytes", where=str(path))
    content = path.read_bytes()
    ranks = _ranks(content, path)
    if len(ranks) > LLAMA3_BASE_TOKENS:
        raise DataError(
            f"it holds {len(ranks):,} tokens, Llama 3's holds {LLAMA3_BASE_TOKENS:,}",
            where=str(path),
            remedy="a later model's file needs other rules of splitting; use that model's tokenizer.json",
        )
    return content, ranks


def _ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Ranks by the bytes of tokens, in order of rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"not a token in base64 and its rank ({error})", where=f"{path}:{number}") from None
    if list(ranks.values()) != list(range(len(ranks))):
        raise DataError("the ranks do not count up from 0: lines are missing or doubled", where=str(path))
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise DataError(f"{len(absent)} of the 256 bytes are missing, so some text cannot be written", where=str(path))
    return ranks
