"""Names from outside are printed as they are: brackets are no markup, and nothing in them steers the terminal."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Column, Table

from cordillera.cli import _show, _terminal, _with_options, generate, plan, quantize
from cordillera.cli._show import console, echo
from cordillera.cli._terminal import PlainConsole, ProgressLines, Terminal
from cordillera.cli.app import options_of
from cordillera.errors import DataError, printable
from cordillera.numerics.inference.selection import Change
from cordillera.recipe import load
from cordillera.serving.language.language_model import Completion
from cordillera.training.language.trainer import LanguageEvaluation
from tests.fuzzing import CONTROLS

from .conftest import RECIPE, write_log

NASTY = [
    "[/x]",
    "[bold]",
    "[/nope]",
    "[red]a[/red]",
    "\\[b]",
    "a\x1b[2J",
    "b\x07",
    "c\u202e",
    "d\x9b",
    "e\x7f",
    ":smile:",
]
STEERS = frozenset(chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))) | CONTROLS


def safe(text: str) -> bool:
    return not STEERS & set(text)


@pytest.mark.parametrize("name", [*NASTY, "two\nlines", "half \ud800"])
def test_strings_are_printed_as_they_are(name, capsys):
    out = console()
    table = Table(name, title=name, caption=name)
    table.add_row(printable(name))
    out.print(table)
    out.print(name)
    echo(name)
    console(stderr=True).print(name)
    found = capsys.readouterr()
    shown = printable(name, lines=True)
    assert all(found.out.count(line) >= 5 for line in shown.splitlines())
    assert shown in found.err
    assert safe(found.out + found.err)
    echo(json.dumps(name, ensure_ascii=False), json=True)
    printed = capsys.readouterr().out
    assert json.loads(printed) == name
    assert safe(printed)


def test_labels_and_categories_of_any_name_go_through_every_command(cli, tmp_path):
    label, feature, segment = "click[/x]", "pri[bold]ce\x1b[2J", "dev\u202eice[/nope]"
    log = write_log(tmp_path / "[red]log.csv", rows=600)
    lines = log.read_text().replace("phone", "[/nope]").replace("tablet", "t\x1b[2J\x07").split("\n")
    lines[0] = f"id,time,user,{segment},{feature},seen,{label}"
    log.write_text("\n".join(lines))
    path = tmp_path / "[b]small.toml"
    text = RECIPE.replace("epochs = 6", "epochs = 1").format(path=str(log))
    for old, new in (('"price"', feature), ('"device"', segment), ('"click"', label)):
        text = text.replace(old, json.dumps(new))
    path.write_text(text)
    run = "runs/[bold]r"
    shown = []
    for arguments in (
        ["train", path, "--run", run],
        ["evaluate", run],
        ["evaluate", run, "--json"],
        ["predict", run, log, "--out", "[i]s.csv"],
        ["report", run],
        ["compare", run],
        ["compare", run, "--markdown"],
        ["recipe", "show", run],
        ["inject", run, "-n", "32", "--samples", "32"],
        ["watch", run, log],
        ["train", run],
    ):
        done = cli(*arguments)
        assert done.code == (2 if arguments == ["train", run] else 0), done.err
        assert safe(done.out + done.err), arguments
        assert "Traceback" not in done.err
        shown.append(done.out + done.err)
    assert label in shown[1]
    assert "[bold]r" in shown[5]
    (tmp_path / "again.toml").write_text(shown[7])
    assert cli("recipe", "show", "again.toml").out == shown[7]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "[/x]\x1b[2J"],
        ["train", "\udcff"],
        ["[/x]\x1b[2J"],
        ["predict", "--\x1b[2J[/x]=3", "a"],
        ["predict", "run", "file", "--batch-size", "[/x]\x1b[2J"],
        ["data", "describe", "[/x]\x07"],
        ["evaluate", "[/x]\x07\u202e"],
        ["train", "movielens-wukong", "--set", "[/x]\x1b[2J=1"],
        ["plan", "[/x]\x1b[2J", "[/y]\x07"],
    ],
)
def test_mistakes_on_the_command_line_are_quoted_as_they_are(cli, arguments):
    done = cli(*arguments)
    assert done.code == 2
    assert safe(done.out + done.err)
    assert any(word in done.err for word in ("[/x]", "\\udcff", "whole number"))


@pytest.mark.slow
def test_a_terminal_of_another_encoding_gets_escapes_and_warnings_are_escaped():
    code = (
        "import sys, warnings; sys.argv = ['cordillera', 'data', 'describe', 'caf\\xe9[/x]']\n"
        "from cordillera.cli import main\n"
        "try:\n    main()\nfinally:\n    warnings.warn('of \\x1b[2J[/y]')\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    assert "caf\\xe9[/x]" in done.stderr
    assert "of \\x1b[2J[/y]" in done.stderr


def test_json_and_recipes_are_utf_8_where_the_locale_is_not(cli, tmp_path, monkeypatch):
    def printed(call):
        output = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1", errors="backslashreplace")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            call()
        return output.buffer.getvalue()

    said = {"name": "caf\xe9 \U0001f600"}
    assert json.loads(printed(lambda: _show.print_json(said)).decode()) == said
    answer = Completion(said["name"])
    told = json.loads(printed(lambda: generate._finish(["\xe9"], [answer], as_json=True, quiet=True)).decode())
    assert (told["prompt"], told["text"]) == ("\xe9", said["name"])
    found = []
    shown = printed(lambda: found.append(cli("recipe", "show", "movielens-lr", "--set", f"description={said['name']}")))
    assert found[0].code == 0, found[0].err
    (tmp_path / "mine.toml").write_bytes(shown)
    assert load(tmp_path / "mine.toml").description == said["name"]


def test_output_is_dropped_once_the_terminal_is_gone_and_other_errors_are_raised():
    class Failing:
        def __init__(self, number):
            self.number = number

        def write(self, text):
            raise OSError(self.number, "fails")

        def flush(self):
            raise OSError(self.number, "fails")

    gone = Terminal(Failing(errno.EIO))
    assert gone.write("three") == 5
    gone.flush()
    for call in (lambda: Terminal(Failing(errno.ENOSPC)).write("three"), Terminal(Failing(errno.ENOSPC)).flush):
        with pytest.raises(OSError, match="fails"):
            call()


def test_both_outputs_of_a_gone_terminal_are_turned_to_nothing(monkeypatch):
    gone, turned = {1, 2}, []

    def write(number, content):
        if number in gone:
            raise OSError(errno.EIO, "fails")
        return len(content)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "dup2", lambda source, number: turned.append(number))
    Terminal(io.StringIO())._drop(OSError(errno.EIO, "fails"))
    gone.remove(1)
    Terminal(io.StringIO())._drop(OSError(errno.EIO, "fails"))
    assert turned == [1, 2, 2]


def cells(table):
    """The cells of a table, by rows, the headings first."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_metrics_stand_under_their_headings():
    metrics = {"ne": 0.9, "auc": 0.7, "gauc": math.nan, "ranking_k": 10.0, "log_loss": 0.5, "calibration": 1.01}
    metrics |= {"positives": 25.0, "examples": 200.0}
    empty = dict.fromkeys(metrics, math.nan) | {"examples": 0.0}
    found = {"split": "test", "examples": 1200, "metrics": lambda: {"click": metrics, "buy": empty}, "steps": 40}
    assert (
        _show.evaluation_table(SimpleNamespace(**found, step=30)).title
        == "test split, 1,200 examples, weights of step 30"
    )
    table = _show.evaluation_table(SimpleNamespace(**found, step=40))
    assert table.title == "test split, 1,200 examples"
    assert cells(table) == [
        ["task", "NE", "AUC", "GAUC", "log loss", "calibration", "positives"],
        ["click", "0.9000", "0.7000", "undefined", "0.5000", "1.0100", "12.5 %"],
        ["buy", *["undefined"] * 6],
    ]
    weighted = {**metrics, "weight": 450.0, "base_rate": 0.3}
    assert [
        [row[0], row[-1]]
        for row in cells(
            _show.evaluation_table(SimpleNamespace(**{**found, "metrics": lambda: {"click": weighted}}, step=40))
        )
    ] == [["task", "positives (weighted)"], ["click", "30.0 %"]]
    del metrics["ranking_k"], empty["ranking_k"]  # without groups
    assert cells(_show.evaluation_table(SimpleNamespace(**found, step=40)))[0] == [
        "task", "NE", "AUC", "log loss", "calibration", "positives"
    ]  # fmt: skip


