"""Checkpoints of Llama models in the formats that they are published in.

=================  ========================================================================================
format             what lies at the path
=================  ========================================================================================
Hugging Face       a folder with ``config.json`` and one or several ``.safetensors`` with an index
Meta consolidated  a folder with ``params.json`` and ``consolidated.NN.pth``, one for each model-parallel rank
GGUF               one ``.gguf`` file, or a folder with one; quantised weights are dequantised
=================  ========================================================================================

Everything that can be wrong with names, shapes and dtypes is refused before weights are read, and nothing is unpickled
but tensors. Files are memory-mapped and copied tensor by tensor into the model, so that memory holds it once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from cordillera.errors import CheckpointError
from cordillera.models.language.checkpoints.consolidated import Consolidated, save_consolidated
from cordillera.models.language.checkpoints.gguf_file import GGUFFile
from cordillera.models.language.checkpoints.hugging_face import HuggingFace, save_hugging_face
from cordillera.models.language.checkpoints.source import Source
from cordillera.models.language.llama import Llama, LlamaConfig

__all__ = ["Source", "load", "load_into", "open_checkpoint", "save_consolidated", "save_hugging_face"]


def open_checkpoint(path: str | Path) -> Source:
    """Recognise a checkpoint's format and check everything about it but the weights' values.

    Args:
        path: A folder, or a GGUF file.

    Raises:
        CheckpointError: there is no checkpoint, its format is unknown, or something in it is missing, truncated,
            of the wrong shape or dtype, or not a Llama.
        DependencyError: GGUF without the library ``gguf``.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError("there is nothing here", where=str(path), remedy="give a checkpoint's folder or file")
    if path.is_file():
        if path.suffix == ".gguf":
            return GGUFFile(path)
        raise CheckpointError(
            "is not a GGUF file", where=str(path), remedy="for other formats give the folder that holds all their files"
        )
    if (path / "config.json").exists():
        return HuggingFace(path)
    if (path / "params.json").exists():
        return Consolidated(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return GGUFFile(found[0])
    raise CheckpointError(
        f"holds {len(found)} GGUF files" if found else "holds no config.json, params.json or .gguf file",
        where=str(path),
        remedy="give the path of one of them" if found else "give the folder that a checkpoint was downloaded to",
    )


def load(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", threads: int = 4
) -> tuple[LlamaConfig, Llama]:
    """Make the model that a checkpoint holds.

    Args:
        path: A folder, or a GGUF file.
        dtype: Of the weights in memory; those in files are cast.
        device: Where the model is to be.
        threads: That read tensors at the same time.

    Returns:
        Config and model.

    Raises:
        CheckpointError: as :func:`open_checkpoint`; also for weights that are NaN or infinite, or become so in
            ``dtype``.
        DependencyError: GGUF without the library ``gguf``.
    """
    source = open_checkpoint(path)
    with torch.device("meta"):
        model = Llama(source.config)
    model.to(dtype).to_empty(device=device)
    _fill(model, source, threads)
    return source.config, model


def load_into(model: Llama, path: str | Path, threads: int = 4) -> None:
    """Copy a checkpoint's weights into a model that is already there, in the model's dtypes.

    Args:
        model: Its weights are overwritten.
        path: A folder, or a GGUF file.
        threads: That read tensors at the same time.

    Raises:
        CheckpointError: as :func:`load`; also when the checkpoint is of another architecture than the model, or the
            model is on the meta device.
        DependencyError: GGUF without the library ``gguf``.
    """
    source = open_checkpoint(path)
    ours, theirs = model.config.model_dump(), source.config.model_dump()
    differing = [name for name in ours if name not in ("context", "head_dim") and ours[name] != theirs[name]]
    if differing or model.config.head_width != source.config.head_width:
        name = differing[0] if differing else "head_dim"
        raise CheckpointError(
            f"{name} is {theirs[name]}, that of the model is {ours[name]}",
            where=str(path),
            remedy="load a checkpoint of the same architecture, or make the model from its config",
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(
            "the model has no memory to load into", where=str(path), remedy="call model.to_empty(device=...) before"
        )
    _fill(model, source, threads)


def _fill(model: Llama, source: Source, threads: int) -> None:
    def one(name: str, out: Tensor) -> None:
        source.read(name, out)
        low, high = torch.aminmax(out)  # NaN is passed on
        if not (low.isfinite() and high.isfinite()):
            raise CheckpointError(
                f"tensor {source.name_of(name)} holds NaN or infinity as {out.dtype}",
                where=str(source.path),
                remedy="load in bfloat16 or float32; if that fails too, the checkpoint is damaged",
            )

    with ThreadPoolExecutor(max(1, threads), "checkpoint") as pool:
        try:
            for done in [pool.submit(one, name, parameter.detach()) for name, parameter in model.named_parameters()]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
