"""``cordillera guard``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, console, print_json, titled_table


def guard(
    model: Annotated[str, typer.Argument(help="The guard: a run, a checkpoint or a model's name.")],
    texts: Annotated[list[str], typer.Argument(help="What users said; each is judged on its own.")],
    agent: Annotated[
        list[str] | None, typer.Option("--agent", help="An answer to the text, judged in its place; one for each text.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Least score at which a turn is unsafe.")] = 0.5,
    categories: Annotated[
        list[str] | None, typer.Option("--category", help="A code that counts, such as S7. Default: all.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")] = "float32",
    as_json: AsJson = False,
) -> None:
    """Say whether texts, or answers to them, are safe.

    Those that are not have categories.
    """
    from cordillera.data.tokenizers.chat import Message
    from cordillera.errors import DataError
    from cordillera.serving.language.guard import Guard

    if agent and len(agent) != len(texts):
        raise DataError(f"{len(agent)} answers to {len(texts)} texts", where="--agent", remedy="give one for each")
    opened = Guard(model, threshold, dtype=dtype)
    if categories:
        opened.categories = opened.categories.only(categories)
    conversations = [[Message("user", text)] for text in texts]
    for conversation, answer in zip(conversations, agent or [], strict=False):
        conversation.append(Message("assistant", answer))
    verdicts = opened.check(conversations)
    if as_json:
        names = opened.categories.names
        print_json(
            [
                {"text": conversation[-1].content, **asdict(one), "names": [names[code] for code in one.categories]}
                for conversation, one in zip(conversations, verdicts, strict=True)
            ]
        )
        return
    table = titled_table("", "text", "verdict", "categories", right=("score",))
    for conversation, one in zip(conversations, verdicts, strict=True):
        named = [f"{code} {opened.categories.names[code]}" for code in one.categories]
        verdict = ("safe" if one.is_safe else "unsafe") + ("" if one.is_valid else " (not valid)")
        table.add_row(conversation[-1].content, verdict, ", ".join(named), f"{one.score:.3f}")
    console().print(table)
