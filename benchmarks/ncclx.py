"""``cordillera bench ncclx``: collectives of our own beside Gloo's, and who is to blame for simulated hangs."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import typer
from _blame_study import study
from _program import Program
from _transport_exchange import exchanges
from _transport_queues import queues
from _transport_speed import collectives, messages
from _transport_start import start
from _transport_training import training
from rich.console import Console


class Part(str, enum.Enum):
    """What is measured."""

    collectives = "collectives"
    messages = "messages"
    exchanges = "exchanges"
    training = "training"
    start = "start"
    queues = "queues"
    blame = "blame"


PARTS: dict[Part, Callable[[Console, bool], dict[str, Any]]] = {
    Part.collectives: collectives,
    Part.messages: messages,
    Part.exchanges: exchanges,
    Part.training: training,
    Part.start: start,
    Part.queues: queues,
    Part.blame: study,
}

main = Program(
    "ncclx",
    PARTS,
    "Time collectives of our own beside Gloo's, emulate large groups, and find who is to blame for simulated hangs.",
).command()


if __name__ == "__main__":
    typer.run(main)
