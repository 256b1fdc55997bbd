"""Files of tokenizers come from outside: every one is read, or refused in a sentence, within limits."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cordillera.data.tokenizers.gguf import gguf_header
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.pairs.byte_pairs import LLAMA3_WORDS
from cordillera.data.tokenizers.pairs.rules import _problem
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from tests.data import vocabularies as v
from tests.fuzzing import damaged, survives

Content = dict[str, Any]
TEXT = "the cat sat " * 50 + "a" * 60 + "!\n \t 1234 " + " " * 60 + "é漢\ufffd"


def _use(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode(TEXT))
    return tokenizer


def _split(expression: str) -> Content:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, plain]}


def _replace(content: str, count: int = 1, pattern: str = "[^\n]") -> Content:
    one = {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
    return {"type": "Sequence", "normalizers": [one] * count}


def _nested(count: int) -> Content:
    return functools.reduce(lambda rule, _: {"type": "Sequence", "normalizers": [rule]}, range(count), {"type": "NFC"})


COSTLY: list[tuple[Callable[[Content], object], str]] = [
    (lambda c: c["added_tokens"].append(c["added_tokens"][0] | {"id": 300_000_000, "content": "far"}), "mostly empty"),
    (lambda c: c["model"]["vocab"].update(far=300_000_000), "mostly empty"),
    (lambda c: c["model"]["vocab"].update(far=2**70), "mostly empty"),
    (lambda c: c["model"]["vocab"].update(far=-1), "not a whole number"),
    (lambda c: c["model"]["vocab"].update(far=True), "not a whole number"),
    (lambda c: c["model"]["merges"].append(["a"]), "not a pair"),
    (lambda c: c["model"]["merges"].append(7), "not a pair"),
    (lambda c: c["model"].update(vocab=[]), "of a wrong kind"),
    (lambda c: c["added_tokens"].append({"id": 4}), r"added_tokens\[6\]"),
    (lambda c: c.update(added_tokens=7), r"added_tokens\[0\]"),
    (lambda c: c.update(normalizer=_replace("x" * 9, 3)), "more than 64 characters of one"),
    (lambda c: c.update(normalizer=_replace("x" * 100)), "more than 64 characters of one"),
    (lambda c: c.update(normalizer={"type": "Prepend", "prepend": "x" * 10**6}), "more than 64 characters of one"),
    (lambda c: c.update(normalizer=_nested(100)), "4 levels deep"),
    (lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}), "'Precompiled'"),
    (lambda c: c.update(pre_tokenizer={"type": "FixedLength", "length": 0}), "'FixedLength'"),
    (lambda c: c.update(pre_tokenizer=_split("(a+)+$")), "several ways"),
    (lambda c: c.update(pre_tokenizer=_split("(?:a|a)*$")), "several ways"),
    (lambda c: c.update(pre_tokenizer=_split(r"\s*\s*\s*\s*x")), "more than 32,000 ways"),
    (lambda c: c.update(pre_tokenizer=_split("x{99}{99}{99}")), "repeats a repetition"),
    (lambda c: c.update(pre_tokenizer=_split("(a)\\1")), "refers to what it matched"),
    (lambda c: c.update(pre_tokenizer=_split("a" * 5000)), "a String or Regex of 1 to"),
    (lambda c: c.update(pre_tokenizer=_split("((")), "Oniguruma"),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", range(len(COSTLY)))
def test_small_files_that_cost_much_are_refused(tmp_path: Path, number: int) -> None:
    change, message = COSTLY[number]
    content = v.json_content()
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    found = survives(lambda: _use(path), message)
    assert isinstance(found, DataError)
    with pytest.raises(DataError, match=message):
        raise found


KNOWN = [
    LLAMA3_WORDS,
    v.GPT2,
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))|[一-龥]+|\s?\p{L}++|[^ab[cd]&&e]?+",
]


@pytest.mark.parametrize("expression", KNOWN)
def test_expressions_of_published_tokenizers_are_taken(expression: str) -> None:
    assert _problem(expression) is None


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+",
        "((a?)b)*",
        "(a|b)+",
        "(?:a{1,3})+",
        "(a+){2}",
        "a{1,3}+",
        "a*{3}",
        "(?>a+)*",
        "(?i:a|b)*",
        "(?<n>a)\\k<n>",
        r"\g<1>(a)",
        "(?(1)a|b)",
        "a*b*c",
        "(a*b*)c",
        "(a*)(b*)c",
        "a*(b*c)?d",
        "(?=a*b*c)a",
        "a*(?=b*c)",
        "a*(?!.*)",
        "a*(?>b*)c",
        "(?=a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?b)a",
        "(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)b|a",
        "a{0,99}a{0,99}a{0,99}b",
        "(*FAIL)",
        "a)",
    ],
)
def test_expressions_whose_time_could_explode_are_refused(expression: str) -> None:
    assert _problem(expression) is not None


def _expression(draw: random.Random, depth: int = 0) -> str:
    """A random expression whose parts match a text of one letter in many ways."""
    found = ""
    for _ in range(draw.randint(1, 4)):
        item = draw.choice(["a", "[ab]", ".", r"\w"])
        if depth < 2 and draw.random() < 0.3:
            item = draw.choice(["(", "(?:", "(?=", "(?!", "(?>", "(?i:"]) + _expression(draw, depth + 1) + ")"
        found += item + draw.choice(["", "*", "+", "?", "{1,3}", "*?"]) + draw.choice(["|", *[""] * 9])
    return found


def test_expressions_that_are_taken_end_soon(fuzz_inputs: Callable[[int], int]) -> None:
    """Without the limit of ways, some of these expressions take minutes."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    draw, taken = random.Random(0), 0
    while taken < fuzz_inputs(60):
        expression = f"(?:{_expression(draw)})[bc]|a"
        if _problem(expression) is not None:
            continue
        try:
            split = Split(Regex(expression), "isolated")
        except Exception:  # look-behinds of any length and the like, which the library refuses
            continue
        survives(lambda: split.pre_tokenize_str("a" * 1000), expression)  # noqa: B023
        taken += 1


