"""Files of traces in the form of torch's Flight Recorder, one a rank, as pickle or JSON.

What torch's form lacks is kept under the key ``cordillera`` of the file and of its entries, which torch's own analysis
(``torch.distributed.flight_recorder``) does not look at. Files of torch itself are read, too; pickles without running
code.

Source: the files that torch 2.13 writes (``torch._C._distributed_c10d._dump_fr_trace``) and reads.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from cordillera.distributed.tracing.entry_fields import EntryFields
from cordillera.distributed.tracing.plain_pickle import load_plain
from cordillera.distributed.tracing.rank_trace import (
    ANY_RANK,
    Collective,
    CollectiveState,
    PeerProgress,
    RankStatus,
    RankTrace,
    TracedCommunicator,
)
from cordillera.errors import DataError
from cordillera.files import parse_json
from cordillera.run import disk_errors

VERSION = "2.10"
"""Version of torch's form that is written; all of the form 2 are read."""

FILE_BYTES = 512 << 20
"""Largest file that is read."""

_OWN = "cordillera"
_NAME = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,9})(?:\.(?:json|pickle|pkl))?", re.DOTALL)
_RANKS = re.compile(r"\s*\[\s*(?:\d{1,9}(?:\s*,\s*\d{1,9})*)?\s*\]\s*")
_NUMBER = re.compile(r"\d+")
_MESSAGE = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")
_ANY_SOURCE = "recvAnySource"  # name that torch uses
_STATES, _STATUSES = get_args(CollectiveState), get_args(RankStatus)


