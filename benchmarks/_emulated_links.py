"""Links that are slower than the machine's: real messages, paced by a token bucket in each sender."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.collectives import Arrival, Collectives
from cordillera.distributed.ledger import Ledger, Traffic


class _Sending:
    """A message that waits for the link, then for its delivery."""

    def __init__(self, peer: int, tensor: Tensor, tag: int) -> None:
        self.peer, self.tensor, self.tag = peer, tensor, tag
        self._sent = threading.Event()
        self.error: BaseException | None = None

    def done(self) -> None:
        self._sent.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._sent.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the message was not sent in time")
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return True


class EmulatedLinks(Collectives):
    """:class:`Collectives` whose messages leave a rank one after another, at a rate and with a latency.

    Messages of :meth:`_messages` are paced; other collectives are not. A thread sends each message at the moment at
    which its last byte would arrive, so that transfers overlap with computation as on a network interface.

    Args:
        bytes_per_s: Rate of a rank's outgoing link.
        latency_s: Time that every message takes in addition.
    """

    def __init__(self, ledger: Ledger, deadline_s: float, *, bytes_per_s: float, latency_s: float) -> None:
        super().__init__(None, ledger, deadline_s)
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self._waiting: queue.SimpleQueue[tuple[float, _Sending] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread once all messages are sent."""
        self._waiting.put(None)
        self._thread.join()

    def _send(self) -> None:
        free = 0.0
        while (item := self._waiting.get()) is not None:
            asked, message = item
            free = max(asked, free) + message.tensor.nbytes / self.bytes_per_s
            time.sleep(max(0.0, free + self.latency_s - time.perf_counter()))
            try:
                dist.isend(message.tensor, group=self.group, tag=message.tag, group_dst=message.peer).wait()
            except RuntimeError as error:
                message.error = error
            message.done()

    def _messages(
        self,
        name: str,
        sends: list[tuple[int, Tensor]],
        arrivals: list[tuple[int, Tensor]],
        tag: int,
        result: Any,
        traffic: Traffic,
    ) -> Arrival[Any]:
        works: list[tuple[Any, int]] = [
            (dist.irecv(tensor, group=self.group, tag=tag, group_src=peer), peer) for peer, tensor in arrivals
        ]
        for peer, tensor in sends:
            message = _Sending(peer, tensor, tag)
            self._waiting.put((time.perf_counter(), message))
            works.append((message, peer))
        return Arrival(result, works, self, name, traffic, [tensor for _, tensor in sends])
