"""Iterations of chats: every item once an epoch and whole, only answers as labels, the same after any stop."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.language.batches import IGNORED, PackedTokens, TextIteration
from cordillera.data.language.chats.batches import ChatBatches, ChatMicrobatches, ChatPair, held_out_chats
from cordillera.data.language.chats.tokens import ANSWER, END, PROMPT, TokenisedChat
from cordillera.data.language.prefetch import PrefetchedBatches
from cordillera.distributed import vocabulary_loss
from cordillera.errors import DataError

MOST = 40

_kinds = st.lists(st.sampled_from([PROMPT, ANSWER, END]), max_size=17).map(lambda kinds: [PROMPT, *kinds, ANSWER, END])
_items = st.one_of(
    st.lists(st.tuples(_kinds), min_size=1, max_size=20), st.lists(st.tuples(_kinds, _kinds), min_size=1, max_size=20)
)
_settings = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 30, 70, 120]),
        "microbatches": st.sampled_from([3, 4]),
        "most": st.just(MOST),
        "seed": st.integers(0, 3),
        "shuffle": st.booleans(),
        "learns": st.sampled_from([frozenset({ANSWER, END}), frozenset({ANSWER})]),
    }
)


def tokenised(made: list[tuple[list[int], ...]]) -> list[ChatPair]:
    """Items of these kinds, whose tokens are all different."""
    count = itertools.count(5)
    return [
        tuple(TokenisedChat(np.array([next(count) for _ in one], np.int32), np.array(one, np.int8)) for one in item)
        for item in made
    ]


def labels_of(one: PackedTokens, kinds: dict[int, int], learns: frozenset[int]) -> list[int]:
    """Labels by the definition."""
    tokens, found = one.tokens.tolist(), []
    ends = set(one.offsets.tolist())
    for place in range(len(tokens)):
        is_last = place + 1 in ends
        follows = IGNORED if is_last or kinds[tokens[place + 1]] not in learns else tokens[place + 1]
        found.append(follows)
    return found


def check(microbatches: ChatMicrobatches, items: list[ChatPair], learns: frozenset[int]) -> list[int]:
    """Compare microbatches with the definition; return the numbers of their items in order."""
    kinds = {
        token: kind
        for item in items
        for chat in item
        for token, kind in zip(chat.tokens.tolist(), chat.kinds.tolist(), strict=True)
    }
    numbers = []
    for one in microbatches:
        assert one.labels is not None
        assert one.documents is not None
        assert one.tokens.dtype == one.offsets.dtype == one.labels.dtype == one.documents["item"].dtype == torch.int64
        assert one.documents["is_chosen"].dtype == torch.bool
        found, chosen = one.documents["item"].tolist(), one.documents["is_chosen"].tolist()
        assert len(one.offsets) - 1 == len(found) == len(chosen)
        if found == [-1]:
            assert (one.tokens.tolist(), one.offsets.tolist(), one.labels.tolist()) == ([0], [0, 1], [IGNORED])
            continue
        assert len(one.tokens) <= MOST
        assert one.labels.tolist() == labels_of(one, kinds, learns)
        bounds = itertools.pairwise(one.offsets.tolist())
        width = len(items[0])
        for first in range(0, len(found), width):
            assert found[first : first + width] == [found[first]] * width
            assert chosen[first : first + width] == [True, False][:width]
            for chat in items[found[first]]:
                begin, end = next(bounds)
                assert one.tokens[begin:end].tolist() == chat.tokens.tolist()
            numbers.append(found[first])
    return numbers


def shown(one: TextIteration) -> Any:
    packed = [(m.tokens.tolist(), m.offsets.tolist(), m.labels.tolist()) for m in one.microbatches]  # type: ignore[union-attr]
    return one.number, packed, one.lengths, one.imbalance, one.delay


@given(made=_items, chosen=_settings, epochs=st.integers(1, 3))
@settings(max_examples=80)
def test_every_item_comes_once_an_epoch_and_whole(
    made: list[tuple[list[int], ...]], chosen: dict[str, Any], epochs: int
) -> None:
    items = tokenised(made)
    found = list(ChatBatches(items, epochs=epochs, **chosen))
    counts: Counter[int] = Counter()
    for number, one in enumerate(found):
        assert one.number == number
        assert len(one.microbatches) == len(one.lengths) == chosen["microbatches"]
        assert isinstance(one.microbatches, ChatMicrobatches)
        numbers = check(one.microbatches, items, chosen["learns"])
        assert one.documents == len(numbers) * len(items[0])
        assert one.tokens <= chosen["tokens"] or len(numbers) == 1
        assert one.imbalance >= 1
        assert one.delay >= 0
        assert len(set(numbers)) == len(numbers)  # none of two epochs
        for item in numbers:
            counts[item] += 1
        assert max(counts.values()) - min(counts[item] for item in range(len(items))) <= 1
    assert counts == Counter(dict.fromkeys(range(len(items)), epochs))


@given(made=_items, chosen=_settings, epochs=st.sampled_from([1, 2, None]), data=st.data())
@settings(max_examples=60)
def test_a_crash_after_any_iteration_changes_nothing(
    made: list[tuple[list[int], ...]], chosen: dict[str, Any], epochs: int | None, data: st.DataObject
) -> None:
    items = tokenised(made)
    whole = [shown(one) for one in itertools.islice(ChatBatches(items, epochs=epochs, **chosen), 12)]
    stops = data.draw(st.sets(st.integers(0, 12)))
    current, found = ChatBatches(items, epochs=epochs, **chosen), []
    for number in range(12):
        if number in stops:
            state = json.loads(json.dumps(current.state_dict()))
            current = ChatBatches(items, epochs=epochs, **chosen)
            current.load_state_dict(state)
            assert current.state_dict() == state
        one = next(current, None)
        if one is None:
            break
        found.append(shown(one))
    assert found == whole


def pairs(count: int = 30) -> list[ChatPair]:
    return tokenised([([0, 0, 1, 2], [0] * (number % 7) + [0, 1, 2]) for number in range(count)])


def test_iterations_end_for_good() -> None:
    batches = ChatBatches(pairs(4), tokens=60, microbatches=2, most=MOST, epochs=2)
    assert len(list(batches)) == 2
    assert next(batches, None) is None
    assert next(batches, None) is None
    other = ChatBatches(pairs(4), tokens=60, microbatches=2, most=MOST, epochs=2)
    other.load_state_dict(batches.state_dict())
    assert next(other, None) is None


def test_each_epoch_and_seed_has_an_order_of_its_own() -> None:
    def orders(**values: Any) -> list[list[int]]:
        batches = ChatBatches(pairs(), tokens=MOST, microbatches=1, most=MOST, epochs=2, **values)
        numbers = [part.document for one in batches for part in one.microbatches.parts[0] if part.source == 0]
        return [numbers[:30], numbers[30:]]

    first, second = orders(seed=1)
    assert first != second
    assert [first, second] == orders(seed=1) != orders(seed=2)
    plain = orders(shuffle=False)
    assert plain[0] == plain[1]
    assert all(abs(item - place) < 8 for place, item in enumerate(plain[0]))  # longest first within an iteration


def test_the_longest_go_to_the_emptiest_and_what_does_not_fit_waits() -> None:
    items = tokenised([([0] * (length - 1) + [1],) for length in (5, 8, 6, 7)])
    batches = ChatBatches(items, tokens=26, microbatches=2, most=13, epochs=1, shuffle=False)
    (only,) = batches
    assert only.lengths == [[8, 5], [7, 6]]
    equal = tokenised([([0] * 6 + [1],)] * 3)
    first, second = ChatBatches(equal, tokens=21, microbatches=2, most=12, epochs=1, shuffle=False)
    assert (first.lengths, first.delay) == ([[7], [7]], 0.0)
    assert (second.lengths, second.delay) == ([[7], []], 1.0)


def test_an_item_that_waits_is_placed_before_new_ones() -> None:
    items = tokenised([([0] * (length - 1) + [1],) for length in (7, 7, 4, *[9] * 6)])
    found = list(ChatBatches(items, tokens=20, microbatches=2, most=10, epochs=1, shuffle=False))
    assert found[0].lengths == [[7], [7]]
    assert 4 in found[1].lengths[0]


def test_a_position_is_of_the_same_items_and_settings() -> None:
    chosen: dict[str, Any] = {"tokens": 60, "microbatches": 2, "most": MOST, "seed": 1}
    batches = ChatBatches(pairs(), **chosen)
    next(batches)
    state = batches.state_dict()
    for items, values, what in (
        (pairs(29), {}, "other items"),
        ([(one[1], one[0]) for one in pairs()], {}, "other items"),
        (pairs(), {"seed": 2}, "other settings"),
        (pairs(), {"tokens": 61}, "other settings"),
        (pairs(), {"learns": {ANSWER}}, "other settings"),
        (pairs(), {"shuffle": False}, "other settings"),
    ):
        with pytest.raises(DataError, match=what):
            ChatBatches(items, **chosen | values).load_state_dict(state)
    for damage in (
        {"taken": 31},
        {"taken": -1},
        {"epoch": -1},
        {"number": None},
        {"waiting": [[99, 0]]},
        {"waiting": [[int(batches._order[0]), 5]]},
        {"waiting": [[int(batches._order[0]), 0]] * 2},
        {"waiting": [1]},
    ):
        before = batches.state_dict()
        with pytest.raises(DataError, match="damaged"):
            batches.load_state_dict({**state, **damage})
        assert batches.state_dict() == before
    missing = {name: value for name, value in state.items() if name != "epoch"}
    with pytest.raises(DataError, match="damaged"):
        batches.load_state_dict(missing)


def test_another_number_of_microbatches_goes_on_with_the_same_items() -> None:
    first = ChatBatches(pairs(), tokens=70, microbatches=2, most=MOST, epochs=1)
    seen = [part.document for one in next(first).microbatches.parts for part in one if part.source == 0]
    other = ChatBatches(pairs(), tokens=70, microbatches=5, most=MOST, epochs=1)
    other.load_state_dict(first.state_dict())
    seen += [part.document for it in other for one in it.microbatches.parts for part in one if part.source == 0]
    assert sorted(seen) == list(range(30))


def test_what_cannot_be_batched_is_refused() -> None:
    chosen: dict[str, Any] = {"tokens": 60, "microbatches": 2, "most": MOST}
    for items, values, what in (
        ([], {}, "no chats"),
        (pairs(), {"microbatches": 0}, "do not fit into 0 microbatches"),
        (pairs(), {"tokens": 81}, "81 tokens do not fit"),
        (pairs(), {"tokens": 0}, "0 tokens do not fit"),
        (pairs(), {"most": 30, "tokens": 20, "learns": {7}}, "chat 0: the chat has nothing to learn"),
        (tokenised([([0, 1],), ([0] * MOST + [1],)]), {}, "chat 1: 41 tokens do not fit"),
        (tokenised([([0, 1],), ([1, 0],)]), {}, "chat 1: the chat has nothing to learn"),
    ):
        with pytest.raises(DataError, match=what):
            ChatBatches(items, **chosen | values)  # type: ignore[arg-type]


@given(made=_items, learns=st.sampled_from([frozenset({ANSWER, END}), frozenset({ANSWER})]), together=st.integers(1, 4))
@settings(max_examples=40)
def test_held_out_chats_come_once_in_their_order(
    made: list[tuple[list[int], ...]], learns: frozenset[int], together: int
) -> None:
    items = tokenised(made)
    found = held_out_chats(items, most=MOST, learns=learns)
    assert check(found, items, learns) == list(range(len(items)))
    parts = [found.neighbours(first, together) for first in range(0, len(found), together)]
    assert [number for part in parts for number in check(part, items, learns)] == list(range(len(items)))
    with pytest.raises(DataError, match="do not fit"):
        held_out_chats(items, most=2)


def test_iterations_are_read_ahead_like_those_of_text() -> None:
    def made() -> ChatBatches:
        return ChatBatches(pairs(), tokens=60, microbatches=2, most=MOST, epochs=2)

    whole = [shown(one) for one in made()]
    with PrefetchedBatches(made()) as batches:
        found = [shown(next(batches)) for _ in range(3)]
        state = batches.state_dict()
    with PrefetchedBatches(made()) as batches:
        batches.load_state_dict(state)
        found += [shown(one) for one in batches]
    assert found == whole


def test_ignored_labels_are_those_of_the_loss() -> None:
    assert vocabulary_loss.IGNORED == IGNORED
