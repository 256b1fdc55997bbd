"""Parameters of a model, one at a time, for what writes checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cordillera.errors import CheckpointError
from cordillera.models.language.checkpoints.source import Source, parameter_shapes
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.moe import UNTRAINED

OnTensor = Callable[[int, int], object]


class WeightStream:
    """Parameters of a model that are read when they are written, so that memory never holds all of them.

    Attributes:
        config: Configuration of the model.
        dtypes: Dtype of each parameter, by name, in order.
        shapes: Shape of each parameter, by name, in order.
        where: Place that errors name.
    """

    def __init__(
        self, config: LlamaConfig, dtypes: Mapping[str, torch.dtype], read: Callable[[str], Tensor], where: str
    ) -> None:
        self.config, self.dtypes, self.where, self._read = config, dtypes, where, read
        self.shapes = parameter_shapes(config)
        self._squares = self._errors = 0.0

    @classmethod
    def of_model(cls, model: Llama) -> WeightStream:
        """Return the parameters of a model in memory, in their dtypes."""
        parameters = dict(model.named_parameters())
        dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        return cls(model.config, dtypes, lambda name: parameters[name].detach(), "the model")

    @classmethod
    def of_source(
        cls, source: Source, dtype: torch.dtype, on_tensor: OnTensor | None = None, times: int = 1
    ) -> WeightStream:
        """Return the parameters of an open checkpoint without adapters; a drafter is left out.

        Args:
            source: The checkpoint.
            dtype: Dtype to which they are cast.
            on_tensor: Function that is called after each one with the number of values so far and of all.
            times: How often each one is read, for the number of all values.
        """
        config = source.config.model_copy(update={"draft": None})
        shapes = parameter_shapes(config)
        wide = torch.promote_types(source.dtype or torch.float32, torch.float32)
        done, total = 0, times * sum(map(math.prod, shapes.values()))

        def read(name: str) -> Tensor:
            nonlocal done
            weight = torch.empty(shapes[name], dtype=dtype if source.dtype == dtype else wide)
            source.read(name, weight)
            stream.finite(name, weight)
            done += weight.numel()
            if on_tensor is not None:
                on_tensor(min(done, total), total)
            return weight

        stream = cls(config, dict.fromkeys(shapes, dtype), read, str(source.path))
        return stream

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a parameter in a ``dtype``; None for its own.

        Raises:
            CheckpointError: If it holds NaN or infinity in another dtype than its own, or in a checkpoint.
        """
        weight = self._read(name)
        found = weight.to(dtype or self.dtypes[name])
        if found.dtype != weight.dtype:
            self.finite(name, found)
            self.measure(weight, found)
        return found

    def finite(self, name: str, weight: Tensor) -> None:
        """Raise CheckpointError unless a parameter is finite."""
        low, high = torch.aminmax(weight)  # NaN propagates
        if not (low.isfinite() and high.isfinite()):
            raise CheckpointError(
                f"{name} holds NaN or infinity as {str(weight.dtype).removeprefix('torch.')}",
                where=self.where,
                remedy="write bfloat16 or float32; if that fails too, the weights are damaged",
            )

    def measure(self, before: Tensor, after: Tensor) -> None:
        """Add a parameter and what is written of it to the :attr:`error`."""
        wide = before.double()
        self._squares += wide.square().sum().item()
        self._errors += (after.double() - wide).square_().sum().item()

    @property
    def error(self) -> float:
        """Root mean square of what writing has changed, relative to that of the parameters that were changed."""
        return math.sqrt(self._errors / self._squares) if self._errors else 0.0


def stream_of(model: Llama | WeightStream) -> WeightStream:
    """Return the parameters of a model, or those that are given."""
    return model if isinstance(model, WeightStream) else WeightStream.of_model(model)


def check_experts(stream: WeightStream, where: str | Path) -> None:
    """Refuse experts that no published layout holds: a shared one, or a bias for the choice."""
    experts = stream.config.experts
    if experts is not None and experts.shared:
        raise CheckpointError(
            f"this layout has no shared expert; this model has one of width {experts.shared}", where=str(where)
        )
    biased = [name for name in stream.shapes if name.endswith(UNTRAINED) and stream.tensor(name).any()]
    if biased:
        raise CheckpointError(
            f"this layout has no bias for the choice of experts; {biased[0]} (of {len(biased)}) is not 0",
            where=str(where),
            remedy="balance a model for export by training.experts.balance_loss, with bias_rate = 0",
        )
