"""Tokenizers that fall back to bytes: equal to the definition and to the libraries that their files are made for."""

from __future__ import annotations

import copy
import io
import itertools
import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cordillera.data.tokenizers.chat import Control, JinjaChat, Message
from cordillera.data.tokenizers.export import write_json_tokenizer, write_meta_tokenizer
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.pairs.sentencepiece import merges_of, scores_of
from cordillera.data.tokenizers.tokenizer import StreamDecoder, Tokenizer
from cordillera.errors import DataError
from tests.data import piece_vocabularies as p
from tests.data import vocabularies as v
from tests.data.test_tokenizer_limits import mutated
from tests.fuzzing import damaged, survives

KINDS: dict[str, Callable[[Path], Path]] = {
    "model": p.write_model,
    "model, no prefix": lambda folder: p.write_model(folder, prefix=False),
    "model, words": lambda folder: p.write_model(folder, user=("<sep>", "camel")),
    "json": p.write_json,
    "json, first": lambda folder: p.write_json(folder, p.metaspace("first")),
    "json, always": lambda folder: p.write_json(folder, p.metaspace("always")),
    "json, never": lambda folder: p.write_json(folder, p.metaspace("never")),
    "gguf": p.write_gguf,
    "gguf, no prefix": lambda folder: p.write_gguf(folder, prefix=False),
    "gguf, words": lambda folder: p.write_gguf(folder, user=("<sep>", "camel")),
}
EXACT = ["model", "model, no prefix", "json", "gguf", "gguf, no prefix"]
TEXTS = [
    *("", " ", "  ", "   ", "the", " the", "the cat", "  the  cat  ", "\n", "\n\n the", "\t\tx", "a" * 300, "<0x41> x"),
    *(
        "漢字 العربية हिन्दी ภาษา 한국어 😀👩‍👩‍👧",
        "e\u0301 Ä ﬁ ½",
        "\u0000a",
        "a\u200db",
        "1234567890",
        "haha" * 30 + "h",
    ),
    *(
        "\u3000wide\u2003",
        " " * 50 + "x" + " " * 51,
        "<unk> <s> </s> s> unk>",
        "\U00040000",
        "x<sep> camel cat<sep>the",
    ),
]
_fragments = st.sampled_from(
    [*p.SPECIAL, "<sep>", "camel", "the cat", "  ", " ", "haha", "漢字", "<0x0A>", "\n", "sat."]
)
_letters = st.characters(exclude_categories=["Cs"], exclude_characters=p.SPACE)
_texts = st.lists(st.one_of(_fragments, st.text(_letters)), max_size=10).map("".join)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write(tmp_path_factory.mktemp("pieces")) for kind, write in KINDS.items()}


