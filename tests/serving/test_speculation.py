"""Drafts change how many passes a text takes, and nothing else."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cordillera.errors import CheckpointError, DataError
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.serving.language import engine
from cordillera.serving.language.engine import Engine, Generated
from cordillera.serving.language.generation import for_decoding, generate
from cordillera.serving.language.language_model import find_drafters
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import (
    NOTHING,
    DraftTree,
    NGramDrafter,
    Speculation,
    checked,
    choose,
    measure_costs,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = Sampling(temperature=0)
CONTEXT, VOCABULARY = 40, 29
FREE = [1.0] * MOST_ROWS  # passes cost the same, so that every draft is tried


def _model(dtype: torch.dtype, scale: float = 12) -> Llama:
    config = LlamaConfig(
        layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocabulary=VOCABULARY, context=CONTEXT
    )
    model = Llama(config)
    model.init_weights(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return for_decoding(model.to(dtype))


EXACT, HALF = _model(torch.float64), _model(torch.bfloat16)


class Given:
    """Drafts what a function makes of the text."""

    def __init__(self, propose: Callable[[list[int], int, int], DraftTree]) -> None:
        self.text: list[int] = []
        self._propose = propose

    def add(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def propose(self, most: int, deepest: int) -> DraftTree:
        return self._propose(self.text, most, deepest)


def _drafts(propose: Callable[[list[int], int, int], DraftTree]) -> Speculation:
    return Speculation([lambda: Given(propose)], FREE)


def _random_tree(seed: int) -> Callable[[list[int], int, int], DraftTree]:
    """Trees of any shape, of few different tokens, so that some of them are right."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    def propose(text: list[int], most: int, deepest: int) -> DraftTree:
        tree, depths = DraftTree([], [], []), [0]
        taken = set()
        for _ in range(draw(most + 1)):
            parent, token = draw(len(tree.tokens) + 1) - 1, draw(VOCABULARY)
            if depths[parent + 1] < deepest and (parent, token) not in taken:
                taken.add((parent, token))
                tree.tokens.append(token)
                tree.parents.append(parent)
                tree.chances.append(1.0)
                depths.append(depths[parent + 1] + 1)
        return tree

    return propose


def _oracle(model: Llama, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Speculation:
    """Drafts what the model will write; beside each right token, wrong ones."""
    texts = {}
    for number, prompt in enumerate(prompts):
        alone = sampling.model_copy(update={"seed": sampling.seed + number})
        texts[tuple(prompt)] = [one.token for one in generate(model, [prompt], CONTEXT, sampling=alone)]

    def propose(text: list[int], most: int, deepest: int) -> DraftTree:
        (prompt,) = [
            one
            for one in texts
            if tuple(text[: len(one)]) == one and texts[one][: len(text) - len(one)] == text[len(one) :]
        ]
        following = texts[prompt][len(text) - len(prompt) :]
        tree, last = DraftTree([], [], []), -1
        for token in following[: min(deepest, most // 2)]:
            tree.tokens.extend([(token + 1) % VOCABULARY, token])
            tree.parents.extend([last, last])
            tree.chances.extend([1.0, 1.0])
            last = len(tree.tokens) - 1
        return tree

    return _drafts(propose)


def _texts(found: Sequence[Generated], count: int) -> list[list[tuple[int, str | None]]]:
    return [[(one.token, one.finish) for one in found if one.sequence == i] for i in range(count)]


_PROMPTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=4)
_SAMPLINGS = st.sampled_from([GREEDY, Sampling(temperature=1.0, top_p=0.9, seed=5), Sampling(temperature=2.0, top_p=1)])


@pytest.mark.parametrize("model", [EXACT, HALF], ids=["float64", "bfloat16"])
@settings(max_examples=25)
@given(
    prompts=_PROMPTS,
    number=st.sampled_from([1, 2, 9, 30]),
    stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
    sampling=_SAMPLINGS,
    seed=st.integers(0, 999),
)
def test_any_tree_leaves_every_token_as_it_is(
    model: Llama, prompts: list[list[int]], number: int, stop: list[int], sampling: Sampling, seed: int
) -> None:
    plain = list(generate(model, prompts, number, stop, sampling))
    for speculation in (_drafts(_random_tree(seed)), Speculation([NGramDrafter], FREE)):
        found = list(generate(model, prompts, number, stop, sampling, speculation=speculation))
        assert _texts(found, len(prompts)) == _texts(plain, len(prompts))
        assert max(one.forward for one in found) <= max(one.forward for one in plain)


@pytest.mark.parametrize("model", [EXACT, HALF], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, top_p=1, seed=2)])
def test_right_drafts_are_all_taken(model: Llama, sampling: Sampling) -> None:
    """A chain of seven right tokens with as many wrong ones beside them gives eight tokens a pass."""
    prompts = [[1, 2, 3]]
    plain = list(generate(model, prompts, 33, sampling=sampling))
    found = list(generate(model, prompts, 33, sampling=sampling, speculation=_oracle(model, prompts, sampling)))
    assert [one.token for one in found] == [one.token for one in plain]
    counts = [len(list(group)) for _, group in itertools.groupby(found, lambda one: one.forward)]
    assert counts == [1, 8, 8, 8, 8]


