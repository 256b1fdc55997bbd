"""Conversion of language models between the layouts in which they are published."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cordillera.data.tokenizers.chat import Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from cordillera.models.language.checkpoints import (
    Source,
    open_checkpoint,
    read_model,
    save_consolidated,
    save_gguf,
    save_hugging_face,
)
from cordillera.models.language.checkpoints.gguf_file import QUANTISED_FILES, GGUFFile
from cordillera.models.language.checkpoints.weights import OnTensor, WeightStream
from cordillera.serving.language.language_model import find_model, find_tokenizer

CheckpointLayout = Literal["hugging-face", "meta", "gguf"]
LAYOUTS: tuple[CheckpointLayout, ...] = ("hugging-face", "meta", "gguf")
"""Layouts that are written."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Dtypes in which weights are written, by name."""


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` has written.

    Attributes:
        path: Folder or file.
        layout: Its layout.
        source: Layout and kind of the weights that were read, such as ``GGUF, Q4_1``.
        weights: Kind of the weights that were written, such as ``float32`` or ``q8_0``.
        parameters: Number of parameters.
        bytes: Size of all that was written, in bytes.
        error: Root mean square of what casting or quantisation changed, relative to that of the weights; 0 if every
            weight is what it was.
        tokens: Number of tokens of the tokenizer; None without one.
        stops: Tokens that end a text or a turn.
        chats: Whether there is a chat template.
        same_chats: Whether a chat has the tokens that it has by the source's own format.
    """

    path: Path
    layout: CheckpointLayout
    source: str
    weights: str
    parameters: int
    bytes: int
    error: float
    tokens: int | None
    stops: tuple[str, ...]
    chats: bool
    same_chats: bool


def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    ranks: int = 1,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    on_tensor: OnTensor | None = None,
) -> Conversion:
    """Write a language model, with its tokenizer, in another layout.

    The target is complete or absent, whatever ends the conversion. Adapters are merged and a drafter is left out.

    Args:
        source: Name of an asset, a checkpoint in any layout, or a run.
        target: Folder, or file for GGUF, that is made.
        to: Layout: ``hugging-face``, ``meta`` or ``gguf``. Default: ``gguf`` for a target that ends in ``.gguf``, else
            ``hugging-face``.
        dtype: ``bfloat16``, ``float16`` or ``float32``; ``auto`` is that of the stored weights, and float32 for codes.
        quantize: Kind of codes of a GGUF file: ``q4_0``, ``q4_1``, ``q5_0``, ``q5_1`` or ``q8_0``. Default: none.
        ranks: Number of files of Meta's layout.
        tokenizer: Name, file or folder; ``none`` to write weights alone. Default: that of the source.
        overwrite: Whether a checkpoint that is there is replaced.
        on_tensor: Function that is called with the number of values that are written and of all.

    Raises:
        DataError: If the source is not found, the tokenizer is missing or cannot be described in the layout, or
            arguments do not go together.
        CheckpointError: If the source is damaged or not a Llama, weights are not finite, or the target is there or
            cannot be written.
        DependencyError: If the library ``gguf`` is needed and not installed.
    """
    target = Path(target).expanduser()
    layout = _layout(target, to)
    _check(dtype, quantize, ranks, layout)
    path = find_model(source)
    opened = open_checkpoint(path)
    if opened.config.scores:
        raise DataError("is a reward model, which no layout of a Llama has a place for", where=str(source))
    kept = _tokenizer(source, opened, tokenizer)
    if isinstance(opened, GGUFFile) and layout == "gguf" and quantize is None and dtype == "auto":
        raise DataError(f"is {_kind(opened)} already", where=str(source), remedy="give --quantize or --dtype")
    kind = DTYPES.get(dtype) or opened.dtype or torch.float32
    if kind == torch.float64:
        kind = torch.float32
    if opened.config.adapter is None:
        stream = WeightStream.of_source(opened, torch.float32 if quantize else kind, on_tensor, ranks)
    else:
        stream = WeightStream.of_model(read_model(opened, kind))
    if layout == "gguf":
        save_gguf(stream, target, quantize, tokenizer=kept, name=path.stem, overwrite=overwrite)
    elif layout == "meta":
        save_consolidated(stream, target, ranks, tokenizer=kept, overwrite=overwrite)
    else:
        save_hugging_face(stream, target, tokenizer=kept, overwrite=overwrite)
    files = [target] if target.is_file() else list(target.iterdir())
    names = {} if kept is None else {token: name for name, token in kept.special_tokens.items()}
    return Conversion(
        path=target,
        layout=layout,
        source=_kind(opened),
        weights=quantize or str(kind).removeprefix("torch."),
        parameters=sum(map(math.prod, stream.shapes.values())),
        bytes=sum(file.stat().st_size for file in files),
        error=stream.error,
        tokens=None if kept is None else kept.vocab_size,
        stops=() if kept is None else tuple(names.get(token, str(token)) for token in kept.stop_ids),
        chats=kept is not None and kept.chat_format is not None,
        same_chats=kept is None or _keeps_chats(kept, target),
    )


def _layout(target: Path, to: str | None) -> CheckpointLayout:
    is_file = target.suffix == ".gguf"
    if to is None:
        return "gguf" if is_file else "hugging-face"
    if to not in LAYOUTS:
        raise DataError(f"unknown layout {to!r}", where="to", remedy=f"choose {', '.join(LAYOUTS)}")
    if (to == "gguf") != is_file:
        remedy = "end its name in .gguf" if to == "gguf" else "name a folder, or give --to gguf"
        raise DataError(f"is no name for {to}", where=str(target), remedy=remedy)
    return to


def _check(dtype: str, quantize: str | None, ranks: int, layout: CheckpointLayout) -> None:
    if dtype not in ("auto", *DTYPES):
        raise DataError(f"unknown dtype {dtype!r}", where="dtype", remedy=f"choose auto, {', '.join(DTYPES)}")
    if quantize is not None and layout != "gguf":
        raise DataError("is for GGUF alone", where="quantize", remedy="end the target's name in .gguf, or give --dtype")
    if quantize is not None and quantize not in QUANTISED_FILES:
        remedy = f"choose {', '.join(QUANTISED_FILES)}"
        raise DataError(f"{quantize!r} cannot be written", where="quantize", remedy=remedy)
    if quantize is not None and dtype != "auto":
        raise DataError(f"does not go with --dtype {dtype}", where="quantize", remedy="leave one of them out")
    if ranks != 1 and layout != "meta":
        raise DataError("is for Meta's layout alone", where="ranks", remedy="give --to meta and the name of a folder")


def _tokenizer(source: str | Path, opened: Source, name: str | Path | None) -> Tokenizer | None:
    """Return the tokenizer to write; None for none."""
    if name == "none":
        return None
    try:
        return find_tokenizer(source, opened.path, opened.config.vocabulary, name)
    except DataError as error:
        remedy = f"{error.remedy or 'see whether it is damaged'}; or give --tokenizer NAME, or none for weights alone"
        raise DataError(error.what, where=error.where, remedy=remedy) from error


def _keeps_chats(tokenizer: Tokenizer, target: Path) -> bool:
    """Return whether the written tokenizer gives a chat the same tokens as ``tokenizer``."""
    chat = [Message("user", "Hello, 12 friends!"), Message("assistant", "Hi."), Message("user", "And you?")]
    written = load_tokenizer(target)
    return tokenizer.chat_format is None or (
        written.chat_format is not None and written.encode_chat(chat) == tokenizer.encode_chat(chat)
    )


def _kind(source: Source) -> str:
    kind = str(source.dtype).removeprefix("torch.")
    if isinstance(source, GGUFFile):
        kind = " and ".join(name for name, _ in source.kinds.most_common())
    return f"{source.layout}, {kind}"
