"""Checkpoints that many processes write together, each its own files, and that any other processes can read.

What a process writes follows from its place in the job, so nothing is planned together. The thread that writes does not
communicate, because its messages would interfere with those of training. A rank signals that its files are on the disk
by a small file beside them; rank 0 waits for those, writes the checksums and renames the folder. Ranks exchange their
errors when all of them call for it, at the next save or wait. All ranks must share one folder.

Positions of parts are in the headers of files (:mod:`cordillera.distributed.tensor_parts`). Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cordillera.data.files import checksum
from cordillera.data.sealed import CHECKSUMS, SealedFolder
from cordillera.distributed.tensor_parts import describe_parts
from cordillera.errors import CheckpointError, CordilleraError, RunError, TrainingError
from cordillera.files import read_json_object, sealed_json
from cordillera.run import disk_errors, remove_folder, write_atomically
from cordillera.training.checkpoints import flush, folder_of, steps, write_tensors

_Anything = TypeVar("_Anything")
_KINDS: dict[str, type[CordilleraError]] = {kind.__name__: kind for kind in (RunError, CheckpointError, TrainingError)}


class WritingRanks(NamedTuple):
    """The ranks that write checkpoints together.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        deadline_s: Longest time of one exchange, in seconds.
        exchange: Function that collects equally many numbers of every rank on all of them, ``float64 [size, n]``.
    """

    rank: int
    size: int
    deadline_s: float
    exchange: Callable[[Sequence[float]], Tensor]


class PartToWrite(NamedTuple):
    """Part of a tensor that one rank writes: the name of its file, the tensor's name, its offsets and its values."""

    file: str
    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


