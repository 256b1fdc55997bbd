"""Linear layers trained by a plan, each of whose three products has its own kernel (Dispatch of LoKA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.candidates import Candidate, candidate
from cordillera.numerics.dispatch.dispatch import planned_sites
from cordillera.numerics.dispatch.plan import PASSES, Pass, PrecisionPlan
from cordillera.numerics.dispatch.training_products import by_kernel, exact, unusable
from cordillera.numerics.sites import replace


class _Products(torch.autograd.Function):
    """Forward and both gradients, each by the layer's kernel for it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: TrainedLinear, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.dtype, ctx.of_bias = layer, dtype, None if bias is None else bias.dtype
        return layer.compute("forward", x, weight, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, of_input, of_weight, of_bias = ctx.layer, None, None, None
        if ctx.needs_input_grad[0]:
            of_input = layer.compute("input_gradient", grad, weight, None, ctx.dtype).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = layer.compute("weight_gradient", grad, x, None, ctx.dtype).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0).to(ctx.of_bias)
        return of_input, of_weight, of_bias, None, None


class TrainedLinear(nn.Module):
    """Linear layer whose three products are computed by the kernels of a plan; it shares the parameters of the layer.

    A product is computed as in ``nn.Linear``, in autocast's dtype if there is one, if the plan says fp32, has no kernel
    for the number of rows, or its kernel does not support the shape or a value that is not finite. ``unplanned`` counts
    all cases but the first. Within autocast, all results have its dtype. In evaluation mode the layer is ``nn.Linear``.
    There are no second derivatives.
    """

    def __init__(self, linear: nn.Linear, name: str, plan: PrecisionPlan) -> None:
        super().__init__()
        if linear.weight.dtype != torch.float32:
            raise NumericsError(f"{name} is {linear.weight.dtype}, plans train float32 layers", where="plan")
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.unplanned: dict[Pass, int] = dict.fromkeys(PASSES, 0)
        self._kernels: dict[Pass, list[tuple[int, Candidate]]] = {
            of: [
                (choice.rows, candidate(choice.kernel))
                for choice in sorted(plan.choices, key=lambda c: c.rows)
                if (choice.site, choice.of) == (name, of)
            ]
            for of in PASSES
        }
        for kernels in self._kernels.values():
            for _, one in kernels:
                if one.calibrated:
                    raise NumericsError(f"{name} cannot be trained by {one.name}: it is calibrated", where="plan")

    def compute(self, of: Pass, first: Tensor, second: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute a product of ``training_products.exact`` by its kernel, with a result of ``dtype``."""
        kernel = next((one for most, one in self._kernels[of] if len(first) <= most), None)
        if kernel is None or kernel.name != "fp32":
            if kernel is not None and not unusable(kernel, of, first.shape, second.shape, first.device):
                single = None if bias is None else bias.float()
                try:
                    return by_kernel(kernel, of, first.float(), second.float(), single).to(dtype)
                except NumericsError:  # NaN and infinity propagate as without a plan
                    pass
            self.unplanned[of] += 1
        return exact(of, first.to(dtype), second.to(dtype), None if bias is None else bias.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            rows = _Products.apply(x.reshape(-1, self.in_features), self.weight, self.bias, self, dtype)
        return rows.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        kernels = {of: ", ".join(f"{one.name} to {most}" for most, one in own) for of, own in self._kernels.items()}
        return f"in_features={self.in_features}, out_features={self.out_features}, {kernels}"


@dataclass(frozen=True)
class Applied:
    """Layers of a model by what :func:`apply_for_training` did with them.

    Attributes:
        planned: Layers with a kernel of the plan for at least one product, by name.
        left: Names of the other linear layers, of which the plan does not contain those in ``unknown``.
    """

    planned: dict[str, TrainedLinear]
    left: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def unplanned(self) -> int:
        """Number of products so far for which a layer of the plan had no kernel."""
        return sum(sum(layer.unplanned.values()) for layer in self.planned.values())


def apply_for_training(model: nn.Module, plan: PrecisionPlan) -> Applied:
    """Replace the products of a model's linear layers, in place, by the kernels of a plan for training.

    Parameters remain the same objects with the same names, so that optimizers and state dicts stay valid. Layers for
    which the plan names no kernel but fp32 are not changed and train to the same bits as before.

    Args:
        model: Model in float32, before ``torch.compile`` or any wrapper.

    Raises:
        NumericsError: If the plan is for scoring or another machine, or names a layer that the model lacks or has with
            another size.
    """
    plan.check_purpose("training")
    own = planned_sites(model, plan)
    plan.check_machine(next((own[name].weight.device for name in plan.sites), torch.device("cpu")))
    lowered = {choice.site for choice in plan.choices if choice.kernel != "fp32"}
    made = {name: TrainedLinear(own[name], name, plan) for name in own if name in lowered}
    for name, layer in made.items():
        replace(model, name, layer)
    left = tuple(name for name in own if name not in made)
    return Applied(made, left, tuple(name for name in left if name not in plan.sites))
