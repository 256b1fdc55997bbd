"""Checkpoints of a language model in many processes: each writes its own part, and any other processes can read it.

From its place in the mesh, every process knows what it alone has to write, so nothing is planned together. The thread
that writes does not communicate, because its messages would interfere with those of training. A rank signals that its
files are on the disk by a small file beside them; rank 0 waits for those, writes the checksums and renames the folder.
Ranks exchange their errors when all of them call for it, at the next save or wait. All ranks must share one folder.

The position of a part in its tensor comes from the chunks that :mod:`torch.distributed.checkpoint` makes of DTensors,
and the files are in its layout of safetensors (:mod:`cordillera.models.language.checkpoints.sharded`). Its own planner
gathers pickled plans for every save and leaves a pickle beside the tensors; nothing here is ever unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cordillera.data.files import checksum
from cordillera.distributed.mesh import ProcessMesh
from cordillera.errors import CheckpointError, CordilleraError, RunError
from cordillera.files import read_json_object, sealed_json
from cordillera.models.language.checkpoints.sealed import CHECKSUMS
from cordillera.models.language.checkpoints.sharded import (
    MODEL,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    Parts,
    ShardedFolder,
    check_weights,
    describe_parts,
    part_file,
)
from cordillera.models.language.checkpoints.source import check_architecture
from cordillera.numerics.emulation.weight_storage import WeightStorage
from cordillera.run import disk_errors, remove_folder, write_atomically
from cordillera.training.checkpoints import flush, folder_of, not_finite, steps, write_tensors
from cordillera.training.language.engine import LanguageEngine

_MOMENTS = ("exp_avg", "exp_avg_sq")
_Anything = TypeVar("_Anything")


class ShardedCheckpoints:
    """The checkpoints of one training.

    All ranks call the same methods in the same order, except :meth:`steps` and :meth:`prune`; each raises a PeerError
    if another rank does not answer in time.

    Args:
        folder: Folder of the checkpoints, the same for all ranks.
        mesh: Mesh of all processes.
        asynchronous: Whether training continues while files are written. The copy to write from stays in host memory,
            because allocating new memory takes longer than copying.
        deadline_s: Longest time that ranks wait for another's files, seconds; None for the mesh's.

    Attributes:
        last: Step of the checkpoint that was last begun or restored, equal on every rank; None before.
        bytes: Bytes of the tensors of the checkpoint that was last begun, over all ranks.
    """

    def __init__(
        self, folder: Path, mesh: ProcessMesh, asynchronous: bool = True, deadline_s: float | None = None
    ) -> None:
        self.folder, self.mesh, self.asynchronous = Path(folder), mesh, asynchronous
        self.deadline_s = mesh.config.deadline_s if deadline_s is None else deadline_s
        self.last: int | None = None
        self.bytes = 0
        self._write: _Write | None = None
        self._copies: dict[str, Tensor] = {}

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints that this process sees, ascending."""
        return steps(self.folder)

    def save(self, engine: LanguageEngine, state: dict[str, Any]) -> None:
        """Begin to write a checkpoint once the previous one is complete; weights may change as soon as this returns.

        Weights, moments and counters are those of ``engine``; ``state`` holds plain JSON values, equal on every rank,
        of which ``state["step"]`` names the checkpoint.

        Raises:
            CheckpointError: If a weight or moment is NaN or infinite, in which case nothing is written, or if ranks
                passed different states. Errors of :meth:`wait` for the previous checkpoint are raised as well.
        """
        self.wait()
        engine_state: dict[str, Any] = {"steps": engine.steps, "skipped": engine.skipped}
        if engine.loss_scale is not None:
            engine_state["loss_scale"] = engine.loss_scale.state_dict()
        content = {"state": state, "engine": engine_state, "world": self.mesh.config.world}
        texts = {STATE: json.dumps(content, allow_nan=False), MODEL: engine.model.model_dump_json(indent=2)}
        parts = list(_own_parts(engine))
        self._agree(self._not_finite(parts, int(state["step"])))
        own = sum(part.tensor.nbytes for part in parts)
        # random bits make the name of a folder that no earlier attempt has used
        found = self.mesh.exchange([zlib.crc32(repr(texts).encode()), own, secrets.randbits(48)]).long()
        for rank, digest in enumerate(found[:, 0].tolist()):
            if digest != found[0, 0]:
                raise CheckpointError(
                    f"rank {rank} was given another state than rank 0",
                    where=f"step {state['step']}",
                    remedy="give every rank the same",
                )
        self.last, self.bytes = int(state["step"]), int(found[:, 1].sum())
        target = folder_of(self.folder, self.last)
        temporary = self.folder / f".{target.name}.{int(found[0, 2]):012x}.tmp"
        parts = [part._replace(tensor=self._still(part)) for part in parts]
        if self.mesh.device_type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._write = _Write(target, temporary, self.mesh, self.deadline_s, parts, texts)
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
            write.join(min(1.0, self.deadline_s, self.mesh.config.deadline_s) / 4)
            ended = 0.0 if write.is_alive() else 1.0 if write.problem is None else 2.0
            # rank 0's clock decides for all ranks
            found = self.mesh.exchange([ended, time.monotonic() - began])
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
            self._agree(problem)
        except CordilleraError:
            if self.mesh.rank == 0:
                remove_folder(write.temporary)
            raise

    def restore(self, engine: LanguageEngine, step: int | None = None) -> dict[str, Any] | None:
        """Load a checkpoint into an engine of any mesh, after verifying every byte, and return the state saved with it.

        Without a checkpoint, the result is None.

        Args:
            engine: Engine whose weights, moments and counters are overwritten; after an error they are undefined.
            step: Step of the checkpoint; None for the newest.

        Raises:
            CheckpointError: If there is no checkpoint of this step, one of its files is missing or corrupt, it belongs
                to another model, or it holds NaN or infinity. Every rank raises the same error.
        """
        self.wait()
        newest = max(self.steps(), default=-1) if step is None else step
        chosen = int(self.mesh.exchange([newest])[0, 0])  # a slow file system may show ranks different folders
        if chosen < 0:
            return None
        path = folder_of(self.folder, chosen)
        opened = self._together(lambda: self._verified(path))
        content = self._together(lambda: _load(engine, opened))
        engine.steps, engine.skipped = content["engine"]["steps"], content["engine"]["skipped"]
        if engine.loss_scale is not None and "loss_scale" in content["engine"]:
            engine.loss_scale.load_state_dict(content["engine"]["loss_scale"])
        self.last = chosen
        state: dict[str, Any] = content["state"]
        return state

    def prune(self, keep: set[int]) -> None:
        """Delete checkpoints except those of the steps in ``keep``, and remains of unfinished writes, on rank 0.

        While a checkpoint is being written, the newest complete one is kept in any case.
        """
        if self.mesh.rank != 0:
            return
        found = self.steps()
        kept = keep | set(found[-1:]) if self._write is not None else keep
        for step in found:
            if step not in kept:
                _remove(folder_of(self.folder, step))
        for leftover in self.folder.glob(".step-*.tmp"):
            if self._write is None or leftover != self._write.temporary:
                remove_folder(leftover)

    def _not_finite(self, parts: Sequence[_OwnPart], step: int) -> CheckpointError | None:
        """Return the error for NaN or infinity among this rank's parts, or None."""
        for part in parts:
            found = not_finite({part.name: part.tensor})
            if found is None:
                continue
            what = "the weights" if part.kind == WEIGHTS else "the optimizer's moments"
            newest = max(self.steps(), default=None)
            kept = "no checkpoint was written yet" if newest is None else f"the checkpoint of step {newest} is kept"
            return CheckpointError(
                f"{what} of step {step} are not finite ({found}) and are not saved; {kept}",
                where=str(folder_of(self.folder, step)),
                remedy="start a new run with a lower training.learning_rate or more warmup_steps"
                + ("" if newest is None else "; --resume goes on from the checkpoint that is kept"),
            )
        return None

    def _still(self, part: _OwnPart) -> Tensor:
        """Return a tensor in host memory that training does not change while it is written."""
        tensor = part.tensor
        if not self.asynchronous:
            return tensor.cpu().contiguous()
        copy = self._copies.get(part.name)
        if copy is None or copy.shape != tensor.shape:
            copy = self._copies[part.name] = torch.empty(tensor.shape, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)

    def _verified(self, path: Path) -> ShardedFolder:
        """Open a folder after this rank has verified its share of the files."""
        if not path.is_dir():
            raise CheckpointError(
                "there is no such checkpoint",
                where=str(path),
                remedy=f"steps there are: {', '.join(map(str, self.steps())) or 'none'}",
            )
        opened = ShardedFolder(path)
        by_size = sorted(opened.sizes, key=lambda name: (-opened.sizes[name], name))
        for name in by_size[self.mesh.rank :: self.mesh.config.world]:
            opened.verify(name)
        return opened

    def _together(self, work: Callable[[], _Anything]) -> _Anything:
        """Run work that may fail on some ranks so that it fails on all."""
        problem, done = None, None
        try:
            done = work()
        except CordilleraError as error:
            problem = error
        except OSError as error:
            problem = CheckpointError(f"cannot be read ({error})", where=str(error.filename or self.folder))
        self._agree(problem)
        return done  # type: ignore[return-value]

    def _agree(self, problem: CordilleraError | None) -> None:
        """Raise on every rank the error of the first rank that has one."""
        said = b""
        if problem is not None:
            said = json.dumps([isinstance(problem, RunError), problem.what, problem.where, problem.remedy]).encode()
        lengths = self.mesh.exchange([len(said)])[:, 0].long().tolist()
        if not any(lengths):
            return
        first = next(rank for rank, length in enumerate(lengths) if length)
        heard = self.mesh.exchange(list(said.ljust(max(lengths))))[first].long().tolist()
        is_run, what, where, remedy = json.loads(bytes(heard))
        raise (RunError if is_run else CheckpointError)(what, where=where, remedy=remedy) from problem


