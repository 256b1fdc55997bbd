"""Disaggregated Multi-Tower: embeddings exchanged by towers: ``cordillera bench dmt``."""

from __future__ import annotations

import enum

import typer
from _dmt_exchange import run
from _program import Program


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    exchange = "exchange"


main = Program("dmt", {Part.exchange: run}, "Compare the exchange by towers with the flat one.", threads=1).command()


if __name__ == "__main__":
    typer.run(main)