def test_wrong_drafts_cost_no_pass() -> None:
    plain = list(generate(EXACT, [[1, 2]], 12, sampling=GREEDY))
    text = [one.token for one in plain]

    def propose(known: list[int], most: int, deepest: int) -> DraftTree:
        wrong = [token for token in range(VOCABULARY) if token != text[len(known) - 2]][:most]
        return DraftTree(wrong, [-1] * len(wrong), [1.0] * len(wrong))

    assert list(generate(EXACT, [[1, 2]], 12, sampling=GREEDY, speculation=_drafts(propose))) == plain


def _raises(text: list[int], most: int, deepest: int) -> DraftTree:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "propose",
    [
        _raises,
        lambda text, most, deepest: DraftTree([VOCABULARY], [-1], [1.0]),
        lambda text, most, deepest: DraftTree([-1], [-1], [1.0]),
        lambda text, most, deepest: DraftTree([1], [0], [1.0]),
        lambda text, most, deepest: DraftTree([1], [-1], [math.nan]),
        lambda text, most, deepest: DraftTree([1, 2], [-1, 0], [0.5, 0.6]),
        lambda text, most, deepest: DraftTree([1, 1], [-1, -1], [0.5, 0.5]),
        lambda text, most, deepest: DraftTree([1] * (most + 1), [*range(-1, most)], [1.0] * (most + 1)),
        lambda text, most, deepest: DraftTree([1] * (deepest + 1), [*range(-1, deepest)], [1.0] * (deepest + 1)),
        lambda text, most, deepest: DraftTree([1], [], [1.0]),
        lambda text, most, deepest: None,
    ],
)
def test_a_drafter_that_fails_is_dropped_with_a_warning(propose: Any) -> None:
    plain = list(generate(EXACT, [[1, 2], [3]], 6, sampling=GREEDY))
    with pytest.warns(UserWarning, match="goes on without a drafter, which failed") as said:
        found = list(generate(EXACT, [[1, 2], [3]], 6, sampling=GREEDY, speculation=_drafts(propose)))
    assert found == plain
    assert len(said) == 2


