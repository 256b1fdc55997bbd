"""Checkpoints of a language model in many processes: each writes its own part, and any other processes can read it.

How ranks write together is in :mod:`cordillera.training.sharded_checkpoints`. The position of a part in its tensor
comes from the chunks that :mod:`torch.distributed.checkpoint` makes of DTensors, and the files are in its layout of
safetensors (:mod:`cordillera.models.language.checkpoints.sharded`). Its own planner gathers pickled plans for every
save and leaves a pickle beside the tensors; nothing here is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cordillera.distributed.dtensors import is_dtensor, is_sharded
from cordillera.distributed.mesh import ProcessMesh
from cordillera.distributed.tensor_parts import Parts, part_file
from cordillera.errors import CheckpointError
from cordillera.models.language.adapters import ADAPTER_WEIGHTS
from cordillera.models.language.checkpoints import read_model
from cordillera.models.language.checkpoints.sharded import (
    MODEL,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    ShardedFolder,
    check_weights,
)
from cordillera.models.language.checkpoints.source import (
    Source,
    check_architecture,
    parameter_shapes,
    trained_names,
)
from cordillera.models.language.llama import draw_weight
from cordillera.numerics.emulation.weight_storage import WeightStorage
from cordillera.training.checkpoints import folder_of, not_finite
from cordillera.training.language.engine import LanguageEngine
from cordillera.training.sharded_checkpoints import PartToWrite, RankCheckpoints, WritingRanks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedCheckpoints(RankCheckpoints):
    """The checkpoints of one training.

    All ranks call the same methods in the same order, except :meth:`steps` and :meth:`prune`; each raises a PeerError
    if another rank does not answer in time.

    Args:
        folder: Folder of the checkpoints, the same for all ranks.
        mesh: Mesh of all processes.
        asynchronous: Whether training continues while files are written. The copy to write from stays in host memory,
            because allocating new memory takes longer than copying.
        deadline_s: Longest time that ranks wait for another's files, seconds; None for the mesh's.
    """

    def __init__(
        self, folder: Path, mesh: ProcessMesh, asynchronous: bool = True, deadline_s: float | None = None
    ) -> None:
        ranks = WritingRanks(mesh.rank, mesh.config.world, mesh.config.deadline_s, mesh.exchange)
        super().__init__(folder, ranks, asynchronous, deadline_s)

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
        content = {"state": state, "engine": engine_state, "world": self.ranks.size}
        texts = {STATE: json.dumps(content, allow_nan=False), MODEL: engine.model.model_dump_json(indent=2)}
        parts = list(_own_parts(engine))
        self.agree(self._not_finite(parts, int(state["step"])))
        self.begin(int(state["step"]), parts, texts)

    def restore(self, engine: LanguageEngine, step: int | None = None) -> dict[str, Any] | None:
        """Load a checkpoint into an engine of any mesh, after verifying every byte, and return the state saved with it.

        Without a checkpoint, the result is None.

        Args:
            engine: Engine whose weights, moments and counters are overwritten; after an error they are undefined.
            step: Step of the checkpoint, the same on every rank; None for the newest.

        Raises:
            CheckpointError: If there is no checkpoint of this step, one of its files is missing or corrupt, it belongs
                to another model, or it holds NaN or infinity. Every rank raises the same error.
        """
        self.wait()
        chosen = self.newest() if step is None else step
        if chosen is None:
            return None
        path = folder_of(self.folder, chosen)
        opened = self.together(lambda: self._verified(path))
        content = self.together(lambda: _load(engine, opened))
        engine.steps, engine.skipped = content["engine"]["steps"], content["engine"]["skipped"]
        if engine.loss_scale is not None and "loss_scale" in content["engine"]:
            engine.loss_scale.load_state_dict(content["engine"]["loss_scale"])
        self.last = chosen
        state: dict[str, Any] = content["state"]
        return state

    def _not_finite(self, parts: Sequence[PartToWrite], step: int) -> CheckpointError | None:
        """Return the error for NaN or infinity among this rank's parts, or None."""
        for part in parts:
            found = not_finite({part.name: part.tensor})
            if found is None:
                continue
            what = "the weights" if part.file.startswith(WEIGHTS) else "the optimizer's moments"
            newest = max(self.steps(), default=None)
            kept = "no checkpoint was written yet" if newest is None else f"the checkpoint of step {newest} is kept"
            return CheckpointError(
                f"{what} of step {step} are not finite ({found}) and are not saved; {kept}",
                where=str(folder_of(self.folder, step)),
                remedy="start a new run with a lower training.learning_rate or more warmup_steps"
                + ("" if newest is None else "; --resume goes on from the checkpoint that is kept"),
            )
        return None

    def _verified(self, path: Path) -> ShardedFolder:
        """Open a folder after this rank has verified its share of the files."""
        if not path.is_dir():
            raise CheckpointError(
                "there is no such checkpoint",
                where=str(path),
                remedy=f"steps there are: {', '.join(map(str, self.steps())) or 'none'}",
            )
        opened = ShardedFolder(path)
        self.verify_share(opened, opened.sizes)
        return opened


