"""Headline figures of a language run for its report; figures that were not recorded are named."""

from __future__ import annotations

import math
import statistics
from typing import Any

from cordillera.numbers import compact, duration, fixed, whole
from cordillera.training.language.records import SHARES, LanguageRecords, mean, total

_RECORDED = {
    "loss": "training loss",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens": "tokens",
    "tokens_per_second": "tokens a second",
    "flops_per_second": "FLOP/s",
    "mfu": "MFU",
    "imbalance": "imbalance",
    "delay": "token delay",
    "memory_bytes": "memory",
    "exposed_seconds": "exposed communication",
    "data_seconds": "waiting for data",
}
_Tile = tuple[str, str, str, str]


def headline(records: LanguageRecords) -> dict[str, Any]:
    """Return the tiles of the headline figures, and a sentence with the names of those that are missing."""
    found = [_loss(records), _tokens(records), _rate(records), _utilisation(records), _skipped(records), _time(records)]
    told = []
    if records.headline is not None and math.isfinite(records.headline[1]["step"]):
        split, evaluation = records.headline
        told.append(f"Evaluated on the {split} split at step {whole(evaluation['step'])}.")
    if missing := _unrecorded(records):
        told.append(f"Not recorded: {', '.join(missing)}.")
    return {"tiles": [one for one in found if one is not None], "text": " ".join(told)}


def _loss(records: LanguageRecords) -> _Tile | None:
    if records.headline is None:
        return None
    split, found = records.headline
    if not math.isfinite(found["loss"]):
        return f"{split} loss".capitalize(), "not finite", "NaN or infinity", "the model predicts nothing"
    others = []
    if math.isfinite(found["perplexity"]):
        others.append(f"perplexity {found['perplexity']:,.4g}")
    if math.isfinite(found["bits_per_byte"]):
        others.append(f"{found['bits_per_byte']:.4f} bits a byte")
    others += [f"{name} {100 * found[name]:.1f}\u00a0%" for name in SHARES if math.isfinite(found[name])]
    has_problems = math.isfinite(found["solved"])
    unit = "share of problems not solved" if has_problems else records.unit_of_loss
    things = "problems" if has_problems else "tokens" if unit == "nats a token" else "pairs or answers"
    of = f" over {whole(found['targets'])} {things}" if math.isfinite(found["targets"]) else ""
    return f"{split} loss".capitalize(), fixed(found["loss"]), ", ".join(others), f"{unit}{of}; lower is better"


def _tokens(records: LanguageRecords) -> _Tile | None:
    tokens, steps, documents = records.reached("tokens"), records.reached("step"), records.last("documents")
    if math.isnan(tokens):
        return None
    parts = [f"{whole(documents)} documents"] if math.isfinite(documents) else []
    wanted = records.setting("training", "steps")
    of = f" of {wanted:,}" if isinstance(wanted, int) and steps < wanted else ""
    parts += [f"{whole(steps)}{of} steps"] if math.isfinite(steps) else []
    ratio = f"{tokens / records.parameters:.3g} tokens a parameter" if records.parameters > 0 else ""
    return "Tokens trained", compact(tokens), " in ".join(parts), ratio


def _rate(records: LanguageRecords) -> _Tile | None:
    speed = mean(records.train, "tokens_per_second", "seconds")
    if math.isnan(speed):
        return None
    rates = [value for record in records.train if math.isfinite(value := record["tokens_per_second"])]
    text = f"median record {compact(statistics.median_high(rates))}"
    return "Tokens a second", compact(speed), text, "of all processes together, in training steps"


def _utilisation(records: LanguageRecords) -> _Tile | None:
    flops = mean(records.train, "flops_per_second", "seconds")
    mfu = mean(records.train, "mfu", "seconds")
    meaning = "document mask counted, recomputation not"
    if math.isfinite(mfu):
        rate = f"{compact(flops)} of {compact(flops / mfu)} FLOP/s" if math.isfinite(flops) and mfu > 0 else ""
        return "MFU", f"{100 * mfu:.1f}\u00a0%", rate, f"of the devices' peak; {meaning}"
    if math.isfinite(flops):
        return "FLOP/s", compact(flops), "no MFU: the devices' peak is not known", meaning
    return None


def _skipped(records: LanguageRecords) -> _Tile | None:
    if math.isnan(records.skipped):
        return None
    of = f"of {whole(steps)}" if math.isfinite(steps := records.reached("step")) else ""
    return "Steps skipped", whole(records.skipped), of, "loss or gradient not finite; weights left as they were"


def _time(records: LanguageRecords) -> _Tile | None:
    seconds = total(records.train, "seconds")
    if math.isnan(seconds):
        return None
    beside = (("validation", records.validating), ("checkpoints", total(records.of_kind("checkpoint"), "seconds")))
    others = " and ".join(f"{duration(value)} of {name}" for name, value in beside if math.isfinite(value))
    resumed = len(records.of_kind("resumed"))
    times = "" if not resumed else "resumed once" if resumed == 1 else f"resumed {resumed:,} times"
    return "Training time", duration(seconds), f"beside {others}" if others else "", times


def _unrecorded(records: LanguageRecords) -> list[str]:
    """Return what is missing in tiles, charts and tables."""
    found = ["validation loss"] if records.headline is None else []
    if records.headline is not None:
        names = {"perplexity": "perplexity", "bits_per_byte": "bits a byte"}
        found += [text for key, text in names.items() if math.isnan(records.headline[1][key])]
    found += [text for key, text in _RECORDED.items() if math.isnan(records.last(key))]
    found += [] if any(math.isfinite(one["seconds"]) for one in records.of_kind("checkpoint")) else ["checkpoints"]
    return found
