"""Chats that a model has with itself: the same in any number of calls, whole lines, files of others refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera.data.language.chats.rows import read_chats
from cordillera.data.tokenizers.chat import ChatML, Control, JinjaChat, Llama3Chat, PlainChat
from cordillera.errors import DataError, Interrupted, PlanError
from cordillera.workflows.post_training import own_chats
from cordillera.workflows.post_training.own_chats import opening, write_chats


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_chats, "_QUESTION_TOKENS", 24)


def write(model: Path, file: str, count: int, **more: Any) -> own_chats.WrittenChats:
    return write_chats(model, file, count, max_new_tokens=6, dtype="float32", temperature=2.0, **more)


def lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_an_interrupted_file_is_gone_on_with(begun: Path) -> None:
    model, told = begun / "start", list[tuple[int, int]]()
    found = write(model, "whole.jsonl", 6, on_answer=lambda done, count: told.append((done, count)))
    assert (found.chats, found.file) == (6, Path("whole.jsonl"))
    assert told == [(done, 6) for done in range(1, 7)]
    rows = lines("whole.jsonl")
    assert [[turn["role"] for turn in row["messages"]] for row in rows] == [["user", "assistant"]] * 6
    assert all(row["messages"][0]["content"].strip() for row in rows)
    numbers = [row["number"] for row in rows]
    assert numbers == sorted(set(numbers))
    assert found.dropped == numbers[-1] + 1 - 6
    write(model, "parts.jsonl", 2)
    with Path("parts.jsonl").open("a") as file:
        file.write('{"messages": [{"ro')  # a kill in the middle of a line
    assert write(model, "parts.jsonl", 6).chats == 6
    assert lines("parts.jsonl") == rows
    assert write(model, "parts.jsonl", 6).tokens == 0
    write(model, "other.jsonl", 6, seed=2**61)
    assert lines("other.jsonl") != rows
    assert len(read_chats("whole.jsonl")) == 6  # as training reads them


def test_a_model_that_asks_nothing_is_refused(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = own_chats._OwnChat("", "")
    monkeypatch.setattr(own_chats._Writing, "chats", lambda self, first: itertools.repeat(nothing))
    with pytest.raises(DataError, match="asked itself no whole question 256 times in a row"):
        write(begun / "start", "none.jsonl", 2)


@pytest.mark.parametrize(
    "content",
    [
        '{"messages": []}\n',
        "words\n",
        '{"text": 1}\n',
        '{"messages": [{"role": "user"}], "number": 0}\n',
        '{"prompt',
        "[" * 100_000 + "\n",
    ],
)
def test_files_of_others_are_refused(begun: Path, content: str) -> None:
    Path("chats.jsonl").write_text(content)
    with pytest.raises(DataError, match="is not a chat that a model had with itself"):
        write(begun / "start", "chats.jsonl", 2)
    assert Path("chats.jsonl").read_text() == content


def test_ctrl_c_leaves_whole_lines_and_says_how_to_go_on(begun: Path) -> None:
    def stop(done: int, count: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="the same command again"):
        write(begun / "start", "new/chats.jsonl", 4, on_answer=stop)
    assert len(lines("new/chats.jsonl")) == 2
    assert write(begun / "start", "new/chats.jsonl", 4).chats == 4


def test_a_place_that_cannot_be_written_is_found_before_the_model_is_read() -> None:
    Path("file").touch()
    with pytest.raises(PlanError, match="cannot be written"):
        write(Path("none"), "file/chats.jsonl", 2)


def test_wrong_settings_are_refused(begun: Path) -> None:
    with pytest.raises(DataError, match="at least 1 chat"):
        write(begun / "start", "chats.jsonl", 0)
    with pytest.raises(DataError, match="temperature"):
        write_chats(begun / "start", "chats.jsonl", 1, temperature=-1)
    assert not Path("chats.jsonl").exists()


def test_the_opening_of_a_user_ends_where_words_begin() -> None:
    assert opening(ChatML("Be kind.")) == [
        Control("<|im_start|>"), "system\nBe kind.", Control("<|im_end|>"), "\n", Control("<|im_start|>"), "user\n",
    ]  # fmt: skip
    assert opening(Llama3Chat())[-3:] == ["user", Control("<|end_header_id|>"), "\n\n"]
    assert opening(PlainChat(None, "<|end|>")) == ["user: "]
    silent = JinjaChat("{{ bos_token }}nothing", ["<s>"], bos="<s>", eos=None, where="here")
    with pytest.raises(DataError, match="does not show a user's message"):
        opening(silent)
