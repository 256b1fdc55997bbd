"""Incidents of simulated training jobs: what every rank recorded when the watchdog wrote the traces.

A job has ranks in tensor, pipeline and data parallel communicators and in one of all ranks. Every rank runs its own
program: it computes, calls an operation, and goes on when all members have called it. A fault changes what
one rank or connection does, and nothing else: who waits for whom follows from the simulation. Traces hold the times of
each rank's own clock, which differ by a skew, and are written at slightly different moments.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from cordillera.distributed.tracing.rank_trace import Collective, PeerProgress, RankTrace, TracedCommunicator

FaultName = Literal["dead", "outside", "mismatch", "swap", "link", "sender", "slow", "slow-link"]
FAULTS: tuple[FaultName, ...] = ("dead", "outside", "mismatch", "swap", "link", "sender", "slow", "slow-link")
START_NS = 1_790_000_000_000_000_000
KEPT = 20  # newest operations of each communicator in a trace, as CollTrace keeps them


@dataclass(frozen=True)
class JobShape:
    """Parallelism of a job: numbers of tensor, pipeline and data ranks, microbatches and steps."""

    tp: int = 8
    pp: int = 4
    dp: int = 16
    microbatches: int = 2
    steps: int = 3
    world: bool = True

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


SHAPES = {
    64: (JobShape(4, 4, 4), JobShape(2, 4, 8), JobShape(8, 2, 4)),
    512: (JobShape(8, 4, 16), JobShape(4, 8, 16), JobShape(2, 4, 64), JobShape(8, 1, 64), JobShape(16, 8, 4)),
    1024: (JobShape(8, 8, 16),),
    2048: (JobShape(8, 8, 32),),
    4096: (JobShape(8, 16, 32),),
}


class Step(NamedTuple):
    """One operation of a rank's program."""

    kind: str  # tp, pp, dp, world
    op: str
    inputs: int
    outputs: int
    seconds: float  # of computation before it
    offset: int = 0  # of the peer's stage
    dtype: str = "BFloat16"
    changed: bool = False  # differs from what the other members call


@dataclass(frozen=True)
class Fault:
    """What goes wrong: its name, its rank, where in the rank's program, and what is particular to it."""

    name: FaultName
    rank: int
    at: int = 0
    other: int = -1
    how: str = ""
    factor: float = 1.0


@dataclass(frozen=True)
class Incident:
    """Traces of a job, and who is to blame."""

    shape: JobShape
    faults: tuple[Fault, ...]
    culprits: frozenset[int]
    traces: tuple[RankTrace, ...]


@dataclass
class _Call:
    """One operation of a communicator: who has called it, when it ends, and what holds it."""

    expected: int
    members: list[int] = field(default_factory=list)
    latest: float = 0.0
    end: float = math.inf
    poisoned: bool = False
    lost: tuple[int, int] | None = None
    stuck: int | None = None
    began: int = 0  # messages that went through before a fault
    transfer: float = 0.0  # seconds of the data on usual connections


@dataclass
class _Record:
    step: Step
    key: tuple[int, ...]
    sequence: int
    enqueued: float
    work: float
    call: _Call


