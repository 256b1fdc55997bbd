"""Loading of tokenizers from any kind of file, and Llama 3's own file, ``tokenizer.model``."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cordillera.data.assets import ASSETS, stored_asset
from cordillera.data.tokenizers.byte_level import BYTES, byte_tokenizer
from cordillera.data.tokenizers.byte_pairs import LLAMA3_WORDS
from cordillera.data.tokenizers.chat import Llama3Chat
from cordillera.data.tokenizers.gguf import gguf_metadata, read_gguf_tokenizer
from cordillera.data.tokenizers.hugging_face import read_json_tokenizer
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


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file or folder; see :func:`load_tokenizer`."""
    try:
        if not path.exists():
            names = ", ".join([BYTES, *ASSETS])
            raise DataError(
                "there is no such file or folder", where=str(path), remedy=f"tokenizers with a name are: {names}"
            )
        if path.is_dir():
            path = _in_folder(path)
        if not path.is_file():
            raise DataError("is not an ordinary file", where=str(path))
        with open(path, "rb") as file:
            head = file.read(256)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise DataError(f"cannot be read ({getattr(error, 'strerror', None) or error})", where=str(path)) from error
    if head.startswith(b"GGUF"):
        return read_gguf_tokenizer(path)
    if head.lstrip().startswith(b"{"):
        return read_json_tokenizer(path)
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", head):
        return _read_tiktoken(path)
    raise DataError(
        "this is no tokenizer that can be read",
        where=str(path),
        remedy="give Llama 3's tokenizer.model, a tokenizer.json, or a .gguf file; SentencePiece is not supported",
    )


def _in_folder(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model", "original/tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    raise DataError(
        f"the folder holds {len(found)} .gguf files" if found else "the folder holds no tokenizer",
        where=str(folder),
        remedy="name the file" if found else "it should hold tokenizer.json, tokenizer.model or a .gguf file",
    )


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


def _read_tiktoken(path: Path) -> Tokenizer:
    import tiktoken

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
    reserved = [f"<|reserved_special_token_{2 + i}|>" for i in range(_LLAMA3_SPECIAL_TOKENS - len(_LLAMA3_NAMES))]
    special = {name: len(ranks) + i for i, name in enumerate([*_LLAMA3_NAMES, *reserved])}
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


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a file, or from the folder of a model.

    Args:
        path: Llama 3's ``tokenizer.model``, a Hugging Face ``tokenizer.json``, a ``.gguf`` file, or a folder that holds
            one of them. Beside a ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json`` and
            ``chat_template.jinja`` are read too. Or a name: ``bytes``, whose 256 tokens are the bytes, or that of an
            asset that was fetched, such as ``smollm2`` and ``llama3-tokenizer`` (a folder of that name is
            ``./smollm2``).

    Raises:
        DataError: there is no tokenizer, it is damaged, or of a kind that cannot encode every text; an asset was not
            fetched.
    """
    if path == BYTES:
        return byte_tokenizer()
    if isinstance(path, str) and path in ASSETS:
        return read_tokenizer(stored_asset(path))
    return read_tokenizer(Path(path).expanduser())


def asset_facts(path: Path) -> dict[str, Any]:
    """Return what an asset's file says of itself: sizes and tokens of a tokenizer, the shape of a GGUF model.

    Raises:
        DataError: the file is damaged.
    """
    facts: dict[str, Any] = {"file": path.name, "bytes": path.stat().st_size}
    if path.suffix == ".gguf":
        metadata = gguf_metadata(path, ("general.", "llama."))
        facts |= {name: value for name, value in metadata.items() if isinstance(value, str | int | float)}
    tokenizer = load_tokenizer(path)
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    return facts | {
        "tokens": tokenizer.vocab_size,
        "special tokens": len(tokenizer.special_tokens),
        "begin of text": names.get(tokenizer.bos_id) if tokenizer.bos_id is not None else "none",
        "end of text": names.get(tokenizer.eos_id) if tokenizer.eos_id is not None else "none",
        "stops at": ", ".join(names.get(token, str(token)) for token in tokenizer.stop_ids),
        "chat format": "none" if tokenizer.chat_format is None else type(tokenizer.chat_format).__name__,
    }
