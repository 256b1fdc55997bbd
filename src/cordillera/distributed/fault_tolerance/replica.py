"""A replica of a job, as each of its ranks sees it: the members of a step, the sums of gradients, and commits.

Every rank of a replica makes the same calls in the same order. The first rank asks the coordinator; the answer is for
all of them. Rank ``r`` adds its gradients to those of rank ``r`` of the other replicas. A step is committed by all
ranks of a replica or by none: each reports whether its sums are complete, and all must be.

Source: FT-HSDP (arXiv 2602.00277), abstract and introduction; protocol and names are ours.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.fault_tolerance.all_reduce import AllReduce, RingMember
from cordillera.distributed.fault_tolerance.coordination import Ask, Commit, FaultToleranceConfig, Membership
from cordillera.distributed.fault_tolerance.link import CoordinatorLink, StepMembers
from cordillera.distributed.fault_tolerance.messages import MessageError
from cordillera.distributed.fault_tolerance.state_transfer import StateProvider, fetch_state
from cordillera.distributed.job.watchdog import Watchdog
from cordillera.distributed.mesh import ProcessMesh
from cordillera.errors import PeerError

_SHARED_S = 2.0  # interval of messages to the ranks of a waiting replica
_BEATS = 4  # heartbeats per lease


class ReplicatedState(Protocol):
    """State that is equal on the same rank of all replicas after a step."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return live tensors by name; they change at commits only."""
        ...

    def facts(self) -> Any:
        """Return the rest as JSON values."""
        ...

    def install(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Take over the state of another replica: its ``tensors`` and ``facts``."""
        ...


class Reducer(Protocol):
    """What adds tensors over the members of an epoch, as :class:`AllReduce` does; its methods are explained there.

    Any means will do that ends every wait of all members when one of them fails, aborts or is late: NCCL and torchcomms
    can abort, the groups of Gloo cannot.
    """

    @property
    def address(self) -> str:
        """Where other members reach this process, as text that only they understand."""
        ...

    def connect(
        self, epoch: int, ring: Sequence[RingMember], own: str, contributing: Collection[str], deadline_s: float
    ) -> None:
        """Connect to the members ``ring`` of an ``epoch``; raise PeerError if any is missing after ``deadline_s``.

        Args:
            own: Name of this member.
            contributing: Names of the members whose tensors are added.
        """
        ...

    def reduce(self, tensor: Tensor, *, step: int, bucket: int, deadline_s: float) -> None:
        """Replace ``tensor`` by the sum of the contributing members' tensors; raise PeerError if the sum was aborted.

        Args:
            step: Step of the training.
            bucket: Number of the tensor within the step.
            deadline_s: Timeout in seconds.
        """
        ...

    def abort(self, reason: str) -> None:
        """Abort the epoch for a ``reason``: end every wait of this member and of the others."""
        ...

    def close(self) -> None:
        """Leave the epoch and stop listening."""
        ...


@dataclass(frozen=True)
class ReplicaPlace:
    """How a replica reaches its job.

    Attributes:
        name: Name of the replica.
        coordinator: ``HOST:PORT`` of the coordinator.
        token: Secret of the job.
        configuration: Digest of all that must be equal on replicas.
        leaves: Whether a request to stop ends this replica alone, as where each has a launcher of its own.
    """

    name: str
    coordinator: str
    token: bytes
    configuration: str
    leaves: bool = False


class Replica:
    """One rank's part in a job of replicas.

    Args:
        place: How to reach the job, equal on all ranks of the replica.
        config: Deadlines.
        mesh: Mesh of the processes of this replica.
        state: State of this rank.
        commit: Commit that the state is of.
        restored: Step of the newest checkpoint when the state was read from one; None if it was not. Once there is a
            newer one, the state is too old to train from.
        durable: Function that returns the step of the newest checkpoint.
        watchdog: Watchdog that follows what this rank waits for.
        reducer: Object that adds tensors over the replicas; an :class:`AllReduce` by default.

    Attributes:
        held: Commit that the state is of.
        seconds: Seconds of each phase of the step in progress.

    Raises:
        PeerError: If the coordinator or a rank of this replica does not answer.
    """

    def __init__(
        self,
        place: ReplicaPlace,
        config: FaultToleranceConfig,
        mesh: ProcessMesh,
        state: ReplicatedState,
        commit: Commit,
        *,
        restored: int | None = None,
        durable: Callable[[], int] = lambda: 0,
        watchdog: Watchdog | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        self.place, self.config, self.mesh, self.held = place, config, mesh, commit
        self.seconds: dict[str, float] = {}
        self._durable, self._newest = durable, durable()
        self._state, self._watchdog, self._restored, self._discarded = state, watchdog, restored, False
        self._connected: tuple[int, tuple[str, ...]] | None = None
        self._missed: set[str] = set()
        self._bucket = 0
        self._membership: Membership | None = None
        self._is_last = False
        host = _own_address(place.coordinator)
        if reducer is None:
            reducer = AllReduce(place.configuration, place.token, host=host)
        self._reducer = reducer
        self._provider = StateProvider(state.tensors, state.facts, place.token, host=host, deadline_s=config.deadline_s)
        with self._provider.changing(commit):
            pass
        self._link: CoordinatorLink | None = None
        addresses = self._gathered([self._reducer.address, self._provider.address])
        if mesh.rank == 0:
            self._link = CoordinatorLink(
                place.coordinator,
                place.token,
                place.name,
                place.configuration,
                [one for pair in addresses for one in pair],
                beat_s=config.rules.lease_s / _BEATS,
                patience_s=config.patience_s,
            )

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the job, so that the others do not wait for this replica."""
        if self._link is not None:
            self._link.close()
        self._reducer.close()
        self._provider.close()

    def begin(self) -> Membership:
        """Ask who takes part in the next step, connect to them, and catch up if this replica is behind.

        Returns:
            Members, of which this replica is one; it holds their head.

        Raises:
            PlanError: If this replica cannot take part.
            PeerError: If the coordinator or a rank of this replica does not answer.
        """
        self.seconds = {}
        while True:
            with self._timing("ask"):
                found = self._ask()
            membership = found.membership
            # others may have gone on, saved a checkpoint and left while this replica waited
            if self._restored is not None and not self.agree(membership.head != self.held or not self._is_outdated()):
                raise PeerError(
                    f"holds step {self.held.step}, and a newer checkpoint was saved since it was restored",
                    peer=None,
                    where=self.place.name,
                    remedy="go on from the newest checkpoint with --resume",
                )
            why = self._prepare(found)
            if self.agree(why is None):
                self._membership, self._bucket, self._is_last = membership, 0, found.stop
                return membership
            self.discard()

    def _prepare(self, found: StepMembers) -> str | None:
        """Connect and catch up; return why this rank cannot go on in this epoch, or None.

        The others do not wait for the state: they compute while it is fetched.
        """
        membership, why = found.membership, None
        with self._timing("connect"):
            try:
                self._connect(found)
            except PeerError as error:
                why = str(error)
                self._note(error)
        if self.place.name not in membership.donors:
            return why
        fetched = None
        if why is None:
            with self._timing("fetch"):
                try:
                    donor = found.addresses[membership.donors[self.place.name]][2 * self.mesh.rank + 1]
                    fetched = fetch_state(donor, self.place.token, membership.head, self.config.deadline_s)
                except (MessageError, LookupError) as error:
                    why = str(error)
                    self._missed.add(membership.donors[self.place.name])
        if not self.agree(fetched is not None):  # all ranks install it, or none
            self._reducer.abort("a replica that was behind did not catch up")
            return why or "another rank did not catch up"
        assert fetched is not None
        with self._provider.changing(membership.head):
            self._state.install(*fetched)
        self.held, self._restored = membership.head, None
        return None

    def _connect(self, found: StepMembers) -> None:
        membership = found.membership
        wanted = (membership.epoch, membership.participants)
        if self._connected == wanted:
            return
        self._connected = None
        ring = [RingMember(name, found.addresses[name][2 * self.mesh.rank]) for name in membership.members]
        self._reducer.connect(membership.epoch, ring, self.place.name, membership.participants, self.config.deadline_s)
        self._connected = wanted

    @property
    def contributes(self) -> bool:
        """Whether this replica contributes to the step; if not, it has just caught up and only receives the sums."""
        assert self._membership is not None
        return self.place.name in self._membership.participants

    @property
    def is_last(self) -> bool:
        """Whether the coordinator asks all replicas to stop after the step."""
        return self._is_last

    def add(self, tensor: Tensor) -> bool:
        """Replace a tensor by its sum over the participants; return False if the sum was given up.

        Args:
            tensor: One dimension, contiguous, on the CPU; ignored if this replica does not contribute.
        """
        assert self._membership is not None
        self._bucket += 1
        with self._timing("reduce"):
            try:
                self._reducer.reduce(
                    tensor, step=self.held.step + 1, bucket=self._bucket, deadline_s=self.config.deadline_s
                )
            except PeerError as error:
                self._note(error)
                return False
        return True

    def _note(self, error: PeerError) -> None:
        """Record the members that sent nothing in time."""
        self._missed.update(getattr(error, "missed", ()))

    def agree(self, is_well: bool) -> bool:
        """Return whether all ranks of this replica are well.

        Raises:
            PeerError: If a rank does not answer.
        """
        with self._timing("vote"):
            return bool(self.mesh.exchange([float(is_well)]).amin() > 0)

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Change the state within the ``with`` block to that after the step."""
        assert self._membership is not None
        with self._timing("update"), self._provider.changing(self._membership.result):
            yield
        self.held, self._discarded, self._restored = self._membership.result, False, None

    def discard(self) -> None:
        """Give the step up; its samples are trained in a later one. All ranks of this replica call this."""
        self._discarded, self._connected = True, None
        self._missed = {name for found in self._gathered(sorted(self._missed)) for name in found}

    def _ask(self) -> StepMembers:
        """Ask the coordinator on the first rank; wait for its answer on all of them."""
        self._at("waiting for other replicas")
        if self._link is not None:
            if self._discarded:  # other replicas may have continued without this one
                self._newest = self._durable()
            is_restored = self._restored is not None and not self._is_outdated()
            missed = tuple(sorted(self._missed))
            self._link.ask(Ask(self.place.name, self.held, self._discarded, self._newest, is_restored, missed))
        self._missed = set()
        while True:
            found: Any = None
            if self._link is not None:
                try:
                    found = self._link.answer(_SHARED_S)
                except Exception as error:
                    self._shared(error)
                    raise
            found = self._shared(found)
            self._at("waiting for other replicas")
            if isinstance(found, Exception):
                raise found
            if isinstance(found, StepMembers):
                return found

    def _is_outdated(self) -> bool:
        """Whether the state was restored from a checkpoint, and a newer one was saved since."""
        if self._restored is None:
            return False
        self._newest = self._durable()
        return self._newest > self._restored

    def _shared(self, value: Any) -> Any:
        """Return the first rank's value on all ranks of this replica."""
        if self.mesh.config.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def _gathered(self, value: Sequence[str]) -> list[list[str]]:
        """Return the values of all ranks of this replica."""
        if self.mesh.config.world == 1:
            return [list(value)]
        found: list[Any] = [None] * self.mesh.config.world
        dist.all_gather_object(found, list(value))
        return found

    def _at(self, where: str) -> None:
        if self._watchdog is not None:
            self._watchdog.at(where)

    @contextlib.contextmanager
    def _timing(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


def _own_address(coordinator: str) -> str:
    """Return the address from which this machine reaches the coordinator, at which others reach it.

    Raises:
        PeerError: If there is no way to it.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise PeerError(f"cannot be reached ({error})", peer=None, where=f"coordinator {coordinator}") from error


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """Return a digest of 32 bits of the bytes of tensors, in the order of their names."""
    found = 0
    for name in sorted(tensors):
        own = tensors[name].detach()
        if own.numel():
            found = zlib.crc32(own.contiguous().view(-1).view(torch.uint8).cpu().numpy().data, found)
    return found
