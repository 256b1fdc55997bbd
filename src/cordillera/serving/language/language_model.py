"""A language model with its tokenizer: text in, text out."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch

from cordillera.data.assets import ASSETS, stored_asset
from cordillera.data.language.chats.tokens import chat_tokenizer
from cordillera.data.tokenizers.chat import Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.tokenizer import StreamDecoder, Tokenizer, check_text
from cordillera.errors import CheckpointError, DataError, DependencyError
from cordillera.kernels.dense.packed_rows import is_fast
from cordillera.models.language.checkpoints import open_checkpoint, read_model
from cordillera.models.language.checkpoints.drafter_file import DrafterFile, drafter_of, is_for, read_drafter
from cordillera.models.language.checkpoints.first_sight import compare_with_first_sight, record_of
from cordillera.models.language.llama import Llama
from cordillera.numerics.quantization.fp8_rows import multiplies_fp8
from cordillera.run import Run
from cordillera.serving.language.draft_models import ModelDrafts
from cordillera.serving.language.engine import Finish
from cordillera.serving.language.generation import StopStrings, check_prompts, for_decoding, fp8_feed_forward, generate
from cordillera.serving.language.guided import Form, Guide, Guides
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import (
    Drafter,
    DraftLevels,
    NGramDrafter,
    Speculation,
    measure_costs,
)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""Data types of computation, by the names of those of weights in memory."""

_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was, before temperature, penalties and forms.

    Attributes:
        token: Text of the token; bytes that are no character are U+FFFD.
        id: Its id.
        logprob: Natural logarithm of its probability.
        top: Text, id and ``logprob`` of each of the most likely tokens in its place.
    """

    token: str
    id: int
    logprob: float
    top: list[tuple[str, int, float]]


class TextPiece(NamedTuple):
    """Text that one more token adds to a prompt; empty if a token ends inside a character or is special.

    Attributes:
        finish: Reason why the sequence ends here: ``stop`` (the model ended it) or ``length``; None while it continues.
        forward: Number of the model's pass that decided on the token, from 0.
        logprob: How likely the token was, if that was asked for.
    """

    sequence: int
    text: str
    finish: Finish | None
    forward: int
    logprob: TokenLogprob | None = None


@dataclass
class Completion:
    """Text that continues a prompt, with the number of its tokens, including the one that ended it.

    Attributes:
        finish: ``stop``, ``length``, or None if generation was interrupted.
        forwards: Number of passes of the model that it took; fewer than tokens if drafts were right.
        logprobs: How likely each token was; empty unless that was asked for.
    """

    text: str = ""
    tokens: int = 0
    finish: Finish | None = None
    forwards: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, piece: TextPiece) -> None:
        """Append a piece of this prompt's text."""
        self.text += piece.text
        self.tokens += 1
        self.finish = piece.finish
        self.forwards = piece.forward + 1
        if piece.logprob is not None:
            self.logprobs.append(piece.logprob)


