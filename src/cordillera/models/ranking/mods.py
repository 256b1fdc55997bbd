"""Changes of a model that allow more of it to be computed in low precision (Mods of LoKA).

Source: LoKA (arXiv 2605.10886), Mods. ``no-bias`` removes the biases of all linear maps except the prediction layers'.
``block-norm`` replaces layer norms by a root-mean-square norm over fixed blocks of features, without weights.
``hard-swish`` replaces activations by the piecewise quadratic Swish. All must be applied before training, as they
change what a model computes; applying them to a trained model raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.kernels.dense.layers import block_norm
from cordillera.models.ranking.base import ModName
from cordillera.models.ranking.heads import Heads
from cordillera.models.ranking.interactions import EmbeddingCross, LinearCompression, StackedLayerNorm
from cordillera.numerics.sites import replace

if TYPE_CHECKING:
    from cordillera.models.ranking.base import RankingModel

MODS: tuple[ModName, ...] = get_args(ModName)

_WITH_BIAS = (nn.Linear, nn.Conv2d, LinearCompression, EmbeddingCross)
_ACTIVATIONS = (nn.ReLU, nn.SiLU)


class BlockNorm(nn.Module):
    """Norm that divides blocks of features by their root mean square: ``[..., width] -> [..., width]``.

    It has no weights. The last block is smaller if ``block_size`` does not divide the width; ``eps`` is added to the
    mean square. A state dict contains the block size and fits only norms of the same size.
    """

    def __init__(self, width: int, block_size: int = 256, eps: float = 1e-5) -> None:
        super().__init__()
        if width < 1 or block_size < 1 or not eps > 0:
            raise NumericsError(f"{width} features in blocks of {block_size}, eps {eps}", where="BlockNorm")
        self.width, self.block_size, self.eps = width, block_size, eps

    def forward(self, x: Tensor) -> Tensor:
        return block_norm(x, self.block_size, self.eps)

    def get_extra_state(self) -> Tensor:
        """Return the block size, ``int64 [1]``, for state dicts."""
        return torch.tensor([self.block_size])

    def set_extra_state(self, state: Any) -> None:
        """Refuse a state dict of another block size, with a RuntimeError as ``load_state_dict`` raises for tensors."""
        if int(state) != self.block_size:
            raise RuntimeError(f"norms over blocks of {int(state)} features, not of {self.block_size}")

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return f"{self.width}, block_size={self.block_size}, eps={self.eps}"


class StackedBlockNorm(BlockNorm):
    """``BlockNorm(concat(first, second) + residual)``, which replaces :class:`StackedLayerNorm`."""

    def forward(self, first: Tensor, second: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([first, second], dim=1) + residual)


@dataclass(frozen=True)
class Modified:
    """Qualified names of the modules that lost their bias, and of the norms and activations that were replaced."""

    biases: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()


def prediction_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers whose outputs are logits: the last linear layer of every tower."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, Heads):
            for number, tower in enumerate(module.towers):
                linear = [inner for inner, one in tower.named_modules() if isinstance(one, nn.Linear)]
                found.append(f"{name}.towers.{number}.{linear[-1]}")
    return found


def _biased(model: nn.Module) -> Iterator[tuple[str, Any]]:
    kept = prediction_layers(model)
    for name, module in model.named_modules():
        if isinstance(module, _WITH_BIAS) and module.bias is not None and name not in kept:
            yield name, module


def bias_norms(model: nn.Module) -> dict[str, float]:
    """Return the Euclidean norms of the biases that ``no-bias`` removes, by the names of their modules."""
    return {name: float(torch.linalg.vector_norm(module.bias.detach().double())) for name, module in _biased(model)}


def weights_sum(model: nn.Module) -> float:
    """Return the float64 sum of the weights outside ``tables``, which shows whether a model is still as created."""
    named = [parameter for name, parameter in model.named_parameters() if not name.startswith("tables.")]
    return sum(float(parameter.detach().sum(dtype=torch.float64)) for parameter in named)


def apply_mods(model: RankingModel, mods: Sequence[str], norm_block: int = 256) -> Modified:
    """Apply mods, in place, to a model that :func:`~cordillera.models.ranking.build` has just created.

    The remaining parameters keep their values. Recipes apply mods with ``model.mods``.

    Args:
        mods: Any of ``no-bias``, ``block-norm`` and ``hard-swish``, in any order.
        norm_block: Number of features of a block of ``block-norm``.

    Raises:
        NumericsError: If a mod is unknown or finds nothing to change, or the model was trained, loaded, or not created
            by ``build``.
    """
    unknown = [name for name in mods if name not in MODS]
    if unknown:
        raise NumericsError(f"no mod is called {unknown[0]!r}", where="mods", remedy=f"one of {', '.join(MODS)}")
    if model.built != weights_sum(model):
        raise NumericsError(
            "mods change what a model computes, and this one was trained, loaded or not made by build",
            where="mods",
            remedy="name them in model.mods and train again",
        )
    found = Modified(
        _strip_biases(model) if "no-bias" in mods else (),
        _replace_norms(model, norm_block) if "block-norm" in mods else (),
        _replace_activations(model) if "hard-swish" in mods else (),
    )
    changed: dict[str, tuple[str, ...]] = {
        "no-bias": found.biases,
        "block-norm": found.norms,
        "hard-swish": found.activations,
    }
    for name in mods:
        if not changed[name]:
            raise NumericsError(
                f"{name!r} finds nothing to change in this model", where="model.mods", remedy="leave it out"
            )
    model.built = weights_sum(model)
    return found


def _strip_biases(model: nn.Module) -> tuple[str, ...]:
    found = tuple(_biased(model))
    for _, module in found:
        module.register_parameter("bias", None)
    return tuple(name for name, _ in found)


def _replace_norms(model: nn.Module, block_size: int) -> tuple[str, ...]:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    for name, module in found:
        kind = StackedBlockNorm if isinstance(module, StackedLayerNorm) else BlockNorm
        replace(model, name, kind(module.normalized_shape[-1], block_size, module.eps))
    return tuple(name for name, _ in found)


def _replace_activations(model: nn.Module) -> tuple[str, ...]:
    found = [name for name, module in model.named_modules() if isinstance(module, _ACTIVATIONS)]
    for name in found:
        replace(model, name, nn.Hardswish())
    return tuple(found)
