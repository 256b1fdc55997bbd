"""``--json``: one document on standard output that holds what the tables show, for every command that prints one."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit
from rich.table import Table

from cordillera import workflows
from cordillera.cli import _show, doctor
from cordillera.cli.app import SECTIONS
from cordillera.recipe import load
from cordillera.training.scaling import isoflop_laws
from cordillera.workflows.post_training import answers
from tests.serving.small_models import write_model
from tests.training.test_isoflop_laws import ALPHA, SCALE, TARGET, runs_on_law

from . import test_augment, test_search
from .conftest import RECIPE, write_log
from .test_plan import HEADER, ROW
from .test_printing import cells

SIZES = ["model.fmb_mlp=[64]", "model.top_mlp=[64]", "model.embedding_dim=8", "training.epochs=1"]
SWEEP = [f"--size=model.top_mlp=[{n}] training.epochs=1" for n in (4, 32, 256)]
COMMANDS = {
    "recipe list": [],
    "recipe new": ["log.csv", "--out", "new.toml"],
    "data list": [],
    "data describe": ["avazu", "--path", "avazu.csv"],
    "train": ["small.toml", "--run", "runs/b", "--set", "training.epochs=1"],
    "evaluate": ["run", "--importance"],
    "compare": ["run", "other"],
    "status": ["run"],
    "search": ["tiny.toml", "--space", "space.toml", "--trials", 2, "--workers", 1],
    "sweep": ["small.toml", *SWEEP],
    "isoflop": ["any", "--budget", 1e18],
    "augment": ["streams.toml", "--finish", "--students", "--set", "streams.north.student=north.toml"],
    "quantize": ["run", "--budget", 5],
    "watch": ["run", "moved.csv"],
    "probe": ["run", "--rows", 16],
    "inject": ["run", "-n", 64, "--samples", 20],
    "towers": ["run", "--towers", 2, "--samples", 200],
    "best-of": ["any", "--reward", "any", "--prompts", "any", "--out", "any"],
    "guard": ["guard", "How do locks work?", "[red]Hello[/red]"],
    "plan --list": [],
    "plan": ["gpt-22b", "a100-node", "--only", "network", "--out", "p", "--slow", 1.5],
    "plan of tables": ["dlrm-dcnv2", "two-buildings", "--only", "network", "--out", "q"],
    "plan of clusters": ["gpt-22b", "a100-node", "selene", "--only", "network", "--out", "r"],
    "plan --calibrate": ["steps.csv", "a100-node", "--out", "s"],
    "plan --measure": ["p.csv", "gpt-22b", "a100-node"],
    "simulate-faults": ["--devices", 1000, "--replicas", 4, "--days", 1, "--runs", 2],
    "doctor": [],
    "tune-collectives": ["rules.toml", "--bytes", 4096, "--seconds", 0.01],
}  # fmt: skip
SLOW = {"search", "sweep", "augment", "plan", "plan of tables", "plan of clusters", "tune-collectives"}
LISTS = {"doctor", "guard", "simulate-faults"}
DERIVED = {
    "positives",
    "ratio",
    "law",
    "silent / NaN, inf",
    "effective",
    "formula",
    "",
    "verdict",
    "newest record",
    "written",
}
"""Columns whose values follow from others of the document, or repeat a heading."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its quantised copy, and another run of another seed."""
    folder = tmp_path_factory.mktemp("trained")
    log = write_log(folder / "log.csv")
    (folder / "small.toml").write_text(RECIPE.format(path=log))
    for name, seed in (("run", 1), ("other", 2)):
        changes = [*SIZES, f"data.cache_dir={folder / 'cache'}", f"seed={seed}"]
        workflows.train(load(folder / "small.toml", changes), folder / name)
    workflows.evaluate(folder / "run", "test")
    from cordillera.workflows.quantization import quantize

    quantize(folder / "run", 0.05)
    return folder


