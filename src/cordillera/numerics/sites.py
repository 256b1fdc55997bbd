"""Linear layers of a model, by name: the places where its precision is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import Tensor, nn

from cordillera.errors import NumericsError


def sites(model: nn.Module, only: Sequence[str] = (), without: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """Return linear layers by their qualified names, each once, in the order of the model.

    Args:
        only: Patterns (``top.*``) of names to keep; empty for all. A pattern without a layer is an error.
        without: Patterns of names to leave out.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for pattern in [*only, *without]:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise NumericsError(
                f"no linear layer is called {pattern!r}", where="sites", remedy=f"one of {', '.join(found) or 'none'}"
            )
    return {
        name: module
        for name, module in found.items()
        if (not only or any(fnmatchcase(name, p) for p in only)) and not any(fnmatchcase(name, p) for p in without)
    }


@contextmanager
def replaced(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """Replace modules of a model, by qualified name, within a ``with`` statement; restore them at its end."""
    before = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            replace(model, name, module)
        yield model
    finally:
        for name, module in before.items():
            replace(model, name, module)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module of a model, in place, by its qualified name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


class Recorder:
    """Record of the first ``most_rows`` input rows of linear layers, within a ``with`` statement."""

    def __init__(self, model: nn.Module, names: Sequence[str], most_rows: int = 4096) -> None:
        self.inputs: dict[str, list[Tensor]] = {name: [] for name in names}
        self._most = most_rows
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: self._keep(name, given[0]))
            for name in names
        ]

    def _keep(self, name: str, given: Tensor) -> None:
        kept = self.inputs[name]
        rows = given.detach().reshape(-1, given.shape[-1])
        left = self._most - sum(map(len, kept))
        if left > 0:
            kept.append(rows[:left].float().clone())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
