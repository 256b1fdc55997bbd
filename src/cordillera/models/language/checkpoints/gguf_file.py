"""GGUF, the format of llama.cpp: one memory-mapped file, weights mostly quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordillera.errors import CheckpointError, DependencyError
from cordillera.models.language.checkpoints.source import (
    Names,
    Source,
    Stored,
    check_shape,
    interleaved_to_halves,
    make_config,
    missing,
    parameter_shapes,
)
from cordillera.models.language.llama import LlamaConfig, RopeScaling, rope_frequencies

_NAMES = Names(
    {"embedding": "token_embd", "norm": "output_norm", "head": "output"},
    "blk",
    {
        "attention_norm": "attn_norm",
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.output": "attn_output",
        "feed_forward_norm": "ffn_norm",
        "feed_forward.gate": "ffn_gate",
        "feed_forward.up": "ffn_up",
        "feed_forward.down": "ffn_down",
    },
)
_ROTATED = ("attention.query.weight", "attention.key.weight")
_FACTORS = "rope_freqs.weight"


class GGUFFile(Source):
    """A GGUF file.

    Args:
        path: The file.

    Raises:
        CheckpointError: it is truncated, of the wrong shapes, or not a Llama.
        DependencyError: the library ``gguf`` is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise DependencyError(
                "reading GGUF needs the library gguf", where=str(path), remedy="pip install gguf"
            ) from error
        self.path = path
        self._gguf = gguf
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
            raise CheckpointError(
                f"is truncated, damaged or not GGUF ({error})", where=str(path), remedy="download the file again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config(reader)
        shapes = {_NAMES(name): shape for name, shape in parameter_shapes(self.config).items()}
        for name, shape in shapes.items():
            if name not in self._tensors:
                raise missing(name, path)
            stored = tuple(int(size) for size in reversed(self._tensors[name].shape))
            check_shape(name, Stored(path, stored, torch.float32), shape)
            kind = self._tensors[name].tensor_type
            if kind.name in ("I8", "I16", "I32", "I64"):
                raise CheckpointError(f"tensor {name} holds integers without scales", where=str(path))
        unknown = sorted(self._tensors.keys() - shapes.keys() - {_FACTORS})
        if unknown:
            raise CheckpointError(
                f"tensor {unknown[0]} (of {len(unknown)}) has no place in a Llama",
                where=str(path),
                remedy="the file is of another architecture",
            )

    def name_of(self, name: str) -> str:
        return _NAMES(name)

    def read(self, name: str, out: Tensor) -> None:
        tensor = self._tensors[_NAMES(name)]
        try:
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)  # a copy in float32, of this tensor alone
        except NotImplementedError as error:
            raise CheckpointError(
                f"tensor {tensor.name} is {tensor.tensor_type.name}, which cannot be dequantised here",
                where=str(self.path),
                remedy="take the file in another quantisation, such as Q8_0 or Q4_K",
            ) from error
        weight = torch.from_numpy(np.require(values, requirements=["C", "W"])).view(out.shape)
        if name.endswith(_ROTATED):
            heads = (-1, self.config.head_width)
            interleaved_to_halves(weight.unflatten(0, heads), out.unflatten(0, heads))
        else:
            out.copy_(weight)

    def _read_config(self, reader: Any) -> LlamaConfig:
        def field(key: str, usual: Any = None, kind: type | tuple[type, ...] = (int, float)) -> Any:
            if key not in reader.fields and usual is not None:
                return usual
            try:
                value = reader.fields[key].contents()
            except (KeyError, ValueError, IndexError):
                value = None
            if not isinstance(value, kind):
                what = f"field {key} is {'missing' if key not in reader.fields else 'damaged'}"
                raise CheckpointError(what, where=str(self.path), remedy="download the file again")
            # Thirty-two bits hold 1e-5 as 9.99999975e-06; the shortest decimal is what was meant.
            return float(str(np.float32(value))) if isinstance(value, float) else value

        architecture = field("general.architecture", kind=str)
        if architecture != "llama":
            raise CheckpointError(
                f"the architecture is {architecture!r}, not 'llama'",
                where=str(self.path),
                remedy="load a checkpoint of a Llama model",
            )
        if field("split.count", 1) > 1:
            raise CheckpointError(
                f"is one of {field('split.count')} files of a split model",
                where=str(self.path),
                remedy="join them with llama-gguf-split --merge",
            )
        kind = field("llama.rope.scaling.type", "none", str)
        if kind != "none":
            raise CheckpointError(
                f"rope_type {kind!r} is not known; files of Llama 3.1 and later name none",
                where=str(self.path),
                remedy="load a checkpoint of a Llama model",
            )
        heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
        width = field("llama.attention.key_length", field("llama.rope.dimension_count", hidden // max(heads, 1)))
        config = make_config(
            self.path,
            {
                "layers": field("llama.block_count"),
                "hidden": hidden,
                "heads": heads,
                "kv_heads": field("llama.attention.head_count_kv", heads),
                "head_dim": width,
                "ffn": field("llama.feed_forward_length"),
                "vocabulary": int(self._tensors[_NAMES("embedding.weight")].shape[1])
                if _NAMES("embedding.weight") in self._tensors
                else field("llama.vocab_size"),
                "context": field("llama.context_length"),
                "tied": _NAMES("head.weight") not in self._tensors,
                "norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
                "rope_theta": field("llama.rope.freq_base", 10_000.0),
            },
        )
        return config.model_copy(update={"rope_scaling": self._scaling(config)})

    def _scaling(self, config: LlamaConfig) -> RopeScaling | None:
        """The published scaling whose divisors of frequencies the file holds."""
        if _FACTORS not in self._tensors:
            return None
        found = torch.from_numpy(np.array(self._tensors[_FACTORS].data)).float()
        if bool((found == 1).all()):
            return None
        plain = rope_frequencies(config)
        for factor in (8.0, 32.0):  # 3.1 and 3.3; 3.2
            scaling = RopeScaling(factor=factor)
            divisors = plain / rope_frequencies(config.model_copy(update={"rope_scaling": scaling}))
            if found.shape == divisors.shape and torch.allclose(found, divisors, rtol=1e-4):
                return scaling
        raise CheckpointError(
            f"tensor {_FACTORS} stretches rotary frequencies in a way that no Llama does",
            where=str(self.path),
            remedy="convert the original checkpoint again",
        )
