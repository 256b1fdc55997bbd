"""Metadata of GGUF files: what the gguf library reads, and no surprise from damaged ones."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest

from cordillera.data.tokenizers.gguf import gguf_header, gguf_metadata
from cordillera.errors import DataError
from tests.data import vocabularies as v

gguf = pytest.importorskip("gguf")


def _everything(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"uint8": 200, "int8": -5, "uint16": 60_000, "int16": -9, "uint32": 2**31, "int32": -7, "uint64": 2**60}
    for kind, value in (numbers | {"int64": -(2**60), "float32": 0.5, "float64": 0.1}).items():
        getattr(writer, f"add_{kind}")(f"some.{kind}", value)
    writer.add_bool("some.bool", True)
    writer.add_string("some.string", "漢字\n")
    writer.add_array("some.texts", ["a", "", "é"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_values_of_every_kind_are_those_of_the_library(tmp_path: Path) -> None:
    for path in (_everything(tmp_path / "a.gguf"), v.write_gguf(tmp_path)):
        theirs = {
            name: field.contents()
            for name, field in gguf.GGUFReader(path).fields.items()
            if not name.startswith("GGUF.") and name != "some.nested"
        }
        ours = gguf_metadata(path)
        assert ours.pop("some.nested", [[1, 2], [3]]) == [[1, 2], [3]]
        assert ours == theirs
    assert gguf_metadata(tmp_path / "a.gguf", ("some.i", "general")).keys() == {
        "general.architecture",
        "some.int8",
        "some.int16",
        "some.int32",
        "some.int64",
    }


def test_damaged_files_give_an_error_or_values(tmp_path: Path) -> None:
    """Cut anywhere: an error. A byte changed: an error or other values, in bounded time and memory."""
    good = _everything(tmp_path / "a.gguf").read_bytes()
    draw = random.Random(0)
    path = tmp_path / "b.gguf"
    for size in range(0, len(good.rstrip(b"\0")), 7):  # the end is filled up with zeros
        path.write_bytes(good[:size])
        with pytest.raises(DataError, match=r"b\.gguf"):
            gguf_metadata(path)
    for _ in range(300):
        place = draw.randrange(len(good))
        path.write_bytes(good[:place] + bytes([draw.randrange(256)]) + good[place + 1 :])
        with contextlib.suppress(DataError):
            gguf_metadata(path)


def test_tensors_lie_where_the_library_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "tensors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "x" * 37)
    writer.add_custom_alignment(64)
    generator = np.random.default_rng(0)
    for number, shape in enumerate([(3, 64), (5,), (2, 3, 32), (2, 1, 3, 4)]):
        values = generator.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if shape[-1] % 32 == 0 else None
        writer.add_tensor(f"t{number}", gguf.quantize(values, kind) if kind else values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, found = gguf_header(path)
    expected = {
        tensor.name: (tuple(reversed(tensor.shape.tolist())), int(tensor.tensor_type), int(tensor.data_offset))
        for tensor in gguf.GGUFReader(path).tensors
    }
    assert found == expected


def test_tensors_have_at_most_four_dimensions_as_the_format_says(tmp_path: Path) -> None:
    path = tmp_path / "tensors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("wide", np.zeros((1, 2, 1, 2, 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(DataError, match="'wide' has 5 dimensions"):
        gguf_header(path)
