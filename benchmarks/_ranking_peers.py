"""Peer libraries of the ranking benchmarks, each built and fed as its own documentation says.

Every function raises :class:`PeerUnavailable` with the reason if its library is not installed; a benchmark then leaves
that row out and prints why. ``make peers`` installs all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _peers import PeerUnavailable
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.jagged import JaggedBatch

CHECKOUT = Path(__file__).resolve().parent.parent
FUXICTR_COMMIT = "0245987"
ADAGRAD_EPS = 1e-8


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the peers' warnings about their own deprecated calls."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _needed(module: str, package: str) -> ModuleType:
    try:
        with _quiet():
            return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise PeerUnavailable(f"{package} cannot be imported ({error}); run `make peers`") from error


# FuxiCTR


def fuxictr_zoo() -> Path:
    """Return ``$CORDILLERA_FUXICTR_ZOO`` or ``.peers/FuxiCTR``, FuxiCTR's repository with the model zoo.

    Raises:
        PeerUnavailable: If there is neither.
    """
    named = os.environ.get("CORDILLERA_FUXICTR_ZOO")
    folder = Path(named) if named else CHECKOUT / ".peers" / "FuxiCTR"
    if not (folder / "model_zoo").is_dir():
        raise PeerUnavailable(
            f"{folder} holds no model zoo of FuxiCTR; run `make peers`, or set CORDILLERA_FUXICTR_ZOO to a clone of "
            f"reczoo/FuxiCTR at commit {FUXICTR_COMMIT}"
        )
    return folder


def _fuxictr_class(name: str) -> Any:
    source = fuxictr_zoo() / "model_zoo" / name / "src" / f"{name}.py"
    _needed("fuxictr.pytorch.models", "fuxictr 2.3.10")
    spec = importlib.util.spec_from_file_location(f"fuxictr_model_zoo_{name}", source)
    if spec is None or spec.loader is None or not source.is_file():
        raise PeerUnavailable(f"{source} is missing; the clone must stand at commit {FUXICTR_COMMIT}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def fuxictr_model(
    name: str,
    features: FeatureSpec,
    *,
    learning_rate: float,
    folder: Path | None = None,
    list_lengths: Mapping[str, int] | None = None,
    task: int = 0,
    **options: Any,
) -> Any:
    """Build one of FuxiCTR's models over our features, to be trained by its own ``train_step`` or ``fit``.

    Args:
        name: ``DLRM``, ``DCNv2`` or ``WuKong``.
        features: Features of the batches.
        learning_rate: Learning rate of its Adam over all parameters, including tables.
        folder: Folder of the checkpoint of ``fit``.
        list_lengths: Width to which each list feature is padded.
        task: Position of the label to learn.
        **options: Arguments of the model (sizes, dropout, regularizer) and of ``BaseModel`` (monitor, patience).

    Raises:
        PeerUnavailable: If the library or its model zoo is absent.
    """
    kind = _fuxictr_class(name)
    feature_map = _needed("fuxictr.features", "fuxictr 2.3.10").FeatureMap("cordillera", str(folder or "."))
    columns: OrderedDict[str, dict[str, Any]] = OrderedDict()
    for column in features.dense:
        columns[column] = {"type": "numeric", "source": ""}
    owners: dict[str, str] = {}
    for feature in features.sparse:
        column_spec: dict[str, Any] = {"source": "", "vocab_size": features.tables[feature.table]}
        if feature.table in _listed(features):
            # Id 0 is FuxiCTR's padding, so every table that a list reads is one row longer and its ids move by one.
            column_spec |= {"vocab_size": features.tables[feature.table] + 1, "padding_idx": 0}
        if feature.is_list:
            pooling = "MaskedAveragePooling" if feature.pooling == "mean" else "MaskedSumPooling"
            length = (list_lengths or {})[feature.name]
            column_spec |= {"type": "sequence", "max_len": length, "feature_encoder": f"layers.{pooling}()"}
        else:
            column_spec["type"] = "categorical"
        if feature.table in owners:
            column_spec["share_embedding"] = owners[feature.table]
        else:
            owners[feature.table] = feature.name
        columns[feature.name] = column_spec
    feature_map.features = columns
    feature_map.labels = [features.tasks[task]]
    feature_map.num_fields = feature_map.get_num_fields()
    feature_map.default_emb_dim = options.get("embedding_dim")
    feature_map.set_column_index()
    root = Path(folder) if folder is not None else Path(tempfile.gettempdir())
    (root / "cordillera").mkdir(parents=True, exist_ok=True)
    settings = {
        "task": "binary_classification",
        "optimizer": "adam",
        "loss": "binary_crossentropy",
        "metrics": ["logloss", "AUC"],
        "model_root": str(root),
        "verbose": 0,
        "gpu": -1,
    }
    return kind(feature_map, model_id=name, learning_rate=learning_rate, **{**settings, **options})


def _listed(features: FeatureSpec) -> set[str]:
    return {feature.table for feature in features.sparse if feature.is_list}


def fuxictr_batch(
    batch: RankingBatch, features: FeatureSpec, *, list_lengths: Mapping[str, int] | None = None, task: int = 0
) -> dict[str, Tensor]:
    """Return a batch in the form of FuxiCTR's loaders: columns in the feature map's order, then the label.

    Args:
        batch: The samples.
        features: Features of the batch.
        list_lengths: Width to which each list feature is padded, at the end, with id 0.
        task: Position of the label.
    """
    columns: dict[str, Tensor] = {}
    for i, name in enumerate(features.dense):
        columns[name] = batch.dense[:, i : i + 1].contiguous()
    listed = _listed(features)
    for feature in features.sparse:
        jagged = batch.sparse[feature.name]
        if feature.is_list:
            lengths, list_length = jagged.lengths, (list_lengths or {})[feature.name]
            position = torch.arange(list_length).expand(len(lengths), list_length)
            padded = torch.zeros(len(lengths), list_length, dtype=torch.int64)
            padded[position < lengths[:, None]] = jagged.values + 1
            columns[feature.name] = padded
        else:
            columns[feature.name] = jagged.values + int(feature.table in listed)
    if batch.labels is not None:
        columns[features.tasks[task]] = batch.labels[:, task].contiguous()
    return columns


# TorchRec


class TorchRecDLRM:
    """TorchRec's DLRM under ``DistributedModelParallel``: one gloo process, fused row-wise Adagrad in the backward.

    Args:
        features: One-hot features, each with its own table.
        embedding_dim: Number of columns of every table.
        bottom: Widths of the dense arch; the last is ``embedding_dim``.
        top: Widths of the over arch; the last is 1.
        learning_rate: Learning rate of AdamW over the dense parameters.
        table_learning_rate: Learning rate of row-wise Adagrad.

    Raises:
        PeerUnavailable: If TorchRec is absent.
    """

    def __init__(
        self,
        features: FeatureSpec,
        *,
        embedding_dim: int,
        bottom: list[int],
        top: list[int],
        learning_rate: float,
        table_learning_rate: float,
    ) -> None:
        torchrec = _needed("torchrec", "torchrec 1.8.0")
        with _quiet():
            self._build(torchrec, features, embedding_dim, bottom, top, table_learning_rate)
        self.optimizer = torch.optim.AdamW(self.dense.values(), lr=learning_rate, weight_decay=0.0, fused=True)
        self._loss = nn.BCEWithLogitsLoss()

    def _build(
        self,
        torchrec: Any,
        features: FeatureSpec,
        embedding_dim: int,
        bottom: list[int],
        top: list[int],
        table_learning_rate: float,
    ) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embedding_types import EmbeddingComputeKernel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.distributed.planner.types import ParameterConstraints
        from torchrec.distributed.types import ShardingType
        from torchrec.models.dlrm import DLRM
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        if not torch.distributed.is_initialized():
            meeting = Path(tempfile.mkdtemp()) / "gloo"
            torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
        tables = [
            torchrec.EmbeddingBagConfig(
                name=feature.table,
                embedding_dim=embedding_dim,
                num_embeddings=features.tables[feature.table],
                feature_names=[feature.name],
            )
            for feature in features.sparse
        ]
        collection = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        model = DLRM(collection, len(features.dense), bottom, top, dense_device=torch.device("cpu"))
        sharder = EmbeddingBagCollectionSharder(
            fused_params={
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "learning_rate": table_learning_rate,
                "eps": ADAGRAD_EPS,
            }
        )
        constraint = ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
        )
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=1, compute_device="cpu"),
            constraints={table.name: constraint for table in tables},
        )
        group = torch.distributed.group.WORLD
        self.model = torchrec.distributed.DistributedModelParallel(
            model, device=torch.device("cpu"), plan=planner.collective_plan(model, [sharder], group), sharders=[sharder]
        )
        self.dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))

    def table(self, name: str) -> Tensor:
        """Return the rows of one table, shared with the model."""
        state = self.model.state_dict()
        key = next(key for key in state if key.endswith(f"embedding_bags.{name}.weight"))
        sharded = state[key]
        return sharded.local_shards()[0].tensor if hasattr(sharded, "local_shards") else sharded

    def linears(self) -> tuple[list[nn.Linear], list[nn.Linear]]:
        """Return the linear layers of the dense arch and of the over arch, in order."""
        bottom, top = [], []
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                (bottom if "dense_arch" in name else top).append(module)
        return bottom, top

    def forward(self, dense: Tensor, ids: Any) -> Tensor:
        """Return the logits ``[B]``."""
        return self.model(dense, ids).squeeze(-1)

    def step(self, dense: Tensor, ids: Any, labels: Tensor, bf16: bool = False) -> Tensor:
        """Take a training step: forward, loss, backward with the fused update, AdamW."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = self.forward(dense, ids)
        loss = self._loss(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


# Table updates alone

Update = Callable[[JaggedBatch, Tensor], Tensor]


def embedding_bag_update(
    features: FeatureSpec, embedding_dim: int, learning_rate: float
) -> tuple[Update, list[Tensor]]:
    """Build one ``nn.EmbeddingBag(sparse=True)`` per table, with ``torch.optim.Adagrad`` over all of them.

    Returns:
        A function of ids and output gradient ``[B, F, D]`` that looks up, propagates back, updates, and returns the
        output; and the tables' weights.
    """
    bags = nn.ModuleList(
        nn.EmbeddingBag(features.tables[feature.table], embedding_dim, mode="sum", sparse=True)
        for feature in features.sparse
    )
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=learning_rate, eps=ADAGRAD_EPS)

    def update(sparse: JaggedBatch, gradient: Tensor) -> Tensor:
        size = sparse.batch_size
        ids = sparse.values.view(len(bags), size)
        starts = torch.arange(size)
        optimizer.zero_grad(set_to_none=True)
        out = torch.stack([bag(ids[i], starts) for i, bag in enumerate(bags)], 1)
        out.backward(gradient)
        optimizer.step()
        return out.detach()

    return update, [bag.weight.detach() for bag in bags]


def fbgemm_update(features: FeatureSpec, embedding_dim: int, learning_rate: float) -> tuple[Update, list[Tensor]]:
    """Build FBGEMM's table-batched module with row-wise Adagrad fused into its backward pass.

    Returns:
        A function and the tables' weights, as in :func:`embedding_bag_update`.

    Raises:
        PeerUnavailable: If FBGEMM is absent.
    """
    _needed("fbgemm_gpu", "fbgemm-gpu-cpu 1.8.0")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (features.tables[feature.table], embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for feature in features.sparse
        ],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=learning_rate,
        eps=ADAGRAD_EPS,
    )

    def update(sparse: JaggedBatch, gradient: Tensor) -> Tensor:
        out = tables(sparse.values, sparse.offsets)
        out.backward(gradient.view(out.shape))
        return out.detach().view(gradient.shape)

    return update, list(tables.split_embedding_weights())
