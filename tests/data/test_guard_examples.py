"""Examples of a guard are right by construction, and none of the held-out sentences is learnt."""

from __future__ import annotations

import re

import pytest

from cordillera.data.language.chats.rows import read_chats
from cordillera.data.language.guard import examples
from cordillera.data.language.guard.examples import (
    EXAMPLES,
    HELD_OUT_EXAMPLES,
    GuardExample,
    guard_examples,
    guard_row,
    held_out_guard_examples,
)


def templates(found: list[GuardExample]) -> set[str]:
    """Sentences without their fillers."""
    fillers = sorted((one for some in examples._FILLERS.values() for one in some), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, fillers)))
    return {pattern.sub("_", turn.content) for one in found for turn in one.conversation}


def test_sets_are_the_same_every_time_and_hold_each_conversation_once() -> None:
    for make, count in ((guard_examples, EXAMPLES), (held_out_guard_examples, HELD_OUT_EXAMPLES)):
        found = make()
        assert found == make()
        assert len({one.conversation for one in found}) == len(found) == count


def test_no_sentence_of_a_held_out_conversation_is_learnt() -> None:
    assert not templates(guard_examples()) & templates(held_out_guard_examples())
    learnt, held_out = examples._LEARNT, examples._HELD_OUT
    for name in ("asks", "cares", "tells", "declines", "harmless"):
        assert not {*getattr(learnt, name)} & {*getattr(held_out, name)}
    for code, deeds in learnt.harmful.items():
        assert not {*deeds} & {*held_out.harmful[code]}


@pytest.mark.parametrize("make", [guard_examples, held_out_guard_examples])
def test_safe_and_unsafe_are_balanced_over_categories_and_speakers(make) -> None:
    found = make()
    unsafe = [one for one in found if one.codes]
    assert 0.4 < len(unsafe) / len(found) < 0.5
    for code in examples.GUARD_CATEGORIES.names:
        assert 0.15 < sum(one.codes == (code,) for one in unsafe) / len(unsafe) < 0.25
    for role in ("user", "assistant"):
        own = [one for one in found if one.conversation[-1].role == role]
        assert 0.35 < sum(bool(one.codes) for one in own) / len(own) < 0.55


def test_a_label_names_a_listed_category_only() -> None:
    assert all({*one.codes} <= {*one.categories.names} for one in guard_examples())


def test_prompts_are_short_in_bytes() -> None:
    assert max(len(guard_row(one)["prompt"].encode()) for one in guard_examples()) < 512


def test_both_sets_are_read_as_chats() -> None:
    chats = read_chats("guard")
    assert [len(chats), len(read_chats("guard-held-out"))] == [EXAMPLES, HELD_OUT_EXAMPLES]
    assert {chat.messages[-1].content.split("\n")[0] for chat in chats} == {"safe", "unsafe"}