class _OwnPart(NamedTuple):
    """A part of a tensor that one rank writes: its kind, the tensor's name, its offsets and its values."""

    kind: str
    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


class _Write(threading.Thread):
    """Writes one rank's share of one checkpoint; that of rank 0 completes the checkpoint."""

    def __init__(
        self,
        target: Path,
        temporary: Path,
        mesh: ProcessMesh,
        deadline_s: float,
        parts: list[_OwnPart],
        texts: dict[str, str],
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)  # a rank that fails must not wait for it
        self.target, self.temporary, self.deadline_s = target, temporary, deadline_s
        self.rank, self.world = mesh.rank, mesh.config.world
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
        names = list(self._texts)
        for name, text in self._texts.items():
            (self.temporary / name).write_text(text, encoding="utf-8")
        for kind in (WEIGHTS, OPTIMIZER):
            tensors = {part.name: part.tensor for part in self._parts if part.kind == kind}
            if tensors:
                offsets = {part.name: part.offsets for part in self._parts if part.kind == kind}
                names.append(part_file(kind, self.rank))
                write_tensors(self.temporary / names[-1], tensors, describe_parts(offsets))
        for name in names:
            flush(self.temporary / name)
        files = {
            name: {"sha256": checksum(self.temporary / name), "bytes": (self.temporary / name).stat().st_size}
            for name in names
        }
        write_atomically(self.temporary / _ready(self.rank), json.dumps(files))

    def _complete(self) -> None:
        until = time.monotonic() + self.deadline_s
        names = [_ready(rank) for rank in range(self.world)]
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


