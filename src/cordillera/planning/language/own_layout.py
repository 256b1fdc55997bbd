"""A person's own plan, read from one line of text: ``tensor=8,pipeline=16,chunks=8,shard_gradients=true``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from cordillera.errors import PlanError
from cordillera.planning.language.workload import PRODUCTION_ORDER, Fp8, Layout, Recompute, Workload

NetworkChoice = Literal["library", "tuned"]
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_CHOICES = {"Recompute": get_args(Recompute), "Fp8": get_args(Fp8)}
_FIELDS = {field.name: field.type for field in fields(Layout)}
_OTHERS = ("schedule", "network", "order")
_EXAMPLE = "tensor=8,pipeline=16,chunks=8,recompute=none"


@dataclass(frozen=True)
class OwnLayout:
    """A layout that a person states, with all that makes a plan of it.

    Attributes:
        text: The line as it was written.
        layout: Degrees of parallelism.
        schedule: Name of the schedule, as :func:`cordillera.planning.language.step.families` names it; None for
            interleaved 1F1B, or 1F1B with one stage per pipeline rank.
        network: Settings of a communication ``library``, or those ``tuned`` for the cluster.
        order: Order of the dimensions on the cluster, innermost first.
    """

    text: str
    layout: Layout
    schedule: str | None = None
    network: NetworkChoice = "library"
    order: tuple[str, ...] = PRODUCTION_ORDER


def read_layout(text: str, devices: int, workload: Workload) -> OwnLayout:
    """Read a layout from a line of ``key=value`` with commas between them.

    The keys are the attributes of :class:`Layout`, and ``schedule``, ``network`` and ``order``
    (``order=tensor/context/data/pipeline``) of :class:`OwnLayout`. What is left out has these values: ``data`` is the
    number of devices divided by the other degrees; ``shards`` is ``data``; ``sequence_parallel`` is true if there is
    tensor parallelism; ``overlap_gradients`` is true; ``fp8`` is that of the workload; everything else is as in
    :class:`Layout`.

    Args:
        text: The line.
        devices: Number of devices in use.
        workload: Workload to train.

    Raises:
        PlanError: If the line cannot be read, takes another number of devices, or is impossible for the workload; the
            message lists every reason.
    """
    where = f"layout {text.strip()[:120] or repr(text[:120])}"
    values = _values(text, where)
    rest = 1
    for name in ("tensor", "context", "pipeline"):
        rest *= int(values.get(name, 1))
    if "data" not in values:
        if rest > 0 and devices % rest:
            raise PlanError(
                f"tensor x context x pipeline = {rest:,} does not divide {devices:,} devices",
                where=where,
                remedy="other degrees, or --devices",
            )
        values["data"] = devices // max(1, rest)
    values.setdefault("shards", values["data"])
    values.setdefault("sequence_parallel", values.get("tensor", 1) > 1)
    values.setdefault("overlap_gradients", True)
    values.setdefault("fp8", workload.fp8)
    others: dict[str, Any] = {name: values.pop(name) for name in _OTHERS if name in values}
    layout = Layout(**values)
    problems = layout.problems(workload)
    if problems:
        raise PlanError("; ".join(problems), where=where)
    if layout.devices != devices:
        raise PlanError(
            f"takes {layout.devices:,} devices, {devices:,} are in use",
            where=where,
            remedy=f"--devices {layout.devices}, or leave data out",
        )
    return OwnLayout(text.strip(), layout, **others)


def _values(text: str, where: str) -> dict[str, Any]:
    """Return the values of a line by their keys."""
    readers: dict[str, Callable[[str], Any]] = {name: _reader(str(kind)) for name, kind in _FIELDS.items()}
    readers |= {"schedule": str, "network": _one_of(get_args(NetworkChoice)), "order": _order}
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = (word.strip() for word in part.partition("="))
        if not sign or not name or not value:
            raise PlanError(f"{part.strip()[:40]!r} is not key=value", where=where, remedy=f"write {_EXAMPLE}")
        if name not in readers:
            close = get_close_matches(name[:40], readers, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"one of {', '.join(readers)}"
            raise PlanError(f"there is no {name[:40]!r}", where=where, remedy=remedy)
        if name in found:
            raise PlanError(f"states {name} twice", where=where, remedy="state it once")
        try:
            found[name] = readers[name](value)
        except ValueError as error:
            raise PlanError(f"{name}={value[:40]} is not {error}", where=where) from None
    return found


def _reader(kind: str) -> Callable[[str], Any]:
    if kind == "int":
        return _count
    return _one_of(_CHOICES[kind]) if kind in _CHOICES else _chosen(_BOOLEANS, "true or false")


def _count(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not value.strip("0"):
        raise ValueError("a whole number of 1 or more; commas go between keys")
    if len(value) > 9:
        raise ValueError("a whole number below a billion")
    return int(value)


def _order(value: str) -> tuple[str, ...]:
    names = tuple(value.split("/"))
    if sorted(names) != sorted(PRODUCTION_ORDER):
        raise ValueError(f"an order of all of {'/'.join(PRODUCTION_ORDER)}")
    return names


def _one_of(names: tuple[str, ...]) -> Callable[[str], Any]:
    return _chosen({name: name for name in names}, f"one of {', '.join(names)}")


def _chosen(values: Mapping[str, Any], words: str) -> Callable[[str], Any]:
    def read(value: str) -> Any:
        if value.lower() not in values:
            raise ValueError(words)
        return values[value.lower()]

    return read
