"""Effects of single features on a score, by ablation.

The effect of a feature is the logit of the row minus its logit with the feature replaced by what an absent value is:
the number that fills blanks, the row of unseen ids, an empty list. Effects are in units of logits. They do not add up
to the logit: what several features say together counts for each of them, or for none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cordillera.data.ranking.encoding import EncodedRows, Encoder


def ablatable(encoder: Encoder) -> list[str]:
    """Return the features that have an absent value: all except single ids that are row numbers themselves."""
    schema = encoder.schema
    singles = [feature.name for feature in schema.categorical if feature.encoding != "identity"]
    return [*(number.name for number in schema.numbers), *singles, *(entries.name for entries in schema.lists)]


def ablated(rows: EncodedRows, encoder: Encoder) -> EncodedRows:
    """Return ``N`` rows once for each of :func:`ablatable`, with that feature absent: ``[features * N]`` rows."""
    schema, names, count = encoder.schema, ablatable(encoder), len(rows)
    found = rows.take(np.tile(np.arange(count), len(names)))

    def part(name: str) -> slice:
        first = names.index(name) * count
        return slice(first, first + count)

    for index, number in enumerate(schema.numbers):
        found.dense[part(number.name), index] = encoder.dense_state[number.name]["fill"]
    for index, single in enumerate(schema.categorical):
        if single.name in names:
            found.ids[part(single.name), index] = 0
    lists = []
    for entries, (values, offsets) in zip(schema.lists, found.lists, strict=True):
        emptied, lengths = part(entries.name), np.diff(offsets)
        first, last = offsets[emptied.start], offsets[emptied.stop]
        lengths[emptied] = 0
        kept = np.concatenate([values[:first], values[last:]])
        lists.append((kept, np.concatenate([[0], np.cumsum(lengths)])))
    return replace(found, lists=tuple(lists))


def effects(logits: NDArray[np.float64], without: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return effects ``[features, N, tasks]`` from ``logits [N, tasks]`` and logits of :func:`ablated` rows."""
    found: NDArray[np.float64] = logits - without.reshape(-1, *logits.shape)
    return found
