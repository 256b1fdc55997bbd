"""Files of published checkpoints: our own bring checksums, others' are recorded when they are first read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cordillera.errors import CheckpointError
from cordillera.models.language.checkpoints import load, save_consolidated, save_hugging_face
from cordillera.models.language.checkpoints.first_sight import compare_with_first_sight
from tests.fuzzing import flips

from .conftest import MakeLlama


@pytest.mark.parametrize(
    ("save", "size"), [(save_hugging_face, 20_000), (save_hugging_face, 1 << 30), (save_consolidated, 2)]
)
def test_any_flip_or_cut_of_a_published_file_is_refused_by_name(
    make_llama: MakeLlama, tmp_path: Path, save: Callable[..., Any], size: int, fuzz_inputs: Callable[[int], int]
) -> None:
    folder, rng = tmp_path / "model", random.Random(2)
    save(make_llama(vocabulary=64), folder, size)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for number in range(fuzz_inputs(4)):
            path.write_bytes(flips(content, rng) if number % 5 else content[: rng.randrange(len(content))])
            with pytest.raises(CheckpointError, match=str(folder)) as error:
                load(folder)
            assert path.name in str(error.value) or "tensor" in str(error.value)
        path.write_bytes(content)
    load(folder)


def test_a_file_that_has_changed_since_it_was_first_read_is_named(tmp_path: Path) -> None:
    files, record = [tmp_path / "a", tmp_path / "b"], tmp_path / "cache" / "seen.json"
    for file in files:
        file.write_bytes(file.name.encode() * 100)
    compare_with_first_sight(files, record)
    first = record.read_bytes()
    compare_with_first_sight(files, record)
    assert record.read_bytes() == first
    os.utime(files[1], (1, 1))
    compare_with_first_sight(files, record)  # it was copied: the content is the same
    files[1].write_bytes(b"b" * 99 + b"c")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"/b: has changed since it was first read here, on 20.*") as error:
            compare_with_first_sight(files, record)
    assert f"delete {record}" in str(error.value)
    record.unlink()
    compare_with_first_sight(files, record)
    record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"seen\.json: is not JSON"):
        compare_with_first_sight(files, record)