@pytest.mark.parametrize(("model", "tolerance"), [(EXACT, 1e-10), (HALF, 0.0)], ids=["float64", "bfloat16"])
def test_the_cache_holds_what_a_reading_token_by_token_gives(model: Llama, tolerance: float) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    writing = Engine(model, texts=2, speculation=_oracle(model, prompts, GREEDY))
    for prompt in prompts:
        writing.add(prompt, 30, sampling=GREEDY)
    found = [one for _ in range(3) for one in writing.step()]
    texts = [prompt + [one.token for one in found if one.sequence == n] for n, prompt in enumerate(prompts)]
    held, fresh = writing._cache, KVCache(model.config, 2, CONTEXT, model.embedding.weight.dtype)
    with torch.inference_mode():
        for place in range(max(map(len, texts)) - 1):
            rows = [text[place : place + 1] if place < len(text) - 1 else [] for text in texts]
            offsets = torch.tensor([0, len(rows[0]), len(rows[0]) + len(rows[1])])
            model.hidden(torch.tensor([token for row in rows for token in row]), offsets, cache=fresh)
    assert held.lengths == fresh.lengths == [len(text) - 1 for text in texts]
    assert min(held.lengths) >= 14
    for layer, sequence in itertools.product(range(model.config.layers), range(2)):
        for own, other in zip(held.read(layer, sequence), fresh.read(layer, sequence), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=tolerance)


# Whole texts of five tokens, of three different ones.
_TINY = LlamaConfig(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocabulary=3, context=8)
_LENGTH = 5


