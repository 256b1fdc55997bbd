"""``cordillera chat``."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli.generate import (
    ContextLength,
    DeviceName,
    MinP,
    ModelName,
    Penalty,
    StopTexts,
    Temperature,
    TopK,
    TopP,
    WeightType,
    stop_texts,
    write_text,
)
from cordillera.errors import DataError, Terminated

if TYPE_CHECKING:
    from cordillera.data.tokenizers.chat import Message
    from cordillera.serving.language.language_model import TextPiece

_HELP = "Ctrl-C stops an answer, /new begins anew, Ctrl-D ends."


def chat(
    model: ModelName,
    system: Annotated[str | None, typer.Option(help="Instructions that the chat begins with.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="For each answer.")] = 1024,
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    stop: StopTexts = None,
    seed: Annotated[int, typer.Option(help="The same seed and messages give the same answers.")] = 0,
    dtype: WeightType = "auto",
    device: DeviceName = "auto",
    context: ContextLength = None,
) -> None:
    """Chat with a language model in the terminal.

    Each line is a message; what was said before is part of the next one. Ctrl-C stops an answer, /new begins anew,
    Ctrl-D ends. Without a terminal, the lines of standard input are the messages.
    """
    from cordillera.data.tokenizers.chat import Message
    from cordillera.serving.language.language_model import LanguageModel
    from cordillera.serving.language.sampler import make_sampling

    stop = stop_texts(stop)
    sampling = make_sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        seed=seed,
    )  # fmt: skip
    opened = LanguageModel(model, dtype=dtype, device=device, context=context)
    if opened.tokenizer.chat_format is None:
        raise DataError("has no chat format", where=model, remedy="continue text with `cordillera generate`")
    opened.encode(["Hello"], chat=True, system=system)  # says now what is wrong with the instructions
    opened.model  # noqa: B018 -- loads the weights before the first message
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        typer.echo(_HELP, err=True)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 -- lines can then be edited and called back
    messages: list[Message] = []
    while (line := _read(is_terminal)) is not None:
        if line == "/new":
            messages = []
            continue
        if re.fullmatch(r"/[a-z]+", line):
            typer.echo(f"{line} is no command; {_HELP}", err=True)
            continue
        asked = [*messages, Message("user", line)]
        try:
            pieces = opened.stream(
                [asked], chat=True, system=system, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop
            )
        except DataError as error:  # the chat fills the context
            typer.echo(f"error: {error}\n  -> /new begins anew", err=True)
            if not is_terminal:
                raise typer.Exit(2) from None
            continue
        messages = [*asked, Message("assistant", _answer(pieces))]


def _read(is_terminal: bool) -> str | None:
    """Return the next message that is not blank; None at the end."""
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except Terminated:
            raise
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                typer.echo("", err=True)
            return None
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise DataError(f"a line with 0x{byte:02x} is not UTF-8", where="standard input") from error
        if line:
            return line


def _answer(pieces: Iterable[TextPiece]) -> str:
    """Print an answer as it comes, and return it, or what came before Ctrl-C."""
    said = ""
    try:
        for piece in pieces:
            said += piece.text
            write_text(piece.text)
    except Terminated:
        raise
    except KeyboardInterrupt:
        pass
    write_text("" if said.endswith("\n") else "\n")
    return said
