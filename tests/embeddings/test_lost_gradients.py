"""A model that reads the weight of its tables itself is told so, as nothing would apply that gradient."""

from __future__ import annotations

import pytest
import torch

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import TrainingError
from cordillera.jagged import JaggedBatch


def test_a_gradient_of_the_weight_itself_is_not_lost_in_silence() -> None:
    features = FeatureSpec((), (SparseFeature("item", "item"),), {"item": 5}, ("click",))
    tables = EmbeddingTables(features, 4, TablesConfig())
    before = tables.weight.detach().clone()
    tables.weight[torch.tensor([1, 3])].sum().backward()
    with pytest.raises(TrainingError, match=r"read weight itself.*\n.*unpooled\(feature, ids\)"):
        tables.update()
    assert torch.equal(tables.weight, before)
    tables.weight.grad = None
    batch = JaggedBatch(("item",), torch.tensor([1, 3]), torch.tensor([0, 1, 2]))
    tables(batch).sum().backward()
    tables.update()
    assert not torch.equal(tables.weight, before)
