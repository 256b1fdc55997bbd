"""Storage of weights between steps that compute in a short format: a master copy, none, or two halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cordillera.errors import CheckpointError, NumericsError
from cordillera.numerics.emulation.emulation import EmulationConfig
from cordillera.numerics.emulation.scaling import round_scaled, scale_of
from cordillera.numerics.formats.mx import round_to_blocks
from cordillera.numerics.formats.rounding import Rounding, random_bits, round_to


@torch.no_grad()
def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into a bfloat16 upper half and an int16 lower half with the remaining bits (split SGD).

    Nothing is rounded: the upper half is ``x`` toward zero, or infinity for a NaN whose payload is in the lower half.
    """
    bits = x.contiguous().view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), (bits & 0xFFFF).to(torch.int16)


@torch.no_grad()
def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Join the halves of :func:`split` to float32, bit for bit."""
    bits = (upper.contiguous().view(torch.int16).to(torch.int32) << 16) | (lower.to(torch.int32) & 0xFFFF)
    return bits.view(torch.float32)


class WeightStorage:
    """Storage of weights by :attr:`EmulationConfig.weights`, around any optimizer.

    Between updates the given tensors hold the values for computation: numbers of the format, times a scale of their row
    or block if the format has scales. They get their full precision back by :meth:`before_update` and lose it again by
    :meth:`after_update`. With scales and ``master``, they always hold the float32 master, which each product scales and
    rounds again.

    Args:
        weights: float32 tensors by name, changed in place; stochastic rounding depends on the order of the names.
    """

    def __init__(self, config: EmulationConfig, weights: Mapping[str, Tensor]) -> None:
        if config.weights == "split" and config.format != "bf16":
            raise NumericsError(
                f"halves of float32 are bf16, not {config.format}",
                where="training.emulate.weights",
                remedy="use format = 'bf16', or weights = 'master'",
            )
        for name, weight in weights.items():
            if weight.dtype != torch.float32:
                raise NumericsError(f"must be float32, is {weight.dtype}", where=name)
        self.config = config
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self._kept: dict[str, Tensor] = {}
        self._is_rounded = config.weights != "master" or config.scale == "none"
        if config.weights == "master" and self._is_rounded:
            self._kept = {name: torch.empty_like(weight) for name, weight in self.weights.items()}
        elif config.weights == "split":
            self._kept = {name: torch.empty_like(weight, dtype=torch.int16) for name, weight in self.weights.items()}
        self.after_update(0)

    @torch.no_grad()
    def before_update(self, rows: Mapping[str, Tensor] | None = None) -> None:
        """Restore the full precision of weights, or only of the rows that will change, int64 by name."""
        if not self._is_rounded:
            return
        for name, weight in self.weights.items():
            at = _where(rows, name)
            if self.config.weights == "master":
                weight[at] = self._kept[name][at]
            elif self.config.weights == "split":
                weight[at] = join(weight[at].to(torch.bfloat16), self._kept[name][at])

    @torch.no_grad()
    def after_update(self, step: int, rows: Mapping[str, Tensor] | None = None) -> None:
        """Store weights according to the policy, and leave the values for computation in them.

        ``step`` is the number of the update, for stochastic rounding; ``rows`` are those of :meth:`before_update`.
        """
        if not self._is_rounded:
            return
        for number, (name, weight) in enumerate(self.weights.items()):
            at = _where(rows, name)
            updated = weight[at]
            if self.config.weights == "split":
                upper, self._kept[name][at] = split(updated)
                weight[at] = upper.float()
                continue
            if self.config.weights == "master":
                self._kept[name][at] = updated
            weight[at] = self._round(updated, number, step, None if at is ... else at)

    def full(self, name: str) -> Tensor:
        """Return a weight in float32, the precision of updates; the result must not be written to."""
        if self.config.weights == "split":
            return join(self.weights[name].to(torch.bfloat16), self._kept[name])
        return self._kept.get(name, self.weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors stored beside the weights: float32 masters, int16 lower halves, or none."""
        return dict(self._kept)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`state_dict`; the owner of the weights restores the weights themselves."""
        for name, kept in self._kept.items():
            found = state.get(name)
            if found is None or found.shape != kept.shape or found.dtype != kept.dtype:
                raise CheckpointError(
                    f"what is kept beside the weights must be {kept.dtype} of {tuple(kept.shape)}, found "
                    f"{'nothing' if found is None else f'{found.dtype} of {tuple(found.shape)}'}",
                    where=name,
                    remedy="resume with the training.emulate.weights that the run began with",
                )
        for name, kept in self._kept.items():
            kept.copy_(state[name])

    def _round(self, x: Tensor, number: int, step: int, rows: Tensor | None) -> Tensor:
        rounding = self.config.rounding_of_weights
        random = None
        if rounding is Rounding.stochastic:
            # keyed by the position in the whole weight, so that it does not matter which other rows change
            row_size = max(1, x[0].numel()) if x.shape[0] else 1
            index = torch.arange(x.shape[0], device=x.device) if rows is None else rows
            columns = torch.arange(row_size, device=x.device)
            random = random_bits(self.config.seed, number, index[:, None], columns, step).view(x.shape)
        config = self.config
        if config.scale == "block":
            return round_to_blocks(x, config.target, rounding, random=random)
        how: dict[str, Any] = {"rounding": rounding, "flush_subnormals": config.flush_subnormals, "random": random}
        if config.scale == "none":
            return round_to(x, config.target, **how)
        # one scale for each row, whatever products use, so that updating some rows leaves the others unchanged
        scale = scale_of(x, config.target, -1, power_of_two=config.power_of_two)
        return round_scaled(x, scale, config.target, **how) * scale


def _where(rows: Mapping[str, Tensor] | None, name: str) -> Tensor | Any:
    return ... if rows is None or name not in rows else rows[name]
