"""Answers of language models, weighed by a reward model: the best of several, and one model beside another.

Source: Grattafiori et al. 2024, section 4.2.2, for rejection sampling.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cordillera.data.language.chats.rows import read_prompts
from cordillera.data.tokenizers.chat import Message
from cordillera.errors import DataError, Interrupted
from cordillera.files import check_writable, parse_json
from cordillera.intervals import wilson_interval
from cordillera.run import disk_errors
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.reward_model import RewardModel
from cordillera.serving.language.sampler import make_sampling
from cordillera.workflows.post_training.sampling import sample_answers

_TOGETHER = 16  # answers that are written at a time

Prompt = tuple[Message, ...]
OnAnswer = Callable[[int, int], object]


def expected_best(rewards: Sequence[float], count: int) -> float:
    """Return the expected largest of ``count`` rewards that are drawn from ``rewards`` without replacement.

    Raises:
        DataError: If ``count`` is not from 1 to the number of rewards.
    """
    if not 1 <= count <= len(rewards):
        raise DataError(f"{count} cannot be drawn from {len(rewards)} rewards", where="count")
    ways = math.comb(len(rewards), count)
    return math.fsum(
        math.comb(below, count - 1) / ways * reward
        for below, reward in enumerate(sorted(rewards))
        if below >= count - 1
    )


def best_of_divergence(count: int) -> float:
    """Return the largest Kullback-Leibler divergence, in nats, of the best of ``count`` samples from a single one.

    Source: Beirami et al. 2024, theorem 1: ``log n - (n - 1) / n`` is an upper bound.
    """
    return math.log(count) - (count - 1) / count


@dataclass(frozen=True)
class BestOf:
    """Result of :func:`best_of`.

    Attributes:
        file: File of the best answers, one chat a line.
        prompts: Number of prompts.
        samples: Number of answers to each.
        rewards: Expected reward of the best of 1, 2, 4 and so on, in the mean of the prompts, by that number.
    """

    file: Path
    prompts: int
    samples: int
    rewards: dict[int, float]


def best_of(
    model: str | Path,
    reward: str | Path,
    prompts: str | Sequence[str],
    file: Path | str,
    *,
    samples: int = 10,
    most: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    dtype: str = "bfloat16",
    on_answer: OnAnswer | None = None,
) -> BestOf:
    """Sample answers to prompts and write the one with the highest reward to each, with the lowest beside it.

    A line has ``messages`` (prompt and best answer, for fine-tuning), ``prompt``, ``chosen`` and ``rejected`` (best and
    worst, for preferences) and ``rewards``. Blank answers, from which nothing can be learnt, are passed over where
    there are others. A file that exists is gone on with, after its last whole line; prompts whose answers are all equal
    are written without ``rejected``.

    Args:
        model: Model that answers, as in :class:`~cordillera.serving.language.language_model.LanguageModel`.
        reward: Run of a reward model.
        prompts: File, folder, pattern or built-in set; rows have ``prompt`` or ``messages``.
        file: File that is written, in JSON lines.
        samples: Number of answers to each prompt; the paper takes 10 to 30.
        most: Largest number of prompts; None for all.
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Temperature of the samples, above 0.
        seed: Seed of the samples.
        dtype: Data type of the answering model's weights.
        on_answer: Function called with the number of prompts that are done and that of all.

    Raises:
        DataError: If prompts or settings are invalid, or the file belongs to other prompts or samples.
        CheckpointError: If a checkpoint is missing or damaged.
        PlanError: If the file cannot be written, before the work.
        RunError: If that turns out later, as on a full disk.
        Interrupted: After Ctrl-C; whole lines stay, and the same call goes on.
    """
    if samples < 2 or temperature <= 0:
        raise DataError("needs at least 2 samples and a temperature above 0", where="best_of")
    asked = _asked(prompts, most)
    path = Path(file)
    check_writable(path)  # fails before the models are read
    done = _done(path, asked, samples)
    opened, judge = _Answering(model, dtype), RewardModel(reward)
    sampling = {"temperature": temperature, "top_p": 1.0}
    with growing(path) as out:
        for number in range(len(done), len(asked)):
            seeds = [seed + number * samples + place for place in range(samples)]
            texts = opened.answer([asked[number]] * samples, max_new_tokens, seeds, sampling)
            rewards = judge.score([(*asked[number], Message("assistant", text)) for text in texts])
            row = _row(asked[number], texts, rewards)
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()
            done.append(row)
            if on_answer is not None:
                on_answer(len(done), len(asked))
    counts = [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]
    means = {count: math.fsum(expected_best(row["rewards"], count) for row in done) / len(done) for count in counts}
    return BestOf(path, len(done), samples, means)


@contextlib.contextmanager
def growing(path: Path) -> Iterator[TextIO]:
    """Open a file of JSON lines for appending; the same call continues it after an interrupt or an error.

    Raises:
        RunError: If the file cannot be written.
        Interrupted: After Ctrl-C.
    """
    try:
        with disk_errors(path, "mend that, then give the same command again to go on"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as out:
                yield out
    except KeyboardInterrupt:
        remedy = "give the same command again to go on"
        raise Interrupted("what was written stays", where=str(path), remedy=remedy) from None


def _asked(prompts: str | Sequence[str], most: int | None) -> list[Prompt]:
    """Return the prompts to answer, at least one."""
    found = read_prompts(prompts)
    if most is not None:
        found = found[: max(most, 0)]
    if not found:
        raise DataError("there is no prompt to answer", where="prompts")
    return found


def _row(prompt: Prompt, texts: Sequence[str], rewards: Sequence[float]) -> dict[str, Any]:
    turns = _turns(prompt)
    told = [place for place, text in enumerate(texts) if text.strip()] or range(len(texts))
    ordered = sorted(told, key=lambda place: rewards[place])
    best, worst = texts[ordered[-1]], texts[ordered[0]]
    row: dict[str, Any] = {"messages": [*turns, {"role": "assistant", "content": best}], "rewards": list(rewards)}
    if best != worst:
        row |= {"prompt": turns, "chosen": best, "rejected": worst}
    return row


def _done(path: Path, asked: Sequence[Prompt], samples: int) -> list[dict[str, Any]]:
    """Return the rows of a file that was begun; cut a last line that is not whole."""
    if not path.exists():
        return []
    with disk_errors(path):
        content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(content[:whole].split(b"\n")[:-1]):
        try:
            row = parse_json(line, str(path))
            prompt = [(turn["role"], turn["content"]) for turn in row["messages"][:-1]]
            rewards = [float(value) for value in row["rewards"]]
        except (DataError, ValueError, KeyError, TypeError) as error:
            raise _other(path, number) from error
        if number >= len(asked) or prompt != [(turn.role, turn.content) for turn in asked[number]]:
            raise _other(path, number)
        if len(rewards) != samples:
            raise DataError(
                f"has the rewards of {len(rewards)} answers, not of {samples}",
                where=f"{path}:{number + 1}",
                remedy="name another file, or sample as many",
            )
        rows.append(row)
    if cut := content[whole:]:
        begins = b"" if len(rows) == len(asked) else _begin(asked[len(rows)])
        if not begins or cut[: len(begins)] != begins[: len(cut)]:
            raise _other(path, len(rows))
        with disk_errors(path), path.open("r+b") as file:
            file.truncate(whole)
    return rows


def _begin(prompt: Prompt) -> bytes:
    """Return the bytes with which the line of a prompt begins."""
    return json.dumps({"messages": _turns(prompt)}, ensure_ascii=False).encode()[: -len("]}")]


def _turns(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in prompt]


def _other(path: Path, number: int) -> DataError:
    return DataError(
        "is not a row of best answers to these prompts", where=f"{path}:{number + 1}", remedy="name another file"
    )


class _Answering:
    """A model that answers chats."""

    def __init__(self, name: str | Path, dtype: str) -> None:
        self._opened = LanguageModel(name, dtype=dtype, drafter="none")

    def answer(self, prompts: Sequence[Prompt], most: int, seeds: Sequence[int], sampling: dict[str, Any]) -> list[str]:
        """Return the text that answers each prompt."""
        tokenizer = self._opened.tokenizer
        tokens = [tokenizer.encode_chat(prompt) for prompt in prompts]
        samplings = [make_sampling(**sampling, seed=seed) for seed in seeds]
        return [one.text for one in sample_answers(self._opened.model, tokenizer, tokens, most, samplings)]


@dataclass(frozen=True)
class Judgement:
    """Result of :func:`judge`.

    Attributes:
        wins: Number of prompts to which the first model's answer has the higher reward.
        ties: Number of prompts to which both answers have the same reward.
        prompts: Number of prompts.
        rate: Share of wins, ties counted as half.
        interval: 95 % interval of the rate (Wilson).
        rewards: Mean rewards of the first and of the second model.
    """

    wins: int
    ties: int
    prompts: int
    rate: float
    interval: tuple[float, float]
    rewards: tuple[float, float]


def judge(
    first: str | Path,
    second: str | Path,
    reward: str | Path,
    prompts: str | Sequence[str],
    *,
    most: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str = "bfloat16",
    on_answer: OnAnswer | None = None,
) -> Judgement:
    """Compare two models by the rewards of their answers to the same prompts.

    Both models draw with the same seeds. See :func:`best_of` for ``reward``, ``prompts``, ``most``, ``max_new_tokens``,
    ``seed``, ``dtype`` and ``on_answer``.

    Args:
        first: Model whose share of wins is returned.
        second: Model that it is compared with.
        temperature: Temperature of the answers; 0 takes the most likely tokens.

    Raises:
        DataError: If prompts or settings are invalid.
        CheckpointError: If a checkpoint is missing or damaged.
    """
    asked = _asked(prompts, most)
    models, judging = [_Answering(name, dtype) for name in (first, second)], RewardModel(reward)
    sampling = {"temperature": temperature, "top_p": 1.0}
    rewards: list[tuple[float, float]] = []
    for numbers in _parts(len(asked)):
        part, seeds = [asked[number] for number in numbers], [seed + number for number in numbers]
        own, other = (
            judging.score(
                [
                    (*prompt, Message("assistant", text))
                    for prompt, text in zip(part, model.answer(part, max_new_tokens, seeds, sampling), strict=True)
                ]
            )
            for model in models
        )
        rewards += zip(own, other, strict=True)
        if on_answer is not None:
            on_answer(len(rewards), len(asked))
    wins, ties = sum(own > other for own, other in rewards), sum(own == other for own, other in rewards)
    count = len(rewards)
    rate = (wins + ties / 2) / count
    means = tuple(math.fsum(column) / count for column in zip(*rewards, strict=True))
    return Judgement(wins, ties, count, rate, wilson_interval(rate, count), (means[0], means[1]))


def _parts(count: int) -> Iterator[range]:
    return (range(first, min(first + _TOGETHER, count)) for first in range(0, count, _TOGETHER))
