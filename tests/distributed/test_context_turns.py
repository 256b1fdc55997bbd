"""New tokens over ranks: ranks stay level after any turns, work is even, blocks are the causal mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.context.turns import Turn, next_turn
from cordillera.errors import PlanError
from cordillera.kernels.attention.relation import dense_mask

lengths = st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 17, 40])
histories = st.integers(1, 3).flatmap(
    lambda count: st.lists(st.lists(lengths, min_size=count, max_size=count), min_size=1, max_size=12)
)


def play(history: list[list[int]], ranks: int) -> list[Turn]:
    held = [[0] * len(history[0]) for _ in range(ranks)]
    turns = []
    for new in history:
        turns.append(next_turn(new, held))
        held = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(held, turns[-1].added, strict=True)]
    return turns


@given(history=histories, ranks=st.integers(1, 5))
def test_ranks_hold_as_much_but_one_token_after_any_turns(history: list[list[int]], ranks: int) -> None:
    for turn in play(history, ranks):
        after = [sum(before) + sum(new) for before, new in zip(turn.held, turn.added, strict=True)]
        assert max(after) - min(after) <= 1
        assert turn.plan.tokens == tuple(map(sum, turn.added))


@given(count=st.integers(1, 5), steps=st.integers(1, 30), ranks=st.integers(1, 5))
def test_decoding_deals_every_sequence_around(count: int, steps: int, ranks: int) -> None:
    """Not only the ranks' sums are even: no sequence settles on one rank."""
    turn = play([[1] * count] * steps, ranks)[-1]
    for sequence in range(count):
        own = [turn.held[rank][sequence] + turn.added[rank][sequence] for rank in range(ranks)]
        assert max(own) - min(own) <= 2


@given(length=st.integers(0, 500), ranks=st.integers(1, 5))
def test_work_of_a_long_turn_is_even(length: int, ranks: int) -> None:
    plan = next_turn([length], [[0]] * ranks).plan
    assert int(plan.work.max() - plan.work.min()) <= 2 * (length + 1)


@settings(max_examples=25)
@given(history=histories, ranks=st.integers(1, 4), gap=st.integers(0, 2))
def test_blocks_are_the_causal_mask_within_sequences(history: list[list[int]], ranks: int, gap: int) -> None:
    """Against positions that are followed rank by rank through all turns."""
    count = len(history[0])
    where: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(ranks)]
    for turn in play(history, ranks):
        news = []
        for rank in range(ranks):
            documents, positions = turn.plan.documents(rank).tolist(), turn.positions(rank).tolist()
            news.append(list(zip(documents, positions, strict=True)))
            for document, position in news[-1]:
                where[rank][document].append(position)
        for keys in range(ranks):
            room = max(map(len, where[keys])) + gap
            packed, in_place = turn.packed(keys), [room * document for document in range(count)]
            for starts, rows in ((packed, turn.rows(keys)), (in_place, room * count)):
                place = {}
                for document in turn.active if starts is packed else range(count):
                    for row, position in enumerate(where[keys][document]):
                        place[starts[document] + row] = (document, position)
                assert not place or max(place) < rows
                for queries in range(ranks):
                    mask = dense_mask(turn.blocks(queries, keys, starts), len(news[queries]), rows).numpy()
                    expected = np.zeros_like(mask)
                    for i, (document, position) in enumerate(news[queries]):
                        for row, key in place.items():
                            expected[i, row] = key[0] == document and key[1] <= position
                    assert (mask == expected).all()


@given(history=histories, ranks=st.integers(1, 4))
def test_the_last_token_of_every_active_sequence_is_on_one_rank(history: list[list[int]], ranks: int) -> None:
    for turn in play(history, ranks):
        found = [(document, rank, row) for rank in range(ranks) for document, row in turn.last(rank).items()]
        assert sorted(document for document, _, _ in found) == turn.active
        for document, rank, row in found:
            assert turn.positions(rank)[row] == turn.cached[document] + turn.plan.lengths[document] - 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="no ranks"):
        next_turn([], [])
    with pytest.raises(PlanError, match=r"\[1, -1\] new tokens"):
        next_turn([1, -1], [[0, 0]])
    with pytest.raises(PlanError, match="new tokens beside"):
        next_turn([1], [[0, 0]])
