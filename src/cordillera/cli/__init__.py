"""The ``cordillera`` command. One file a command; what they do is in :mod:`cordillera.workflows`."""

from __future__ import annotations

import os
import sys

from cordillera.cli._terminal import Terminal
from cordillera.cli.app import app
from cordillera.errors import CordilleraError, Interrupted

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; errors meant for people are printed without a traceback (set CORDILLERA_DEBUG=1 for it)."""
    # before torch is imported: what went wrong between processes is said in a sentence, without torch's native stack
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app(standalone_mode=True)
    except CordilleraError as error:
        if os.environ.get("CORDILLERA_DEBUG"):
            raise
        from rich.console import Console

        console = Console(file=Terminal.of(sys.stderr), highlight=False, soft_wrap=True)
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
