"""The ``cordillera`` command, with one file per command; :mod:`cordillera.workflows` does the work."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import select
import sys
import warnings
from typing import Any, NoReturn

import typer

from cordillera.cli.app import app, options_of
from cordillera.errors import CordilleraError, DependencyError, Interrupted, RunError, printable
from cordillera.kernels.compiled_files import place_compiled_code

__all__ = ["app", "main"]

_FILES = 256  # open files that a command may need: several times the number of files of the largest models

_REMEDIES = {
    errno.EMFILE: "allow more open files (`ulimit -n`)",
    errno.ENFILE: "close other programs, or raise the system's limit of open files",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a file or folder that this user may use",
    errno.EPERM: "choose a file or folder that this user may use",
    errno.EAGAIN: "see whether the system allows more processes (`ulimit -u`)",
}

_with_place = warnings.formatwarning


def _formatted(message: Warning | str, category: type[Warning], *place: Any) -> str:
    """Return the text of a warning; warnings for users leave out the line of code that raised them."""
    if category is UserWarning:
        return f"warning: {printable(message, lines=True)}\n"
    return printable(_with_place(message, category, *place), lines=True)


def _with_options(error: CordilleraError) -> str:
    """Return an error's text in which arguments of functions are options of the command."""
    options, where, said = options_of(sys.argv[1:]), error.where or "", str(error)
    names, first, rest = where.split(", "), *where.partition(" ")[::2]
    if all(name in options for name in names):
        return ", ".join(options[name] for name in names) + said[len(where) :]
    return options[first] + said[len(first) :] if first in options and not rest.startswith("=") else said


def _allow_files() -> None:
    """Raise the process's own limit of open files to what commands need.

    Raises:
        DependencyError: If the limit that others have set is lower; libraries would fail in the middle of the work.
    """
    own, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (own, allowed) and allowed < _FILES:
        remedy = f"allow {_FILES} or more (`ulimit -n {_FILES}`)"
        raise DependencyError(f"this process may have only {allowed:,} files open", remedy=remedy)
    if own != resource.RLIM_INFINITY and own < _FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, allowed))


def _of_system(error: OSError) -> RunError:
    """Return an error of the system that nothing has explained as one for users."""
    place = None if error.filename is None else str(error.filename)
    what = f"the system says: {error.strerror or error}"
    return RunError(what, where=place, remedy=_REMEDIES.get(error.errno or 0))


def _end(error: CordilleraError) -> NoReturn:
    """Print an error and end the process; with CORDILLERA_DEBUG=1, raise it."""
    if os.environ.get("CORDILLERA_DEBUG"):
        raise error
    from rich.text import Text

    from cordillera.cli._show import console

    ended = "interrupted:" if isinstance(error, Interrupted) else Text("error:", "bold red")
    console(stderr=True).print(ended, _with_options(error))
    sys.exit(130 if isinstance(error, Interrupted) else 2)


def _leave_pipe() -> NoReturn:
    """End well: the reader (head, less) closed the pipe, which is no error. Keep Python from flushing into it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _is_left() -> bool:
    """Return whether the reader of standard output or standard error is gone."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no descriptor, or a closed one
            poll.register(stream.fileno(), 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))


def _end_of_process() -> NoReturn:
    """Print that a process which this one talked to, or started, is gone, and end."""
    remedy = "see whether the system allows more processes (`ulimit -u`), and whether there is enough memory"
    _end(RunError("another process of this command has ended, or could not begin", remedy=remedy))


def _end_of_pipe() -> NoReturn:
    """End well if the reader of the output left; otherwise, the pipe led to another process."""
    if _is_left():
        _leave_pipe()
    _end_of_process()


def _end_mistake(error: Any) -> NoReturn:
    """Print a mistake on the command line, which Typer found, and end the process."""
    from pydantic import ValidationError
    from typer import rich_utils

    if isinstance(error.__cause__, ValidationError):  # Typer checks options with pydantic
        from cordillera.mistakes import explain

        first: Any = error.__cause__.errors()[0]
        if first["type"] == "value_error":  # an error that Typer raised itself
            error.message = error.message.removeprefix("Value error, ")
        else:
            error.message = explain([{**first, "loc": ()}], lambda path: ())[0][1]
    said = printable(error.format_message(), lines=True)
    if type(error).__name__ == "NoArgsIsHelpError":  # the help, which Typer's function does not print
        typer.echo(said, err=True)
    else:
        error.format_message = lambda: said
        rich_utils.rich_format_error(error)
    sys.exit(getattr(error, "exit_code", 2))


def main() -> None:
    """Run the command line; errors for users are printed without a traceback unless CORDILLERA_DEBUG=1 is set."""
    gc.set_threshold(20_000)  # with the default of 700, garbage collection takes a fifth of the time to import torch
    warnings.formatwarning = _formatted  # type: ignore[assignment]
    # A stream that the caller closed (`>&-`, `<&-`) is None.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (one or open(os.devnull, "w") for one in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # also escape characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    # Before torch is imported: errors between processes are reported in one sentence, without torch's native stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    place_compiled_code()
    try:
        _allow_files()
        sys.exit(app(prog_name="cordillera", standalone_mode=False))
    except CordilleraError as error:
        _end(error)
    except BrokenPipeError:
        _end_of_pipe()
    except SystemExit:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # Typer has caught the broken pipe first
            _end_of_pipe()
        raise
    except OSError as error:
        if os.environ.get("CORDILLERA_DEBUG"):
            raise
        _end(_of_system(error))
    except typer.Abort as stop:
        if isinstance(stop.__cause__, EOFError):  # Typer takes the end of another process for Ctrl-D
            _end_of_process()
        sys.exit(1)
    except UnicodeEncodeError as error:
        if os.environ.get("CORDILLERA_DEBUG") or "surrogates" not in error.reason:
            raise
        name = error.object[max(0, error.start - 60) : error.end + 20]
        _end(RunError("is not UTF-8", where=repr(name), remedy="rename the file or folder, or write other text"))
    except Exception as error:
        if not hasattr(error, "format_message"):  # a mistake on the command line
            raise
        _end_mistake(error)
