"""Optimizer of dense parameters, and the learning-rate schedule of dense parameters and tables."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from cordillera.embeddings.tables import EmbeddingTables


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the dense optimizer: all except embedding tables, which update themselves."""
    owned = {id(p) for module in model.modules() if isinstance(module, EmbeddingTables) for p in module.parameters()}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned}


def embedding_tables(model: nn.Module) -> dict[str, EmbeddingTables]:
    """Return the embedding tables of a model by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, EmbeddingTables)}


def build_adamw(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Build AdamW over the dense parameters of ``model``; tensors of fewer than two dimensions have no weight decay.

    Args:
        learning_rate: Peak rate; the schedule scales it.
        betas: Decay rates of the two moments.
        eps: Term added to the denominator.
        weight_decay: Decoupled decay per step, multiplied by the learning rate (Loshchilov and Hutter 2019).
    """
    groups: dict[Any, dict[str, Any]] = {}
    for parameter in dense_parameters(model).values():
        matrix = parameter.dim() >= 2
        # tensors of different meshes cannot be updated by one call
        group = groups.setdefault(
            (not matrix, getattr(parameter, "device_mesh", None)),
            {"params": [], "weight_decay": weight_decay if matrix else 0.0},
        )
        group["params"].append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])  # matrices first
    return torch.optim.AdamW([group for _, group in ordered], lr=learning_rate, betas=betas, eps=eps, fused=True)


def schedule(
    step: int, total: int, *, warmup: int, decay: Literal["none", "linear", "cosine"], floor: float = 0.0
) -> float:
    """Return the factor of all learning rates at one step, in (0, 1].

    Args:
        step: Number of steps taken before this one.
        total: Number of steps of the whole training.
        warmup: Number of steps over which the factor rises linearly to 1; the first step uses ``1 / warmup``.
        decay: Decay after that.
        floor: Factor at the last step, with ``linear`` and ``cosine``.
    """
    if step < warmup:
        return (step + 1) / warmup
    if decay == "none":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * shape
