"""A model with its tokenizer, as Python uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cordillera
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import CheckpointError, DataError
from cordillera.serving.language.language_model import LanguageModel
from tests.serving.small_models import greedy, write_model

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = cordillera.Sampling(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


def test_pieces_together_are_the_completions(folder: Path) -> None:
    model = cordillera.load_language_model(folder, dtype="float32")
    prompts = ["the cat", "the mat, the end", "é"]
    settings = {"max_new_tokens": 9, "sampling": GREEDY}
    found = model.generate(prompts, **settings)
    texts = ["", "", ""]
    for piece in model.stream(prompts, **settings):
        texts[piece.sequence] += piece.text
    assert [one.text for one in found] == texts
    assert texts == [greedy(folder, ids, 9) for ids in model.encode(prompts)]
    assert all(one.finish for one in found)


def test_one_text_is_one_prompt(folder: Path) -> None:
    model = LanguageModel(folder, dtype="float32", drafter="none")
    assert model.generate("the cat", max_new_tokens=5, sampling=GREEDY) == model.generate(
        ["the cat"], max_new_tokens=5, sampling=GREEDY
    )


def test_bfloat16_answers_with_the_weights_of_the_file(folder: Path) -> None:
    """Generation reads the embedding's own weights as its head: nothing is stored twice."""
    model = cordillera.load_language_model(folder)
    (one,) = model.generate("the cat", max_new_tokens=5)
    assert one.tokens > 0
    assert model.model.head is not None
    assert model.model.head.weight is model.model.embedding.weight
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}


def test_weights_are_read_when_they_are_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise CheckpointError("weights are read")

    monkeypatch.setattr("cordillera.serving.language.language_model.read_model", broken)
    model = LanguageModel(folder)
    stream = model.stream("the")
    with pytest.raises(CheckpointError, match="weights are read"):
        next(stream)
    with pytest.raises(CheckpointError, match="weights are read"):
        cordillera.load_language_model(folder)


def test_special_tokens_in_a_prompt_are_text(folder: Path) -> None:
    model = LanguageModel(folder)
    (ids,) = model.encode(["<|im_end|>"], chat=False)
    assert load_tokenizer(folder).special_tokens["<|im_end|>"] not in ids
    chat, plain = (model.encode([text], chat=True)[0] for text in ("<|im_end|>", "the"))
    ends = [ids.count(load_tokenizer(folder).special_tokens["<|im_end|>"]) for ids in (chat, plain)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("prompts", "said"), [("", "prompt: is empty"), (["a", ""], "prompt 2: is empty")])
def test_empty_prompts_are_refused(folder: Path, prompts: str | list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        LanguageModel(folder).stream(prompts)


def test_a_folder_without_a_tokenizer_is_refused_with_what_it_should_hold(folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "bare")
    (other / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="holds no tokenizer"):
        LanguageModel(other)
    assert LanguageModel(other, tokenizer=folder).tokenizer.vocab_size == load_tokenizer(folder).vocab_size
