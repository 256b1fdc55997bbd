"""Ranking models of your own: a class in a Python module, which a recipe names as ``module:Class``."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeGuard

from pydantic import create_model

from cordillera.errors import DataError
from cordillera.models.ranking import MODELS
from cordillera.models.ranking.base import RankingConfig, RankingModel

SHIPPED = tuple(MODELS)
"""Names of the models that are not imported."""

_configs: dict[str, type[RankingConfig]] = {}


def is_imported(name: object) -> TypeGuard[str]:
    """Return whether a model's name is that of a class to import, as ``two_tower:TwoTower`` is."""
    return isinstance(name, str) and ":" in name


class _ImportedConfig(RankingConfig):
    """Configuration whose class other processes make by importing the model again."""

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.name,), self.__getstate__()


def _blank(name: str) -> RankingConfig:
    kind = import_model(name)
    return kind.__new__(kind)


def import_model(name: str) -> type[RankingConfig]:
    """Import the class that ``name`` names, enter it into the models under that name, and return its configuration.

    Modules are looked for where Python does, then in the working directory. The configuration is the class's own
    ``Config`` with the field ``name``.

    Raises:
        DataError: There is no such module or class, the module cannot be imported or is not that of the working
            directory, or the class is no ranking model with a configuration.
    """
    module_name, _, class_name = name.partition(":")
    module = _module(module_name)
    model = getattr(module, class_name, None)
    if not isinstance(model, type) or not issubclass(model, RankingModel):
        here = [key for key, one in vars(module).items() if _is_own(one, module)]
        close = difflib.get_close_matches(class_name, here, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(here)}" if here else ""
        if model is not None:
            raise DataError(f"{name!r} is no subclass of cordillera.models.ranking.RankingModel{hint}")
        raise DataError(f"module {module_name!r} has no class {class_name!r}{hint}")
    config: Any = getattr(model, "Config", None)
    if not isinstance(config, type) or not issubclass(config, RankingConfig):
        raise DataError(f"{class_name!r} needs a class Config, derived from RankingConfig or DeepConfig")
    if MODELS.get(name) is not model:  # new, or loaded again after a change
        MODELS[name], of_name, bases = model, Literal[name], (_ImportedConfig, config)
        field: Any = (of_name, name)
        _configs[name] = create_model(config.__name__, __base__=bases, __module__=config.__module__, name=field)
    return _configs[name]


def _module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise DataError(f"{name!r} is no name of a Python module")
    with contextlib.suppress(OSError):  # the working directory was removed
        here = os.getcwd()
        with _found_here(here):
            found = _imported(name, here)
        own = Path(here, *name.split(".")).with_suffix(".py")
        if own.is_file() and not _is_file(found, own):
            raise DataError(f"module {name!r} was imported from {found.__file__}, and there is another in {here}")
        return found
    return _imported(name, "the working directory was removed")


@contextlib.contextmanager
def _found_here(folder: str) -> Iterator[None]:
    """Let Python look into a folder, behind all others, so that no file there replaces a library."""
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    except DataError:
        sys.path.remove(folder)
        raise


def _imported(name: str, here: str) -> ModuleType:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # keep output of the module out of stdout, which programs read
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise DataError(f"no module {name!r} here ({here}) or among installed packages") from error
        raise DataError(f"module {name!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # an imported module can raise any exception
        raise DataError(f"module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _is_file(module: ModuleType, path: Path) -> bool:
    return module.__file__ is not None and Path(module.__file__).resolve() == path.resolve()


def _is_own(one: object, module: ModuleType) -> bool:
    return isinstance(one, type) and issubclass(one, RankingModel) and one.__module__ == module.__name__
