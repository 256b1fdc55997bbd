"""``cordillera write-chats`` and ``cordillera export-drafter``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import Quiet


def write_chats(
    model: Annotated[str, typer.Argument(help="The model: a name, a checkpoint or a run.")],
    out: Annotated[Path, typer.Argument(help="File of the chats, JSON lines; one that exists is gone on with.")],
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Chats to write.")] = 1000,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="For each answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 takes the most likely tokens.")] = 0.6,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same chats.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, int8 or int4.")] = "bfloat16",
    quiet: Quiet = False,
) -> None:
    """Let a chat model write chats, to train its drafter on.

    It asks itself questions and answers them.
    """
    from cordillera.cli._show import answering_progress, console
    from cordillera.workflows.post_training import own_chats

    screen = console()
    with answering_progress(screen, quiet=quiet) as on_answer:
        found = own_chats.write_chats(
            model,
            out,
            count,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            dtype=dtype,
            on_answer=on_answer,
        )
    screen.print(f"{found.chats:,} chats in {found.file}; {found.dropped:,} questions were dropped")


def export_drafter(
    run: Annotated[Path, typer.Argument(help="The run of a drafter, or one of its checkpoints.")],
    out: Annotated[Path, typer.Argument(help="The file, ending in .safetensors.")],
) -> None:
    """Write the drafter of a run to a file.

    The option --drafter of `generate` and `serve` takes it.
    """
    from cordillera.cli._show import echo
    from cordillera.workflows.post_training import drafters

    echo(f"drafter: {drafters.export_drafter(run, out)}")
