"""Connection of a replica to the coordinator."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from cordillera.distributed.fault_tolerance.coordination import Ask, Membership
from cordillera.distributed.fault_tolerance.coordinator import read_commit
from cordillera.distributed.fault_tolerance.messages import Channel, MessageError
from cordillera.errors import PeerError, PlanError

_CONNECT_S = 2.0
_SILENT_BEATS = 4  # unconfirmed heartbeats after which the connection is replaced
_AGAIN_S = 0.1  # delay between attempts to connect


@dataclass(frozen=True)
class StepMembers:
    """Answer of the coordinator before a step.

    Attributes:
        membership: Who takes part, and from which state.
        addresses: Addresses of all ranks of each member.
        stop: Whether the job ends with this step.
    """

    membership: Membership
    addresses: Mapping[str, Sequence[str]]
    stop: bool = False


_Answer: TypeAlias = StepMembers | PeerError | PlanError


class CoordinatorLink:
    """Connection of a replica's first rank to the coordinator.

    A thread sends heartbeats, receives answers, and reconnects if the coordinator was restarted or the network drops
    messages. An open question is then repeated.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        token: Secret of the job.
        replica: Name of this replica.
        configuration: Digest of all that must be equal on replicas.
        addresses: Addresses at which other replicas reach each rank of this one.
        beat_s: Seconds between signs of life.
        patience_s: Seconds without a coordinator after which the replica ends.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        replica: str,
        configuration: str,
        addresses: Sequence[str],
        *,
        beat_s: float,
        patience_s: float,
    ) -> None:
        self._address, self._token, self._beat_s, self._patience_s = address, token, beat_s, patience_s
        self._replica = replica
        self._join: dict[str, Any] = {"replica": replica, "configuration": configuration, "addresses": list(addresses)}
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._asked: dict[str, Any] | None = None
        self._lock = threading.Lock()  # one message at a time, and the question with it
        self._is_closed = threading.Event()
        self._channel = self._connect()
        threading.Thread(target=self._hear, name="cordillera link", daemon=True).start()
        threading.Thread(target=self._beat, name="cordillera beat", daemon=True).start()

    def ask(self, ask: Ask) -> None:
        """Ask to take part in the step after ``ask.state``; :meth:`answer` returns what comes back."""
        content = {
            "kind": "ask",
            "state": asdict(ask.state),
            "discarded": ask.discarded,
            "durable": ask.durable,
            "restored": ask.restored,
            "missed": list(ask.missed),
        }
        with self._lock:
            self._asked = content
            with contextlib.suppress(MessageError):  # the next connection repeats the question
                self._channel.send(content)

    def answer(self, seconds: float) -> StepMembers | None:
        """Return the answer to the open question; None if it has not come within ``seconds``.

        Raises:
            PlanError: If this replica cannot take part, with the reason.
            PeerError: If there was no coordinator for too long, or another process has taken this replica's place.
        """
        try:
            found = self._answers.get(timeout=seconds)
        except queue.Empty:
            return None
        if not isinstance(found, StepMembers):
            raise found
        return found

    def close(self) -> None:
        """Leave the job."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        with self._lock, contextlib.suppress(MessageError):
            self._channel.send({"kind": "leave"})
        self._channel.close()

    def _connect(self) -> Channel:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                channel = Channel.connect(self._address, self._token, "the coordinator", _CONNECT_S)
                channel.give_up_silence(_SILENT_BEATS * self._beat_s)
                channel.send(self._join)
                return channel
            except MessageError:
                if self._is_closed.is_set() or time.monotonic() > until:
                    raise
                self._is_closed.wait(_AGAIN_S)

    def _hear(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._channel.deadline_s = 10**6
                self._take(self._channel.receive())
            except MessageError as error:
                if self._is_closed.is_set() or not self._again(error):
                    return

    def _again(self, error: MessageError) -> bool:
        """Connect again and repeat the open question; return whether there is a connection."""
        self._channel.close()
        try:
            channel = self._connect()
            with self._lock:
                self._channel = channel
                if self._asked is not None:
                    channel.send(self._asked)
        except MessageError:
            self._answers.put(
                PeerError(
                    f"the coordinator {error.what}, and no other came within {self._patience_s:g} s",
                    peer=None,
                    where=self._address,
                    remedy="go on from the newest checkpoint with --resume",
                )
            )
            return False
        return True

    def _take(self, content: Any) -> None:
        try:
            kind = content["kind"]
            if kind == "refused":
                what = f"cannot take part: {content['why']}"
                if content["again"]:
                    self._answers.put(PeerError(what, peer=None, where=self._replica))
                else:
                    self._answers.put(PlanError(what, where=self._replica))
            elif kind == "replaced":
                self._is_closed.set()
                what = "another process has taken the place of this replica"
                self._answers.put(PeerError(what, peer=None, where=self._replica))
            elif kind == "membership":
                members = tuple(map(str, content["members"]))
                donors = {str(key): str(value) for key, value in content["donors"].items()}
                membership = Membership(int(content["epoch"]), read_commit(content["head"]), members, donors)
                addresses = {name: list(map(str, content["addresses"][name])) for name in members}
                with self._lock:
                    is_open, self._asked = self._asked is not None, None
                if is_open:
                    self._answers.put(StepMembers(membership, addresses, content["stop"] is True))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MessageError("the coordinator sent a message that is incomplete") from error

    def _beat(self) -> None:
        while not self._is_closed.wait(self._beat_s):
            with self._lock, contextlib.suppress(MessageError):
                self._channel.send({"kind": "alive"})
