"""``cordillera generate``."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import echo, is_utf8, read_input, work_shown
from cordillera.errors import DataError
from cordillera.files import read_text
from cordillera.numbers import counted

if TYPE_CHECKING:
    from cordillera.serving.language.guided import Form
    from cordillera.serving.language.language_model import Completion

ModelName = Annotated[
    str, typer.Argument(help="A model's name (`smollm2`), the folder of a checkpoint or a run, or a GGUF file.")
]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token; higher is more random.")]
TopP = Annotated[float, typer.Option(help="Draw among the likeliest tokens of this probability.")]
TopK = Annotated[int, typer.Option(help="Draw among so many of the likeliest tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Least probability, as a share of the likeliest token's.")]
Penalty = Annotated[float, typer.Option(help="Above 1, tokens that are there already get less likely.")]
StopTexts = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]
WeightType = Annotated[str, typer.Option(help="Of weights: auto, bfloat16, float16, float32, int8 or int4.")]
ContextLength = Annotated[
    int | None, typer.Option(help="Longest text with its prompt, in tokens. Default: the model's context.")
]
DeviceName = Annotated[str, typer.Option(help="auto, cpu or cuda.")]

# A model's text must not control the terminal: all control characters except tab and line end are replaced.
_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)], "\ufffd")


# Its options are most of its lines.
def generate(
    model: ModelName,
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; - is standard input.")] = None,
    file: Annotated[list[Path] | None, typer.Option("--file", help="A file that is a prompt.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Every line of a file is a prompt of its own.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="For each prompt.")] = 256,
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    stop: StopTexts = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Answer as in a chat, or continue the text. Default: as trained."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions that the chat begins with.")] = None,
    dtype: WeightType = "auto",
    device: DeviceName = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer's name, such as bytes, or file. Default: the checkpoint's.")
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            help="What drafts tokens, several of which are checked in one pass: ngram (text that repeats itself), a "
            "file of a trained drafter, both joined by +, none, or auto: ngram and what ships for the model."
        ),
    ] = "auto",
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Feed-forward nets in FP8; emulated where the device has none.")
    ] = False,
    context: ContextLength = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File of a JSON schema; the text is a document of it.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this regular expression.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The text is this, or another --choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, max=20, help="With --json: how likely each token was, beside so many of the likeliest."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")] = False,
) -> None:
    """Let a language model answer prompts or continue them.

    The answer to a single prompt is printed as it comes, those to several in order.
    """
    if logprobs is not None and not as_json:
        raise DataError("are printed in JSON only", where="--logprobs", remedy="add --json")
    texts = _prompts(prompt or [], file or [], lines)
    form = _form(json_schema, regex, choice)
    from cordillera.serving.language.language_model import Completion, LanguageModel
    from cordillera.serving.language.sampler import make_sampling

    stop = stop_texts(stop)
    sampling = make_sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        seed=seed,
    )  # fmt: skip
    opened = LanguageModel(
        model, dtype=dtype, device=device, tokenizer=tokenizer, drafter=drafter, fp8=fp8, context=context
    )
    found = [Completion() for _ in texts]
    live = len(texts) == 1 and not as_json
    interrupted, began = False, time.perf_counter()
    try:
        pieces = opened.stream(
            texts, max_new_tokens=max_new_tokens, chat=chat, system=system, sampling=sampling, form=form,
            stop=stop, logprobs=logprobs,
        )  # fmt: skip
        what = "reading the model; its kernels are compiled when it is first used"
        with contextlib.nullcontext() if quiet else work_shown(what):
            opened.model  # noqa: B018 -- loads the weights before the timing
            opened.speculation  # noqa: B018 -- measures passes, if there is a drafter
            began = time.perf_counter()
            first = [*islice(pieces, 1)]
        for piece in chain(first, pieces):
            found[piece.sequence].add(piece)
            if live:
                write_text(piece.text)
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - began
    _finish(texts, found, as_json=as_json, quiet=quiet)
    cut = sum(one.finish == "length" for one in found)
    if not quiet:
        tokens = sum(one.tokens for one in found)
        rate = tokens / seconds if seconds else 0.0
        ended = "interrupted: " if interrupted else ""
        forwards = sum(one.forwards for one in found)
        drafted = f", {tokens / forwards:.2f} tokens a pass" if drafter != "none" and forwards else ""
        limit = f"; {counted(cut, 'text')} ended at the limit of {max_new_tokens:,}" if cut else ""
        typer.echo(
            f"{ended}{counted(tokens, 'token')} in {seconds:.2f} s, {rate:.1f} tokens/s{drafted}{limit}", err=True
        )
    if interrupted:
        raise typer.Exit(130)
    if cut and form is not None:
        raise DataError(
            f"{counted(cut, 'text')} ended at {counted(max_new_tokens, 'token')}, before the form did",
            where="--max-new-tokens",
            remedy="allow more tokens",
        )


def stop_texts(given: list[str] | None) -> list[str]:
    """Return the texts of ``--stop``; raise :class:`~cordillera.errors.DataError` if one is empty."""
    if given and "" in given:
        raise DataError("is empty", where="--stop", remedy="give the text at which to stop")
    return given or []


def _form(schema: Path | None, regex: str | None, choice: list[str] | None) -> Form | None:
    given = [
        name for name, one in (("--json-schema", schema), ("--regex", regex), ("--choice", choice)) if one is not None
    ]
    if not given:
        return None
    if len(given) > 1:
        raise DataError(f"{' and '.join(given)} are two forms", where="generate", remedy="give one")
    from cordillera.serving.language.guided import choice_form, json_form, regex_form

    if schema is not None:
        return json_form(read_text(schema), f"--json-schema {schema}")
    return regex_form(regex) if regex is not None else choice_form(choice or [])


def _prompts(given: Sequence[str], files: Sequence[Path], lines: bool) -> list[str]:
    if lines and not files and "-" not in given:
        raise DataError("there is no file whose lines it could take", where="--lines", remedy="give --file, or -")
    texts: list[str] = []
    for text in given:
        if text == "-":
            texts += _split(read_input(), "standard input", lines)
        elif not text.strip():
            raise DataError("is empty", where="prompt", remedy="give some text")
        else:
            texts.append(text)
    for path in files:
        texts += _split(read_text(path), str(path), lines)
    if not texts:
        raise DataError("there is no prompt", where="generate", remedy="give one in quotes, --file FILE, or -")
    return texts


def _split(content: str, where: str, lines: bool) -> list[str]:
    found = (
        [line.removesuffix("\r") for line in content.split("\n") if line.strip()]
        if lines
        else [content.removesuffix("\n")]
    )
    if not any(text.strip() for text in found):
        raise DataError("holds no prompt", where=where, remedy="write some text into it")
    return found


def write_text(text: str) -> None:
    """Write a model's ``text``, which must not control a terminal, at once."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _finish(texts: Sequence[str], found: Sequence[Completion], *, as_json: bool, quiet: bool) -> None:
    """Print completions that were not streamed, and end the line of those that were."""
    if as_json:
        for prompt, one in zip(texts, found, strict=True):
            entry = {"prompt": prompt, **asdict(one)}
            if not one.logprobs:
                del entry["logprobs"]
            echo(json.dumps(entry, ensure_ascii=not is_utf8()), json=True)
    elif len(texts) == 1:
        write_text("" if found[0].text.endswith("\n") else "\n")
    else:
        for number, one in enumerate(found, 1):
            if not quiet:
                write_text(f"[{number}] ")
            write_text(one.text.removesuffix("\n") + "\n")
