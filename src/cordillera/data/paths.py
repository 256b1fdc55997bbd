"""Files that a person names: places, folders, patterns and addresses of stores."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cordillera.data.files import cache_folder, disk_errors
from cordillera.errors import DataError, DependencyError


def expand_paths(path: str | Sequence[str]) -> tuple[Path, ...]:
    """Expand files, folders or patterns to files, in order; ``~`` is the home folder.

    Files of a folder are those in it and in its folders, sorted by path; names that begin with ``.`` or ``_`` are left
    out. In a pattern, ``**`` matches any number of folders.

    Addresses such as ``s3://bucket/folder`` are read by fsspec: their files are copied to ``remote`` in the cache,
    under the path of the original, and copied again when the original changes.

    Raises:
        DataError: a folder holds no files, a pattern matches no file, a path is not valid, or a store cannot be read.
        DependencyError: a store needs a package that is not installed.
    """
    files: list[Path] = []
    for name in [path] if isinstance(path, str) else path:
        if "://" in name:
            files += _fetch_files(name)
            continue
        try:
            files += _expand(name)
        except (OSError, ValueError, RuntimeError) as error:  # null bytes, unknown homes, lack of permission
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot be read ({reason})", where=name) from error
    return tuple(Path(os.path.abspath(file)) for file in files)


def _expand(name: str) -> list[Path]:
    place = Path(name).expanduser()
    if place.is_dir():
        inside = _files_in(place)
        if not inside:
            raise DataError("the folder holds no files", where=str(place))
        return inside
    if any(mark in name for mark in "*?[") and not place.exists():
        found: dict[Path, None] = {}
        for one in sorted(map(Path, glob.glob(str(place), recursive=True))):
            found |= dict.fromkeys(_files_in(one) if one.is_dir() else [one])
        if not found:
            raise DataError(
                "no file fits the pattern",
                where=str(place),
                remedy="correct the pattern, in quotation marks; ** stands for any number of folders",
            )
        return list(found)
    return [place]


def _files_in(folder: Path) -> list[Path]:
    """Return the files in a folder and the folders in it, sorted by path."""
    found, entered = [], set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        real = os.path.realpath(place)
        if real in entered:  # a link to a folder above it
            folders.clear()
            continue
        entered.add(real)
        folders[:] = [one for one in folders if not one.startswith((".", "_"))]
        found += [Path(place) / one for one in files if not one.startswith((".", "_"))]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _fetch_files(address: str) -> list[Path]:
    """Return copies of the files at an address, sorted by their paths."""
    import fsspec

    try:
        system, place = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise DependencyError(str(error), where=address, remedy="install the package that it names") from error
    except ValueError as error:
        raise DataError(str(error), where=address, remedy="correct the address") from error
    try:
        files = _files_at(system, place)
        copies = {file: _copy_of(system, file) for file in files}
        absent = {file: copy for file, copy in copies.items() if not copy.exists()}
        sizes = {file: system.size(file) for file in absent}
    except Exception as error:  # stores have error classes of their own
        raise DataError(f"cannot be read ({error or type(error).__name__})", where=address) from error
    if not files:
        raise DataError("there is no such file", where=address, remedy="correct the address")
    _fetch(system, absent, sizes, address)
    return list(copies.values())


def _files_at(system: Any, place: str) -> list[str]:
    if any(mark in place for mark in "*?["):
        found = [name for one in system.glob(place) for name in (system.find(one) if system.isdir(one) else [one])]
    elif system.isdir(place):
        found = system.find(place)
    else:
        return [place] if system.exists(place) else []
    return sorted({name for name in found if not _is_hidden(name.removeprefix(place))})


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _copy_of(system: Any, file: str) -> Path:
    """Return where the copy of a file is kept, in a folder for this version of it."""
    protocol = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    version = hashlib.sha256(f"{protocol}://{file} {system.ukey(file)}".encode()).hexdigest()[:16]
    parts = [part for part in file.split("/") if part not in ("", ".", "..")]
    return cache_folder() / "remote" / version / Path(*parts)


def _fetch(system: Any, copies: dict[str, Path], sizes: dict[str, int | None], address: str) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("fetching {task.description}"), BarColumn(10), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        known = [size for size in sizes.values() if size is not None]
        task = bar.add_task(f"{len(copies):,} files", total=sum(known) if len(known) == len(sizes) else None)
        for file, copy in copies.items():
            beside = copy.with_name(f".{copy.name}.{uuid.uuid4().hex[:8]}")
            try:
                with disk_errors(copy):
                    copy.parent.mkdir(parents=True, exist_ok=True)
                try:
                    system.get_file(file, str(beside))
                except Exception as error:
                    raise DataError(f"'{file}' cannot be read ({error})", where=address) from error
                with disk_errors(copy):
                    os.replace(beside, copy)
            finally:
                beside.unlink(missing_ok=True)
            bar.advance(task, sizes[file] or 0)
