"""A server of text and scores under load, beside answers one by one: ``cordillera bench serving``."""

from __future__ import annotations

import enum
from typing import Any

import typer
from _peers import PeerUnavailable
from _program import Program
from _serving_fp8 import fp8
from _serving_pipeline import pipeline
from _serving_scores import scores
from _serving_soak import soak
from _tables import print_notes
from rich.console import Console
from speculation import PROMPTS

from cordillera.data.assets import stored_asset
from cordillera.errors import DataError

SOAK_SECONDS, SOAK_CLIENTS, TARGET_HEALTH_MS = 300.0, 64, 50


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    scores = "scores"
    soak = "soak"
    pipeline = "pipeline"
    fp8 = "fp8"


def _soak(console: Console, quick: bool) -> dict[str, Any]:
    found = soak(5.0 if quick else SOAK_SECONDS, 8 if quick else SOAK_CLIENTS)
    console.print(
        f"{found.answered:,} answers in {found.seconds:.0f} s, {found.crossed} crossed, {found.lost} lost; "
        f"{found.cancelled:,} cancelled, {found.bad_refused:,} bad bodies and {found.overloaded:,} others refused, "
        f"{found.unexplained} without a reason"
    )
    console.print(
        f"memory {', '.join(f'{one:.0f}' for one in found.memory)} MiB; /health {1e3 * found.health_p50:.1f} ms, "
        f"p99 {1e3 * found.health_p99:.1f} ms ({TARGET_HEALTH_MS} asked)"
    )
    notes = ["clients, server and the process that asks for /health share two cores"]
    print_notes(console, [*notes, *found.problems])
    return {"evidence": "measured", "clients": SOAK_CLIENTS, **found._asdict(), "notes": notes}


def _left_out(part: Part) -> str | None:
    if part is not Part.scores:
        stored_asset("smollm2")
    if part is Part.fp8 and not PROMPTS.is_dir():
        return f"there is no folder {PROMPTS} with the prompts of EAGLE's six sets"
    return None


main = Program(
    "serving",
    {Part.scores: scores, Part.soak: _soak, Part.pipeline: pipeline, Part.fp8: fp8},
    "Answer requests of many clients, and compare what serving models computes.",
    left_out=_left_out,
    threads=2,
    excused=(DataError, PeerUnavailable),
).command()


if __name__ == "__main__":
    typer.run(main)
