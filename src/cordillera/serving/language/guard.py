"""A language model as a guard: whether the last turn of a conversation is safe, and the categories if it is not.

Source: Inan et al. 2023 (Llama Guard), section 2; Grattafiori et al. 2024, section 5.4.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cordillera.data.language.guard.examples import GUARD_CATEGORIES
from cordillera.data.language.guard.prompts import Categories, guard_prompt
from cordillera.data.tokenizers.chat import Message
from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.run import Run
from cordillera.serving.language.engine import check_prompt
from cordillera.serving.language.generation import generate
from cordillera.serving.language.language_model import LanguageModel, run_of
from cordillera.serving.language.sampler import Sampling

SAFE, UNSAFE = "safe", "unsafe"
"""Words of the first line of an answer."""

_ANSWER = 32  # tokens of an answer, enough for several codes
_TOGETHER = 16  # conversations that are judged together


@dataclass(frozen=True)
class GuardVerdict:
    """Verdict of a guard on a turn.

    Attributes:
        is_safe: Whether the turn is safe.
        categories: Codes of the categories that an unsafe turn belongs to, each once; may be empty.
        is_valid: Whether the model's answer has the form that it was asked for.
        score: Probability of ``unsafe`` among the two words; None for a verdict that was read from text.
    """

    is_safe: bool
    categories: tuple[str, ...] = ()
    is_valid: bool = True
    score: float | None = None


def parse_verdict(text: str, categories: Categories | None = None) -> GuardVerdict:
    """Read an answer: ``safe``, or ``unsafe`` and on a second line codes with commas between them.

    Spaces around words, capital and small letters, and empty lines at the end make no difference. All else makes the
    verdict not valid: an answer whose first line is neither word counts as unsafe; codes that are not in the list are
    dropped; so is what follows ``safe``, or the second line.

    Args:
        text: Answer of a model.
        categories: Categories that the model was asked about. Default: the categories of Llama Guard 3.
    """
    known = (categories or Categories()).names
    lines = _lines(text)
    if _is(text, SAFE):
        return GuardVerdict(True, is_valid=len(lines) == 1)
    if not _is(text, UNSAFE):
        return GuardVerdict(False, is_valid=False)
    codes = [code.strip().upper() for code in lines[1].split(",")] if len(lines) > 1 else []
    found = dict.fromkeys(code for code in codes if code in known)
    return GuardVerdict(False, (*found,), len(lines) == 2 and all(code in known for code in codes))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()] or [""]


def _is(text: str, word: str) -> bool:
    return _lines(text)[0].lower() == word


class Guard:
    """A language model that judges the last turn of conversations.

    Args:
        name: Model, as in :class:`~cordillera.serving.language.language_model.LanguageModel`.
        threshold: Least score, in [0, 1], at which a turn is unsafe.
        categories: Categories that count; one that is left out is switched off, as far as the model has learnt to heed
            the list. Default: those of the set ``guard`` for a run that was trained on it, otherwise Llama Guard 3's.
        dtype: Data type of weights and activations.

    Raises:
        DataError: If the threshold is out of range, or the model or its tokenizer is not found.
        CheckpointError: If the checkpoint is missing or damaged.
    """

    def __init__(
        self,
        name: str | Path,
        threshold: float = 0.5,
        categories: Categories | None = None,
        dtype: str = "float32",
    ) -> None:
        if not 0 <= threshold <= 1:
            raise DataError(f"{threshold} is not a probability", where="threshold", remedy="choose one from 0 to 1")
        self.threshold = threshold
        self._opened = LanguageModel(name, dtype=dtype, drafter="none")
        self.categories = categories or _learnt_categories(run_of(name, self._opened.path))

    def check(self, conversations: Sequence[Sequence[Message]]) -> list[GuardVerdict]:
        """Return a verdict on the last turn of each conversation, the user's or the assistant's.

        A turn is unsafe if its score is at least the threshold, or the answer that the model writes is neither word.

        Raises:
            DataError: If a conversation is empty or invalid, or longer than the context; logits are not finite.
        """
        prompts = []
        for place, conversation in enumerate(conversations):
            try:
                prompts.append(guard_prompt(conversation, self.categories))
            except DataError as error:
                where = f"conversation {place}, {error.where}"
                raise DataError(error.what, where=where, remedy=error.remedy) from error
        tokens, opening = self._opened.encode(prompts), self._answer(f"{UNSAFE}\n")
        try:
            for place, one in enumerate(tokens):
                check_prompt(self._opened.config, [*one, *opening], _ANSWER, f"conversation {place}")
        except DataError as error:
            question = guard_prompt([Message("user", "a")], self.categories)
            own = len(self._opened.encode([question])[0]) - 1 + len(opening)
            what = f"{error.what}; the guard's question and the beginning of its answer take {own:,} of them"
            is_full = own >= self._opened.config.context
            remedy = "use a model with a longer context" if is_full else error.remedy
            raise DataError(what, where=error.where, remedy=remedy) from error
        found: list[GuardVerdict] = []
        for first in range(0, len(tokens), _TOGETHER):
            found += self._check(tokens[first : first + _TOGETHER])
        return found

    def _check(self, prompts: Sequence[list[int]]) -> list[GuardVerdict]:
        scores, texts = self._scores(prompts), self._answers(prompts)
        doubted = [place for place, text in enumerate(texts) if _is(text, SAFE) and not scores[place] < self.threshold]
        opening = self._answer(f"{UNSAFE}\n")
        codes = self._answers([[*prompts[place], *opening] for place in doubted])
        for place, text in zip(doubted, codes, strict=True):
            texts[place] = f"{UNSAFE}\n{text}"
        return [self._verdict(text, score) for text, score in zip(texts, scores, strict=True)]

    def _verdict(self, text: str, score: float) -> GuardVerdict:
        said = parse_verdict(text, self.categories)
        if _is(text, UNSAFE) and score < self.threshold:
            said = GuardVerdict(True, is_valid=said.is_valid)
        return replace(said, score=score)

    def _answers(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        tokenizer = self._opened.tokenizer
        tokens: list[list[int]] = [[] for _ in prompts]
        for one in generate(
            self._opened.model, prompts, _ANSWER, tokenizer.stop_ids, Sampling(temperature=0), tokenizer.vocab_size
        ):
            tokens[one.sequence].append(one.token)
        return [tokenizer.decode(own, skip_special=True) for own in tokens]

    def _answer(self, text: str) -> list[int]:
        """Tokens of the beginning of an answer."""
        chat = self._opened.tokenizer.chat_format
        before = [] if chat is None else chat.pieces([Message("user", "a")])
        return self._opened.tokenizer.encode_pieces([text], after=before)

    def _scores(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Probability of ``unsafe`` after each prompt, among both words."""
        safe, unsafe = (self._log_probabilities(prompts, word) for word in (SAFE, UNSAFE))
        return (unsafe - safe).sigmoid().tolist()

    def _log_probabilities(self, prompts: Sequence[Sequence[int]], word: str) -> Tensor:
        """Log-probability of a word after each prompt, in 64 bits."""
        tokenizer, model, device = self._opened.tokenizer, self._opened.model, self._opened.device
        ids = self._answer(word)
        tokens = torch.tensor([token for prompt in prompts for token in (*prompt, *ids)], device=device)
        offsets = offsets_from_lengths(torch.tensor([len(prompt) + len(ids) for prompt in prompts]))
        before = offsets[1:, None] - len(ids) - 1 + torch.arange(len(ids))  # places of the tokens before the word's
        with torch.inference_mode():
            hidden = model.hidden(tokens, offsets)[before.flatten().to(device)]
            logits = model.logits(hidden)[:, : tokenizer.vocab_size].double()
        if not bool(logits.isfinite().all()):
            raise DataError("logits are not finite", where="guard", remedy="train it again with a lower rate")
        chances = logits.log_softmax(-1).view(len(prompts), len(ids), -1)
        return chances[:, range(len(ids)), ids].sum(1).cpu()


def _learnt_categories(run: Run | None) -> Categories:
    label = None if run is None else run.read_json("model.json").get("data", {}).get("label")
    return GUARD_CATEGORIES if label == "guard" else Categories()
