"""``cordillera report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Write a run's report again, as one HTML file."""
    from cordillera import workflows
    from cordillera.cli._show import echo

    echo(workflows.report(run))