class RankCheckpoints:
    """The checkpoints of one training in many processes.

    All ranks call the same methods in the same order, except :meth:`steps` and :meth:`prune`; each raises a PeerError
    if another rank does not answer in time.

    Args:
        folder: Folder of the checkpoints, the same for all ranks.
        ranks: The ranks.
        asynchronous: Whether training continues while files are written. The copy to write from stays in host memory,
            because allocating new memory takes longer than copying.
        deadline_s: Longest time that ranks wait for another's files, seconds; None for that of ``ranks``.

    Attributes:
        last: Step of the checkpoint that was last begun or restored, equal on every rank; None before.
        bytes: Bytes of the tensors of the checkpoint that was last begun, over all ranks.
    """

    def __init__(self, folder: Path, ranks: WritingRanks, asynchronous: bool, deadline_s: float | None = None) -> None:
        self.folder, self.ranks, self.asynchronous = Path(folder), ranks, asynchronous
        self.deadline_s = ranks.deadline_s if deadline_s is None else deadline_s
        self.last: int | None = None
        self.bytes = 0
        self._write: _Write | None = None
        self._copies: dict[tuple[str, str], Tensor] = {}

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints that this process sees, ascending."""
        return steps(self.folder)

    def begin(self, step: int, parts: Sequence[PartToWrite], texts: Mapping[str, str]) -> None:
        """Begin to write a checkpoint, and wait for it unless ``asynchronous``; no other may be under way.

        Args:
            step: Step that names the checkpoint.
            parts: Parts of tensors that this rank writes. No two in one file have the same name.
            texts: Text files by name, equal on every rank.

        Raises:
            CheckpointError: If ranks passed different texts.
            RunError: If the disk is full or read-only; raised by :meth:`wait` if ``asynchronous``.
        """
        own = sum(part.tensor.nbytes for part in parts)
        # random bits make the name of a folder that no earlier attempt has used
        found = self.ranks.exchange([zlib.crc32(repr(texts).encode()), own, secrets.randbits(48)]).long()
        for rank, digest in enumerate(found[:, 0].tolist()):
            if digest != found[0, 0]:
                raise CheckpointError(
                    f"rank {rank} was given another state than rank 0",
                    where=f"step {step}",
                    remedy="give every rank the same",
                )
        self.last, self.bytes = step, int(found[:, 1].sum())
        target = folder_of(self.folder, self.last)
        temporary = self.folder / f".{target.name}.{int(found[0, 2]):012x}.tmp"
        still = [part._replace(tensor=self._still(part)) for part in parts]
        if any(part.tensor.is_cuda for part in parts):
            torch.cuda.current_stream().synchronize()
        self._write = _Write(target, temporary, self.ranks, self.deadline_s, still, texts)
        self._write.start()
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete on the disk; errors are equal on every rank.

        Raises:
            CheckpointError: If it could not be written.
            RunError: If the disk is full or read-only. Earlier checkpoints are intact.
        """
        write = self._write
        if write is None:
            return
        began = time.monotonic()
        while True:
            write.join(min(1.0, self.deadline_s, self.ranks.deadline_s) / 4)
            ended = 0.0 if write.is_alive() else 1.0 if write.problem is None else 2.0
            # rank 0's clock decides for all ranks
            found = self.ranks.exchange([ended, time.monotonic() - began])
            if (found[:, 0] == 2).any():
                write.stop.set()
            if found[:, 0].all() or found[0, 1] > self.deadline_s:
                break
        self._write = None
        late = (found[:, 0] == 0).nonzero()[:, 0].tolist()
        late = [rank for rank in late if rank > 0] or late  # rank 0 waits for the others
        problem = write.problem
        if problem is None and late:
            problem = _late(late, self.deadline_s, write.target)
        try:
            self.agree(problem)
        except CordilleraError:
            if self.ranks.rank == 0:
                remove_folder(write.temporary)
            raise

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint that rank 0 sees, on every rank; None without any."""
        # a slow file system may show ranks different folders
        newest = int(self.ranks.exchange([max(self.steps(), default=-1)])[0, 0])
        return None if newest < 0 else newest

    def prune(self, keep: set[int]) -> None:
        """Delete checkpoints whose steps are not in ``keep``, and leftovers of unfinished writes, on rank 0.

        While a checkpoint is being written, the newest complete one is kept in any case.
        """
        if self.ranks.rank != 0:
            return
        found = self.steps()
        kept = keep | set(found[-1:]) if self._write is not None else keep
        for step in found:
            if step not in kept:
                _remove(folder_of(self.folder, step))
        for leftover in self.folder.glob(".step-*.tmp"):
            if self._write is None or leftover != self._write.temporary:
                remove_folder(leftover)

    def verify_share(self, folder: SealedFolder, names: Iterable[str]) -> None:
        """Verify this rank's share of the files ``names`` of ``folder``; all ranks together verify each of them once.

        Raises:
            CheckpointError: If a file of this rank's share is corrupt.
        """
        by_size = sorted(names, key=lambda name: (-folder.sizes[name], name))
        for name in by_size[self.ranks.rank :: self.ranks.size]:
            folder.verify(name)

    def together(self, work: Callable[[], _Anything]) -> _Anything:
        """Run work that may fail on some ranks so that it fails on all, and return its result.

        Raises:
            CordilleraError: The error of the first rank that has one; a RunError, CheckpointError or TrainingError
                keeps its class, others become a CheckpointError.
        """
        problem, done = None, None
        try:
            done = work()
        except CordilleraError as error:
            problem = error
        except OSError as error:
            problem = CheckpointError(f"cannot be read ({error})", where=str(error.filename or self.folder))
        self.agree(problem)
        return done  # type: ignore[return-value]

    def agree(self, problem: CordilleraError | None) -> None:
        """Raise on every rank the error of the first rank that has one."""
        said = b""
        if problem is not None:
            said = json.dumps([type(problem).__name__, problem.what, problem.where, problem.remedy]).encode()
        lengths = self.ranks.exchange([len(said)])[:, 0].long().tolist()
        if not any(lengths):
            return
        first = next(rank for rank, length in enumerate(lengths) if length)
        heard = self.ranks.exchange(list(said.ljust(max(lengths))))[first].long().tolist()
        kind, what, where, remedy = json.loads(bytes(heard))
        raise _KINDS.get(kind, CheckpointError)(what, where=where, remedy=remedy) from problem

    def _still(self, part: PartToWrite) -> Tensor:
        """Return a tensor in host memory that training does not change while it is written."""
        tensor = part.tensor
        if not self.asynchronous:
            return tensor.cpu().contiguous()
        copy = self._copies.get((part.file, part.name))
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[part.file, part.name] = copy
        return copy.copy_(tensor, non_blocking=True)


class _Write(threading.Thread):
    """Writes one rank's share of one checkpoint; the thread of rank 0 also completes the checkpoint."""

    def __init__(
        self,
        target: Path,
        temporary: Path,
        ranks: WritingRanks,
        deadline_s: float,
        parts: Sequence[PartToWrite],
        texts: Mapping[str, str],
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)  # a rank that fails must not wait for it
        self.target, self.temporary, self.deadline_s = target, temporary, deadline_s
        self.rank, self.size = ranks.rank, ranks.size
        self.stop = threading.Event()
        self.problem: CordilleraError | None = None
        self._parts = parts
        self._texts = texts if self.rank == 0 else {}

    def run(self) -> None:
        """Write; an error is stored in ``problem``."""
        try:
            with disk_errors(self.target):
                self._write_own()
                if self.rank == 0:
                    self._complete()
        except CordilleraError as error:
            self.problem = error
        except Exception as error:
            self.problem = CheckpointError(f"cannot be written ({error})", where=str(self.target))

    def _write_own(self) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        for name, text in self._texts.items():
            (self.temporary / name).write_text(text, encoding="utf-8")
        by_file: dict[str, list[PartToWrite]] = {}
        for part in self._parts:
            by_file.setdefault(part.file, []).append(part)
        for name, parts in by_file.items():
            offsets = {part.name: part.offsets for part in parts}
            write_tensors(self.temporary / name, {part.name: part.tensor for part in parts}, describe_parts(offsets))
        names = [*self._texts, *by_file]
        for name in names:
            flush(self.temporary / name)
        files = {
            name: {"sha256": checksum(self.temporary / name), "bytes": (self.temporary / name).stat().st_size}
            for name in names
        }
        write_atomically(self.temporary / _ready(self.rank), json.dumps(files))

    def _complete(self) -> None:
        until = time.monotonic() + self.deadline_s
        names = [_ready(rank) for rank in range(self.size)]
        while missing := set(names).difference(os.listdir(self.temporary)):
            if self.stop.wait(0.02):
                return
            if time.monotonic() > until:
                raise _late([names.index(name) for name in sorted(missing)], self.deadline_s, self.target)
        files: dict[str, dict[str, Any]] = {}
        for name in names:
            files |= read_json_object(self.temporary / name, error=CheckpointError)
        (self.temporary / CHECKSUMS).write_text(sealed_json(files), encoding="utf-8")
        for name in names:
            (self.temporary / name).unlink()
        flush(self.temporary / CHECKSUMS)
        flush(self.temporary)
        _remove(self.target)
        os.rename(self.temporary, self.target)
        flush(self.target.parent)


def _ready(rank: int) -> str:
    return f"ready-{rank:05d}.json"


def _late(ranks: list[int], deadline_s: float, where: Path) -> CheckpointError:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return CheckpointError(
        f"{who} did not come to the end of writing within {deadline_s:g} s",
        where=str(where),
        remedy="look at the log and the disk there, or give more time",
    )


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that a partial one is never taken for complete."""
    if folder.exists():
        gone = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
        os.rename(folder, gone)
        remove_folder(gone)
