"""Evaluation of any language model on files: text, chats, and questions with choices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import ndtri

from cordillera.data.language.chats.batches import LEARNS
from cordillera.data.language.chats.rows import HUGGING_FACE, read_chats
from cordillera.data.language.chats.sets import CHAT_SETS
from cordillera.data.language.chats.tokens import ANSWER, TokenisedChat, chat_tokenizer, tokenise_chat
from cordillera.data.language.data_folders import data_files
from cordillera.data.language.documents import FileRow, is_of_rows, read_documents, read_rows
from cordillera.data.tokenizers.tokenizer import Tokenizer, check_text
from cordillera.errors import DataError
from cordillera.intervals import wilson_interval
from cordillera.models.language.likelihood import token_log_probabilities
from cordillera.models.language.llama import Llama
from cordillera.serving.language.language_model import LanguageModel

Interval = tuple[float, float]
OnTokens = Callable[[int, int], object]

WINDOW = 4_096
"""Largest number of tokens of a text that the model sees together, if its context is longer."""

_BLOCK = 256  # consecutive tokens whose errors count as one sample, where documents are few
_DOCUMENTS = 30  # least number of documents to count each as one sample


@dataclass(frozen=True)
class TextEvaluation:
    """Quality of the predictions of the texts of a file; intervals are of 95 %.

    Attributes:
        loss: Mean negative log-likelihood, nats per token.
        perplexity: ``exp(loss)``.
        bits_per_byte: Negative log-likelihood in bits per byte of UTF-8, which compares models with different
            vocabularies.
        loss_interval: Interval of the loss; NaN if there is one sample only.
        perplexity_interval: Interval of the perplexity.
        bits_per_byte_interval: Interval of the bits per byte.
        documents: Number of texts.
        tokens: Number of tokens that were predicted.
        bytes: Number of bytes of these tokens, without the space that SentencePiece's kinds put before a text.
        window: Largest number of tokens that the model saw together.
        seconds: Wall time.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    loss_interval: Interval
    perplexity_interval: Interval
    bits_per_byte_interval: Interval
    documents: int
    tokens: int
    bytes: int
    window: int
    seconds: float


class ChatEvaluation(TextEvaluation):
    """Quality of the predictions of what the assistant says in the chats of a file, and of the tokens that end it.

    Fields are those of :class:`TextEvaluation`, with chats as documents; each is one sample of the intervals. Bits per
    byte leave the tokens out that end a turn, which have no bytes.
    """


@dataclass(frozen=True)
class ChoiceEvaluation:
    """How often a model holds the right one of several continuations to be the likeliest; intervals are of 95 %.

    Attributes:
        accuracy: Share of questions whose right choice has the highest probability.
        accuracy_per_byte: Share by the probability to the power of one over the choice's bytes, which does not favour
            short choices.
        accuracy_interval: Wilson's interval.
        accuracy_per_byte_interval: Wilson's interval.
        by_chance: Expected share of who guesses.
        questions: Number of questions.
        tokens: Number of tokens that were predicted.
        seconds: Wall time.
    """

    accuracy: float
    accuracy_per_byte: float
    accuracy_interval: Interval
    accuracy_per_byte_interval: Interval
    by_chance: float
    questions: int
    tokens: int
    seconds: float


class _TextPiece(NamedTuple):
    """Tokens that the model sees together, from the first on; those from number ``first`` on are scored."""

    owner: int
    tokens: list[int]
    first: int


class _Question(NamedTuple):
    prompt: str
    choices: list[str]
    answer: int


def evaluate_language_file(
    model: str | Path,
    file: str | Path,
    *,
    dtype: str = "float32",
    tokens: int | None = None,
    on_tokens: OnTokens | None = None,
) -> TextEvaluation | ChoiceEvaluation:
    """Evaluate a language ``model`` on the texts, or the questions, of files. Nothing is written.

    Args:
        model: Name of an asset, checkpoint, GGUF file or run.
        file: File, folder or pattern of plain text, JSON lines, Parquet or Arrow. Rows with ``choices`` are questions:
            a ``prompt``, two or more ``choices`` that could follow it, and ``answer``, the number of the right one from
            0 or its text. Other rows hold a ``text``.
        dtype: Data type of the weights, as for :class:`~cordillera.serving.language.language_model.LanguageModel`.
        tokens: Approximate largest number of tokens that are predicted. Default: all.
        on_tokens: Function that is called with the number of tokens read and of all.

    Raises:
        DataError: If the model or a file is not found, or a row is not as described; the error names it.
        CheckpointError: If the checkpoint is damaged.
    """
    began = time.perf_counter()
    opened = LanguageModel(model, dtype=dtype, drafter="none")
    paths = data_files(str(file))
    questions = _questions(paths)
    if questions:
        return _choices(opened, questions, tokens, on_tokens, began)
    return _texts(opened, [document.text for document in read_documents(paths)], tokens, on_tokens, began)


