"""Language models after pre-training: ``cordillera bench post-training``."""

from __future__ import annotations

import enum

import typer
from _peers import PeerUnavailable
from _post_training_groups import groups
from _post_training_guard import run_guard
from _post_training_language import answers, preferences
from _post_training_trl import trl
from _post_training_vision import run_vision
from _program import Program

from cordillera.data.assets import stored_asset
from cordillera.errors import DataError


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    answers = "answers"
    preferences = "preferences"
    groups = "groups"
    guard = "guard"
    vision = "vision"
    trl = "trl"


MEASURES = {
    Part.answers: answers,
    Part.preferences: preferences,
    Part.groups: groups,
    Part.guard: run_guard,
    Part.vision: run_vision,
    Part.trl: trl,
}


def _left_out(part: Part) -> str | None:
    if part in (Part.answers, Part.preferences):
        stored_asset("smollm2")
    return None


main = Program(
    "post_training",
    MEASURES,
    "Fine-tune, prefer, sample and verify, and measure what it changed.",
    left_out=_left_out,
    threads=2,
    excused=(DataError, PeerUnavailable),
).command()


if __name__ == "__main__":
    typer.run(main)