def _law(model: Llama, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of each text after the token 0, by enumeration."""
    law = {}
    for text in itertools.product(range(3), repeat=_LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([0, *text[:-1]]), torch.tensor([0, _LENGTH])) / sampling.temperature
        law[text] = float(logits.double().softmax(-1)[range(_LENGTH), text].prod())
    return law


def _p_value(model: Llama, sampling: Sampling, texts: int) -> float:
    """Of a G-test: how likely texts with drafts deviate as much from their law."""
    tree = DraftTree([0, 1, 0, 1, 2, 0, 1], [-1, -1, 0, 0, 0, 1, 1], [1.0] * 7)

    def propose(text: list[int], most: int, deepest: int) -> DraftTree:
        return DraftTree(*(part[: 2 if deepest == 1 else 7] for part in tree))

    counts = dict.fromkeys(itertools.product(range(3), repeat=_LENGTH), 0)
    for seed in range(texts):
        own = sampling.model_copy(update={"seed": seed})
        found = generate(model, [[0]], _LENGTH, sampling=own, speculation=_drafts(propose))
        counts[tuple(one.token for one in found)] += 1
    law = _law(model, sampling)
    pairs = sorted((texts * law[text], number) for text, number in counts.items())
    rare = [pair for pair in pairs if pair[0] < 5]  # counted together
    pairs = [tuple(map(sum, zip(*rare, strict=True))), *pairs[len(rare) :]] if rare else pairs
    expected, observed = zip(*pairs, strict=True)
    return float(stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


def _one_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "_levels", lambda tree: [0] * len(tree.tokens))


def _one_chain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "_parents", lambda size, tree: list(range(-1, size + len(tree.tokens) - 1)))


def _nothing_moves(patch: pytest.MonkeyPatch) -> None:
    def keep(self: KVCache, lengths: list[int], places: list[list[int]]) -> None:
        self.lengths = [start + len(kept) for start, kept in zip(lengths, places, strict=True)]

    patch.setattr(KVCache, "keep", keep)


_BUGS = {"one random number for a path": _one_number, "one chain": _one_chain, "nothing moves": _nothing_moves}


@pytest.mark.slow
@pytest.mark.parametrize("bug", [None, *_BUGS])
def test_whole_texts_follow_the_law_of_the_model_and_planted_bugs_are_found(
    bug: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Llama(_TINY)
    model.init_weights(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(20)
    model.double()
    if bug is not None:
        _BUGS[bug](monkeypatch)
    p = _p_value(model, Sampling(temperature=1.0, top_p=1), 4000)
    assert p > 1e-3 if bug is None else p < 1e-6


def test_repeated_text_is_drafted_and_new_text_is_not() -> None:
    drafter = NGramDrafter()
    drafter.add([5, 6, 7, 8, 9, 1, 2])
    assert drafter.propose(8, 8) == NOTHING
    drafter.add([5, 6, 7])
    tree = drafter.propose(8, 8)
    assert (tree.tokens[:4], tree.parents[:4]) == ([8, 9, 1, 2], [-1, 0, 1, 2])
    assert checked(tree, 10, 8, 8) == tree
    assert drafter.propose(2, 8).tokens == [8, 9]
    assert drafter.propose(8, 1).tokens == [8]


def test_places_that_disagree_become_branches_ordered_by_their_votes() -> None:
    drafter = NGramDrafter()
    drafter.add([1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3, 5, 7, 2, 3])
    tree = drafter.propose(8, 2)
    first = [(token, chance) for token, parent, chance in zip(*tree, strict=True) if parent == -1]
    assert [token for token, _ in sorted(first, key=lambda one: -one[1])] == [5, 4]
    assert sum(chance for _, chance in first) <= 1


def test_drafts_that_fail_lower_the_chances_of_the_next_and_right_ones_raise_them() -> None:
    chances = []
    for right in (False, True):
        drafter = NGramDrafter()
        drafter.add([1, 2, 3] * 4)
        for new in range(10, 20):
            (token, *_), _, (chance, *_) = drafter.propose(1, 1)
            drafter.add([token] if right else [new, 1, 2, 3])
        chances.append(chance)
    assert chances[0] < 0.5 < chances[1]


@settings(max_examples=60)
@given(
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    slope=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
)
def test_the_chosen_drafts_give_the_most_tokens_for_the_time(seeds: list[int], slope: float) -> None:
    """Against every number of the likeliest tokens; the choice is closed under parents."""
    trees = []
    for seed in seeds:
        tree = _random_tree(seed)([], 10, 5)
        generator = torch.Generator().manual_seed(seed)
        for place, parent in enumerate(tree.parents):
            above = 1.0 if parent < 0 else tree.chances[parent]
            tree.chances[place] = above * float(torch.rand((), generator=generator))
        trees.append(tree)
    costs = [1 + slope * rows for rows in range(MOST_ROWS)]
    found = choose(trees, costs)
    for tree in found:
        checked(tree, VOCABULARY, 10, 5)
    chosen = [chance for tree in found for chance in tree.chances]
    rates = []
    chances = sorted((chance for tree in trees for chance in tree.chances), reverse=True)
    for number in range(min(len(chances), MOST_ROWS - len(trees)) + 1):
        rates.append((len(trees) + sum(chances[:number])) / costs[len(trees) + number - 1])
    assert (len(trees) + sum(chosen)) / costs[len(trees) + len(chosen) - 1] == pytest.approx(max(rates))


def test_more_texts_than_a_pass_takes_get_no_drafts() -> None:
    tree = DraftTree([1], [-1], [1.0])
    assert choose([tree] * 33, FREE) == [NOTHING] * 33
    assert choose([tree] * 32, FREE) == [NOTHING] * 32
    prompts = [[n] for n in range(20)]
    plain = list(generate(EXACT, prompts, 5, sampling=GREEDY))
    found = list(generate(EXACT, prompts, 5, sampling=GREEDY, speculation=Speculation([NGramDrafter], FREE)))
    assert _texts(found, 20) == _texts(plain, 20)


def test_costs_are_positive_and_do_not_fall() -> None:
    costs = measure_costs(EXACT, context=16)
    assert len(costs) == MOST_ROWS
    assert costs[0] > 0
    assert costs == sorted(costs)


def test_the_path_of_a_drafter_may_hold_a_plus(tmp_path: Path) -> None:
    path = tmp_path / "small+fast" / "drafter.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"none")
    for names in (str(path), os.path.relpath(path)):
        with pytest.raises(CheckpointError, match=r"small\+fast/drafter\.safetensors"):
            find_drafters(names)


def test_an_unknown_drafter_is_refused() -> None:
    with pytest.raises(DataError, match="unknown drafter 'eagle'"):
        find_drafters("eagle")
    with pytest.raises(DataError, match="joins drafters of one kind"):
        find_drafters("ngram+ngram")