def holds_chats(file: str | Path) -> bool:
    """Return whether a file, or the first of several, holds chats: rows of messages, or of a prompt and its answer.

    Args:
        file: File, folder or pattern; names of built-in sets and ``datasets:NAME`` are chats.

    Raises:
        DataError: If there is no such file, or its first row cannot be read.
    """
    if str(file) in CHAT_SETS or str(file).startswith(HUGGING_FACE):
        return True
    paths = data_files(str(file))
    first = next(iter(read_rows(paths)), None) if is_of_rows(paths[0]) else None
    if first is None or "choices" in first.values:
        return False
    return first.values.get("text") is None and bool({"messages", "prompt"} & first.values.keys())


def evaluate_chat_file(
    model: str | Path,
    file: str | Path,
    *,
    dtype: str = "float32",
    tokens: int | None = None,
    on_tokens: OnTokens | None = None,
) -> ChatEvaluation:
    """Evaluate a language ``model`` on the assistant's turns of chats, in the model's chat format. Nothing is written.

    Args:
        model: Name of an asset, checkpoint, GGUF file or run.
        file: File, folder, pattern, built-in set or ``datasets:NAME``, as post-training reads them
            (:func:`~cordillera.data.language.chats.rows.read_chats`).
        dtype: Data type of the weights.
        tokens: Number of tokens of chats after which no further chat is read. Default: all.
        on_tokens: Function that is called with the number of tokens read and of all.

    Raises:
        DataError: If the model or a file is not found, or a row is no chat; the error names it.
        CheckpointError: If the checkpoint is damaged.
    """
    began = time.perf_counter()
    opened = LanguageModel(model, dtype=dtype, drafter="none")
    opened.limit(WINDOW)
    tokenizer, window = chat_tokenizer(opened.tokenizer), opened.config.context
    pieces: list[_TextPiece] = []
    chats: list[TokenisedChat] = []
    left = math.inf if tokens is None else tokens
    for row in read_chats(str(file)):
        if left <= 0:
            break
        chats.append(tokenise_chat(tokenizer, row.messages, where=row.where))
        pieces += _windows(len(chats) - 1, chats[-1].tokens.tolist(), window)
        left -= len(chats[-1].tokens)
    if not chats:
        raise DataError("holds no chat", where=str(file), remedy="give rows of messages, or of prompt and completion")
    scores: list[list[np.ndarray]] = [[] for _ in chats]
    for piece, found in _scored(opened.model, pieces, window, on_tokens):
        scores[piece.owner].append(found)
    lengths = np.array([len(content or b"") for content in tokenizer.token_bytes])
    parts = [(-np.concatenate(own), chat.tokens[1:], chat.kinds[1:]) for own, chat in zip(scores, chats, strict=True)]
    losses = np.array([values[np.isin(kinds, list(LEARNS))].sum() for values, _, kinds in parts])
    counts = np.array([np.isin(kinds, list(LEARNS)).sum() for _, _, kinds in parts])
    said = np.array([values[kinds == ANSWER].sum() for values, _, kinds in parts])  # without the tokens that end it
    sizes = np.array([lengths[tokens[kinds == ANSWER]].sum() for _, tokens, kinds in parts])
    loss, interval = _ratio(losses, counts)
    bits, bits_interval = _ratio(said / math.log(2), sizes)
    return ChatEvaluation(
        loss=loss,
        perplexity=_exp(loss),
        bits_per_byte=bits,
        loss_interval=interval,
        perplexity_interval=(_exp(interval[0]), _exp(interval[1])),
        bits_per_byte_interval=bits_interval,
        documents=len(chats),
        tokens=int(counts.sum()),
        bytes=int(sizes.sum()),
        window=window,
        seconds=time.perf_counter() - began,
    )


