"""The command line that benchmarks share: options, finished pieces of long parts, and result files."""

from __future__ import annotations

import enum
import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _machine import busy
from _results import RESULTS, FinishedPieces, make_console, write_part
from rich.console import Console

Measure = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Program:
    """A benchmark of several parts.

    The function of a part takes some of these arguments by name: ``console``; ``quick``; ``pieces``, a log of finished
    pieces, so that an interrupted part continues; ``folder``, a temporary folder that the parts of one run share.

    Attributes:
        system: Name of the benchmark in the names of its files.
        parts: Functions that measure, by the member of an enumeration that names the part.
        description: First line of ``--help``.
        part_help: Help of ``--part``.
        quick_help: Help of ``--quick``.
        threads: Default of ``--threads``; None leaves the option out.
        fresh: Whether there is ``--fresh``.
        short: Parts that are measured by default if ``--all`` measures every one; none leaves the option out.
        all_help: Help of ``--all``.
        prepare: Function that runs before the parts and returns conditions for all result files.
        left_out: Function that returns the reason for which a part cannot be measured here, or None.
        excused: Errors for which a part is left out.
    """

    system: str
    parts: Mapping[Any, Measure]
    description: str
    part_help: str = "What to measure; repeat it. Default: all."
    quick_help: str = "Few points: shows that it works, its figures mean nothing."
    threads: int | None = None
    fresh: bool = False
    short: tuple[enum.Enum, ...] = ()
    all_help: str = ""
    prepare: Callable[[], Mapping[str, str]] = dict
    left_out: Callable[[Any], str | None] = lambda part: None
    excused: tuple[type[Exception], ...] = ()

    def command(self) -> Callable[..., None]:
        """Return the function that typer runs."""

        def main(
            part: list[Any] | None = None,
            everything: bool = False,
            quick: bool = False,
            threads: int | None = self.threads,
            fresh: bool = False,
            results: Path | None = None,
        ) -> None:
            console = make_console()
            conditions = self.prepare()
            if threads is not None:
                torch.set_num_threads(threads)
                _warn_if_busy(console)
            folder = results or (RESULTS / "quick" if quick else RESULTS)
            with tempfile.TemporaryDirectory() as shared:
                given = {"console": console, "quick": quick, "folder": Path(shared)}
                for chosen in self.parts if everything else part or self.short or self.parts:
                    self._measure(chosen, folder, given, fresh, conditions)

        signature = inspect.signature(main)
        offered = self._options()
        main.__doc__ = self.description
        main.__annotations__ = offered
        main.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                one.replace(annotation=offered[name]) for name, one in signature.parameters.items() if name in offered
            ],
            return_annotation=None,
        )
        return main

    def _options(self) -> dict[str, Any]:
        """Return the annotations of the options that this benchmark has."""
        kind: Any = type(next(iter(self.parts)))
        options: dict[str, Any] = {"part": Annotated[list[kind] | None, typer.Option("--part", help=self.part_help)]}
        if self.short:
            options["everything"] = Annotated[bool, typer.Option("--all", help=self.all_help)]
        options["quick"] = Annotated[bool, typer.Option(help=self.quick_help)]
        if self.threads is not None:
            options["threads"] = Annotated[int, typer.Option(min=1, help="Threads of the CPU's kernels.")]
        if self.fresh:
            forget = typer.Option(help="Forget finished pieces of an earlier, interrupted run.")
            options["fresh"] = Annotated[bool, forget]
        options["results"] = Annotated[Path | None, typer.Option(help="Folder of the result files.")]
        return options

    def _measure(
        self, part: Any, folder: Path, given: dict[str, Any], fresh: bool, conditions: Mapping[str, str]
    ) -> None:
        """Measure a part and write its file, or say why it is left out."""
        console, name = given["console"], part.value
        wanted = inspect.signature(self.parts[part]).parameters
        try:
            reason = self.left_out(part)
            if reason is None:
                arguments = {key: value for key, value in given.items() if key in wanted}
                if "pieces" in wanted:
                    arguments["pieces"] = _pieces(console, folder / f"{self.system}-{name}.jsonl", name, fresh)
                measure = partial(self.parts[part], **arguments)
                write_part(console, folder, self.system, name, given["quick"], measure, **conditions)
                return
        except self.excused as error:
            reason = str(error)
        console.print(f"{name}: left out, {reason}", markup=False)


def _warn_if_busy(console: Console) -> None:
    """Warn if other processes compute: threads wait for each other often, which distorts even interleaved ratios."""
    load = busy()
    if load is not None and load > 1:
        console.print(f"warning: {load:g} processes were busy here in the last minute; measure on a quiet machine")


def _pieces(console: Console, path: Path, part: str, fresh: bool) -> FinishedPieces:
    """Return the finished pieces of a part, or none with ``fresh``."""
    pieces = FinishedPieces(path)
    if fresh:
        pieces.clear()
    elif len(pieces):
        console.print(f"{part}: continuing from {len(pieces)} finished pieces ({pieces.path})")
    return pieces
