"""Transfer of the state of one rank to a rank that is behind, while training continues.

The donor's tensors are the live ones of training. They change at commits only, for which the training thread takes the
provider's lock; a transfer takes it for each piece and checks that the version is still the one that was asked for. A
transfer is therefore of one version, or ends with an error. The receiver keeps what it gets apart until all ranks of
its replica have everything.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cordillera.distributed.fault_tolerance.coordination import Commit
from cordillera.distributed.fault_tolerance.messages import MOST_BYTES, Channel, MessageError

_HANDSHAKE_S = 5.0
_PIECE = min(4 << 20, MOST_BYTES)  # bytes
_MOST_AT_ONCE = 16  # connections
_DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}


class StateProvider:
    """Server of a rank's state to ranks that are behind.

    Args:
        tensors: Function that returns the live tensors by name; contiguous, on the CPU or on a GPU.
        facts: Function that returns the rest of the state as JSON values.
        token: Secret of the job.
        host: Address to listen at.
        deadline_s: Longest time of one wait for a receiver.

    Attributes:
        address: ``HOST:PORT`` at which it listens.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, Tensor]],
        facts: Callable[[], Any],
        token: bytes,
        *,
        host: str = "127.0.0.1",
        deadline_s: float = 60.0,
    ) -> None:
        self._tensors, self._facts, self._token, self._deadline_s = tensors, facts, token, deadline_s
        self._lock = threading.Lock()
        self._commit: Commit | None = None
        self._listener = socket.create_server((host, 0), backlog=64)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        threading.Thread(target=self._accept, name="cordillera state", daemon=True).start()

    @contextlib.contextmanager
    def changing(self, commit: Commit) -> Iterator[None]:
        """Change the state within the ``with`` block to that of ``commit``; if the block fails, no state is served."""
        with self._lock:
            self._commit = None
            yield
            self._commit = commit

    def close(self) -> None:
        """End the service."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._attend, args=(connection,), name="cordillera state", daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        channel = Channel(connection, "receiver", _HANDSHAKE_S)
        try:
            channel.prove(self._token, "server")
            wanted = channel.receive()
            channel.deadline_s = self._deadline_s
            self._give(channel, wanted)
        except (MessageError, OSError):
            pass  # the receiver reports the failure
        finally:
            channel.close()
            self._places.release()

    def _give(self, channel: Channel, wanted: Any) -> None:
        with self._lock:
            commit = self._commit
            if commit is None or wanted != [commit.epoch, commit.step, commit.lineage]:
                held = "none" if commit is None else f"step {commit.step} of epoch {commit.epoch}"
                channel.send({"refused": f"holds {held}"})
                return
            tensors = dict(self._tensors())
            facts = self._facts()
        names = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in tensors.items()}
        channel.send({"facts": facts, "tensors": names})
        for tensor in tensors.values():
            for first in range(0, tensor.nbytes, _PIECE):
                with self._lock:
                    if self._commit != commit:
                        return  # the connection ended during the transfer
                    piece = _bytes_of(tensor)[first : first + _PIECE].cpu().clone()
                channel.send_bytes(piece.numpy().data)


def fetch_state(address: str, token: bytes, commit: Commit, deadline_s: float) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and facts that the provider at an ``address`` holds after a ``commit``.

    Args:
        token: Secret of the job.
        deadline_s: Longest time of one wait.

    Raises:
        MessageError: If the provider does not hold it, gives it up, or does not answer in time.
    """
    channel = Channel.connect(address, token, f"donor at {address}", deadline_s)
    try:
        channel.send([commit.epoch, commit.step, commit.lineage])
        content = channel.receive()
        if not isinstance(content, dict) or "refused" in content:
            why = content.get("refused") if isinstance(content, dict) else "sent something else"
            raise MessageError(f"{why}, not step {commit.step} of epoch {commit.epoch}", where=channel.who)
        tensors = {}
        for name, (dtype, shape) in content["tensors"].items():
            if math.prod(shape) * _DTYPES[dtype].itemsize > 1 << 40:
                raise MessageError(f"{name} has {shape} elements", where=channel.who)
            tensors[str(name)] = torch.empty(shape, dtype=_DTYPES[dtype])
        for tensor in tensors.values():
            whole = _bytes_of(tensor)
            for first in range(0, tensor.nbytes, _PIECE):
                channel.receive_bytes(whole[first : first + _PIECE].numpy().data)
        return tensors, content["facts"]
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"sent a state that is incomplete ({error})", where=channel.who) from error
    finally:
        channel.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
