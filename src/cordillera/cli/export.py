"""``cordillera export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The folder to write. Default: RUN/export.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Write a package of AOTInductor too; needs a C++ compiler.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx too, in float32; needs onnxscript.")] = False,
) -> None:
    """Write a run's model as a program that needs torch alone, or onnxruntime alone.

    The folder holds the program, the schema with the vocabularies, and score.py, which scores rows with both.
    """
    from cordillera import workflows
    from cordillera.cli._show import console

    before = (out or run / "export").exists()
    folder = workflows.export(run, out, compiled=compiled, onnx=onnx)
    console().print(f"export: {folder}{', in place of an earlier one' if before else ''}")
    console().print(
        f"  -> in Python: import sys; sys.path.insert(0, {str(folder)!r}); "
        f"import score; score.Scorer({str(folder)!r}).predict([...])"
    )
