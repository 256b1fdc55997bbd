"""Figures of post-training in the documentation."""

from __future__ import annotations

from typing import Any

from _figures import Figures, percent, results, table

_WAYS = {"image": "with its image", "no image": "without an image", "image of another question": "with another image"}
_QUESTIONS = {"shape": "What shape is it?", "colour": "What colour is it?"}


def _rate(rate: float | None, low: float, high: float) -> str:
    return "undefined" if rate is None else f"{percent(rate, '.1f')} ({100 * low:.1f} to {100 * high:.1f})"


def vision() -> str:
    """Return the shares of questions about images that were answered rightly."""
    answers = results("post-training-vision")["answers"]
    rows = []
    for kind, first in answers["image"].items():
        found = [answers[way][kind] for way in _WAYS]
        cells = [_rate(one["rate"], one["low"], one["high"]) for one in found]
        rows.append([_QUESTIONS.get(kind, "Is it a red circle?"), *cells, percent(first["chance"], ".1f")])
    return table(["question", *_WAYS.values(), "chance"], rows)


_GUARD = {
    "precision": "precision of unsafe",
    "recall": "recall",
    "category": "categories right",
    "invalid": "answers not valid",
    "switched_off": "safe once switched off",
}


def guard() -> str:
    """Return precision, recall and other shares of a guard's verdicts."""
    rows = []
    for name, one in results("post-training-guard")["sets"].items():
        shares = [_rate(one[key]["value"], one[key]["low"], one[key]["high"]) for key in _GUARD]
        rows.append([f"{one['examples']:,} conversations of {name}", *shares, f"{one['f1']:.3f}"])
    return table(["held out", *_GUARD.values(), "F1"], rows)


def trl() -> str:
    """Return the largest differences from TRL."""
    largest = results("post-training-trl")["largest"]
    return table(
        [name.replace("_with_", ", with ").replace("nll", "the likelihood term") for name in largest],
        [[f"{value:.1e}" for value in largest.values()]],
    )


def _likelihood() -> Any:
    return results("post-training-answers")["likelihood"]


def gain() -> str:
    """Return how much likelier held-out answers became."""
    found = _likelihood()
    return (
        f"{found['before']:.3f} nats a token before and {found['after']:.3f} after, a gain of {found['gain']:.3f} "
        f"({found['low']:.3f} to {found['high']:.3f})"
    )


FIGURES: Figures = {
    "post-training-vision": vision,
    "post-training-vision-steps": lambda: str(results("post-training-vision")["steps"]),
    "post-training-guard": guard,
    "post-training-trl": trl,
    "post-training-answers": gain,
    "post-training-answers-steps": lambda: str(results("post-training-answers")["training"]["steps"]),
    "post-training-answers-chats": lambda: str(_likelihood()["chats"]),
}
