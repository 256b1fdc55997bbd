"""bench --stale: a figure is stale when code that it depends on has changed, and only then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import _sources
import _stale
import pytest

PROGRAM = '''
import enum
import multiprocessing
import subprocess
import sys
from _program import Program
from _helper import clock, started
from cordillera.kernels import product
from cordillera.numerics.sums import Sum, Terms

class Part(str, enum.Enum):
    fast = "fast"
    exact = "exact"
    apart = "apart"

SIZE = 4

def _fast(quick):
    return {"figure": product.multiply(SIZE) + clock()}

def _exact(quick):
    """Words."""
    return {"figure": Sum(Terms(SIZE)).total()}

def _worker(size):
    return product.multiply(size)

def _script():
    return subprocess.run([sys.executable, started("_script.py")], check=True).returncode

def _apart(quick):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return {"figure": pool.apply(_worker, (SIZE,)) + _script()}

PARTS = {Part.fast: _fast, Part.exact: _exact, Part.apart: _apart}
main = Program("some-thing", PARTS, "Measure something.").command()

if __name__ == "__main__":
    import typer
    typer.run(main)
'''
SUMS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from cordillera.errors import DataError

@dataclass
class Terms:
    size: int
    step: int = 1
    order: Literal["up"] | None = "up"

class Base:
    def total(self):
        return 0

    def finish(self, value):
        if value < 0:
            raise DataError("is negative", f"{value} of 2")
        for one in (value,):
            if one > 10**9:
                raise DataError("is large")
        return value

class Sum(Base):
    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def total(self):
        def inner():
            from cordillera.kernels.product import factor
            return factor() * self.terms.size
        return self.finish(inner())

    def spare(self):
        return DataError()
"""
FILES = {
    "benchmarks/some_thing.py": PROGRAM,
    "benchmarks/_helper.py": "import time\nfrom pathlib import Path\nclock = time.perf_counter\n"
    "def started(name):\n    return str(Path(__file__).with_name(name))\n",
    "benchmarks/_script.py": "from cordillera.kernels.product import factor\n\ndef unused():\n    return 1\n\n"
    "factor()\n",
    "src/numba.py": "def njit(function):\n    return function\n",  # the true one takes a second in each process
    "src/cordillera/__init__.py": "",
    "src/cordillera/kernels/__init__.py": "",
    "src/cordillera/kernels/product.py": "import numba\n\ndef twice(n):\n    return 2 * n\n\n"
    "@numba.njit\ndef doubled(n):\n    return n + n\n\n@numba.njit\ndef unused(n):\n    return n\n\n"
    "def multiply(n):\n    return KINDS['one'](n) if n else unused(n)\n\nKINDS = {'one': doubled}\n\n"
    "def factor():\n    return 2\n",
    "src/cordillera/numerics/__init__.py": "",
    "src/cordillera/numerics/sums.py": SUMS,
    "src/cordillera/errors.py": "class DataError(Exception):\n    x = 1\n",
}
PRODUCT, SUM = "src/cordillera/kernels/product.py", "src/cordillera/numerics/sums.py"
PARTS = ("fast", "exact", "apart")
COPIED = ("_machine", "_program", "_recorder", "_renames", "_results", "_sources", "_tables")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a benchmark and its result files."""
    folder = tmp_path_factory.mktemp("checkout")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in COPIED:
        shutil.copy(_sources.BENCHMARKS / f"{name}.py", folder / "benchmarks")
    command = [sys.executable, "benchmarks/_recorder.py", "benchmarks/some_thing.py", "--results", "results"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120, capture_output=True)
    return folder


@pytest.fixture
def checkout(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout whose files may be changed."""
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "results").glob("*.json"):
        content = json.loads(file.read_text())
        content["machine"]["uncommitted_changes"] = False
        file.write_text(json.dumps(content))
    monkeypatch.setattr(_sources, "CHECKOUT", tmp_path)
    monkeypatch.setattr(_sources, "BENCHMARKS", tmp_path / "benchmarks")
    _forget()
    return tmp_path


def _forget() -> None:
    for cached in (_sources._parsed, _sources._digest, _sources._digests_here):
        cached.cache_clear()


def _changed(checkout: Path) -> dict[str, dict[str, int]]:
    _forget()
    ages = {part: _sources.age_of(checkout / "results" / f"some-thing-{part}.json") for part in PARTS}
    assert not any(age.problem for age in ages.values()), ages
    return {part: dict(age.changed) for part, age in ages.items() if age.stale}


def _edit(checkout: Path, name: str, old: str, new: str) -> None:
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new))


def test_a_figure_is_fresh_while_only_words_and_other_code_change(checkout: Path) -> None:
    assert _changed(checkout) == {}
    _edit(
        checkout,
        SUM,
        "def total(self):\n        def",
        "def total(self: 'Sum') -> float:  # ah\n        'Sum.'\n        def",
    )
    _edit(checkout, SUM, "return DataError()", "return 1\n\n    def another(self):\n        return 2")  # did not run
    _edit(checkout, PRODUCT, "return 2 * n", "return 3 * n")  # ran nowhere
    _edit(checkout, PRODUCT, "'one': doubled}", "'one': doubled, 'two': twice}")
    _edit(checkout, SUM, "    step: int = 1", "    step: int = 1\n    other: int = 2")  # what reads it has not changed
    _edit(checkout, SUM, '["up"]', '["up", "down"]')  # nor has what a run may choose
    _edit(checkout, SUM, '"is negative", f"{value} of 2"', '"should be positive", f"{-value}"')  # or what an error says
    _edit(
        checkout, SUM, "if value < 0", "if value < -1 and not isinstance(value, str) and value not in (1, 2)"
    )  # or when a guard raises it
    _edit(
        checkout,
        SUM,
        "        return value",
        "        if len(value.shape) > value.shape[0]: raise DataError('shape')\n        return value",
    )
    _edit(checkout, "src/cordillera/errors.py", "x = 1", "x = 2")  # a module that only talks
    _edit(checkout, "benchmarks/some_thing.py", "Words.", "Other words.")
    assert _changed(checkout) == {}


