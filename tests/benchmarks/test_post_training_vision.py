"""The part ``vision``: all figures are there, and the language model stays as it is."""

from __future__ import annotations

import json

import pytest
from _post_training_vision import TARGET, run_vision
from _results import make_console


def test_all_ways_of_asking_are_counted() -> None:
    found = run_vision(make_console(), quick=True)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found["answers"]) == {"image", "no image", "image of another question"}
    for rates in found["answers"].values():
        assert {kind: rate["asked"] for kind, rate in rates.items()} == dict.fromkeys(("shape", "colour", "both"), 4)
    assert not found["text_changed"]
    assert found["steps"] == 3
    assert found["skipped"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three minutes of a processor
def test_shapes_and_colours_are_seen_and_not_guessed() -> None:
    found = run_vision(make_console(), quick=False)
    for kind in ("shape", "colour"):
        assert found["answers"]["image"][kind]["rate"] >= TARGET
        for way in ("no image", "image of another question"):
            rate = found["answers"][way][kind]
            assert rate["low"] < rate["chance"] < rate["high"]
    assert found["answers"]["image"]["both"]["low"] > found["answers"]["no image"]["both"]["high"]
    assert not found["text_changed"]
