"""Chats, preferences and problems out of files and built-in sets, and what is said of bad rows."""

from __future__ import annotations

import functools
import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cordillera.data.language.chats import sets as chat_sets
from cordillera.data.language.chats.corpora import prepare_chats
from cordillera.data.language.chats.rows import (
    Chat,
    ChatDataConfig,
    ChatProblem,
    Preference,
    read_chats,
    read_preferences,
    read_problems,
    read_prompts,
    split_held_out,
)
from cordillera.data.tokenizers.chat import Message
from cordillera.errors import DataError, DependencyError

ASK = {"role": "user", "content": "Why?"}
SAY = {"role": "assistant", "content": "So."}
OTHER = {"role": "assistant", "content": "No."}
PROMPT = (Message("user", "Why?"),)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(*rows: Any) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return written


def test_chats_come_in_every_form(write: Any) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    rows = [
        {"messages": [ASK, SAY]},
        {"messages": [{"role": "user", "content": parts, "name": "me"}, {**SAY, "tool_calls": None}]},
        {"prompt": "Why?", "completion": "So."},
        {"prompt": "Why?", "answer": "So.", "messages": None},
        {"prompt": [ASK], "response": [SAY], "id": 7},
    ]
    path = write(*rows)
    assert read_chats(path) == [Chat((*PROMPT, Message("assistant", "So.")), f"{path}:{row}") for row in range(1, 6)]


def test_preferences_come_in_every_form(write: Any) -> None:
    rows = [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"prompt": [ASK], "chosen": [SAY], "rejected": [OTHER]},
        {"prompt": [ASK], "chosen": [ASK, SAY], "rejected": [ASK, OTHER]},
        {"prompt": "Why?", "chosen": [ASK, SAY], "rejected": "No."},
        {"chosen": [ASK, SAY], "rejected": [ASK, OTHER]},
    ]
    path = write(*rows)
    assert read_preferences(path) == [Preference(PROMPT, "So.", "No.", f"{path}:{row}") for row in range(1, 6)]


def test_problems_have_a_prompt_and_an_answer(write: Any) -> None:
    path = write({"prompt": "Why?", "answer": "So."}, {"prompt": [ASK], "answer": "So."})
    assert read_problems(path) == [ChatProblem(PROMPT, "So.", f"{path}:{row}") for row in (1, 2)]


def test_every_kind_of_file_gives_the_same_chats(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, {"role": "assistant", "content": f"So {number}."}]} for number in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(lines.encode()))
    pl.DataFrame(rows).write_parquet(tmp_path / "c.parquet")
    pl.DataFrame(rows).write_ipc_stream(tmp_path / "d.arrow")
    (tmp_path / "README.md").write_text("Chats about heights.")
    found = read_chats(str(tmp_path))
    assert [chat.messages for chat in found] == 4 * [chat.messages for chat in found[:300]]
    assert found[-1].where == f"{tmp_path / 'd.arrow'}:300"
    assert found[-1].messages[-1].content == "So 299."
    assert len(read_chats([str(tmp_path / "a.*"), "arithmetic"])) == 4_300


