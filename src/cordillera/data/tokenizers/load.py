"""Loading of tokenizers from any kind of file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from cordillera.data.assets import ASSETS, stored_asset
from cordillera.data.tokenizers.byte_level import BYTES, byte_pairs, byte_tokenizer
from cordillera.data.tokenizers.gguf import gguf_metadata, read_gguf_pairs
from cordillera.data.tokenizers.hugging_face import read_json_pairs
from cordillera.data.tokenizers.pairs.byte_pairs import BytePairs
from cordillera.data.tokenizers.sentencepiece_file import is_sentencepiece, read_sentencepiece_pairs
from cordillera.data.tokenizers.templates import template_of
from cordillera.data.tokenizers.tiktoken_file import read_tiktoken, read_tiktoken_pairs
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError


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
        return read_gguf_pairs(path).tokenizer("gguf")
    if is_sentencepiece(head):
        return read_sentencepiece_pairs(path).tokenizer("sentencepiece")
    if head.lstrip().startswith(b"{"):
        return read_json_pairs(path).tokenizer("tokenizers")
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", head):
        return read_tiktoken(path)
    raise DataError(
        "this is no tokenizer that can be read",
        where=str(path),
        remedy="give a tokenizer.model of Llama 3 or SentencePiece, a tokenizer.json, or a .gguf file",
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
        remedy="name the file"
        if found
        else "put tokenizer.json, tokenizer.model or a .gguf file there, or give another tokenizer (--tokenizer)",
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a file, or from the folder of a model.

    Args:
        path: A ``tokenizer.model`` of Llama 3 or of SentencePiece (Llama 2, Mistral), a Hugging Face
            ``tokenizer.json``, a ``.gguf`` file, or a folder that holds one of them. Beside SentencePiece's file or a
            ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json`` and ``chat_template.jinja`` are
            read too; beside SentencePiece's, also ``added_tokens.json``. Or a name: ``bytes``, whose 256 tokens are the
            bytes, or that of an asset that was fetched, such as ``smollm2`` and ``llama3-tokenizer`` (a folder of that
            name is ``./smollm2``).

    Raises:
        DataError: there is no tokenizer, it is damaged, or of a kind that cannot encode every text; an asset was not
            fetched.
    """
    if path == BYTES:
        return byte_tokenizer()
    if isinstance(path, str) and path in ASSETS:
        return read_tokenizer(stored_asset(path))
    return read_tokenizer(Path(path).expanduser())


def pairs_of(tokenizer: Tokenizer) -> BytePairs:
    """Return what a file of any kind holds of a ``tokenizer``, which is read again; its chat format is a template.

    Raises:
        DataError: the file is no longer there, or has changed.
    """
    path, kind = tokenizer.path, tokenizer.kind
    if kind == "bytes":
        pairs = byte_pairs()
    elif kind == "tiktoken":
        pairs = read_tiktoken_pairs(path)
    elif kind == "sentencepiece":
        pairs = read_sentencepiece_pairs(path)
    else:
        pairs = read_gguf_pairs(path) if kind == "gguf" else read_json_pairs(path)
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    bos, eos = (None if token is None else names[token] for token in (tokenizer.bos_id, tokenizer.eos_id))
    chat = tokenizer.chat_format
    return dataclasses.replace(
        pairs,
        bos=bos,
        eos=eos,
        stops=tokenizer.stop_ids,
        adds_bos=tokenizer.adds_bos,
        template=None if chat is None else template_of(chat),
    )


def asset_facts(path: Path) -> dict[str, Any]:
    """Return facts from an asset's file: sizes and tokens of a tokenizer, the shape of a GGUF model.

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
