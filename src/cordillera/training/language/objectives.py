"""Losses of post-training over the documents of a microbatch: answers, rewards, preferences, groups of samples.

A loss is a sum over units (tokens, pairs or samples); the engine divides it by the units of the whole iteration, so
that it depends neither on the packing nor on the mesh.

Sources: Grattafiori et al. 2024, sections 4.1.2 to 4.1.4, for rewards, fine-tuning and preferences; Rafailov et al.
2023 (DPO), equation 7; Shao et al. 2024 (GRPO), equation 3, with the clipping of Schulman et al. 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from cordillera.data.language.batches import PackedTokens
from cordillera.distributed.dtensors import local
from cordillera.distributed.vocabulary_loss import IGNORED, summed_cross_entropy
from cordillera.models.language.stages import LlamaStage

LossFactor = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Objective(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AnswersConfig(_Objective):
    """Supervised fine-tuning: the cross entropy of the assistant's tokens.

    Attributes:
        name: ``sft``.
    """

    name: Literal["sft"] = "sft"


class RewardConfig(_Objective):
    """Reward model: the logistic loss of the difference of two answers' scores.

    Attributes:
        name: ``reward``.
    """

    name: Literal["reward"] = "reward"


class PreferencesConfig(_Objective):
    """Direct preference optimization: the logistic loss of the difference of two answers' log-probability ratios.

    Attributes:
        name: ``dpo``.
        beta: Factor of the log-probability ratios between the model and the one that training began with.
        nll: Factor of the mean negative log-likelihood of the chosen answer's tokens, which keeps its probability from
            falling.
        ends: Whether the tokens that end a turn count in the ratios; the paper masks them.
    """

    name: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    nll: LossFactor = 0.2
    ends: bool = False


class GroupsConfig(_Objective):
    """Group relative policy optimization on tasks whose answers can be verified.

    Attributes:
        name: ``grpo``.
        samples: Number of answers to a problem, a group; the mean of their rewards is the baseline.
        problems: Number of problems of a step.
        max_new_tokens: Largest number of tokens of an answer.
        clip: Largest relative change of a token's probability that the loss rewards.
        kl: Factor of the estimated divergence from the model that training began with.
        normalize: Whether a group's advantages are divided by the standard deviation of its rewards.
    """

    name: Literal["grpo"] = "grpo"
    samples: int = Field(8, ge=2, le=1024)
    problems: int = Field(8, ge=1, le=2**16)
    max_new_tokens: int = Field(64, ge=1)
    clip: float = Field(0.2, gt=0, allow_inf_nan=False)
    kl: LossFactor = 0.0
    normalize: bool = True


class DraftingConfig(_Objective):
    """Drafter: the cross entropy of its probabilities and the model's, over drafts that it reads itself.

    Attributes:
        name: ``draft``.
        decay: Factor of the loss of each further draft in a row.
    """

    name: Literal["draft"] = "draft"
    decay: float = Field(0.8, gt=0, le=1)


ObjectiveConfig = Annotated[
    AnswersConfig | RewardConfig | PreferencesConfig | GroupsConfig | DraftingConfig, Field(discriminator="name")
]


def document_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of ``values [T]`` over each document, ``[B]``; documents begin at ``offsets [B + 1]``."""
    lengths = offsets.diff().to(values.device)
    numbers = torch.arange(len(lengths), device=values.device).repeat_interleave(lengths)
    return torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(0, numbers, values)


_UNITS = "units"


def means(measured: Mapping[str, float]) -> dict[str, float]:
    """Return the means of sums that an objective measured, without their number."""
    return {name: value / measured[_UNITS] for name, value in measured.items() if name != _UNITS}


class AnswersObjective:
    """Cross entropy of the labels; see :class:`AnswersConfig`."""

    def __init__(self) -> None:
        self._measured: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Return and reset the sums measured since the last call, by name, and the number of units."""
        found, self._measured = self._measured, {}
        return found

    def units(self, one: PackedTokens) -> int:
        """Return the number of units of a microbatch, by which losses are divided."""
        assert one.labels is not None
        return int((one.labels != IGNORED).sum())

    def _measure(self, **values: Tensor) -> None:
        """Add values of units, ``[units]`` each, to the sums of their names."""
        for name, value in values.items():
            self._measured[name] = self._measured.get(name, 0.0) + float(value.detach().double().sum())
            count = len(value)
        self._measured[_UNITS] = self._measured.get(_UNITS, 0.0) + count

    def __call__(
        self, stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss; see :class:`~cordillera.models.language.stages.Objective`."""
        return summed_cross_entropy(hidden, local(stage.head_weight), labels, stage.vocabulary_links, stage.loss_rows)


class _PairsObjective(AnswersObjective):
    """Losses of pairs: document ``2 i`` is a chosen answer, ``2 i + 1`` the rejected one."""

    def units(self, one: PackedTokens) -> int:
        """Return the number of pairs."""
        return (len(one.offsets) - 1) // 2