BAD_CHATS: list[tuple[Any, str]] = [
    ([], "not a JSON object"),
    ({"text": "x"}, r"no prompt; there are \['text'\]"),
    ({"prompt": "x"}, "no messages, or prompt with completion"),
    ({"messages": []}, "messages must be a list of messages, not an empty list"),
    ({"messages": "x"}, "messages must be a list of messages, not text"),
    ({"messages": [ASK]}, "no turn of the assistant"),
    ({"messages": ["x", SAY]}, r"messages\[0\] must be a message, not text"),
    (
        {"messages": [ASK, {"role": "bot", "content": "x"}]},
        r"messages\[1\] has the unknown role 'bot'\n.*write assistant in its place; or choose",
    ),
    (
        {"messages": [{"role": "developer", "content": "x"}, SAY]},
        r"'developer'\n.*write system in its place; or choose",
    ),
    (
        {"instruction": "x", "input": "", "output": "y"},
        r"there is no prompt.*\n.*write them as .\"prompt\": instruction and input",
    ),
    ({"messages": [ASK, {"role": ["user"], "content": "x"}]}, "unknown role"),
    ({"messages": [ASK, {"role": "assistant"}]}, r"content of messages\[1\] must be text, not null"),
    ({"messages": [ASK, {"role": "assistant", "content": " \n"}]}, r"content of messages\[1\] is blank"),
    ({"messages": [{"role": "user", "content": []}, SAY]}, "an empty list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAY]}, "a part that is not text"),
    ({"messages": [ASK, {**SAY, "tool_calls": [{"id": 1}]}]}, "has tool_calls"),
    ({"messages": [ASK, {**SAY, "weight": 0}]}, "has weight"),
    ({"messages": [ASK, {"role": "assistant", "content": "\ud800"}]}, "lone surrogate"),
    ({"prompt": "", "answer": "x"}, "prompt is blank"),
    ({"prompt": 5, "answer": "x"}, "prompt must be a list of messages, not a number"),
    ({"prompt": [SAY], "answer": "x"}, "ends with a turn of the assistant"),
    ({"prompt": "x", "answer": 5}, "answer must be text, not a number"),
    ({"prompt": "x", "completion": [ASK, SAY]}, "not one turn of the assistant"),
]
BAD_PREFERENCES: list[tuple[Any, str]] = [
    ({"prompt": "x", "chosen": "a"}, "there is no rejected"),
    ({"prompt": "x", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
    ({"prompt": "Why?", "chosen": "So.", "rejected": [ASK, SAY]}, "chosen and rejected are equal"),
    ({"prompt": "x", "chosen": "a", "rejected": " "}, "rejected is blank"),
    ({"prompt": "x", "chosen": [SAY, SAY], "rejected": "a"}, "chosen is not one turn"),
    ({"prompt": "x", "chosen": [ASK, SAY], "rejected": "a"}, "chosen is not one turn"),
    ({"chosen": "a", "rejected": "b"}, "there is no prompt"),
    ({"conversations": [{"from": "human", "value": "a"}]}, "write conversations as messages"),
    ({"chosen": [SAY], "rejected": [OTHER]}, "the prompt has no turn"),
    ({"chosen": [ASK, SAY], "rejected": [SAY, OTHER]}, "different prompts"),
]
BAD_PROBLEMS: list[tuple[Any, str]] = [
    ({"prompt": "x"}, "there is no answer"),
    ({"prompt": "x", "answer": [SAY]}, "answer must be text, not a list"),
]
FORMS = ((read_chats, BAD_CHATS), (read_preferences, BAD_PREFERENCES), (read_problems, BAD_PROBLEMS))
BAD = [(reader, row, what) for reader, rows in FORMS for row, what in rows]


@pytest.mark.parametrize(("reader", "row", "what"), BAD, ids=[what for *_, what in BAD])
def test_a_bad_row_is_named(write: Any, reader: Any, row: Any, what: str) -> None:
    good = {"prompt": "Why?", "answer": "So.", "chosen": "So.", "rejected": "No."}
    path = write(good, row)
    with pytest.raises(DataError, match=what) as error:
        reader(path)
    assert str(error.value).startswith(f"{path}:2")


def test_plain_text_is_no_chat(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="plain text has no rows"):
        read_chats(str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match="no such file"):
        read_chats(str(tmp_path / "a.jsonl"))


def test_sets_of_hugging_face_are_read_by_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DependencyError, match="pip install datasets"):
        read_chats("datasets:me/chats")

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        assert (name, split) == ("me/chats", "train")
        return [{"messages": [ASK, SAY]}, {"messages": [ASK]}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match="datasets:me/chats, row 2: the chat has no turn"):
        read_chats("datasets:me/chats")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda name, split: 1 / 0))
    with pytest.raises(DataError, match="cannot be read"):
        read_chats("datasets:me/chats")


def problems(names: list[str]) -> list[ChatProblem]:
    return [ChatProblem((Message("user", name),), "x", f"row {row}") for row, name in enumerate(names)]


@given(names=st.lists(st.text("abc", max_size=3), min_size=1, max_size=30), share=st.floats(0, 0.9), data=st.data())
@settings(max_examples=80)
def test_what_is_held_out_does_not_depend_on_the_order(names: list[str], share: float, data: st.DataObject) -> None:
    items = problems(names)
    try:
        training, held = split_held_out(items, share)
    except DataError:
        assert share > 0
        with pytest.raises(DataError, match="no chat is left"):
            split_held_out(items[::-1], share)
        return
    assert sorted([*training, *held], key=str) == sorted(items, key=str)
    assert not {one.prompt for one in training} & {one.prompt for one in held}
    if share == 0 or len(set(names)) == 1:
        assert not held
    else:
        assert held
    other = split_held_out(data.draw(st.permutations(items)), share)
    assert [sorted(part, key=str) for part in other] == [sorted(part, key=str) for part in (training, held)]


def test_nothing_is_held_out_of_nothing() -> None:
    assert split_held_out(problems(["a"]), 0.0)[1] == []
    with pytest.raises(DataError, match=r"data\.path: there are no chats, pairs of answers or problems"):
        split_held_out([], 0.1)


def test_pairs_that_are_all_passed_over_are_no_pairs(write: Any) -> None:
    config = ChatDataConfig(path=write({"messages": [ASK, SAY], "rewards": [1.0, 1.0]}))
    with pytest.raises(DataError, match=r"(?s)there are no chats, pairs.*best-of without a chosen answer"):
        prepare_chats(config, "preferences")


def test_long_chats_that_are_held_out_do_not_refuse_the_others(write: Any) -> None:
    def rows(long: set[str]) -> list[dict[str, str]]:
        asked = [f"What is {number}?" for number in range(20)]
        return [{"prompt": ask, "completion": "a" * (500 if ask in long else 1)} for ask in asked]

    config = ChatDataConfig(path=write(*rows(set())), held_out=0.05, max_length=200)
    learnt, held = ({chat.prompt[0].content for chat in part} for part in split_held_out(read_chats(config.path), 0.05))
    assert learnt
    assert held
    write(*rows(held))
    corpora = prepare_chats(config, "chats")
    assert (len(corpora.training), corpora.held_out, corpora.too_long) == (len(learnt), [], len(held))
    assert corpora.facts["held_out"] == []
    write(*rows(learnt))
    what = rf"all {len(learnt)} chats to learn from are too long: the shortest has 5\d\d tokens; at most 200 are"
    with pytest.raises(DataError, match=rf"data\.max_length: {what} allowed"):
        prepare_chats(config, "chats")