def _tensors(engine: LanguageEngine) -> Iterator[tuple[int, str, DTensor]]:
    for number, stage in engine.stages.items():
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves some weights gathered
        for name, parameter in stage.named_parameters():
            assert isinstance(parameter, DTensor)
            yield number, name, parameter


def _offsets(tensor: DTensor) -> tuple[int, ...]:
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def _own_parts(engine: LanguageEngine) -> Iterator[_OwnPart]:
    """Iterate over the parts that this rank writes; ranks take turns with parts that several of them hold."""
    sizes, place = engine.mesh.config, engine.mesh.place
    kept = {} if engine.storage is None else engine.storage.state_dict()
    for turn, (number, name, parameter) in enumerate(_tensors(engine)):
        if number > 0 and name == "embedding.weight":
            continue  # the last stage's copy of a tied weight
        cuts = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
        copies, copy = 1, 0
        for dimension in ("replicate", "tensor"):
            if dimension not in cuts or cuts[dimension].is_replicate():
                size = getattr(sizes, dimension)
                copies, copy = copies * size, copy * size + place[dimension]
        if turn % copies != copy or not parameter.to_local().numel():
            continue
        offsets = _offsets(parameter)
        yield _OwnPart(WEIGHTS, name, offsets, parameter.to_local().detach())
        if name in kept:
            # in float32 like all that is in these files, which holds the 16 bits of a lower half exactly
            yield _OwnPart(OPTIMIZER, _of_kept(engine.storage, name), offsets, kept[name].float())
        state = engine.optimizer.state.get(parameter)
        if not state:  # no step was made yet
            continue
        for key in _MOMENTS:
            yield _OwnPart(OPTIMIZER, _of_optimizer(name, key), offsets, state[key].to_local())
        if not any(offsets):
            yield _OwnPart(OPTIMIZER, _of_optimizer(name, "step"), (), state["step"])


