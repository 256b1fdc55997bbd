"""The table of commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from cordillera.cli import (
    answers,
    augment,
    bench,
    blame,
    chaos,
    chat,
    compare,
    convert,
    coordinate,
    data,
    delta,
    doctor,
    drafting,
    evaluate,
    export,
    generate,
    guard,
    inject,
    isoflop,
    plan,
    predict,
    probe,
    quantize,
    recipe,
    report,
    search,
    serve,
    simulate_faults,
    status,
    sweep,
    towers,
    train,
    tune_collectives,
    watch,
)
from cordillera.cli._completion import completion_of

SECTIONS: dict[str, dict[str, Callable[..., Any] | typer.Typer]] = {
    "Train and use models": {
        "train": train.train,
        "evaluate": evaluate.evaluate,
        "status": status.status,
        "report": report.report,
        "compare": compare.compare,
        "serve": serve.serve,
        "data": data.app,
        "recipe": recipe.app,
    },
    "Ranking models": {
        "predict": predict.predict,
        "export": export.export,
        "search": search.search,
        "sweep": sweep.sweep,
        "augment": augment.augment,
        "quantize": quantize.quantize,
        "watch": watch.watch,
        "probe": probe.probe,
        "inject": inject.inject,
        "towers": towers.towers,
        "delta": delta.app,
    },
    "Language models": {
        "generate": generate.generate,
        "chat": chat.chat,
        "convert": convert.convert,
        "export-adapter": convert.export_adapter,
        "isoflop": isoflop.isoflop,
        "best-of": answers.best_of,
        "judge": answers.judge,
        "guard": guard.guard,
        "average": answers.average,
        "write-chats": drafting.write_chats,
        "export-drafter": drafting.export_drafter,
    },
    "Large jobs": {
        "plan": plan.plan,
        "simulate-faults": simulate_faults.simulate_faults,
        "coordinate": coordinate.coordinate,
        "chaos": chaos.chaos,
        "blame": blame.blame,
    },
    "This machine": {
        "doctor": doctor.doctor,
        "tune-collectives": tune_collectives.tune_collectives,
        "bench": bench.bench,
    },
}
"""Commands by section of the help."""

_GROUPS = {
    "data": "Data sets: list, get, describe.",
    "delta": "Changes of a run's dynamic tables: make, apply.",
    "recipe": "Recipes: new, list, show.",
}
_ARGUMENTS = {"set_": "changes", "layout": "layouts", "nproc": "processes", "after": "stalled_after_s"}
"""Arguments of functions of the library that options give under other names."""

_PLACES = ("out", "folder", "path")  # arguments that errors call by these names

_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


class _Sections(TyperGroup):
    """Help with the commands in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections."""
        longest = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                room = formatter.width - 6 - longest
                formatter.write_dl(
                    [(f"{name:{longest}}", self.commands[name].get_short_help_str(room)) for name in names]
                )


app = typer.Typer(
    cls=_Sections,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train, evaluate and serve ranking and language models; plan large jobs. "
    "Start with: cordillera train movielens-wukong",
)


def _with_names(command: Callable[..., Any]) -> Callable[..., Any]:
    """Name the values of a command's options and arguments in its help, and complete arguments by names that ship."""
    command.__annotations__ = get_type_hints(command, include_extras=True)
    for name, hint in command.__annotations__.items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, typer.models.ArgumentInfo):
                info.metavar = name.upper() if info.metavar is None else info.metavar
                info.autocompletion = completion_of(name)
            elif isinstance(info, typer.models.OptionInfo) and info.metavar is None:
                kinds = _kinds(hint.__origin__)
                info.metavar = next((_METAVARS[kind] for kind in kinds if kind in _METAVARS), None)
    return command


def _kinds(hint: Any) -> list[Any]:
    parts = get_args(hint)
    return [kind for part in parts for kind in _kinds(part)] if parts else [hint]


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Return the options of the command that ``words`` call, by the names of the arguments that they give."""
    found: Any = None
    for name in (word for word in words if not word.startswith("-")):
        if isinstance(found, typer.Typer):
            found = next((one.callback for one in found.registered_commands if _called(one) == name), None)
        elif found is None:
            found = next((commands[name] for commands in SECTIONS.values() if name in commands), None)
    options: dict[str, str] = {}
    for name, hint in getattr(found, "__annotations__", {}).items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, typer.models.OptionInfo):
                declared = (str(one) for one in (info.default, *(info.param_decls or ())))  # the first stands there
                long = [one for one in declared if one.startswith("--")]
                option = long[0].partition("/")[0] if long else f"--{name.replace('_', '-')}"
                options |= dict.fromkeys((name, _ARGUMENTS.get(name, name), option[2:].replace("-", "_")), option)
    return {name: option for name, option in options.items() if name not in _PLACES}


def _called(command: typer.models.CommandInfo) -> str:
    assert command.callback is not None
    return command.name or command.callback.__name__


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"cordillera {metadata.version('cordillera')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


for _commands in SECTIONS.values():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, help=_GROUPS[_name])
            for _registered in _command.registered_commands:
                assert _registered.callback is not None
                _with_names(_registered.callback)
        else:
            app.command(_name, context_settings=bench.CONTEXT if _name == "bench" else None)(_with_names(_command))
