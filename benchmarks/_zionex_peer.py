"""TorchRec's sharded tables on CPUs, built as its documentation says, and the bytes that they send."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec
from cordillera.jagged import JaggedBatch

EPS = 1e-8
# Sharding types by their names in tables for readers
KINDS = {
    "table-wise": "table_wise",
    "column-wise": "column_wise",
    "table-column-wise": "table_column_wise",
    "row-wise, sequences": "row_wise",
    "row-wise": "row_wise",
    "data-parallel": "data_parallel",
}
SEQUENCES = "row-wise, sequences"


class Shard(NamedTuple):
    """Weights of a rectangle of a table, shared with the module: the table's name, first row and first column."""

    table: str
    first_row: int
    first_column: int
    weight: Tensor


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress TorchRec's log and its warnings about deprecated calls."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def missing() -> str | None:
    """Return the reason for which TorchRec cannot be imported, or None."""
    try:
        with quiet():
            import fbgemm_gpu  # noqa: F401
            import torchrec.distributed  # noqa: F401
    except (ImportError, OSError) as error:
        return f"TorchRec cannot be imported ({error}); run `make peers`"
    return None


class TorchRecTables:
    """Tables of one rank that TorchRec has sharded over all ranks of the default process group.

    Features of one table have one pooling, because TorchRec pools by table. The optimizer is fused into FBGEMM's
    kernels, except for ``data-parallel`` tables, whose dense gradients go to torch's optimizers.

    Args:
        features: Features and tables.
        dim: Columns of every table.
        rule: ``sgd``, ``adagrad``, ``rowwise_adagrad`` or ``adam``.
        rate: Learning rate.
        kind: Key of ``KINDS``.

    Raises:
        AssertionError, NotImplementedError, ValueError, RuntimeError: If the combination is not offered on CPUs.
    """

    def __init__(self, features: FeatureSpec, dim: int, rule: str, rate: float, kind: str) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.features, self.dim, self.kind = features, dim, kind
        self.keys = [feature.name for feature in features.sparse]
        self._dense: torch.optim.Optimizer | None = None
        with quiet():
            self.module = self._sharded(rule, rate)
            if kind == "data-parallel":
                self._dense = _dense_optimizer(rule, rate, self.module.parameters())

    def _sharded(self, rule: str, rate: float) -> nn.Module:
        from torchrec.distributed.shard import shard

        module, sharder = self._module_and_sharder(rule, rate)
        plan = {}
        for i, (table, parameter) in enumerate(sharder.shardable_parameters(module).items()):
            plan[table] = self._plan(i)(parameter, self.size, self.size, "cpu", sharder)
            plan[table].sharding_type = KINDS[self.kind]
        return shard(module, plan, sharder=sharder, device=torch.device("cpu"))

    def _module_and_sharder(self, rule: str, rate: float) -> tuple[nn.Module, Any]:
        import torchrec
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

        fused = {"optimizer": _fused_optimizer(rule), "learning_rate": rate, "eps": EPS}
        names = {table: [one.name for one in self.features.sparse if one.table == table] for table in self._tables}
        sizes = {
            table: {"name": table, "embedding_dim": self.dim, "num_embeddings": rows, "feature_names": names[table]}
            for table, rows in self.features.tables.items()
        }
        device = torch.device("meta")
        if self.kind == SEQUENCES:
            rows = [torchrec.EmbeddingConfig(**one) for one in sizes.values()]
            return torchrec.EmbeddingCollection(rows, device=device), EmbeddingCollectionSharder(fused_params=fused)
        pooled = [
            torchrec.EmbeddingBagConfig(**one, pooling=torchrec.PoolingType[self._pooling(table).upper()])
            for table, one in sizes.items()
        ]
        return torchrec.EmbeddingBagCollection(pooled, device=device), EmbeddingBagCollectionSharder(fused_params=fused)

    @property
    def _tables(self) -> list[str]:
        return list(self.features.tables)

    def _pooling(self, table: str) -> str:
        (pooling,) = {one.pooling for one in self.features.sparse if one.table == table}
        return pooling

    def _plan(self, place: int) -> Callable[..., Any]:
        from torchrec.distributed import sharding_plan

        if self.kind == "data-parallel":
            return sharding_plan.data_parallel()
        if self.kind == "table-wise":
            return sharding_plan.table_wise(rank=place % self.size, compute_kernel="fused")
        if self.kind in ("row-wise", SEQUENCES):
            return sharding_plan.row_wise(compute_kernel="fused")
        return sharding_plan.column_wise(ranks=list(range(self.size)), compute_kernel="fused")

    def shards(self) -> list[Shard]:
        """Return this rank's parts of all tables."""
        found = []
        for key, value in self.module.state_dict().items():
            table = key.split(".")[-2]
            if not hasattr(value, "local_shards"):
                found.append(Shard(table, 0, 0, value))
                continue
            for one in value.local_shards():
                row, column = one.metadata.shard_offsets
                found.append(Shard(table, row, column, one.tensor))
        return found

    def load(self, tables: Mapping[str, Tensor]) -> None:
        """Copy whole tables into this rank's parts; sharding has drawn them anew."""
        with torch.no_grad():
            for table, row, column, weight in self.shards():
                weight.copy_(tables[table][row:, column:][: weight.shape[0], : weight.shape[1]])

    def order(self, gradient: Tensor) -> Tensor:
        """Return gradients ``[b, F, D]`` in the order of columns that TorchRec gives its output: ``[b, F * D]``."""
        places = [self.keys.index(key) for key in self.output_keys]
        return gradient[:, places].reshape(len(gradient), -1).contiguous()

    @property
    def output_keys(self) -> list[str]:
        """Features in the order of TorchRec's output."""
        names: Any = self.module._embedding_names
        return list(names)

    def forward(self, batch: JaggedBatch) -> Any:
        """Return TorchRec's output: pooled rows of all features, or rows of the values of each."""
        found = self.module(batch.to_torchrec())
        return found.wait() if hasattr(found, "wait") else found

    def step(self, batch: JaggedBatch, gradient: Tensor) -> None:
        """Look up and update, given the gradient of this rank's output.

        TorchRec divides gradients by the number of ranks; they are multiplied by it to get the sum over all samples.

        Args:
            batch: This rank's samples.
            gradient: Gradient, times the number of ranks: of :meth:`order`, or of sequences ``[T, D]``.
        """
        if self._dense is not None:
            self._dense.zero_grad(set_to_none=True)
        found = self.forward(batch)
        if self.kind == SEQUENCES:
            torch.cat([found[key].values() for key in self.keys]).backward(gradient)
        else:
            found.values().backward(gradient)
        if self._dense is not None:
            self._dense.step()