def last_rows(hidden: Tensor, offsets: Tensor) -> Tensor:
    """Return the last row of each document, ``[B, hidden]``, where a reward model reads a text's score.

    Documents begin at ``offsets [B + 1]``.
    """
    return hidden[(offsets[1:] - 1).to(hidden.device)]


def reward_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return ``-log sigmoid(chosen - rejected)`` of the scores of pairs, ``[n]`` each (section 4.1.2; no margin)."""
    return -F.logsigmoid(chosen - rejected)


class RewardObjective(_PairsObjective):
    """Loss of a reward model; see :class:`RewardConfig`."""

    def __call__(
        self, stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss; see :class:`~cordillera.models.language.stages.Objective`."""
        if len(offsets) % 2 == 0:  # a token that fills an empty microbatch
            return 0.0 * stage.score_of(hidden).sum()
        scores = stage.score_of(last_rows(hidden, offsets)).float()
        chosen, rejected = scores[::2], scores[1::2]
        self._measure(accuracy=chosen > rejected, margin=chosen - rejected)
        return reward_loss(chosen, rejected).sum()


def preference_loss(ratios: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss of pairs by their log-probability ratios, and their margins, ``[n]`` each (DPO, equation 7).

    Args:
        ratios: Sum of ``log p - log p_reference`` over the answer of each document, chosen and rejected in turn,
            ``[2 n]``.
        beta: Factor of the ratios.
    """
    margins = beta * (ratios[::2] - ratios[1::2])
    return -F.logsigmoid(margins), margins


class PreferencesObjective(_PairsObjective):
    """Loss of preferences; see :class:`PreferencesConfig`.

    Documents have the value ``reference``, the sum of the reference's log-probabilities over the same labels.
    """

    def __init__(self, config: PreferencesConfig) -> None:
        super().__init__()
        self.config = config

    def __call__(
        self, stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss; see :class:`~cordillera.models.language.stages.Objective`."""
        tokens = stage.log_probabilities(hidden, labels)
        if len(offsets) % 2 == 0:
            return 0.0 * tokens.sum()
        sums = document_sums(tokens, offsets)
        losses, margins = preference_loss(sums - documents["reference"].to(sums), self.config.beta)
        self._measure(
            accuracy=margins > 0,
            margin=margins,
            chosen_log_probability=sums[::2],
            rejected_log_probability=sums[1::2],
        )
        counts = document_sums((labels != IGNORED).to(sums.dtype), offsets)
        return losses.sum() + self.config.nll * (-sums[::2] / counts[::2].clamp(min=1)).sum()


class GroupsObjective(AnswersObjective):
    """Loss of groups of samples; see :class:`GroupsConfig`. Units are samples.

    Samples are drawn from the model as it is, at temperature 1. Documents have the values ``advantage`` and ``reward``,
    ``[B]`` each, and tokens ``sampled`` and ``reference``, ``[T]`` each: the log-probabilities of the labels when they
    were drawn, and under the model that training began with.
    """

    def __init__(self, config: GroupsConfig, vocabulary: int | None = None) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary

    def units(self, one: PackedTokens) -> int:
        """Return the number of samples with a label."""
        return 0 if one.documents is None else len(one.offsets) - 1

    def __call__(
        self, stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss; see :class:`~cordillera.models.language.stages.Objective`."""
        tokens = stage.log_probabilities(hidden, labels, self.vocabulary)
        if not documents:
            return 0.0 * tokens.sum()
        change = tokens - documents["sampled"].to(tokens)
        advantages = documents["advantage"].to(tokens).repeat_interleave(offsets.diff().to(tokens.device))
        losses = clipped_loss(change, advantages, self.config.clip)
        away = documents["reference"].to(tokens) - tokens
        divergence = away.exp() - away - 1  # never below 0, and right in the mean (Shao et al., equation 4)
        has_target = (labels != IGNORED).to(tokens.dtype)
        counts = document_sums(has_target, offsets).clamp(min=1)
        is_clipped = ((change.exp() - 1).abs() > self.config.clip).to(tokens.dtype)
        clipped, drift, away = (
            document_sums(value * has_target, offsets) / counts for value in (is_clipped, change.abs(), divergence)
        )
        self._measure(reward=documents["reward"], clipped=clipped, drift=drift, divergence=away)
        return (document_sums(losses * has_target, offsets) / counts + self.config.kl * away).sum()


def clipped_loss(change: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return the loss of each token by its change of log-probability since it was drawn, ``[T]`` each.

    ``advantages [T]`` weigh tokens; ``clip`` is the largest relative change of a probability that is rewarded.

    Source: Schulman et al. 2017, equation 7.
    """
    ratio = change.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def group_advantages(rewards: Tensor, normalize: bool = True) -> Tensor:
    """Return how much better each sample is than the mean of its group; ``rewards [groups, samples]``.

    With ``normalize``, in units of the group's standard deviation. A group whose rewards are all equal teaches nothing:
    its advantages are 0.

    Source: Shao et al. 2024, section 4.1.2.
    """
    above = rewards - rewards.mean(1, keepdim=True)
    return above / (rewards.std(1, keepdim=True) + 1e-4) if normalize else above
