"""Stages of a Llama, each of which computes some of its blocks and passes the residual stream on.

The first stage holds the embedding; the last holds the norm and the head, and computes the loss. Weights keep their
names in the whole model. A tied head is the embedding: if the first and the last stage are different, each holds a
copy, and the trainer adds the gradients of the copies.

Source: Grattafiori et al. 2024, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.dtensors import is_dtensor, local
from cordillera.distributed.vocabulary_loss import IGNORED, label_log_probabilities, summed_cross_entropy
from cordillera.errors import CheckpointError
from cordillera.models.language.llama import Block, Core, Llama, LlamaConfig, document_positions, draw_weight
from cordillera.models.language.moe import ExpertLayer
from cordillera.models.language.rope import rope_table


def cut_layers(layers: int, stages: int) -> list[range]:
    """Return the blocks of each stage, as equal in number as possible; at most two ``stages`` more than ``layers``.

    Stages at the ends, which also hold the embedding or the head, get fewer, or none.
    """
    even, left = divmod(layers, stages)
    # stages from the middle outwards; the last stage comes last, as it has the head
    outwards = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))
    sizes = [even + (stage in outwards[:left]) for stage in range(stages)]
    return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


class Objective(Protocol):
    """Loss of a last stage."""

    def __call__(
        self, stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the sum of the losses of a microbatch, a scalar; arguments are those of :meth:`LlamaStage.forward`.

        ``hidden [T, hidden]`` is the input of the head.
        """
        ...