def _fused_optimizer(rule: str) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adam": EmbOptimType.ADAM,
    }[rule]


def _dense_optimizer(rule: str, rate: float, parameters: Any) -> torch.optim.Optimizer:
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    if rule == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    kinds: dict[str, Any] = {"adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    kinds["adam"] = torch.optim.Adam
    optimizer: torch.optim.Optimizer = kinds[rule](parameters, lr=rate, eps=EPS)
    return optimizer


class Sent:
    """Bytes and messages that this rank sent to others in collectives, by the collective's name."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.messages: dict[str, int] = {}

    def add(self, name: str, sizes: Sequence[int]) -> None:
        """Record a call that sent ``sizes`` bytes to the other ranks."""
        self.bytes[name] = self.bytes.get(name, 0) + sum(sizes)
        self.messages[name] = self.messages.get(name, 0) + sum(size > 0 for size in sizes)


@contextlib.contextmanager
def counted() -> Iterator[Sent]:
    """Record what torch's all-to-alls, reduce-scatters and all-gathers of tensors send while the region is active."""
    sent, rank, size = Sent(), dist.get_rank(), dist.get_world_size()
    names = ("all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor", "reduce_scatter", "all_gather")
    kept = {name: getattr(dist, name) for name in names}

    def all_to_all(output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
                   *rest: Any, **options: Any) -> Any:  # fmt: skip
        splits = input_split_sizes or [len(input) // size] * size
        unit = input.nbytes // max(1, len(input))
        sent.add("all_to_all", [n * unit for peer, n in enumerate(splits) if peer != rank])
        return kept["all_to_all_single"](output, input, output_split_sizes, input_split_sizes, *rest, **options)

    def scattered(name: str) -> Callable[..., Any]:
        def call(output: Tensor, *rest: Any, **options: Any) -> Any:
            sent.add("reduce_scatter", [output.nbytes] * (size - 1))
            return kept[name](output, *rest, **options)

        return call

    def gathered(name: str) -> Callable[..., Any]:
        def call(output: Any, input: Tensor, *rest: Any, **options: Any) -> Any:
            sent.add("all_gather", [input.nbytes] * (size - 1))
            return kept[name](output, input, *rest, **options)

        return call

    changed = {
        "all_to_all_single": all_to_all,
        **{name: scattered(name) for name in names if name.startswith("reduce")},
        **{name: gathered(name) for name in names if name.startswith("all_gather")},
    }
    try:
        for name, call in changed.items():
            setattr(dist, name, call)
        yield sent
    finally:
        for name, call in kept.items():
            setattr(dist, name, call)
