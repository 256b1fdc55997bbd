"""The files that vocabularies come in: Llama 3's ``tokenizer.model``, ``tokenizer.json``, GGUF."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cordillera.data.chat import ChatFormat, JinjaChat, Llama3Chat, guess_format
from cordillera.data.tokenizer import Tokenizer
from cordillera.errors import DataError

MAX_CHARACTERS = 400_000
"""Llama 3 tokenises longer texts in blocks of so many characters (llama-models, ``llama3/tokenizer.py``)."""

MAX_RUN = 25_000
"""And cuts longer runs of white space, or of anything else, into such pieces."""

LLAMA3_BASE_TOKENS = 128_000

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
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

_BEGINS = ("<|begin_of_text|>", "<s>")
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>")
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|eot|>")

# Word patterns of GGUF's names (llama.cpp, llama-vocab.cpp): whether digits stand alone, or a pattern of its own.
_GGUF_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GGUF_PLAIN = ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais")
_GGUF_PATTERNS = {
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "deepseek-r1-qwen": _QWEN2_WORDS,
}
_CONTROL, _USER_DEFINED, _UNUSED, _UNKNOWN = 3, 4, 5, 2


def read_tokenizer(path: Path) -> Tokenizer:
    """What :func:`cordillera.data.tokenizer.load_tokenizer` does; see there."""
    if not path.exists():
        raise DataError("there is no such file or folder", where=str(path))
    if path.is_dir():
        path = _in_folder(path)
    with open(path, "rb") as file:
        head = file.read(256)
    if head.startswith(b"GGUF"):
        return _read_gguf(path)
    if head.lstrip().startswith(b"{"):
        return _read_json(path)
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


# Llama 3's tokenizer.model


def pieces(text: str) -> Iterator[str]:
    """Cut a text as Llama 3 does before it tokenises: blocks of 400,000 characters, runs of at most 25,000.

    Tokens never reach over a cut, so the cuts decide about ids.
    """
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
    encoding = tiktoken.Encoding(path.name, pat_str=_LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=special)

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
    """Bytes to rank, in order of rank."""
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


# tokenizer.json


def byte_letters() -> dict[str, int]:
    """The letters that byte-level encodings write bytes with (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _read_json(path: Path) -> Tokenizer:
    content = _json(path)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
        kind = model.get("type", "none") if isinstance(model, dict) else "none"
        raise DataError(
            f"its model is {kind}, not a byte-pair encoding",
            where=str(path),
            remedy="byte-level byte-pair encodings are supported: they can write every text",
        )
    added = {token["content"]: token for token in content.get("added_tokens") or []}
    special = {name: int(token["id"]) for name, token in added.items() if token.get("special")}
    words = {name: int(token["id"]) for name, token in added.items() if name not in special}
    settings = _json(path.with_name("tokenizer_config.json"), {})
    generation = _json(path.with_name("generation_config.json"), {})
    bos = _token_name(settings.get("bos_token")) or _first(_BEGINS, special)
    eos = _token_name(settings.get("eos_token")) or _first(_ENDS + _TURN_ENDS, special)
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos is not None and _opens_with(content.get("post_processor"), bos)
    ends = generation.get("eos_token_id")
    backend = _Backend(model, special, words, content.get("normalizer"), content.get("pre_tokenizer"), path)
    template = _template(path, settings)
    return backend.tokenizer(
        "tokenizers",
        bos=special.get(bos) if bos else None,
        eos=special.get(eos) if eos else None,
        more_stops=ends if isinstance(ends, list) else [] if ends is None else [ends],
        adds_bos=adds_bos,
        template=template,
    )


def _json(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    if absent is not None and not path.exists():
        return absent
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"this is not valid JSON ({error})", where=str(path)) from None
    if not isinstance(content, dict):
        raise DataError("this is not a JSON object", where=str(path))
    return content


def _token_name(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry if isinstance(entry, str) else None


def _first(names: Iterable[str], special: Mapping[str, int]) -> str | None:
    return next((name for name in names if name in special), None)


def _opens_with(processor: Any, bos: str) -> bool:
    """Whether a post-processor puts the token before a text."""
    if not isinstance(processor, dict):
        return False
    if processor.get("type") == "Sequence":
        return any(_opens_with(part, bos) for part in processor.get("processors", []))
    single = processor.get("single") or []
    return bool(single) and isinstance(single[0], dict) and single[0].get("SpecialToken", {}).get("id") == bos


def _template(path: Path, settings: dict[str, Any]) -> str | None:
    beside = path.with_name("chat_template.jinja")
    if beside.exists():
        return beside.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get("default")
    return found if isinstance(found, str) else None


class _Backend:
    """A byte-pair encoding of the ``tokenizers`` library that does not know the special tokens.

    They are taken out of its vocabulary, its merges and its list of added tokens, so that no text can give one,
    whatever the library does with its list. Neither does it know an unknown token: some vocabularies (SmolLM2's) lack
    the bytes of a few rare characters, which the library would give a control token; here they are written as U+FFFD.
    """

    def __init__(
        self,
        model: dict[str, Any],
        special: dict[str, int],
        words: dict[str, int],
        normalizer: Any,
        pre_tokenizer: Any,
        path: Path,
    ) -> None:
        from tokenizers import Tokenizer as Library

        self.special, self.words, self.path = special, words, path
        merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        # Added words are found before the model runs; in the vocabulary they only keep their ids.
        vocabulary = {name: int(token) for name, token in model["vocab"].items() if name not in special}
        self.vocabulary = vocabulary | words
        if len(set(self.vocabulary.values()) | set(special.values())) != len(self.vocabulary) + len(special):
            raise DataError("two tokens have one id", where=str(path))
        self._unwritable = _unwritable(
            {byte for letter, byte in byte_letters().items() if letter not in vocabulary}, path
        )
        content = {
            "version": "1.0",
            "added_tokens": [
                {"id": token, "content": name, "special": False, "normalized": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
                for name, token in sorted(words.items(), key=lambda item: item[1])
            ],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "model": {
                "type": "BPE",
                "ignore_merges": bool(model.get("ignore_merges", False)),
                "vocab": self.vocabulary,
                "merges": [merge for merge in merges if not {*merge, "".join(merge)} & special.keys()],
            },
        }
        source = json.dumps(content, ensure_ascii=False)
        try:
            self.library = Library.from_str(source)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"the tokenizer is damaged ({error})", where=str(path)) from error
        everything = json.dumps([content, special], sort_keys=True).encode()
        self.fingerprint = hashlib.sha256(everything).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._unwritable is not None:
            texts = [self._unwritable.sub("\ufffd", text) for text in texts]
        return [found.ids for found in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_bytes(self) -> list[bytes | None]:
        letters = byte_letters()
        ids = [*self.vocabulary.values(), *self.special.values()]
        found: list[bytes | None] = [None] * (max(ids) + 1)
        for name, token in (*self.words.items(), *self.special.items()):
            found[token] = name.encode()
        for name, token in self.vocabulary.items():
            if name not in self.words:
                try:
                    found[token] = bytes(letters[letter] for letter in name)
                except KeyError as error:
                    raise DataError(
                        f"token {token}, {name!r}, is not written in byte letters", where=str(self.path)
                    ) from error
        return found

    def tokenizer(
        self,
        kind: Any,
        *,
        bos: int | None,
        eos: int | None,
        more_stops: Iterable[int],
        adds_bos: bool,
        template: str | None,
    ) -> Tokenizer:
        names = {token: name for name, token in self.special.items()}
        chat: ChatFormat | None = guess_format(self.special)
        if template is not None:
            chat = JinjaChat(
                template,
                self.special,
                bos=None if bos is None else names[bos],
                eos=None if eos is None else names[eos],
                where=f"{self.path}, chat template",
            )
        stops = [eos, *more_stops, *(self.special.get(name) for name in (*_ENDS, *_TURN_ENDS))]
        made = Tokenizer(
            kind=kind,
            path=self.path,
            encode_plain=self.encode,
            token_bytes=self.token_bytes(),
            special_tokens=self.special,
            bos_id=bos,
            eos_id=eos,
            stop_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
            adds_bos=adds_bos and bos is not None,
            chat_format=chat,
            fingerprint=self.fingerprint,
        )
        probe = "a \u00ff\u6f22\U0001f600\n 12"
        if made.decode(made.encode(probe)).removeprefix(" ") != probe:
            raise DataError("its ids do not give the text back", where=str(self.path))
        return made


def _unwritable(absent: set[int], path: Path) -> re.Pattern[str] | None:
    """Finds the characters whose bytes are no tokens."""
    if absent & {*range(0x80, 0xC0), 0xEF}:  # without these no replacement can be written either
        raise DataError(
            f"{len(absent)} of the 256 bytes are no tokens, so most text cannot be written",
            where=str(path),
            remedy="byte-level byte-pair encodings are supported",
        )
    ranges = []
    for byte in sorted(absent):
        if byte < 0x80:
            ranges.append((byte, byte))
        elif 0xC2 <= byte < 0xE0:
            ranges.append(((byte & 0x1F) << 6, ((byte & 0x1F) << 6) | 0x3F))
        elif 0xE0 <= byte < 0xF0:
            ranges.append(((byte & 0x0F) << 12, ((byte & 0x0F) << 12) | 0xFFF))
        elif 0xF0 <= byte < 0xF5:
            ranges.append(((byte & 7) << 18, min(((byte & 7) << 18) | 0x3FFFF, 0x10FFFF)))
    letters = "".join(f"{re.escape(chr(low))}-{re.escape(chr(high))}" for low, high in ranges)
    return re.compile(f"[{letters}]") if ranges else None


# GGUF


def _read_gguf(path: Path) -> Tokenizer:
    fields = gguf_metadata(path, "tokenizer.")
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise DataError(
            f"its tokenizer is {kind!r}, not a byte-level byte-pair encoding ('gpt2')",
            where=str(path),
            remedy="use another file of the model, or its tokenizer.json",
        )
    try:
        tokens = fields["tokenizer.ggml.tokens"]
        merges = fields["tokenizer.ggml.merges"]
    except KeyError as error:
        raise DataError(f"the metadata lack {error.args[0]}", where=str(path)) from None
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise DataError(f"there are {len(tokens)} tokens and {len(types)} kinds of token", where=str(path))
    kinds = dict(zip(tokens, types, strict=True))
    special = {name: i for i, name in enumerate(tokens) if kinds[name] in (_CONTROL, _UNUSED, _UNKNOWN)}
    words = {name: i for i, name in enumerate(tokens) if kinds[name] == _USER_DEFINED}
    splitter = str(fields.get("tokenizer.ggml.pre", "gpt-2"))
    model = {
        "vocab": {name: i for i, name in enumerate(tokens)},
        "merges": merges,
        "ignore_merges": _GGUF_PATTERNS.get(splitter) == _LLAMA3_WORDS,
    }
    backend = _Backend(model, special, words, None, _gguf_splitter(splitter, path), path)
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    names = set(special.values())
    wrong = [name for name, token in ids.items() if token is not None and token not in names]
    if wrong:
        raise DataError(f"the {wrong[0]} token, {ids[wrong[0]]}, is not a control token", where=str(path))
    return backend.tokenizer(
        "gguf",
        bos=ids["bos"],
        eos=ids["eos"],
        more_stops=[token for token in (ids["eot"], ids["eom"]) if token is not None],
        adds_bos=bool(fields.get("tokenizer.ggml.add_bos_token", splitter in _GGUF_PATTERNS and "llama" in splitter)),
        template=fields.get("tokenizer.chat_template"),
    )


def gguf_metadata(path: Path, prefix: str | tuple[str, ...] = "") -> dict[str, Any]:
    """The metadata of a GGUF file.

    Args:
        path: The file.
        prefix: Only keys that begin so, or with one of these.

    Raises:
        DataError: the file is damaged or cut off.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items() if name.startswith(prefix)}
    except Exception as error:  # the reader trusts the file: a damaged one fails in any way
        raise DataError(
            f"the GGUF file is damaged or cut off ({error})", where=str(path), remedy="fetch it again"
        ) from error


def _gguf_splitter(name: str, path: Path) -> dict[str, Any]:
    """The pre-tokenizer, in the terms of ``tokenizer.json``, that a GGUF file names."""
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if name in _GGUF_PLAIN:
        return plain
    if name in _GGUF_DIGITS:
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, plain]}
    if name in _GGUF_PATTERNS:
        pattern = {"Regex": _GGUF_PATTERNS[name]}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, plain | {"use_regex": False}]}
    known = sorted({*_GGUF_PLAIN, *_GGUF_DIGITS, *_GGUF_PATTERNS})
    raise DataError(
        f"texts are split by the rule {name!r}, which is not known here",
        where=str(path),
        remedy=f"use the model's tokenizer.json; known are {', '.join(known)}",
    )
