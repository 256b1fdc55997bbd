"""Gradients of a sharded model as one vector: remaining reductions, norm and scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.dtensors import is_dtensor, local
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.mesh import ProcessMesh
from cordillera.models.language.stages import LlamaStage

_HEAD_NORMS = ("attention.query_norm.weight", "attention.key_norm.weight")
TIED, WHOLE, EXPERTS = "gradients of the tied head", "gradients of norms", "gradients of experts"


class StageGradients:
    """Gradients of the stages that this process holds, each reduced over the ranks that share its weights."""

    def __init__(self, stages: Mapping[int, LlamaStage], mesh: ProcessMesh, ledger: Ledger) -> None:
        self._stages, self._mesh, parallel = stages, mesh, mesh.config
        config = next(iter(stages.values())).config
        self._ties_ends = config.tied and parallel.stages > 1
        ends = mesh.ends_group
        self._ends = None if ends is None else Collectives(ends, ledger, parallel.deadline_s)
        holds_part = config.experts is not None and parallel.experts == "exchange"
        copies = mesh.weights.get_group("replicate") if holds_part and parallel.replicate > 1 else None
        self._copies = None if copies is None else Collectives(copies, ledger, parallel.deadline_s)
        # weights that are whole on ranks which saw other tokens, or, of norms of heads, other heads
        self._summed: str | tuple[str, ...] = "" if parallel.sequence else _HEAD_NORMS
        is_summed = parallel.sequence or (parallel.tensor > 1 and config.head_norms)
        self._tensor = Collectives(mesh.tensor.get_group(), ledger, parallel.deadline_s) if is_summed else None

    def complete(self) -> None:
        """Add the gradients of the same weights on other ranks.

        Raises:
            PeerError: If another rank does not answer in time.
        """
        if self._tensor is not None:
            self._add_whole(self._tensor)
        if self._ties_ends:
            self._add_tied()
        if self._copies is not None:
            self._add_held(self._copies)

    def square(self) -> float:
        """Return the sum of squares of this rank's elements; each element is counted on one rank.

        The result is NaN or infinite if any element on this rank is, including copies.
        """
        place, total = self._mesh.place, 0.0
        for number, name, parameter in self._parameters():
            is_copy = place["replicate"] > 0 or (place["tensor"] > 0 and not _is_cut(parameter))
            is_tied_copy = number > 0 and name == "embedding.weight"
            if parameter.grad is not None:
                square = float(torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64).square())
                total += square * (not is_copy and not is_tied_copy)  # finite copies add 0, others make the sum NaN
        return total

    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        for _, _, parameter in self._parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    def tensors(self) -> list[Tensor]:
        """Return this rank's parts of the gradients of weights that are trained; zeros where there is none yet."""
        found = []
        for _, _, parameter in self._parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(local(parameter.grad))
        return found

    def _add_whole(self, links: Collectives) -> None:
        """Reduce gradients of weights that are not split over tensor ranks, as each rank saw other tokens or heads."""
        gradients = [
            local(parameter.grad)
            for _, name, parameter in self._parameters()
            if parameter.grad is not None and not _is_cut(parameter) and name.endswith(self._summed)
        ]
        if not gradients:  # a stage without blocks
            return
        total = links.all_reduce(WHOLE, torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(gradients, total.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def _add_held(self, links: Collectives) -> None:
        """Reduce gradients of experts that stay on their ranks; other gradients were reduced by the sharding."""
        for stage in self._stages.values():
            for layer in stage.experts.values():
                for parameter in (layer.gate, layer.up, layer.down):
                    if parameter.grad is not None:
                        links.all_reduce(EXPERTS, local(parameter.grad))

    def _add_tied(self) -> None:
        """Reduce the embedding and the tied head, if the first and last stage are different."""
        ends = [self._stages[stage] for stage in (0, self._mesh.config.stages - 1) if stage in self._stages]
        gradients = [local(stage.embedding.weight.grad) for stage in ends if stage.embedding.weight.grad is not None]
        if len(gradients) == 2:  # V schedule: both ends are on this rank
            total = torch.stack(gradients).sum(0)
            for gradient in gradients:
                gradient.copy_(total)
        elif gradients:
            assert self._ends is not None
            self._ends.all_reduce(TIED, gradients[0])

    def _parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for number, stage in self._stages.items():
            for name, parameter in stage.named_parameters():
                yield number, name, parameter


def _is_cut(parameter: Tensor) -> bool:
    """Return whether tensor ranks hold different parts of a parameter."""
    assert is_dtensor(parameter)
    return "tensor" in (parameter.device_mesh.mesh_dim_names or ())
