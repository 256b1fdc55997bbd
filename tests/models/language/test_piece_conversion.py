"""Models whose tokenizers fall back to bytes, or normalise texts, in every layout: the same ids, chats and text."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from cordillera.data.tokenizers.chat import Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from cordillera.models.language.checkpoints.hugging_face import save_hugging_face
from cordillera.workflows.checkpoints.conversion import convert
from tests.data import piece_vocabularies as p
from tests.data import vocabularies as v
from tests.models.language.test_conversion import model_for, texts

CHAT = [Message("user", " the cat  é"), Message("assistant", "sat"), Message("user", "on\n")]


def _configured(folder: Path) -> Path:
    """Write a SentencePiece model whose texts begin with no token, and whose answers end at two."""
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 300]}')
    return p.write_model(folder)


SOURCES: dict[str, Callable[[Path], Path]] = {
    "model": p.write_model,
    "model, configured": _configured,
    "json": p.write_json,
    "json, first": lambda folder: p.write_json(folder, p.metaspace("first")),
    "json, takes space": lambda folder: p.write_json(folder, p.PREPENDED, p.PHI3_SPECIAL, p.PHI3),
    "gguf": p.write_gguf,
    "gguf, no prefix": lambda folder: p.write_gguf(folder, prefix=False),
    "gguf, words": lambda folder: p.write_gguf(folder, user=("<sep>",)),
}


def _model(tokenizer: Tokenizer, folder: Path) -> Path:
    """A folder of weights alone; the tokenizer is named when it is converted."""
    save_hugging_face(model_for(tokenizer), folder)
    return folder


def _same(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in [*texts(40), "", " ", "the<sep>cat <sep>", " " * 40 + "the"]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.continued(text) == theirs.continued(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text
    assert (ours.bos_id, ours.eos_id, ours.stop_ids, ours.adds_bos) == (
        *(theirs.bos_id, theirs.eos_id, theirs.stop_ids, theirs.adds_bos),
    )
    if ours.chat_format is not None:
        assert ours.encode_chat(CHAT) == theirs.encode_chat(CHAT)


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", SOURCES)
def test_every_layout_keeps_ids_and_chats(tmp_path: Path, kind: str) -> None:
    (tmp_path / "vocabulary").mkdir()
    source = load_tokenizer(SOURCES[kind](tmp_path / "vocabulary"))
    weights = _model(source, tmp_path / "weights")
    for target in ("hf", "meta", "x.gguf"):
        to = "meta" if target == "meta" else None
        done = convert(weights, tmp_path / target, to=to, dtype="float32", tokenizer=source.path)
        assert done.same_chats or source.chat_format is None
        _same(load_tokenizer(tmp_path / target), source)
    convert(tmp_path / "x.gguf", tmp_path / "again", dtype="float32")
    _same(load_tokenizer(tmp_path / "again"), source)
    convert(tmp_path / "hf", tmp_path / "again.gguf", dtype="float32")
    _same(load_tokenizer(tmp_path / "again.gguf"), source)
    assert (tmp_path / "meta" / "tokenizer.model").exists() == kind.startswith("model")


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["model", "json", "json, first", "gguf", "gguf, no prefix"])
def test_transformers_reads_what_is_written(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocabulary").mkdir()
    source = load_tokenizer(SOURCES[kind](tmp_path / "vocabulary"))
    convert(_model(source, tmp_path / "weights"), tmp_path / "hf", tokenizer=source.path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in texts(60):
        assert theirs(text)["input_ids"] == source.encode(text, bos=True), text
        assert theirs.decode(source.encode(text)) == source.decode(source.encode(text)), text
    if source.chat_format is not None:
        chat = [{"role": message.role, "content": message.content} for message in CHAT]
        assert theirs.apply_chat_template(chat, return_dict=False) == source.encode_chat(CHAT)


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["model", "json", "gguf, no prefix", "gguf, words"])
def test_llama_cpp_reads_what_is_written(tmp_path: Path, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    (tmp_path / "vocabulary").mkdir()
    source = load_tokenizer(SOURCES[kind](tmp_path / "vocabulary"))
    convert(_model(source, tmp_path / "weights"), tmp_path / "x.gguf", dtype="float32", tokenizer=source.path)
    theirs = llama_cpp.Llama(str(tmp_path / "x.gguf"), vocab_only=True, verbose=False)
    for text in [*texts(60), "the<sep> cat", " " * 40]:
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == source.encode(text), text
    assert (theirs.token_bos(), theirs.token_eos()) == (source.bos_id, source.eos_id)


def test_normalised_texts_stay_normalised(tmp_path: Path) -> None:
    """Unicode's composition (NFC), which Qwen's tokenizers do first, in files that other programs read without it."""
    (tmp_path / "vocabulary").mkdir()
    path = v.write_json(tmp_path / "vocabulary")
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "normalizer": {"type": "NFC"}}))
    source = load_tokenizer(path)
    assert source.encode("e\u0301") == source.encode("é")
    convert(_model(source, tmp_path / "weights"), tmp_path / "x.gguf", tokenizer=path)
    convert(tmp_path / "x.gguf", tmp_path / "hf")
    for name in ("x.gguf", "hf"):
        found = load_tokenizer(tmp_path / name)
        for text in [*texts(40), "e\u0301 A\u030a", "\u1112\u1161\u11ab"]:
            assert found.encode(text) == source.encode(text), text
            assert found.decode(found.encode(text)) == unicodedata.normalize("NFC", text)


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    for name in ("vocabulary", "words"):
        (tmp_path / name).mkdir()
    path = p.write_json(tmp_path / "vocabulary")
    content = json.loads(path.read_text(encoding="utf-8"))
    merges = content["model"]["merges"]
    weights = _model(load_tokenizer(path), tmp_path / "weights")
    for change, message in (
        ({"pre_tokenizer": {"type": "Punctuation"}}, "changes or splits texts"),
        ({**p.metaspace("first", split=True)}, "changes or splits texts"),
        ({"model": {**content["model"], "merges": merges[1::2] + merges[::2]}}, "an order that no scores give"),
        ({"model": {**content["model"], "merges": merges[1:]}}, "an order that no scores give"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match=message):
            convert(weights, tmp_path / "x.gguf", dtype="float32", tokenizer=path)
    words = p.write_model(tmp_path / "words", user=("<sep>",))
    weights = _model(load_tokenizer(words), tmp_path / "other")
    for target, message in (("y.gguf", "changes or splits texts"), ("hf", "words of its own")):
        with pytest.raises(DataError, match=message):
            convert(weights, tmp_path / target, dtype="float32", tokenizer=words)
        assert not (tmp_path / target).exists()
