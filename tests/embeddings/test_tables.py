"""Tables as a module: pooling, accumulation, precision, errors, state."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import CheckpointError, CordilleraError, DataError, DependencyError, TrainingError
from cordillera.jagged import JaggedBatch, JaggedTensor
from cordillera.kernels.embeddings.update import available_backends

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
BACKENDS = tuple(name for name in ("torch", "numba", "fbgemm") if available_backends()[name] is None)

SPEC = FeatureSpec(
    dense=(),
    sparse=(
        SparseFeature("item", "items"),
        SparseFeature("user", "users"),
        SparseFeature("history", "items", pooling="mean", is_list=True),
        SparseFeature("tags", "tags", pooling="sum", is_list=True),
    ),
    tables={"items": 9, "users": 5, "tags": 4},
    tasks=("click",),
)


def tables(optimizer: str = "rowwise_adagrad", backend: str = "auto", **options: float) -> EmbeddingTables:
    config = TablesConfig(name=optimizer, backend=backend, learning_rate=0.1, **options)
    return EmbeddingTables(SPEC, 3, config, generator=torch.Generator().manual_seed(0))


def batch(seed: int = 0, size: int = 6, weighted: bool = False) -> JaggedBatch:
    generator = torch.Generator().manual_seed(seed)

    def bags(rows: int, longest: int) -> JaggedTensor:
        counts = torch.randint(0, longest + 1, (size,), generator=generator).tolist()
        jagged = JaggedTensor.from_lists([torch.randint(rows, (n,), generator=generator).tolist() for n in counts])
        weights = torch.rand(jagged.values.numel(), generator=generator) if weighted else None
        return JaggedTensor(jagged.values, jagged.offsets, weights)

    def single(rows: int) -> JaggedTensor:
        return JaggedTensor(torch.randint(rows, (size,), generator=generator), torch.arange(size + 1))

    return JaggedBatch.from_features({"item": single(9), "user": single(5), "history": bags(9, 4), "tags": bags(4, 2)})


def dense_lookup(weights: dict[str, Tensor], sparse: JaggedBatch) -> Tensor:
    """The definition, sample by sample, differentiable with respect to the tables."""
    columns = []
    for feature in SPEC.sparse:
        jagged, pooled = sparse[feature.name], []
        for b in range(len(jagged)):
            window = slice(int(jagged.offsets[b]), int(jagged.offsets[b + 1]))
            rows = weights[feature.table][jagged.values[window]]
            if jagged.weights is not None:
                rows = rows * jagged.weights[window].to(rows.dtype).unsqueeze(1)
            total = rows.sum(0)
            pooled.append(total / max(1, rows.shape[0]) if feature.pooling == "mean" else total)
        columns.append(torch.stack(pooled))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_equals_its_definition_and_gradients_reach_shared_tables(backend: str, weighted: bool) -> None:
    """SGD with rate 1 shows the gradient itself: old minus new weight equals autograd's dense gradient."""
    model, sparse = tables("sgd", backend), batch(weighted=weighted)
    copies = {name: model.table(name).double().clone().requires_grad_() for name in SPEC.tables}
    before = model.weight.detach().clone()
    output, expected = model(sparse), dense_lookup(copies, sparse)
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-7)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(direction)
    expected.backward(direction.double())
    assert model.weight.grad is None
    model.update(10.0)
    gradient = torch.cat([copies[name].grad for name in SPEC.tables])
    torch.testing.assert_close((before - model.weight.detach()).double(), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=10)
@given(seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=3))
def test_several_backward_passes_are_one_larger_batch(optimizer: str, seeds: list[int]) -> None:
    apart, together = tables(optimizer).double(), tables(optimizer, "torch").double()
    batches = [batch(seed, size=1 + seed % 5) for seed in seeds]
    for sparse in batches:
        apart(sparse).square().sum().backward()
    assert apart.num_pending == len(seeds)
    whole = JaggedBatch.from_features(
        {
            name: JaggedTensor.from_lists([row for sparse in batches for row in sparse[name].to_lists()])
            for name in batches[0]
        }
    )
    together(whole).square().sum().backward()
    apart.update()
    together.update()
    assert apart.step == together.step == 1
    torch.testing.assert_close(apart.weight, together.weight, rtol=1e-12, atol=1e-13)


