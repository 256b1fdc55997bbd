"""Documents out of files, and what is said of bad ones."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import random
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.language.documents import read_documents, read_rows
from cordillera.errors import DataError
from tests.fuzzing import damaged, survives

_texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=8)


def _write_stream(path: Path, *batches: pa.RecordBatch) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _read(*paths: Path, **options: object) -> list[str]:
    return [document.text for document in read_documents(paths, **options)]  # type: ignore[arg-type]


@given(texts=_texts)
@settings(max_examples=40)
def test_every_format_gives_the_texts_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("files")
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.rstrip(b"\n")))
    (folder / "c.ndjson.bz2").write_bytes(bz2.compress(lines.replace(b"\n", b"\r\n")))
    half = lines.index(b"\n") + 1
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    with pa.output_stream(folder / "e.jsonl.zst") as file:  # compressed by its name
        file.write(lines)
    frame = pl.DataFrame({"id": range(len(texts)), "body": texts})
    frame.write_parquet(folder / "f.parquet")
    frame.with_columns(body=pl.col("body").cast(pl.Categorical)).write_parquet(folder / "g.pq")
    frame.write_ipc_stream(folder / "h.arrow")
    frame.write_ipc(folder / "i.arrow")
    frame.write_ipc(folder / "j.feather", compression="zstd", compat_level=pl.CompatLevel.oldest())
    for name in sorted(path.name for path in folder.iterdir()):
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
    for name in ("blank", "number", "rows", "latin"):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        _write_stream(tmp_path / f"{name}.arrow", *table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)])
    offsets = pa.py_buffer(np.array([0, 1, 2, 99, 3], np.int32))
    wrong = pa.StringArray.from_buffers(4, offsets, pa.py_buffer(b"abc"))
    _write_stream(tmp_path / "offset.arrow", pa.record_batch({"text": wrong}))
    batch = pa.record_batch({"text": ["a", "b"]})
    _write_stream(tmp_path / "none.arrow", batch.slice(0, 0))
    _write_stream(tmp_path / "batch.arrow", batch, batch)
    whole = (tmp_path / "batch.arrow").read_bytes()
    (tmp_path / "batch.arrow").write_bytes(whole[:-8])  # after a batch, where a stream may end
    pl.DataFrame({"text": ["a"]}).write_ipc(tmp_path / "footer.feather")
    whole = (tmp_path / "footer.feather").read_bytes()
    (tmp_path / "footer.feather").write_bytes(whole[:-30])
    with pa.output_stream(tmp_path / "zst.jsonl.zst") as file:
        file.write(b'{"text": "a"}\n' * 1000)
    whole = (tmp_path / "zst.jsonl.zst").read_bytes()
    (tmp_path / "zst.jsonl.zst").write_bytes(whole[:-5])
    good = b'{"text": "a"}\n'
    files = {
        "latin.txt": (b"a\nb\xe9c", r"latin.txt:2: byte 3 \(0xe9\) is not UTF-8"),
        "latin.jsonl": (good + b'{"text": "\xe9"}', r"latin.jsonl:2: byte 10 \(0xe9\) is not UTF-8"),
        "field.jsonl": (good + b'{"body": "a"}', r"field.jsonl:2: there is no field 'text'; there are \['body'\]"),
        "kind.jsonl": (good + b'{"text": null}', r"kind.jsonl:2: field 'text' is null"),
        "list.jsonl": (good * 2 + b"[1]", r"list.jsonl:3: the line is not a JSON object"),
        "cut.jsonl": (
            good + b'{"text": "a"',
            r"cut.jsonl:2: the line is not JSON \(Expecting ',' delimiter at character 13\)",
        ),
        "chat.jsonl": (
            b'{"messages": []}\n',
            r"there is no field 'text'.*\n.*chats are learnt by recipes with an objective",
        ),
        "json.jsonl": (good + b"\n" + good, r"json.jsonl:2: the line is empty\n.*delete it"),
        "half.jsonl": (b'{"text": "a\\ud800"}', r"half.jsonl:1, field 'text': character 1 is a lone surrogate"),
        "empty.txt": (b"", r"empty.txt: the file is empty"),
        "what.docx": (b"x", r"what.docx: the name does not tell"),
        "cut.jsonl.gz": (gzip.compress(good * 1000)[:-20], r"cut.jsonl.gz: the file cannot be read"),
        "not.parquet": (b"PAR1xxxx", r"not.parquet: the file cannot be read"),
        "latin.parquet": (None, r"latin.parquet:2: the row holds text that is not UTF-8"),
        "blank.parquet": (None, r"blank.parquet:2: field 'text' is null"),
        "number.parquet": (None, r"number.parquet: column 'text' is not text but int64"),
        "rows.parquet": (None, r"rows.parquet: the file holds no rows"),
        "column.parquet": (None, r"column.parquet: there is no column 'text'; there are \['body'\]"),
        "zst.jsonl.zst": (None, r"zst.jsonl.zst: the file cannot be read"),
        "blank.arrow": (None, r"blank.arrow:2: field 'text' is null"),
        "number.arrow": (None, r"number.arrow: column 'text' is not text but int64"),
        "rows.arrow": (None, r"rows.arrow: the file holds no rows"),
        "none.arrow": (None, r"none.arrow: the file holds no rows"),
        "latin.arrow": (None, r"latin.arrow:2: the row holds text that is not UTF-8"),
        "offset.arrow": (None, r"offset.arrow:3: the row holds damaged values"),
        "batch.arrow": (None, r"batch.arrow: .*its end mark is missing"),
        "footer.feather": (None, r"footer.feather: the file cannot be read"),
        "not.arrow": (b"ARROW1xxxx", r"not.arrow: the file cannot be read"),
        "short.arrow": (b"xx", r"short.arrow: the file is no Arrow file"),
        "absent.txt": (None, r"absent.txt: there is no such file"),
    }
    for name, (content, message) in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            _read(tmp_path / name)


def test_text_inside_of_a_column_is_refused_with_what_to_do(tmp_path: Path) -> None:
    inside = pa.record_batch({"meta": [{"text": "a"}]})
    pq.write_table(pa.table(inside), tmp_path / "a.parquet")
    _write_stream(tmp_path / "a.arrow", inside)
    (tmp_path / "a.jsonl").write_text('{"meta": {"text": "a"}}')
    for name, what in (("a.parquet", "column"), ("a.arrow", "column"), ("a.jsonl", "field")):
        message = (
            rf"(?s){name}.*: there is no {what} 'meta.text'; there are \['meta'\].*write the text into a {what} of"
        )
        with pytest.raises(DataError, match=message):
            _read(tmp_path / name, text_field="meta.text")
        with pytest.raises(DataError, match=r"'meta' is not text but (dict|struct)"):
            _read(tmp_path / name, text_field="meta")


@pytest.mark.parametrize("kind", ["parquet", "row groups", "stream", "compressed"])
def test_memory_does_not_grow_with_a_table(tmp_path: Path, kind: str) -> None:
    texts = [random.Random(number).randbytes(1_000).hex() for number in range(6_000)]
    path = tmp_path / ("a.parquet" if kind in ("parquet", "row groups") else "a.arrow")
    table = pa.table({"text": texts, "other": texts})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=500 if kind == "row groups" else None, use_dictionary=False)
    else:
        codec = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "compressed" else None)
        with pa.ipc.new_stream(path, table.schema, options=codec) as writer:
            writer.write_table(table, max_chunksize=500)
    del table
    before, most = pa.total_allocated_bytes(), 0
    for document, text in zip(read_documents([path]), texts, strict=True):
        assert document.text == text
        most = max(most, pa.total_allocated_bytes() - before)
    assert path.stat().st_size > 11 << 20
    assert most < 6 << 20


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather"])
def test_damage_is_an_error_or_harmless(tmp_path: Path, kind: str) -> None:
    frame = pl.DataFrame({"text": ["a", "bé", "c" * 40] * 20, "messages": [[{"role": "user", "content": "x"}]] * 60})
    path = tmp_path / f"a.{kind}"
    write = {"parquet": frame.write_parquet, "arrow": frame.write_ipc_stream, "feather": frame.write_ipc}[kind]
    write(path)
    whole = path.read_bytes()
    for seed in range(150):
        path.write_bytes(damaged(whole, random.Random(seed)))
        survives(lambda: list(read_documents([path])), f"{kind}, seed {seed}")
        survives(lambda: list(read_rows([path])), f"{kind}, rows, seed {seed}")


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
    with pytest.raises(DataError, match=r"(?s)there is no column 'link'.*set data\.cleaning\.url_field in a recipe"):
        list(read_documents([tmp_path / "b.parquet"], url_field="link"))
