"""Hugging Face's layout: ``config.json`` and safetensors, in one file or several with an index.

Llama, Mistral, Qwen2, Qwen3 and Phi-3 are read; a model is written as the one of them that has its parts. Where tokens
see a window of the last ones only, the context is that window, within which attention is the same.

A model with experts is a Mixtral there, or a Qwen3-MoE if it has norms of heads, with each expert's matrices by
themselves, ``[out, in]``; here they are one tensor, ``[experts, in, out]``. Neither has a shared expert or a bias for
the choice.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cordillera.data.sealed import SealedFolder, write_checksums
from cordillera.data.tokenizers.export import end_ids, write_json_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import CheckpointError
from cordillera.files import read_json_object
from cordillera.models.language.checkpoints.source import (
    FusedRows,
    Names,
    Source,
    StoredTensor,
    check_dtypes,
    check_parts,
    check_shape,
    fused_names,
    fused_rows,
    is_like_phi3,
    make_config,
    missing,
    new_folder,
    parameter_shapes,
)
from cordillera.models.language.checkpoints.weights import WeightStream, check_experts, stream_of
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.moe import UNTRAINED
from cordillera.models.language.rope import RopeScaling
from cordillera.tensor_files import save_file

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_NAMES = Names(
    {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers",
    {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "attention.query_bias": "self_attn.q_proj.bias",
        "attention.key_bias": "self_attn.k_proj.bias",
        "attention.value_bias": "self_attn.v_proj.bias",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.fused": "self_attn.qkv_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
        "feed_forward.fused": "mlp.gate_up_proj",
    },
)
# The layer of experts, and their matrices.
_MIXTRAL = ("block_sparse_moe", {"feed_forward.gate": "w1", "feed_forward.down": "w2", "feed_forward.up": "w3"})
_QWEN3_MOE = ("mlp", {f"feed_forward.{name}": f"{name}_proj" for name in ("gate", "down", "up")})
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_LONGEST = 2**30  # tokens of a context
_NOT_QUANTISED = "load the checkpoint that is not quantised, or one in the GGUF format"
_DAMAGED = "the file is damaged: download it again"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HuggingFace(Source):
    """Folder in Hugging Face's layout."""

    layout = "Hugging Face"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sealed = SealedFolder.of(path, "config.json", *([_INDEX] if (path / _INDEX).exists() else []))
        self.config, self._is_fused = _read_config(path / "config.json")
        self._files: dict[Path, Any] = {}
        self._places = self._index()
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in parameter_shapes(self.config).items():
            fused = self._fused(name)
            expected |= (
                _stored_shapes(self.config, name, shape)
                if fused is None
                else {_NAMES(fused.name): (fused.rows, *shape[1:])}
            )
        tensors = {}
        for name, shape in expected.items():
            if name not in self._places:
                remedy = "set tie_word_embeddings in config.json if the head is the embedding"
                raise missing(name, path, *([remedy] if name == "lm_head.weight" else []))
            tensors[name] = self._stored(name)
            check_shape(name, tensors[name], shape)
        check_dtypes(tensors)
        self._dtype = next(stored.dtype for stored in tensors.values() if len(stored.shape) > 1)
        spare = self._places.keys() - expected.keys()
        unknown = sorted(
            name for name in spare if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"
        )
        if unknown:
            raise CheckpointError(
                f"tensor {unknown[0]} (of {len(unknown)}) has no place in a Llama",
                where=str(self._places[unknown[0]]),
                remedy="the checkpoint is of another architecture",
            )
        if "lm_head.weight" in spare and not torch.equal(
            self._tensor("lm_head.weight"), self._tensor(_NAMES("embedding.weight"))
        ):
            raise CheckpointError(
                "tensor lm_head.weight differs from the embedding, though config.json ties them",
                where=str(self._places["lm_head.weight"]),
                remedy="set tie_word_embeddings to false in config.json",
            )

    @property
    def dtype(self) -> torch.dtype | None:
        return self._dtype

    @property
    def files(self) -> list[Path]:
        if self._sealed is not None:
            return []
        return [path for path in (self.path / "config.json", self.path / _INDEX) if path.exists()] + list(self._files)

    def name_of(self, name: str) -> str:
        if (fused := self._fused(name)) is not None:
            return _NAMES(fused.name)
        return ", ".join(_stored_shapes(self.config, name, parameter_shapes(self.config)[name])) or name

    def read(self, name: str, out: Tensor) -> None:
        fused = self._fused(name)
        stored = list(_stored_shapes(self.config, name, tuple(out.shape))) if fused is None else [_NAMES(fused.name)]
        if self._sealed is not None:
            for file in {self._places[one].name for one in stored}:
                self._sealed.verify_once(file)
        if out.dim() == 3:
            for part, one in zip(out, stored, strict=True):
                part.copy_(self._tensor(one).T)
        elif fused is not None:
            out.copy_(self._tensor(*stored)[fused.first : fused.first + len(out)])
        elif stored:
            out.copy_(self._tensor(*stored))
        else:
            out.zero_()  # the bias of a router

    def _fused(self, name: str) -> FusedRows | None:
        return fused_rows(self.config, name) if self._is_fused else None

    def _tensor(self, name: str) -> Tensor:
        return self._open(self._places[name]).get_tensor(name)  # a view of the mapped file

    def _stored(self, name: str) -> StoredTensor:
        file = self._places[name]
        if name not in self._open(file).keys():  # noqa: SIM118 -- not a dict
            raise missing(name, file, f"{_INDEX} names it: index and file belong to different checkpoints")
        header = self._open(file).get_slice(name)
        dtype = _DTYPES.get(header.get_dtype())
        if dtype is None:
            raise CheckpointError(
                f"tensor {name} is {header.get_dtype()}, not floating point of 16 bits or more",
                where=str(file),
                remedy=_NOT_QUANTISED,
            )
        return StoredTensor(file, tuple(header.get_shape()), dtype)

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"is truncated or damaged ({error})", where=str(file), remedy="download the file again"
                ) from error
        return self._files[file]

    def _index(self) -> dict[str, Path]:
        """Return the file of each tensor, and open all files."""
        index = self.path / _INDEX
        if not index.exists():
            found = sorted(self.path.glob("*.safetensors"))
            single = self.path / _SINGLE if self.path / _SINGLE in found or len(found) != 1 else found[0]
            if single not in found:
                pickled = sorted(self.path.glob("pytorch_model*.bin"))
                what = f"{_INDEX} is missing beside {len(found)} files" if found else "there is no .safetensors file"
                raise CheckpointError(
                    what,
                    where=str(self.path),
                    remedy=f"{pickled[0].name} may hold code and is not read: convert it to safetensors"
                    if pickled
                    else "download the checkpoint again",
                )
            return dict.fromkeys(self._open(single).keys(), single)
        places = read_json_object(index, error=CheckpointError, remedy="download it again").get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CheckpointError("weight_map does not give a file for each tensor", where=str(index))
        for name, file in places.items():
            if Path(file).name != file:
                raise CheckpointError(
                    f"tensor {name} is said to lie outside of the folder, in {file}", where=str(index)
                )
            if not os.path.isfile(self.path / file):  # unlike Path, of a name that is too long, too
                raise CheckpointError(
                    f"is missing; {_INDEX} says that it holds {name}",
                    where=str(self.path / file),
                    remedy="download the file",
                )
            self._open(self.path / file)
        return {name: self.path / file for name, file in places.items()}