class LanguageModel:
    """A checkpoint and its tokenizer.

    Opening reads names and shapes; weights are read when they are first needed.

    Args:
        name: Name of an asset (``smollm2``), folder of a checkpoint, GGUF file, or folder of a run or of one of its
            checkpoints.
        dtype: Data type of weights and activations: ``bfloat16``, ``float16`` or ``float32``; ``int8`` or ``int4`` for
            bfloat16 with matrices in codes, on a CPU, as
            :func:`~cordillera.models.language.checkpoints.read_model` says. A GGUF file's own codes are kept, so that
            texts are those of ``bfloat16``. ``auto`` is ``int8`` where that changes no text and is faster, else
            ``bfloat16``.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        tokenizer: Name, file or folder; None for the tokenizer of the checkpoint, or of the run's text.
        drafter: What drafts tokens that the model then checks several at a time: ``ngram`` (text that repeats itself),
            the name or file of a drafter that was trained for the model, both joined by ``+``, ``none``, or ``auto``:
            ``ngram`` and, if the package has one for the model, a trained drafter. Texts are the same with and without.
        fp8: Whether feed-forward nets are computed in FP8, as
            :func:`~cordillera.serving.language.generation.fp8_feed_forward` says; texts change. Devices without FP8
            emulate it, which a warning says.
        context: Length of the longest text with its prompt, in tokens, at most that of the model; None for that. A
            model with two sets of positions, such as Phi-3.5, takes the one for short texts up to its original context.

    Raises:
        DataError: If an asset was not fetched, a name is unknown, there is no tokenizer or one with more tokens than
            the model, codes are asked for on a GPU or with ``fp8``, or the ``context`` is above the model's.
        CheckpointError: If there is no checkpoint of a Llama, or it is damaged.
        DependencyError: If the device or a library is not available.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        tokenizer: str | Path | None = None,
        drafter: str = "auto",
        fp8: bool = False,
        context: int | None = None,
    ) -> None:
        if dtype not in ("auto", *DTYPES):
            remedy = f"choose auto, {', '.join(DTYPES)}"
            raise DataError(f"unknown dtype {dtype!r}", where="dtype", remedy=remedy)
        self._fp8 = fp8
        self._drafters = None if drafter == "auto" else find_drafters(drafter)
        self.device, self.path = _device(device), find_model(name)
        self._source = open_checkpoint(self.path)
        packs = self.device.type == "cpu" and not fp8
        if dtype == "auto":
            dtype = "int8" if packs and self._source.has_codes and is_fast() else "bfloat16"
        self.dtype, self._bits = DTYPES[dtype], _BITS.get(dtype)
        if self._bits is not None and not packs:
            raise DataError(f"{dtype} is for CPUs, without fp8", where="dtype", remedy="choose bfloat16")
        if context is not None:
            most = self._source.config.context
            if not 2 <= context <= most:
                raise DataError(f"is {context:,} tokens", where="context", remedy=f"choose 2 to {most:,}")
            self.limit(context)
        self.config = self._source.config
        if self.config.scores:
            raise DataError(
                "is a reward model, which gives scores and no text", where=str(name), remedy="use it with `best-of`"
            )
        self.tokenizer = find_tokenizer(name, self.path, self.config.vocabulary, tokenizer)

    def limit(self, context: int) -> None:
        """Limit texts, including prompts, to ``context`` tokens; call this before weights are read."""
        shorter = {"context": min(context, self._source.config.context)}
        self.config = self._source.config = self._source.config.model_copy(update=shorter)

    @cached_property
    def model(self) -> Llama:
        """The model; its weights are read at the first use.

        Raises:
            CheckpointError: If weights are NaN or infinite, or the files have changed since they were first read.
        """
        files = self._source.files
        with ThreadPoolExecutor(1, "first sight") as pool:  # reads the files while the model reads them too
            compared = pool.submit(compare_with_first_sight, files, record_of(files)) if files else None
            model = for_decoding(read_model(self._source, self.dtype, self.device, bits=self._bits).eval())
            if compared is not None:
                compared.result()
        if self._fp8:
            if not multiplies_fp8(self.device):
                warnings.warn(
                    f"FP8 is emulated on {self.device.type}: as exact, and slower than bfloat16", stacklevel=2
                )
            fp8_feed_forward(model)
        return model

    @cached_property
    def speculation(self) -> Speculation | None:
        """The drafter with the times of passes, which are measured at the first use; None without a drafter.

        Raises:
            CheckpointError: If a drafter's file is damaged, or of another model.
        """
        drafters = drafters_for(self.model) if self._drafters is None else self._drafters
        return make_speculation(self.model, drafters) if drafters else None

    @cached_property
    def guides(self) -> Guides:
        """What makes the guides of forms for this tokenizer."""
        return Guides(self.tokenizer)

    def encode(
        self, prompts: Sequence[str | Sequence[Message]], *, chat: bool | None = None, system: str | None = None
    ) -> list[list[int]]:
        """Return the token ids of prompts, in the form that the model expects.

        Args:
            prompts: Texts, or the messages of chats that the model goes on with.
            chat: Whether each prompt is a user's message in a chat that the model answers; False for text that it
                continues. Default: True if the tokenizer has a chat format.
            system: Instructions to the model at the beginning of a chat.

        Raises:
            DataError: If a prompt is empty or not text, there is no chat format, or ``system`` is given without a chat.
        """
        for number, prompt in enumerate(prompts, 1):
            where = "prompt" if len(prompts) == 1 else f"prompt {number}"
            for text in [prompt] if isinstance(prompt, str) else [message.content for message in prompt]:
                check_text(text, where)  # check before a template adds text
            if not prompt:
                raise DataError("is empty", where=where, remedy="give some text")
        if system is not None:
            check_text(system, "system")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not self._answers(prompts, chat):
            if system is not None:
                raise DataError(
                    "plain text has no system turn", where="system", remedy="put it before the prompt, or use a chat"
                )
            return self.tokenizer.encode_batch(texts, bos=self.tokenizer.adds_bos)
        before = [] if system is None else [Message("system", system)]
        chats = [[Message("user", prompt)] if isinstance(prompt, str) else prompt for prompt in prompts]
        return [self.tokenizer.encode_chat([*before, *messages]) for messages in chats]

    def _answers(self, prompts: Sequence[str | Sequence[Message]], chat: bool | None) -> bool:
        """Whether prompts are chats, which the model answers."""
        if chat is None:
            chat = self.tokenizer.chat_format is not None
        return chat or not all(isinstance(prompt, str) for prompt in prompts)

    def stream(
        self,
        prompts: str | Sequence[str | Sequence[Message]],
        *,
        max_new_tokens: int = 256,
        chat: bool | None = None,
        system: str | None = None,
        sampling: Sampling | None = None,
        form: Form | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Iterator[TextPiece]:
        """Continue or answer prompts, all together, and yield the text as it is generated.

        Args:
            prompts: Texts, or the messages of chats that the model goes on with; one string is one prompt.
            max_new_tokens: Number of tokens for each prompt; fewer if the context ends.
            chat: Whether prompts are messages of a chat, as in :meth:`encode`.
            system: Instructions to the model, as in :meth:`encode`.
            sampling: Settings of sampling; None for the defaults of
                :class:`~cordillera.serving.language.sampler.Sampling`.
            form: Form that every text keeps to, such as :func:`~cordillera.serving.language.guided.json_form`; None for
                any. A text that ``max_new_tokens`` ends early is its beginning.
            stop: Strings before which a text ends.
            logprobs: Number of most likely tokens whose log probabilities each piece holds, beside those of its own
                tokens; None for no log probabilities.

        Returns:
            One piece per token; each pass yields at least one for every unfinished prompt. Errors of the prompts are
            raised at the call, before weights are read.

        Raises:
            DataError: If prompts are invalid, as in :meth:`encode`, or do not fit the context; the form is invalid;
                during generation, if logits are not finite.
            CheckpointError: If weights are invalid, as in :attr:`model`.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        ids = self.encode(prompts, chat=chat, system=system)
        check_prompts(self.config, ids, max_new_tokens)
        guide = None if form is None else partial(self.guides.start, form)
        if guide is not None:
            guide()  # reports errors of the form before generation
        begins = form is None and self._answers(prompts, chat)
        decoders = [StreamDecoder(self.tokenizer, begins=begins) for _ in ids]
        return self._stream(ids, decoders, max_new_tokens, sampling, guide, stop, logprobs)

    def _stream(
        self,
        ids: list[list[int]],
        decoders: list[StreamDecoder],
        max_new_tokens: int,
        sampling: Sampling | None,
        guide: Callable[[], Guide] | None,
        stop: Sequence[str],
        logprobs: int | None,
    ) -> Iterator[TextPiece]:
        stopping = [StopStrings(stop) for _ in ids]
        ends, count, over = self.tokenizer.stop_ids, self.tokenizer.vocab_size, set[int]()
        tokens = generate(
            self.model, ids, max_new_tokens, ends, sampling, count, self.speculation, guide, over, logprobs
        )
        for one in tokens:
            decoder, stops = decoders[one.sequence], stopping[one.sequence]
            text = decoder.push(one.token)
            text, found = stops.push(text + decoder.finish() if one.finish else text, last=one.finish is not None)
            if found:
                over.add(one.sequence)
            logprob = None
            if one.chance is not None:
                top = [(self._name(token), token, value) for token, value in one.chance.top]
                logprob = TokenLogprob(self._name(one.token), one.token, one.chance.logprob, top)
            yield TextPiece(one.sequence, text, "stop" if found else one.finish, one.forward, logprob)

    def _name(self, token: int) -> str:
        if (content := self.tokenizer.token_bytes[token]) is not None:
            return content.decode("utf-8", "replace")
        return next((name for name, own in self.tokenizer.special_tokens.items() if own == token), "")

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Message]],
        *,
        max_new_tokens: int = 256,
        chat: bool | None = None,
        system: str | None = None,
        sampling: Sampling | None = None,
        form: Form | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
    ) -> list[Completion]:
        """Continue or answer prompts to the end, and return one completion per prompt, in their order.

        Arguments ``prompts``, ``max_new_tokens``, ``chat``, ``system``, ``sampling``, ``form``, ``stop`` and
        ``logprobs``, and errors, are those of :meth:`stream`.
        """
        found = [Completion() for _ in ([prompts] if isinstance(prompts, str) else prompts)]
        for piece in self.stream(
            prompts, max_new_tokens=max_new_tokens, chat=chat, system=system, sampling=sampling, form=form, stop=stop,
            logprobs=logprobs,
        ):  # fmt: skip
            found[piece.sequence].add(piece)
        return found


