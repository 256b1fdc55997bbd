"""Optimizer of dense parameters, and the learning-rate schedule of dense parameters and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cordillera.distributed.dtensors import local
from cordillera.embeddings.tables import EmbeddingTables


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the dense optimizer: all except embedding tables, which update themselves."""
    owned = {id(p) for module in model.modules() if isinstance(module, EmbeddingTables) for p in module.parameters()}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned}


def embedding_tables(model: nn.Module) -> dict[str, EmbeddingTables]:
    """Return the embedding tables of a model by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, EmbeddingTables)}


def build_adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    muon: bool = False,
) -> torch.optim.AdamW:
    """Build AdamW over the dense parameters of ``model``; tensors of fewer than two dimensions have no weight decay.

    Args:
        learning_rate: Peak rate; the schedule scales it.
        betas: Decay rates of the two moments.
        eps: Term added to the denominator.
        weight_decay: Decoupled decay per step, multiplied by the learning rate (Loshchilov and Hutter 2019).
        muon: Whether matrices other than a language model's ``embedding`` and ``head`` are updated by :class:`Muon`;
            they must be whole in this process.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in dense_parameters(model).items():
        matrix = parameter.dim() >= 2
        is_hidden = muon and parameter.dim() == 2 and not name.endswith(("embedding.weight", "head.weight"))
        # tensors of different meshes cannot be updated by one call
        group = groups.setdefault(
            (not matrix, not is_hidden, getattr(parameter, "device_mesh", None)),
            {"params": [], "weight_decay": weight_decay if matrix else 0.0} | ({"muon": is_hidden} if muon else {}),
        )
        group["params"].append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0][:2])  # matrices first
    kind = Muon if muon else torch.optim.AdamW
    return kind([group for _, group in ordered], lr=learning_rate, betas=betas, eps=eps, fused=True)


def moments_of(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], prefix: str = "optimizer."
) -> dict[str, Tensor]:
    """Return what an optimizer keeps of named ``parameters``, by ``prefix``, name of the parameter, and key."""
    return {
        f"{prefix}{name}.{key}": torch.as_tensor(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    prefix: str = "optimizer.",
    cut: Callable[[Tensor, Tensor], Tensor] = lambda parameter, moment: moment,
) -> None:
    """Restore what :func:`moments_of` returned; others among the ``tensors`` are ignored.

    Args:
        optimizer: Optimizer of the parameters.
        parameters: Parameters by name.
        tensors: Tensors of a checkpoint, of which copies are made.
        prefix: Begin of the moments' names.
        cut: Function that returns the part of a moment that belongs to what this process holds of a parameter.
    """
    for name, parameter in parameters.items():
        begin = f"{prefix}{name}."
        moments = {key.removeprefix(begin): one for key, one in tensors.items() if key.startswith(begin)}
        if moments:
            # AdamW's fused kernel needs moments on the parameter's device and the step count as a tensor.
            optimizer.state[parameter] = {
                key: cut(parameter, one.clone().to(parameter.device)) for key, one in moments.items()
            }


class Muon(torch.optim.AdamW):
    """Muon for matrices of groups with ``muon``, AdamW for the rest (Jordan et al. 2024; Liu et al. 2025 for sizes).

    A matrix moves by the nearest orthogonal one to its momentum, times ``0.2 sqrt(max(rows, columns))``: in all
    directions as far, and on the mean as far as AdamW moves. The state is that of AdamW, ``exp_avg`` of which is the
    momentum; ``exp_avg_sq`` of a matrix stays 0.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all tensors that have a gradient; gradients of Muon's matrices are gone afterwards."""
        for group in self.param_groups:
            for weight in group["params"] if group["muon"] else ():
                if weight.grad is None:
                    continue
                own, gradient = local(weight), local(weight.grad)
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), device=own.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] += 1
                momentum = local(state["exp_avg"]).mul_(_MOMENTUM).add_(gradient)
                update = orthogonal(gradient + _MOMENTUM * momentum)
                own.mul_(1 - group["lr"] * group["weight_decay"])
                own.add_(update, alpha=-0.2 * math.sqrt(max(own.shape)) * group["lr"])
                weight.grad = None
        return super().step(closure)


_MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the iteration (Jordan et al. 2024)


def orthogonal(matrix: Tensor, rounds: int = 5) -> Tensor:
    """Return about the nearest matrix whose singular values are all 1: they are between 0.6 and 1.3.

    Newton and Schulz's iteration with the coefficients of Jordan et al. 2024, in float32; a matrix of zeros stays.

    Args:
        matrix: A matrix of any shape.
        rounds: Number of steps of the iteration.
    """
    a, b, c = _QUINTIC
    x = matrix.float()
    x = x.T if len(matrix) > matrix.shape[1] else x
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if len(matrix) > matrix.shape[1] else x).to(matrix.dtype)


def schedule(
    step: int, total: int, *, warmup: int, decay: Literal["none", "linear", "cosine"], floor: float = 0.0
) -> float:
    """Return the factor of all learning rates at one step, in (0, 1].

    Args:
        step: Number of steps taken before this one.
        total: Number of steps of the whole training.
        warmup: Number of steps over which the factor rises linearly to 1; the first step uses ``1 / warmup``.
        decay: Decay after that.
        floor: Factor after the last step, with ``linear`` and ``cosine``.
    """
    if step < warmup:
        return (step + 1) / warmup
    if decay == "none":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * shape