PRODUCTS, SUMS_, PROGRAMS = "cordillera.kernels.product", "cordillera.numerics.sums", "some_thing"


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        (PRODUCT, "return 2\n", "return 3\n", {"exact": PRODUCTS, "apart": PRODUCTS}),
        (PRODUCT, "return KINDS['one'](n) if", "return KINDS['one'](n + 0) if", {"fast": PRODUCTS, "apart": PRODUCTS}),
        (PRODUCT, "return n + n", "return 2 * n", {"fast": PRODUCTS, "apart": PRODUCTS}),  # compiled
        (PRODUCT, "'one': doubled}", "'one': twice}", {"fast": PRODUCTS, "apart": PRODUCTS}),
        (SUM, "factor() * self", "factor() + self", {"exact": SUMS_}),
        (SUM, "step: int = 1", "step: int = 2", {"exact": SUMS_}),
        (SUM, '| None = "up"', '= "up"', {"exact": SUMS_}),
        (SUM, '= "up"', "= None", {"exact": SUMS_}),
        (SUM, "        return value", "        return value + 1", {"exact": SUMS_}),  # of a base class
        (SUM, "if value < 0", "if value @ value < 0", {"exact": SUMS_}),
        (SUM, "if value < 0", "if value in self.values", {"exact": SUMS_}),
        (SUM, "if one > 10**9", "if one > 10**8", {"exact": SUMS_}),  # in a loop
        (SUM, "raise DataError(", "raise PlanError(", {"exact": SUMS_}),  # a search goes on after it
        (SUM, "            raise DataError", "            raise ValueError from DataError", {"exact": SUMS_}),
        (SUM, "if value < 0", "if abs(value) < 0", {"exact": SUMS_}),  # a condition that may take time is no guard
        (SUM, "if value < 0", "if value[0] < 0", {"exact": SUMS_}),
        (SUM, "raise DataError", "value += 1\n            raise DataError", {"exact": SUMS_}),
        (SUM, "        return value", "        else:\n            value += 1\n        return value", {"exact": SUMS_}),
        (SUM, "    def spare", "    def finish(self, value):\n        return 1\n\n    def spare", {"exact": SUMS_}),
        ("benchmarks/_helper.py", "perf_counter", "process_time", {"fast": "_helper"}),
        ("benchmarks/_script.py", "return 1", "return 2", {"apart": "_script"}),
        ("benchmarks/some_thing.py", "SIZE = 4", "SIZE = 5", dict.fromkeys(PARTS, PROGRAMS)),
        ("benchmarks/some_thing.py", "product.multiply(size)", "-product.multiply(size)", {"apart": PROGRAMS}),
        ("benchmarks/some_thing.py", "Terms(SIZE)", "Terms(-SIZE)", {"exact": PROGRAMS}),
    ],
)  # fmt: skip
def test_a_figure_is_stale_when_code_at_work_changes(
    checkout: Path, name: str, old: str, new: str, changed: dict[str, str]
) -> None:
    _edit(checkout, name, old, new)
    assert _changed(checkout) == {part: {module: 1} for part, module in changed.items()}
    age = _sources.age_of(checkout / "results" / "some-thing-exact.json")
    assert age.command == "cordillera bench some-thing --part exact"


def test_a_definition_that_was_moved_is_the_same(checkout: Path) -> None:
    old, new = checkout / PRODUCT, checkout / "src/cordillera/kernels/dense/product.py"
    new.parent.mkdir()
    (new.parent / "__init__.py").write_text("")
    old.rename(new)
    for name in (SUM, "benchmarks/some_thing.py", "benchmarks/_script.py"):
        _edit(checkout, name, "cordillera.kernels", "cordillera.kernels.dense")
    assert _changed(checkout) == {}
    new.write_text(new.read_text().replace("return 2\n", "return 3\n"))
    assert _changed(checkout) == {"exact": {PRODUCTS: 1}, "apart": {PRODUCTS: 1}}


def test_what_cannot_be_told_is_stale(checkout: Path) -> None:
    content = json.loads((checkout / "results" / "some-thing-fast.json").read_text())
    changes: dict[str, dict[str, Any]] = {
        "other system": {"system": "other"},
        "no code": {"code": {}},
        "uncommitted": {"machine": {**content["machine"], "uncommitted_changes": True}},
    }
    texts = {name: json.dumps({**content, **change}) for name, change in changes.items()}
    for name, text in {**texts, "damaged": "{", "list": "[]"}.items():
        (checkout / f"{name}.json").write_text(text)
        age = _sources.age_of(checkout / f"{name}.json")
        assert age.stale
        assert age.problem


def test_the_listing_names_files_and_commands(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _stale.main(checkout / "results") == 0
    assert "0 of 3 result files are stale" in capsys.readouterr().out
    _edit(checkout, SUM, "factor() * self", "factor() + self")
    _forget()
    assert _stale.main(checkout / "results") == 1
    printed = capsys.readouterr().out
    assert "some-thing-exact.json" in printed
    assert "numerics.sums" in printed
    assert "1 of 3 result files are stale" in printed
