"""Products measured on this machine: what is written, what an interruption leaves, what is not measured again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cordillera.cost import Products
from cordillera.errors import PlanError
from cordillera.kernels import products
from cordillera.kernels.products import measure, measure_table

SHAPES = [(8, 8, 8, 1), (8, 16, 8, 2), (16, 16, 16, 1), (32, 16, 16, 1)]


def test_products_are_measured_on_this_machine() -> None:
    small, large = measure([(16, 16, 16, 2), (512, 512, 512, 1)], dtype=torch.float32)
    assert 0 < small < large


def test_a_table_says_where_it_was_measured_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "products.csv"
    seen: list[tuple[int, int]] = []
    first = measure_table(SHAPES[:2], path, "cpu")
    assert (first.new, first.too_large, first.left) == (2, 0, 0)
    before = Products.read(path)
    assert before.dtype == "bfloat16"
    assert before.device == first.products.device != "unknown"  # type: ignore[union-attr]
    second = measure_table(
        [*SHAPES, SHAPES[3]], path, "cpu", on_product=lambda shape, done, total: seen.append((done, total))
    )
    assert (second.new, second.left) == (2, 0)
    assert seen == [(0, 2), (1, 2)]
    after = Products.read(path)
    assert list(after.seconds) == sorted(SHAPES)
    assert all(after.seconds[shape] == before.seconds[shape] for shape in SHAPES[:2])
    written = path.stat().st_mtime_ns
    assert measure_table(SHAPES, path, "cpu").new == 0
    assert path.stat().st_mtime_ns == written


def test_an_interruption_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "products.csv"

    def interrupt(after: int) -> None:
        def watch(shape: tuple[int, int, int, int], done: int, total: int) -> None:
            if done == after:
                raise KeyboardInterrupt

        measured = measure_table(SHAPES, path, "cpu", watch)
        assert (measured.new, measured.left) == (after, len(SHAPES) - after)

    interrupt(0)
    assert not path.exists()
    interrupt(3)
    assert [one.name for one in tmp_path.iterdir()] == ["products.csv"]
    assert list(Products.read(path).seconds) == sorted(SHAPES[:3])


def test_a_table_is_written_while_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed loses a second's work at most."""
    path, held = tmp_path / "products.csv", []
    monkeypatch.setattr(products, "_SAVE_S", 0.0)
    measure_table(SHAPES, path, "cpu", lambda *_: held.append(len(Products.read(path).seconds) if path.exists() else 0))
    assert held == [0, 1, 2, 3]


def test_what_the_memory_does_not_hold_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_free_bytes", lambda device: 2000.0)
    measured = measure_table(SHAPES, tmp_path / "products.csv", "cpu")
    assert measured.too_large == 1
    assert list(Products.read(tmp_path / "products.csv").seconds) == sorted(SHAPES[:3])


@pytest.mark.parametrize(("device", "dtype"), [("another", "bfloat16"), (None, "float16")])
def test_a_table_of_another_device_or_dtype_is_not_continued(tmp_path: Path, device: str | None, dtype: str) -> None:
    path = tmp_path / "products.csv"
    measure_table(SHAPES[:1], path, "cpu")
    here = Products.read(path)
    Products(here.seconds, "a test", device or here.device, dtype).write(path)
    before = path.read_bytes()
    with pytest.raises(PlanError, match="measure into another file"):
        measure_table(SHAPES, path, "cpu")
    assert path.read_bytes() == before
