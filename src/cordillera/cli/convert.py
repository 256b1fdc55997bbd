"""``cordillera convert`` and ``cordillera export-adapter``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, to_type
from cordillera.errors import CordilleraError, Interrupted

_LAYOUTS = {"hugging-face": "Hugging Face", "meta": "Meta", "gguf": "GGUF"}
_OPTIONS = {
    "delete this one": "; --overwrite replaces a whole checkpoint",
    "choose another layout": ", or leave the tokenizer out with --tokenizer none",
}
"""What options of ``convert`` add to remedies, by how these end."""


def convert(
    source: Annotated[
        str, typer.Argument(help="A model's name (`smollm2`), a checkpoint in any layout, or the folder of a run.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write, or the file for GGUF.")],
    to: Annotated[
        str | None,
        typer.Option(help="hugging-face, meta or gguf. Default: gguf if TARGET ends in .gguf, else hugging-face."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="bfloat16, float16 or float32. Default: as stored, or float32 if that is in codes."),
    ] = "auto",
    quantize: Annotated[str | None, typer.Option(help="Codes of a GGUF file: q8_0, q5_1, q5_0, q4_1 or q4_0.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of files of Meta's layout.")] = 1,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer's name or file; none: weights alone. Default: the source's.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Write a language model in another layout, with its tokenizer and chat template.

    Transformers, llama.cpp and this library can chat with what is written.
    """
    from cordillera.cli._show import answering_progress
    from cordillera.workflows.checkpoints.conversion import convert as work

    with CommandOutput(as_json) as answer:
        try:
            with answering_progress(answer.notes, quiet=quiet, what="converting") as on_tensor:
                found = work(
                    source,
                    target,
                    to,
                    dtype=dtype,
                    quantize=quantize,
                    ranks=ranks,
                    tokenizer=tokenizer,
                    overwrite=overwrite,
                    on_tensor=on_tensor,
                )
        except KeyboardInterrupt:
            raise Interrupted("nothing was written", where=str(target), remedy="give the same command again") from None
        except CordilleraError as error:
            more = next((option for end, option in _OPTIONS.items() if (error.remedy or "").endswith(end)), "")
            if not more or (overwrite and "--overwrite" in more):
                raise
            raise type(error)(error.what, where=error.where, remedy=f"{error.remedy}{more}") from error
        answer.keep(**asdict(found))
        if quiet:
            return
        answer.say(f"{source} ({found.source}) -> {target} ({_LAYOUTS[found.layout]}, {found.weights})")
        changed = "every weight as it was" if not found.error else f"relative error of weights {found.error:.2g} (RMS)"
        answer.say(f"  {found.parameters:,} parameters in {found.bytes / 1e6:,.1f} MB, {changed}")
        if found.tokens is None:
            answer.say("  no tokenizer")
        else:
            ends = f"ends at {', '.join(found.stops)}" if found.stops else "no token that ends a text"
            answer.say(f"  {found.tokens:,} tokens, {'' if found.chats else 'no '}chat template, {ends}")
            if not found.same_chats:
                answer.say("  chats have other tokens than with the source: its format tokenises parts of them apart")
            answer.say(f"  -> {to_type('generate', target, 'What is a mountain range?')}")


def export_adapter(
    run: Annotated[str, typer.Argument(help="A run whose recipe has [model.adapter], or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    base: Annotated[
        str | None,
        typer.Option(help="The model without adapters, as peft is to find it. Default: the recipe's training.start."),
    ] = None,
) -> None:
    """Write the adapters of a run alone, in the layout of `peft`.

    `convert` writes the merged model.
    """
    from cordillera.cli._show import echo
    from cordillera.workflows.post_training import adapters

    found = adapters.export_adapter(run, out, base)
    echo(f"adapters: {out}, of the model {found}")
    if not (Path(found).expanduser() / "config.json").is_file() and base is None:
        echo("  peft loads models in Hugging Face's layout only, by --base NAME; the one here is written so by:")
        echo(f"  -> {to_type('convert', found, 'base')}")
