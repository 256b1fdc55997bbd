"""Losses of post-training against plain sums over all logits, in 64 bits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cordillera.data.language.batches import IGNORED, PackedTokens
from cordillera.data.language.chats.batches import ChatBatches, ChatMicrobatches, held_out_chats
from cordillera.data.language.chats.tokens import ANSWER, END, PROMPT, TokenisedChat
from cordillera.distributed.vocabulary_loss import label_log_probabilities
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.stages import LlamaStage
from cordillera.training.language.objectives import (
    AnswersObjective,
    GroupsConfig,
    GroupsObjective,
    PreferencesConfig,
    PreferencesObjective,
    RewardObjective,
    clipped_loss,
    document_sums,
    group_advantages,
    means,
    preference_loss,
    reward_loss,
)
from cordillera.workflows.post_training.training import make_objective

SIZES = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 12, "vocabulary": 11, "context": 64}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def stage_of(seed: int = 0, scores: bool = False, dtype: torch.dtype = torch.float64) -> LlamaStage:
    model = Llama(LlamaConfig(**SIZES, scores=scores))
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(20)
    stage = LlamaStage(model).to(dtype)
    stage.loss_rows = 5  # several chunks
    return stage


class Case:
    """Rows of hidden numbers in documents of different lengths, with labels of some."""

    def __init__(self, seed: int, documents: int = 6) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 9, (documents,), generator=generator)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(self.offsets[-1])
        self.hidden = torch.randn(count, SIZES["hidden"], generator=generator, dtype=torch.float64).requires_grad_()
        self.labels = torch.randint(0, SIZES["vocabulary"], (count,), generator=generator)
        self.labels[torch.rand(count, generator=generator) < 0.4] = IGNORED
        self.labels[self.offsets[1:] - 1] = IGNORED
        self.labels[self.offsets[:-1]] = 3  # each has one at least
        self.values = torch.randn(documents, generator=generator, dtype=torch.float64)
        self.generator = generator

    def answers(self, logits: Tensor) -> list[Tensor]:
        """Log-probabilities of the labels of each document, one after another."""
        found = []
        for first, end in itertools.pairwise(self.offsets.tolist()):
            own = [
                logits[row].log_softmax(0)[int(self.labels[row])] for row in range(first, end) if self.labels[row] >= 0
            ]
            found.append(torch.stack(own))
        return found


def same_gradients(case: Case, stage: LlamaStage, ours: Tensor, theirs: Tensor, weight: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **CLOSE)
    pairs = zip(
        torch.autograd.grad(ours, (case.hidden, weight)),
        torch.autograd.grad(theirs, (case.hidden, weight)),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, **CLOSE)


@settings(max_examples=25)
@given(n=st.integers(0, 20), rows=st.integers(1, 25), seed=st.integers(0, 99))
def test_log_probabilities_and_their_gradients_are_those_of_whole_logits(n: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < 0.3] = IGNORED
    factors = torch.randn(n, generator=generator, dtype=torch.float64)
    found = label_log_probabilities(hidden, weight, labels, rows)
    expected = -F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(found[labels == IGNORED], torch.zeros(int((labels == IGNORED).sum()), dtype=torch.float64))
    ours = torch.autograd.grad((found * factors).sum(), (hidden, weight), allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad((expected * factors).sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_half_precision_gives_log_probabilities_in_single() -> None:
    hidden, weight = torch.randn(300, 6).bfloat16(), torch.randn(11, 6).bfloat16()
    labels = torch.arange(300) % 11
    found = label_log_probabilities(hidden, weight, labels, 17)
    assert found.dtype == torch.float32
    expected = -F.cross_entropy((hidden @ weight.T).double(), labels, reduction="none")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_sums_of_documents_are_their_own() -> None:
    values, offsets = torch.arange(7.0), torch.tensor([0, 2, 2, 3, 7])
    assert document_sums(values, offsets).tolist() == [1.0, 0.0, 2.0, 18.0]


# Answers


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_summed_cross_entropy_of_labels(seed: int) -> None:
    case, stage = Case(seed), stage_of()
    found = AnswersObjective()(stage, case.hidden, case.offsets, case.labels, {})
    expected = -torch.cat(case.answers(case.hidden @ stage.head_weight.T)).sum()
    same_gradients(case, stage, found, expected, stage.head_weight)


# Preferences


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("beta", "nll"), [(0.1, 0.0), (0.1, 0.2), (2.0, 1.5)])
def test_preferences_and_their_gradients_are_those_of_whole_logits(seed: int, beta: float, nll: float) -> None:
    case, stage = Case(seed), stage_of(seed)
    objective = PreferencesObjective(PreferencesConfig(beta=beta, nll=nll))
    reference = 10 * case.values - 20
    found = objective(stage, case.hidden, case.offsets, case.labels, {"reference": reference})
    answers = case.answers(case.hidden @ stage.head_weight.T)
    expected, margins = torch.zeros((), dtype=torch.float64), []
    for place in range(0, len(answers), 2):
        chosen, rejected = answers[place], answers[place + 1]
        margin = beta * ((chosen.sum() - reference[place]) - (rejected.sum() - reference[place + 1]))
        expected = expected + (1 + (-margin).exp()).log() - nll * chosen.mean()
        margins.append(float(margin.detach()))
    same_gradients(case, stage, found, expected, stage.head_weight)
    measured = objective.take()
    assert measured["units"] == len(margins)
    assert measured["margin"] == pytest.approx(sum(margins), rel=1e-10)
    assert measured["accuracy"] == sum(margin > 0 for margin in margins)
    sums = [float(one.detach().sum()) for one in answers]
    assert measured["chosen_log_probability"] == pytest.approx(sum(sums[::2]))
    assert measured["rejected_log_probability"] == pytest.approx(sum(sums[1::2]))
    assert objective.take() == {}


@pytest.mark.parametrize("nll", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preferences_of_the_reference_itself_are_the_logarithm_of_two(nll: float, dtype: torch.dtype) -> None:
    case, stage = Case(1), stage_of(dtype=dtype)
    hidden = case.hidden.to(dtype)
    objective = PreferencesObjective(PreferencesConfig(nll=nll))
    tokens = stage.log_probabilities(hidden, case.labels)
    sums = document_sums(tokens, case.offsets).detach()
    found = objective(stage, hidden, case.offsets, case.labels, {"reference": sums})
    likelihood = sum(
        float(one.detach().mean()) for one in case.answers(case.hidden @ stage.head_weight.double().T)[::2]
    )
    assert float(found) == pytest.approx(3 * math.log(2) - nll * likelihood, rel=1e-6)
    assert objective.take()["margin"] == 0


def test_margins_of_any_size_give_a_finite_loss() -> None:
    ratios = torch.tensor([1e6, 0.0, 0.0, 1e6], requires_grad=True)
    losses, margins = preference_loss(ratios, 1.0)
    assert losses.tolist() == [0.0, 1e6]
    assert margins.tolist() == [1e6, -1e6]
    losses.sum().backward()
    assert ratios.grad.tolist() == [0.0, 0.0, -1.0, 1.0]


def chats(seed: int, pairs: int) -> list[tuple[TokenisedChat, TokenisedChat]]:
    """Pairs of a prompt, an answer, its end, and a token that the format writes after it."""
    random = np.random.default_rng(seed)

    def one(prompt: list[int]) -> TokenisedChat:
        answer = random.integers(3, SIZES["vocabulary"], random.integers(1, 9)).tolist()
        kinds = [PROMPT] * len(prompt) + [ANSWER] * len(answer) + [END, PROMPT]
        return TokenisedChat(np.array([*prompt, *answer, 1, 2], np.int32), np.array(kinds, np.int8))

    found = []
    for _ in range(pairs):
        prompt = random.integers(3, SIZES["vocabulary"], random.integers(1, 6)).tolist()
        found.append((one(prompt), one(prompt)))
    return found


def preferences(stage: LlamaStage, batches: list[PackedTokens], beta: float = 0.5) -> tuple[float, list[Tensor]]:
    """Sum of the losses of microbatches, and its gradients."""
    stage.objective = PreferencesObjective(PreferencesConfig(beta=beta))
    stage.zero_grad()
    losses = [stage(one.tokens, one.offsets, None, one.labels, None, one.documents) for one in batches]
    torch.stack(losses).sum().backward()
    return sum(map(float, losses)), [parameter.grad.clone() for parameter in stage.parameters()]


def microbatches(items: list, most: int, learns: tuple[int, ...] = (ANSWER, END)) -> list[PackedTokens]:
    packed = held_out_chats(items, most=most, learns=learns)
    values = {"reference": -torch.arange(2.0 * len(items), dtype=torch.float64).view(-1, 2)}
    return list(ChatMicrobatches(items, packed.parts, learns, values))


def test_preferences_do_not_depend_on_how_pairs_are_packed() -> None:
    items, stage = chats(3, 7), stage_of()
    found = {most: preferences(stage, microbatches(items, most)) for most in (32, 64, 400)}
    assert len({len(microbatches(items, most)) for most in found}) == 3
    loss, gradients = found[400]
    for other, theirs in found.values():
        assert other == pytest.approx(loss, rel=1e-6)  # norms are in 32 bits
        torch.testing.assert_close(theirs, gradients, rtol=1e-5, atol=1e-6)


def test_ends_count_only_if_they_are_learnt_and_what_the_format_writes_never() -> None:
    items, stage = chats(4, 3), stage_of(2)

    def with_end(token: int, after: int) -> list[tuple[TokenisedChat, TokenisedChat]]:
        found = []
        for item in items:
            parts = []
            for chat in item:
                tokens = chat.tokens.copy()
                tokens[-2:] = token, after
                parts.append(TokenisedChat(tokens, chat.kinds))
            found.append(tuple(parts))
        return found

    masked = [preferences(stage, microbatches(with_end(*ends), 64, (ANSWER,)))[0] for ends in ((1, 2), (7, 2), (1, 9))]
    assert masked[0] == masked[1] == masked[2]
    counted = [preferences(stage, microbatches(with_end(*ends), 64))[0] for ends in ((1, 2), (7, 2), (1, 9))]
    assert counted[0] != counted[1]
    assert counted[0] == counted[2]


# Rewards


@pytest.mark.parametrize("seed", range(5))
def test_rewards_are_the_logistic_loss_of_scores_at_the_last_token(seed: int) -> None:
    case, stage = Case(seed), stage_of(seed, scores=True)
    objective = RewardObjective()
    found = objective(stage, case.hidden, case.offsets, case.labels, {})
    weight = stage.score.weight
    scores = [case.hidden[end - 1] @ weight[0] for end in case.offsets[1:].tolist()]
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    expected = sum((1 + (-(chosen - rejected)).exp()).log() for chosen, rejected in pairs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)  # scores are in 32 bits
    ours, theirs = (torch.autograd.grad(one, (case.hidden, weight)) for one in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    measured = objective.take()
    assert measured["accuracy"] == sum(bool(chosen > rejected) for chosen, rejected in pairs)
    assert measured["margin"] == pytest.approx(float(sum(a - b for a, b in pairs)), rel=1e-5)
    assert measured["units"] == 3


def test_rewards_of_any_size_give_a_finite_loss() -> None:
    chosen, rejected = torch.tensor([1e5, 0.0, 2.0]), torch.tensor([0.0, 1e5, 2.0])
    assert reward_loss(chosen, rejected).tolist() == pytest.approx([0.0, 1e5, math.log(2)])


@given(seed=st.integers(0, 200), count=st.integers(1, 4))
@settings(max_examples=40)
def test_a_pair_is_never_split_in_training_and_evaluation(seed: int, count: int) -> None:
    items = chats(seed, 12)
    batches = ChatBatches(items, tokens=40 * count, microbatches=count, most=40, seed=seed, epochs=1)
    found = [one for iteration in batches for one in iteration.microbatches]
    found += held_out_chats(items, most=40)
    seen: list[int] = []
    for one in found:
        numbers, chosen = one.documents["item"].tolist(), one.documents["is_chosen"].tolist()
        if numbers == [-1]:
            assert make_objective(PreferencesConfig()).units(one) == 0
            continue
        assert numbers[::2] == numbers[1::2]
        assert chosen == [True, False] * (len(chosen) // 2)
        assert make_objective(PreferencesConfig()).units(one) == len(chosen) // 2
        seen += numbers[::2]
    assert sorted(seen) == sorted([*range(12)] * 2)


# Groups


def test_advantages_are_those_computed_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)
    plain = group_advantages(rewards, normalize=False)
    assert plain.tolist() == [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]
    deviations = [0.5, math.sqrt(1 / 3)]
    for found, above, deviation in zip(group_advantages(rewards).tolist(), plain.tolist(), deviations, strict=True):
        assert found == pytest.approx([value / (deviation + 1e-4) for value in above], rel=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("samples", [2, 3, 7])
def test_a_group_of_equal_rewards_has_no_advantage(normalize: bool, reward: float, samples: int) -> None:
    rewards = torch.full((2, samples), reward, dtype=torch.float64)
    assert not group_advantages(rewards, normalize).any()


def groups(case: Case, stage: LlamaStage, drift: float = 0.0, away: float = 0.0) -> dict[str, Tensor]:
    """Values of documents whose samples were drawn by weights that have changed since."""
    tokens = stage.log_probabilities(case.hidden, case.labels).detach()
    count = len(tokens)
    noise = [torch.randn(count, generator=case.generator, dtype=torch.float64) for _ in range(2)]
    return {
        "advantage": case.values,
        "reward": case.values.abs(),
        "sampled": tokens + drift * noise[0],
        "reference": tokens + away * noise[1],
    }


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_the_present_weights_drew_follow_the_weighted_likelihood(seed: int) -> None:
    case, stage = Case(seed), stage_of(seed)
    objective = GroupsObjective(GroupsConfig())
    found = objective(stage, case.hidden, case.offsets, case.labels, groups(case, stage))
    assert float(found) == pytest.approx(-float(case.values.sum()), rel=1e-10)
    answers = case.answers(case.hidden @ stage.head_weight.T)
    likelihood = sum(value * one.mean() for value, one in zip(case.values, answers, strict=True))
    wanted = (case.hidden, stage.head_weight)
    ours, theirs = torch.autograd.grad(found, wanted), torch.autograd.grad(-likelihood, wanted)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    measured = means(objective.take())
    assert measured["reward"] == pytest.approx(float(case.values.abs().mean()))
    assert (measured["clipped"], measured["drift"], measured["divergence"]) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_other_weights_drew_are_clipped_token_by_token(seed: int) -> None:
    case, stage = Case(seed), stage_of(seed)
    objective = GroupsObjective(GroupsConfig(clip=0.3, kl=0.7))
    values = groups(case, stage, drift=0.5, away=0.4)
    found = objective(stage, case.hidden, case.offsets, case.labels, values)
    rows = (case.hidden @ stage.head_weight.T).log_softmax(1)
    expected, clipped, divergences = torch.zeros((), dtype=torch.float64), [], []
    for number, (first, end) in enumerate(itertools.pairwise(case.offsets.tolist())):
        learnt = [row for row in range(first, end) if case.labels[row] >= 0]
        outside = divergence = 0.0
        for row in learnt:
            own = rows[row, int(case.labels[row])]
            ratio, advantage = (own - values["sampled"][row]).exp(), case.values[number]
            bounded = ratio if 0.7 <= ratio <= 1.3 else ratio.detach().clamp(0.7, 1.3)
            surrogate = ratio * advantage if ratio * advantage <= bounded * advantage else bounded * advantage
            apart = values["reference"][row] - own
            estimate = apart.exp() - apart - 1
            assert float(estimate.detach()) >= 0
            expected = expected + (0.7 * estimate - surrogate) / len(learnt)
            outside += (not 0.7 <= float(ratio.detach()) <= 1.3) / len(learnt)
            divergence += float(estimate.detach()) / len(learnt)
        clipped.append(outside)
        divergences.append(divergence)
    same_gradients(case, stage, found, expected, stage.head_weight)
    measured = means(objective.take())
    assert 0 < measured["clipped"] < 1
    assert measured["clipped"] == pytest.approx(sum(clipped) / len(clipped))
    assert measured["divergence"] == pytest.approx(sum(divergences) / len(divergences))
    assert objective.take() == {}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # no more to gain
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # no more to gain
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipping_ends_what_a_token_can_gain_and_not_what_it_can_lose(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    change = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = clipped_loss(change, torch.tensor([advantage], dtype=torch.float64), 0.2)
    assert float(found) == pytest.approx(loss)
    found.backward()
    assert float(change.grad) == pytest.approx(slope)


@given(seed=st.integers(0, 500), scale=st.floats(0.0, 5.0))
@settings(max_examples=20)
def test_the_divergence_is_never_below_zero_and_zero_of_equals(seed: int, scale: float) -> None:
    case, stage = Case(seed % 7), stage_of()
    case.generator.manual_seed(seed)
    objective = GroupsObjective(GroupsConfig(kl=1.0))
    objective(stage, case.hidden, case.offsets, case.labels, groups(case, stage, away=scale))
    divergence = objective.take()["divergence"]
    assert divergence >= 0
    assert (divergence == 0) == (scale == 0) or scale < 1e-6


@pytest.mark.parametrize("name", ["dpo", "reward", "grpo"])
def test_a_microbatch_without_documents_has_no_loss_and_no_gradient(name: str) -> None:
    configs = {"dpo": PreferencesConfig(), "grpo": GroupsConfig()}
    stage = stage_of(scores=name == "reward")
    objective = make_objective(configs[name]) if name in configs else RewardObjective()
    nothing = torch.zeros(1, dtype=torch.int64)
    empty = PackedTokens(nothing, torch.tensor([0, 1]), nothing + IGNORED)
    assert objective.units(empty) == 0
    stage.objective = objective
    loss = stage(empty.tokens, empty.offsets, None, empty.labels)
    loss.backward()
    assert float(loss) == 0
    assert not any(parameter.grad.any() for parameter in stage.parameters() if parameter.grad is not None)
    assert objective.take() == {}


# Chats beside each other


def log_probabilities(stage: LlamaStage, one: PackedTokens) -> list[Tensor]:
    """Log-probabilities of the labels of each document of a microbatch."""
    found: list[Tensor] = []

    def keep(stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: dict) -> Tensor:
        found.extend(stage.log_probabilities(hidden, labels).split(offsets.diff().tolist()))
        return hidden.new_zeros(())

    stage.objective = keep
    with torch.no_grad():
        stage(one.tokens, one.offsets, None, one.labels)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_do_not_see_what_their_neighbours_in_a_microbatch_say(dtype: torch.dtype) -> None:
    items = [item[:1] for item in chats(5, 6)]
    stage = stage_of(dtype=dtype)
    one = held_out_chats(items, most=400)[0]
    before = log_probabilities(stage, one)
    for number in range(len(items)):
        first, end = one.offsets[number : number + 2].tolist()
        tokens = (one.tokens + 3) % SIZES["vocabulary"]
        tokens[first:end] = one.tokens[first:end]
        after = log_probabilities(stage, one._replace(tokens=tokens))
        assert torch.equal(after[number], before[number])
        assert sum(torch.equal(a, b) for a, b in zip(after, before, strict=True)) == 1


def test_answers_are_as_likely_in_any_order_and_alone() -> None:
    items, stage = [item[:1] for item in chats(5, 6)], stage_of()
    alone = [log_probabilities(stage, held_out_chats([item], most=400)[0])[0] for item in items]
    for order in (range(6), [4, 2, 0, 5, 1, 3], [3, 1, 4]):
        found = log_probabilities(stage, held_out_chats([items[number] for number in order], most=400)[0])
        torch.testing.assert_close(found, [alone[number] for number in order], rtol=0, atol=1e-6)


def test_only_labels_of_answers_are_learnt() -> None:
    (item,) = chats(6, 1)
    for learns, kinds in (((ANSWER, END), {ANSWER, END}), ((ANSWER,), {ANSWER})):
        one = held_out_chats([item[:1]], most=100, learns=learns)[0]
        expected = [
            int(token) if kind in kinds else IGNORED
            for token, kind in zip(item[0].tokens[1:], item[0].kinds[1:], strict=True)
        ]
        assert one.labels.tolist() == [*expected, IGNORED]


def test_answers_in_one_microbatch_are_learnt_like_one_at_a_time() -> None:
    items = [item[:1] for item in chats(7, 5)]
    found = []
    for most in (400, 30):
        stage = stage_of(dtype=torch.float64)
        stage.objective = AnswersObjective()
        loss = sum(
            stage(one.tokens, one.offsets, None, one.labels, None, one.documents)
            for one in held_out_chats(items, most=most)
        )
        loss.backward()
        found.append((loss.detach(), [parameter.grad for parameter in stage.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)  # norms are in 32 bits