def test_metrics_of_groups_stand_in_a_table_of_their_own_that_fits_80_columns():
    top = {"ndcg": 0.31, "recall": math.nan, "mrr": 0.2}
    top |= {"ranking_k": 10.0, "ranking_groups": 12_345_678.0, "ranking_excluded_groups": 1_234_567.0}
    tasks = {"click": {"ne": 0.9}, "a rating of four": top}
    (table,) = _show.group_tables(SimpleNamespace(metrics=lambda: tasks))
    assert table.title == "the top 10 of each group by score"
    assert cells(table) == [
        ["task", "NDCG@10", "recall@10", "MRR@10", "groups", "without a positive"],
        ["a rating of four", "0.3100", "undefined", "0.2000", "12,345,678", "1,234,567"],
    ]
    assert _show.group_tables(SimpleNamespace(metrics=lambda: {"click": {"ne": 0.9}})) == []
    file = io.StringIO()
    Console(file=file, width=80).print(table)
    assert "click" not in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert len(file.getvalue().splitlines()) == 3  # no cell is broken


def test_choices_and_layers_of_a_quantisation_stand_under_their_headings():
    selection = SimpleNamespace(
        options={"table user": "int4", "layer top": "fp32"},
        alone={"table user": Change(2e-4, 1e-4, 3e-4)},
        evaluated=(),
    )
    layers = [SimpleNamespace(name="top", kernel="int8 static", alone_db=33.24, in_place_db=29.5)]
    outcome = SimpleNamespace(
        selection=selection, layers=layers, bytes=(200, 50), ne=(0.8, 0.9), seconds=(4e-3, 2e-3),
        searched=Change(1e-4, -1e-4, 3e-4), confirmed=None, sweep=12,
    )  # fmt: skip
    parts, beside = map(cells, quantize._tables(outcome).values())
    summary = cells(quantize._summary(outcome, 2e-4))
    assert parts[1:] == [["table user", "int4", "NE +0.0200 %"], ["layer top", "fp32", ""]]
    selection.alone = {}
    assert cells(quantize._tables(outcome)["parts"])[0] == ["part", "kept as"]
    assert beside[1] == ["top", "int8 static", "33.2", "29.5"]
    assert summary[1:5] == [
        ["bytes", "200", "50", "25.0 %"],
        ["NE", "0.800000", "0.900000", "1.125000"],
        ["a batch of 256", "4.00 ms", "2.00 ms", "2.00 times as fast"],
        ["NE, searched", "", "+0.0100 %", "-0.0100 to +0.0300; not shown to be within the budget"],
    ]