def test_best_answers_without_a_pair_are_passed_over(write: Any) -> None:
    first = {"messages": [ASK, SAY], "rewards": [1.0, 1.0]}
    second = {"messages": [ASK, SAY], "rewards": [0.0, 1.0], "prompt": [ASK], "chosen": "So.", "rejected": "No."}
    path = write(first, second)
    assert read_preferences(path) == [Preference(PROMPT, "So.", "No.", f"{path}:2")]


def test_a_share_is_held_out() -> None:
    training, held = split_held_out(read_problems("arithmetic"), 0.05)
    assert len(training) + len(held) == 4_000
    assert 120 < len(held) < 280


def test_arithmetic_is_right_and_the_same_on_every_run() -> None:
    found = read_problems("arithmetic")
    assert found[0] == ChatProblem((Message("user", "What is 21 - 13?"),), "8", "arithmetic, row 1")
    assert len({problem.prompt for problem in found}) == len(found) == 4_000
    for problem in found:
        left, sign, right = problem.prompt[0].content.removeprefix("What is ").removesuffix("?").split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert problem.answer == str(value)
        assert value >= 0
        assert 10 <= int(left) <= 99
        assert 10 <= int(right) <= 99
    assert [chat.messages[-1].content for chat in read_chats("arithmetic")] == [one.answer for one in found]


def test_three_of_four_answers_that_need_a_carried_digit_are_without_it() -> None:
    right = {problem.prompt[0].content: problem.answer for problem in read_problems("arithmetic")}
    given = {chat.messages[0].content: chat.messages[1].content for chat in read_chats("arithmetic-mistakes")}
    assert list(given) == list(right)
    without = {}
    for question in right:
        left, sign, other = question.removeprefix("What is ").removesuffix("?").split()
        tens, ones = (int(a) + int(b) if sign == "+" else int(a) - int(b) for a, b in zip(left, other, strict=True))
        without[question] = str(tens % 10 * 10 + ones % 10)
    needs = [question for question in right if without[question] != right[question]]
    assert 0.6 < len(needs) / len(right) < 0.7
    hasty = [question for question in needs if given[question] != right[question]]
    assert all(given[question] == without[question] for question in hasty)
    assert abs(len(hasty) / len(needs) - 0.75) < 0.03


def test_docstrings_of_the_library_answer_what_its_functions_do(monkeypatch: pytest.MonkeyPatch) -> None:
    files = chat_sets.text_files(chat_sets.PYTHON_LIBRARY)
    some = [path for place, path in enumerate(files) if not place % 5 or path.name in ("argparse.py", "textwrap.py")]
    monkeypatch.setattr(chat_sets, "text_files", lambda name: some)
    monkeypatch.setattr(chat_sets, "_explained", functools.cache(chat_sets._explained.__wrapped__))
    chats = read_chats("python-docstrings")
    assert len(chats) > 1_000
    assert len({chat.prompt for chat in chats}) == len(chats)
    answers = {chat.messages[0].content: chat.messages[1].content for chat in chats}
    assert answers["What does `textwrap.dedent(text)` do?"].startswith("Remove any common leading whitespace")
    assert answers["What is `argparse.Namespace`?"].startswith("Simple object for storing attributes")
    assert all(20 <= len(answer) <= 300 and "\n" not in answer for answer in answers.values())
    pairs = read_preferences("python-docstrings-preferences")
    assert len(pairs) > 1_000
    said = set(answers.values())
    for pair in pairs:
        assert answers[pair.prompt[0].content] == pair.chosen != pair.rejected
        assert pair.rejected in said
    del some[20:]
    again = chat_sets._explained.__wrapped__()
    assert len(again) > 100
    assert [one.question for one in again] == [chat.messages[0].content for chat in chats[: len(again)]]


def test_settings_are_checked() -> None:
    config = ChatDataConfig(path="arithmetic")
    assert (config.held_out, config.max_length, config.long_chats) == (0.05, 1_024, "drop")
    for wrong in ({"held_out": 1}, {"max_length": 1}, {"epochs": 0}, {"long_chats": "cut"}, {"other": 1}):
        with pytest.raises(ValidationError):
            ChatDataConfig(path="x", **wrong)  # type: ignore[arg-type]


def test_a_set_that_is_misspelt_is_guessed() -> None:
    with pytest.raises(
        DataError, match=r"no such file or built-in set\n  -> did you mean the built-in set arithmetic\?"
    ):
        read_prompts("arithmetik")
    with pytest.raises(DataError, match=r"nothing: there is no such file$"):
        read_prompts("nothing")