def load_language_model(
    name: str | Path,
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
    tokenizer: str | Path | None = None,
    drafter: str = "auto",
    fp8: bool = False,
    context: int | None = None,
) -> LanguageModel:
    """Open a checkpoint with its tokenizer and read its weights.

    Args:
        name: Asset, checkpoint, GGUF file or run, as in :class:`LanguageModel`.
        dtype: Data type of weights and activations, as in :class:`LanguageModel`.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        tokenizer: Name, file or folder; None for the tokenizer of the checkpoint, or of the run's text.
        drafter: What drafts tokens, as in :class:`LanguageModel`.
        fp8: Whether feed-forward nets are computed in FP8, as in :class:`LanguageModel`.
        context: Length of the longest text with its prompt, as in :class:`LanguageModel`.

    Raises:
        DataError: If the model or its tokenizer is not found, as in :class:`LanguageModel`.
        CheckpointError: If the checkpoint is damaged or missing, or weights are NaN or infinite.
        DependencyError: If the device or a library is not available.
    """
    opened = LanguageModel(
        name, dtype=dtype, device=device, tokenizer=tokenizer, drafter=drafter, fp8=fp8, context=context
    )
    opened.speculation  # noqa: B018 -- measures, if there is a drafter
    opened.model  # noqa: B018 -- reads the weights
    return opened


