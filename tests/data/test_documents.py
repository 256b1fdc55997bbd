"""Documents out of files, and what is said of bad ones."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.language.documents import read_documents
from cordillera.errors import DataError

_texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=8)


def _read(*paths: Path, **options: object) -> list[str]:
    return [document.text for document in read_documents(paths, **options)]  # type: ignore[arg-type]


@given(texts=_texts)
@settings(max_examples=40, deadline=None)
def test_every_format_gives_the_texts_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("files")
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.rstrip(b"\n")))
    (folder / "c.ndjson.bz2").write_bytes(bz2.compress(lines.replace(b"\n", b"\r\n")))
    pl.DataFrame({"body": texts}).write_parquet(folder / "d.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.ndjson.bz2", "d.parquet"):
        documents = list(read_documents([folder / name], text_field="body"))
        assert [document.text for document in documents] == texts
        assert [document.row for document in documents] == list(range(1, len(texts) + 1))


def test_a_plain_file_is_one_document_or_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    (tmp_path / "b.md").write_text("three")
    assert _read(tmp_path / "a.txt", tmp_path / "b.md") == ["one\r\ntwo\n", "three"]
    assert _read(tmp_path / "a.txt", tmp_path / "b.md", unit="line") == ["one", "two", "three"]


def test_a_line_longer_than_a_block_is_whole(tmp_path: Path) -> None:
    texts = ["x" * 3_000_000, "é" * 700_000, "z"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts))
    assert _read(tmp_path / "a.jsonl") == texts


def test_bad_files_are_refused_with_file_and_row(tmp_path: Path) -> None:
    bad_text = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))
    pq.write_table(pa.table({"text": bad_text}), tmp_path / "latin.parquet")
    pl.DataFrame({"text": ["a", None]}).write_parquet(tmp_path / "blank.parquet")
    pl.DataFrame({"text": [1]}).write_parquet(tmp_path / "number.parquet")
    pl.DataFrame({"text": []}, schema={"text": pl.String}).write_parquet(tmp_path / "rows.parquet")
    pl.DataFrame({"body": ["a"]}).write_parquet(tmp_path / "column.parquet")
    good = b'{"text": "a"}\n'
    files = {
        "latin.txt": (b"a\nb\xe9c", r"latin.txt:2: byte 3 \(0xe9\) is not UTF-8"),
        "latin.jsonl": (good + b'{"text": "\xe9"}', r"latin.jsonl:2: byte 10 \(0xe9\) is not UTF-8"),
        "field.jsonl": (good + b'{"body": "a"}', r"field.jsonl:2: there is no field 'text'; there are \['body'\]"),
        "kind.jsonl": (good + b'{"text": null}', r"kind.jsonl:2: field 'text' is not text but NoneType"),
        "list.jsonl": (good * 2 + b"[1]", r"list.jsonl:3: the line is not a JSON object"),
        "json.jsonl": (good + b"\n" + good, r"json.jsonl:2: the line is not JSON"),
        "half.jsonl": (b'{"text": "a\\ud800"}', r"half.jsonl:1, field 'text': character 1 is a lone surrogate"),
        "empty.txt": (b"", r"empty.txt: the file is empty"),
        "what.docx": (b"x", r"what.docx: the name does not tell"),
        "cut.jsonl.gz": (gzip.compress(good * 1000)[:-20], r"cut.jsonl.gz: the file cannot be read"),
        "not.parquet": (b"PAR1xxxx", r"not.parquet: the file cannot be read"),
        "latin.parquet": (None, r"latin.parquet:2: byte 0 is not UTF-8"),
        "blank.parquet": (None, r"blank.parquet:2: column 'text' is blank"),
        "number.parquet": (None, r"number.parquet: column 'text' is not text but int64"),
        "rows.parquet": (None, r"rows.parquet: the file holds no rows"),
        "column.parquet": (None, r"column.parquet: there is no column 'text'; there are \['body'\]"),
        "absent.txt": (None, r"absent.txt: there is no such file"),
    }
    for name, (content, message) in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            _read(tmp_path / name)


def test_addresses_and_dates_come_with_the_text(tmp_path: Path) -> None:
    rows = [{"text": "a", "url": "u", "when": 3}, {"text": "b"}, {"text": "c", "url": None}, {"text": "d", "url": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    when = [datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, 0, 0, 0, 5), None]
    frame = pl.DataFrame({"text": ["e", "f", "g"], "url": ["v", "w", None], "when": when})
    frame.write_parquet(tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("h")
    paths = [tmp_path / "a.jsonl", tmp_path / "b.parquet", tmp_path / "c.txt"]
    found = [(d.text, d.url, d.date) for d in read_documents(paths, url_field="url", date_field="when")]
    assert found == [
        ("a", "u", 3),
        ("b", "", None),
        ("c", "", None),
        ("d", "", None),
        ("e", "v", "2020-01-01T00:00:00"),
        ("f", "w", "2020-01-01T00:00:00.000005"),
        ("g", "", None),
        ("h", "", None),
    ]
    assert [d.url for d in read_documents(paths)] == [""] * 8
    for row, message in (
        ({"text": "a", "url": "u"}, "field 'when' is no date but None"),
        ({"text": "a", "url": "u", "when": float("nan")}, "field 'when' is no date but nan"),
        ({"text": "a", "url": "u", "when": True}, "field 'when' is no date but True"),
        ({"text": "a", "url": 4, "when": 1}, "field 'url' is not text but int"),
    ):
        (tmp_path / "bad.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError, match=f"bad.jsonl:1: {message}"):
            list(read_documents([tmp_path / "bad.jsonl"], url_field="url", date_field="when"))
    with pytest.raises(DataError, match="there is no column 'link'"):
        list(read_documents([tmp_path / "b.parquet"], url_field="link"))