def start_from(engine: LanguageEngine, source: Source, seed: int) -> None:
    """Load the weights of a checkpoint into an engine; each rank reads its stages' weights, and draws missing ones.

    Args:
        source: Checkpoint.
        seed: Seed from which weights that the checkpoint lacks are drawn.

    Raises:
        CheckpointError: If a tensor holds NaN or infinity.
    """
    merged = None if source.config.adapter is None else dict(read_model(source).named_parameters())
    known = parameter_shapes(source.config)

    def read(name: str, shape: torch.Size) -> torch.Tensor:
        whole = torch.empty(shape)
        if name not in known or name.endswith(ADAPTER_WEIGHTS):
            draw_weight(whole, name, engine.model, seed)
        elif merged is not None:
            whole.copy_(merged[name].detach())
        else:
            source.read(name, whole)
            if not whole.isfinite().all():
                raise CheckpointError(
                    f"tensor {source.name_of(name)} holds NaN or infinity",
                    where=f"training.start, {source.path}",
                    remedy="the checkpoint is damaged: start from another",
                )
        return whole

    for stage in engine.stages.values():
        stage.fill(read)
    engine.take_weights()


def _tensors(engine: LanguageEngine) -> Iterator[tuple[int, str, DTensor]]:
    for number, stage in engine.stages.items():
        for module in stage.modules():
            if is_sharded(module):
                module.reshard()  # an evaluation leaves some weights gathered
        for name, parameter in stage.named_parameters():
            assert is_dtensor(parameter)
            yield number, name, parameter


def _offsets(tensor: DTensor) -> tuple[int, ...]:
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def _own_parts(engine: LanguageEngine) -> Iterator[PartToWrite]:
    """Iterate over the parts that this rank writes; ranks take turns with parts that several of them hold."""
    sizes, place = engine.mesh.config, engine.mesh.place
    weights, optimizer = part_file(WEIGHTS, engine.mesh.rank), part_file(OPTIMIZER, engine.mesh.rank)
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
        yield PartToWrite(weights, name, offsets, parameter.to_local().detach())
        if name in kept:
            # All tensors of these files are float32, which holds the 16 low bits exactly.
            yield PartToWrite(optimizer, _of_kept(engine.storage, name), offsets, kept[name].float())
        state = engine.optimizer.state.get(parameter)
        if not state:  # before the first step
            continue
        for key in _MOMENTS:
            yield PartToWrite(optimizer, _of_optimizer(name, key), offsets, state[key].to_local())
        if not any(offsets):
            yield PartToWrite(optimizer, _of_optimizer(name, "step"), (), state["step"])


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
    trained = trained_names(engine.model)
    for name, shape in weights.shapes.items() if has_moments else ():
        for key in (*_MOMENTS, "step") if name in trained else ():
            own, wanted = _of_optimizer(name, key), () if key == "step" else shape
            if moments.shapes.get(own) != wanted:
                found = f"has shape {moments.shapes[own]}, not {wanted}" if own in moments.shapes else "is not there"
                raise CheckpointError(f"tensor {own} {found}", where=str(folder.path))
    for _, name, parameter in _tensors(engine):
        _read(weights, name, parameter)
        state = engine.optimizer.state[parameter]
        state.clear()
        if has_moments and name in trained:
            state["step"] = torch.zeros((), device=parameter.device)
            moments.read(_of_optimizer(name, "step"), (), state["step"])
            for key in _MOMENTS:
                state[key] = torch.zeros_like(parameter)
                _read(moments, _of_optimizer(name, key), state[key])
    if engine.storage is not None:
        _load_kept(engine.storage, moments)
    return content


def _load_kept(storage: WeightStorage, parts: Parts) -> None:
    """Load the tensors stored beside weights in a short format; emulation runs in one process, with whole parts."""
    kept = {}
    for name, tensor in storage.state_dict().items():
        own = _of_kept(storage, name)
        if own in parts.shapes:
            values = torch.empty_like(tensor, dtype=torch.float32)
            parts.read(own, (0,) * tensor.dim(), values)
            kept[name] = values.to(tensor.dtype)
    storage.load_state_dict(kept)