def find_model(name: str | Path) -> Path:
    """Return the path of the asset ``name``, or of the newest checkpoint of a run; other paths are returned unchanged.

    ``./smollm2`` is a folder with the name of an asset.

    Raises:
        DataError: If an asset was not fetched or is no model, or there is neither such a name nor such a path.
        CheckpointError: If a run has no checkpoint.
    """
    models = [known for known, asset in ASSETS.items() if asset.kind == "model"]
    if name in models:
        return stored_asset(str(name))
    path = Path(name).expanduser()
    if _is_run(path):
        found = sorted(Run(path).checkpoints.glob("step-*"))
        if not found:
            raise CheckpointError("holds no checkpoint yet", where=str(path), remedy="train first")
        return found[-1]
    if os.path.exists(path):
        return path
    if name in ASSETS:
        raise DataError(f"is a {ASSETS[str(name)].kind}, not a model", where=str(name), remedy=f"use {models[0]}")
    close = difflib.get_close_matches(str(name), models, n=1)
    raise DataError(
        f"is no file, no folder and no model's name (known: {', '.join(models)})",
        where=str(name),
        remedy=f"train it first, or did you mean {close[0]}?"
        if close
        else "name a checkpoint's path or a run's folder",
    )


def _is_run(path: Path) -> bool:
    return os.path.isfile(path / "recipe.toml")  # False, without an error, for names that are too long


