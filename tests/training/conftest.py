"""A data set small enough to train on in a second, and a trainer on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.embeddings.tables import TablesConfig
from cordillera.jagged import JaggedBatch, JaggedTensor, offsets_from_lengths
from cordillera.models.ranking import MODELS, build
from cordillera.run import Run
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.trainer import Trainer
from tests.training.post_training_runs import make_start

FEATURES = FeatureSpec(
    dense=("a", "b"),
    sparse=(SparseFeature("id", "id"), SparseFeature("history", "id", "mean", is_list=True)),
    tables={"id": 50},
    tasks=("click", "buy"),
)


# a supernet divides every batch among architectures, and is trained in one process
POOLING = [name for name, kind in MODELS.items() if kind.pools_all and name != "supernet"]
"""Models whose tables may be any: others read rows of histories."""


class MemoryLoader:
    """Batches made from (seed, epoch, number), as a Loader gives them."""

    def __init__(self, batches: int, size: int = 64, seed: int = 0, weights: bool = False) -> None:
        self.batches, self.size, self.seed, self.weights = batches, size, seed, weights
        self.spoil: Callable[[int, RankingBatch], RankingBatch] = lambda number, batch: batch

    def __len__(self) -> int:
        return self.batches

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[RankingBatch]:
        for number in range(start, self.batches):
            generator = torch.Generator().manual_seed(self.seed * 10_000 + epoch * 100 + number)
            ids = torch.randint(0, 50, (self.size,), generator=generator)
            lengths = torch.randint(0, 4, (self.size,), generator=generator)
            history = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
            sparse = JaggedBatch.from_features(
                {
                    "id": JaggedTensor(ids, torch.arange(self.size + 1)),
                    "history": JaggedTensor(history, offsets_from_lengths(lengths)),
                }
            )
            click = (torch.rand(self.size, generator=generator) < 0.2 + 0.5 * (ids % 3 == 0)).float()
            buy = (torch.rand(self.size, generator=generator) < 0.3).float()
            dense = torch.rand(self.size, 2, generator=generator)
            weights = torch.rand(self.size, generator=generator) if self.weights else None
            yield self.spoil(number, RankingBatch(dense, sparse, torch.stack([click, buy], 1), weights, groups=ids % 7))


@pytest.fixture
def make_trainer(tmp_path: Path):
    """Builds a trainer; a second call with the same name continues the same run."""

    def make(
        name: str = "run",
        batches: int = 10,
        model: str = "dlrm",
        loader: MemoryLoader | None = None,
        tables: dict[str, object] | None = None,
        **config: object,
    ) -> Trainer:
        settings = TrainingConfig(**{"precision": "fp32", "epochs": 2, "log_every": 3, **config})
        torch.manual_seed(1)
        sizes: dict[str, object] = {"embedding_dim": 4, "dropout": 0.2}
        if model == "dlrm":
            sizes |= {"bottom_mlp": (8, 4), "top_mlp": (8,)}
        if model in ("target-attention", "hstu"):
            sizes |= {"candidate": "id", "mlp": (8,)}
        rule = TablesConfig.model_validate({"name": "rowwise_adagrad", "learning_rate": 0.05, **(tables or {})})
        kind = MODELS[model].Config
        sizes = {key: value for key, value in sizes.items() if key in kind.model_fields}
        network = build(kind(**sizes), FEATURES, rule)
        folder = tmp_path / name
        run = Run(folder) if folder.exists() else Run.create(folder, "name = 'test'\n")
        return Trainer(
            settings,
            network,
            loader or MemoryLoader(batches),
            MemoryLoader(3, seed=5),
            run,
            tasks=FEATURES.tasks,
            device=torch.device("cpu"),
        )

    return make


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the data of post-training, and the run ``start`` of a model that can already answer."""
    folder = tmp_path_factory.mktemp("post-training")
    make_start(folder)
    return folder
