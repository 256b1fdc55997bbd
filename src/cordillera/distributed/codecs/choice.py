"""Choice of a codec for each table from measured costs, as a function of these alone and as a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from cordillera.distributed.codecs.selection import RAW, CodecRecord, select
from cordillera.errors import PlanError
from cordillera.files import read_sealed, sealed_json

MeasuredName = Literal["auto", "auto-bounded"]
"""Codecs to choose from: those without loss, or also those within an error bound."""

MARGIN = 1.1
"""Predicted speedup below which rows are sent as they are: measured times vary by more than a few per cent."""

_SCHEMA = 1
_CHOICES = {"auto": (RAW, "distinct"), "auto-bounded": (RAW, "distinct", "bounded", "bounded-fast")}


class LinkCost(NamedTuple):
    """Cost of the exchange of rows in the lookups that were measured.

    Attributes:
        bytes_per_s: Bytes of raw rows over the seconds that a rank waited for them, latency not counted; infinite if
            it did not wait.
        latency_s: Seconds of an exchange of one number.
        exchanges: Number of exchanges of rows, of all lookups and ranks together.
    """

    bytes_per_s: float
    latency_s: float
    exchanges: int


@dataclass(frozen=True)
class CodecChoice:
    """Codecs of the tables of a run.

    Attributes:
        name: Codecs that were to choose from.
        from_step: Number of updates after which they are used. Rows are sent raw before.
        codecs: Codec of each table.
        speedups: Predicted speedup of each table's exchange over raw rows; 1 where they are sent raw.
        ratios: Bytes of rows over bytes of frames with each table's codec; 1 for raw rows.
        bytes_per_s: Measured rate of the link; None if no rank waited for rows.
        latency_s: Measured latency in seconds.
    """

    name: MeasuredName
    from_step: int
    codecs: dict[str, str]
    speedups: dict[str, float]
    ratios: dict[str, float]
    bytes_per_s: float | None
    latency_s: float

    @property
    def is_raw(self) -> bool:
        """Whether all tables are sent as they are."""
        return set(self.codecs.values()) <= {RAW}

    def check(self, name: str, tables: Mapping[str, Any], where: str) -> None:
        """Check that the choice is for a recipe's codec ``name`` and ``tables``; errors say ``where`` it comes from.

        Raises:
            PlanError: If it is not.
        """
        if self.name != name or self.codecs.keys() != tables.keys():
            what = f"is for codec {self.name!r} and {len(self.codecs)} tables"
            if self.name == name:
                what = f"names other tables: {', '.join(sorted(self.codecs.keys() ^ tables.keys()))}"
            raise PlanError(what, where=where, remedy="choose the file of a run of the same model, data and codec")

    def to_text(self) -> str:
        """Return the choice as text with a seal, for a file."""
        return sealed_json({"schema": _SCHEMA, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> CodecChoice:
        """Read a choice from a file that holds :meth:`to_text`.

        Raises:
            PlanError: If the file is corrupt, or holds no valid choice.
        """
        remedy = "give the codecs.json of a run that trained with codec = 'auto' or 'auto-bounded'"
        content = read_sealed(path, schema=_SCHEMA, error=PlanError, remedy=remedy)
        try:
            found = cls(**{key: value for key, value in content.items() if key != "schema"})
            allowed = _CHOICES[found.name]
            valid = type(found.from_step) is int and found.from_step >= 0 and isinstance(found.codecs, dict)
            valid = valid and all(codec in allowed for codec in found.codecs.values())
        except (TypeError, KeyError) as error:
            raise PlanError(f"is no choice of codecs: {error}", where=str(path), remedy=remedy) from error
        if not valid:
            raise PlanError("is no choice of codecs", where=str(path), remedy=remedy)
        return found


def choose_codecs(
    name: MeasuredName, step: int, records: Mapping[str, Mapping[str, CodecRecord]], link: LinkCost
) -> CodecChoice:
    """Choose the codec of each table that is fastest on a link, or raw rows for all of them.

    The codec of a table is that of :func:`~cordillera.distributed.codecs.selection.select`. Frames need one more
    exchange, of their lengths, and tables without a codec are then sent as frames as well; unless frames of all tables
    together are 1.1 times as fast as raw rows with these costs, all tables are sent raw, without frames.

    Args:
        name: Codecs to choose from.
        step: Number of updates until now.
        records: Records of each table by the name of the codec, summed over ranks, those of raw frames among them.
            Tables that were not sent have empty records and stay raw.
        link: Cost of the link.

    Returns:
        The choice, a function of the arguments alone.
    """
    assert name in get_args(MeasuredName)
    codecs, speedups = dict.fromkeys(records, RAW), dict.fromkeys(records, 1.0)
    sent = {table: own for table, own in records.items() if own[RAW].raw_bytes}
    if sent and link.bytes_per_s < math.inf:
        found = {table: select(own, link.bytes_per_s, margin=MARGIN) for table, own in sent.items()}
        used = [sent[table][codec] for table, (codec, _) in found.items()]
        raw_s = sum(own.raw_bytes for own in used) / link.bytes_per_s
        framed_s = sum(own.frame_bytes / link.bytes_per_s + own.encode_s + own.decode_s for own in used)
        if raw_s >= MARGIN * (framed_s + link.exchanges * link.latency_s):
            codecs.update({table: codec for table, (codec, _) in found.items()})
            speedups.update({table: speedup for table, (_, speedup) in found.items()})
    ratios = {table: 1.0 if codec == RAW else records[table][codec].ratio for table, codec in codecs.items()}
    rate = link.bytes_per_s if link.bytes_per_s < math.inf else None
    return CodecChoice(name, step, codecs, speedups, ratios, rate, link.latency_s)