class Simulation:
    """A job that runs until all programs end or all ranks wait.

    Args:
        shape: Parallelism.
        faults: What goes wrong.
        seed: Seed of all times.
        imbalance: Factors of the work of ranks, which is recorded; other ranks have 1.
    """

    def __init__(
        self, shape: JobShape, faults: tuple[Fault, ...], seed: int, imbalance: dict[int, float] | None = None
    ) -> None:
        self.shape, self.faults, self.random = shape, faults, random.Random(seed)
        self.imbalance = imbalance or {}
        programs = [list(_program(shape, stage)) for stage in range(shape.pp)]
        self.programs = [programs[self.stage(rank)] for rank in range(shape.ranks)]
        self.slow = {fault.rank: fault.factor for fault in faults if fault.name == "slow"}
        self.stops: dict[tuple[int, int], Fault] = {}
        self.holds: dict[tuple[int, int], Fault] = {}
        self.slow_links = [fault for fault in faults if fault.name == "slow-link"]
        self.happened: set[Fault] = {fault for fault in faults if fault.name in ("slow", "slow-link")}
        for fault in faults:
            self._inject(fault)
        self.now = [0.0] * shape.ranks
        self.place = [0] * shape.ranks
        self.counts: list[defaultdict[tuple[int, ...], int]] = [defaultdict(int) for _ in range(shape.ranks)]
        self.calls: dict[tuple[int, ...], _Call] = {}
        self.records: list[list[_Record]] = [[] for _ in range(shape.ranks)]
        self.dead: dict[int, float] = {}

    def stage(self, rank: int) -> int:
        return rank // self.shape.tp % self.shape.pp

    def place_of(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's places in the data, pipeline and tensor dimension."""
        tp, pp = self.shape.tp, self.shape.pp
        return rank // (tp * pp), rank // tp % pp, rank % tp

    def rank_at(self, d: int, s: int, t: int) -> int:
        return (d * self.shape.pp + s) * self.shape.tp + t

    def members(self, kind: str, rank: int) -> list[int]:
        """Return the members of a rank's communicator of a kind."""
        d, s, t = self.place_of(rank)
        if kind == "tp":
            return [self.rank_at(d, s, other) for other in range(self.shape.tp)]
        if kind == "pp":
            return [self.rank_at(d, other, t) for other in range(self.shape.pp)]
        if kind == "dp":
            return [self.rank_at(other, s, t) for other in range(self.shape.dp)]
        return list(range(self.shape.ranks))

    def _inject(self, fault: Fault) -> None:
        program = self.programs[fault.rank]
        if fault.name in ("dead", "outside"):
            self.stops[fault.rank, fault.at] = fault
        elif fault.name in ("link", "sender"):
            self.holds[fault.rank, fault.at] = fault
        elif fault.name == "mismatch":
            changed = list(program)
            changed[fault.at] = _changed(program[fault.at], fault.how)
            self.programs[fault.rank] = changed
        elif fault.name == "swap":
            for rank in _swapped(fault):
                changed = list(self.programs[rank])
                changed[fault.at], changed[fault.at + 1] = changed[fault.at + 1], changed[fault.at]
                self.programs[rank] = changed

    def run(self) -> None:
        """Run every program as far as it comes."""
        ready = list(range(self.shape.ranks))
        while ready:
            rank = ready.pop()
            if self.place[rank] < len(self.programs[rank]) and rank not in self.dead:
                ready += self._advance(rank)

    def _advance(self, rank: int) -> list[int]:
        """Let a rank call its next operation; return the ranks that can go on."""
        at = self.place[rank]
        step = self.programs[rank][at]
        share = self.imbalance.get(rank, 1.0)
        noise = math.exp(self.random.gauss(0.0, 0.06))
        arrival = self.now[rank] + step.seconds * share * noise * self.slow.get(rank, 1.0) + 5e-6
        stop = self.stops.get((rank, at))
        if stop is not None and stop.how != "inside":
            self.happened.add(stop)
            self.dead[rank] = arrival if stop.name == "dead" else math.inf
            return []
        key, expected, sequence = self._key(rank, step)
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = _Call(expected)
        call.members.append(rank)
        call.latest = max(call.latest, arrival)
        self.records[rank].append(_Record(step, key, sequence, arrival, 1e12 * step.seconds * share, call))
        if step.changed:
            call.poisoned = True
            self.happened.update(fault for fault in self.faults if fault.name == "mismatch" and fault.rank == rank)
        if stop is not None:
            self.happened.add(stop)
            self.dead[rank] = arrival
            call.poisoned, call.stuck = True, rank
            return []
        hold = self.holds.get((rank, at))
        if hold is not None:
            call.poisoned, call.began = True, self.random.randrange(min(3, max(1, call.expected - 1)))
            if hold.name == "link":
                call.lost = rank, hold.other
            else:
                call.stuck = rank
        if len(call.members) < call.expected:
            return []
        for fault in self.holds.values():
            if call.poisoned and (fault.rank == call.stuck or (fault.rank, fault.other) == call.lost):
                self.happened.add(fault)
        if call.poisoned:
            return []
        call.transfer = 3e-11 * max(step.inputs, step.outputs) * math.exp(self.random.gauss(0.0, 0.2))
        slowest = max((fault.factor for fault in self.slow_links if self.uses(fault, rank, step)), default=1.0)
        call.end = call.latest + 8e-6 * math.log2(call.expected + 1) + slowest * call.transfer
        for member in call.members:
            self.now[member] = call.end
            self.place[member] += 1
        return list(call.members)

    def uses(self, fault: Fault, rank: int, step: Step) -> bool:
        """Return whether data of a rank's operation takes a slow connection."""
        if fault.how != step.kind:
            return False
        if step.kind == "pp":
            d, s, t = self.place_of(rank)
            peer = self.rank_at(d, s + step.offset, t)
            return (fault.rank, fault.other) == ((rank, peer) if step.op == "send" else (peer, rank))
        members = self.members(step.kind, rank)
        return fault.rank in members and (step.op != "broadcast" or members[0] != fault.other)

    def _key(self, rank: int, step: Step) -> tuple[tuple[int, ...], int, int]:
        """Return the identity of an operation, its number of members and its number in the communicator."""
        d, s, t = self.place_of(rank)
        counts = self.counts[rank]
        if step.kind == "pp":
            peer = s + step.offset
            pair = (s, peer) if step.op == "send" else (peer, s)
            counts[(1, *pair)] += 1
            counts[(1,)] += 1
            return (1, d, t, *pair, counts[(1, *pair)]), 2, counts[(1,)]
        group = {"tp": (0, d, s), "dp": (2, s, t), "world": (3,)}[step.kind]
        counts[group] += 1
        size = {"tp": self.shape.tp, "dp": self.shape.dp, "world": self.shape.ranks}[step.kind]
        return (*group, counts[group]), size, counts[group]


def _program(shape: JobShape, stage: int) -> Iterator[Step]:
    """Yield the operations of a stage's ranks."""
    n, size = shape.tp, 1 << 20
    layer = [
        Step("tp", "_all_gather_base", size // n, size, 2e-3),
        Step("tp", "all_to_all", size // n, size // n, 3e-3),
        Step("tp", "_reduce_scatter_base", size, size // n, 4e-3),
    ]
    for _ in range(shape.steps):
        if n > 1:
            yield Step("tp", "broadcast", 8192, 8192, 1e-3, dtype="Long")
        for _ in range(shape.microbatches):
            if stage > 0:
                yield Step("pp", "recv", 0, size // 2, 1e-4, -1)
            yield from layer if n > 1 else []
            if stage < shape.pp - 1:
                yield Step("pp", "send", size // 2, 0, 1e-3, 1)
        for _ in range(shape.microbatches):
            if stage < shape.pp - 1:
                yield Step("pp", "recv", 0, size // 2, 1e-4, 1)
            yield from layer if n > 1 else []
            if stage > 0:
                yield Step("pp", "send", size // 2, 0, 1e-3, -1)
        if shape.dp > 1:
            yield Step("dp", "_reduce_scatter_base", 64 * size, 64 * size // shape.dp, 2e-3, dtype="Float")
            yield Step("dp", "_all_gather_base", 64 * size // shape.dp, 64 * size, 3e-3, dtype="Float")
        if shape.world:
            yield Step("world", "all_reduce", 1, 1, 5e-4, dtype="Float")


def _changed(step: Step, how: str) -> Step:
    """Return an operation that differs from what the other members call."""
    if how == "dtype":
        return step._replace(dtype="Half", changed=True)
    if how == "size" or step.kind == "pp":
        return step._replace(inputs=2 * step.inputs, outputs=2 * step.outputs, changed=True)
    other = "all_reduce" if step.op != "all_reduce" else "broadcast"
    same = max(step.inputs, step.outputs)
    return step._replace(op=other, inputs=same, outputs=same, changed=True)


def _ring(call: _Call, members: list[int], steps: int) -> dict[int, list[PeerProgress]]:
    """Return the progress of messages around a ring: a rank sends the first on its own, and each further one after one
    has come."""
    joined, count = set(call.members), len(members)
    posted, finished, notified = ([0] * count for _ in range(3))
    moved = True
    while moved:
        moved = False
        for at, rank in enumerate(members):
            following = members[(at + 1) % count]
            if rank not in joined or following not in joined:
                continue
            limit = call.began if call.stuck == rank else steps
            now = min(steps, 1 + notified[at])
            ended = min(now, limit)
            arrived = min(ended, call.began) if call.lost == (rank, following) else ended
            if (now, ended, arrived) != (posted[at], finished[at], notified[(at + 1) % count]):
                posted[at], finished[at], notified[(at + 1) % count] = now, ended, arrived
                moved = True
    found: dict[int, list[PeerProgress]] = {}
    for at, rank in enumerate(members):
        before, following = members[at - 1], members[(at + 1) % count]
        if before == following:
            found[rank] = [PeerProgress(following, posted[at], finished[at], notified[at])]
        else:
            found[rank] = [
                PeerProgress(before, 0, 0, notified[at]),
                PeerProgress(following, posted[at], finished[at], 0),
            ]
    return found


def _direct(call: _Call, members: list[int], pairs: set[tuple[int, int]]) -> dict[int, list[PeerProgress]]:
    """Return the progress of one message for each pair of sender and receiver."""
    joined = set(call.members)
    found: dict[int, list[PeerProgress]] = {rank: [] for rank in members}
    for rank in members:
        for peer in members:
            if rank == peer or rank not in joined or not ({(rank, peer), (peer, rank)} & pairs):
                continue
            sends = (rank, peer) in pairs and peer in joined
            comes = (peer, rank) in pairs and peer in joined and call.stuck != peer and call.lost != (peer, rank)
            found[rank].append(PeerProgress(peer, int(sends), int(sends and call.stuck != rank), int(comes)))
    return found


class _Writer:
    """Makes traces of a simulation at one moment."""

    def __init__(self, simulation: Simulation, moment: float, timeout_s: float, kept: int) -> None:
        self.sim, self.moment, self.timeout_ms, self.kept = simulation, moment, int(1000 * timeout_s), kept
        shape = simulation.shape
        chance = simulation.random
        self.skew = [chance.uniform(-2.0, 2.0) for _ in range(shape.ranks)]
        self.late = [chance.uniform(0.0, 0.2) for _ in range(shape.ranks)]
        everyone = tuple(range(shape.ranks))
        self.groups: dict[tuple[str, tuple[int, ...]], TracedCommunicator] = {}
        self.world = TracedCommunicator("0", "default_pg", everyone)
        self.progress: dict[int, dict[int, list[PeerProgress]]] = {}

    def communicator(self, kind: str, rank: int) -> TracedCommunicator:
        if kind == "world":
            return self.world
        d, s, t = self.sim.place_of(rank)
        place = {"tp": (d, s), "pp": (d, t), "dp": (s, t)}[kind]
        found = self.groups.get((kind, place))
        if found is None:
            ranks = tuple(self.sim.members(kind, rank))
            found = self.groups[kind, place] = TracedCommunicator(f"{kind}-{'-'.join(map(str, place))}", kind, ranks)
        return found

    def trace(self, rank: int) -> RankTrace:
        """Return what a rank recorded until it wrote its trace."""
        written = self.moment + self.late[rank]
        kept: list[Collective] = []
        room: dict[str, int] = defaultdict(lambda: self.kept)
        channels = self._channels(rank)
        for number in range(len(self.sim.records[rank]) - 1, -1, -1):
            record = self.sim.records[rank][number]
            if record.enqueued <= written and room[record.step.kind] > 0:
                room[record.step.kind] -= 1
                kept.append(self._collective(rank, record, written, channels.get(number)))
        kinds = ("tp", "pp", "dp", *(("world",) if self.sim.shape.world else ()))
        return RankTrace(
            rank,
            self._local(rank, written),
            tuple(self.communicator(kind, rank) for kind in kinds),
            tuple(reversed(kept)),
        )

    def _channels(self, rank: int) -> dict[int, int]:
        counts: dict[tuple[int, str], int] = defaultdict(int)
        found = {}
        for number, record in enumerate(self.sim.records[rank]):
            if record.step.kind == "pp":
                key = record.step.offset, record.step.op
                found[number] = counts[key]
                counts[key] += 1
        return found

    def _local(self, rank: int, at: float) -> int:
        return START_NS + int(1e9 * (at + self.skew[rank]))

    def _collective(self, rank: int, record: _Record, written: float, channel: int | None) -> Collective:
        step, call = record.step, record.call
        group = self.communicator(step.kind, rank)
        over = call.end <= written
        peer = None
        if step.kind == "pp":
            d, s, t = self.sim.place_of(rank)
            peer = self.sim.rank_at(d, s + step.offset, t)
        splits: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        if step.op == "all_to_all":
            own, scale = rank % self.sim.shape.tp, 2 if step.changed else 1
            count, seq = self.sim.shape.tp, record.sequence
            splits = (
                tuple(scale * _split(own, other, seq) for other in range(count)),
                tuple(scale * _split(other, own, seq) for other in range(count)),
            )
        jitter = self.sim.random.uniform(0.0, 3e-6)
        return Collective(
            communicator=group.name,
            sequence=record.sequence,
            op=step.op,
            input_sizes=((sum(splits[0]) or step.inputs,),) if step.inputs else (),
            output_sizes=((sum(splits[1]) or step.outputs,),) if step.outputs else (),
            input_dtypes=(step.dtype,) if step.inputs else (),
            output_dtypes=(step.dtype,) if step.outputs else (),
            state="completed" if over else "started",
            enqueued_ns=self._local(rank, record.enqueued),
            started_ns=self._local(rank, record.enqueued + 2e-6),
            ended_ns=self._local(rank, call.end + jitter) if over else None,
            peer=peer,
            channel=channel,
            root=group.ranks[0] if step.op == "broadcast" else None,
            input_splits=splits[0],
            output_splits=splits[1],
            work=record.work,
            timeout_ms=self.timeout_ms,
            peers=self._ended_peers(rank, record) if over else self._peers(rank, record, peer),
            backend="nccl",
        )

    def _ended_peers(self, rank: int, record: _Record) -> tuple[PeerProgress, ...]:
        """Return the messages of a ring with the time to send them, if connections are among the faults."""
        step = record.step
        if not self.sim.slow_links or step.kind not in ("tp", "dp") or step.op in ("all_to_all", "broadcast"):
            return ()
        members = self.sim.members(step.kind, rank)
        at, count = members.index(rank), len(members)
        peer = members[(at + 1) % count]
        factor = max(
            (fault.factor for fault in self.sim.slow_links if (fault.rank, fault.other) == (rank, peer)), default=1
        )
        time = int(1e9 * factor * record.call.transfer * math.exp(self.sim.random.gauss(0.0, 0.2)))
        return (PeerProgress(peer, count - 1, count - 1, count - 1 if count == 2 else 0, max(1, time)),)

    def _peers(self, rank: int, record: _Record, peer: int | None) -> tuple[PeerProgress, ...]:
        step, call = record.step, record.call
        if step.kind == "world" or (call.poisoned and call.lost is None and call.stuck is None):
            return ()
        found = self.progress.get(id(call))
        if found is None:
            members = self.sim.members(step.kind, rank)
            if peer is not None:
                sender, receiver = (rank, peer) if step.op == "send" else (peer, rank)
                found = _direct(call, [sender, receiver], {(sender, receiver)})
            elif step.op == "all_to_all":
                found = _direct(call, members, {(a, b) for a in members for b in members if a != b})
            elif step.op == "broadcast":
                found = _direct(call, members, set(pairwise(members)))
            else:
                found = _ring(call, members, 2 * (len(members) - 1) if step.op == "all_reduce" else len(members) - 1)
            self.progress[id(call)] = found
        return tuple(found[rank])


def _split(sender: int, receiver: int, sequence: int) -> int:
    return 1000 + (31 * sender + 17 * receiver + 7 * sequence) % 50


def healthy(shape: JobShape, seed: int) -> Incident:
    """Return the traces of a job without faults at a random moment of its run."""
    chance = random.Random(seed)
    busy = {chance.randrange(shape.ranks): chance.uniform(0.6, 2.0) for _ in range(4)} if seed % 2 else {}
    simulation = Simulation(shape, (), seed, busy)
    simulation.run()
    moment = chance.uniform(0.02, max(simulation.now))
    return _incident(simulation, moment, chance.choice((60.0, 600.0, 1800.0)), chance)


def incident(
    shape: JobShape, names: tuple[FaultName, ...], seed: int, remove: bool = False, kept: int = KEPT
) -> Incident:
    """Return the traces of a job with the given faults, when the watchdog of a waiting rank ended.

    Args:
        shape: Parallelism.
        names: Faults; ``slow`` alone is written at a random moment.
        seed: Seed of ranks, places and times.
        remove: Whether the faults do not happen, everything else being the same.
        kept: Newest operations of each communicator in a trace.
    """
    chance = random.Random(seed)
    if {"slow", "slow-link"} & set(names):
        shape = replace(shape, steps=max(shape.steps, 5))
    faults = tuple(_FAULTS[name](shape, chance) for name in names)
    simulation = Simulation(shape, () if remove else faults, seed)
    simulation.run()
    timeout_s = chance.choice((60.0, 600.0, 1800.0))
    blocked = [records[-1].enqueued for records in simulation.records if records and records[-1].call.end == math.inf]
    moment = min(blocked) + timeout_s if blocked else chance.uniform(0.8, 1.0) * max(simulation.now)
    return _incident(simulation, moment, timeout_s, chance, kept)


def _incident(
    simulation: Simulation, moment: float, timeout_s: float, chance: random.Random, kept: int = KEPT
) -> Incident:
    writer = _Writer(simulation, moment, timeout_s, kept)
    traces = []
    for rank in range(simulation.shape.ranks):
        trace = writer.trace(rank)
        if rank in simulation.dead and simulation.dead[rank] < math.inf:
            how = chance.choice(("absent", "died", "unresponsive"))
            if how == "absent":
                continue
            trace = replace(trace, status=how, collectives=() if chance.random() < 0.5 else trace.collectives)
        traces.append(trace)
    chance.shuffle(traces)
    culprits = {rank for fault in simulation.happened for rank in _to_blame(fault)}
    for fault in simulation.faults:
        if fault.name == "swap" and all(_waits_too_early(simulation, rank, fault) for rank in _swapped(fault)):
            simulation.happened.add(fault)
            culprits |= _swapped(fault)
    return Incident(simulation.shape, tuple(sorted(simulation.happened, key=str)), frozenset(culprits), tuple(traces))


def _swapped(fault: Fault) -> set[int]:
    return {fault.rank, fault.other} - {-1}


def _waits_too_early(simulation: Simulation, rank: int, fault: Fault) -> bool:
    """Return whether a rank waits in an operation that it called too early, and others in the one that it left out."""
    records = simulation.records[rank]
    if simulation.place[rank] != fault.at or len(records) <= fault.at or records[-1].call.end < math.inf:
        return False
    left_out = simulation.programs[rank][fault.at + 1].kind
    others = set(simulation.members(left_out, rank)) - {rank}
    return any(
        simulation.records[other]
        and simulation.records[other][-1].step.kind == left_out
        and simulation.records[other][-1].call.end == math.inf
        for other in others
    )


def _to_blame(fault: Fault) -> set[int]:
    return {fault.rank, fault.other} if fault.name in ("link", "slow-link") else {fault.rank}


def _places(shape: JobShape, rank: int, wanted: Callable[[Step], bool]) -> list[int]:
    """Return places of a rank's program, after the first step, whose operation is wanted."""
    program = list(_program(shape, rank // shape.tp % shape.pp))
    first = len(program) // shape.steps
    return [at for at in range(first, len(program)) if wanted(program[at])]


def _dead(shape: JobShape, chance: random.Random) -> Fault:
    rank = chance.randrange(shape.ranks)
    at = chance.choice(_places(shape, rank, lambda step: step.kind != "world"))
    return Fault("dead", rank, at, how=chance.choice(("outside", "inside")))


def _outside(shape: JobShape, chance: random.Random) -> Fault:
    rank = chance.randrange(shape.ranks)
    return Fault("outside", rank, chance.choice(_places(shape, rank, lambda step: True)))


def _mismatch(shape: JobShape, chance: random.Random) -> Fault:
    rank = chance.randrange(shape.ranks)
    at = chance.choice(_places(shape, rank, lambda step: True))
    return Fault("mismatch", rank, at, how=chance.choice(("op", "size", "dtype")))


def _swap(shape: JobShape, chance: random.Random) -> Fault:
    """Exchange two operations: of all ranks and of the tensor ranks, or of two pairs of communicators."""
    rank = chance.randrange(shape.ranks)
    program = list(_program(shape, rank // shape.tp % shape.pp))
    pairs = [("world", "tp")] if chance.random() < 0.5 or shape.dp < 2 else [("tp", "dp")]
    if pairs == [("tp", "dp")]:
        kinds = ("tp", "dp")
        at = [n for n in range(len(program) - 1) if (program[n].kind, program[n + 1].kind) == kinds]
        if at:
            tp, pp, dp = shape.tp, shape.pp, shape.dp
            d, s, t = rank // (tp * pp), rank // tp % pp, rank % tp
            other = (((d + 1 + chance.randrange(dp - 1)) % dp) * pp + s) * tp + (t + 1 + chance.randrange(tp - 1)) % tp
            return Fault("swap", rank, chance.choice(at), other)
    at = [n for n in range(len(program) - 1) if (program[n].kind, program[n + 1].kind) == ("world", "tp")]
    return Fault("swap", rank, chance.choice(at))


def _link(shape: JobShape, chance: random.Random) -> Fault:
    return _held("link", shape, chance)


def _sender(shape: JobShape, chance: random.Random) -> Fault:
    return _held("sender", shape, chance)


def _held(name: Literal["link", "sender"], shape: JobShape, chance: random.Random) -> Fault:
    """Choose a rank, an operation in which it sends, and the receiver."""
    rank = chance.randrange(shape.ranks)
    program = list(_program(shape, rank // shape.tp % shape.pp))
    simulation = Simulation(replace(shape, steps=1), (), 0)

    def sends(step: Step) -> bool:
        last = step.op == "broadcast" and simulation.members("tp", rank)[-1] == rank
        return step.kind != "world" and step.op != "recv" and not last

    at = chance.choice(_places(shape, rank, sends))
    step = program[at]
    if step.kind == "pp":
        d, s, t = simulation.place_of(rank)
        return Fault(name, rank, at, simulation.rank_at(d, s + step.offset, t))
    members = simulation.members(step.kind, rank)
    return Fault(name, rank, at, members[(members.index(rank) + 1) % len(members)])


def _slow(shape: JobShape, chance: random.Random) -> Fault:
    return Fault("slow", chance.randrange(shape.ranks), factor=chance.uniform(1.6, 4.0))


def _slow_link(shape: JobShape, chance: random.Random) -> Fault:
    rank = chance.randrange(shape.ranks)
    kind = chance.choice(("tp", "pp", "dp") if shape.pp > 1 else ("tp", "dp"))
    simulation = Simulation(replace(shape, steps=1), (), 0)
    members = simulation.members(kind, rank)
    at = members.index(rank)
    other = members[at + 1] if at + 1 < len(members) else members[at - 1] if kind == "pp" else members[0]
    return Fault("slow-link", rank, 0, other, kind, chance.uniform(10.0, 30.0))


_FAULTS: dict[FaultName, Callable[[JobShape, random.Random], Fault]] = {
    "dead": _dead,
    "outside": _outside,
    "mismatch": _mismatch,
    "swap": _swap,
    "link": _link,
    "sender": _sender,
    "slow": _slow,
    "slow-link": _slow_link,
}
