"""``python -m cordillera`` is the ``cordillera`` command."""

import signal
import sys
from typing import NoReturn


def _stop(number: int, frame: object) -> NoReturn:
    from cordillera.errors import Terminated

    raise Terminated


def main() -> None:
    """Run the command.

    Ctrl-C ends it without a traceback while its modules are loaded, too. SIGTERM and SIGHUP, which schedulers and
    terminals send, end it as Ctrl-C does, unless the caller ignores them; what trains and serves hears them itself.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        from cordillera.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # all work is done


if __name__ == "__main__":
    main()