def layer_name(name: str) -> str:
    """Return the name that a linear layer has in this layout, by ours, such as ``layers.0.attention.query``."""
    return _NAMES(f"{name}.weight").removesuffix(".weight")


def _stored_shapes(config: LlamaConfig, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that hold a parameter: one, one for each expert, or none for a bias."""
    if ".feed_forward.router." not in name and len(shape) < 3:
        return {_NAMES(name): shape}
    _, number, rest = name.split(".", 2)
    layer, of_expert = _QWEN3_MOE if config.head_norms else _MIXTRAL
    block = f"{_NAMES.blocks}.{number}.{layer}"
    if len(shape) < 3:
        return {} if name.endswith(UNTRAINED) else {f"{block}.gate.weight": shape}
    return {f"{block}.experts.{e}.{of_expert[rest]}.weight": (shape[2], shape[1]) for e in range(shape[0])}


def _read_config(path: Path) -> tuple[LlamaConfig, bool]:
    """Return a model's configuration, and whether matrices are fused."""
    raw = read_json_object(path, error=CheckpointError, remedy="download it again")
    kind = raw.get("model_type")
    if kind not in _CLASSES:
        raise _refusal(path, f"model_type is {kind!r}, not one of {', '.join(_CLASSES)}")
    if raw.get("quantization_config"):
        what = "the weights are quantised (quantization_config), which only GGUF files may be here"
        raise _refusal(path, what, _NOT_QUANTISED)
    usual_values = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    if kind == "qwen3_moe":
        usual_values |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    for key, usual in usual_values.items():
        if raw.get(key, usual) != usual:
            raise _refusal(path, f"{key} is {raw[key]!r}, a model of type {kind} has {usual!r} here")
    context = raw.get("max_position_embeddings", 2048)
    scaling, theta = _read_rope(path, raw, context)
    window = raw.get("sliding_window") if raw.get("use_sliding_window", not kind.startswith("qwen")) else None
    try:
        experts, width = None, "intermediate_size"
        if kind == "mixtral":
            experts = {"count": raw["num_local_experts"], "chosen": raw["num_experts_per_tok"]}
        elif kind == "qwen3_moe":
            width = "moe_intermediate_size"
            count = raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]
            experts = {"count": count, "chosen": raw["num_experts_per_tok"]}
        values = {
            "layers": raw["num_hidden_layers"],
            "hidden": raw["hidden_size"],
            "heads": raw["num_attention_heads"],
            "kv_heads": raw.get("num_key_value_heads") or raw["num_attention_heads"],
            "head_dim": raw.get("head_dim", 128 if kind == "qwen3" else None),
            "ffn": raw[width],
            "experts": experts,
            "attention_bias": kind == "qwen2",
            "head_norms": kind in ("qwen3", "qwen3_moe"),
            "vocabulary": raw["vocab_size"],
            "context": context,
            "tied": raw.get("tie_word_embeddings", False),
            "norm_eps": raw.get("rms_norm_eps", 1e-5 if kind == "phi3" else 1e-6),
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
    except KeyError as error:
        raise _refusal(path, f"{error.args[0]} is missing", _DAMAGED) from error
    config = make_config(path, values | {"rotary_dim": _read_rotary_dim(path, raw, kind, values)})
    longest = config.context
    if (yarn := config.rope_scaling) is not None and yarn.rope_type == "yarn":
        longest = max(longest, int(min(yarn.factor * yarn.original_context, _LONGEST)))
    if window is not None:
        if type(window) is not int or window < 1:
            raise _refusal(path, f"sliding_window is {window!r}, not a number of tokens", _DAMAGED)
        longest = min(longest, window)
    return config.model_copy(update={"context": longest}), kind == "phi3"


def _read_rope(path: Path, raw: dict[str, Any], context: Any) -> tuple[dict[str, Any] | None, Any]:
    """Return the scaling of rotary positions, or None, and their base."""
    # Since version 5 of transformers, one section replaces rope_scaling and rope_theta.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise _refusal(path, f"the rotary settings are {rope!r}, not an object with keys")
    scales, theta = rope.get("rope_type", rope.get("type", "default")), rope.get("rope_theta")
    scales = "longrope" if scales == "su" else scales  # its first name
    if scales not in ("default", "llama3", "yarn", "linear", "longrope"):
        raise _refusal(path, f"rope_type {scales!r} is not known; default, llama3, linear, yarn and longrope are")
    if rope.get("truncate", True) is not True:
        raise _refusal(path, f"truncate is {rope['truncate']!r}, which is True here")
    theta = theta or raw.get("rope_theta", 10_000.0)
    if scales == "default":
        return None, theta
    try:
        if scales == "longrope":
            return _read_longrope(path, raw, rope, context), theta
        keys = ("low_freq_factor", "high_freq_factor") if scales == "llama3" else ()
        scaling = {"rope_type": scales} | {key: rope[key] for key in ("factor", *keys)}
        if scales == "llama3":
            scaling["original_context"] = rope["original_max_position_embeddings"]
    except KeyError as error:
        raise _refusal(path, f"{error.args[0]} is missing", _DAMAGED) from error
    if scales == "yarn":
        scaling["original_context"] = rope.get("original_max_position_embeddings") or context
        scaling |= {key: rope[key] for key in ("beta_fast", "beta_slow", "attention_factor") if rope.get(key)}
        if rope.get("mscale") and rope.get("mscale_all_dim") and not rope.get("attention_factor"):
            raise _refusal(path, "mscale_all_dim scales attention in a way that no model of these types does")
    return scaling, theta


def _read_longrope(path: Path, raw: dict[str, Any], rope: dict[str, Any], context: Any) -> dict[str, Any]:
    """Return the scaling of Phi-3 models for long contexts; raise KeyError for what is missing."""
    key = "original_max_position_embeddings"
    original = raw[key] if raw.get(key) is not None else rope[key]  # same precedence as transformers
    scaling = {"rope_type": "longrope", "original_context": original}
    scaling |= {key: rope[key] for key in ("short_factor", "long_factor")}
    scaling |= {key: rope[key] for key in ("factor", "attention_factor") if rope.get(key) is not None}
    if "factor" not in scaling:
        if not all(type(size) is int and 0 < size <= _LONGEST for size in (context, original)):
            raise _refusal(path, f"the contexts are {context!r} and {original!r}, not numbers of tokens", _DAMAGED)
        scaling["factor"] = max(1.0, context / original)
    return scaling


def _read_rotary_dim(path: Path, raw: dict[str, Any], kind: str, values: dict[str, Any]) -> int | None:
    """Return how many numbers of a head turn; None for all."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if share == 1:
        return None
    if kind != "phi3":
        raise _refusal(path, f"partial_rotary_factor is {share!r}, a model of type {kind} has 1.0 here")
    try:
        return int((values["head_dim"] or values["hidden"] // values["heads"]) * share)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise _refusal(path, f"partial_rotary_factor is {share!r} of a head, not a part of it", _DAMAGED) from None


def _refusal(path: Path, what: str, remedy: str | None = None) -> CheckpointError:
    return CheckpointError(what, where=str(path), remedy=remedy or f"load a model of type {', '.join(_CLASSES)}")


def _kind_of(config: LlamaConfig, where: str | Path) -> str:
    """Return the type of model that is written."""
    check_parts(config, where)
    if is_like_phi3(config):
        if config.head_width * config.heads != config.hidden:
            what = f"heads of width {config.head_width}, not hidden / heads, with positions of Phi-3 are of no model"
            raise CheckpointError(f"{what} of this layout", where=str(where))
        return "phi3"
    if config.experts is not None:
        return "qwen3_moe" if config.head_norms else "mixtral"
    return "qwen2" if config.attention_bias else "qwen3" if config.head_norms else "llama"


def _write_config(path: Path, kind: str, config: LlamaConfig, dtype: torch.dtype, tokenizer: Tokenizer | None) -> None:
    experts = config.experts
    content: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _written_scaling(config.rope_scaling),
        "hidden_act": "silu",
        "attention_bias": False,  # biases of all four matrices; those of Qwen2 are implicit
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if experts is not None:
        content |= {
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "sliding_window": None,
        }
    if kind == "qwen3_moe":
        content["num_experts"] = content.pop("num_local_experts")
        content |= {"moe_intermediate_size": config.ffn, "norm_topk_prob": True, "decoder_sparse_step": 1}
    if kind.startswith("qwen"):
        content |= {"use_sliding_window": False, "sliding_window": None}
    if kind == "phi3":
        share = config.rotary_width / config.head_width
        exact = int(config.head_width * share) == config.rotary_width  # transformers computes the width in this way
        content |= {"partial_rotary_factor": share if exact else math.nextafter(share, 1.0), "sliding_window": None}
        # Phi3Config takes those of Phi-3's vocabulary for ids that are not there.
        content |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        if config.rope_scaling is not None:
            content["original_max_position_embeddings"] = config.rope_scaling.original_context
    if tokenizer is not None:
        content |= end_ids(tokenizer)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _written_scaling(scaling: RopeScaling) -> dict[str, Any]:
    own = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
        "linear": (),
        "longrope": ("short_factor", "long_factor", "attention_factor"),
    }[scaling.rope_type]
    found = {"rope_type": scaling.rope_type, "factor": scaling.factor} | {key: getattr(scaling, key) for key in own}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    if scaling.rope_type != "linear":
        found["original_max_position_embeddings"] = scaling.original_context
    return found


def save_hugging_face(
    model: Llama | WeightStream,
    folder: str | Path,
    shard_bytes: int = 5_000_000_000,
    *,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model so that ``transformers`` and programs that read its checkpoints can load it; dtypes are kept.

    One file's part of the model is in memory at a time.

    Args:
        model: Model, or its parameters one at a time.
        folder: Folder that is absent or empty.
        shard_bytes: Size in bytes above which the next tensor starts a new file.
        tokenizer: Tokenizer to write beside the weights, with the chat template and the ids that end a text; None for
            none.
        overwrite: Whether the folder may hold a checkpoint, which is replaced.

    Raises:
        CheckpointError: If the model has experts that this layout has not: a shared one, or a bias for the choice; or
            parts that no published model has together. Also if the folder cannot be written.
        DataError: If the tokenizer's file has changed.
    """
    stream = stream_of(model)
    check_experts(stream, folder)
    kind = _kind_of(stream.config, folder)
    parts = {name: fused_names(name) if kind == "phi3" else [name] for name in stream.shapes}
    sizes = {
        name: sum(math.prod(stream.shapes[part]) * stream.dtypes[part].itemsize for part in names)
        for name, names in parts.items()
    }
    shards: list[list[str]] = [[]]
    size = 0
    for name in stream.shapes:
        if shards[-1] and size + sizes[name] > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += sizes[name]
    count, total = len(shards), sum(sizes.values())
    files = [_SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    places: dict[str, str] = {}
    with new_folder(Path(folder), total, overwrite) as beside:
        _write_config(beside / "config.json", kind, stream.config, stream.dtypes["embedding.weight"], tokenizer)
        for file, names in zip(files, shards, strict=True):
            tensors = dict(pair for name in names for pair in _stored(stream, parts[name]))
            places |= dict.fromkeys(tensors, file)
            try:
                save_file(tensors, beside / file, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from error
            shutil.copymode(beside / "config.json", beside / file)  # safetensors makes files readable only by the owner
        if count > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (beside / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_checksums(beside)
        if tokenizer is not None:  # no checksums: users may edit the generation settings
            write_json_tokenizer(tokenizer, beside, stream.config.context)


def _stored(stream: WeightStream, names: list[str]) -> list[tuple[str, Tensor]]:
    """Return the tensors that hold a parameter, or several as one, by their names in files."""
    if not names:
        return []
    name = names[0]
    if len(names) > 1 and (fused := fused_rows(stream.config, name)) is not None:
        return [(_NAMES(fused.name), torch.cat([stream.tensor(part).cpu() for part in names]))]
    weight = stream.tensor(name)
    if stream.config.experts is not None and name.endswith(".feed_forward.down"):
        weight = weight * stream.config.experts.scale  # their sum is 1 there
    parts = [part.T for part in weight] if weight.dim() == 3 else [weight]
    pairs = zip(_stored_shapes(stream.config, name, tuple(weight.shape)), parts, strict=False)
    return [(stored, part.cpu().contiguous()) for stored, part in pairs]
