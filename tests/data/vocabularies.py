"""Small vocabularies in every kind of file, and a plain byte-pair encoder to compare with."""

from __future__ import annotations

import base64
import functools
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any, AnyStr

import regex

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>")
TEXT = "the cat sat on the mat, the end <|im_start|> <|im_end|> endoftext 123 1234 ééé 漢字漢字 im_start eot_id header"


def learn(merges: int = 80) -> list[tuple[bytes, bytes]]:
    """Merges of the most frequent neighbours, first come first on ties."""
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(LLAMA3, TEXT * 2)]
    found = []
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        best = max(pairs, key=pairs.__getitem__)
        found.append(best)
        words = [joined(word, best) for word in words]
    return found


def joined(word: list[AnyStr], pair: tuple[AnyStr, AnyStr]) -> list[AnyStr]:
    """A word whose neighbours ``pair`` are one."""
    out: list[AnyStr] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] = out[-1] + part
        else:
            out.append(part)
    return out


def reference(text: str, patterns: list[str], merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Tokens of a text by the definition: split by each pattern in turn, then the earliest merge first."""
    words = [text]
    for pattern in patterns:
        words = [part for word in words for part in _isolated(pattern, word)]
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    found: list[bytes] = []
    for word in words:
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            known = [(ranks[pair], pair) for pair in itertools.pairwise(parts) if pair in ranks]
            if not known:
                break
            parts = joined(parts, min(known)[1])
        found += parts
    return found


def _isolated(pattern: str, text: str) -> list[str]:
    parts, begin = [], 0
    for found in regex.finditer(pattern, text):
        parts += [text[begin : found.start()], found[0]]
        begin = found.end()
    return [part for part in (*parts, text[begin:]) if part]


def letters(content: bytes) -> str:
    """Bytes in GPT-2's letters."""
    return "".join(letter_of()[byte] for byte in content)


@functools.cache
def letter_of() -> dict[int, str]:
    """GPT-2's letter of each byte, spelled out as its table was published."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def write_tiktoken(folder: Path) -> Path:
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in learn():
        if left + right not in tokens:
            tokens.append(left + right)
    path = folder / "tokenizer.model"
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return path


def _vocabulary() -> dict[str, int]:
    tokens = [*SPECIAL, *(letters(bytes([byte])) for byte in range(256))]
    tokens += [letters(left + right) for left, right in learn()]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def json_content() -> dict[str, Any]:
    vocabulary = _vocabulary()
    added = [
        {"id": i, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for i, name in enumerate(SPECIAL)
    ]
    size = len(vocabulary)
    added.append({**added[0], "id": size, "content": "<think>", "special": False})
    added.append({**added[0], "id": size + 1, "content": "<|late|>"})
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, plain]},
        "post_processor": None,
        "decoder": plain,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<|endoftext|>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [[letters(left), letters(right)] for left, right in learn()],
        },
    }


def write_json(folder: Path, **changes: Any) -> Path:
    path = folder / "tokenizer.json"
    content = json_content()
    content["model"] |= changes
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return path


def write_gguf(folder: Path, splitter: str = "smollm", kind: str = "gpt2", eos: int = 2) -> Path:
    from gguf import GGUFWriter

    path = folder / f"{splitter}.gguf"
    vocabulary = _vocabulary()
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(list(vocabulary))
    writer.add_token_types([3 if name in SPECIAL else 1 for name in vocabulary])
    writer.add_token_merges([f"{letters(left)} {letters(right)}" for left, right in learn()])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
