"""Meta's layout: ``params.json`` and ``consolidated.NN.pth``, one file for each model-parallel rank.

Ranks hold equal parts of each matrix, cut along its outputs (``wo`` and ``w2``: along its inputs), and copies of norms.
With more ranks than key-value heads, neighbouring ranks hold copies of a head. In the 405B checkpoint for 16 ranks,
``params.json`` even counts 16 such heads.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cordillera.data.sealed import SealedFolder, write_checksums
from cordillera.data.tokenizers.export import write_meta_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import CheckpointError
from cordillera.files import read_json_object
from cordillera.models.language.checkpoints.source import (
    Names,
    Source,
    StoredTensor,
    check_dtypes,
    check_shape,
    halves_to_interleaved,
    interleaved_to_halves,
    make_config,
    missing,
    new_folder,
    parameter_shapes,
)
from cordillera.models.language.checkpoints.weights import WeightStream, stream_of
from cordillera.models.language.llama import Llama, LlamaConfig, ffn_width

_NAMES = Names(
    {"embedding": "tok_embeddings", "norm": "norm", "head": "output"},
    "layers",
    {
        "attention_norm": "attention_norm",
        "attention.query": "attention.wq",
        "attention.key": "attention.wk",
        "attention.value": "attention.wv",
        "attention.output": "attention.wo",
        "feed_forward_norm": "ffn_norm",
        "feed_forward.gate": "feed_forward.w1",
        "feed_forward.up": "feed_forward.w3",
        "feed_forward.down": "feed_forward.w2",
    },
)
_ROTATED = ("attention.query.weight", "attention.key.weight")
_SHARED = ("attention.key.weight", "attention.value.weight")
_BY_INPUT: tuple[str, ...] = ("attention.output.weight", "feed_forward.down.weight")


class Consolidated(Source):
    """Folder in Meta's layout, for any number of ranks."""

    layout = "Meta"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sealed = SealedFolder.of(path, "params.json")
        self._params = read_json_object(path / "params.json", error=CheckpointError, remedy="download it again")
        self._files = _files(path)
        self._ranks = [_open(file) for file in self._files]
        self._by_input = _BY_INPUT
        self.config, self._copies = self._read_config()
        expected = {_NAMES(name): (name, shape) for name, shape in parameter_shapes(self.config).items()}
        for file, rank in zip(self._files, self._ranks, strict=True):
            stored = {}
            for theirs, (name, shape) in expected.items():
                if theirs not in rank:
                    raise missing(theirs, file)
                stored[theirs] = StoredTensor(file, tuple(rank[theirs].shape), rank[theirs].dtype)
                check_shape(theirs, stored[theirs], self._part(name, shape), self._hint(name))
            check_dtypes(stored)
            unknown = sorted(rank.keys() - expected.keys() - {"output.weight", "rope.freqs"})
            if unknown:
                raise CheckpointError(
                    f"tensor {unknown[0]} (of {len(unknown)}) has no place in a Llama",
                    where=str(file),
                    remedy="the checkpoint is of another architecture",
                )
            for theirs in expected:
                first = self._ranks[0][theirs]
                if rank[theirs].dtype != first.dtype or (first.dim() == 1 and not torch.equal(rank[theirs], first)):
                    raise CheckpointError(
                        f"tensor {theirs} differs from that of {self._files[0].name}, which it should equal",
                        where=str(file),
                        remedy="the files belong to different checkpoints: download them again",
                    )

    @property
    def dtype(self) -> torch.dtype | None:
        return self._ranks[0][_NAMES("embedding.weight")].dtype

    @property
    def files(self) -> list[Path]:
        return [] if self._sealed is not None else [self.path / "params.json", *self._files]

    def name_of(self, name: str) -> str:
        return _NAMES(name)

    def read(self, name: str, out: Tensor) -> None:
        if self._sealed is not None:
            for file in self._files:
                self._sealed.verify_once(file.name)
        parts = [rank[_NAMES(name)] for rank in self._ranks]
        if out.dim() == 1:
            out.copy_(parts[0])
        elif name.endswith((*_ROTATED, *_SHARED)):
            self._read_heads(name, parts, out)
        else:
            dim = 1 if name.endswith(self._by_input) else 0
            for part, place in zip(parts, out.chunk(len(parts), dim), strict=True):
                place.copy_(part)

    def _read_heads(self, name: str, parts: list[Tensor], out: Tensor) -> None:
        width, copies = self.config.head_width, self._copies if name.endswith(_SHARED) else 1
        heads = [head for part in parts for head in part.unflatten(0, (-1, width))]  # each [D, hidden]
        if copies == 1 and name.endswith(_SHARED) and len(heads) == len(parts):
            # the heads of the first block are not copies, so equal heads here are an error
            for number, pair in enumerate(itertools.pairwise(heads)):
                if torch.equal(*pair):
                    raise CheckpointError(
                        f"heads {number} and {number + 1} of tensor {_NAMES(name)} are copies, others that should be "
                        "differ between ranks",
                        where=str(self.path),
                        remedy="the files are damaged or belong to different checkpoints: download them again",
                    )
        for number, place in enumerate(out.unflatten(0, (-1, width))):
            head, *others = heads[number * copies : (number + 1) * copies]
            if not all(torch.equal(head, other) for other in others):
                raise CheckpointError(
                    f"copies of head {number} of tensor {_NAMES(name)} differ between ranks",
                    where=str(self.path),
                    remedy="the files belong to different checkpoints: download them again",
                )
            if name.endswith(_ROTATED):
                interleaved_to_halves(head[None], place[None])
            else:
                place.copy_(head)

    def _part(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one rank's part of a parameter."""
        ranks = len(self._ranks)
        if len(shape) == 1:
            return shape
        if name.endswith(_SHARED):
            shape = (shape[0] * self._copies, shape[1])
        dim = 1 if name.endswith(self._by_input) else 0
        whole = self.config.head_width if name.endswith((*_ROTATED, *_SHARED)) else 1  # heads are never split
        if shape[dim] % (ranks * whole):
            raise CheckpointError(
                f"tensor {_NAMES(name)} of shape {shape} cannot have been cut for {ranks} ranks",
                where=str(self.path),
                remedy="files are missing, or params.json belongs to another model",
            )
        return tuple(size // ranks if i == dim else size for i, size in enumerate(shape))

    def _hint(self, name: str) -> str:
        if "feed_forward." in name:
            given = self._params.get("ffn_dim_multiplier")
            return (
                f"params.json gives dim {self.config.hidden}, multiple_of {self._params.get('multiple_of', 256)} and "
                f"{'no ffn_dim_multiplier' if given is None else f'ffn_dim_multiplier {given}'}: "
                "correct it there (8B and 70B: 1.3, 405B: 1.2)"
            )
        return f"params.json belongs to another model, or some of the {len(self._ranks)} files are missing"

    def _read_config(self) -> tuple[LlamaConfig, int]:
        """Return the configuration, and the number of copies of each key-value head."""
        params, where = self._params, self.path / "params.json"
        try:
            hidden, heads, layers = int(params["dim"]), int(params["n_heads"]), int(params["n_layers"])
            kv_heads = int(params.get("n_kv_heads") or heads)
            multiplier = params.get("ffn_dim_multiplier")
            ffn = ffn_width(hidden, None if multiplier is None else float(multiplier), params.get("multiple_of", 256))
            if min(hidden, heads, kv_heads, layers) < 1 or hidden % heads:
                raise ValueError(f"n_heads ({heads}) does not divide dim ({hidden})")
        except KeyError as error:
            raise CheckpointError(f"{error.args[0]} is missing", where=str(where)) from error
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise CheckpointError(str(error), where=str(where), remedy="the file is damaged") from error
        embeddings = [rank[name].shape for rank in self._ranks if (name := "tok_embeddings.weight") in rank]
        if all(shape[1:] == (hidden / len(self._ranks),) for shape in embeddings):  # as Llama 2 was cut, not Llama 3
            self._by_input = (*_BY_INPUT, "embedding.weight")
        width = hidden // heads
        copies = max(self._rows("layers.0.attention.wk.weight") // (kv_heads * width), 1)
        if copies == 1 and kv_heads == len(self._ranks):
            copies = self._repetition(width, kv_heads)
            kv_heads //= copies
        vocabulary = params.get("vocab_size", -1)
        tied = self._tied()
        scaling = None
        if params.get("use_scaled_rope"):
            # Published files lack the factor: it is 32 for Llama 3.2, whose models are tied, and 8 for all others.
            scaling = {
                "factor": params.get("rope_scaling_factor", 32.0 if tied else 8.0),
                "low_freq_factor": params.get("rope_low_freq_factor", 1.0),
                "high_freq_factor": params.get("rope_high_freq_factor", 4.0),
                "original_context": params.get("rope_original_context", 8192),
            }
        values = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn": ffn,
            "vocabulary": self._rows("tok_embeddings.weight") if vocabulary == -1 else vocabulary,
            "context": params.get("context_length", 131072 if scaling else 8192 if "rope_theta" in params else 4096),
            "tied": tied,
            "norm_eps": params.get("norm_eps", 1e-5),
            "rope_theta": params.get("rope_theta", 10_000.0),  # Llama 2 has neither such an entry nor 8,192 tokens
            "rope_scaling": scaling,
        }
        return make_config(where, values), copies

    def _rows(self, name: str) -> int:
        """Return the number of rows of a tensor over all ranks."""
        for rank, file in zip(self._ranks, self._files, strict=True):
            if name not in rank or rank[name].dim() != 2:
                raise missing(name, file)
        rows = sum(rank[name].shape[0] for rank in self._ranks)
        is_whole = name == "tok_embeddings.weight" and len(self._by_input) > len(_BY_INPUT)
        return rows // len(self._ranks) if is_whole else rows

    def _repetition(self, width: int, kv_heads: int) -> int:
        """Return how many consecutive key-value heads are copies in the first block; 1 unless ranks hold one head."""
        heads = []
        for rank in self._ranks:
            parts = [rank.get(f"layers.0.attention.{kind}.weight") for kind in ("wk", "wv")]
            if any(part is None or part.shape[0] != width for part in parts):
                return 1  # the shapes are wrong, which is reported later
            heads.append(torch.cat([part for part in parts if part is not None]))
        for copies in range(kv_heads, 1, -1):
            if kv_heads % copies == 0 and all(torch.equal(heads[i], heads[i - i % copies]) for i in range(kv_heads)):
                return copies
        return 1

    def _tied(self) -> bool:
        """Whether the head is missing or equal to the embedding."""
        if not any("output.weight" in rank for rank in self._ranks):
            return True
        return all(
            "output.weight" in rank
            and "tok_embeddings.weight" in rank
            and torch.equal(rank["output.weight"], rank["tok_embeddings.weight"])
            for rank in self._ranks
        )


def _files(path: Path) -> list[Path]:
    """Return the ranks' files in order; raise an error if one is missing."""
    numbers = {}
    for file in path.glob("consolidated.*.pth"):
        if match := re.fullmatch(r"consolidated\.(\d+)\.pth", file.name):
            numbers[int(match[1])] = file
    if not numbers and any(path.glob("consolidated*.safetensors")):
        raise CheckpointError(
            "is Mistral's own layout, which is not read",
            where=str(path),
            remedy="download the files in Hugging Face's layout",
        )
    lost = sorted(set(range(max(numbers, default=0) + 1)) - numbers.keys())
    if lost:
        raise CheckpointError(
            "is missing", where=str(path / f"consolidated.{lost[0]:02d}.pth"), remedy="download the file"
        )
    return [numbers[number] for number in sorted(numbers)]


def _open(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, memory-mapped."""
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "holds more than tensors, perhaps code, and is not read",
            where=str(file),
            remedy="get the checkpoint from its publisher",
        ) from error
    except Exception as error:  # damaged bytes can cause any error in the reader
        said = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"is truncated or damaged ({said[0]})", where=str(file), remedy="download the file again"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CheckpointError(
            "does not hold tensors by name", where=str(file), remedy="get the checkpoint from its publisher"
        )
    return content


def save_consolidated(
    model: Llama | WeightStream,
    folder: str | Path,
    ranks: int = 1,
    *,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model in Meta's layout; weights keep their current dtype. One rank's part at a time is in memory.

    Args:
        model: Model, or its parameters one at a time.
        folder: Folder that is absent or empty.
        ranks: Number of files; must divide all widths. With more ranks than key-value heads, these are repeated, and
            ``params.json`` counts the copies, as the reference code requires.
        tokenizer: Tokenizer to write beside the weights: as ``tokenizer.model`` if it is Llama 3's, otherwise as
            :func:`save_hugging_face` does; None for none.
        overwrite: Whether the folder may hold a checkpoint, which is replaced.

    Raises:
        CheckpointError: If the layout cannot hold the model, or the folder cannot be written.
        DataError: If the tokenizer's file has changed.
    """
    stream = stream_of(model)
    config, where = stream.config, str(folder)
    if config.experts is not None:
        raise CheckpointError("this layout cannot hold experts", where=where, remedy="save it in Hugging Face's layout")
    if config.attention_bias or config.head_norms:
        what = "biases" if config.attention_bias else "norms of heads"
        raise CheckpointError(f"this layout cannot hold {what}", where=where, remedy="save it in Hugging Face's layout")
    if config.rope_scaling is not None and config.rope_scaling.rope_type != "llama3":
        what = f"rotary positions of type {config.rope_scaling.rope_type}"
        raise CheckpointError(f"this layout cannot hold {what}", where=where, remedy="save it in Hugging Face's layout")
    if config.rotary_width < config.head_width:
        what = "positions that turn a part of each head"
        raise CheckpointError(f"this layout cannot hold {what}", where=where, remedy="save it in Hugging Face's layout")
    if config.head_width * config.heads != config.hidden:
        raise CheckpointError(
            f"this layout cannot hold heads of width {config.head_width} that is not hidden / heads",
            where=where,
            remedy="save it in Hugging Face's layout",
        )
    copies = max(ranks // config.kv_heads, 1)
    for key, size in (
        ("heads", config.heads),
        ("kv_heads", config.kv_heads * copies),
        ("ffn", config.ffn),
        ("vocabulary", config.vocabulary),
    ):
        if ranks < 1 or size % ranks:
            raise CheckpointError(f"{ranks} ranks do not divide {key} ({size})", where=where, remedy="choose another")
    size = sum(math.prod(shape) * stream.dtypes[name].itemsize for name, shape in stream.shapes.items())
    with new_folder(Path(folder), size, overwrite) as beside:
        content = json.dumps(_params(config, copies), indent=2) + "\n"
        (beside / "params.json").write_text(content, encoding="utf-8")
        for rank in range(ranks):
            tensors = {_NAMES(name): _cut(config, name, stream.tensor(name), rank, ranks) for name in stream.shapes}
            if config.tied:  # required by the reference code; the file stores it once
                tensors["output.weight"] = tensors["tok_embeddings.weight"]
            torch.save(tensors, beside / f"consolidated.{rank:02d}.pth")
        write_checksums(beside)
        if tokenizer is not None:  # no checksums: users may edit the generation settings
            write_meta_tokenizer(tokenizer, beside, config.context)


def _cut(config: LlamaConfig, name: str, weight: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of a parameter, on the CPU."""
    if weight.dim() == 1:
        return weight.cpu()
    if name.endswith((*_ROTATED, *_SHARED)):
        heads = weight.unflatten(0, (-1, config.head_width))  # [heads, D, hidden]
        if name.endswith(_SHARED):
            heads = heads.repeat_interleave(max(ranks // config.kv_heads, 1), 0)
        part = heads.chunk(ranks)[rank]
        return (halves_to_interleaved(part) if name.endswith(_ROTATED) else part).flatten(0, 1).cpu().clone()
    part = weight.chunk(ranks, 1 if name.endswith(_BY_INPUT) else 0)[rank]
    return part.cpu() if ranks == 1 else part.cpu().clone()  # saving a view would save its whole base tensor


def _params(config: LlamaConfig, copies: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "dim": config.hidden,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "n_kv_heads": config.kv_heads * copies,
        "vocab_size": config.vocabulary,
        "multiple_of": 256,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "use_scaled_rope": config.rope_scaling is not None,
        "context_length": config.context,
    }
    if ffn_width(config.hidden) != config.ffn:
        # any factor that the rule rounds to the right width
        params["multiple_of"] = config.ffn & -config.ffn
        params["ffn_dim_multiplier"] = (config.ffn + 0.5) / int(8 * config.hidden / 3)
    if config.rope_scaling is not None:
        params["rope_scaling_factor"] = config.rope_scaling.factor
        params["rope_low_freq_factor"] = config.rope_scaling.low_freq_factor
        params["rope_high_freq_factor"] = config.rope_scaling.high_freq_factor
        params["rope_original_context"] = config.rope_scaling.original_context
    return params
