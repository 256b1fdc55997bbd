"""Tests of logs in object stores, by fsspec's store in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cordillera.data.paths import expand_paths
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.features import Schema
from cordillera.errors import DataError, DependencyError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MemoryFileSystem, str]]:
    """A store in memory with a folder of its own, and the cache in the test's folder."""
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    system, bucket = fsspec.filesystem("memory"), f"bucket-{uuid.uuid4().hex[:8]}"
    system.makedirs(f"/{bucket}")
    yield system, bucket
    system.rm(f"/{bucket}", recursive=True)


def put(store: tuple[MemoryFileSystem, str], name: str, content: str) -> None:
    system, bucket = store
    system.makedirs(f"/{bucket}/{name}".rpartition("/")[0], exist_ok=True)
    system.pipe_file(f"/{bucket}/{name}", content.encode())


def named(paths: tuple[Path, ...], bucket: str) -> list[str]:
    return [str(path).partition(f"/{bucket}/")[2] for path in paths]


def test_files_folders_and_patterns_are_copied(store: tuple[MemoryFileSystem, str]) -> None:
    _, bucket = store
    for name in ("dt=2/b.csv", "dt=1/a.csv", "dt=1/_SUCCESS", "_temporary/c.csv", "dt=1/.d.csv", "notes.txt"):
        put(store, name, name)
    for address, expected in {
        f"memory://{bucket}/dt=1/a.csv": ["dt=1/a.csv"],
        f"memory://{bucket}": ["dt=1/a.csv", "dt=2/b.csv", "notes.txt"],
        f"memory://{bucket}/**/*.csv": ["dt=1/a.csv", "dt=2/b.csv"],
        f"memory://{bucket}/dt=*": ["dt=1/a.csv", "dt=2/b.csv"],
    }.items():
        found = expand_paths(address)
        assert named(found, bucket) == expected, address
        assert [path.read_text() for path in found] == expected


def test_a_copy_is_made_once_and_again_when_the_original_changes(
    store: tuple[MemoryFileSystem, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bucket = store
    put(store, "a.csv", "one")
    fetched: list[str] = []
    get = MemoryFileSystem.get_file

    def counted(self: MemoryFileSystem, file: str, *arguments: Any, **options: Any) -> Any:
        fetched.append(file)
        return get(self, file, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", counted)
    first = expand_paths(f"memory://{bucket}")
    assert expand_paths(f"memory://{bucket}") == first
    assert len(fetched) == 1
    put(store, "a.csv", "two, longer")
    second = expand_paths(f"memory://{bucket}")
    assert [first[0].read_text(), second[0].read_text()] == ["one", "two, longer"]
    assert len(fetched) == 2


def test_a_transfer_that_breaks_leaves_no_copy(
    store: tuple[MemoryFileSystem, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, bucket = store
    put(store, "a.csv", "content")

    def breaks(self: MemoryFileSystem, file: str, target: str) -> None:
        Path(target).write_text("con")
        raise ConnectionError("the line is dead")

    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "get_file", breaks)
        with pytest.raises(DataError, match=r"memory://.*: '.*a.csv' cannot be read \(the line is dead\)"):
            expand_paths(f"memory://{bucket}")
    assert not [one for one in (tmp_path / "cache").rglob("*") if one.is_file()]
    assert expand_paths(f"memory://{bucket}")[0].read_text() == "content"


def test_what_cannot_be_reached_is_one_error(store: tuple[MemoryFileSystem, str]) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        expand_paths(f"memory://{store[1]}/absent.csv")
    with pytest.raises(DataError, match="there is no such file"):
        expand_paths(f"memory://{store[1]}/*.csv")
    with pytest.raises(DataError, match="nowhere"):
        expand_paths("nowhere://bucket/a.csv")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(DependencyError, match="s3fs"):
            expand_paths("s3://bucket/a.csv")


def test_a_log_in_a_store_is_prepared_as_one_on_the_disk(store: tuple[MemoryFileSystem, str], tmp_path: Path) -> None:
    _, bucket = store
    schema = Schema.model_validate(
        {"labels": ["click"], "dense": [{"name": "price"}], "categorical": [{"name": "item"}, {"name": "dt"}]}
    )
    for day in range(3):
        frame = pl.DataFrame(
            {"click": [row % 2 for row in range(40)], "item": [row % 7 for row in range(40)], "price": range(40)}
        )
        (tmp_path / f"log/dt={day}").mkdir(parents=True)
        frame.write_csv(tmp_path / f"log/dt={day}/part.csv")
        put(store, f"log/dt={day}/part.csv", frame.write_csv())
    near, far = (
        prepare(DataConfig.model_validate({"path": path, "schema": schema}), progress=False)
        for path in (str(tmp_path / "log"), f"memory://{bucket}/log")
    )
    assert near.folder != far.folder
    for name in ("train", "validation", "test"):
        ours, theirs = (getattr(one, name).batch(slice(None)) for one in (near, far))
        assert (ours.sparse.values == theirs.sparse.values).all()
        assert (ours.dense == theirs.dense).all()
    assert set(far.encoder.vocabularies["dt"]) == {"0", "1", "2"}
