"""Language models on files: loss, intervals and choices by their definitions, and rows that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cordillera.data.language.chats.tokens import chat_tokenizer
from cordillera.data.tokenizers.chat import Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import CordilleraError, DataError
from cordillera.intervals import wilson_interval
from cordillera.models.language.checkpoints import load, save_hugging_face
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.workflows import evaluate
from cordillera.workflows.evaluation import language_files
from cordillera.workflows.evaluation.language_files import (
    ChatEvaluation,
    ChoiceEvaluation,
    TextEvaluation,
    evaluate_language_file,
)
from tests.data import piece_vocabularies as pieces
from tests.serving.small_models import CONTEXT, write_model

TEXT = "the cat sat on the mat 123 é 漢字\n" * 30
QUESTIONS = [
    {"prompt": "the cat", "choices": ["sat on", "mat", "é 123"], "answer": 0},
    {"prompt": "the end ", "choices": ["the cat", "123 1234 the mat"], "answer": "the cat"},
    {"prompt": "on the", "choices": [" mat", "\ncat", " end of the mat"], "answer": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


def scores(folder: Path, tokens: list[int], first: int) -> np.ndarray:
    """Logarithms of probabilities of the tokens from ``first`` on, in float64, one window at a time."""
    model = load(folder, torch.float64)[1]
    with torch.no_grad():
        logits = model(torch.tensor(tokens), torch.tensor([0, len(tokens)]))
    found = torch.log_softmax(logits[:-1], -1)[range(len(tokens) - 1), tokens[1:]]
    return found[first - 1 :].numpy()


def test_every_token_of_a_long_text_is_scored_once_with_half_a_window_before_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    ids = load_tokenizer(folder).encode(TEXT)
    half = CONTEXT // 2
    expected = list(scores(folder, ids[:CONTEXT], 1))
    for start in range(CONTEXT, len(ids), half):
        end = min(start + half, len(ids))
        expected += list(scores(folder, ids[end - CONTEXT : end], CONTEXT - (end - start)))
    found = evaluate_language_file(folder, tmp_path / "a.txt")
    assert isinstance(found, TextEvaluation)
    assert (found.documents, found.tokens, found.window) == (1, len(ids) - 1, CONTEXT)
    assert found.loss == pytest.approx(-np.mean(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-np.mean(expected)), rel=1e-4)
    size = len(TEXT.encode()) - len(load_tokenizer(folder).decode_bytes(ids[:1]))
    assert found.bytes == size
    assert found.bits_per_byte == pytest.approx(-np.sum(expected) / math.log(2) / size, rel=1e-5)
    assert found.loss_interval[0] < found.loss < found.loss_interval[1]


def test_the_space_that_pieces_put_before_a_text_is_no_byte_of_it(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat " * 40, "the end", " haha"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    size = len(pieces.pieces())
    model = Llama(LlamaConfig(layers=1, hidden=8, heads=2, kv_heads=1, ffn=8, vocabulary=size, context=CONTEXT))
    model.init_weights(0)
    save_hugging_face(model, tmp_path / "small")
    path = pieces.write_model(tmp_path / "small")
    for adds_bos in (True, False):
        (tmp_path / "small" / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds_bos}))
        ids = [load_tokenizer(path).encode(text, bos=adds_bos) for text in texts]
        first = 0 if adds_bos else sum(len(load_tokenizer(path).decode(own[:1])) for own in ids)  # is not predicted
        found = evaluate_language_file(tmp_path / "small", tmp_path / "a.jsonl")
        assert isinstance(found, TextEvaluation)
        assert found.tokens == sum(map(len, ids)) - len(texts)
        assert found.bytes == sum(map(len, texts)) - first


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        counts = draw.integers(50, 200, 60)
        losses = counts * draw.normal(3.0, 0.4, 60)
        _, (low, high) = language_files._ratio(losses, counts)
        held += low < 3.0 < high
    assert wilson_interval(held / 2000, 2000, 0.999)[0] < 0.95
    assert held / 2000 > 0.92
    assert all(math.isnan(bound) for bound in language_files._ratio(np.ones(1), np.ones(1))[1])


def test_texts_of_rows_are_independent_of_their_company(folder: Path, tmp_path: Path) -> None:
    texts = ["the cat", "sat on the mat 1234", "a", "é 漢字 end"] * 10
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = load_tokenizer(folder)
    each = [scores(folder, ids, 1) for text in texts if len(ids := tokenizer.encode(text)) > 1]
    found = evaluate_language_file(folder, tmp_path / "all.jsonl")
    assert isinstance(found, TextEvaluation)
    assert found.documents == len(each)
    assert found.loss == pytest.approx(-np.concatenate(each).mean(), rel=1e-5)
    few = evaluate_language_file(folder, tmp_path / "all.jsonl", tokens=10)
    assert few.tokens == 10
    assert few.loss == pytest.approx(-np.concatenate(each)[:10].mean(), rel=1e-5)


def test_choices_are_compared_by_the_definition(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    tokenizer = load_tokenizer(folder)
    right = per_byte = 0
    for row, prompt in zip(QUESTIONS, ("the cat", "the end", "on the"), strict=True):
        found: list[float] = []
        for choice in row["choices"]:
            whole = prompt + ("" if choice[0].isspace() else " ") + choice
            found.append(scores(folder, tokenizer.encode(whole), len(tokenizer.encode(prompt))).sum())
        answer = row["choices"].index(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
        right += int(np.argmax(found)) == answer
        per_byte += int(np.argmax([x / len(c.encode()) for x, c in zip(found, row["choices"], strict=True)])) == answer
    found = evaluate_language_file(folder, tmp_path / "q.jsonl")
    assert isinstance(found, ChoiceEvaluation)
    assert (found.questions, found.accuracy, found.accuracy_per_byte) == (3, right / 3, per_byte / 3)
    assert found.accuracy_interval == wilson_interval(right / 3, 3)
    assert found.by_chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.peer
@pytest.mark.parametrize("window", [16, 96])
def test_long_questions_are_read_whole_and_short_ones_within_a_window(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    limits: list[int] = []
    original = language_files.LanguageModel.limit
    monkeypatch.setattr(
        language_files.LanguageModel, "limit", lambda self, context: (limits.append(context), original(self, context))
    )
    monkeypatch.setattr(language_files, "WINDOW", window)
    scored, lengths = language_files._scored, list[int]()

    def record(model: Any, pieces: Any, *others: Any) -> Any:
        lengths.extend(len(piece.tokens) for piece in pieces)
        return scored(model, pieces, *others)

    question = {"prompt": "the cat sat on the mat " * 8, "choices": ["cat", "mat"], "answer": 0}
    (tmp_path / "q.jsonl").write_text(json.dumps(question) + "\n")
    monkeypatch.setattr(language_files, "_scored", record)
    found = evaluate_language_file(folder, tmp_path / "q.jsonl")
    assert isinstance(found, ChoiceEvaluation)
    assert min(lengths) > 16  # not cut to the window
    assert limits == ([] if window == 16 else [96])


def test_choices_score_as_in_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    opened = language_files.LanguageModel(folder, dtype="float32", drafter="none")
    questions = [language_files._Question(str(row["prompt"]), list(row["choices"]), 0) for row in QUESTIONS]
    pieces = [
        piece
        for number, question in enumerate(questions)
        for piece in language_files._continued(opened.tokenizer, question, number, CONTEXT)
    ]
    for piece, found in language_files._scored(opened.model, pieces, CONTEXT, None):
        with torch.no_grad():
            chances = torch.log_softmax(theirs(torch.tensor([piece.tokens])).logits[0], -1)
        expected = chances[range(len(piece.tokens) - 1), piece.tokens[1:]][piece.first - 1 :]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": ""}, "prompt is no text"),
    "one choice": ({"choices": ["a"]}, "choices are not two or more texts"),
    "empty choice": ({"choices": ["a", ""]}, "choices are not two or more texts"),
    "absent": ({"choices": None}, "choices are not two or more texts"),
    "twice a choice": ({"choices": ["cat", "cat"]}, "two choices are the same"),
    "other answer": ({"answer": "dog"}, "answer is .dog., which is not one of the choices"),
    "answer beyond": ({"answer": 3}, "answer is 3, and the choices are numbered from 0 to 2"),
    "answer true": ({"answer": True}, "answer is True, and the choices are numbered from 0 to 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_are_no_questions_are_named(folder: Path, tmp_path: Path, case: str) -> None:
    change, words = BAD[case]
    rows = [QUESTIONS[0], {**QUESTIONS[0], **change}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=words) as error:
        evaluate_language_file(folder, tmp_path / "q.jsonl")
    assert "q.jsonl:2" in str(error.value)


def test_what_cannot_be_evaluated_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "long.jsonl").write_text(json.dumps({**QUESTIONS[0], "choices": ["a", "漢 " * 100]}))
    for given, words in (
        ({"file": tmp_path / "short.txt"}, "holds no text of two tokens"),
        ({"file": tmp_path / "long.jsonl"}, "question 1 has a choice longer than the context"),
        ({"file": tmp_path / "none.txt"}, "none.txt"),
        ({"file": tmp_path / "short.txt", "split": "test"}, "does not go with a split"),
        ({"file": tmp_path / "short.txt", "dtype": "int3"}, "unknown dtype 'int3'"),
        ({"dtype": "int4"}, "is for a language model and a file"),
        ({}, "or give --file to evaluate a language model on text"),
    ):
        with pytest.raises(CordilleraError, match=words):
            evaluate(folder, **given)


@pytest.mark.parametrize("form", ["messages", "completion"])
def test_chats_are_scored_on_what_the_assistant_says_and_its_end(folder: Path, tmp_path: Path, form: str) -> None:
    chats = [("the cat?", "sat on the mat", "é 1", "漢字"), ("123", "the end of the mat 1234 the cat")]
    if form == "completion":
        chats = [chat[:2] for chat in chats]
        rows: list[dict[str, Any]] = [{"prompt": question, "completion": answer} for question, answer in chats]
    else:
        roles = ("user", "assistant") * 2
        rows = [
            {"messages": [{"role": role, "content": said} for role, said in zip(roles, chat, strict=False)]}
            for chat in chats
        ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate(folder, file=tmp_path / "chats.jsonl")
    tokenizer = chat_tokenizer(load_tokenizer(folder))
    expected, size, bits = list[float](), 0, 0.0
    for chat in chats:
        messages = list[Message]()
        for question, answer in zip(chat[::2], chat[1::2], strict=True):
            messages.append(Message("user", question))
            before = tokenizer.encode_chat(messages)
            messages.append(Message("assistant", answer))
            said = [*tokenizer.encode(answer, bos=False), tokenizer.eos_id]
            found_scores = list(scores(folder, [*before, *said], len(before)))
            expected += found_scores
            bits -= sum(found_scores[:-1]) / math.log(2)
            size += len(answer.encode())
    assert isinstance(found, ChatEvaluation)
    assert (found.documents, found.tokens, found.bytes) == (len(chats), len(expected), size)
    assert found.loss == pytest.approx(-np.mean(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-np.mean(expected)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(bits / size, rel=1e-5)
    assert found.loss_interval[0] < found.loss < found.loss_interval[1]
    first = evaluate(folder, file=tmp_path / "chats.jsonl", tokens=1)
    assert isinstance(first, ChatEvaluation)
    assert first.documents == 1
    assert math.isnan(first.loss_interval[0])


def test_rows_that_are_no_chats_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    for rows, words in (
        ([{"prompt": "the cat"}], "there is no messages, or prompt with completion, answer or response"),
        ([{"messages": [{"role": "user", "content": "the"}]}], "has no turn of the assistant"),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {"x": 1}],
            r"jsonl:2: there is no prompt",
        ),
    ):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(DataError, match=words):
            evaluate(folder, file=file)
