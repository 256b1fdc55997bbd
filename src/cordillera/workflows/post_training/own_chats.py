"""Chats of a model with itself: it writes a user's question, then the answer (Xu et al. 2024, Magpie).

A chat model was trained on what follows the opening of a user's turn. Asked to continue that opening, it draws
questions like those it was made for; no data of others is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cordillera.data.tokenizers.chat import ChatFormat, Control, Message, PromptPiece
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from cordillera.files import check_writable, parse_json
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.run import disk_errors
from cordillera.serving.language.engine import Engine
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.sampler import Sampling, make_sampling
from cordillera.workflows.post_training.answers import OnAnswer, growing
from cordillera.workflows.post_training.sampling import seed_of

_MARK = "\N{SYMBOL FOR RECORD SEPARATOR}"
_QUESTION_TOKENS = 256  # a question that is longer is dropped
_MOST_DROPPED = 256  # questions in a row that are empty or do not end
_LEAST = 0.02  # min_p of questions
_AHEAD = 2 * MOST_ROWS  # chats that are begun before earlier ones are written


class _OwnChat(NamedTuple):
    """A question and its answer; an empty question if the model did not end it in time."""

    question: str
    answer: str


@dataclass(frozen=True)
class WrittenChats:
    """Result of :func:`write_chats`.

    Attributes:
        file: File of the chats, one a line.
        chats: Number of chats.
        dropped: Number of questions that were empty, or longer than 256 tokens.
        tokens: Number of tokens of questions and answers that this call wrote.
    """

    file: Path
    chats: int
    dropped: int
    tokens: int


def write_chats(
    model: str | Path,
    file: Path | str,
    count: int,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.6,
    seed: int = 0,
    dtype: str = "bfloat16",
    on_answer: OnAnswer | None = None,
) -> WrittenChats:
    """Generate questions with a model, at temperature 1, and its answers to them; write the chats.

    A line has ``messages``, as fine-tuning and the training of drafters read it, and ``number``, that of the question.
    An existing file is continued after its last whole line. Chat ``number`` depends on the model, ``seed`` and
    the settings alone.

    Args:
        model: Model with a chat format, as in :class:`~cordillera.serving.language.language_model.LanguageModel`.
        file: File that is written, in JSON lines.
        count: Number of chats.
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Temperature of the answers; 0 takes the most likely tokens.
        seed: Seed of questions and answers.
        dtype: Data type of the model's weights.
        on_answer: Function called with the number of chats that are written and that of all.

    Raises:
        DataError: If settings are invalid, the model has no chat format, or the file holds something else.
        CheckpointError: If a checkpoint is missing or damaged.
        PlanError: If the file cannot be written, before the work.
        RunError: If that turns out later, as on a full disk.
        Interrupted: After Ctrl-C; whole lines stay, and the same call goes on.
    """
    if count < 1 or max_new_tokens < 1:
        raise DataError("needs at least 1 chat and 1 token", where="write_chats")
    make_sampling(temperature=temperature, seed=seed)
    path = Path(file)
    check_writable(path)  # fails before the model is read
    numbers = _written(path)
    opened = LanguageModel(model, dtype=dtype, drafter="none")
    writing = _Writing(opened, max_new_tokens, temperature, seed)
    first = numbers[-1] + 1 if numbers else 0
    chats, dropped = len(numbers), first - len(numbers)
    with growing(path) as out:
        following = enumerate(writing.chats(first), first)
        in_a_row = 0
        while chats < count:
            number, chat = next(following)
            if not chat.question:
                dropped, in_a_row = dropped + 1, in_a_row + 1
                if in_a_row == _MOST_DROPPED:
                    raise DataError(
                        f"asked itself no whole question {in_a_row} times in a row",
                        where=str(opened.path),
                        remedy=f"use a model that ends a user's turn within {_QUESTION_TOKENS} tokens",
                    )
                continue
            in_a_row = 0
            turns = [{"role": "user", "content": chat.question}, {"role": "assistant", "content": chat.answer}]
            out.write(json.dumps({"messages": turns, "number": number}, ensure_ascii=False) + "\n")
            out.flush()
            chats += 1
            if on_answer is not None:
                on_answer(chats, count)
    return WrittenChats(path, chats, dropped, writing.engine.counts.tokens)


def opening(chat_format: ChatFormat) -> list[PromptPiece]:
    """Return the pieces of a chat up to where a user's first message begins.

    Raises:
        DataError: If the format does not show the message as it is.
    """
    found: list[PromptPiece] = []
    for piece in chat_format.pieces([Message("user", _MARK)], answer=False):
        if isinstance(piece, Control) or _MARK not in piece:
            found.append(piece)
            continue
        before = piece[: piece.index(_MARK)]
        return [*found, before] if before else found
    raise DataError("does not show a user's message", where="chat format", remedy="use another model")


class _Writing:
    """Chats of a model with itself, many at a time."""

    def __init__(self, opened: LanguageModel, most: int, temperature: float, seed: int) -> None:
        self._tokenizer: Tokenizer = opened.tokenizer
        if self._tokenizer.chat_format is None:
            raise DataError("has no chat format", where=str(opened.path), remedy="use a model that chats")
        self._most, self._temperature, self._seed = most, temperature, seed
        self._opening = self._tokenizer.encode_pieces(opening(self._tokenizer.chat_format))
        capacity = 2 * _QUESTION_TOKENS + most
        self.engine = Engine(opened.model, texts=MOST_ROWS, capacity=capacity, vocabulary=self._tokenizer.vocab_size)

    def chats(self, first: int) -> Iterator[_OwnChat]:
        """Yield chats without end, in the order of their numbers from ``first`` on."""
        done: dict[int, _OwnChat] = {}
        asked, answered = dict[int, int](), dict[int, tuple[int, str]]()  # by request number
        tokens: dict[int, list[int]] = {}
        begun = following = first
        while True:
            while begun < following + _AHEAD and self.engine.waiting < MOST_ROWS:
                sampling = Sampling(temperature=1.0, top_p=1.0, min_p=_LEAST, seed=seed_of(self._seed, begun, 0))
                asked[self._add(self._opening, _QUESTION_TOKENS, sampling)] = begun
                begun += 1
            for one in self.engine.step():
                if one.error is not None:
                    raise one.error
                own = tokens.setdefault(one.sequence, [])
                own.append(one.token)
                if one.finish is None:
                    continue
                del tokens[one.sequence]
                text = self._tokenizer.decode(own, skip_special=True)
                if one.sequence in answered:
                    number, question = answered.pop(one.sequence)
                    done[number] = _OwnChat(question, text)
                    continue
                number = asked.pop(one.sequence)
                if one.finish != "stop" or not text.strip():
                    done[number] = _OwnChat("", "")
                    continue
                sampling = Sampling(temperature=self._temperature, top_p=1.0, seed=seed_of(self._seed, number, 1))
                prompt = self._tokenizer.encode_chat([Message("user", text)])
                answered[self._add(prompt, self._most, sampling)] = (number, text)
            while following in done:
                yield done.pop(following)
                following += 1

    def _add(self, prompt: list[int], most: int, sampling: Sampling) -> int:
        return self.engine.add(prompt, most, self._tokenizer.stop_ids, sampling)


def _written(path: Path) -> list[int]:
    """Return the numbers of the chats of a file that was begun; cut a last line that is not whole."""
    if not path.exists():
        return []
    with disk_errors(path):
        content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    numbers: list[int] = []
    for place, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
        try:
            row = parse_json(line, str(path))
            number, roles = int(row["number"]), [turn["role"] for turn in row["messages"]]
        except (DataError, ValueError, KeyError, TypeError) as error:
            raise _other(path, place) from error
        if roles != ["user", "assistant"] or number <= (numbers[-1] if numbers else -1):
            raise _other(path, place)
        numbers.append(number)
    if cut := content[whole:]:
        if not cut.startswith(b'{"messages"'[: len(cut)]):
            raise _other(path, len(numbers) + 1)
        with disk_errors(path), path.open("r+b") as file:
            file.truncate(whole)
    return numbers


def _other(path: Path, place: int) -> DataError:
    return DataError("is not a chat that a model had with itself", where=f"{path}:{place}", remedy="name another file")
