"""Folders whose files have checksums, which are verified before the files are used."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

from cordillera.data.files import checksum
from cordillera.errors import CheckpointError
from cordillera.files import parse_json, read_sealed, sealed_json

CHECKSUMS = "checksums.json"
_REMEDY = "delete this folder and use an earlier checkpoint, or restore it from a copy"


def write_checksums(folder: Path) -> None:
    """Write ``checksums.json`` for all files of a folder, which must be complete."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    sums = {path.name: {"sha256": checksum(path), "bytes": path.stat().st_size} for path in files}
    (folder / CHECKSUMS).write_text(sealed_json(sums), encoding="utf-8")


class SealedFolder:
    """Folder whose files exist with their recorded sizes in bytes; their content is verified on request.

    Attributes:
        digests: Recorded SHA-256 of each file, by name.
        sizes: Recorded size of each file in bytes, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_sealed(path / CHECKSUMS, required=True, error=CheckpointError, remedy=_REMEDY)
        try:
            self.digests = {str(name): str(entry["sha256"]) for name, entry in content.items()}
            self.sizes = {str(name): int(entry["bytes"]) for name, entry in content.items()}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"does not name the files of {path.name}", where=str(path / CHECKSUMS), remedy=_REMEDY
            ) from error
        for name, size in self.sizes.items():
            file = path / name
            if Path(name).name != name:
                raise CheckpointError(f"names {name}, outside of the folder", where=str(path / CHECKSUMS))
            if not file.is_file():
                raise CheckpointError(f"is missing from the folder {path.name}", where=str(file), remedy=_REMEDY)
            if file.stat().st_size != size:
                raise CheckpointError(
                    f"has {file.stat().st_size:,} bytes, {size:,} were written into the folder {path.name}",
                    where=str(file),
                    remedy=_REMEDY,
                )
        self._locks = {name: threading.Lock() for name in self.sizes}
        self._verified: set[str] = set()

    @classmethod
    def of(cls, path: Path, *names: str) -> SealedFolder | None:
        """Open a folder and verify the files ``names``, others when they are read; None if it has no checksums."""
        if not (path / CHECKSUMS).exists():
            return None
        folder = cls(path)
        for name in names:
            folder.verify_once(name)
        return folder

    def verify(self, name: str) -> None:
        """Raise CheckpointError if a file differs from its checksum."""
        if checksum(self.path / name) != self.digests[name]:
            raise self._corrupt(name)

    def verify_once(self, name: str) -> None:
        """Compare a file with its checksum at the first call for this file; may be called by several threads."""
        if name not in self._locks:
            raise CheckpointError("has no checksum", where=str(self.path / name), remedy=_REMEDY)
        with self._locks[name]:
            if name not in self._verified:
                self.verify(name)
                self._verified.add(name)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object from a file and verify the file."""
        content = (self.path / name).read_bytes()
        if hashlib.sha256(content).hexdigest() != self.digests[name]:
            raise self._corrupt(name)
        found = parse_json(content, str(self.path / name), error=CheckpointError, remedy=_REMEDY)
        if not isinstance(found, dict):
            raise CheckpointError("is not a JSON object", where=str(self.path / name), remedy=_REMEDY)
        return found

    def _corrupt(self, name: str) -> CheckpointError:
        return CheckpointError(
            "is corrupt: its contents do not match the checksum written with it",
            where=str(self.path / name),
            remedy=_REMEDY,
        )
