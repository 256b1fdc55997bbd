"""The part ``optimizers`` of ``cordillera bench llama`` with few steps, its share of tokens, and its block in docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _figures
import _figures_language
import llama
import numpy as np
import pytest
from _llama_optimizers import NAMES, RATES, SEEDS, SHARES, TRIAL, share_needed
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.programs import part_of

LOSSES = st.lists(st.floats(0.5, 5.0), min_size=3, max_size=3)


@given(losses=LOSSES, loss=st.floats(0.5, 5.0))
def test_the_share_needed_is_where_the_line_first_crosses_the_loss(losses: list[float], loss: float) -> None:
    shares = (0.5, 0.75, 1.0)
    grid = np.geomspace(shares[0], 1.0, 2_001)
    line = np.interp(np.log(grid), np.log(shares), losses)
    found = share_needed(loss, shares, losses)
    if found is None:
        assert line.min() > loss - 1e-9
    elif found == shares[0]:
        assert losses[0] <= loss
    else:
        assert np.interp(np.log(found), np.log(shares), losses) == pytest.approx(loss, abs=1e-9)
        assert line[grid < found * (1 - 1e-9)].min() > loss - 1e-9


def test_trials_are_as_many_and_their_seed_is_not_compared() -> None:
    assert len({len(rates) for rates in RATES.values()}) == 1
    assert all(list(rates) == sorted(rates) for rates in RATES.values())
    assert TRIAL not in SEEDS
    assert len(SEEDS) >= 3


@pytest.mark.slow
def test_both_are_trained_on_as_many_tokens(tmp_path: Path) -> None:
    found = part_of(llama, "optimizers", tmp_path)
    whole = [one for one in found["runs"] if one["steps"] == found["steps"]]
    assert {one["optimizer"] for one in whole} == set(NAMES)
    assert len({one["tokens"] for one in whole if one["seed"] == SEEDS[0]}) == 1
    shorter = {one["steps"] / found["steps"] for one in found["runs"] if one["steps"] < found["steps"]}
    assert shorter == set(SHARES)
    assert [one["rate"] for one in found["trials"]] == [rate for rates in RATES.values() for rate in rates]
    assert set(found["steps_timed"]["seconds"]) == set(NAMES)
    # what is finished is not trained again
    log = tmp_path / "llama-optimizers.jsonl"
    before = log.read_text()
    assert part_of(llama, "optimizers", tmp_path)["trials"] == found["trials"]
    assert log.read_text() == before


def content(**changes: Any) -> dict[str, Any]:
    times = {"median": 1.25, "low": 1.2, "high": 1.3, "count": 9}
    return {
        "quick": False, "parameters": 820_000, "tokens": 1_024_000, "steps": 500, "shares": [0.5, 0.75, 1.0],
        "rates": {"adamw": 0.006, "muon": 0.012}, "at_edge": {"adamw": False, "muon": True},
        "trials": [{"optimizer": name} for name in ("adamw", "muon") for _ in range(4)],
        "losses": {name: {"mean": 2.0, "low": 1.9, "high": 2.1} for name in ("adamw", "muon")},
        "change": {"value": -0.2, "low": -0.3, "high": -0.1}, "tokens_needed": [0.6, 0.7, 0.65],
        "steps_timed": {"threads": 2, "quiet": True, "muon_over_adamw": times,
                        "seconds": dict.fromkeys(("adamw", "muon"), times)},
    } | changes  # fmt: skip


def block(folder: Path, **changes: Any) -> str:
    (folder / "llama-optimizers.json").write_text(json.dumps(content(**changes)))
    _figures.results.cache_clear()
    return _figures_language.optimizers()


def test_the_block_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_figures, "RESULTS", tmp_path)
    try:
        assert _figures_language.optimizers().startswith("Not measured yet")
        text = block(tmp_path)
        assert "| Muon | 0.012 (of 4, at the end) | 2.000 | 1.900 to 2.100 | 1250 |" in text
        assert "after 60 to 70 % of the tokens" in text
        assert "1.25 times as long" in text
        assert "at most 50 to 70 %" in block(tmp_path, tokens_needed=[0.5, 0.7, 0.6])
        lost = block(tmp_path, tokens_needed=[None, None, None])
        assert "With 3 of 3 seeds it does not reach AdamW's loss" in lost
        assert "of the tokens" not in lost
        busy = block(tmp_path, steps_timed=content()["steps_timed"] | {"quiet": False})
        assert "1250" not in busy
        assert "times as long" not in busy
    finally:
        _figures.results.cache_clear()
