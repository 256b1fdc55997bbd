"""Figures of a guard are those of counting by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from _post_training_guard import _measure

from cordillera.data.language.guard.examples import GUARD_CATEGORIES, held_out_guard_examples
from cordillera.data.tokenizers.chat import Message
from cordillera.serving.language.guard import GuardVerdict

EXAMPLES = held_out_guard_examples()[:300]


class Suspicious:
    """A guard to whom every turn is unsafe, for its privacy, in words of its own."""

    categories = GUARD_CATEGORIES

    def check(self, conversations: Sequence[Sequence[Message]]) -> list[GuardVerdict]:
        return [GuardVerdict(False, ("S7",), False, 1.0) for _ in conversations]


class Knowing(Suspicious):
    """A guard that knows the examples by heart, and heeds the list."""

    def check(self, conversations: Sequence[Sequence[Message]]) -> list[GuardVerdict]:
        codes = {one.conversation: [*one.codes] for one in EXAMPLES}
        found = [[code for code in codes[(*turns,)] if code in self.categories.names] for turns in conversations]
        return [GuardVerdict(not own, (*own,), True, float(bool(own))) for own in found]


def test_a_guard_that_suspects_everyone_finds_all_and_is_often_wrong() -> None:
    found = _measure(Suspicious(), EXAMPLES)
    unsafe = [one for one in EXAMPLES if one.codes]
    assert found["precision"]["value"] == len(unsafe) / len(EXAMPLES)
    assert found["recall"]["value"] == found["invalid"]["value"] == 1
    assert found["category"]["value"] == sum(one.codes == ("S7",) for one in unsafe) / len(unsafe)
    assert found["switched_off"]["value"] == 0
    precision = found["precision"]["value"]
    assert found["f1"] == pytest.approx(2 * precision / (precision + 1))


def test_a_guard_that_knows_all_is_right() -> None:
    found = _measure(Knowing(), EXAMPLES)
    rates = {name: found[name]["value"] for name in ("precision", "recall", "category", "switched_off", "invalid")}
    assert rates == {"precision": 1, "recall": 1, "category": 1, "switched_off": 1, "invalid": 0}
    assert found["f1"] == 1


def test_a_share_of_nothing_is_undefined() -> None:
    safe = [one for one in EXAMPLES if not one.codes]
    assert _measure(Suspicious(), safe)["recall"]["value"] is None
