"""GGUF, the format of llama.cpp: one file, usually with quantised weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordillera.data.tokenizers.gguf import GGUFTensor, gguf_header
from cordillera.errors import CheckpointError, DataError, DependencyError
from cordillera.kernels.dense.packed_rows import PackedRows
from cordillera.kernels.dense.tiled_products import GROUP
from cordillera.models.language.checkpoints.source import (
    Names,
    Source,
    StoredTensor,
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
_CODES = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # bits of the kinds that are kept as they are, in groups of 32 inputs
_PIECE = 2**18  # number of values that are dequantized at a time


class GGUFFile(Source):
    """GGUF file of a Llama, which the library ``gguf`` reads."""

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
            fields, self._tensors = gguf_header(path, ("general.", "split.", "llama."))
        except (DataError, OSError) as error:
            what = error.what if isinstance(error, DataError) else str(error)
            raise CheckpointError(
                f"is truncated, damaged or not GGUF ({what})", where=str(path), remedy="download the file again"
            ) from error
        self.config = self._read_config(fields)
        shapes = {_NAMES(name): shape for name, shape in parameter_shapes(self.config).items()}
        for name, shape in shapes.items():
            if name not in self._tensors:
                raise missing(name, path)
            check_shape(name, StoredTensor(path, self._tensors[name].shape, torch.float32), shape)
            self._check_place(name)
        unknown = sorted(self._tensors.keys() - shapes.keys() - {_FACTORS})
        if unknown:
            raise CheckpointError(
                f"tensor {unknown[0]} (of {len(unknown)}) has no place in a Llama",
                where=str(path),
                remedy="the file is of another architecture",
            )

    @property
    def files(self) -> list[Path]:
        return [self.path]

    def name_of(self, name: str) -> str:
        return _NAMES(name)

    def read(self, name: str, out: Tensor) -> None:
        stored = self._tensors[_NAMES(name)]
        rows = out if out.dim() == 2 else out[None]
        # A few rows or heads at a time, as quantised values take several times their size while they are unpacked.
        unit = self.config.head_width if name.endswith(_ROTATED) else 1
        step = max(1, _PIECE // (unit * rows.shape[1])) * unit
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            values = self._values(stored, first, part)
            if name.endswith(_ROTATED):
                interleaved_to_halves(values.unflatten(0, (-1, unit)), part.unflatten(0, (-1, unit)))
            else:
                part.copy_(values)

    @property
    def has_codes(self) -> bool:
        kinds = (
            self._gguf.GGMLQuantizationType(self._tensors[_NAMES(name)].kind).name
            for name, shape in parameter_shapes(self.config).items()
            if len(shape) == 2
        )
        return all(kind in _CODES for kind in kinds)

    def packed(self, name: str, shape: tuple[int, int], bits: int) -> PackedRows:
        stored = self._tensors[_NAMES(name)]
        kind = self._gguf.GGMLQuantizationType(stored.kind).name
        if kind not in _CODES or _CODES[kind] > bits:
            return super().packed(name, shape, bits)
        outputs, groups = shape[0], shape[1] // GROUP
        raw = np.fromfile(self.path, np.uint8, self._bytes(stored), offset=stored.begin).reshape(outputs, groups, -1)
        if name.endswith(_ROTATED):
            order = torch.arange(outputs).view(-1, self.config.head_width, 1)
            rows = torch.empty_like(order)
            interleaved_to_halves(order, rows)
            raw = raw[rows.flatten().numpy()]
        scales = torch.from_numpy(raw[..., : 4 if kind == "Q4_1" else 2].copy()).view(torch.float16)
        if kind != "Q4_1":  # codes of Q4_0 are 8 more than the numbers that they stand for
            scales = torch.cat([scales, (-8 if kind == "Q4_0" else 0) * scales], -1)
        if not scales.isfinite().all():
            raise CheckpointError(
                f"tensor {self.name_of(name)} holds NaN or infinity", where=str(self.path), remedy="download it again"
            )
        codes = torch.from_numpy(raw[..., 4 if kind == "Q4_1" else 2 :].copy())
        return PackedRows(codes if kind != "Q8_0" else codes.view(torch.int8), scales)

    def _values(self, stored: GGUFTensor, first: int, part: Tensor) -> Tensor:
        """Return the ``len(part)`` rows from ``first`` on, in float32."""
        row_bytes = self._bytes(stored) // math.prod(stored.shape[:-1])
        # Read, not mapped, as pages of a mapped file would count as this process's memory.
        raw = np.fromfile(self.path, np.uint8, len(part) * row_bytes, offset=stored.begin + first * row_bytes)
        kind = self._gguf.GGMLQuantizationType(stored.kind)
        try:
            values = self._gguf.dequantize(raw.reshape(len(part), row_bytes), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"a tensor is {kind.name}, which cannot be dequantised here",
                where=str(self.path),
                remedy="take the file in another quantisation, such as Q8_0 or Q4_K",
            ) from error
        return torch.from_numpy(np.require(values, requirements=["C", "W"])).view(part.shape)

    def _bytes(self, stored: GGUFTensor) -> int:
        block, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(stored.kind)]
        return math.prod(stored.shape) // block * size

    def _check_place(self, name: str) -> None:
        """Check that a tensor's kind is known and that the tensor lies within the file."""
        stored = self._tensors[name]

        def refuse(what: str) -> CheckpointError:
            return CheckpointError(f"tensor {name} {what}", where=str(self.path), remedy="download the file again")

        try:
            kind = self._gguf.GGMLQuantizationType(stored.kind)
        except ValueError:
            raise refuse(f"is of kind {stored.kind}, which is not known") from None
        if kind.name in ("I8", "I16", "I32", "I64"):
            raise CheckpointError(f"tensor {name} holds integers without scales", where=str(self.path))
        if stored.shape[-1] % self._gguf.GGML_QUANT_SIZES[kind][0]:
            raise refuse(f"has rows of {stored.shape[-1]} values, which are not whole blocks of {kind.name}")
        if stored.begin + self._bytes(stored) > self.path.stat().st_size:
            raise CheckpointError(
                f"is truncated, damaged or not GGUF (it ends before tensor {name})",
                where=str(self.path),
                remedy="download the file again",
            )

    def _read_config(self, fields: dict[str, Any]) -> LlamaConfig:
        def field(key: str, usual: Any = None, kind: type | tuple[type, ...] = (int, float)) -> Any:
            if key not in fields and usual is not None:
                return usual
            value = fields.get(key)
            if not isinstance(value, kind):
                what = f"field {key} is {'missing' if key not in fields else 'damaged'}"
                raise CheckpointError(what, where=str(self.path), remedy="download the file again")
            # float32 stores 1e-5 as 9.99999975e-06; the shortest decimal recovers the intended value.
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
                "vocabulary": self._tensors[_NAMES("embedding.weight")].shape[0]
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
        """Return the published scaling that matches the file's divisors of frequencies; None without a scaling."""
        if _FACTORS not in self._tensors:
            return None
        stored = self._tensors[_FACTORS]
        check_shape(_FACTORS, StoredTensor(self.path, stored.shape, torch.float32), (config.head_width // 2,))
        self._check_place(_FACTORS)
        found = self._values(stored, 0, torch.empty(1, math.prod(stored.shape)))[0].float()
        if bool((found == 1).all()):
            return None
        plain = rope_frequencies(config)
        for factor in (8.0, 32.0):  # Llama 3.1 and 3.3; Llama 3.2
            scaling = RopeScaling(factor=factor)
            divisors = plain / rope_frequencies(config.model_copy(update={"rope_scaling": scaling}))
            if torch.allclose(found, divisors, rtol=1e-4):
                return scaling
        raise CheckpointError(
            f"tensor {_FACTORS} stretches rotary frequencies in a way that no Llama does",
            where=str(self.path),
            remedy="convert the original checkpoint again",
        )
