"""Checksums of files that are published without any: recorded when the files are first read, and compared later."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cordillera.data.files import cache_folder, checksum, write_bytes
from cordillera.errors import CheckpointError, DataError
from cordillera.files import read_sealed, sealed_json

_THREADS = 4


def record_of(files: Sequence[Path], cache_dir: str | Path | None = None) -> Path:
    """Return the path, in the cache, of the record of files that do not belong to a run; at least one file."""
    places = "\0".join(str(file.resolve()) for file in files)
    return cache_folder(cache_dir) / "first-sight" / f"{hashlib.sha256(places.encode()).hexdigest()[:16]}.json"


def compare_with_first_sight(files: Sequence[Path], record: Path) -> None:
    """Compare files with their checksums in ``record``, which the first call writes.

    A file whose size and modification time are those of the record is not read again.
    """
    remedy = "delete it, if the files that it is of are as they should be"
    known = read_sealed(record, required=True, error=CheckpointError, remedy=remedy) if record.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        stat, before = file.stat(), known.get(str(file.resolve()), {})
        found[str(file.resolve())] = {
            **before,
            "bytes": stat.st_size,
            "changed_ns": stat.st_mtime_ns,
        }
    places = [place for place, facts in found.items() if known.get(place) != facts]
    with ThreadPoolExecutor(_THREADS, "first sight") as pool:
        for place, digest in zip(places, pool.map(checksum, map(Path, places)), strict=True):
            before = found[place].setdefault("sha256", digest)
            seen = found[place].setdefault("seen", time.strftime("%Y-%m-%d"))
            if digest != before:
                raise CheckpointError(
                    f"has changed since it was first read here, on {seen} (SHA-256 {before[:12]}, now {digest[:12]})",
                    where=place,
                    remedy=f"restore it; if it was changed on purpose, delete {record}",
                )
    if places:
        with contextlib.suppress(DataError):  # a cache that is not writable disables the comparison
            write_bytes(record, sealed_json({**known, **found}).encode())