def test_a_line_about_a_language_model_says_loss_perplexity_and_bits():
    assert _show.language_line(LanguageEvaluation(2.0, 7.389, 0.5, 1234, 1.0)) == (
        "loss 2.0000 nats a token, perplexity 7.39, 0.500 bits a byte (1,234 tokens)"
    )
    assert "bits" not in _show.language_line(LanguageEvaluation(2.0, 7.389, math.nan, 1234, 1.0))
    record = {"loss": 2.0, "tokens_per_second": 1234.4, "mfu": 0.256, "skipped": 3}
    assert _show._note(record) == "loss 2.0000  1,234 tokens/s  MFU 26 %  3 skipped"
    assert _show._note(record | {"mfu": None, "skipped": 0}) == "loss 2.0000  1,234 tokens/s"
    assert (
        _show._note({"loss": 2.0, "examples_per_second": 1e4, "epoch": 0}) == "epoch 1  loss 2.0000  10,000 examples/s"
    )


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.text("ab ", max_size=12), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(32, 100),
    st.randoms(use_true_random=False),
)
def test_no_number_and_no_word_of_a_table_is_broken(columns, rows, width, random):
    table = _show.titled_table("a", *(head for head, right in columns if not right))
    for head, right in columns:
        if right:
            table.add_column(head, justify="right")
    kinds = sorted(right for _, right in columns)
    texts = [
        [f"{random.randrange(10**9):,} s" if right else " ".join(random.choices(["word", "longer", "a"], k=4))
         for right in kinds]
        for _ in range(rows)
    ]  # fmt: skip
    for row in texts:
        table.add_row(*row)
    file = io.StringIO()
    screen = PlainConsole(file)
    screen.width = width
    screen.print(table)
    shown = file.getvalue()
    assert max(map(len, shown.splitlines()), default=0) <= width
    for right, cell in ((right, cell) for row in texts for right, cell in zip(kinds, row, strict=True)):
        assert all(part in shown.split() for part in cell.split())
        assert not right or cell in shown


def test_lines_are_not_wrapped_in_a_file_unless_columns_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _show.titled_table("", *(f"heading{place}" for place in range(40)))
    table.add_row(*(f"value{place}" for place in range(40)))
    for columns, lines in ((None, 2), ("60", 40)):  # headings and values, or a line for each value
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        file = io.StringIO()
        PlainConsole(file).print(table)
        assert len(file.getvalue().strip().splitlines()) == lines