def test_passes_with_and_without_offsets_and_weights_accumulate() -> None:
    spec = FeatureSpec((), (SparseFeature("a", "t"),), {"t": 6}, ("y",))
    model = EmbeddingTables(spec, 2, TablesConfig(name="sgd", learning_rate=1.0), init=1.0)
    before = model.weight.detach().clone()
    plain = JaggedBatch(("a",), torch.tensor([1, 2]), torch.arange(3), one_hot=True)
    bags = JaggedBatch(("a",), torch.tensor([1, 1, 4]), torch.tensor([0, 0, 3]), torch.tensor([0.5, 2.0, 3.0]))
    for sparse in (plain, bags, plain):
        model(sparse).sum().backward()
    model.update()
    expected = torch.tensor([0.0, 4.5, 2.0, 0.0, 3.0, 0.0])
    torch.testing.assert_close((before - model.weight.detach())[:, 0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_gives_its_dtype_and_takes_its_gradients(backend: str) -> None:
    model, sparse = tables("sgd", backend), batch()
    before = model.weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(sparse)
    assert output.dtype == torch.bfloat16
    exact = model(sparse).detach()
    torch.testing.assert_close(output.float(), exact, rtol=2**-8, atol=0)
    output.sum().backward()
    assert model._pending[0].grad.dtype == torch.bfloat16
    model.update()
    assert model.weight.dtype == torch.float32
    assert not torch.equal(before, model.weight)


def test_nothing_waits_after_no_grad_evaluation_or_discard() -> None:
    model, sparse = tables(), batch()
    before = model.weight.detach().clone()
    with torch.no_grad():
        assert not model(sparse).requires_grad
    with torch.inference_mode():
        model(sparse)
    model(sparse).sum().backward()
    model.discard()
    model.update()
    assert model.step == 0
    assert torch.equal(before, model.weight)
    model.weight.requires_grad_(False)
    assert not model(sparse).requires_grad


def test_the_learning_rate_scale_multiplies() -> None:
    results = []
    for scale, rate in ((0.25, 0.4), (1.0, 0.1)):
        model = EmbeddingTables(
            SPEC, 3, TablesConfig(name="adam", learning_rate=rate), generator=torch.Generator().manual_seed(0)
        )
        model(batch()).square().sum().backward()
        model.update(scale)
        results.append(model.weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_state_goes_on_bit_for_bit(optimizer: str) -> None:
    def steps(model: EmbeddingTables, seeds: range) -> None:
        for seed in seeds:
            model(batch(seed)).square().sum().backward()
            model.update()

    whole, first, second = tables(optimizer), tables(optimizer), tables(optimizer)
    steps(whole, range(4))
    steps(first, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.step == 2
    steps(second, range(2, 4))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_a_copy_is_independent_and_keeps_what_waits() -> None:
    model = tables()
    model(batch()).sum().backward()
    twin = copy.deepcopy(model)
    before = model.weight.detach().clone()
    twin.update()
    assert twin.step == 1
    assert model.num_pending == 1
    assert torch.equal(before, model.weight)
    model.update()
    assert torch.equal(model.weight, twin.weight)


def test_the_weight_is_no_business_of_dense_optimizers() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    model.tables = tables()  # type: ignore[assignment]
    before = model.tables.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model[0](model.tables(batch())).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert torch.equal(before, model.tables.weight)
    model.tables.update()
    assert not torch.equal(before, model.tables.weight)


@pytest.mark.parametrize("bad", [9, -1, 2**50])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_outside_its_table_is_named_with_feature_and_rows(backend: str, bad: int) -> None:
    sparse = batch()
    position = int(sparse.offsets[2 * 6])  # the first entry of all histories
    sparse.values[position] = bad
    sample = int(torch.searchsorted(sparse.offsets, position, right=True)) - 1 - 12
    model = tables(backend=backend)
    with pytest.raises(DataError, match="history") as caught:
        model(sparse)
    assert str(bad) in str(caught.value)
    assert f"sample {sample} " in str(caught.value)
    assert "rows 0 to 8" in str(caught.value)
    assert model.num_pending == 0


def test_other_features_are_refused() -> None:
    sparse = batch()
    with pytest.raises(DataError, match="expected the sparse features"):
        tables()(JaggedBatch(sparse.keys[::-1], sparse.values, sparse.offsets))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives_and_gradients_of_weights_are_refused() -> None:
    model = tables()
    with pytest.raises(TrainingError, match="second derivatives"):
        model(batch()).square().sum().backward(create_graph=True)
    sparse = batch(weighted=True)
    assert sparse.weights is not None
    sparse.weights.requires_grad_()
    with pytest.raises(TrainingError, match="weights"):
        model(sparse)


def test_specifications_that_cannot_work_are_refused() -> None:
    feature = (SparseFeature("a", "t"),)
    with pytest.raises(DataError, match="'t' is not among"):
        EmbeddingTables(FeatureSpec((), feature, {"u": 2}, ("y",)), 2, TablesConfig())
    with pytest.raises(DataError, match="at least one row"):
        EmbeddingTables(FeatureSpec((), feature, {"t": 0}, ("y",)), 2, TablesConfig())
    with pytest.raises(DataError, match="no table 'x'"):
        tables().table("x")
    with pytest.raises((DependencyError, CordilleraError), match="adam"):
        tables("adam", "fbgemm")
    with pytest.raises(CheckpointError, match="step count"):
        tables().set_extra_state(torch.tensor(-1))


def test_initial_weights_lie_in_their_bounds_and_repeat() -> None:
    model = tables()
    for name, rows in SPEC.tables.items():
        assert model.table(name).abs().max() <= rows**-0.5
        assert model.table(name).abs().max() > 0.5 * rows**-0.5
    assert torch.equal(model.weight, tables().weight)
    spec = FeatureSpec((), (SparseFeature("a", "t"),), {"t": 20_000}, ("y",))
    normal = EmbeddingTables(spec, 4, TablesConfig(), init=0.01, generator=torch.Generator().manual_seed(0))
    assert float(normal.weight.detach().std()) == pytest.approx(0.01, rel=0.02)


def test_a_table_is_a_view() -> None:
    model = tables()
    model.table("users").zero_()
    assert not model.weight[9:14].any()
    assert model.weight[:9].any()


def test_no_sparse_features_give_an_empty_output() -> None:
    model = EmbeddingTables(FeatureSpec(("x",), (), {}, ("y",)), 4, TablesConfig())
    assert model(JaggedBatch((), torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))).shape[2] == 4
    model.update()


def test_a_gradient_that_is_not_a_number_is_not_laundered() -> None:
    model = tables()
    model(batch()).mul(float("nan")).sum().backward()
    model.update()
    assert model.weight.isnan().any()


def test_lookups_from_several_threads_are_right() -> None:
    model, failures = tables(), []
    batches = [batch(seed, size=2000) for seed in range(4)]
    with torch.no_grad():
        expected = [model(sparse) for sparse in batches]

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                if not torch.equal(model(batches[index]), expected[index]):
                    failures.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not failures


MEMORY = """
import torch
from pathlib import Path
from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.jagged import JaggedBatch

def peak():
    # of this process alone: getrusage's peak would begin with that of the process which started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def run(rows):
    names = tuple(f"f{i}" for i in range(8))
    spec = FeatureSpec((), tuple(SparseFeature(n, n) for n in names), {n: rows for n in names}, ("y",))
    tables = EmbeddingTables(spec, 16, TablesConfig())
    ids = torch.randint(rows, (8 * 1024,))
    for _ in range(2):
        tables(JaggedBatch(names, ids, torch.arange(8 * 1024 + 1), one_hot=True)).sum().backward()
        tables.update()

run(100)  # code, compiled kernels
before = peak()
run(400_000)
print((peak() - before) / (8 * 400_000 * 17 * 4))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_training_needs_no_memory_of_the_tables_size_beside_them() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=240, check=True)
    assert 0.9 < float(done.stdout) < 1.15


def test_rows_that_an_update_will_change_are_known_before_it() -> None:
    module = tables()
    assert module.pending_rows().tolist() == []
    for seed in (0, 1):
        module(batch(seed)).sum().backward()
    before = module.weight.detach().clone()
    rows = module.pending_rows()
    module.update()
    changed = (module.weight.detach() != before).any(1).nonzero().flatten()
    assert torch.equal(rows, changed)
    assert module.pending_rows().numel() == 0


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([1.9, 0.5]), torch.tensor([True, False]), torch.tensor([math.nan, 1.0]), torch.ones(2, 1).long()],
)
def test_what_is_no_list_of_ids_is_refused(ids: Tensor) -> None:
    one = FeatureSpec((), (SparseFeature("u", "t"),), {"t": 4}, ("y",))
    model = EmbeddingTables(one, 2, TablesConfig())
    with pytest.raises(DataError, match="ids must be int64 or int32"):
        model(JaggedBatch(("u",), ids, torch.arange(3)))
    with pytest.raises(DataError, match="feature 'u': ids must be int64 or int32"):
        model.unpooled("u", ids)
    assert model(JaggedBatch(("u",), torch.tensor([1, 3], dtype=torch.int32), torch.arange(3))).shape == (2, 1, 2)


def test_a_batch_that_says_one_id_a_bag_and_has_more_is_refused() -> None:
    one = FeatureSpec((), (SparseFeature("u", "t"),), {"t": 9}, ("y",))
    wrong = JaggedBatch(("u",), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 4]), one_hot=True)
    with pytest.raises(DataError, match="one_hot is set, but 2 bags hold 4 ids"):
        EmbeddingTables(one, 2, TablesConfig())(wrong)


@pytest.mark.parametrize(
    "asked", [{"rows": "int8"}, {"cache": 0.5}, {"storage": "file", "cache": 0.5}, {"dynamic": {}}]
)
def test_settings_of_other_classes_are_not_ignored(asked: dict[str, object]) -> None:
    with pytest.raises(DataError, match="call make_tables"):
        EmbeddingTables(SPEC, 3, TablesConfig.model_validate(asked))


def test_tables_without_columns_are_refused() -> None:
    with pytest.raises(DataError, match="embedding_dim must be at least 1"):
        EmbeddingTables(SPEC, 0, TablesConfig())


def test_zero_grad_discards_what_waits() -> None:
    model = tables()
    before = model.weight.detach().clone()
    model(batch()).sum().backward()
    model.zero_grad()
    assert model.num_pending == 0
    model.update()
    assert torch.equal(model.weight, before)
