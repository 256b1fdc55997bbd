"""The benchmark of codecs: its baselines are the published formats, and it runs."""

from __future__ import annotations

from pathlib import Path

import compression
import numpy as np
import pytest
from _compression_baselines import (
    huffman_bytes,
    huffman_lengths,
    hybrid_bytes,
    vector_lz_bytes,
    vector_lz_tokens,
)
from _compression_step import CODECS, FAST, ON_FAST, RATES
from _compression_tables import KAGGLE, TERABYTE, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.cli import bench
from tests.benchmarks.programs import part_of
from tests.distributed.processes import needs_gloo


def test_the_command_finds_it() -> None:
    assert "compression" in bench.programs()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 6), max_size=200))
def test_vector_lz_loses_nothing(numbers: list[int]) -> None:
    found: list[int] = []
    for length, value in vector_lz_tokens(numbers):
        found.extend(found[len(found) - value : len(found) - value + length] if length else [value])
    assert found == numbers


def test_vector_lz_counts_flags_matches_vectors_and_blocks() -> None:
    codes = np.repeat(np.arange(3, dtype=np.uint8)[:, None], 16, axis=1)[[0, 1, 0, 1, 2]]
    # Two vectors, one match of two, one vector: 4 flags in a byte, 2 bytes of match, 3 vectors.
    assert vector_lz_tokens([0, 1, 0, 1, 2]) == [(0, 0), (0, 1), (2, 2), (0, 2)]
    assert vector_lz_bytes(codes) == 8 + 1 + 2 + 3 * 16
    far = np.arange(40)[[*range(40), 0]]
    assert vector_lz_tokens(far.tolist())[-1] == (0, 0)


def test_huffman_codes_are_shortest() -> None:
    assert sorted(huffman_lengths([8, 4, 2, 1, 1])) == [1, 2, 3, 4, 4]
    assert huffman_bytes(np.zeros((16, 16), np.uint8)) == 1 + 32
    codes = np.random.default_rng(0).integers(0, 9, (64, 32)).astype(np.uint8)
    assert hybrid_bytes(codes) == min(vector_lz_bytes(codes), huffman_bytes(codes))


def test_drawn_rows_are_a_function_of_the_seed() -> None:
    assert len(KAGGLE) == len(TERABYTE) == 26
    first, second = next(drawn("Kaggle", KAGGLE, 3)), next(drawn("Kaggle", KAGGLE, 3))
    assert first.rows.equal(second.rows)
    assert list(first.rows.shape) == [128, 32]
    assert first.rows.isfinite().all()


@pytest.mark.slow
def test_the_best_codec_reaches_its_ratio(tmp_path: Path) -> None:
    for entry in part_of(compression, "codecs", tmp_path)["results"]:
        assert entry["times_hybrid"] >= compression.TARGET_RATIO
        assert entry["times_zstandard"] >= compression.TARGET_RATIO


@needs_gloo
@pytest.mark.slow
def test_steps_are_timed_on_every_link(tmp_path: Path) -> None:
    found = part_of(compression, "step", tmp_path)
    named = {
        link: [row["codec"] for row in found["rows"] if row["link"] == link] for link in found["share_of_exchange"]
    }
    assert named == {key: list(CODECS) for key in RATES} | {FAST: list(ON_FAST)}
    assert {row["evidence"] for row in found["rows"] if row["link"] == FAST} == {"measured"}
    assert 0.25 < found["share_of_exchange"]["40 Mb/s"] < 0.38
    (short,) = (row for row in found["rows"] if (row["link"], row["codec"]) == ("40 Mb/s", "bounded"))
    assert short["ratio"] > 4


@needs_gloo
@pytest.mark.slow
def test_training_shrinks_rows_and_large_bounds_are_seen(tmp_path: Path) -> None:
    rows = part_of(compression, "training", tmp_path)["rows"]
    made = {row["codec"]: row for row in rows if row["recipe"] == "synthetic-dlrm"}
    assert list(made) == ["raw", "bounded", "bounded, 10 times"]
    assert made["raw"]["train"]["changes"] == [0.0, 0.0]
    assert 1 < made["bounded"]["ratio"] < made["bounded, 10 times"]["ratio"]
    assert made["bounded, 10 times"]["train"]["change"] > 5 * abs(made["bounded"]["train"]["change"])
