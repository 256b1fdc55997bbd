"""Training on problems whose answers can be verified: groups of samples of the present weights.

Source: Shao et al. 2024 (GRPO), section 4.1, with outcome rewards: 1 for a right answer, 0 for any other.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cordillera.data.language.batches import PackedTokens, TextIteration
from cordillera.data.language.chats.rows import ChatProblem
from cordillera.data.language.chats.verify import is_right
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.distributed.vocabulary_loss import IGNORED
from cordillera.errors import DataError, Interrupted
from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.repeatable import in_order
from cordillera.models.language.llama import Llama
from cordillera.serving.language.engine import TOGETHER
from cordillera.serving.language.generation import for_decoding
from cordillera.serving.language.sampler import Sampling
from cordillera.training.language.engine import LanguageEngine
from cordillera.training.language.objectives import GroupsConfig, group_advantages
from cordillera.training.language.trainer import LanguageEvaluation, LanguageTrainer, LanguageTrainingConfig
from cordillera.workflows.post_training.sampling import SampledAnswer, copy_of, sample_answers, seed_of


class GroupBatches:
    """Iterations of groups of samples, each drawn from the weights of its moment; endless.

    What a step draws depends on the seed, the number of the step and the weights alone.

    Args:
        engine: Engine whose weights answer.
        problems: Problems, which are gone through in a new order each time.
        most: Largest number of tokens of a microbatch, if a single sample is not longer.
        reference: Returns the model that training began with, if the divergence from it counts; called once, by the
            first iteration.
    """

    def __init__(
        self,
        config: GroupsConfig,
        engine: LanguageEngine,
        problems: Sequence[ChatProblem],
        tokenizer: Tokenizer,
        *,
        most: int,
        seed: int,
        reference: Callable[[], Llama] | None = None,
    ) -> None:
        if not problems:
            raise DataError("there is no problem to learn from", where="data")
        for problem in problems:
            tokens, context = len(tokenizer.encode_chat(problem.prompt)), engine.model.context
            if tokens >= context:
                raise DataError(
                    f"has {tokens:,} tokens, which leave no room for an answer in a context of {context:,}",
                    where=problem.where,
                    remedy="shorten or drop such prompts",
                )
        self.config, self.engine, self.problems, self.tokenizer = config, engine, problems, tokenizer
        self.most, self.seed = most, seed
        self._number = 0
        self._reference = None if reference is None else cache(reference)

    def __iter__(self) -> GroupBatches:
        return self

    def __next__(self) -> TextIteration:
        """Sample answers to the next problems and weigh them against each other."""
        chosen = self._chosen()
        prompts = [self.tokenizer.encode_chat(problem.prompt) for problem in chosen for _ in range(self.config.samples)]
        samplings = [
            Sampling(temperature=1.0, top_p=1.0, seed=seed_of(self.seed, self._number, place))
            for place in range(len(prompts))
        ]
        model = for_decoding(copy_of(self.engine.stages[0]), as_trained=True)
        with in_order():
            answers = sample_answers(model, self.tokenizer, prompts, self.config.max_new_tokens, samplings)
        expected = [problem.answer for problem in chosen for _ in range(self.config.samples)]
        right = [one.is_whole and is_right(one.text, answer) for one, answer in zip(answers, expected, strict=True)]
        rewards = torch.tensor(right, dtype=torch.float64)
        advantages = group_advantages(rewards.view(-1, self.config.samples), self.config.normalize).flatten()
        self._number += 1
        return self._packed(prompts, answers, rewards, advantages)

    def _chosen(self) -> list[ChatProblem]:
        count, orders = len(self.problems), {}
        places = range(self._number * self.config.problems, (self._number + 1) * self.config.problems)
        for turn in range(places[0] // count, places[-1] // count + 1):
            orders[turn] = random.Random(f"{self.seed} {turn}").sample(self.problems, count)
        return [orders[place // count][place % count] for place in places]

    def _packed(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[SampledAnswer], rewards: Tensor, advantages: Tensor
    ) -> TextIteration:
        parts: list[list[int]] = []
        room = 0
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            length = len(prompt) + len(answer.tokens)
            if not parts or length > room:
                parts.append([])
                room = self.most
            parts[-1].append(place)
            room -= length
        microbatches = [
            self._microbatch(
                [prompts[place] for place in part], [answers[place] for place in part], rewards[part], advantages[part]
            )
            for part in parts
        ]
        lengths = [one.offsets.diff().tolist() for one in microbatches]
        return TextIteration(self._number - 1, microbatches, lengths, imbalance=1.0, delay=0.0)

    def _microbatch(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[SampledAnswer], rewards: Tensor, advantages: Tensor
    ) -> PackedTokens:
        tokens: list[int] = []
        labels: list[int] = []
        sampled: list[float] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            before = len(prompt) - 1
            tokens += [*prompt, *answer.tokens]
            labels += [IGNORED] * before + answer.tokens + [IGNORED]
            sampled += [0.0] * before + answer.log_probabilities + [0.0]
        lengths = torch.tensor([len(prompt) + len(one.tokens) for prompt, one in zip(prompts, answers, strict=True)])
        packed = PackedTokens(torch.tensor(tokens), offsets_from_lengths(lengths), torch.tensor(labels))
        were = torch.tensor(sampled, dtype=torch.float32)
        reference = were
        if self._reference is not None:
            reference = _log_probabilities(self._reference(), packed, self.tokenizer.vocab_size)
        return packed._replace(
            documents={
                "advantage": advantages.float(),
                "reward": rewards.float(),
                "sampled": were,
                "reference": reference,
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, fit for JSON."""
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            DataError: If the position is damaged.
        """
        if not isinstance(state.get("number"), int):
            raise DataError("the saved position is damaged", where="state of the problems")
        self._number = state["number"]


@torch.no_grad()
def _log_probabilities(model: Llama, packed: PackedTokens, vocabulary: int) -> Tensor:
    """Return the log-probability of each label among the first ids of the ``vocabulary``, of which samples are."""
    assert packed.labels is not None
    rows = model(packed.tokens, packed.offsets)[:, :vocabulary].float().log_softmax(-1)
    found = rows.gather(1, packed.labels.clamp(min=0)[:, None]).squeeze(1)
    return found.masked_fill(packed.labels == IGNORED, 0.0)


class GroupTrainer(LanguageTrainer):
    """Trainer whose evaluation answers held-out problems, each by its most likely tokens.

    Args:
        batches: Groups of samples.
        problems: Held-out problems; none for no evaluation.
    """

    def __init__(
        self,
        config: LanguageTrainingConfig,
        engine: LanguageEngine,
        batches: GroupBatches,
        *,
        problems: Sequence[ChatProblem],
        **common: Any,
    ) -> None:
        super().__init__(config, engine, batches, reads_ahead=False, **common)
        self.problems, self._groups = problems, batches

    def _step(self, iteration: TextIteration) -> None:
        with in_order():  # a token's probability has the bits with which it was drawn
            super()._step(iteration)

    @property
    def can_evaluate(self) -> bool:
        """Whether there are held-out problems."""
        return bool(self.problems)

    def evaluate(self) -> LanguageEvaluation:
        """Return the share of held-out problems that are not solved as the loss; ``solved`` is among the measures.

        Raises:
            Interrupted: If it was asked to stop.
        """
        began = time.perf_counter()
        groups = self._groups
        prompts = [groups.tokenizer.encode_chat(problem.prompt) for problem in self.problems]
        model = copy_of(self.engine.stages[0])
        answers: list[SampledAnswer] = []
        for first in range(0, len(prompts), TOGETHER):
            where = f"evaluation after step {self.progress.step}"
            self._at(where)
            if answers and self._is_asked():
                what = f"{len(answers):,} of {len(prompts):,} held-out problems were answered"
                raise Interrupted(what, where=where)
            part = prompts[first : first + TOGETHER]
            greedy = [Sampling(temperature=0.0)] * len(part)
            answers += sample_answers(model, groups.tokenizer, part, groups.config.max_new_tokens, greedy)
        asked = zip(answers, self.problems, strict=True)
        right = sum(one.is_whole and is_right(one.text, problem.answer) for one, problem in asked)
        solved = right / len(prompts)
        seconds = time.perf_counter() - began
        return LanguageEvaluation(1 - solved, math.nan, math.nan, len(prompts), seconds, {"solved": solved})
