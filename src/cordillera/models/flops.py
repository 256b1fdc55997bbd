"""Parameters and floating-point operations of any ranking model, counted in one way for all."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from cordillera.data.ranking.features import RankingBatch
from cordillera.models.counting import forward_flops
from cordillera.models.ranking.base import RankingModel


@dataclass(frozen=True)
class FlopCount:
    """Size of a model in trained parameters outside and inside of the embedding tables, and its operations per example.

    Attributes:
        forward_macs: Number of multiply-accumulates of one forward pass.
        forward_flops: Twice ``forward_macs``.
        training_flops: Three times ``forward_flops``: a backward pass costs two forward passes.
    """

    parameters: int
    embedding_parameters: int
    forward_macs: int
    forward_flops: int
    training_flops: int

    def to_dict(self) -> dict[str, int]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def count(model: RankingModel, batch: RankingBatch) -> FlopCount:
    """Count a model's parameters and its operations per example.

    See :func:`forward_flops` for the counted operations. The model's mode, gradients and random state are not changed.

    Args:
        batch: Batch of at least one sample; the values of its ids do not matter.
    """
    embedding_parameters = model.tables.num_weights
    own = {id(parameter) for parameter in model.tables.parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in own)
    # norms over the batch need no second sample in evaluation mode
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        flops = forward_flops(model, batch) // len(batch)
    finally:
        for module, mode in training.items():
            module.training = mode
    return FlopCount(parameters, embedding_parameters, flops // 2, flops, 3 * flops)