def test_what_the_library_does_not_get_through_is_an_error_of_ours(tmp_path: Path) -> None:
    """The library's own failures are no ``Exception``."""
    path = v.write_json(tmp_path)
    tokenizer = load_tokenizer(path)

    class PanicException(BaseException):
        pass

    from cordillera.data.tokenizers.pairs.byte_pairs import BytePairs

    pairs = BytePairs(path, {}, [], {}, {}, None, None, False)
    assert isinstance(pairs._failed(PanicException("retry-limit"), "x"), DataError)
    assert isinstance(pairs._failed(KeyboardInterrupt(), "x"), KeyboardInterrupt)
    assert tokenizer.encode("a")


WORDS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"1e999",
    b"NaN",
    b"300000000",
    b"-1",
    b"4294967296",
    b"true",
]
WORDS += [b'"Regex"', b'"(a+)+"', b'"Sequence"', b'"Replace"', b'"id"', b"\\ud800", b'"content"', b'"special"', b"\xff"]


def _smaller() -> Content:
    content = v.json_content()
    content["normalizer"] = _replace("xy", pattern="[,;]+")
    content["pre_tokenizer"]["pretokenizers"] += _split(LLAMA3_WORDS)["pretokenizers"][:1]
    content["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>"}}]}
    return content


def test_damaged_json_tokenizers_work_or_are_refused(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    draw = random.Random(0)
    v.write_json(tmp_path)
    good = {name: (tmp_path / name).read_bytes() for name in ("tokenizer_config.json", "generation_config.json")}
    content = _smaller()
    tail = {**content, "model": {**content["model"], "vocab": {}, "merges": []}}
    for number in range(fuzz_inputs(120)):
        target = draw.choice(["tokenizer.json"] * 3 + list(good))
        for name, text in good.items():
            (tmp_path / name).write_bytes(text)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        if target != "tokenizer.json":
            (tmp_path / target).write_bytes(damaged(good[target], draw, WORDS))
        elif draw.random() < 0.5:  # all but the long lists, which most damage would hit
            try:
                changed = json.loads(damaged(json.dumps(tail).encode(), draw, WORDS))
                changed["model"] = {**changed["model"], **{k: content["model"][k] for k in ("vocab", "merges")}}
            except Exception:
                changed = mutated(copy.deepcopy(content), draw)
            (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        elif draw.random() < 0.5:
            (tmp_path / "tokenizer.json").write_text(json.dumps(mutated(copy.deepcopy(content), draw)))
        else:
            (tmp_path / "tokenizer.json").write_bytes(damaged(json.dumps(content).encode(), draw, WORDS))
        survives(lambda: _use(tmp_path), f"tokenizer {number}")


VALUES = [
    None,
    True,
    -1,
    0,
    7,
    3e8,
    300_000_000,
    2**64,
    "",
    "x",
    "(a+)+",
    "<|im_end|>",
    "\ud800",
    [],
    {},
    [[]],
    [7],
    {"a": 7},
]


def mutated(content: Any, draw: random.Random) -> Any:
    """One value somewhere replaced by another, or left out."""
    places: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        node = waiting.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, dict | list) and len(value) < 60:
                waiting.append(value)
    node, key = draw.choice(places)
    if draw.random() < 0.2:
        del node[key]
    else:
        node[key] = copy.deepcopy(draw.choice(VALUES))
    return content


def test_damaged_tiktoken_files_work_or_are_refused(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    draw = random.Random(1)
    path = v.write_tiktoken(tmp_path)
    good = path.read_bytes()
    for number in range(fuzz_inputs(60)):
        path.write_bytes(
            damaged(good, draw, [b" ", b"\n", b"=", b"9" * 5000, b"300000000", b"AA== 7\n", b"\x00", b"\xff"])
        )
        survives(lambda: _use(path), f"tokenizer.model {number}")


GGUF_WORDS = [bytes([n, 0, 0, 0]) for n in (*range(13), 255)] + [b"\xff" * 8, b"\x00" * 8, b"\x00" * 7 + b"\x80"]
GGUF_WORDS += [
    b"general.alignment",
    b"\x00\x00\x00\x40\x00\x00\x00\x00",
    b"(a+)+",
    b"\xff\xff\xff\x7f",
    b"\x07\x00\x00\x00",
]


def test_damaged_gguf_files_work_or_are_refused(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    draw = random.Random(2)
    good = [v.write_gguf(tmp_path, name).read_bytes() for name in ("smollm", "llama-bpe")]
    tensors = _with_tensors(tmp_path / "tensors.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    for number in range(fuzz_inputs(120)):
        path.write_bytes(damaged(draw.choice([*good, tensors[:700] + tensors[700:]]), draw, GGUF_WORDS))
        survives(lambda: _use(path), f"gguf {number}")
        survives(lambda: gguf_header(path), f"gguf header {number}")


def _with_tensors(path: Path, **changes: Any) -> Path:
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    for number in range(3):
        writer.add_tensor(f"t{number}", np.ones((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_that_overlap_or_lie_outside_are_refused(tmp_path: Path) -> None:
    path = _with_tensors(tmp_path / "tensors.gguf")
    good = path.read_bytes()
    name = good.index(b"t1") + 2
    for at, value, message in (
        (name + 24, 0, "overlap"),
        (name + 24, 384 * 2 + 32, "overlap"),
        (name + 24, 7, "not aligned"),
        (name + 24, 2**62, "beyond the end"),
        (name + 4, 2**62, "beyond the end|overlap"),
        (name + 4, 0, "holds nothing"),
    ):
        path.write_bytes(good[:at] + value.to_bytes(8, "little") + good[at + 8 :])
        with pytest.raises(DataError, match=message):
            gguf_header(path)
    path.write_bytes(good.replace(b"t1", b"t0"))
    with pytest.raises(DataError, match="two tensors are called 't0'"):
        gguf_header(path)
    path.write_bytes(good[:-400])
    with pytest.raises(DataError, match="beyond the end"):
        gguf_header(path)


def test_sizes_of_tensors_are_those_of_the_library() -> None:
    from gguf import GGML_QUANT_SIZES

    from cordillera.data.tokenizers.gguf import _BLOCKS

    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    assert all(theirs[kind] == sizes for kind, sizes in _BLOCKS.items())
