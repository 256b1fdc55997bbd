"""Adapters in the layout of Hugging Face's ``peft``: the thin matrices alone, beside a model that is published already.

The layout has ``adapter_config.json`` and ``adapter_model.safetensors``, whose tensors have the names of the layers in
Hugging Face's layout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from cordillera.data.tokenizers.export import write_json_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import CheckpointError
from cordillera.files import read_json_object
from cordillera.models.language.adapters import ADAPTER_WEIGHTS
from cordillera.models.language.checkpoints.hugging_face import layer_name
from cordillera.models.language.checkpoints.source import Source, is_like_phi3, new_folder, parameter_shapes
from cordillera.tensor_files import save_file

_ENDS = dict(zip(ADAPTER_WEIGHTS, ("lora_A", "lora_B"), strict=True))


def save_peft(
    source: Source, folder: Path, base: str, tokenizer: Tokenizer | None = None, start: str | None = None
) -> None:
    """Write the adapters of a checkpoint, in ``float32``, the dtype in which they are trained.

    Args:
        source: Checkpoint of a model with adapters.
        folder: Folder that is absent or empty.
        base: Name or path of the model without adapters, which ``peft`` loads.
        tokenizer: Tokenizer to write beside the weights, with the chat template; None for none.
        start: Name or path of the model that the adapters were trained on, if ``base`` is not where that lies.

    Raises:
        CheckpointError: If there are no adapters, the model is a reward model, layers are one matrix in Hugging Face's
            layout (Phi-3), a weight is not finite, or the folder cannot be written.
    """
    adapter = source.config.adapter
    if adapter is None:
        raise CheckpointError(
            "has no adapters", where=str(source.path), remedy="train some with [model.adapter], or use convert"
        )
    if source.config.scores:
        what = "is a reward model, whose score would be lost: it is no part of the adapters"
        raise CheckpointError(what, where=str(source.path), remedy="use the run itself, with best-of --reward")
    if is_like_phi3(source.config) or any(_is_phi3(one) for one in (base, start) if one is not None):
        what = "Phi-3 keeps query, key and value in one matrix, for which these adapters are none"
        raise CheckpointError(what, where=str(source.path), remedy="write the merged model with convert")
    tensors = _tensors(source)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "inference_mode": True,
    }
    with new_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as beside:
        (beside / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, beside / "adapter_model.safetensors", {"format": "pt"})
        if tokenizer is not None:
            write_json_tokenizer(tokenizer, beside, source.config.context)


def _is_phi3(model: str) -> bool:
    """Return whether a path is the folder of a model whose type is that of Phi-3 (Phi-4 too), of any shape."""
    config = os.path.join(os.path.expanduser(model), "config.json")
    return os.path.isfile(config) and read_json_object(config, error=CheckpointError).get("model_type") == "phi3"


def _tensors(source: Source) -> dict[str, Tensor]:
    """Return the thin matrices by their names in files."""
    found = {}
    for name, shape in parameter_shapes(source.config).items():
        layer, end = name[: name.rindex(".")], name[name.rindex(".") :]
        if end not in _ENDS:
            continue
        weight = torch.empty(shape)
        source.read(name, weight)
        if not weight.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity", where=str(source.path), remedy="train it again")
        found[f"base_model.model.{layer_name(layer)}.{_ENDS[end]}.weight"] = weight
    return found
