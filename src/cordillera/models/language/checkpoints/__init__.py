"""Checkpoints of Llama models in the formats that they are published in, and in our own.

=================  ========================================================================================
format             what lies at the path
=================  ========================================================================================
Hugging Face       a folder with ``config.json`` and one or several ``.safetensors`` with an index
Meta consolidated  a folder with ``params.json`` and ``consolidated.NN.pth``, one for each model-parallel rank
GGUF               one ``.gguf`` file, or a folder with one; quantised weights are dequantised
our own            a folder ``step-NNNNNNNNN`` of a training, with ``model.json`` and ``checksums.json``
=================  ========================================================================================

Everything that can be wrong with names, shapes and dtypes is refused before weights are read, and nothing is unpickled
but tensors. Files are copied tensor by tensor, or in smaller pieces, into the model, so that memory holds it once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from cordillera.errors import CheckpointError
from cordillera.models.language.checkpoints.consolidated import Consolidated, save_consolidated
from cordillera.models.language.checkpoints.gguf_file import GGUFFile
from cordillera.models.language.checkpoints.hugging_face import HuggingFace, save_hugging_face
from cordillera.models.language.checkpoints.sealed import CHECKSUMS
from cordillera.models.language.checkpoints.sharded import MODEL, STATE, Sharded
from cordillera.models.language.checkpoints.source import Source, check_architecture
from cordillera.models.language.llama import Llama, LlamaConfig

__all__ = ["Source", "load", "load_into", "open_checkpoint", "read_model", "save_consolidated", "save_hugging_face"]


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
    if (path / MODEL).exists() and ((path / CHECKSUMS).exists() or (path / STATE).exists()):
        return Sharded(path)
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
        dtype: Data type of the weights in memory; those in files are cast.
        device: Where the model is to be.
        threads: Number of threads that read tensors at the same time.

    Returns:
        Config and model.

    Raises:
        CheckpointError: as :func:`open_checkpoint`; also for weights that are NaN or infinite, or become so in
            ``dtype``.
        DependencyError: GGUF without the library ``gguf``.
    """
    source = open_checkpoint(path)
    return source.config, read_model(source, dtype, device, threads)


def read_model(
    source: Source, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", threads: int = 4
) -> Llama:
    """Make the model of a checkpoint that is open already.

    Args:
        source: From :func:`open_checkpoint`.
        dtype: As for :func:`load`.
        device: As for :func:`load`.
        threads: As for :func:`load`.

    Raises:
        CheckpointError: weights are NaN or infinite, or become so in ``dtype``.
    """
    with torch.device("meta"):
        model = Llama(source.config)
    # Module.to_empty calls empty_like on meta tensors, which imports sympy (37 MiB)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
    _fill(model, source, threads)
    return model


def load_into(model: Llama, path: str | Path, threads: int = 4) -> None:
    """Copy a checkpoint's weights into a model that is already there, in the model's dtypes.

    Args:
        model: Its weights are overwritten.
        path: A folder, or a GGUF file.
        threads: Number of threads that read tensors at the same time.

    Raises:
        CheckpointError: as :func:`load`; also when the checkpoint is of another architecture than the model, or the
            model is on the meta device.
        DependencyError: GGUF without the library ``gguf``.
    """
    source = open_checkpoint(path)
    check_architecture(model.config, source.config, Path(path))
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