def write_trace(
    trace: RankTrace, folder: Path, *, name: str = "trace", form: Literal["pickle", "json"] = "pickle"
) -> Path:
    """Write the trace of a rank as ``NAME_RANK`` (pickle, which torch's analysis reads) or ``NAME_RANK.json``.

    The file is written beside and renamed, so that a process that ends meanwhile leaves no half of it.

    Args:
        trace: Trace of one rank.
        folder: Folder for the files of all ranks.
        name: First part of the names of the files.
        form: Form of the file.

    Returns:
        Path of the file.

    Raises:
        RunError: If the file cannot be written.
    """
    path = folder / f"{name}_{trace.rank}{'.json' if form == 'json' else ''}"
    content = to_flight_recorder(trace)
    data = pickle.dumps(content, protocol=2) if form == "pickle" else json.dumps(content, allow_nan=False).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path, "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the traces of all ranks of a folder, in the order of ranks.

    A file is taken if its name ends in a number, the rank, with ``.json``, ``.pickle`` or ``.pkl`` after it or nothing.

    Args:
        folder: Folder with one file a rank.

    Raises:
        DataError: If there is no such file, a rank has two, or a file is not a trace.
    """
    if not folder.is_dir():
        raise DataError("is not a folder of traces", where=str(folder), remedy="name the folder that holds one a rank")
    files: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or path.name.startswith("."):
            continue
        if path.is_dir():
            raise DataError("is a folder in the place of a trace", where=str(path), remedy="move it elsewhere")
        rank = int(match["rank"])
        if rank in files:
            raise DataError(f"rank {rank} has two files, {files[rank].name} and {path.name}", where=str(folder))
        files[rank] = path
    if not files:
        raise DataError("holds no traces", where=str(folder), remedy="their names end in the rank: trace_0, trace_1")
    return [read_trace(files[rank], rank) for rank in sorted(files)]


def read_trace(path: Path, rank: int) -> RankTrace:
    """Return the trace of a file; without a time in the trace, the file's modification time is used.

    Args:
        path: File of the Flight Recorder, pickle or JSON.
        rank: Rank in the name of the file.

    Raises:
        DataError: If the file cannot be read, is not such a trace, or is one of another rank.
    """
    where = str(path)
    try:
        # Do not wait for the writer of a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError("is not an ordinary file", where=where)
            content = file.read(FILE_BYTES + 1)
    except OSError as cause:
        raise DataError(f"cannot be read ({cause.strerror or cause})", where=where) from cause
    if len(content) > FILE_BYTES:
        raise DataError(f"is larger than {FILE_BYTES:,} bytes", where=where)
    if not content:
        raise DataError("is empty", where=where)
    plain = load_plain(content, where) if content[:1] == b"\x80" else parse_json(content, where)
    trace = from_flight_recorder(plain, rank, where)
    if trace.written_ns is not None:
        return trace
    latest = max((max(one.enqueued_ns, one.ended_ns or 0) for one in trace.collectives), default=0)
    return replace(trace, written_ns=max(latest, status.st_mtime_ns), estimated=True)


def to_flight_recorder(trace: RankTrace) -> dict[str, Any]:
    """Return a trace as plain data in torch's form.

    Args:
        trace: Trace of one rank.
    """
    communicators = {one.name: one for one in trace.communicators}
    numbers = {name: number for number, name in enumerate(communicators)}
    status = {
        str(number): {
            "last_enqueued_collective": max((one.sequence for one in own), default=-1),
            "last_started_collective": max((one.sequence for one in own if one.started_ns is not None), default=-1),
            "last_completed_collective": max((one.sequence for one in own if one.state == "completed"), default=-1),
        }
        for name, number in numbers.items()
        for own in [[one for one in trace.collectives if one.communicator == name and one.peer is None]]
    }
    extra = {"rank": trace.rank, "written_ns": trace.written_ns, "status": trace.status, "error": trace.error}
    return {
        "version": VERSION,
        "pg_config": {
            one.name: {"name": one.name, "desc": one.description, "ranks": _listed(one.ranks)}
            for one in trace.communicators
        },
        "pg_status": status,
        "comm_lib_version": "",
        "entries": [
            _entry(number, one, communicators[one.communicator], numbers[one.communicator], trace.rank)
            for number, one in enumerate(trace.collectives, 1)  # 0 would say that nothing came before
        ],
        _OWN: {**extra, "inside": trace.inside, "dropped": trace.dropped, "estimated": trace.estimated},
    }


@lru_cache(maxsize=4096)
def _listed(ranks: tuple[int, ...]) -> str:
    return str(list(ranks))


def _entry(number: int, one: Collective, communicator: TracedCommunicator, group: int, rank: int) -> dict[str, Any]:
    name = one.op
    if one.peer == ANY_RANK:
        name = _ANY_SOURCE
    elif one.peer is not None:
        members = communicator.ranks
        own, other = (members.index(member) if members else member for member in (rank, one.peer))
        name += f" {own}{'->' if one.op == 'send' else '<-'}{other}"
    extra = {
        "root": one.root,
        "channel": one.channel,
        "input_splits": list(one.input_splits),
        "output_splits": list(one.output_splits),
        "work": one.work,
        "peers": [_row(peer) for peer in one.peers],
    }
    message = one.peer is not None
    return {
        "record_id": number,
        "pg_id": group,
        "process_group": (communicator.name, communicator.description),
        "collective_seq_id": 0 if message else one.sequence,
        "p2p_seq_id": one.sequence if message else 0,
        "op_id": number,
        "profiling_name": f"{one.backend}:{name}",
        "time_created_ns": one.enqueued_ns,
        "input_sizes": [list(size) for size in one.input_sizes],
        "input_dtypes": list(one.input_dtypes),
        "output_sizes": [list(size) for size in one.output_sizes],
        "output_dtypes": list(one.output_dtypes),
        "state": "scheduled" if one.state == "ended" else one.state,
        "time_discovered_started_ns": one.started_ns,
        "time_discovered_completed_ns": one.ended_ns,
        "retired": one.state in ("completed", "ended"),
        "timeout_ms": one.timeout_ms or 0,
        "is_p2p": message,
        _OWN: {key: value for key, value in extra.items() if value not in (None, [])},
    }


def _row(peer: PeerProgress) -> list[int]:
    row = [peer.peer, peer.posted, peer.finished, peer.notified]
    return [*row, peer.put_ns] if peer.put_ns else row


def from_flight_recorder(content: Any, rank: int, where: str) -> RankTrace:
    """Return the trace that plain data in torch's form hold.

    Args:
        content: Value of the file.
        rank: Rank that the file is of.
        where: Place of the file, for errors.

    Raises:
        DataError: If the data are not a trace of form 2, or of another rank.
    """
    fields = EntryFields(content, where)
    version = fields.text("version")
    if not re.fullmatch(r"2\.\d{1,4}", version):
        raise DataError(f"has the version {version[:20]!r} of torch's form; versions 2 are read", where=where)
    own = EntryFields(content.get(_OWN, {}), f"{where}, {_OWN}")
    if own.whole("rank", rank) != rank:
        raise DataError(f"is the trace of rank {own.whole('rank')}, and its name says rank {rank}", where=where)
    configuration = fields.take("pg_config", dict, {})
    communicators = {}
    for name, group in configuration.items():
        one = EntryFields(group, f"{where}, pg_config {name!r}")
        ranks = _ranks(one.text("ranks", "[]"))
        if ranks is None:
            raise one.wrong("ranks", group["ranks"])
        if ranks or name:  # Gloo in torch 2.13 has one entry without a name
            communicators[str(name)] = TracedCommunicator(str(name), one.text("desc", ""), ranks)
    collectives: list[Collective] = []
    counted: Counter[tuple[str, int, bool]] | None = Counter()  # messages to and from each peer so far
    dropped = False
    for number, entry in enumerate(fields.take("entries", list, [])):
        one = EntryFields(entry, f"{where}, entry {number}")
        if number == 0 and one.whole("record_id", 0) > 0:
            counted, dropped = None, not own.content
        collective, message = _collective(one, communicators, rank)
        if collective.op == "coalesced":
            _finish_coalesced(collectives, collective, message)
            continue
        if collective.peer == ANY_RANK:
            counted = None  # the sender is unknown, and so are the numbers of all later messages
        if collective.peer is not None and collective.channel is None and counted is not None:
            key = collective.communicator, collective.peer, collective.op == "send"
            collective = replace(collective, channel=counted[key])
            counted[key] += 1
        collectives.append(collective)
    return RankTrace(
        rank=rank,
        written_ns=own.time("written_ns"),
        communicators=tuple(communicators.values()),
        collectives=tuple(collectives),
        status=own.choice("status", _STATUSES, "running"),
        error=own.text("error", ""),
        inside=own.take("inside", bool, None),
        dropped=own.take("dropped", bool, dropped),
        estimated=own.take("estimated", bool, False),
    )


def _finish_coalesced(collectives: list[Collective], whole: Collective, message: bool) -> None:
    """Copy the state of a coalesced call, which torch records, to the operations that it consists of."""
    for at in range(len(collectives) - 1, -1, -1):
        part = collectives[at]
        same = part.communicator == whole.communicator and (part.peer is not None) == message
        if not same or part.sequence != whole.sequence:
            break
        collectives[at] = replace(
            part, state=whole.state, started_ns=whole.started_ns, ended_ns=whole.ended_ns, timeout_ms=whole.timeout_ms
        )


def _collective(one: EntryFields, communicators: dict[str, TracedCommunicator], rank: int) -> tuple[Collective, bool]:
    """Return the operation of an entry, and whether it is a message or several of them."""
    group = one.take("process_group", (list, tuple))
    if len(group) != 2 or not all(isinstance(part, str) for part in group):
        raise DataError("process_group is not a name with a description", where=one.where)
    name, description = group
    if name not in communicators:
        communicators[name] = TracedCommunicator(name, description, ())
    backend, _, op = one.text("profiling_name").rpartition(":")
    message, peer = one.take("is_p2p", bool, False), None
    match = _MESSAGE.fullmatch(op)
    if match is not None:
        op, peer = match[1], _member(communicators[name], int(match[4]), one.where)
    elif op == _ANY_SOURCE:
        op, peer = "recv", ANY_RANK
    own = one.inner(_OWN)
    state = one.choice("state", _STATES)
    if one.take("retired", bool, False) and state != "completed":
        state = "ended" if backend == "gloo" else "completed"
    return (
        Collective(
            communicator=name,
            sequence=one.whole("p2p_seq_id" if message else "collective_seq_id"),
            op=op.partition(" ")[0],
            input_sizes=one.shapes("input_sizes"),
            output_sizes=one.shapes("output_sizes"),
            input_dtypes=one.texts("input_dtypes"),
            output_dtypes=one.texts("output_dtypes"),
            state=state,
            enqueued_ns=one.time("time_created_ns") or 0,
            started_ns=one.time("time_discovered_started_ns"),
            ended_ns=one.time("time_discovered_completed_ns"),
            peer=peer,
            channel=own.optional("channel") if own else None,
            root=own.optional("root") if own else None,
            input_splits=own.numbers("input_splits") if own else (),
            output_splits=own.numbers("output_splits") if own else (),
            work=own.amount("work") if own else None,
            timeout_ms=one.optional("timeout_ms") or None,
            peers=own.progress("peers") if own else (),
            backend=backend,
        ),
        message,
    )


def _member(communicator: TracedCommunicator, number: int, where: str) -> int:
    """Return a member's global rank."""
    if number < len(communicator.ranks):
        return communicator.ranks[number]
    if communicator.ranks:
        raise DataError(f"names rank {number} of a communicator of {len(communicator.ranks)}", where=where)
    return number  # members are unknown; in the group of all ranks, numbers are global ranks


@lru_cache(maxsize=65536)
def _ranks(text: str) -> tuple[int, ...] | None:
    """Return the ranks of a list as text, the same object for the same text; None if it is not a list of them."""
    ranks = tuple(map(int, _NUMBER.findall(text))) if _RANKS.fullmatch(text) else None
    return None if ranks is None or len(set(ranks)) != len(ranks) else ranks
