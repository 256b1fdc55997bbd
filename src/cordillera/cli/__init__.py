"""The ``cordillera`` command. One file a command; what they do is in :mod:`cordillera.workflows`."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from cordillera.cli.app import app
from cordillera.errors import CordilleraError, Interrupted, printable

__all__ = ["app", "main"]


_with_place = warnings.formatwarning


def _formatted(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """A warning on standard error: those meant for people without the place in the code that gave it."""
    if category is UserWarning:
        return f"warning: {printable(message, lines=True)}\n"
    return _with_place(message, category, *place)


def main() -> None:
    """Run the command line; errors meant for people are printed without a traceback (set CORDILLERA_DEBUG=1 for it)."""
    warnings.formatwarning = _formatted  # type: ignore[assignment]
    try:
        app(standalone_mode=True)
    except CordilleraError as error:
        if os.environ.get("CORDILLERA_DEBUG"):
            raise
        from rich.console import Console

        console = Console(stderr=True, highlight=False, soft_wrap=True)
        first, *rest = str(error).splitlines()
        console.print("interrupted: " if isinstance(error, Interrupted) else "[bold red]error:[/] ", end="")
        console.print(first, markup=False)
        for line in rest:
            console.print(line, markup=False)
        sys.exit(130 if isinstance(error, Interrupted) else 2)
    except BrokenPipeError:
        # The reader (head, less) went away: not an error of ours. Keep Python from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
