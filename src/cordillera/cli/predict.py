"""``cordillera predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, Samples


def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    file: Samples,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where scores go (.csv or .parquet). Default: RUN/predictions/NAME.csv."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples scored at a time.")] = 8192,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Score with the model that `cordillera quantize` made of the run.")
    ] = False,
    planned: Annotated[
        bool, typer.Option("--plan", help="Score with the kernels that `cordillera probe` chose for the run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score a file of samples by a run.

    Scores are written beside the samples' ids.
    """
    from cordillera import workflows
    from cordillera.cli._show import work_shown

    before = out is not None and Path(out).exists()
    with CommandOutput(as_json) as answer:
        with work_shown("scoring") as show:
            written, rows = workflows.predict(
                run,
                file,
                out,
                batch_size=batch_size,
                quantized=quantized,
                planned=planned,
                on_rows=lambda rows: show(f"scoring {rows:,} rows"),
            )
        said = f"{rows:,} scores: {written}{', in place of an earlier file' if before else ''}"
        answer.say(said, rows=rows, file=written)
