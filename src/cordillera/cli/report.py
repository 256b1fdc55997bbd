"""``cordillera report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="Folder of a run or a search.")]) -> None:
    """Write the report of a run or a search again, as one HTML file."""
    from cordillera import workflows
    from cordillera.cli._show import echo

    echo(workflows.report(run))