class Waiting(io.StringIO):
    """A file that knows when it has got so many lines."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.wanted, self.has_come = lines, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= self.wanted:
            self.has_come.set()
        return written


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of progress every 10 ms."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("cordillera.cli._terminal._FIRST_S", 0.01)
    monkeypatch.setattr("cordillera.cli._terminal._LONGEST_S", 0.01)


@pytest.mark.usefixtures("often")
def test_long_work_says_where_it_is_in_a_file() -> None:
    file = Waiting(20)
    with _show.training_progress(PlainConsole(file)) as (on_step, _):
        record = {"loss": 0.25, "epoch": 0, "examples_per_second": 1234.0}
        on_step(record, SimpleNamespace(step=7, best_text="best NE 0.8"), 40)
        assert file.has_come.wait(60)
    lines = file.getvalue().splitlines()
    said = re.escape("training  best NE 0.8  7/40  epoch 1  loss 0.2500  1,234 examples/s")
    assert re.match(rf"\d\d:\d\d:\d\d  {said}", lines[-1])
    with _show.training_progress(PlainConsole(file), quiet=True) as (on_step, _):
        on_step({}, SimpleNamespace(step=1), 40)
        time.sleep(0.05)
    assert file.getvalue().splitlines() == lines  # nothing after the end, and nothing when quiet


@pytest.mark.usefixtures("often")
def test_work_that_does_not_report_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Waiting(3)
    monkeypatch.setattr(sys, "stderr", file)
    with _show.work_shown("looking"):
        assert file.has_come.wait(60)
    assert all(
        re.fullmatch(r"(\S+ )?\d\d:\d\d:\d\d  looking  0:0\d:\d\d", line) for line in file.getvalue().splitlines()
    )


@pytest.mark.usefixtures("often")
def test_lines_that_cannot_be_written_do_not_end_the_work() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            asked.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked = threading.Event()
    with _show.training_progress(PlainConsole(Full())):
        assert asked.wait(60)


def test_a_terminal_that_is_closed_meanwhile_does_not_end_the_work() -> None:
    """A bar that was drawn is ended as one, though its file is no terminal any more."""

    class Screen(io.StringIO):
        is_open = True

        def isatty(self) -> bool:
            return self.is_open

    screen = Screen()
    with _show.training_progress(PlainConsole(screen)) as (on_step, _):
        on_step({}, SimpleNamespace(step=1), 40)
        screen.is_open = False


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["generate", "smollm2", "hi", "--temperature", "-1"], "--temperature"),
        (["generate", "smollm2", "hi", "--drafter", "nothing"], "--drafter"),
        (["plan", "llama3-8b", "a100-node", "--slow", "-1"], "--slow"),
        (["plan", "llama3-8b", "a100-node", "--layout", "tensor"], "--layout"),
        (["search", "movielens-dnn", "--space", "blocks", "--searcher", "nothing"], "--searcher"),
    ],
)
def test_errors_name_options_as_the_command_has_them(cli, arguments, option):
    result = cli(*arguments)
    assert result.code == 2
    assert result.err.startswith(f"error: {option}")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("slow, jitter, lose", "--slow, --jitter, --lose: is wrong"),
        ("slow 1.2", "--slow 1.2: is wrong"),
        ("layouts", "--layout: is wrong"),
        ("slow = 'x'", "slow = 'x': is wrong"),
        ("slow, line 2", "slow, line 2: is wrong"),
        ("fast", "fast: is wrong"),
        ("a/slow", "a/slow: is wrong"),
    ],
)
def test_only_names_of_options_are_written_as_options(where, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cordillera", "plan", "w", "c"])
    assert _with_options(DataError("is wrong", where=where)) == said


def test_arguments_of_functions_are_options_of_the_command_that_has_them():
    assert options_of(["plan", "w", "c", "--set", "a=1"])["changes"] == "--set"
    assert options_of(["-q", "train", "r"])["processes"] == "--nproc"
    assert options_of(["data", "get", "adult"])["export_to"] == "--export"
    assert "file" not in options_of(["predict", "run", "file.csv"])  # an argument without an option
    assert options_of(["evaluate", "run"])["file"] == "--file"
    assert options_of(["towers", "run"])["towers"] == "--towers"  # whose argument is called otherwise
    assert "out" not in options_of(["export", "run"])  # errors name the file itself
    assert options_of(["no", "such", "command"]) == options_of([]) == {}


def test_commands_to_go_on_with_can_be_pasted_into_a_shell(cli, tmp_path):
    log = write_log(tmp_path / "my log.csv")
    shown = cli("recipe", "new", log, "--label", "click", "--out", "my own.toml")
    assert "look it over, then: cordillera train 'my own.toml'\n" in shown.out
    assert _show.to_type("train", "runs/a", "--resume") == "cordillera train runs/a --resume"


DUMB = {"force_terminal": True, "_environ": {"TERM": "dumb"}}  # draws nothing, as Emacs' shell and many logs of jobs


@pytest.mark.parametrize("terminal", [{}, DUMB], ids=["file", "dumb terminal"])
def test_lines_of_progress_begin_with_the_local_time_the_first_with_the_date(monkeypatch, terminal):
    monkeypatch.setattr(_terminal, "_FIRST_S", 0.01)
    monkeypatch.setattr(_terminal, "_LONGEST_S", 0.01)
    file = io.StringIO()
    with ProgressLines(TextColumn("{task.description}"), console=Console(file=file, width=200, **terminal)) as bar:
        bar.add_task("preparing", total=None)
        until = time.monotonic() + 20
        while file.getvalue().count("\n") < 3 and time.monotonic() < until:
            time.sleep(0.01)
    first, *others = file.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  preparing", first)
    assert all(re.fullmatch(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d  preparing", line) for line in others)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  preparing", others[0]) or first[:10] != time.strftime("%Y-%m-%d")
    assert abs(time.mktime(time.strptime(first[:19], "%Y-%m-%d %H:%M:%S")) - time.time()) < 60


def test_long_work_is_told_where_there_is_no_terminal(cli, monkeypatch, capsys):
    def prepare(config):
        time.sleep(0.3)
        raise DataError("that is enough")

    def measure(shapes, path, on_product):
        time.sleep(0.3)
        return SimpleNamespace(new=0, too_large=0, left=0, products=None)

    monkeypatch.setattr(_terminal, "_FIRST_S", 0.01)
    monkeypatch.setattr("cordillera.data.ranking.datasets.prepare", prepare)
    monkeypatch.setattr("cordillera.kernels.products.measure_table", measure)
    for command in ("get", "describe"):
        assert re.search(r"\d  preparing synthetic  0:00:00\n", cli("data", command, "synthetic").err)
    plan._measure(_show.CommandOutput(False), [], Path("products.csv"))
    told = capsys.readouterr().err
    assert re.search(r"\d  measuring  0/0  0:00:00\n", told)
    assert not told.endswith("\n\n")


def test_warnings_stay_in_the_file_to_which_standard_error_leads_while_a_bar_is_drawn(monkeypatch):
    terminal, log = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    drawn = Console(file=terminal, force_terminal=True, _environ={"TERM": "xterm"})
    with ProgressLines(TextColumn("{task.description}"), console=drawn, transient=True) as bar:
        bar.add_task("preparing", total=None)
        print("warning: a", file=sys.stderr)
    assert log.getvalue() == "warning: a\n"
    assert "preparing" in terminal.getvalue()
    assert "warning" not in terminal.getvalue()


def test_the_time_since_the_beginning_stays_when_steps_begin_to_be_counted():
    now = [100.0]
    bar = ProgressLines(console=Console(file=io.StringIO()), get_time=lambda: now[0])
    task = bar.add_task("preparing", total=None, note="n")
    left = _show._TimeLeft(False, Column())
    now[0] += 12
    bar.reset(task, total=100, completed=1)
    bar.update(task, completed=2)
    now[0] += 2
    bar.update(task, completed=4)
    assert bar.tasks[0].elapsed == 14
    assert bar.tasks[0].fields["note"] == "n"
    assert left.render(bar.tasks[0]).plain == "0:00:14 elapsed", "two seconds of steps say little"
    now[0] += 4
    bar.update(task, completed=7)
    assert left.render(bar.tasks[0]).plain.endswith(" left")


def test_long_preparation_has_its_usual_reason_beside_it():
    now = [100.0]
    bar = ProgressLines(console=Console(file=io.StringIO()), get_time=lambda: now[0])
    task, column = bar.add_task("preparing", total=None), _show._Doing()
    assert column.render(bar.tasks[0]).plain == "preparing"
    now[0] += 20
    assert column.render(bar.tasks[0]).plain == "preparing (kernels may be compiled)"
    bar.update(task, description="training")
    assert column.render(bar.tasks[0]).plain == "training"
