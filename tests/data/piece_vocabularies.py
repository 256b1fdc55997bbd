"""Small vocabularies in the spelling of SentencePiece in every kind of file, and a plain encoder to compare with."""

from __future__ import annotations

import copy
import itertools
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from tests.data.vocabularies import joined

SPACE = "▁"
SPECIAL = ("<unk>", "<s>", "</s>")
TEXT = "the cat sat on the mat, the end. the theatre <s> </s> 123 1234 ééé 漢字漢字 haha hahaha unk sat."
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% else %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PHI3_SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

Piece = tuple[str, float, int]


def pieces(user: tuple[str, ...] = ()) -> list[Piece]:
    """Pieces with their scores and kinds: merges of the most frequent neighbours, runs of spaces, then letters."""
    words = [list(SPACE + word) for word in TEXT.split()] * 2
    letters = list(dict.fromkeys(SPACE + TEXT.replace(" ", "")))
    merged = list[str]()
    for _ in range(60):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        best = max(pairs, key=pairs.__getitem__)
        merged.append("".join(best))
        words = [joined(word, best) for word in words]
    merged = [piece for piece in dict.fromkeys(merged) if piece not in SPECIAL]
    found: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    found += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    found += [(piece, -float(rank), NORMAL) for rank, piece in enumerate(merged)]
    found += [(SPACE * size, -1e9, NORMAL) for size in (2, 4, 8, 3, 5, 6, 7)]  # with one score, as in Llama 2
    found += [(letter, -1e3 - number, NORMAL) for number, letter in enumerate(letters)]
    return found + [(name, 0.0, USER_DEFINED) for name in user]


def reference(text: str, prefix: bool = True) -> list[int]:
    """Ids by the definition: the neighbours of the highest score first, then the first; the rest in bytes."""
    ids = {piece: number for number, (piece, _, _) in enumerate(pieces())}
    scores = {piece: score for piece, score, kind in pieces() if kind == NORMAL}
    parts = list((" " if prefix and text else "") + text)
    parts = [SPACE if part == " " else part for part in parts]
    while True:
        known = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not known:
            break
        place = min(known)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def _field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def model_content(
    found: list[Piece] | None = None,
    trainer: dict[int, bytes | int] | None = None,
    normalizer: dict[int, bytes | int] | None = None,
) -> bytes:
    """Content of a ``tokenizer.model``; other fields of the settings by their numbers."""
    parts = []
    for text, score, kind in pieces() if found is None else found:
        piece = _field(1, text.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score)
        parts.append(_field(1, piece + (b"" if kind == NORMAL else _field(3, kind))))
    for number, settings in (
        (2, {3: 2, 35: 1} | (trainer or {})),
        (3, {1: b"identity", 3: 1, 4: 0} | (normalizer or {})),
    ):
        parts.append(_field(number, b"".join(_field(*entry) for entry in settings.items())))
    return b"".join(parts)


def write_model(folder: Path, *, prefix: bool = True, user: tuple[str, ...] = ()) -> Path:
    path = folder / "tokenizer.model"
    path.write_bytes(model_content(pieces(user), normalizer={3: int(prefix)}))
    return path


def _merges() -> list[list[str]]:
    """All ways to each piece, by its score, as converters of Hugging Face list them."""
    scores = {piece: score for piece, score, kind in pieces() if kind == NORMAL}
    found = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        splits = [(piece[:size], piece[size:]) for size in range(1, len(piece))]
        found += [[left, right] for left, right in splits if left in scores and right in scores]
    return found


PREPENDED: dict[str, Any] = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ],
    },
    "pre_tokenizer": None,
}
"""Rules of Llama 2, TinyLlama, Phi-3 and Mistral up to 0.2."""


def metaspace(scheme: str, split: bool = False) -> dict[str, Any]:
    """Rules of Mistral 0.3 (``first``), and others of their kind."""
    rule = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": split}
    return {"normalizer": None, "pre_tokenizer": rule}


def json_content(rules: dict[str, Any] = PREPENDED, special: tuple[str, ...] = ()) -> dict[str, Any]:
    vocabulary = {piece: number for number, (piece, _, _) in enumerate(pieces())}
    flags = {"single_word": False, "lstrip": False, "normalized": False, "special": True}
    added = [{"id": vocabulary[name], "content": name, "rstrip": False, **flags} for name in SPECIAL]
    added += [
        {"id": len(vocabulary) + number, "content": name, "rstrip": True, **flags}
        for number, name in enumerate(special)
    ]
    prefixed = "Prepend" in json.dumps(rules) or "never" not in json.dumps(rules)
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **copy.deepcopy(rules),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": _merges(),
        },
    }


def write_json(
    folder: Path, rules: dict[str, Any] = PREPENDED, special: tuple[str, ...] = (), template: str = LLAMA2
) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json_content(rules, special), ensure_ascii=False), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_gguf(
    folder: Path, *, prefix: bool = True, user: tuple[str, ...] = (), found: list[Piece] | None = None
) -> Path:
    from gguf import GGUFWriter

    path = folder / "pieces.gguf"
    found = pieces(user) if found is None else found
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _, _ in found])
    writer.add_token_scores([score for _, score, _ in found])
    writer.add_token_types([kind for _, _, kind in found])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.add_uint32("llama.context_length", 64)
    for name in ("embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
