"""Reader of CSV and TSV files with one row per line; errors name the line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv

from cordillera.data.ranking.logs.columns import RowPlace, column_names
from cordillera.errors import DataError

BLOCK_BYTES = 8 << 20
"""Size of a block that is parsed at a time, in bytes; larger where a line is longer."""

LINE_BYTES = 32 << 20
"""Size of the longest line, in bytes."""

_HEADER_BYTES = 4 << 20
_MARKS = {";": '";"', "\t": '"\\t"', "|": '"|"', ",": '","', " ": '" "'}
_PIECE_BYTES = 1 << 17  # fits into a processor's second-level cache
_BREAK, _QUOTE, _RETURN = b'\n"\r'
_REMEDY = (
    "close the quotation mark in its line: a field cannot hold a line break, and a quotation mark inside a quoted "
    "field is written twice"
)


def other_separator(names: Sequence[str]) -> str | None:
    """Return the separator, in quotation marks, that a file of one column seems to have; None if it seems right."""
    mark = max(_MARKS, key=names[0].count)
    return _MARKS[mark] if len(names) == 1 and mark in names[0] else None


def _fields_remedy(names: Sequence[str]) -> str:
    """Return what to do about a row of too many or too few fields, below these names of columns."""
    if len(names) > 1:
        return "correct the line; fields that hold the separator (data.separator) stand in quotation marks"
    mark = other_separator(names)
    other = f"{mark} divides its fields: set" if mark else "another character divides its fields, name it in"
    return f"the first line is a single column, {names[0]!r}; if {other} data.separator, or --separator of `recipe new`"


@dataclass(frozen=True)
class TextBlock:
    """Whole lines of a file.

    Attributes:
        buffer: Text of the block, in the bytes from ``begin`` to ``end``.
        line: Number of the first line in the file.
        lines: Number of lines.
    """

    buffer: bytearray
    begin: int
    end: int
    line: int
    lines: int


class DelimitedFile:
    """A CSV or TSV file in which each line is one row.

    A field in quotation marks must end in its own line, so that an unclosed quotation mark cannot join lines; the
    number of rows is compared with the number of lines. Blank lines are skipped but counted, so that errors name the
    right line. Files whose names end in ``.gz``, ``.bz2`` or ``.zst`` are decompressed.
    """

    def __init__(self, path: Path, separator: str, *, quoted: bool = True, names: Sequence[str] | None = None) -> None:
        """Open the file and read the names of its columns.

        Args:
            quoted: Whether fields may stand in quotation marks; if not, a quotation mark is an ordinary character.
            names: Column names of a file without a header. Default: the first line names the columns.

        Raises:
            DataError: the file cannot be read, or its first line does not name columns.
        """
        self.path, self.separator, self.quoted = path, separator, quoted
        self._named = names is None
        self.names = list(names) if names is not None else column_names(self._read_names(), f"{path}, line 1")

    def frames(self, wanted: Sequence[str] | None = None) -> Iterator[tuple[pl.DataFrame, RowPlace]]:
        """Read the rows in order, in the ``wanted`` columns or all, with every column as text and blanks as null.

        Raises:
            DataError: a row has too many or too few fields, a quotation mark is not closed in its line, the text is not
                UTF-8, or the file is truncated; the line is named.
        """
        for block in self.blocks():
            frame, place = self.parse(block, wanted)
            if len(frame):
                yield frame, place

    def blocks(self) -> Iterator[TextBlock]:
        """Iterate over the file's lines in blocks, which :meth:`parse` reads in any order or at once in threads."""
        line = 1
        for buffer, end in self._blocks(BLOCK_BYTES):
            begin = 0
            if line == 1 and self._named:
                begin, line = buffer.find(b"\n") + 1, 2
            if begin == end:
                continue
            lines = int(np.count_nonzero(np.frombuffer(buffer, np.uint8)[begin:end] == _BREAK))
            yield TextBlock(buffer, begin, end, line, lines)
            line += lines

    def _blocks(self, most: int) -> Iterator[tuple[bytearray, int]]:
        """Buffers and the number of leading bytes in whole lines, at most ``most``."""
        filled, first = 0, True
        try:
            packed = self.path.suffix.lower() in (".gz", ".bz2", ".zst", ".lz4", ".br")
            # One byte of room for the line break that the last line may lack.
            most = most if packed else min(most, self.path.stat().st_size + 1)
            buffer = bytearray(most + 1)
            with pa.input_stream(str(self.path), compression="detect") as stream:
                while True:
                    count = stream.readinto(memoryview(buffer)[filled:most])
                    filled += count
                    if count and filled < most:
                        continue
                    if first and buffer.startswith(b"\xef\xbb\xbf"):
                        filled -= 3
                        buffer[:filled] = buffer[3 : filled + 3]
                    first = False
                    if filled and not count and buffer[filled - 1] != _BREAK:
                        buffer[filled] = _BREAK
                        filled += 1
                    end = buffer.rfind(b"\n", 0, filled) + 1
                    if not end and count:
                        if most >= LINE_BYTES:
                            raise DataError(
                                f"a line is longer than {LINE_BYTES:,} bytes",
                                where=str(self.path),
                                remedy="check that the file is text with a row a line",
                            )
                        buffer.extend(bytes(most))
                        most *= 2
                        continue
                    if not count:
                        if end:
                            yield buffer, end
                        return
                    following = bytearray(most + 1)
                    following[: filled - end] = memoryview(buffer)[end:filled]
                    yield buffer, end
                    buffer, filled = following, filled - end
        except (pa.ArrowException, OSError, EOFError, ValueError) as error:
            raise DataError(
                f"the file cannot be read ({error})", where=str(self.path), remedy="copy or write it again"
            ) from error

    def _read_names(self) -> list[str]:
        for buffer, end in self._blocks(min(_HEADER_BYTES, BLOCK_BYTES)):
            line = bytes(buffer[: min(end, buffer.find(b"\n") + 1)])
            if not line.strip(b"\r\n"):
                raise DataError(
                    "the line is blank", where=f"{self.path}, line 1", remedy="name the columns in the first line"
                )
            fields = self._fields(line[:-1].removesuffix(b"\r"), 1)
            names = [field.decode("utf-8") for field in fields]
            if not self.quoted:
                return names
            return [name[1:-1].replace('""', '"') if name.startswith('"') else name for name in names]
        raise DataError("the file holds no rows", where=str(self.path), remedy="give a file that holds rows")

    def parse(self, block: TextBlock, wanted: Sequence[str] | None = None) -> tuple[pl.DataFrame, RowPlace]:
        """Return the rows of a block of this file, in the ``wanted`` columns or all, and their place.

        Raises:
            DataError: as :meth:`frames`.
        """
        buffer, begin, end, line, lines = block.buffer, block.begin, block.end, block.line, block.lines
        content = np.frombuffer(buffer, np.uint8)[begin:end]
        returns = buffer.count(b"\r", begin, end)
        doubtful = buffer.find(b"\0", begin, end) >= 0
        doubtful |= returns > 0 and returns != buffer.count(b"\r\n", begin, end)
        quotes = self.quoted and buffer.find(b'"', begin, end) >= 0
        if doubtful or (quotes and not self._well_quoted(content)):
            self._examine(bytes(content), line)
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(pa.py_buffer(content)),
                read_options=pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=len(content) + 1, column_names=self.names
                ),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=self.separator, quote_char='"' if quotes else False, double_quote=quotes
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(self.names, pa.string()),
                    include_columns=list(wanted or ()),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=True,
                ),
            )
            rows = table.num_rows
        except pa.ArrowException as error:
            if bytes(content).strip(b"\r\n"):
                self._examine(bytes(content), line)
                raise DataError(
                    f"the lines cannot be read ({error})", where=f"{self.path}, lines {line} to {line + lines - 1}"
                ) from error
            rows = 0
        kept = None
        if rows != lines:
            ends = np.flatnonzero(content == _BREAK)
            lengths = np.diff(ends, prepend=-1) - 1
            blank = (lengths == 0) | ((lengths == 1) & (content[ends - 1] == _RETURN))
            kept = np.flatnonzero(~blank)
            if len(kept) != rows or len(self.names) == 1:
                self._examine(bytes(content), line)
                raise DataError(
                    f"{len(kept)} lines were read as {rows} rows",
                    where=f"{self.path}, lines {line} to {line + lines - 1}",
                    remedy=_REMEDY,
                )
        frame = pl.from_arrow(table) if rows else pl.DataFrame()
        assert isinstance(frame, pl.DataFrame)
        return frame, RowPlace(str(self.path), line, "line", kept)

    def _well_quoted(self, content: np.ndarray) -> bool:
        """Whether every quotation mark opens a field, closes one or stands doubled inside one."""
        before = np.zeros(256, dtype=bool)
        before[[_BREAK, _QUOTE, ord(self.separator)]] = True
        after = before.copy()
        after[_RETURN] = True
        inside = 0
        for start in range(0, len(content), _PIECE_BYTES):
            places = np.flatnonzero(content[start : start + _PIECE_BYTES] == _QUOTE) + start
            opening, closing = places[inside::2], places[1 - inside :: 2]
            inside = (inside + len(places)) % 2
            opening = opening[1:] if len(opening) and opening[0] == 0 else opening
            # Every block ends in a line break, so a byte follows each mark.
            if not (before.take(content.take(opening - 1)).all() and after.take(content.take(closing + 1)).all()):
                return False
        return not inside

    def _examine(self, content: bytes, line: int) -> None:
        """Raise the error of the first wrong line, if there is one."""
        for number, text in enumerate(content.split(b"\n")[:-1], line):
            text = text.removesuffix(b"\r")
            where = f"{self.path}, line {number}"
            if not text:
                if len(self.names) == 1:
                    raise DataError(
                        "the line is blank; in a file of one column that may be a row or none",
                        where=where,
                        remedy='delete the line, or write "" for a blank value',
                    )
                continue
            count = len(self._fields(text, number))
            if count != len(self.names):
                raise DataError(
                    f"the row has {count} fields, {len(self.names)} are expected",
                    where=where,
                    remedy=_fields_remedy(self.names),
                )

    def _fields(self, text: bytes, number: int) -> list[bytes]:
        """Fields of a line, including their quotation marks."""
        where = f"{self.path}, line {number}"
        if b"\0" in text:
            raise DataError("the line holds a null byte", where=where, remedy="convert the file to UTF-8 text")
        if b"\r" in text:
            raise DataError(
                "a carriage return stands inside the line",
                where=where,
                remedy="end lines in a line feed, or in a carriage return and a line feed",
            )
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the text is not UTF-8 (byte 0x{text[error.start]:02x})",
                where=where,
                remedy="convert the file to UTF-8",
            ) from error
        mark = self.separator.encode()
        if not self.quoted or b'"' not in text:
            return text.split(mark)
        field = re.compile(rb'(?:"(?:[^"]|"")*"|[^"%b][^%b]*)?' % ((re.escape(mark),) * 2))
        fields, place = [], 0
        while True:
            found = field.match(text, place)
            assert found is not None  # an empty field matches everywhere
            fields.append(found[0])
            place = found.end()
            if place == len(text):
                return fields
            if text[place : place + 1] != mark:
                opens, after = text[place] == _QUOTE, _MARKS.get(chr(text[place]))
                divided = f"if {after} divides the fields, set data.separator, or --separator of `recipe new`"
                column = len(text[:place].decode("utf-8")) + 1
                what = "a quotation mark opens a field that does not end in its line"
                raise DataError(
                    what if opens else "a field goes on after its closing quotation mark",
                    where=f"{where}, character {column}",
                    remedy=_REMEDY if after is None else divided,
                )
            place += 1
