"""The part ``vision``: all figures are there, and the language model stays as it is."""

from __future__ import annotations

import json

from _post_training_vision import run_vision
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
