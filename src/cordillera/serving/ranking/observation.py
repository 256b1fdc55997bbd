"""Numbers of a ranking model's samples for drift detection: features, embeddings, layer inputs and logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import RankingBatch
from cordillera.models.ranking.base import RankingModel
from cordillera.numerics.dispatch.stored_linear import StoredLinear
from cordillera.numerics.inference.drift import DriftCheck, DriftReference


class Observer:
    """Computes the numbers and shares of a model's samples by which drift is detected.

    The numbers of a sample are its dense features, the root mean square of each feature's embedding and of each linear
    layer's input, and the logits. The shares are those of samples with a blank dense feature, with a blank or unseen
    id, and with an empty list.
    """

    def __init__(self, model: RankingModel, encoder: Encoder) -> None:
        self._model, features, schema = model, model.features, encoder.schema
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | StoredLinear)}
        self._fills = {
            features.dense.index(one.name): float(np.float32(encoder.dense_state[one.name]["fill"]))
            for one in schema.numbers
            if one.missing != "refuse"
        }
        coded = {one.name for one in (*schema.categorical, *schema.lists) if one.encoding != "identity"}
        self._coded = [i for i, feature in enumerate(features.sparse) if feature.name in coded]
        self._lists = [i for i, feature in enumerate(features.sparse) if feature.is_list]
        self.numbers = [
            *(f"feature {name}" for name in features.dense),
            *(f"embedding of {feature.name}" for feature in features.sparse),
            *(f"input of {name}" for name in self._layers),
            *(f"logit of {task}" for task in features.tasks),
        ]
        self.shares = [
            *(f"blanks of {features.dense[i]}" for i in self._fills),
            *(f"blank or unseen ids of {features.sparse[i].name}" for i in self._coded),
            *(f"empty lists of {features.sparse[i].name}" for i in self._lists),
        ]

    def observe(self, batch: RankingBatch) -> tuple[Tensor, Tensor]:
        """Score ``B`` samples; return their numbers, ``float32 [B, numbers]``, and shares, ``bool [B, shares]``."""
        model, inputs = self._model, dict[str, Tensor]()

        def hear(name: str, given: Tensor) -> None:
            if len(given) == len(batch):  # entries of histories are not those of samples
                inputs[name] = given.detach().reshape(len(batch), -1).float().square().mean(1).sqrt()

        hooks = [
            layer.register_forward_pre_hook(lambda _, given, name=name: hear(name, given[0]))
            for name, layer in self._layers.items()
        ]
        try:
            with torch.inference_mode():
                embeddings = model.look_up(batch).float()
                logits = model.score(batch.dense, embeddings).float()
        finally:
            for hook in hooks:
                hook.remove()
        layers = [inputs[name][:, None] if name in inputs else logits.new_zeros(len(batch), 1) for name in self._layers]
        numbers = torch.cat([batch.dense.float(), embeddings.square().mean(2).sqrt(), *layers, logits], 1)
        return numbers.clone(), self._shares(batch)

    def _shares(self, batch: RankingBatch) -> Tensor:
        size, offsets = len(batch), batch.sparse.offsets.long()
        unknown = torch.cat([torch.zeros(1, dtype=torch.int64), (batch.sparse.values == 0).cumsum(0)])
        found = [batch.dense[:, i].float() == fill for i, fill in self._fills.items()]
        for i in self._coded:
            own = offsets[i * size : (i + 1) * size + 1]
            found.append(unknown[own[1:]] > unknown[own[:-1]])
        for i in self._lists:
            own = offsets[i * size : (i + 1) * size + 1]
            found.append(own[1:] == own[:-1])
        return torch.stack(found, 1) if found else torch.zeros(size, 0, dtype=torch.bool)

    def reference(self, batches: list[RankingBatch]) -> DriftReference:
        """Compute the reference from samples unseen in training, of which at least two must have finite numbers."""
        seen = [self.observe(batch) for batch in batches]
        groups = [batch.groups for batch in batches if batch.groups is not None]
        return DriftReference.of(
            self.numbers,
            torch.cat([numbers for numbers, _ in seen]),
            self.shares,
            torch.cat([true for _, true in seen]),
            torch.cat(groups) if len(groups) == len(batches) else None,
        )

    def update(self, check: DriftCheck, batch: RankingBatch) -> None:
        """Add live samples to a check against a reference of this model."""
        check.update(*self.observe(batch), batch.groups)
