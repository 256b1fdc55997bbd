"""bench --stale: a figure is stale when code that it depends on has changed, and only then."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import _sources
import _stale
import pytest

PROGRAM = '''
import enum
from cordillera.kernels import product
from cordillera.numerics.sums import total
from _helper import clock

class Part(str, enum.Enum):
    fast = "fast"
    exact = "exact"

SIZE = 4

def _fast(quick):
    return product.multiply(SIZE) + clock()

def _exact(quick):
    """Words."""
    return total(SIZE)

PARTS = {Part.fast: _fast, Part.exact: _exact}
'''
FILES = {
    "benchmarks/some_thing.py": PROGRAM,
    "benchmarks/_helper.py": "import time\nclock = time.perf_counter\n",
    "src/cordillera/__init__.py": "",
    "src/cordillera/kernels/__init__.py": "",
    "src/cordillera/kernels/product.py": "def multiply(n):\n    return n * factor()\n\ndef factor():\n    return 2\n"
    "\ndef spare():\n    return 0\n",
    "src/cordillera/numerics/__init__.py": "",
    "src/cordillera/numerics/sums.py": "from cordillera.errors import CordilleraError\n"
    "def total(n: int) -> int:\n    def inner():\n        from cordillera.kernels.product import factor\n"
    "        return factor() * n\n    return inner()\n",
    "src/cordillera/errors.py": "class CordilleraError(Exception):\n    x = 1\n",
}
PRODUCT, SUMS = "src/cordillera/kernels/product.py", "src/cordillera/numerics/sums.py"


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two result files, ``fast`` and ``exact``, that are fresh."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(_sources, "CHECKOUT", tmp_path)
    monkeypatch.setattr(_sources, "BENCHMARKS", tmp_path / "benchmarks")
    _sources._module.cache_clear()
    _sources._defined_at.cache_clear()
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-qm", "first")
    machine = {"date": "2026-11-21T10:00:00+00:00", "commit": _git(tmp_path, "rev-parse", "HEAD")}
    for part in ("fast", "exact"):
        content = {"system": "some-thing", "part": part, "machine": machine}
        (tmp_path / f"{part}.json").write_text(json.dumps(content))
    return tmp_path


def _changed(checkout: Path) -> dict[str, tuple[str, ...]]:
    ages = {part: _sources.age_of(checkout / f"{part}.json") for part in ("fast", "exact")}
    assert not any(age.problem for age in ages.values()), ages
    return {part: age.changed for part, age in ages.items() if age.stale}


def _edit(checkout: Path, name: str, old: str, new: str) -> None:
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new))


def test_a_figure_is_fresh_while_only_words_and_other_code_change(checkout: Path) -> None:
    assert _changed(checkout) == {}
    _edit(checkout, SUMS, "def total(n: int) -> int:", 'def total(n: "int") -> object:  # a comment\n    """Sum."""')
    _edit(checkout, PRODUCT, "return 0", "return 1")  # a function that no figure depends on
    _edit(checkout, "src/cordillera/errors.py", "x = 1", "x = 2")  # a module that only talks
    _edit(checkout, "benchmarks/some_thing.py", "Words.", "Other words.")
    assert _changed(checkout) == {}


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        (PRODUCT, "return 2", "return 3", dict.fromkeys(("fast", "exact"), ("cordillera.kernels.product",))),
        (SUMS, "factor() * n", "factor() + n", {"exact": ("cordillera.numerics.sums",)}),
        ("benchmarks/_helper.py", "perf_counter", "process_time", {"fast": ("_helper",)}),
        ("benchmarks/some_thing.py", "SIZE = 4", "SIZE = 5", {"fast": ("some_thing",), "exact": ("some_thing",)}),
        ("benchmarks/some_thing.py", "return total(SIZE)", "return -total(SIZE)", {"exact": ("some_thing",)}),
    ],
)  # fmt: skip
def test_a_figure_is_stale_when_code_that_it_depends_on_changes(
    checkout: Path, name: str, old: str, new: str, changed: dict[str, tuple[str, ...]]
) -> None:
    _edit(checkout, name, old, new)
    assert _changed(checkout) == changed
    assert _sources.age_of(checkout / "exact.json").command == "cordillera bench some-thing --part exact"


def test_a_definition_that_was_moved_is_the_same(checkout: Path) -> None:
    old, new = checkout / PRODUCT, checkout / "src/cordillera/kernels/dense/product.py"
    new.parent.mkdir()
    (new.parent / "__init__.py").write_text("")
    old.rename(new)
    for name in (SUMS, "benchmarks/some_thing.py"):
        path = checkout / name
        path.write_text(path.read_text().replace("cordillera.kernels", "cordillera.kernels.dense"))
    assert _changed(checkout) == {}
    new.write_text(new.read_text().replace("return 2", "return 3"))
    assert _changed(checkout) == dict.fromkeys(("fast", "exact"), ("cordillera.kernels.dense.product",))


def test_a_figure_of_uncommitted_code_is_stale(checkout: Path) -> None:
    content = json.loads((checkout / "fast.json").read_text())
    content["machine"]["uncommitted_changes"] = True
    (checkout / "fast.json").write_text(json.dumps(content))
    assert _sources.age_of(checkout / "fast.json").stale


def test_what_cannot_be_told_is_stale(checkout: Path) -> None:
    content = {"system": "some-thing", "part": "fast", "machine": {"date": "2026-11-21", "commit": "0" * 40}}
    for name, text in {
        "unknown": json.dumps(content),
        "gone": json.dumps({**content, "system": "other"}),
        "damaged": "{",
        "list": "[]",
    }.items():
        (checkout / f"{name}.json").write_text(text)
        age = _sources.age_of(checkout / f"{name}.json")
        assert age.stale
        assert age.problem


def test_the_listing_names_files_and_commands(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _stale.main(checkout) == 0
    assert "0 of 2 result files are stale" in capsys.readouterr().out
    _edit(checkout, SUMS, "factor() * n", "factor() + n")
    assert _stale.main(checkout) == 1
    printed = capsys.readouterr().out
    assert "exact.json" in printed
    assert "numerics.sums" in printed
    assert "1 of 2 result files are stale" in printed


def test_programs_of_workers_count() -> None:
    named = _sources.definitions_of("threads", "neighbours")
    assert "WARMUP" in named["_thread_worker"]
    assert "cordillera.training.language.engine" in named
    loading = _sources.definitions_of("llama", "loading")
    assert "read_model" in loading["cordillera.models.language.checkpoints"]
    assert "cordillera.training.language.engine" not in loading