def _of_optimizer(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"


def _of_kept(storage: WeightStorage | None, name: str) -> str:
    assert storage is not None
    return _of_optimizer(name, storage.config.weights)


def _read(parts: Parts, name: str, out: DTensor) -> None:
    if out.to_local().numel():  # a rank may hold no part of a tensor with few rows
        parts.read(name, _offsets(out), out.to_local())


@torch.no_grad()
def _load(engine: LanguageEngine, folder: ShardedFolder) -> dict[str, Any]:
    """Fill an engine from a verified folder; return its plain state."""
    check_architecture(engine.model, folder.config, folder.path)
    content = folder.read_json(STATE)
    weights, moments = folder.parts(WEIGHTS), folder.parts(OPTIMIZER)
    check_weights(weights, engine.model)
    # a model without a step has no moments
    has_moments = any(name.rpartition(".")[2] in _MOMENTS for name in moments.shapes)
    for name, shape in weights.shapes.items() if has_moments else ():
        for key in (*_MOMENTS, "step"):
            own, wanted = _of_optimizer(name, key), () if key == "step" else shape
            if moments.shapes.get(own) != wanted:
                found = f"has shape {moments.shapes[own]}, not {wanted}" if own in moments.shapes else "is not there"
                raise CheckpointError(f"tensor {own} {found}", where=str(folder.path))
    for _, name, parameter in _tensors(engine):
        _read(weights, name, parameter)
        state = engine.optimizer.state[parameter]
        state.clear()
        if has_moments:
            state["step"] = torch.zeros((), device=parameter.device)
            moments.read(_of_optimizer(name, "step"), (), state["step"])
            for key in _MOMENTS:
                state[key] = torch.zeros_like(parameter)
                _read(moments, _of_optimizer(name, key), state[key])
    if engine.storage is not None:
        _load_kept(engine.storage, moments)
    return content


def _load_kept(storage: WeightStorage, parts: Parts) -> None:
    """Load what is stored beside weights in a short format; emulation runs in one process, where parts are whole."""
    kept = {}
    for name, tensor in storage.state_dict().items():
        own = _of_kept(storage, name)
        if own in parts.shapes:
            values = torch.empty_like(tensor, dtype=torch.float32)
            parts.read(own, (0,) * tensor.dim(), values)
            kept[name] = values.to(tensor.dtype)
    storage.load_state_dict(kept)
