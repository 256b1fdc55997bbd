"""GGUF, the format of llama.cpp: one file, usually with quantised weights.

Files of Llama, Mistral and Mixtral (which are the same there), Qwen2, Qwen3, Qwen3-MoE and Phi-3 are read and written.
Only a Llama's hold the pairs that positions turn beside each other. All experts of a block are one tensor,
``[experts, out, in]``; here it is ``[experts, in, out]``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from cordillera.data.tokenizers.export import gguf_fields
from cordillera.data.tokenizers.gguf import GGUFTensor, gguf_header
from cordillera.data.tokenizers.gguf_writer import PlannedTensor, gguf_head
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import CheckpointError, DataError, DependencyError
from cordillera.kernels.dense.packed_rows import PackedRows
from cordillera.kernels.dense.tiled_products import GROUP
from cordillera.models.language.checkpoints.source import (
    FusedRows,
    Names,
    Source,
    StoredTensor,
    check_parts,
    check_shape,
    fused_names,
    fused_rows,
    halves_to_interleaved,
    interleaved_to_halves,
    is_like_phi3,
    make_config,
    missing,
    new_file,
    parameter_shapes,
)
from cordillera.models.language.checkpoints.weights import WeightStream, check_experts, stream_of
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.moe import UNTRAINED
from cordillera.models.language.rope import RopeScaling, rope_frequencies, yarn_amplitude

_NAMES = Names(
    {"embedding": "token_embd", "norm": "output_norm", "head": "output"},
    "blk",
    {
        "attention_norm": "attn_norm",
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.output": "attn_output",
        "attention.query_bias": "attn_q.bias",
        "attention.key_bias": "attn_k.bias",
        "attention.value_bias": "attn_v.bias",
        "attention.query_norm": "attn_q_norm",
        "attention.key_norm": "attn_k_norm",
        "attention.fused": "attn_qkv",
        "feed_forward_norm": "ffn_norm",
        "feed_forward.gate": "ffn_gate",
        "feed_forward.up": "ffn_up",
        "feed_forward.down": "ffn_down",
        "feed_forward.fused": "ffn_up",
        "feed_forward.router": "ffn_gate_inp",
    },
)
_ROTATED = ("attention.query.weight", "attention.key.weight")
_ROUTER = "feed_forward.router.weight"
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3")
_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # divisors of ``longrope``
_CODES = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # bits of the kinds that are kept as they are, in groups of 32 inputs
_MOST_DIVISORS = 2**16
_LONGEST = 2**30  # tokens of a context
_PIECE = 2**18  # number of values that are dequantized at a time
_SCALING = "cordillera.rope_scaling."  # fields of a scaling; other programs read the divisors of frequencies
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOAT_FILES = {"F32": 0, "F16": 1, "BF16": 32}

QUANTISED_FILES = {"q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q8_0": 7}
"""Numbers of the quantised kinds that are written, as ``general.file_type`` (llama.cpp, ``llama.h``)."""


class GGUFFile(Source):
    """GGUF file, which the library ``gguf`` reads.

    Attributes:
        architecture: Architecture of the model by the file's metadata.
    """

    layout = "GGUF"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _library(path)
        try:
            prefixes = ("general.", "split.", *(f"{kind}." for kind in _ARCHITECTURES), _SCALING)
            fields, self._tensors = gguf_header(path, prefixes)
        except (DataError, OSError) as error:
            what = error.what if isinstance(error, DataError) else str(error)
            raise CheckpointError(
                f"is truncated, damaged or not GGUF ({what})", where=str(path), remedy="download the file again"
            ) from error
        self.architecture, self.config = self._read_config(fields)
        shapes = {}
        for name, shape in parameter_shapes(self.config).items():
            if not name.endswith(UNTRAINED):
                shapes[self.name_of(name)] = _stored_shape(shape, self._place(name).rows)
        for name, shape in shapes.items():
            if name not in self._tensors:
                raise missing(name, path)
            check_shape(name, StoredTensor(path, self._tensors[name].shape, torch.float32), shape)
            self._check_place(name)
        unknown = sorted(self._tensors.keys() - shapes.keys() - {_FACTORS, _LONG, _SHORT})
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
        return _stored_name(self._place(name).name)

    def _place(self, name: str) -> FusedRows:
        """Return where a parameter lies; of a matrix that holds it alone, the number of rows is 0."""
        fused = fused_rows(self.config, name) if self.architecture == "phi3" else None
        return fused or FusedRows(name, 0, 0)

    def _is_interleaved(self, name: str) -> bool:
        return name.endswith(_ROTATED) and self.architecture == "llama"

    def read(self, name: str, out: Tensor) -> None:
        if name.endswith(UNTRAINED):
            out.zero_()  # the bias of a router
            return
        stored, before = self._tensors[self.name_of(name)], self._place(name).first
        if out.dim() == 3:
            for number, expert in enumerate(out):
                expert.copy_(self._values(stored, number * expert.shape[1], torch.empty(expert.T.shape)).T)
            return
        rows = out if out.dim() == 2 else out[None]
        # A few rows or heads at a time, as quantised values take several times their size while they are unpacked.
        unit = self.config.head_width if self._is_interleaved(name) else 1
        step = max(1, _PIECE // (unit * rows.shape[1])) * unit
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            values = self._values(stored, before + first, part)
            if self._is_interleaved(name):
                interleaved_to_halves(values.unflatten(0, (-1, unit)), part.unflatten(0, (-1, unit)))
            else:
                part.copy_(values)

    @property
    def kinds(self) -> Counter[str]:
        """Number of matrices of each kind."""
        return Counter(
            self._gguf.GGMLQuantizationType(self._tensors[self.name_of(name)].kind).name
            for name, shape in parameter_shapes(self.config).items()
            if len(shape) > 1 and not name.endswith(_ROUTER)
        )

    @property
    def dtype(self) -> torch.dtype | None:
        (kind, _), *others = self.kinds.most_common()
        return None if others else _FLOATS.get(kind)

    @property
    def has_codes(self) -> bool:
        return all(kind in _CODES for kind in self.kinds)

    def packed(self, name: str, shape: tuple[int, int], bits: int) -> PackedRows:
        stored, first = self._tensors[self.name_of(name)], self._place(name).first
        kind = self._gguf.GGMLQuantizationType(stored.kind).name
        if kind not in _CODES or _CODES[kind] > bits:
            return super().packed(name, shape, bits)
        outputs, groups = shape[0], shape[1] // GROUP
        of_row = self._bytes(stored) // stored.shape[0]
        raw = np.fromfile(self.path, np.uint8, outputs * of_row, offset=stored.begin + first * of_row)
        raw = raw.reshape(outputs, groups, -1)
        if self._is_interleaved(name):
            order = torch.arange(outputs).view(-1, self.config.head_width, 1)
            rows = torch.empty_like(order)
            interleaved_to_halves(order, rows)
            raw = raw[rows.flatten().numpy()]
        scales = torch.from_numpy(raw[..., : 4 if kind == "Q4_1" else 2].copy()).view(torch.float16)
        if kind == "Q4_0":  # codes are 8 more than the numbers that they stand for
            scales = torch.cat([scales, -8 * scales], -1)
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
            raise CheckpointError(
                f"tensor {name} is of kind {stored.kind}, which is not known",
                where=str(self.path),
                remedy="take the file in another quantisation, such as Q8_0 or Q4_K, or update the library gguf",
            ) from None
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

    def _read_config(self, fields: dict[str, Any]) -> tuple[str, LlamaConfig]:
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
        if architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"the architecture is {architecture!r}, not one of {', '.join(_ARCHITECTURES)}",
                where=str(self.path),
                remedy=f"load a model of type {', '.join(_ARCHITECTURES)}",
            )
        if field("split.count", 1) > 1:
            raise CheckpointError(
                f"is one of {field('split.count')} files of a split model",
                where=str(self.path),
                remedy="join them with llama-gguf-split --merge",
            )

        def own(key: str, usual: Any = None, kind: type | tuple[type, ...] = (int, float)) -> Any:
            return field(f"{architecture}.{key}", usual, kind)

        heads, hidden = own("attention.head_count"), own("embedding_length")
        width = own("attention.key_length", hidden // max(heads, 1))
        if (rotary := own("rope.dimension_count", width)) != width and architecture != "phi3":
            what = f"turns {rotary} of the {width} numbers of each head, which only phi3 does here"
            raise CheckpointError(what, where=str(self.path))
        context, experts = own("context_length"), own("expert_count", 0)
        embedding = self._tensors.get(_NAMES("embedding.weight"))
        config = make_config(
            self.path,
            {
                "layers": own("block_count"),
                "hidden": hidden,
                "heads": heads,
                "kv_heads": own("attention.head_count_kv", heads),
                "head_dim": width,
                "ffn": own("expert_feed_forward_length" if architecture == "qwen3moe" else "feed_forward_length"),
                "experts": {"count": experts, "chosen": own("expert_used_count")} if experts else None,
                "attention_bias": architecture == "qwen2",
                "head_norms": architecture.startswith("qwen3"),
                "vocabulary": own("vocab_size") if embedding is None else embedding.shape[0],
                "context": min(context, own("attention.sliding_window", 0) or context),
                "tied": _NAMES("head.weight") not in self._tensors,
                "norm_eps": own("attention.layer_norm_rms_epsilon"),
                "rope_theta": own("rope.freq_base", 10_000.0),
                "rotary_dim": None if rotary == width else rotary,
                "rope_scaling": self._named_scaling(own, context),
            },
        )
        if config.rope_scaling is None:
            named = {key.removeprefix(_SCALING): field(key) for key in fields if key.startswith(_SCALING)}
            config = config.model_copy(update={"rope_scaling": self._scaling(config, named)})
        return architecture, _lengthened(config, context, own("attention.sliding_window", 0))

    def _named_scaling(self, own: Callable[..., Any], context: int) -> dict[str, Any] | None:
        """Return the scaling that the file names; None if it names none."""
        if (there := {_SHORT, _LONG} & self._tensors.keys()) and len(there) == 1:
            raise missing(min({_SHORT, _LONG} - there), self.path)
        if there:
            original = own("rope.scaling.original_context_length")
            return {
                "rope_type": "longrope",
                "factor": max(1.0, context / max(original, 1)),
                "short_factor": self._divisors(_SHORT),
                "long_factor": self._divisors(_LONG),
                "attention_factor": own("rope.scaling.attn_factor", 1.0),
                "original_context": original,
            }
        factor = own("rope.scaling.factor", own("rope.scale_linear", 1.0))
        kind = own("rope.scaling.type", "none" if factor in (0, 1) else "linear", str)
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise CheckpointError(
                f"rope_type {kind!r} is not known; linear and yarn are, and files of Llama 3.1 and later name none",
                where=str(self.path),
                remedy="load a model with one of these",
            )
        found = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found["original_context"] = own("rope.scaling.original_context_length", context)
            found["beta_fast"] = own("rope.scaling.yarn_beta_fast", 32.0)
            found["beta_slow"] = own("rope.scaling.yarn_beta_slow", 1.0)
            if (times := own("rope.scaling.attn_factor", 1.0)) != 1.0:
                found["attention_factor"] = times * yarn_amplitude(max(1.0, found["factor"]))
        return found

    def _divisors(self, name: str) -> list[float]:
        """Return the numbers of a tensor of one dimension, as short as they can be written."""
        stored = self._tensors[name]
        if len(stored.shape) != 1 or stored.shape[0] > _MOST_DIVISORS:
            shape = list(stored.shape)
            raise CheckpointError(f"tensor {name} has the shape {shape}, not that of divisors", where=str(self.path))
        self._check_place(name)
        found = self._values(stored, 0, torch.empty(1, *stored.shape))[0].float()
        return [float(str(value)) for value in found.numpy()]

    def _scaling(self, config: LlamaConfig, named: dict[str, Any]) -> RopeScaling | None:
        """Return the scaling, named or published, that matches the file's divisors of frequencies; None without any."""
        if _FACTORS not in self._tensors:
            return None
        stored = self._tensors[_FACTORS]
        check_shape(_FACTORS, StoredTensor(self.path, stored.shape, torch.float32), (config.rotary_width // 2,))
        self._check_place(_FACTORS)
        found = self._values(stored, 0, torch.empty(1, math.prod(stored.shape)))[0].float()
        if bool((found == 1).all()):
            return None
        plain = rope_frequencies(config)
        known = [RopeScaling(factor=factor) for factor in (8.0, 32.0)]  # Llama 3.1 and 3.3; Llama 3.2
        with contextlib.suppress(ValidationError):
            known.insert(0, RopeScaling.model_validate(named))
        for scaling in known:
            divisors = plain / rope_frequencies(config.model_copy(update={"rope_scaling": scaling}))
            if torch.allclose(found, divisors, rtol=1e-4):
                return scaling
        raise CheckpointError(
            f"tensor {_FACTORS} stretches rotary frequencies in a way that no Llama does",
            where=str(self.path),
            remedy="convert the original checkpoint again",
        )


def _lengthened(config: LlamaConfig, context: int, window: int) -> LlamaConfig:
    """Return a configuration with the context that YaRN makes of the original one, within a window if there is one."""
    if (yarn := config.rope_scaling) is None or yarn.rope_type != "yarn":
        return config
    longest = max(context, int(min(yarn.factor * yarn.original_context, _LONGEST)))
    return config.model_copy(update={"context": min(longest, window or longest)})


def _library(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise DependencyError("GGUF needs the library gguf", where=str(path), remedy="pip install gguf") from error
    return gguf


def save_gguf(
    model: Llama | WeightStream,
    path: str | Path,
    quantize: str | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    name: str = "",
    overwrite: bool = False,
) -> None:
    """Write a model as one GGUF file, which llama.cpp can load too if it holds a tokenizer.

    Vectors are float32. One tensor at a time is in memory.

    Args:
        model: Model, or its parameters one at a time.
        path: File that is made.
        quantize: ``q4_0``, ``q4_1``, ``q5_0``, ``q5_1`` or ``q8_0`` for matrices in blocks of 32 codes; embedding and
            head are then in ``q8_0``, and matrices whose rows are not whole blocks in float16. None for the dtypes of
            the parameters.
        tokenizer: Tokenizer to write into the file; None for none.
        name: Name of the model in the file.
        overwrite: Whether a file that is there is replaced.

    Raises:
        CheckpointError: If the layout cannot hold the model, weights are not finite, or the file cannot be written.
        DataError: If GGUF cannot describe the tokenizer.
        DependencyError: If the library ``gguf`` is not installed.
    """
    path, stream = Path(path), stream_of(model)
    gguf, config = _library(path), stream.config
    check_parts(config, path)
    check_experts(stream, path)
    parts = _stored_parts(stream)
    kinds = {one: _kind_of(stream, names[0], quantize) for one, names in parts.items()}
    divisors = _divisors_of(config)
    planned = [PlannedTensor(one, tuple(of.shape), 0, of.nbytes) for one, of in divisors.items()]
    for one, kind in kinds.items():
        block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        first, *others = (stream.shapes[name] for name in parts[one])
        shape = _stored_shape(first, sum(other[0] for other in (first, *others)) if others else 0)
        size = math.prod(shape) // block * width
        planned.append(PlannedTensor(_stored_name(one), shape, int(gguf.GGMLQuantizationType[kind]), size))
    main = next(kinds[one] for one, (name, *_) in parts.items() if "layers." in one and len(stream.shapes[name]) == 2)
    files = {kind.upper(): number for kind, number in QUANTISED_FILES.items()} | _FLOAT_FILES
    fields = _fields(config) | {"general.name": name or path.stem, "general.file_type": files[main]}
    if quantize is not None:
        fields["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    if tokenizer is not None:
        fields |= gguf_fields(tokenizer, config.vocabulary)
    head = gguf_head(fields, planned)
    size = len(head) + sum(tensor.room for tensor in planned)
    with new_file(path, size, overwrite) as beside, open(beside, "wb") as file:
        file.write(head)
        pieces = [[of.numpy().tobytes()] for of in divisors.values()]
        encoded = ((piece for name in names for piece in _encoded(stream, name, kinds[one], gguf))
                   for one, names in parts.items())  # fmt: skip
        for tensor, content in zip(planned, itertools.chain(pieces, encoded), strict=True):
            for piece in content:
                file.write(piece)
            file.write(bytes(tensor.room - tensor.size))


def _stored_parts(stream: WeightStream) -> dict[str, list[str]]:
    """Return the parameters that each tensor of the file holds, by our name of the tensor."""
    names = [name for name in stream.shapes if not name.endswith(UNTRAINED)]
    if _architecture(stream.config) != "phi3":
        return {name: [name] for name in names}
    fused = {name: fused_names(name) for name in names}
    places = {name: fused_rows(stream.config, name) for name in names}
    return {name if (place := places[name]) is None else place.name: parts for name, parts in fused.items() if parts}


def _divisors_of(config: LlamaConfig) -> dict[str, Tensor]:
    """Return the divisors of frequencies that are tensors of the file, by name."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type in ("linear", "yarn"):
        return {}
    if scaling.rope_type == "longrope":
        return {_LONG: torch.tensor(scaling.long_factor), _SHORT: torch.tensor(scaling.short_factor)}
    return {_FACTORS: rope_frequencies(config.model_copy(update={"rope_scaling": None})) / rope_frequencies(config)}


def _kind_of(stream: WeightStream, name: str, quantize: str | None) -> str:
    """Return the kind in which a parameter is written."""
    shape = _stored_shape(stream.shapes[name])
    if len(shape) == 1 or name.endswith(_ROUTER):
        return "F32"
    if quantize is None:
        kinds = {dtype: kind for kind, dtype in _FLOATS.items()}
        return kinds.get(stream.dtypes[name], "F32")
    if shape[-1] % GROUP:
        return "F16"
    return "Q8_0" if name in ("embedding.weight", "head.weight") else quantize.upper()


def _encoded(stream: WeightStream, name: str, kind: str, gguf: Any) -> Iterator[bytes]:
    """Yield the bytes of a parameter, some rows at a time; what quantisation changes is measured."""
    weight = stream.tensor(name, _FLOATS.get(kind, torch.float32)).cpu()
    if name.endswith(_ROTATED) and _architecture(stream.config) == "llama":
        heads = weight.unflatten(0, (-1, stream.config.head_width))
        weight = halves_to_interleaved(heads).flatten(0, 1)
    if weight.dim() == 3:
        if name.endswith(".down") and (experts := stream.config.experts) is not None:
            weight = weight * experts.scale  # their sum is 1 there
        weight = weight.transpose(1, 2).flatten(0, 1)
    rows = weight if weight.dim() == 2 else weight[None]
    for piece in rows.split(max(1, _PIECE // rows.shape[1])):
        if kind in _FLOATS:
            yield piece.contiguous().view(torch.uint8).numpy().tobytes()
            continue
        codes = gguf.quantize(piece.contiguous().numpy(), gguf.GGMLQuantizationType[kind])
        values = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(codes, gguf.GGMLQuantizationType[kind])))
        stream.finite(_stored_name(name), values)  # scales are in float16
        stream.measure(piece, values)
        yield codes.tobytes()


def _stored_name(name: str) -> str:
    """Return the name of the tensor that holds a parameter."""
    is_of_experts = not name.endswith(".weight")
    return _NAMES(name).removesuffix(".weight") + "_exps.weight" if is_of_experts else _NAMES(name)


def _stored_shape(shape: tuple[int, ...], rows: int = 0) -> tuple[int, ...]:
    """Return the shape of the tensor that holds a parameter of a ``shape``; one that holds several has ``rows``."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else (rows or shape[0], *shape[1:])


def _architecture(config: LlamaConfig) -> str:
    if is_like_phi3(config):
        return "phi3"
    if config.experts is not None:
        return "qwen3moe" if config.head_norms else "llama"
    return "qwen2" if config.attention_bias else "qwen3" if config.head_norms else "llama"


def _fields(config: LlamaConfig) -> dict[str, Any]:
    """Return the metadata of the shapes."""
    kind, scaling = _architecture(config), config.rope_scaling
    own: dict[str, Any] = {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_width,
        "attention.value_length": config.head_width,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.rotary_width,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocabulary,
    }
    if config.experts is not None:
        own |= {"expert_count": config.experts.count, "expert_used_count": config.experts.chosen}
        own |= {"expert_feed_forward_length": config.ffn} if config.head_norms else {}
    if scaling is not None and scaling.rope_type == "longrope":
        own |= {"rope.scaling.original_context_length": scaling.original_context}
        own |= {"rope.scaling.attn_factor": scaling.amplitude}
    elif scaling is not None and scaling.rope_type != "llama3":
        own |= {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": scaling.factor}
        if scaling.rope_type == "yarn":
            own |= {
                "rope.scaling.original_context_length": scaling.original_context,
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
                "rope.scaling.attn_factor": scaling.amplitude / yarn_amplitude(scaling.factor),
            }
    fields = {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in own.items()}
    if scaling is not None and scaling.rope_type == "llama3":
        kept = scaling.model_dump(include={"factor", "low_freq_factor", "high_freq_factor", "original_context"})
        fields |= {f"{_SCALING}{key}": value for key, value in kept.items()}
    return fields