def _texts(
    opened: LanguageModel, texts: Sequence[str], most: int | None, on_tokens: OnTokens | None, began: float
) -> TextEvaluation:
    opened.limit(WINDOW)  # selects the positions for this length if a model has two sets
    tokenizer, window = opened.tokenizer, opened.config.context
    pieces: list[_TextPiece] = []
    left = math.inf if most is None else most
    lengths = np.array([len(content or b"") for content in tokenizer.token_bytes])
    spaces: list[int] = []  # bytes that SentencePiece's kinds put before a text, among the targets after a first token
    for number, ids in enumerate(tokenizer.encode_batch(texts, bos=tokenizer.adds_bos)):
        if left <= 0:
            break
        more = int(lengths[ids[1:]].sum()) - len(texts[number].encode()) if tokenizer.adds_bos else 0
        spaces.append(min(max(more, 0), int(tokenizer.prefix != "never")))
        pieces += _windows(number, ids[: int(min(len(ids), left + 1))], window)
        left -= len(ids) - 1
    if not any(len(piece.tokens) > piece.first for piece in pieces):
        raise DataError("holds no text of two tokens", where="file", remedy="give a longer text")
    samples: list[tuple[float, int, int]] = []  # loss, tokens and bytes
    owners: list[int] = []
    for piece, scores in _scored(opened.model, pieces, window, on_tokens):
        sizes = lengths[piece.tokens[piece.first :]]
        if not owners or owners[-1] != piece.owner:
            sizes[0] -= spaces[piece.owner]
        for start in range(0, len(scores), _BLOCK):
            part = scores[start : start + _BLOCK]
            samples.append((-float(part.sum()), len(part), int(sizes[start : start + _BLOCK].sum())))
            owners.append(piece.owner)
    losses, counts, sizes = map(np.array, zip(*samples, strict=True))
    if len(set(owners)) >= _DOCUMENTS:
        losses, counts, sizes = (np.bincount(owners, weights=values) for values in (losses, counts, sizes))
    loss, interval = _ratio(losses, counts)
    bits, bits_interval = _ratio(losses / math.log(2), sizes)
    return TextEvaluation(
        loss=loss,
        perplexity=_exp(loss),
        bits_per_byte=bits,
        loss_interval=interval,
        perplexity_interval=(_exp(interval[0]), _exp(interval[1])),
        bits_per_byte_interval=bits_interval,
        documents=len(set(owners)),
        tokens=int(counts.sum()),
        bytes=int(sizes.sum()),
        window=window,
        seconds=time.perf_counter() - began,
    )


def _windows(owner: int, ids: list[int], window: int) -> Iterator[_TextPiece]:
    """Yield overlapping windows of a text: every token is scored once, after half a window if there is as much."""
    if len(ids) < 2:
        return
    yield _TextPiece(owner, ids[:window], 1)
    step = max(1, window // 2)
    scored = min(len(ids), window)
    while scored < len(ids):
        end = min(len(ids), scored + step)
        begin = max(0, end - window)
        yield _TextPiece(owner, ids[begin:end], scored - begin)
        scored = end


def _scored(
    model: Llama, pieces: Sequence[_TextPiece], window: int, on_tokens: OnTokens | None
) -> Iterator[tuple[_TextPiece, np.ndarray]]:
    """Yield each piece with the logarithms of the probabilities of its scored tokens, ``float64``; rows are packed.

    Raises:
        DataError: If one is not a number.
    """
    device = model.embedding.weight.device
    done, total, start = 0, sum(len(piece.tokens) for piece in pieces), 0
    while start < len(pieces):
        end, size = start, 0
        while end < len(pieces) and (end == start or size + len(pieces[end].tokens) <= window):
            size += len(pieces[end].tokens)
            end += 1
        row = pieces[start:end]
        offsets = np.cumsum([0, *(len(piece.tokens) for piece in row)])
        tokens = torch.tensor([token for piece in row for token in piece.tokens], device=device)
        with torch.no_grad():
            found = token_log_probabilities(model, tokens, torch.from_numpy(offsets).to(device)).double().cpu().numpy()
        if not np.isfinite(found).all():
            raise DataError("the model gives probabilities that are no numbers", where="model", remedy="use float32")
        for piece, begin in zip(row, offsets, strict=False):
            yield piece, found[begin + piece.first : begin + len(piece.tokens)]
        done, start = done + size, end
        if on_tokens is not None:
            on_tokens(done, total)


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, Interval]:
    """Return a ratio of sums over samples, and its normal interval (Cochran 1977, section 6.4)."""
    ratio = numerators.sum() / denominators.sum()
    count = len(numerators)
    if count < 2:
        return float(ratio), (math.nan, math.nan)
    residuals = numerators - ratio * denominators
    deviation = math.sqrt((residuals**2).sum() * count / (count - 1)) / denominators.sum()
    half = float(ndtri(0.975)) * deviation
    return float(ratio), (float(ratio - half), float(ratio + half))


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)


