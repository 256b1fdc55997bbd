"""Warnings about a language run in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cordillera.training.language.records import LanguageRecords, Record, mean, share

_STRETCHES = 10
_MANY_SKIPPED = 0.01
_MUCH_IMBALANCE = 1.2
_MUCH_WAITING = 0.1
_MUCH_EXPOSED = 0.3
_LOW_MFU = 0.2


def find_warnings(records: LanguageRecords) -> list[str]:
    """Return warnings for the reader of a run's report, one or two sentences each, the most serious first."""
    return [*_learning(records), *_speed(records), *_missing(records)]


def _learning(records: LanguageRecords) -> list[str]:
    train, found = records.train, []
    if not train:
        return ["Nothing has been trained yet: the run has no records of training."]
    broken = sum(1 for record in train if not math.isfinite(record["loss"]))
    if broken:
        found.append(f"{broken:,} of {len(train):,} records of the training loss are not finite numbers.")
    learns_from_data = records.model.get("objective") != "grpo"  # whose samples are its own
    if learns_from_data and (rise := _rise(train)) is not None:
        lowest, end = rise
        found.append(
            f"The training loss is rising: {end:.4f} over the last tenth of the run, after {lowest:.4f} before. "
            "A lower learning rate, or going on from an earlier checkpoint, may help."
        )
    for split, validations in records.validations.items():
        known = [record for record in validations if math.isfinite(record["loss"])]
        if len(known) < len(validations):
            found.append(f"{len(validations) - len(known):,} of {len(validations):,} losses on {split} are not finite.")
        best = min(known, key=lambda record: record["loss"], default=None)
        if learns_from_data and best is not None and known[-1]["loss"] > best["loss"] + 0.01 * abs(best["loss"]):
            found.append(
                f"The loss on {split} was lowest at {_step(best)} ({best['loss']:.4f}) and is {known[-1]['loss']:.4f} "
                "at the end: the model may be learning its text by heart."
            )
    skipped, steps = records.skipped, records.reached("step")
    if steps > 0 and skipped / steps > _MANY_SKIPPED:
        found.append(
            f"{skipped:,.0f} of {steps:,.0f} steps were skipped because the loss or a gradient was not finite; "
            f"more than {100 * _MANY_SKIPPED:g} % means that training is not stable."
        )
    return found


def _rise(train: Sequence[Record]) -> tuple[float, float] | None:
    """Return mean losses of the best and the last tenth, if the last is higher by more than noise and one percent."""
    losses = [record["loss"] for record in train if math.isfinite(record["loss"])]
    size = len(losses) // _STRETCHES
    if size < 2:
        return None
    ends = [len(losses) - size * number for number in range(_STRETCHES - 1, -1, -1)]
    stretches = [losses[end - size : end] for end in ends]
    means = [math.fsum(stretch) / size for stretch in stretches]
    errors = [
        math.fsum((loss - centre) ** 2 for loss in stretch) / (size - 1) / size
        for stretch, centre in zip(stretches, means, strict=True)
    ]
    best = means.index(min(means))
    noise = math.sqrt(errors[best] + errors[-1])
    return (means[best], means[-1]) if means[-1] - means[best] > max(3 * noise, 0.01 * abs(means[best])) else None


def _speed(records: LanguageRecords) -> list[str]:
    train, found = records.train, []
    imbalance = mean(train, "imbalance", "steps")
    if imbalance > _MUCH_IMBALANCE:
        found.append(
            f"The heaviest microbatch has {imbalance:.2f} times the work of the mean one; above {_MUCH_IMBALANCE:g}, "
            "the others wait long for it. Packing by work with queues for long documents evens it out."
        )
    waiting = share(train, "data_seconds")
    if waiting > _MUCH_WAITING:
        found.append(
            f"{100 * waiting:.0f} % of the training time went into waiting for data; more than "
            f"{100 * _MUCH_WAITING:g} % is worth a look."
        )
    exposed = share(train, "exposed_seconds")
    if exposed > _MUCH_EXPOSED:
        found.append(
            f"{100 * exposed:.0f} % of the training time went into communication that nothing was computed beside; "
            f"above {100 * _MUCH_EXPOSED:g} %, another mesh may be faster."
        )
    mfu = mean(train, "mfu", "seconds")
    if mfu > 1:
        found.append(
            f"Training used {100 * mfu:.0f} % of the devices' peak (MFU), which cannot be: the peak of a CPU is timed "
            "when a run begins, and this one was slower then. Tokens a second are right."
        )
    elif mfu < _LOW_MFU:
        found.append(
            f"Training used {100 * mfu:.1f} % of the devices' peak (MFU); below {100 * _LOW_MFU:g} %, larger "
            "microbatches, a lower precision or another mesh may be faster."
        )
    return found


def _missing(records: LanguageRecords) -> list[str]:
    found = []
    headline = records.headline
    if headline is not None and not math.isfinite(headline[1]["loss"]):
        found.append(f"The loss of the evaluation at {_step(headline[1])} is NaN or infinite: the model is of no use.")
    if headline is None:
        found.append("No validation: nothing says how well the model predicts text that it was not trained on.")
    elif records.final is None:
        found.append(f"The final evaluation is not there yet; figures are of the last one, at {_step(headline[1])}.")
    elif (end := records.reached("step")) > headline[1]["step"]:
        found.append(f"The final evaluation is of {_step(headline[1])}; training has gone on to step {end:,.0f}.")
    if not records.model:
        found.append("The run has no model.json, so the model's sizes and the mesh are not known.")
    if not records.environment:
        found.append("The run has no environment.json, so machine and versions are not known.")
    told = records.model.get("data") or {}
    texts = told.get("warnings")
    return found + [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else found


def _step(record: Record) -> str:
    return f"step {record['step']:,.0f}" if math.isfinite(record["step"]) else "an unknown step"
