"""Rules by which text is split before tokens are looked for, by their names in GGUF (llama.cpp, llama-vocab.cpp)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cordillera.data.tokenizers.pairs.byte_pairs import LLAMA3_WORDS
from cordillera.errors import DataError

_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais")
_QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_WORDS = _QWEN2_WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Words change where small letters end; a contraction belongs to the word in the second.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*END|DIGITS"
_CASES += r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_WORDS = _CASES.replace("END", "").replace("DIGITS", r"\p{N}")
_O200K_WORDS = _CASES.replace("END", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
_PATTERNS = {
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "dbrx": LLAMA3_WORDS,
    "smaug-bpe": LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "deepseek-r1-qwen": _QWEN2_WORDS,
    "stablelm2": _QWEN2_WORDS,
    "qwen35": _QWEN35_WORDS,
    "tekken": _TEKKEN_WORDS,
    "gpt-4o": _O200K_WORDS,
    "llama4": _O200K_WORDS,
}
_WHOLE_TEXT = [{"Regex": pattern} for pattern in {*_PATTERNS.values()}]  # each finds every part of a text
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def takes_whole_words(name: str) -> bool:
    """Whether, with the rule of this ``name``, a word that is a token is used without merges, and texts are begun."""
    return name in _WHOLE_WORDS


def split_rule(name: str, path: Path) -> dict[str, Any]:
    """Return the pre-tokenizer, in the terms of ``tokenizer.json``, that the GGUF file at ``path`` names.

    Raises:
        DataError: the ``name`` is not known.
    """
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if name in _AS_GPT2:
        return plain
    if name in _DIGITS_ALONE:
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, plain]}
    if name in _PATTERNS:
        pattern = {"Regex": _PATTERNS[name]}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, plain | {"use_regex": False}]}
    known = sorted({*_AS_GPT2, *_DIGITS_ALONE, *_PATTERNS})
    raise DataError(
        f"texts are split by the rule {name!r}, which is not known here",
        where=str(path),
        remedy=f"use the model's tokenizer.json; known are {', '.join(known)}",
    )


def split_name(rule: Any, path: Path, merges: int, whole_words: bool) -> str:
    """Return the name in GGUF of a pre-tokenizer in the terms of ``tokenizer.json``, as ``path`` has it.

    Args:
        rule: The pre-tokenizer.
        path: File that errors name.
        merges: Number of merges; without any, every byte is a token, and no rule changes that.
        whole_words: Whether a word that is a token is used without merges.

    Raises:
        DataError: GGUF has no name for the rule.
    """
    if not merges:
        return _AS_GPT2[0]
    wanted = _without_offsets(rule)
    for name in (_AS_GPT2[0], _DIGITS_ALONE[0], *_PATTERNS):
        if takes_whole_words(name) == whole_words and _without_offsets(split_rule(name, path)) == wanted:
            return name
    raise DataError(
        "splits texts by a rule that has no name in GGUF here: ids would differ",
        where=str(path),
        remedy="choose another layout, or leave the tokenizer out with --tokenizer none",
    )


def _without_offsets(rule: Any) -> Any:
    """Return a rule without settings that change no token: offsets, and whether matches or separators are named."""
    if isinstance(rule, dict):
        kept = {key: _without_offsets(value) for key, value in rule.items() if key != "trim_offsets"}
        if (kept.get("behavior"), kept.get("invert")) == ("Removed", True) and kept.get("pattern") in _WHOLE_TEXT:
            kept |= {"behavior": "Isolated", "invert": False}
        parts = kept.get("pretokenizers")
        return parts[0] if isinstance(parts, list) and len(parts) == 1 else kept
    return [_without_offsets(one) for one in rule] if isinstance(rule, list) else rule