def _questions(paths: Sequence[Path]) -> list[_Question]:
    """Return the questions of files; none if the first row of the first file holds no choices.

    Raises:
        DataError: If a row is no question.
    """
    if not is_of_rows(paths[0]):
        return []
    found: list[_Question] = []
    for row in read_rows(paths):
        if not found and "choices" not in row.values:
            return []
        found.append(_question(row))
    return found


def _question(row: FileRow) -> _Question:
    def refuse(what: str) -> DataError:
        remedy = (
            "a question has prompt, two or more choices, and answer: the number of the right one from 0, or its text"
        )
        return DataError(what, where=row.where, remedy=remedy)

    prompt, choices, answer = (row.values.get(name) for name in ("prompt", "choices", "answer"))
    if not isinstance(prompt, str) or not prompt:
        raise refuse("prompt is no text")
    if isinstance(choices, np.ndarray):
        choices = choices.tolist()
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
        raise refuse("choices are not two or more texts")
    for text in (prompt, *choices):
        check_text(text, row.where)
    if len(set(choices)) < len(choices):
        raise refuse("two choices are the same")
    place: Any = answer
    if isinstance(answer, str):
        if answer not in choices:
            raise refuse(f"answer is {answer!r}, which is not one of the choices")
        place = choices.index(answer)
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < len(choices):
        raise refuse(f"answer is {answer!r}, and the choices are numbered from 0 to {len(choices) - 1}")
    return _Question(prompt, choices, place)


def _choices(
    opened: LanguageModel,
    questions: Sequence[_Question],
    most: int | None,
    on_tokens: OnTokens | None,
    began: float,
) -> ChoiceEvaluation:
    pieces: list[_TextPiece] = []
    asked: list[_Question] = []
    for question in questions:
        if most is not None and sum(len(piece.tokens) - piece.first for piece in pieces) >= most:
            break
        pieces += _continued(opened.tokenizer, question, len(asked), opened.config.context)
        asked.append(question)
    if max(len(piece.tokens) for piece in pieces) <= WINDOW:  # otherwise all texts use the positions for long texts
        opened.limit(WINDOW)
    sums: list[list[float]] = [[] for _ in asked]
    predicted = 0
    for piece, scores in _scored(opened.model, pieces, min(opened.config.context, WINDOW), on_tokens):
        sums[piece.owner].append(float(scores.sum()))
        predicted += len(scores)
    right = right_per_byte = 0
    for question, found in zip(asked, sums, strict=True):
        sizes = np.array([len(choice.encode()) for choice in question.choices])
        right += int(np.argmax(found) == question.answer)
        right_per_byte += int(np.argmax(found / sizes) == question.answer)
    count = len(asked)
    return ChoiceEvaluation(
        accuracy=right / count,
        accuracy_per_byte=right_per_byte / count,
        accuracy_interval=wilson_interval(right / count, count),
        accuracy_per_byte_interval=wilson_interval(right_per_byte / count, count),
        by_chance=float(np.mean([1 / len(question.choices) for question in asked])),
        questions=count,
        tokens=predicted,
        seconds=time.perf_counter() - began,
    )


def _continued(tokenizer: Tokenizer, question: _Question, owner: int, context: int) -> Iterator[_TextPiece]:
    """Yield a question followed by each choice, tokenised together; only the tokens after the prompt are scored.

    Space at the end of the prompt belongs to the choice, whose first word may be one token with it. Without any, a
    space is put between.
    """
    prompt = question.prompt.rstrip()
    space = question.prompt[len(prompt) :]
    first = len(tokenizer.encode(prompt, bos=tokenizer.adds_bos))
    for choice in question.choices:
        between = space or ("" if choice[0].isspace() else " ")
        ids = tokenizer.encode(prompt + between + choice, bos=tokenizer.adds_bos)
        begin = max(1, min(first, len(ids) - 1))
        lost = max(0, len(ids) - context)  # the beginning of the prompt
        if begin - lost < 1:
            raise DataError(f"question {owner + 1} has a choice longer than the context", where="file")
        yield _TextPiece(owner, ids[lost:], begin - lost)
