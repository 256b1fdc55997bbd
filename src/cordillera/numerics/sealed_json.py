"""JSON files with a checksum of every byte, so that no change of one stays unseen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cordillera.errors import CordilleraError
from cordillera.files import parse_json, read_text


def sealed(content: Mapping[str, Any]) -> str:
    """The one text that holds an object with its checksum.

    Args:
        content: What JSON can hold, without NaN and infinity; ``schema`` is its version.
    """
    plain = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, allow_nan=False).encode()).hexdigest()
    return json.dumps({**plain, "sha256": digest}, indent=1, allow_nan=False) + "\n"


def read_sealed(path: Path, schema: int, *, error: type[CordilleraError], remedy: str) -> dict[str, Any]:
    """Read what :func:`sealed` gave.

    Args:
        path: Of the file.
        schema: The version that is read.
        error: Class of the error that is raised.
        remedy: What to do about a file that cannot be read.

    Raises:
        CordilleraError: of class ``error``: the file is missing, of another version, or not as it was written.
    """
    text = read_text(path, error=error, remedy=remedy)
    content = parse_json(text, str(path), error=error, remedy=remedy)
    if not isinstance(content, dict):
        raise error("is not a JSON object", where=str(path), remedy=remedy)
    if content.get("schema") != schema:
        raise error(
            f"is of version {content.get('schema')!r}, this library reads {schema}", where=str(path), remedy=remedy
        )
    if text != sealed(content):
        raise error("is damaged: its checksum differs", where=str(path), remedy=remedy)
    return content