class LlamaStage(nn.Module):
    """Consecutive blocks of a Llama, with the embedding in stage 0, and norm and head in the last.

    Args:
        model: Model whose modules the stage uses; created under ``torch.device("meta")``, it takes no memory.

    Attributes:
        vocabulary_links: Collectives between the ranks over which the head is split; None if it is whole.
        loss_rows: Number of rows whose logits exist at a time.
        objective: Loss of the last stage in place of the cross entropy of the labels; None for that.
        tapped: Outputs of the blocks that a drafter needs in the present microbatch, by their number.
        tokens: Tokens of the present microbatch, if there is a drafter.
    """

    def __init__(self, model: Llama, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.config = model.config
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.vocabulary_links: Collectives | None = None
        self.loss_rows = 1024
        self.objective: Objective | None = None
        if self.is_first or (self.is_last and self.config.tied and not self.config.scores):
            self.embedding = model.embedding
        self.layers = nn.ModuleDict(
            {str(number): model.layers[number] for number in cut_layers(self.config.layers, stages)[stage]}
        )
        if self.is_last:
            self.norm = model.norm
            self.head, self.score, self.draft = model.head, model.score, model.draft
            self.tokens = torch.empty(0, dtype=torch.int64)
            self.tapped: dict[int, Tensor] = {}

    @property
    def blocks(self) -> list[Block]:
        """Blocks of the stage, in order."""
        return list(self.layers.values())  # type: ignore[arg-type]

    @property
    def experts(self) -> dict[int, ExpertLayer]:
        """Layers of experts by the number of their block; none if the model has no experts."""
        if self.config.experts is None:
            return {}
        return {
            int(number): block.feed_forward
            for number, block in self.layers.items()
            if isinstance(block.feed_forward, ExpertLayer)
        }

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head in the last stage, ``[vocabulary, hidden]``."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        positions: Tensor | None,
        labels: Tensor,
        core: Core | None = None,
        documents: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Compute the residual stream or, in the last stage, the sum of the losses.

        A ``positions`` of None counts from 0 in every document; otherwise it is ``int64 [T]``.

        Args:
            x: Tokens ``int64 [T]`` for the first stage, otherwise the output of the previous stage, ``[T, hidden]``. If
                a sequence is split over the ranks that share matrices, this rank's rows of it.
            offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.
            labels: Target of each token, ``int64 [T]``, or :data:`~cordillera.distributed.vocabulary_loss.IGNORED`;
                read by the last stage, and by routers of experts.
            core: Function that replaces attention's core if documents are spread over devices.
            documents: Values of each document, ``[B]``, by name, for the objective.

        Returns:
            Residual stream ``[T, hidden]``, or a scalar in 32 bits.
        """
        if positions is None:
            positions = document_positions(offsets, x.device)
        table = rope_table(self.config, positions)
        taps = () if not self.is_last or self.draft is None else self.draft.taps
        if taps:
            self.tokens = x
        if self.is_first:
            x = self.embedding(x)  # [T, hidden]
        has_target = None if self.config.experts is None else labels != IGNORED
        for number, block in self.layers.items():
            x = block(x, offsets, table, core, has_target)
            if int(number) in taps:
                self.tapped[int(number)] = x
        if not self.is_last:
            return x
        hidden = self.norm(x)
        if self.objective is not None:
            return self.objective(self, hidden, offsets, labels, documents or {})
        return summed_cross_entropy(hidden, local(self.head_weight), labels, self.vocabulary_links, self.loss_rows)

    def score_of(self, hidden: Tensor) -> Tensor:
        """Return the score of each row, ``[n]``, of a model with scores; ``hidden [n, hidden]`` is the head's input."""
        assert self.score is not None
        return F.linear(hidden, local(self.score.weight)).squeeze(1)

    def log_probabilities(self, hidden: Tensor, labels: Tensor, vocabulary: int | None = None) -> Tensor:
        """Return the log-probability of each label, ``[T]``, and 0 where it is ignored, in the last stage.

        ``hidden [T, hidden]`` is the head's input, ``labels`` are those of :meth:`forward`. The first ids of the
        ``vocabulary`` can follow; None for all.
        """
        return label_log_probabilities(hidden, local(self.head_weight)[:vocabulary], labels, self.loss_rows)

    @torch.no_grad()
    def fill(self, weights: Callable[[str, torch.Size], Tensor]) -> None:
        """Set every weight, one at a time as a whole, to ``weights(name, shape)``; each device keeps its part.

        Raises:
            CheckpointError: If the values have another shape.
        """
        for name, parameter in self.named_parameters():
            whole = weights(name, parameter.shape)
            if whole.shape != parameter.shape:
                raise CheckpointError(f"has shape {list(whole.shape)}, not {list(parameter.shape)}", where=name)
            local(parameter).copy_(part_of(whole, parameter))

    def init_weights(self, seed: int = 0) -> None:
        """Draw the weights that ``Llama.init_weights`` draws from this ``seed``, however the model is split."""

        def drawn(name: str, shape: torch.Size) -> Tensor:
            whole = torch.empty(shape)
            draw_weight(whole, name, self.config, seed)
            return whole

        self.fill(drawn)


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a ``whole`` tensor that is cut as a ``parameter`` of a stage is."""
    if not is_dtensor(parameter):
        return whole
    mesh = parameter.device_mesh
    assert mesh.mesh_dim_names is not None
    cuts = dict(zip(mesh.mesh_dim_names, parameter.placements, strict=True))
    for dimension in ("tensor", "fsdp"):  # the matrix is split first, then each rank's part of it
        if dimension in cuts and not cuts[dimension].is_replicate():
            along = cuts[dimension].dim  # type: ignore[attr-defined]
            parts = whole.chunk(mesh[dimension].size(), along)
            place = mesh.get_local_rank(dimension)
            whole = parts[place] if place < len(parts) else whole.narrow(along, 0, 0)
    return whole


def cut_model(config: LlamaConfig, stages: int, held: list[int]) -> dict[int, LlamaStage]:
    """Create the stages ``held`` of ``stages`` of a model of ``config``, without memory until parallelized."""
    with torch.device("meta"):
        # one model for each stage, as the first and the last stage of a tied model split the embedding separately
        return {stage: LlamaStage(Llama(config), stage, stages) for stage in held}
