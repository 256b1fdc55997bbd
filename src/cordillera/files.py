"""Reading of external text, JSON and TOML files under limits, and writing that leaves no half file.

A file from outside may have any size, encoding and depth. Every reader goes through these functions, which return its
content or raise one error that names the file and the place.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from cordillera.errors import CordilleraError, DataError, PlanError

JSON_BYTES = 128 << 20
"""Largest JSON file that is read, in bytes: four times the size of the largest tokenizers."""

TOML_BYTES = 1 << 20
"""Largest TOML file that is read, in bytes."""

TOML_DEPTH = 16
"""Most parts of a dotted key and levels of brackets in a TOML file, because parsing costs their square."""

TOML_DOTS = 100_000
"""Most dots outside strings in a TOML file, because each may make a table."""

# Unclosed strings extend to the end of the line, or of the text, so that no character is scanned twice.
_STRINGS = re.compile(r'"""(?s:.*?)(?:"""|\Z)|\'\'\'(?s:.*?)(?:\'\'\'|\Z)|"(?:[^"\\\n]|\\.)*"?|\'[^\'\n]*\'?|#[^\n]*')
_DOTTED = re.compile(r'(?<![\w-])(?:[\w-]+|"")(?:[ \t]*\.[ \t]*(?:[\w-]+|"")){' + f"{TOML_DEPTH}" + "}")
_SEAL = "seal"
_FILE, _LINE = (2, 64), (None, 16)  # indent, digits of the SHA-256
_DIGEST = re.compile("[0-9a-f]{16}|[0-9a-f]{64}")


def is_there(path: Path) -> bool:
    """Whether something has this name, also a link that leads nowhere, which then cannot be read."""
    return os.path.lexists(path)


def at_home(path: Path | str) -> Path:
    """Return a ``path`` with the home folder in place of ``~``, which a shell leaves as it is within ``--run=~/a``."""
    try:
        return Path(os.path.expanduser(path))
    except ValueError:  # a null byte in the name
        return Path(path)


def read_text(
    path: Path | str,
    *,
    error: type[CordilleraError] = DataError,
    limit: int = JSON_BYTES,
    remedy: str | None = None,
) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Args:
        path: Regular file; pipes and devices are refused, because they may never end.
        error: Class of the error to raise.
        limit: Largest size, in bytes.
        remedy: Advice for the error.

    Raises:
        CordilleraError: If the file is missing, too large, or not UTF-8, as ``error``, which names the first wrong
            byte.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise error("does not exist", where=str(path), remedy=remedy)
        if not path.is_file():
            raise error("is not an ordinary file", where=str(path), remedy=remedy)
        with open(path, "rb") as file:
            is_large = os.fstat(file.fileno()).st_size > limit
            pieces, left = list[bytes](), 0 if is_large else limit + 1
            # Read in pieces: one read would allocate the memory for the whole limit.
            while left and (piece := file.read(min(left, 1 << 20))):
                pieces.append(piece)
                left -= len(piece)
        content = b"".join(pieces)
    except (OSError, ValueError) as cause:  # ValueError: a null byte in the name
        reason = getattr(cause, "strerror", None) or cause
        raise error(f"cannot be read ({reason})", where=str(path), remedy=remedy) from cause
    if is_large or len(content) > limit:
        raise error(f"is larger than {limit:,} bytes", where=str(path), remedy=remedy)
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as cause:
        before = content[: cause.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        raise error(
            f"is not UTF-8 text (byte 0x{content[cause.start]:02x})",
            where=f"{path}, line {line}, column {column}",
            remedy=remedy,
        ) from cause


def parse_json(
    text: str | bytes, where: str, *, error: type[CordilleraError] = DataError, remedy: str | None = None
) -> Any:
    """Return the value of a JSON ``text``; NaN, infinity and numbers beyond float64 are refused.

    Raises:
        CordilleraError: If the text is not JSON, or nested too deeply, as ``error`` with its place, ``where``, and
            advice, ``remedy``.
    """

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits[:40]} is beyond float64")
        return value

    try:
        return json.loads(text, parse_constant=constant, parse_float=number)
    except RecursionError as cause:
        raise error("is not usable JSON: it is nested too deeply", where=where, remedy=remedy) from cause
    except ValueError as cause:  # invalid JSON or UTF-8, or an integer of thousands of digits
        raise error(f"is not JSON: {cause}", where=where, remedy=remedy) from cause


def read_json_object(
    path: Path | str, *, error: type[CordilleraError] = DataError, remedy: str | None = None
) -> dict[str, Any]:
    """Return the object of a JSON file; see :func:`read_text` and :func:`parse_json`.

    Raises:
        CordilleraError: If the file cannot be read or its value is not an object, as ``error``.
    """
    return _parse_object(read_text(path, error=error, remedy=remedy), str(path), error, remedy)


def _parse_object(text: str, where: str, error: type[CordilleraError], remedy: str | None) -> dict[str, Any]:
    content = parse_json(text, where, error=error, remedy=remedy)
    if not isinstance(content, dict):
        raise error("is not a JSON object", where=where, remedy=remedy)
    return content


def parse_toml(text: str, where: str, *, error: type[CordilleraError] = DataError) -> dict[str, Any]:
    """Return the table of a TOML ``text``; errors name its place, ``where``.

    Raises:
        CordilleraError: If the text is not TOML, too large, or nested too deeply, as ``error``.
    """
    if len(text) > TOML_BYTES:
        raise error(f"is larger than {TOML_BYTES:,} characters", where=where)
    bare = _STRINGS.sub('""', text)
    if _DOTTED.search(bare) or _depth(bare) > TOML_DEPTH:
        raise error(f"is nested more than {TOML_DEPTH} levels deep", where=where)
    if bare.count(".") > TOML_DOTS:
        raise error(f"has more than {TOML_DOTS:,} dots outside strings", where=where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as cause:  # invalid TOML or date, or an integer of thousands of digits
        twice = "; join the two, or write [[name]] for a list" if str(cause).startswith("Cannot declare") else ""
        raise error(f"is not TOML: {cause}{twice}", where=where) from cause


def _depth(text: str) -> int:
    """Return the deepest level of brackets in a text without strings and comments."""
    level = deepest = 0
    for mark in re.findall(r"[\[\]{}]", text):
        level += 1 if mark in "[{" else -1
        deepest = max(deepest, level)
    return deepest


def sealed_json(content: Mapping[str, Any], *, line: bool = False) -> str:
    """Return the canonical JSON text of ``content`` with a checksum as its last key; an existing one is left out.

    The content holds values of JSON with finite numbers. With ``line``, the text is one line with a short checksum, for
    :func:`parse_sealed`; otherwise a file for :func:`read_sealed`.
    """
    plain = {key: value for key, value in content.items() if key != _SEAL}
    indent, digits = _LINE if line else _FILE
    body = json.dumps(plain, indent=indent, allow_nan=False)
    digest = hashlib.sha256(body.encode()).hexdigest()[:digits]
    return json.dumps({**plain, _SEAL: digest}, indent=indent, allow_nan=False) + "\n"


def parse_sealed(
    text: str,
    where: str,
    *,
    line: bool = False,
    required: bool = False,
    schema: int | None = None,
    error: type[CordilleraError] = DataError,
    remedy: str | None = None,
) -> dict[str, Any]:
    """Return the object of a text from :func:`sealed_json` without its checksum, after checking every byte.

    Args:
        text: JSON.
        where: Place that errors name.
        line: Whether the text is one line, with its line break.
        required: Whether to refuse a text without a checksum; otherwise it counts as written by hand.
        schema: Value that the object's ``schema`` must have. Default: any, or none.
        error: Class of the error to raise.
        remedy: Advice for the error.

    Raises:
        CordilleraError: If the text is not a JSON object, has another schema, or does not match its checksum, as
            ``error``.
    """
    content = _parse_object(text, where, error, remedy)
    if schema is not None and "schema" not in content:
        raise error("is another kind of file: it does not say of which version it is", where=where, remedy=remedy)
    if schema is not None and content["schema"] != schema:
        raise error(f"is of version {content['schema']!r}, this library reads {schema}", where=where, remedy=remedy)
    keys, values = list(content), list(content.values())

    def has_digest(place: int, key: str) -> bool:  # a flipped byte may have changed the key itself
        return key in content or (len(keys[place]) == len(key) and _DIGEST.fullmatch(str(values[place])) is not None)

    is_older = len(keys) == 2 and isinstance(values[1], dict) and has_digest(0, "sha256")
    if not is_older and not (keys and has_digest(-1, _SEAL)):
        if required:
            raise error("holds no checksum", where=where, remedy=remedy)
        return content
    try:
        written = _older_sealed_json(values[1]) if is_older else sealed_json(content, line=line)
    except RecursionError:
        written = ""  # the content is nested deeper than any written file
    if text != written:
        edited = "" if required else f"; if you changed it on purpose, delete its {_SEAL!r}"
        raise error(
            "does not fit its checksum: it was changed or damaged after it was written",
            where=where,
            remedy=(remedy or "write it again") + edited,
        )
    return values[1] if is_older else {key: value for key, value in content.items() if key != _SEAL}


def read_sealed(
    path: Path | str,
    *,
    required: bool = False,
    schema: int | None = None,
    error: type[CordilleraError] = DataError,
    remedy: str | None = None,
) -> dict[str, Any]:
    """Return the object of a JSON file from :func:`sealed_json`, without its checksum; see :func:`parse_sealed`."""
    text = read_text(path, error=error, remedy=remedy)
    return parse_sealed(text, str(path), required=required, schema=schema, error=error, remedy=remedy)


def _older_sealed_json(content: dict[str, Any]) -> str:
    """Return the text of early caches, corpora and checkpoints: the checksum, then the content as an object."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "content": content}, indent=1)


def write(texts: Mapping[Path, str]) -> None:
    """Write several files, ``texts`` by path, all or none of them.

    Missing folders are created. If a file cannot be written, no file is changed and no temporary file remains.

    Raises:
        PlanError: If a file cannot be written.
    """
    path, made, beside = next(iter(texts)), list[Path](), dict[Path, Path]()
    try:
        for path, text in texts.items():
            _check_replaceable(path)
            make_folders(path.parent, made)
            for leftover in left_behind(path.parent, path.name):
                leftover.unlink(missing_ok=True)
            beside[path] = _beside(path)
            beside[path].write_text(text, encoding="utf-8", newline="\n")
            sync(beside[path])
        for path in texts:
            os.replace(beside[path], path)
            made.clear()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise PlanError(
            f"cannot be written: {reason}", where=str(path), remedy="free some space, or name another place"
        ) from error
    finally:
        for part in beside.values():
            _remove(part)
        remove_made(made)


@contextlib.contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a path beside ``path`` for a file that takes its place once the context ends without an error.

    Readers see the old file or the new one, also after a power failure; a file that was not finished is removed. With
    ``new``, of several processes only one creates the file.

    Raises:
        FileExistsError: If ``new`` is set and ``path`` exists.
    """
    beside = _beside(path)
    try:
        yield beside
        sync(beside)
        if not (new and _linked(beside, path)):
            os.replace(beside, path)
    finally:
        _remove(beside)


def left_behind(folder: Path, name: str = "*") -> list[Path]:
    """Return files of :func:`replacing` in a folder, for the file ``name``, whose processes no longer run."""
    found = []
    for path in folder.glob(f".{name if name == '*' else glob.escape(name)}.*.tmp"):
        process = path.name.split(".")[-2]
        try:
            os.kill(int(process), 0)
        except (ProcessLookupError, OverflowError):
            found.append(path)
        except (ValueError, OSError):
            continue  # no temporary file, or a process of another user
    return found


def _linked(beside: Path, path: Path) -> bool:
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:
        return False  # a file system without links
    return True


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError):  # ValueError: a null byte in the name
        path.unlink(missing_ok=True)


def make_folders(folder: Path, made: list[Path]) -> None:
    """Create a folder and its parents, and add those that did not exist to ``made``."""
    for one in reversed([folder, *folder.parents]):
        if not one.is_dir():
            if os.path.lexists(one):
                raise NotADirectoryError(errno.ENOTDIR, f"{one} is not a folder")
            one.mkdir(exist_ok=True)
            made.append(one)


def remove_made(made: list[Path]) -> None:
    """Remove folders that :func:`make_folders` made, as far as they are empty."""
    for one in reversed(made):
        with contextlib.suppress(OSError):
            one.rmdir()


def _check_replaceable(path: Path) -> None:
    """Check that what has a name is a file, or nothing: a device in whose place a file came would be lost to all."""
    if (path.exists() and not path.is_file()) or str(path) in ("/dev/stdout", "/dev/stderr"):  # links, maybe to files
        kind = "a folder" if path.is_dir() else "no ordinary file"
        raise PlanError(f"cannot be written: it is {kind}", where=str(path), remedy="name another place")


def check_writable(*paths: Path) -> None:
    """Check before the work whether :func:`write` could write to paths, which need not exist; leave nothing behind.

    Raises:
        PlanError: If a folder cannot be created or written to, or a path is a folder, a device or a pipe.
    """
    for path in paths:
        _check_replaceable(path)
        tries = 5
        while tries:
            made: list[Path] = []
            tries -= 1
            try:
                make_folders(path.parent, made)
                with tempfile.TemporaryFile(dir=path.parent):
                    break
            except (OSError, ValueError) as error:
                if isinstance(error, FileNotFoundError) and tries:
                    continue  # another process that checks has removed the folder that it had made
                reason = getattr(error, "strerror", None) or error
                raise PlanError(f"cannot be written: {reason}", where=str(path), remedy="name another place") from error
            finally:
                remove_made(made)
