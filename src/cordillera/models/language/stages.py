"""A Llama cut into stages, each of which computes some of its blocks and hands the residual stream on.

The first stage holds the embedding, the last the norm and the head, and computes the loss. Weights keep the names that
they have in the whole model. A tied head is the embedding: where first and last stage are two, each holds a copy, and
the copies' gradients are added up by whoever trains them.

Source: Grattafiori et al. 2024, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.tensor_parallel import local
from cordillera.distributed.vocabulary_loss import summed_cross_entropy
from cordillera.errors import CheckpointError
from cordillera.models.language.llama import (
    Block,
    Core,
    Llama,
    LlamaConfig,
    document_positions,
    draw_weight,
    rope_table,
)


def cut_layers(layers: int, stages: int) -> list[range]:
    """Which blocks each stage holds: as equally many as can be, fewer at the ends, which hold more beside them.

    Args:
        layers: Blocks of the model.
        stages: At most as many.
    """
    even, left = divmod(layers, stages)
    # stages from the middle outwards, the last one last of all: it has the head
    outwards = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))
    sizes = [even + (stage in outwards[:left]) for stage in range(stages)]
    return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(stages)]


class LlamaStage(nn.Module):
    """Consecutive blocks of a Llama, with what comes before the first and after the last.

    Args:
        model: Whose modules it takes; made under ``torch.device("meta")``, it takes no memory.
        stage: Which one, from 0.
        stages: How many there are.

    Attributes:
        config: The model's.
        is_first: Whether it reads tokens.
        is_last: Whether it gives the loss.
        vocabulary_links: To the ranks over which the head is cut; None where it is whole.
        loss_rows: Of whose logits as many exist at a time.
    """

    def __init__(self, model: Llama, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.config = model.config
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.vocabulary_links: Collectives | None = None
        self.loss_rows = 1024
        if self.is_first or (self.is_last and self.config.tied):
            self.embedding = model.embedding
        self.layers = nn.ModuleDict(
            {str(number): model.layers[number] for number in cut_layers(self.config.layers, stages)[stage]}
        )
        if self.is_last:
            self.norm = model.norm
            self.head = model.head

    @property
    def blocks(self) -> list[Block]:
        """In order."""
        return list(self.layers.values())  # type: ignore[arg-type]

    @property
    def head_weight(self) -> Tensor:
        """Of the last stage: ``[vocabulary, hidden]``."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self, x: Tensor, offsets: Tensor, positions: Tensor | None, labels: Tensor, core: Core | None = None
    ) -> Tensor:
        """The residual stream, or of the last stage the sum of the losses.

        Args:
            x: Tokens ``int64 [T]`` for the first stage, else what the stage before gave, ``[T, hidden]``. Where a
                sequence is cut over the ranks that share matrices, this rank's rows of it.
            offsets: ``int64 [B + 1]``, where documents begin.
            positions: ``int64 [T]``, of each token in its document; None to count from 0.
            labels: ``int64 [T]``: each token's target, or
                :data:`~cordillera.distributed.vocabulary_loss.IGNORED`; read by the last stage alone.
            core: What takes the place of attention's core, where documents are spread over devices.

        Returns:
            ``[T, hidden]``, or a scalar in 32 bits.
        """
        if positions is None:
            positions = document_positions(offsets, x.device)
        table = rope_table(self.config, positions)
        if self.is_first:
            x = self.embedding(x)  # [T, hidden]
        for block in self.layers.values():
            x = block(x, offsets, table, core)
        if not self.is_last:
            return x
        weight = local(self.head_weight)
        return summed_cross_entropy(self.norm(x), weight, labels, self.vocabulary_links, self.loss_rows)

    @torch.no_grad()
    def fill(self, weights: Callable[[str, torch.Size], Tensor]) -> None:
        """Give every weight its values, whole one after whole one; each device keeps its part.

        Args:
            weights: From a weight's name in the model and its whole shape to its values; called for each weight of this
                stage.

        Raises:
            CheckpointError: If the values are of another shape.
        """
        for name, parameter in self.named_parameters():
            whole = weights(name, parameter.shape)
            if whole.shape != parameter.shape:
                raise CheckpointError(f"has shape {list(whole.shape)}, not {list(parameter.shape)}", where=name)
            if not isinstance(parameter, DTensor):
                parameter.copy_(whole)
                continue
            mesh = parameter.device_mesh
            assert mesh.mesh_dim_names is not None
            cuts = dict(zip(mesh.mesh_dim_names, parameter.placements, strict=True))
            for dimension in ("tensor", "fsdp"):  # the matrix is cut first, then what each rank has of it
                if dimension in cuts and not cuts[dimension].is_replicate():
                    along = cuts[dimension].dim  # type: ignore[attr-defined]
                    parts = whole.chunk(mesh[dimension].size(), along)
                    place = mesh.get_local_rank(dimension)
                    whole = parts[place] if place < len(parts) else whole.narrow(along, 0, 0)
            parameter.to_local().copy_(whole)

    def init_weights(self, seed: int = 0) -> None:
        """Draw all weights anew, as :meth:`~cordillera.models.language.llama.Llama.init_weights` of the whole does.

        Args:
            seed: The same seed gives the same weights, however the model is cut.
        """

        def drawn(name: str, shape: torch.Size) -> Tensor:
            whole = torch.empty(shape)
            draw_weight(whole, name, self.config, seed)
            return whole

        self.fill(drawn)


def cut_model(config: LlamaConfig, stages: int, held: list[int]) -> dict[int, LlamaStage]:
    """Stages without memory, to be given it when they have been parallelised.

    Args:
        config: Of the whole model.
        stages: How many.
        held: Which of them are wanted.
    """
    with torch.device("meta"):
        # a model each: first and last stage of a tied one must not share what each cuts for itself
        return {stage: LlamaStage(Llama(config), stage, stages) for stage in held}
