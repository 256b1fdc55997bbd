"""Reading of pickles that hold plain data: containers, numbers and strings, and nothing that runs code."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NoReturn

from cordillera.errors import DataError

# Instructions without an argument, then those with arguments of 1, 2, 4 and 8 bytes.
_FIXED = re.compile(rb"(?s:[(N\]})taesuld0\x85-\x89\x94]|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8})*")
_PREFIXED = {b"\x8a"[0]: 1, b"\x8c"[0]: 1, b"U"[0]: 1, b"X"[0]: 4, b"T"[0]: 4, b"\x8d"[0]: 8}  # bytes of the length
_NAMES = {ord(one.code): one.name for one in pickletools.opcodes}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that finds no classes; what reaches it has been checked already."""

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.where = where

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DataError(f"wants {module}.{name}, and only plain data is read", where=self.where)

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DataError("refers to an object outside of it, and only plain data is read", where=self.where)


def load_plain(content: bytes, where: str) -> Any:
    """Return the value of a pickle of lists, tuples, dicts, strings, numbers, truth values and None.

    All instructions are checked before the first one runs.

    Args:
        content: The pickle.
        where: Its place, for errors.

    Raises:
        DataError: If the pickle is damaged or asks for anything else, which the error names.
    """
    _check_instructions(content, where)
    try:
        return _PlainUnpickler(content, where).load()
    except DataError:
        raise
    except Exception as cause:  # a damaged pickle can raise any exception
        raise DataError(f"is not a usable pickle ({type(cause).__name__}: {cause})", where=where) from cause


def _check_instructions(content: bytes, where: str) -> None:
    at, end, strings = 0, len(content), [b"", b""]
    while True:
        found = _FIXED.match(content, at)
        at = found.end() if found else at
        if at >= end:
            raise DataError("is a truncated pickle", where=where)
        code = content[at]
        if code == ord("."):
            return
        if code in _PREFIXED:
            digits = _PREFIXED[code]
            start = at + 1 + digits
            length = int.from_bytes(content[at + 1 : start], "little")
            if start + length > end:
                raise DataError("is a truncated pickle", where=where)
            strings = [strings[1], content[start : start + length]]
            at = start + length
        elif code == ord("r"):  # a large number would make the reader allocate as much memory
            if int.from_bytes(content[at + 1 : at + 5], "little") > end:
                raise DataError("is not a usable pickle: it numbers more values than it has bytes", where=where)
            at += 5
        else:
            raise DataError(f"{_wanted(content, at, strings)}, and only plain data is read", where=where)


def _wanted(content: bytes, at: int, strings: list[bytes]) -> str:
    """Describe a refused instruction."""
    code = content[at]
    if code in b"ci":
        parts = content[at + 1 : at + 400].split(b"\n")[:2]
        return "wants " + b".".join(parts).decode("utf-8", "replace")
    if code == 0x93:
        return "wants " + b".".join(strings).decode("utf-8", "replace")
    name = _NAMES.get(code)
    return f"has an instruction {name}" if name else f"has an unknown instruction 0x{code:02x} at byte {at:,}"
