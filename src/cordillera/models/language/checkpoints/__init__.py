"""Checkpoints of Llama models in their published formats, and in Cordillera's own format.

=================  ========================================================================================
format             content of the path
=================  ========================================================================================
Hugging Face       a folder with ``config.json`` and one or several ``.safetensors`` with an index
Meta consolidated  a folder with ``params.json`` and ``consolidated.NN.pth``, one for each model-parallel rank
GGUF               one ``.gguf`` file, or a folder with one; quantised weights are dequantized
Cordillera         a folder ``step-NNNNNNNNN`` of a training, with ``model.json`` and ``checksums.json``
=================  ========================================================================================

Names, shapes and dtypes are checked before weights are read, and only tensors are unpickled. Files are copied into the
model tensor by tensor, or in smaller pieces, so that memory holds the weights once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from cordillera.data.sealed import CHECKSUMS
from cordillera.errors import CheckpointError
from cordillera.kernels.dense.tiled_products import takes
from cordillera.models.language.adapters import merge_adapters
from cordillera.models.language.checkpoints.consolidated import Consolidated, save_consolidated
from cordillera.models.language.checkpoints.gguf_file import GGUFFile, save_gguf
from cordillera.models.language.checkpoints.hugging_face import HuggingFace, save_hugging_face
from cordillera.models.language.checkpoints.sharded import MODEL, STATE, Sharded
from cordillera.models.language.checkpoints.source import Source
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.numerics.quantization.packed_linear import PackedLinear, pack_rows
from cordillera.numerics.sites import replace, sites

__all__ = [
    "Source",
    "load",
    "open_checkpoint",
    "read_model",
    "save_consolidated",
    "save_gguf",
    "save_hugging_face",
]


def open_checkpoint(path: str | Path) -> Source:
    """Recognise the format of a folder or GGUF file, and check everything in it except the values of the weights.

    Raises:
        CheckpointError: If there is no checkpoint, its format is unknown, or something in it is missing, truncated, of
            the wrong shape or dtype, or not a Llama.
        DependencyError: If the file is GGUF and the library ``gguf`` is not installed.
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
        f"holds {len(found)} GGUF files"
        if found
        else "is no language model: it holds no config.json, params.json or .gguf file",
        where=str(path),
        remedy="give the path of one of them"
        if found
        else "give the folder of a run, or of a checkpoint as it was downloaded",
    )


def load(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", threads: int = 4
) -> tuple[LlamaConfig, Llama]:
    """Create the model of a checkpoint, a folder or GGUF file at ``path``, on a ``device``, and its configuration.

    Args:
        dtype: Dtype of the weights in memory, to which stored weights are cast.
        threads: Number of threads that read tensors at the same time.

    Raises:
        CheckpointError: If the checkpoint is invalid (:func:`open_checkpoint`), or weights are NaN or infinite, or
            become so in ``dtype``.
        DependencyError: If the file is GGUF and the library ``gguf`` is not installed.
    """
    source = open_checkpoint(path)
    return source.config, read_model(source, dtype, device, threads)


def read_model(
    source: Source,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    threads: int = 4,
    bits: int | None = None,
) -> Llama:
    """Create the model of an open checkpoint ``source``, with ``dtype``, ``device`` and ``threads`` as in :func:`load`.

    Adapters are merged into the weights that they change, and a drafter is left out.

    Args:
        bits: 4 or 8 to hold matrices of blocks in codes of at most this width, as
            :class:`~cordillera.numerics.quantization.packed_linear.PackedLinear`, and a head in eight; those of the
            file where it has such codes. Such a model computes in bfloat16, on a CPU, without gradients.

    Raises:
        CheckpointError: If weights are NaN or infinite, or become so in ``dtype``.
    """
    with torch.device("meta"):
        model = Llama(source.config.model_copy(update={"draft": None}))
    later = _packable(model, bits) if bits is not None and source.config.adapter is None else {}
    # Module.to_empty calls empty_like on meta tensors, which imports sympy (37 MiB)
    for where, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if where not in later:
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
    _fill(model, source, threads)
    merge_adapters(model)
    model.config = model.config.model_copy(update={"adapter": None})
    if bits is not None:
        _pack(model, source, bits)
    return model


def _pack(model: Llama, source: Source, bits: int) -> None:
    """Replace layers by packed ones, of the source where their weights were not read."""
    for name, own_bits in _packable(model, bits).items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        shape = (weight.shape[0], weight.shape[1])
        packed = source.packed(f"{name}.weight", shape, own_bits) if weight.is_meta else pack_rows(weight, own_bits)
        replace(model, name, PackedLinear(packed))
    outputs, inner = model.embedding.weight.shape
    if model.head is None and model.score is None and takes(outputs, inner):
        replace(model, "head", PackedLinear(source.packed("embedding.weight", (outputs, inner), 8)))


def _packable(model: Llama, bits: int) -> dict[str, int]:
    """Return the linear layers whose weights can be packed, with their bits."""
    return {
        name: 8 if name == "head" else bits
        for name, layer in sites(model).items()
        if layer.bias is None and takes(layer.out_features, layer.in_features)
    }


def _fill(model: Llama, source: Source, threads: int) -> None:
    def one(name: str, out: Tensor) -> None:
        source.read(name, out)
        low, high = torch.aminmax(out)  # NaN propagates
        if not (low.isfinite() and high.isfinite()):
            raise CheckpointError(
                f"tensor {source.name_of(name)} holds NaN or infinity as {out.dtype}",
                where=str(source.path),
                remedy="load in bfloat16 or float32; if that fails too, the checkpoint is damaged",
            )

    with ThreadPoolExecutor(max(1, threads), "checkpoint") as pool:
        try:
            tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
            for done in [pool.submit(one, *pair) for pair in tensors if not pair[1].is_meta]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