def find_tokenizer(name: str | Path, path: Path, vocabulary: int, tokenizer: str | Path | None = None) -> Tokenizer:
    """Return the tokenizer of a model's ``name`` and ``path``; one that was trained on chats here has a chat format.

    Args:
        vocabulary: Number of tokens of the model.
        tokenizer: Name, file or folder; None for the tokenizer of the checkpoint, or of the run's text.

    Raises:
        DataError: If there is no tokenizer, or it has more tokens than the model.
    """
    found = load_tokenizer(tokenizer_of(name, path) if tokenizer is None else tokenizer)
    run = run_of(name, path)
    if run is not None and "objective" in run.read_json("model.json"):
        found = chat_tokenizer(found)
    if found.vocab_size > vocabulary:
        raise DataError(
            f"has {found.vocab_size:,} tokens, the model has {vocabulary:,}",
            where=str(found.path),
            remedy="use the tokenizer that belongs to the model",
        )
    return found


def tokenizer_of(name: str | Path, path: Path) -> str | Path:
    """Return the tokenizer of a model's ``name`` and ``path``; that of a run's checkpoint is named.

    Raises:
        DataError: If a run does not name its tokenizer.
    """
    run = run_of(name, path)
    if run is None:
        return path
    try:
        return str(run.read_json("model.json")["data"]["tokenizer"]["name"])
    except (KeyError, TypeError) as error:
        remedy = "name one with --tokenizer"
        raise DataError("names no tokenizer", where=str(run.folder / "model.json"), remedy=remedy) from error


def run_of(name: str | Path, path: Path) -> Run | None:
    """Return the run that a model's ``name`` and ``path`` are of, if they are of one."""
    folder, parent = Path(name).expanduser(), path.resolve().parent
    if path == folder and parent.name == "checkpoints":
        folder = parent.parent
    return Run(folder) if _is_run(folder) else None


def shipped_drafters() -> dict[str, Path]:
    """Return the files of the drafters in the package, by name."""
    folder = Path(str(resources.files("cordillera"))) / "drafters"
    return {path.stem: path for path in sorted(folder.glob("*.safetensors"))}


def find_drafters(names: str) -> list[DrafterFile | None]:
    """Return the drafters of ``names``: the content of a file, or None for ``ngram``.

    Args:
        names: Names or files, joined by ``+``, or one file whose path may hold it.

    Raises:
        DataError: If a name is neither a drafter nor a file, or two of one kind are joined.
        CheckpointError: If a file is damaged.
    """
    if names == "none":
        return []
    shipped, found = shipped_drafters(), list[DrafterFile | None]()
    for name in [names] if Path(names).expanduser().is_file() else names.split("+"):
        path = shipped.get(name, Path(name).expanduser())
        if name == "ngram":
            found.append(None)
        elif path.is_file():
            found.append(read_drafter(path))
        else:
            remedy = f"choose auto, none, ngram, {', '.join(shipped)}, or a file of `cordillera export-drafter`"
            raise DataError(f"unknown drafter {name!r}", where="drafter", remedy=remedy)
    if len({one is None for one in found}) < len(found):
        raise DataError(f"{names!r} joins drafters of one kind", where="drafter", remedy="join ngram and one other")
    return found


def drafters_for(model: Llama) -> list[DrafterFile | None]:
    """Return ``ngram`` and, if the package has one that was trained for the model, that drafter."""
    shipped = (read_drafter(path) for path in shipped_drafters().values())
    return [None, *(file for file in shipped if is_for(file, model))][:2]


def make_speculation(
    model: Llama, drafters: Sequence[DrafterFile | None], costs: Sequence[float] | None = None
) -> Speculation:
    """Return how a model drafts by ``drafters`` of :func:`find_drafters`.

    Args:
        model: Model that decodes.
        drafters: At least one drafter.
        costs: Times of its passes; None to measure them.

    Raises:
        CheckpointError: If a drafter's file is damaged, or of another model.
    """
    makers, taps = list[Callable[[], Drafter]](), tuple[int, ...]()
    for found in drafters:
        if found is None:
            makers.insert(0, NGramDrafter)
            continue
        drafts = ModelDrafts(drafter_of(found, model), model)
        makers.append(drafts.start)
        taps = drafts.taps
    costs = measure_costs(model) if costs is None else costs
    return Speculation(makers, costs, taps, DraftLevels(len(makers), costs))


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise DataError(f"unknown device {name!r}", where="device", remedy="choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise DependencyError("no CUDA device is usable here", where="device", remedy="use device auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