@pytest.fixture
def inputs(request: Any, cli: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a command of :data:`COMMANDS` names, and results in place of work that takes long."""
    lines = write_log(tmp_path / "log.csv").read_text().splitlines()
    (tmp_path / "small.toml").write_text(RECIPE.format(path=tmp_path / "log.csv"))
    if "run" in COMMANDS[command]:
        shutil.copytree(request.getfixturevalue("trained"), tmp_path, dirs_exist_ok=True)
    moved = [re.sub(r"(phone|tablet|desk),[\d.]*", r"desk,9999", line) for line in lines[1:]]
    (tmp_path / "moved.csv").write_text("\n".join([lines[0], *moved]) + "\n")
    (tmp_path / "tiny.toml").write_text(test_search.RECIPE)
    (tmp_path / "space.toml").write_text(test_search.SPACE)
    test_augment.write_logs(tmp_path)
    test_augment.write_settings(tmp_path, past={"events": 5})
    (tmp_path / "north.toml").write_text(tomlkit.dumps(test_augment.student(tmp_path)))
    columns = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    columns += "device_ip,device_model,device_type,device_conn_type," + ",".join(f"C{n}" for n in range(14, 22))
    rows = [f"{n},{n % 2},141021{n // 20:02},{'1005,' * 20}9" for n in range(200)]
    (tmp_path / "avazu.csv").write_text("\n".join([columns, *rows]) + "\n")
    steps = [ROW.format(layers=24, mb=mb, tp=tp, dp=8 // tp, ms=900 + 50 * tp) for mb in (1, 2) for tp in (1, 2, 4)]
    (tmp_path / "steps.csv").write_text(HEADER + "".join(steps))
    study = isoflop_laws.study(runs_on_law(ALPHA, SCALE), target=TARGET)
    found = SimpleNamespace(study=study, plot=Path("isoflop.png"), folder=Path("."))
    monkeypatch.setattr(workflows, "isoflop", lambda *_, **options: found)
    best = answers.BestOf(Path("best.jsonl"), 1234, 4, {1: 0.123456, 2: 0.5, 4: 0.75})
    monkeypatch.setattr(answers, "best_of", lambda *_, **options: best)
    measured = SimpleNamespace(products="9 products", new=9, too_large=2, left=0)
    monkeypatch.setattr("cordillera.kernels.products.measure_table", lambda *_, **options: measured)
    finding = doctor.Finding("libraries", "Numba", "broken", "fails [in /a/b]", "pip install 'x[cpu]'")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    return tmp_path


def leaves(value: Any) -> Iterator[Any]:
    """Every number and text of a document, its keys too."""
    parts = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else None
    if parts is None:
        yield value
    for part in parts or ():
        yield from leaves(part)


def is_held(text: str, document: Any) -> bool:
    """Whether each number and word of a cell is in a document, there with all its digits and perhaps another unit."""
    if any(isinstance(leaf, str) and text in leaf for leaf in leaves(document)):
        return True
    numbers = [leaf for leaf in leaves(document) if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
    if re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text):
        return datetime.fromisoformat(f"{text}+00:00").timestamp() in numbers
    shown = re.findall(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", text)
    for one in shown:
        value = float(one.replace(",", ""))
        digits = len(one.partition("e")[0].partition(".")[2])
        step = 10.0 ** (-digits + (int(one.partition("e")[2]) if "e" in one else 0))
        if text.startswith("< ") and any(0 <= number <= value for number in numbers):
            return True
        least = max(0.501 * step, 0.0006 * abs(value) if digits else 0)
        scales = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 1e-12)
        if not any(abs(scale * number - value) <= least for number in numbers for scale in scales):
            return False
    return bool(shown) or text in ("", "undefined", "none", "inf")


def tables_of(what: Any) -> Iterator[Table]:
    if isinstance(what, Table):
        yield what
    for part in [*getattr(what, "renderables", ()), *filter(None, [getattr(what, "renderable", None)])]:
        yield from tables_of(part)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in COMMANDS]
)
def test_a_document_holds_what_the_tables_show(
    cli: Any, inputs: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if command == "guard":
        write_model(inputs / "guard", context=1024)
    shown: list[Table] = []
    say, put = _show.CommandOutput.say, _show.PlainConsole.print

    def said(answer: Any, what: Any, **values: Any) -> None:
        shown.extend(tables_of(what))
        say(answer, what, **values)

    def printed(screen: Any, *what: Any, **options: Any) -> None:
        shown.extend(table for one in what for table in tables_of(one))
        put(screen, *what, **options)

    arguments = [*command.partition(" of ")[0].split(), *COMMANDS[command]]
    monkeypatch.setattr(_show.CommandOutput, "say", said)
    done = cli(*arguments, "--json")
    assert done.code == (1 if command == "watch" else 0), done.err
    document = json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(document, list if command in LISTS else dict)
    if not shown and command != "plan --measure":  # a command that makes either the table or the document
        monkeypatch.setattr(_show.PlainConsole, "print", printed)
        assert cli(*arguments).code == done.code
    assert shown or command == "plan --measure"
    for table in shown:
        for heading, *column in zip(*cells(table), strict=True):
            if heading.replace("\n", " ") in DERIVED:
                continue
            for text in column:
                for part in re.split(r" to | ± |\n(?:-> )?| \[|, ", text.strip("]")):
                    assert is_held(part, document), (heading, text)
    snake = re.compile(r"[a-z][a-z0-9_]*")
    keys = document if isinstance(document, dict) else document[0]
    assert all(snake.fullmatch(key) for key in keys)


def test_numbers_that_json_lacks_are_null_and_others_keep_their_digits(capsys: pytest.CaptureFixture[str]) -> None:
    table = _show.Sheet("t", _show.Field("a", form="{:.1f}"), _show.Field("b", within="c"), _show.Field("d"))
    table.add(math.pi, math.inf, Path("x/\x1b[31m"))
    table.add(None, float("nan"), (1, -math.inf))
    with _show.CommandOutput(True) as answer:
        answer.say("a line that is for people")
        answer.tables(rows=table)
        answer.notes.print("a note")
    printed = capsys.readouterr()
    rows = [{"a": math.pi, "c": {"b": None}, "d": "x/\x1b[31m"}, {"a": None, "c": {"b": None}, "d": [1, None]}]
    assert json.loads(printed.out) == {"rows": rows}
    assert "\x1b" not in printed.out
    assert printed.err == "a note\n"
    assert cells(table) == [["a", "b", "d"], ["3.1", "inf", "x/\\x1b[31m"], ["", "nan", "(1, -inf)"]]


def test_an_error_prints_no_document_and_other_ranks_print_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = _show.CommandOutput(True)
    answer.keep(a=1)
    with pytest.raises(ZeroDivisionError), answer:
        1 / 0  # noqa: B018
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with _show.CommandOutput(True) as answer:
        answer.keep(a=1)
        answer.notes.print("a note")
    assert capsys.readouterr() == ("", "")


def _functions(module: Any) -> dict[str, set[str]]:
    """The names that each function of a module uses."""
    tree = ast.parse(inspect.getsource(module))
    return {
        node.name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def _prints_a_table(function: Any) -> bool:
    """Whether a function uses a table, itself or by functions of its module and of ``_show``."""
    known = _functions(_show) | _functions(sys.modules[function.__module__])
    seen, left = set[str](), {function.__name__}
    while left:
        name = left.pop()
        seen.add(name)
        left |= known.get(name, set()) - seen
    return bool(seen & {"Table", "Sheet", "to_table"})


def commands() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in (pair for section in SECTIONS.values() for pair in section.items()):
        if hasattr(command, "registered_commands"):
            for one in command.registered_commands:
                found[f"{name} {one.name or one.callback.__name__}"] = one.callback
        else:
            found[name] = command
    return found


def test_every_command_that_prints_a_table_has_the_option_and_a_document_here() -> None:
    tables = {name for name, function in commands().items() if _prints_a_table(function)}
    having = {name for name, function in commands().items() if "as_json" in inspect.signature(function).parameters}
    assert tables - having == set()
    others = {"blame", "convert", "generate", "judge", "predict"}
    assert having - tables == others, "these print lines; generate texts, one object a line"
    names = {name.partition(" of ")[0].partition(" --")[0] for name in COMMANDS}
    assert tables == names


def test_the_option_is_named_and_explained_alike() -> None:
    for name, function in commands().items():
        parameter = inspect.signature(function).parameters.get("as_json")
        if parameter is not None and name != "generate":
            (info,) = parameter.annotation.__metadata__
            assert info.help == "Print everything as one JSON document.", name