@pytest.fixture(scope="module")
def tokenizers(paths: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(path) for kind, path in paths.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(text=_texts)
@settings(max_examples=40)
def test_text_is_written_whole_and_never_as_a_special_token(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_tokens.values())
    if kind in ("json, first", "json, always"):  # as in tokenizers, one space at the beginning stands for the prefix
        assert tokenizer.decode(ids) == text.removeprefix(" ")
    elif kind != "gguf, words":  # as in llama.cpp, what follows a word gets a space too
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x", text])[2] == ids
    assert tokenizer.decode_bytes(tokenizer.continued(text)) == text.encode()


@pytest.mark.parametrize("kind", EXACT)
@given(text=_texts)
@example(text="the   " * 3 + " " * 29 + "the")
@settings(max_examples=60)
def test_tokens_are_those_of_the_definition(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    has_prefix = "no prefix" not in kind
    assert tokenizers[kind].encode(text) == p.reference(text, has_prefix)
    assert tokenizers[kind].continued(text) == p.reference(text, False)


@pytest.mark.parametrize("kind", ["model", "json, first", "gguf, no prefix"])
@given(data=st.data())
@settings(max_examples=60)
def test_streamed_text_is_the_text(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    """Even of ids that no text gives: half characters, special tokens in between."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    for skip in (True, False):
        decoder = StreamDecoder(tokenizer, skip_special=skip, begins=True)
        assert "".join(map(decoder.push, ids)) + decoder.finish() == tokenizer.decode(ids, skip_special=skip)
        decoder = StreamDecoder(tokenizer, skip_special=skip)
        going_on = tokenizer.decode_bytes(ids, skip_special=skip).decode("utf-8", "replace")
        assert "".join(map(decoder.push, ids)) + decoder.finish() == going_on


def test_a_text_goes_on_as_it_would_in_one_piece(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["model"]
    ids = tokenizer.encode("the cat sat")
    decoder = StreamDecoder(tokenizer)
    assert tokenizer.decode(ids[:1]) + "".join(map(decoder.push, ids[1:])) + decoder.finish() == "the cat sat"
    assert tokenizer.encode("the") + tokenizer.continued(" cat") == tokenizer.encode("the cat")


def test_ids_of_the_file_s_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, tokenizer in tokenizers.items():
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, (2,)), kind
        assert tokenizer.adds_bos
        assert tokenizer.decode([0, 1, 2]) == "<unk><s></s>"
        assert tokenizer.token_bytes[3 + 0x0A] == b"\n"
    assert {tokenizers[kind].prefix for kind in ("model, no prefix", "json, never", "gguf, no prefix")} == {"never"}
    assert tokenizers["json, first"].prefix == "first"
    assert {tokenizers[kind].prefix for kind in ("model", "model, words", "json", "json, always", "gguf")} == {"always"}


def test_what_a_special_token_takes_around_it_is_no_token(tmp_path: Path) -> None:
    path = p.write_json(tmp_path, special=p.PHI3_SPECIAL, template=p.PHI3)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"][-1]["lstrip"] = True
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(path)
    user, end = (Control(name) for name in ("<|user|>", "<|end|>"))
    ids = [tokenizer.special_tokens[one.name] for one in (user, end)]
    assert tokenizer.encode_pieces([user, "\n\u2003", "\x1c the\n", end]) == [
        ids[0],
        *tokenizer.encode("\x1c the"),
        ids[1],
    ]
    assert tokenizer.encode_pieces(["the"], after=[user, "\n"]) == tokenizer.encode("the")
    assert tokenizer.encode_pieces(["the"], after=[user, "cat "]) == tokenizer.continued("the")
    assert tokenizer.encode_pieces([user, " \n", end]) == ids


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_a_fine_tuning_added_are_special(tmp_path: Path, place: str) -> None:
    plain, count = load_tokenizer(p.write_model(tmp_path)), len(p.pieces())
    names = {"<unk>": 0, "<|im_end|>": count, "<|im_start|>": count + 1}
    settings: dict[str, Any] = {"chat_template": v.CHATML, "eos_token": {"content": "<|im_end|>"}}
    if place == "added_tokens.json":
        (tmp_path / place).write_text(json.dumps(names))
    else:
        listed = {str(number): {"content": name, "rstrip": number > count} for name, number in names.items()}
        settings["added_tokens_decoder"] = listed
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (count + 2, 1, count)
    assert tokenizer.stop_ids == (count, 2)
    assert bool(tokenizer.strips) == (place != "added_tokens.json")
    chat = [Message("user", "the <|im_end|> cat")]
    ids = tokenizer.encode_chat(chat)
    assert [token for token in ids if token >= count] == [count + 1, count, count + 1]
    assert tokenizer.encode("the <|im_end|>") == plain.encode("the <|im_end|>")
    for write in (write_json_tokenizer, write_meta_tokenizer):
        folder = tmp_path / write.__name__
        folder.mkdir()
        write(tokenizer, folder, 64)
        assert load_tokenizer(folder).encode_chat(chat) == ids


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({"<a>": 1}, "added token '<a>' has the id {1}, and the next free one is {0}"),
        ({"<b>": 0, "<a>": -5}, "added token '<a>' has the id"),
        ({"<a>": 0, "<b>": 2}, "added token '<b>' has the id {2}, and the next free one is {1}"),
        ({"<s>": 0}, "added token '<s>' has the id {0}, and the file's own 1"),
        ({"<a>": 0.5}, "does not give tokens and their ids"),
        ({"": 0}, "does not give tokens and their ids"),
    ],
)
def test_added_tokens_that_do_not_follow_the_pieces_are_refused(
    tmp_path: Path, added: dict[str, Any], said: str
) -> None:
    path, count = p.write_model(tmp_path), len(p.pieces())
    (tmp_path / "added_tokens.json").write_text(json.dumps({name: count + place for name, place in added.items()}))
    with pytest.raises(DataError) as error:
        load_tokenizer(path)
    assert said.format(count, count + 1, count + 2) in str(error.value)
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"5": "<a>"}}))
    with pytest.raises(DataError, match="does not give tokens and their ids"):
        load_tokenizer(path)


# Merges and scores


@given(data=st.data())
@settings(max_examples=150)
def test_merges_in_the_order_of_scores_give_what_scores_give(data: st.DataObject) -> None:
    """Also where all runs of a letter have one score; and the scores of the merges give the same again."""
    import tokenizers as library

    names = data.draw(st.lists(st.text("ab", min_size=2, max_size=5), min_size=1, max_size=10, unique=True))
    if data.draw(st.booleans()):
        runs = ["a" * size for size in data.draw(st.sets(st.integers(2, 9), min_size=1))]
        names = [name for name in names if name.strip("a")]
    else:
        runs = []
    tied = data.draw(st.integers(-10, 1)) + 0.5
    scores = (
        {name: -float(rank) for rank, name in enumerate(names)} | dict.fromkeys(runs, tied) | {"a": -50.0, "b": -51.0}
    )
    merges = merges_of(scores, Path("x"))
    model = {"type": "BPE", "vocab": {name: number for number, name in enumerate(scores)}, "merges": merges}
    encoder = library.Tokenizer.from_str(json.dumps({"version": "1.0", "model": model}))
    back = scores_of(list(scores), merges)
    assert back is not None
    for text in data.draw(st.lists(st.text("ab", max_size=40) | st.just("ab" * 9) | st.just("a" * 31), max_size=6)):
        expected = _by_scores(text, scores)
        assert encoder.encode(text).tokens == expected
        assert _by_scores(text, back) == expected


def _by_scores(text: str, scores: dict[str, float]) -> list[str]:
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_merges_that_no_scores_give_have_none() -> None:
    vocabulary = ["a", "b", "c", "ab", "bc", "abc"]
    good = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
    assert scores_of(vocabulary, good) == {"a": -3, "b": -3, "c": -3, "ab": 0, "bc": -1, "abc": -2}
    for wrong in (good[:-1], [good[2], good[0], good[1], good[3]], good[1:]):
        assert scores_of(vocabulary, wrong) is None
    assert scores_of(["a", "ax"], []) is None


# Against the libraries


def _adversarial() -> list[str]:
    draw = random.Random(3)
    parts = [
        " ",
        "  ",
        "\n",
        "the",
        " cat",
        "ing",
        "A",
        "ß",
        "漢",
        "😀",
        "\u0301",
        "7",
        "12",
        "<",
        ">",
        "</",
        "\u2028",
        "h",
        "a",
    ]
    return TEXTS + ["".join(draw.choice(parts) for _ in range(draw.randint(1, 30))) for _ in range(200)]


def _plain(text: str) -> bool:
    """Whether no library finds a special token in a text."""
    return not any(name in text for name in (*p.SPECIAL, *p.PHI3_SPECIAL))


@pytest.mark.peer
@pytest.mark.parametrize("scheme", ["", "first", "always", "never", "split"])
def test_tokenizer_json_ids_and_texts_are_those_of_tokenizers(tmp_path: Path, scheme: str) -> None:
    import tokenizers as library

    rules = p.metaspace("always", True) if scheme == "split" else p.metaspace(scheme) if scheme else p.PREPENDED
    content = p.json_content(rules)
    size = len(content["model"]["vocab"])
    content["added_tokens"].append({**content["added_tokens"][0], "id": size, "content": "<sep>", "special": False})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    ours, theirs = load_tokenizer(path), library.Tokenizer.from_file(str(path))
    for text in [*filter(_plain, _adversarial()), "▁the▁ ▁cat", "the<sep> the<sep>cat", "<sep>the"]:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=False), text


@pytest.mark.peer
@pytest.mark.parametrize("scheme", ["", "first"])
@pytest.mark.parametrize("template", ["llama2", "phi3"])
def test_chats_are_those_of_transformers(tmp_path: Path, scheme: str, template: str) -> None:
    """Also with special tokens that take white space after them, and those after which text gets a space."""
    transformers = pytest.importorskip("transformers")
    special, source = (p.PHI3_SPECIAL, p.PHI3) if template == "phi3" else ((), p.LLAMA2)
    path = p.write_json(tmp_path, p.metaspace(scheme) if scheme else p.PREPENDED, special, source)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), chat_template=source, bos_token="<s>", eos_token="</s>"
    )
    ours = load_tokenizer(path)
    assert isinstance(ours.chat_format, JinjaChat)
    turns = [("user", " the cat  sat"), ("assistant", "on é\n"), ("user", "\n the mat ")]
    messages = [Message(role, text) for role, text in turns]  # type: ignore[arg-type]
    chat = [{"role": role, "content": text} for role, text in turns]
    for answer in (True, False):
        expected = theirs.apply_chat_template(chat, add_generation_prompt=answer, return_dict=False)
        assert ours.encode_chat(messages, answer=answer) == expected


@pytest.mark.peer
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("gguf")])
def test_gguf_ids_are_those_of_llama_cpp(paths: dict[str, Path], tokenizers: dict[str, Tokenizer], kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(paths[kind]), vocab_only=True, verbose=False)
    for text in filter(_plain, _adversarial()):
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == tokenizers[kind].encode(text), text


@pytest.mark.peer
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("model")])
def test_model_ids_and_texts_are_those_of_sentencepiece(
    paths: dict[str, Path], tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(paths[kind])), tokenizers[kind]
    for text in [*_adversarial(), "▁the▁ ▁cat"]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (theirs.bos_id(), theirs.eos_id(), theirs.vocab_size())


@pytest.mark.peer
@pytest.mark.parametrize("prefix", [True, False])
def test_a_model_that_sentencepiece_trains_is_read(tmp_path: Path, prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    draw = random.Random(1)
    lines = [" ".join(draw.choices(p.TEXT.split(), k=8)) for _ in range(200)]
    options = {"model_type": "bpe", "vocab_size": 340, "byte_fallback": True, "normalization_rule_name": "identity"}
    options |= {"remove_extra_whitespaces": False, "add_dummy_prefix": prefix, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **options)
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()), load_tokenizer(tmp_path)
    for text in [*lines[:20], *_adversarial()]:
        assert ours.encode(text) == theirs.encode(text), text


# Files come from outside


def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    own = p.pieces()
    wrong: list[tuple[bytes, str]] = [
        (p.model_content(trainer={3: 1}), "a unigram model"),
        (p.model_content(trainer={3: 4}), "a character model"),
        (p.model_content(trainer={24: 1}), "writes spaces in another way"),
        (p.model_content(normalizer={2: b"\0\0\0\0"}), "a table of its own"),
        (p.model_content(normalizer={4: 1}), "removes spaces"),
        (p.model_content(normalizer={5: 0}), "writes spaces in another way"),
        (p.model_content([one for one in own if one[0] != "<0x0A>"]), "1 of the 256 bytes are no tokens"),
        (p.model_content([*own, ("x1", 0.0, p.UNUSED)]), "kind 5"),
        (p.model_content([*own, own[-1]]), "twice"),
        (p.model_content([*own, ("", -1.0, 1)]), "empty"),
        (p.model_content([*own, ("the" + "h" * 600, -1.0, 1)]), "more than 512 characters"),
        (p.model_content([*own, ("qq", -1.0, 1)]), "'q', which is no token itself"),
        (p.model_content([*own, ("ht", 0.0, 1)]), "have the same score"),
        (p.model_content([*own, ("ht", float("nan"), 1)]), "not finite"),
        (p.model_content()[:-3], "damaged or cut off"),
        (p.model_content() + b"\x0b", "damaged or cut off"),
        (p.model_content() + b"\xff" * 12, "damaged or cut off"),
        (p.model_content() + b"\x0a\xff\xff\xff\xff\x7f", "damaged or cut off"),
        (p.model_content() + b"\x0a\x03\x0a\x01\xff", "damaged or cut off"),
        (p.model_content() + b"\x10\x05\x08\x01", "damaged or cut off"),
    ]
    for content, message in wrong:
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path)


def test_other_files_of_the_kind_are_refused(tmp_path: Path) -> None:
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda c: c["model"]["vocab"].pop("<0x00>"), "1 of the 256 bytes are no tokens"),
        (lambda c: c["model"].update(byte_fallback=False), "not in byte letters|bytes are no tokens"),
        (
            lambda c: c["added_tokens"].append(c["added_tokens"][0] | {"content": "\ud800", "id": 999}),
            "half a character",
        ),
        (lambda c: c.update(p.metaspace("last")), "the scheme 'last'"),
        (lambda c: c.update(pre_tokenizer={"type": "Metaspace", "replacement": "_"}), "Metaspace writes '_'"),
        (lambda c: c["normalizer"]["normalizers"][0].update(prepend="x"), "puts 'x' before a text"),
    ]
    for change, message in changes:
        content = p.json_content()
        change(content)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "x.gguf").write_bytes(p.write_gguf(tmp_path, found=[*p.pieces(), ("ht", 0.0, 1)]).read_bytes())
    with pytest.raises(DataError, match="have the same score"):
        load_tokenizer(tmp_path / "x.gguf")


def _use(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("the cat sat " * 50 + "a" * 60 + "!\n \t 1234 " + " " * 60 + "é漢\ufffd")
    tokenizer.decode(ids)
    tokenizer.encode_pieces([Control(next(iter(tokenizer.special_tokens), "<s>")), "the"])


WORDS = [
    b"\x0a",
    b"\x12",
    b"\x08",
    b"\x15",
    b"\x18",
    b"\xff" * 5 + b"\x7f",
    b"\x80" * 12,
    b"\xff\xff\xff\x7f",
    b"<0x00>",
]
WORDS += [b"\x18\x05", b"\x18\x04", b"\x18\x02", struct.pack("<f", float("inf")), struct.pack("<f", float("nan"))]


def test_damaged_models_work_or_are_refused(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    draw = random.Random(4)
    good = p.write_model(tmp_path, user=("<sep>",)).read_bytes()
    tail = len(good) - 60
    for number in range(fuzz_inputs(120)):
        content = damaged(good, draw, WORDS) if number % 2 else good[:tail] + damaged(good[tail:], draw, WORDS)
        (tmp_path / "tokenizer.model").write_bytes(content)
        survives(lambda: _use(tmp_path), f"tokenizer.model {number}")


def test_damaged_json_pieces_work_or_are_refused(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    draw = random.Random(6)
    good = [p.json_content(rules, p.PHI3_SPECIAL) for rules in (p.PREPENDED, p.metaspace("first"))]
    for number in range(fuzz_inputs(80)):
        content = mutated(copy.deepcopy(draw.choice(good)), draw)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        survives(lambda: _use(tmp_path), f"tokenizer {number}")


def test_damaged_gguf_pieces_work_or_are_refused(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    draw = random.Random(5)
    path = p.write_gguf(tmp_path, user=("<sep>",))
    good = path.read_bytes()
    words = [bytes([n, 0, 0, 0]) for n in range(13)] + [b"\xff" * 8, b"llama", b"gpt2", struct.pack("<f", float("nan"))]
    for number in range(fuzz_inputs(80)):
        path.write_bytes(damaged(good, draw, words))
        survives(lambda: _use(path), f"gguf {number}")


def test_files_whose_merges_would_take_long_are_refused(tmp_path: Path) -> None:
    """Tokens of hundreds of letters, each of which could be divided in hundreds of ways."""
    many = [
        ("h" * 200 + "t" * 200 + f"{number:06}".translate(str.maketrans("0123456789", "theacnsmd1")), -1.0 - number, 1)
        for number in range(30_000)
    ]
    (tmp_path / "tokenizer.model").write_bytes(p.model_content([*p.pieces(), *many]))
    found = survives(lambda: _use(tmp_path), "long tokens")
    assert isinstance(found, DataError)
    assert "characters" in str(found)


@pytest.mark.slow
def test_a_text_of_a_megabyte_takes_seconds(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("model", "json, first"):
        for text in ("the" * 333_000, "the " * 250_000, "x" + " " * 1_000_000, "haha" * 250_000):
            begin = time.process_time()
            ids = tokenizers[kind].encode(text)
            assert time.process_time() - begin < 10
            assert tokenizers[kind].decode(ids) == text
