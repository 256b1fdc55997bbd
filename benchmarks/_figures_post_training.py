"""Figures of post-training in the documentation."""

from __future__ import annotations

from _figures import Figures, percent, results, table

_WAYS = {"image": "with its image", "no image": "without an image", "image of another question": "with another image"}
_QUESTIONS = {"shape": "What shape is it?", "colour": "What colour is it?"}


def _rate(rate: float | None, low: float, high: float) -> str:
    return "undefined" if rate is None else f"{percent(rate, '.1f')} ({100 * low:.1f} to {100 * high:.1f})"


def vision() -> str:
    """Return the shares of questions about images that were answered rightly."""
    answers = results("post_training-vision")["answers"]
    rows = []
    for kind, first in answers["image"].items():
        found = [answers[way][kind] for way in _WAYS]
        cells = [_rate(one["rate"], one["low"], one["high"]) for one in found]
        rows.append([_QUESTIONS.get(kind, "Is it a red circle?"), *cells, percent(first["chance"], ".1f")])
    return table(["question", *_WAYS.values(), "chance"], rows)


def trl() -> str:
    """Return the largest differences from TRL."""
    largest = results("post_training-trl")["largest"]
    return table(
        [name.replace("_with_", ", with ").replace("nll", "the likelihood term") for name in largest],
        [[f"{value:.1e}" for value in largest.values()]],
    )


def answers() -> str:
    """Return how much likelier held-out answers became by fine-tuning, in nats a token."""
    found = results("post_training-answers")["likelihood"]
    return f"{found['gain']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _likelihood(name: str) -> str:
    return f"{results('post_training-answers')['likelihood'][name]:.3f}"


_PAIRS = {
    "dpo over sft": "after DPO on docstrings, beside fine-tuned alone",
    "dpo on own answers over sft": "after DPO on its own answers, beside fine-tuned alone",
    "sft over base": "fine-tuned, beside as it came",
}


def wins() -> str:
    """Return how often the reward model preferred a model's answers."""
    found = results("post_training-preferences")["wins"]
    rows = [
        [_PAIRS[name], _rate(one["rate"], *one["interval"]), str(one["prompts"]), str(one["ties"])]
        for name, one in found.items()
    ]
    return table(["model", "preferred", "prompts", "ties"], rows)


def groups() -> str:
    """Return the shares of held-out problems that are solved, by step."""
    found = results("post_training-groups")["grpo"]["evaluations"]
    rows = [[str(one["step"]), percent(one["solved"], ".1f")] for one in found]
    return table(["steps", f"solved of {found[0]['units']} held-out problems"], rows)


def best_of() -> str:
    """Return the mean reward of the best of several answers, expected and drawn."""
    found = results("post_training-preferences")["best_of"]
    rows = [[count, f"{found['expected'][count]:.3f}", f"{found['drawn'][count]:.3f}"] for count in found["expected"]]
    return table(["best of", "mean reward by the formula", "of disjoint groups"], rows)


FIGURES: Figures = {
    "post-training-wins": wins,
    "post-training-groups": groups,
    "post-training-best-of": best_of,
    "post-training-answers": answers,
    "post-training-answers-before": lambda: _likelihood("before"),
    "post-training-answers-after": lambda: _likelihood("after"),
    "post-training-answers-chats": lambda: str(results("post_training-answers")["likelihood"]["chats"]),
    "post-training-answers-steps": lambda: str(results("post_training-answers")["training"]["steps"]),
    "post-training-vision": vision,
    "post-training-vision-steps": lambda: str(results("post_training-vision")["steps"]),
    "post-training-trl": trl,
}
