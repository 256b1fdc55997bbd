"""``python -m cordillera`` is the ``cordillera`` command."""

import sys


def main() -> None:
    """Run the command; Ctrl-C ends it without a traceback while its modules are loaded, too."""
    try:
        from cordillera.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
