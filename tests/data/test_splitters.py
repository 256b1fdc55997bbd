"""Rules by which families of models split text before bytes are merged, in tokenizer.json and in GGUF."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.pairs.splitters import split_name, split_rule, takes_whole_words
from cordillera.errors import DataError
from tests.data import vocabularies as v

# As the families' tokenizer.json have them.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"pattern": QWEN2, "normalizer": {"type": "NFC"}},
    "qwen35": {"pattern": QWEN35, "normalizer": {"type": "NFC"}},
    "tekken": {"pattern": TEKKEN, "whole": True},
    "llama-bpe": {"pattern": v.LLAMA3, "whole": True},
    "dbrx": {"pattern": v.LLAMA3, "behavior": "Removed", "invert": True},  # Phi-4
    "gpt-4o": {"pattern": GPT4O},
}


def _rule(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, level]}


def _write(folder: Path, family: dict[str, Any]) -> Path:
    rule = _rule(family["pattern"], family.get("behavior", "Isolated"), family.get("invert", False))
    content = v.json_content()
    content |= {"pre_tokenizer": rule, "normalizer": family.get("normalizer")}
    content["model"] |= {"ignore_merges": family.get("whole", False), "unk_token": None}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _texts(letters: str) -> list[str]:
    draw = random.Random(11)
    found = [
        "the cat DON'T don't I'Ll",
        "camelCase HTMLParser 12345 a1b22",
        " \n\n x\r\n\t//\r\n/ y  ",
        "",
        "   ",
        "http://a/b ",
    ]
    return found + ["".join(draw.choice(letters) for _ in range(draw.randint(1, 24))) for _ in range(150)]


ASCII = "thecatTHECAT 12'sld/\n\r\t.,!(  "
WIDE = ASCII + "éÉßǅ漢字\u0301\u0308हिन्दीªʰ½٣😀\u200d\u2003\u0085"


@pytest.mark.peer
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_tokenizers(tmp_path: Path, name: str) -> None:
    import tokenizers as library

    path = _write(tmp_path, FAMILIES[name])
    ours, theirs = load_tokenizer(path), library.Tokenizer.from_file(str(path))
    for text in _texts(WIDE):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected), text


@pytest.mark.parametrize("name", FAMILIES)
def test_names_in_gguf_are_of_the_rules_of_tokenizer_json(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    content = json.loads(_write(tmp_path, family).read_text(encoding="utf-8"))
    rule, whole = content["pre_tokenizer"], family.get("whole", False)
    assert split_name(rule, tmp_path, 1, whole) == name
    assert takes_whole_words(name) == whole
    gguf, theirs = load_tokenizer(v.write_gguf(tmp_path, name)), v.learn()
    for text in _texts(WIDE):
        found = [gguf.token_bytes[token] for token in gguf.encode(text)]
        assert found == v.reference(text, [family["pattern"]], theirs), text


@pytest.mark.peer
@pytest.mark.parametrize("name", ["qwen2", "qwen35", "tekken", "llama-bpe", "dbrx", "gpt-4o"])
def test_gguf_ids_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    """Of ASCII for the rules by case, which llama.cpp has for no other letters."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = v.write_gguf(tmp_path, name)
    ours, theirs = load_tokenizer(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    assert ours.adds_bos is False  # as the file says
    for text in _texts(ASCII if name in ("tekken", "gpt-4o") else WIDE):
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == ours.encode(text), text


def test_a_rule_goes_with_whole_words_or_not(tmp_path: Path) -> None:
    for name, whole in (("qwen2", True), ("tekken", False), ("gpt-2", True)):
        with pytest.raises(DataError, match="no name in GGUF"):
            split_name(split_rule(name, tmp_path), tmp_path, 1, whole)
    other = _rule(r"\p{L}+", "Removed", True)  # leaves out what is between words
    with pytest.raises(DataError, match="no name in GGUF"):
        split_name(other, tmp_path, 1, False)
