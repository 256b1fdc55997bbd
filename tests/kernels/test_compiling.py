"""Compiled code is fresh only as long as all files that it was made of are the same."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from cordillera.kernels.compiled_files import digest_of_imports
from cordillera.kernels.embeddings import numba_mixed_rows, numba_rows

CALLEE = """
from cordillera.kernels.compiling import compiled

@compiled()
def number():
    return {number}
"""
CALLER = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("cordillera.kernels.callee", __file__.replace("caller", "callee"))
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
from cordillera.kernels.callee import number
from cordillera.kernels.compiling import compiled

@compiled()
def twice():
    return 2 * number()

printed = twice(), sum(twice.stats.cache_hits.values())
"""


def test_a_function_that_changed_is_compiled_anew_into_those_that_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba itself would go on with the old number, for the caller's file did not change."""
    # Python's own cache would take files of one size and second for equal
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "cordillera.kernels.callee", sys)
    (tmp_path / "caller.py").write_text(CALLER)
    printed = []
    for number in (3, 3, 4):
        (tmp_path / "callee.py").write_text(CALLEE.format(number=number))
        digest_of_imports.cache_clear()  # as in a new process
        printed.append(runpy.run_path(str(tmp_path / "caller.py"))["printed"])
    assert printed == [(6, 0), (6, 1), (8, 0)]


def test_files_count_that_are_imported_through_others(tmp_path: Path) -> None:
    for name, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "absent")):
        (tmp_path / f"{name}.py").write_text(f"from cordillera.kernels.{imported} import x\n")
    digest_of_imports.cache_clear()
    before = {name: digest_of_imports(tmp_path / f"{name}.py") for name in "abcd"}
    (tmp_path / "c.py").write_text("from cordillera.kernels.a import y\n")
    digest_of_imports.cache_clear()
    after = {name: digest_of_imports(tmp_path / f"{name}.py") for name in "abcd"}
    assert [before[name] != after[name] for name in "abcd"] == [True, True, False, False]
    assert before["d"] == ""


def test_kernels_of_rows_depend_on_how_a_row_is_decoded() -> None:
    kernel = numba_mixed_rows._lookup
    assert kernel._cache._cache_file._source_stamp[1] == digest_of_imports(Path(numba_mixed_rows.__file__))
    assert "from cordillera.kernels.embeddings.numba_rows import" in Path(numba_mixed_rows.__file__).read_text()
    assert Path(numba_rows.__file__).is_file()
    assert digest_of_imports(Path(numba_mixed_rows.__file__))


CODE = """
import os, pwd, sys
def unknown(user): raise KeyError(user)
pwd.getpwuid = unknown
sys.argv = ["cordillera", "--version"]
from cordillera.cli import main
try:
    main()
except SystemExit:
    pass
print(os.environ.get("NUMBA_CACHE_DIR"), os.path.isdir(os.environ.get("NUMBA_CACHE_DIR", "-")))
"""


@pytest.mark.parametrize("given", [{}, {"CORDILLERA_CACHE": "kept"}, {"NUMBA_CACHE_DIR": "own"}, {"HOME": "/"}])
def test_without_a_home_folder_compiled_code_has_another_place_than_one_named_like_it(
    tmp_path: Path, given: dict[str, str]
) -> None:
    """Numba itself would make a folder ``~`` in the working directory."""
    names = ("HOME", "CORDILLERA_CACHE", "NUMBA_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"TMPDIR": str(tmp_path), **given}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    place, is_made = done.stdout.split("\n")[1].split()
    if not given:
        assert Path(place).parent == tmp_path
        assert is_made == "True"
        assert not Path(place).exists(), "it is removed at the end"
    elif "HOME" in given:
        assert place == "None"
    else:
        assert place == given.get("NUMBA_CACHE_DIR", str(tmp_path / "kept" / "numba"))
