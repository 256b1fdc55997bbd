"""Names of what ships, for the shell's completion of arguments.

Where no name fits, the shell completes files. Nothing slow is imported: the shell waits for each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import resources


def _shipped(package: str) -> list[str]:
    entries = resources.files(f"cordillera.{package}").iterdir()
    return sorted(one.name.removesuffix(".toml") for one in entries if one.name.endswith(".toml"))


def _models() -> list[str]:
    from cordillera.data.assets import ASSETS

    return [name for name, asset in ASSETS.items() if asset.kind == "model"]


def _benchmarks() -> Iterable[str]:
    from cordillera.cli.bench import programs

    return programs()


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "cluster": partial(_shipped, "clusters"),
    "first": _models,
    "model": _models,
    "models": _models,
    "recipe": partial(_shipped, "recipes"),
    "second": _models,
    "system": _benchmarks,
    "workload": partial(_shipped, "workloads"),
}


def completion_of(argument: str) -> Callable[[str], list[str]] | None:
    """Return what completes the beginning of an argument, by its name in the command's function; None for files."""
    names = _NAMES.get(argument)
    if names is None:
        return None

    def starting(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return starting
