"""What ranks must agree on when they call one collective: operation, number of elements, number format, root.

Shapes may differ where the number of elements is the same, because libraries of collectives see only that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cordillera.distributed.tracing.rank_trace import Collective, TracedCommunicator

_GATHERS = {"all_gather", "_all_gather_base", "all_gather_single", "all_gather_into_tensor_coalesced"}
_SCATTERS = {"reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"}
_REDUCES = {"all_reduce", "allreduce_coalesced"}
_INPUTS_AGREE = _GATHERS | _SCATTERS | _REDUCES | {"reduce", "_reduce_oop", "gather", "reduce_scatter_v"}
_OUTPUTS_AGREE = _GATHERS | _SCATTERS | _REDUCES | {"broadcast", "_broadcast_oop", "scatter", "all_gather_v"}
_EXCHANGES = {"all_to_all", "all_to_all_single", "all_to_all_v_single"}


class CallSignature(NamedTuple):
    """Part of a collective that all its members must call alike."""

    op: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    root: int | None = None

    def __str__(self) -> str:
        elements = self.inputs or self.outputs
        size = f" of {' + '.join(f'{one:,}' for one in elements)} elements" if elements else ""
        form = f" in {'/'.join(self.dtypes)}" if self.dtypes else ""
        return self.op + size + form + ("" if self.root is None else f" with root {self.root}")


@dataclass(frozen=True)
class Mismatch:
    """Ranks that called an operation differently from the others.

    Attributes:
        ranks: The ranks that differ; empty if the wrong side is unknown.
        certain: Whether more ranks called the other form.
        groups: Every form that was called, with its ranks, the most frequent first.
    """

    ranks: tuple[int, ...]
    certain: bool
    groups: tuple[tuple[str, tuple[int, ...]], ...]


def signature(one: Collective) -> CallSignature:
    """Return the part of a call that must be equal at all members of the operation."""
    if one.op in _EXCHANGES:
        return CallSignature(one.op, dtypes=one.input_dtypes[:1])
    inputs, outputs = one.op in _INPUTS_AGREE, one.op in _OUTPUTS_AGREE
    dtypes = (one.input_dtypes if inputs else ()) + (one.output_dtypes if outputs else ())
    return CallSignature(
        one.op,
        tuple(map(math.prod, one.input_sizes)) if inputs else (),
        tuple(map(math.prod, one.output_sizes)) if outputs else (),
        tuple(dict.fromkeys(dtypes)),
        one.root,
    )


def needs_all(one: Collective) -> bool:
    """Return whether no rank can complete an operation before all members have called it."""
    return one.op in _GATHERS | _SCATTERS | _REDUCES | _EXCHANGES | {"barrier", "all_reduce_barrier"}


def alike(records: Iterable[Collective]) -> bool:
    """Return whether operations are equal in all that is compared; if not, they may still be compatible."""
    seen = {
        (one.op, one.input_sizes, one.output_sizes, one.input_dtypes, one.output_dtypes, one.root) for one in records
    }
    return len(seen) < 2 and not any(key[0] in _EXCHANGES for key in seen)


def find_mismatch(
    records: Mapping[int, Collective], communicator: TracedCommunicator, siblings: Iterable[Collective]
) -> Mismatch | None:
    """Return the ranks that called a collective differently from the others, or None if all agree.

    Args:
        records: The collective of one number, by rank.
        communicator: Its communicator.
        siblings: Collectives of the same number in other communicators of the description, which decide between two
            forms that equally many ranks called.
    """
    forms: dict[CallSignature, list[int]] = {}
    rooted = all(one.root is not None for one in records.values())  # otherwise some roots are unknown
    for rank in sorted(records):
        form = signature(records[rank])
        forms.setdefault(form if rooted else form._replace(root=None), []).append(rank)
    if len(forms) < 2:
        return _exchange_mismatch(records, communicator)
    ordered = sorted(forms, key=lambda form: -len(forms[form]))
    right: CallSignature | None = ordered[0] if len(forms[ordered[0]]) > len(forms[ordered[1]]) else None
    if right is None:
        others = Counter(
            signature(one)._replace(root=None) for one in siblings
        )  # each communicator has roots of its own
        seen = {form: others[form._replace(root=None)] for form in forms}
        known = sorted((form for form in forms if seen[form]), key=lambda form: -seen[form])
        if known and (len(known) == 1 or seen[known[0]] > seen[known[1]]):
            right = known[0]
            ordered.sort(key=lambda form: form != right)
    wrong = sorted(rank for form, ranks in forms.items() if form != right for rank in ranks)
    groups = tuple((str(form), tuple(forms[form])) for form in ordered)
    return Mismatch(tuple(wrong), right is not None, groups)


def _exchange_mismatch(records: Mapping[int, Collective], communicator: TracedCommunicator) -> Mismatch | None:
    """Compare the sizes that members of an all-to-all send with the sizes that the others receive."""
    if not records or next(iter(records.values())).op not in _EXCHANGES or len(records) < len(communicator.ranks):
        return None
    place = {rank: number for number, rank in enumerate(communicator.ranks)}
    count = len(place)
    if all(len(one.input_splits) == count == len(one.output_splits) for one in records.values()):
        return _split_mismatch(records, place)
    sent, received = (
        sum(math.prod(size) for one in records.values() for size in sizes(one))
        for sizes in (lambda one: one.input_sizes, lambda one: one.output_sizes)
    )
    if sent == received:
        return None
    groups = ((f"{sent:,} elements sent, {received:,} expected", tuple(sorted(records))),)
    return Mismatch((), False, groups)


def _split_mismatch(records: Mapping[int, Collective], place: Mapping[int, int]) -> Mismatch | None:
    ranks = list(place)
    sent = np.array([records[rank].input_splits for rank in ranks])
    expected = np.array([records[rank].output_splits for rank in ranks]).T
    pairs = [(ranks[sender], ranks[receiver]) for sender, receiver in np.argwhere(sent != expected).tolist()]
    if not pairs:
        return None
    count = Counter(rank for pair in pairs for rank in set(pair))
    wrong: list[int] = []
    left, certain = pairs, True
    while left:  # the rank that most disagreements have in common
        share = Counter(rank for pair in left for rank in set(pair))
        most = max(share.values())
        ties = sorted(rank for rank, number in share.items() if number == most)
        certain = certain and len(ties) == 1
        wrong += ties if most == 1 or len(ties) > 1 else ties[:1]
        left = [pair for pair in left if not set(pair) & set(wrong)]
    groups = tuple(
        (
            f"{sender} sends {records[sender].input_splits[place[receiver]]:,} elements to {receiver}, "
            f"which expects {records[receiver].output_splits[place[sender]]:,}",
            (sender, receiver),
        )
        for sender, receiver in sorted(pairs, key=lambda pair: (-count[pair[0]], pair))[:3]
    )
    return Mismatch(tuple(sorted(set(wrong))), certain, groups)
