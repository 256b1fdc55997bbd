"""The exact sparse update against a dense float64 reference that shares nothing with it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import DependencyError, TrainingError
from cordillera.kernels.embeddings import update
from cordillera.kernels.embeddings.update import (
    SparseOptimizer,
    available_backends,
    choose_backend,
    init_state,
    sparse_update,
    sum_by_row,
)

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
BACKENDS = tuple(available_backends())
EXACT = ("torch", "numba")
RATE = 0.05


def need(backend: str, optimizer: str | SparseOptimizer, weight: Tensor) -> None:
    rule = SparseOptimizer(name=optimizer) if isinstance(optimizer, str) else optimizer
    try:
        choose_backend(backend, rule, weight)
    except DependencyError as error:
        pytest.skip(str(error))


class DenseReference:
    """Dense gradients by autograd through one-hot matrices, and optimizer formulas on the touched rows, in float64."""

    def __init__(self, optimizer: SparseOptimizer, weight: Tensor) -> None:
        self.optimizer, self.weight = optimizer, weight.to(torch.float64).clone()
        self.state = {name: value.to(torch.float64) for name, value in init_state(optimizer, weight).items()}

    def step(self, rows: Tensor, offsets: Tensor, grad: Tensor, factors: Tensor | None, step: int) -> None:
        weight = self.weight.clone().requires_grad_()
        bag_of = torch.bucketize(torch.arange(rows.numel()), offsets[1:], right=True)
        pool = torch.zeros(offsets.numel() - 1, rows.numel(), dtype=torch.float64)
        pool[bag_of, torch.arange(rows.numel())] = 1.0 if factors is None else factors.to(torch.float64)
        one_hot = torch.nn.functional.one_hot(rows, weight.shape[0]).to(torch.float64)
        (pool @ (one_hot @ weight)).backward(grad.to(torch.float64))
        g, o, s = weight.grad, self.optimizer, self.state
        assert g is not None
        touched = torch.zeros(weight.shape[0], 1, dtype=torch.bool)
        touched[rows] = True
        g = g + o.weight_decay * torch.where(touched, self.weight, 0.0)
        if o.name == "sgd":
            change = g
        elif o.name == "adagrad":
            s["sum"] += g**2
            change = g / (s["sum"].sqrt() + o.eps)
        elif o.name == "rowwise_adagrad":
            s["sum"] += (g**2).mean(1)
            change = g / (s["sum"].sqrt() + o.eps)[:, None]
        else:
            s["exp_avg"] = torch.where(touched, o.beta1 * s["exp_avg"] + (1 - o.beta1) * g, s["exp_avg"])
            s["exp_avg_sq"] = torch.where(touched, o.beta2 * s["exp_avg_sq"] + (1 - o.beta2) * g**2, s["exp_avg_sq"])
            mean, square = s["exp_avg"] / (1 - o.beta1**step), s["exp_avg_sq"] / (1 - o.beta2**step)
            change = mean / (square.sqrt() + o.eps)
        self.weight = torch.where(touched, self.weight - RATE * change, self.weight)


def bags(generator: torch.Generator, num_rows: int, num_bags: int, longest: int = 4) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, longest + 1, (num_bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, num_rows, (int(offsets[-1]),), generator=generator), offsets


@pytest.mark.parametrize(
    ("weighted", "decay"), [(False, 0.0), (True, 0.0), (True, 0.1)], ids=["plain", "weighted", "decaying"]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_back_end_equals_the_dense_optimizer_on_touched_rows(
    backend: str, optimizer: str, weighted: bool, decay: float
) -> None:
    """Duplicates within and over bags, empty bags, three steps."""
    generator = torch.Generator().manual_seed(3)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    start = torch.rand(30, 5, generator=generator) * 0.4 - 0.2
    rule = SparseOptimizer(name=optimizer, eps=1e-6, weight_decay=decay)
    weight = start.to(device, copy=True)
    need(backend, rule, weight)
    reference, state = DenseReference(rule, start), init_state(rule, weight)
    seen = torch.zeros(30, dtype=torch.bool)
    for step in (1, 2, 3):
        rows, offsets = bags(generator, 25, 12)
        seen[rows] = True
        grad = torch.randn(12, 5, generator=generator)
        factors = torch.rand(rows.numel(), generator=generator) if weighted else None
        given = [None if one is None else one.to(device) for one in (rows, offsets, grad, factors)]
        sparse_update(rule, weight, state, *given, learning_rate=RATE, step=step, backend=backend)
        reference.step(rows, offsets, grad, factors, step)
    tolerance = 1e-7 if backend != "fbgemm" else 2e-7  # FBGEMM sums in float32
    torch.testing.assert_close(weight.double().cpu(), reference.weight, rtol=0, atol=tolerance)
    for name, value in state.items():
        torch.testing.assert_close(value.double().cpu(), reference.state[name], rtol=3e-7, atol=1e-7)
    assert torch.equal(weight.cpu()[~seen], start[~seen]), "rows that no bag names must not move"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("width", [1, 48, 128])
def test_gpus_sum_rows_of_many_positions_as_cpus_do(optimizer: str, width: int) -> None:
    """Also bit for bit again."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.cat([torch.zeros(3000, dtype=torch.int64), torch.randint(0, 500, (5000,), generator=generator)])
    rows = rows[torch.randperm(len(rows), generator=generator)]
    offsets = torch.arange(0, len(rows) + 1, 4)
    grad = torch.randn(len(offsets) - 1, width, generator=generator)
    start, rule = torch.randn(500, width, generator=generator), SparseOptimizer(name=optimizer)
    found = []
    for device in ("cpu", "cuda", "cuda"):
        weight = start.to(device, copy=True)
        given = [one.to(device) for one in (rows, offsets, grad)]
        sparse_update(rule, weight, init_state(rule, weight), *given, learning_rate=RATE, step=1)
        found.append(weight.cpu())
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tables_of_a_gpu_may_name_its_back_end() -> None:
    """They are made on the CPU, and then moved."""
    features = FeatureSpec((), (SparseFeature("a", "a"),), {"a": 10}, ("click",))
    tables = EmbeddingTables(features, 4, TablesConfig(backend="triton"))
    assert tables.cuda().backend == "triton"


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
def test_triton_path_agrees_in_its_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    selection = "test_every_back_end_equals_the_dense_optimizer_on_touched_rows and triton"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", __file__]
    done = subprocess.run(
        [*command, "-k", selection],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backend", EXACT)
@settings(max_examples=25)
@given(data=st.data())
def test_equals_the_dense_optimizer_in_float64(backend: str, optimizer: str, data: st.DataObject) -> None:
    num_rows, dim = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    num_bags = data.draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    weight = torch.randn(num_rows, dim, generator=generator, dtype=torch.float64)
    rule = SparseOptimizer(name=optimizer, eps=1e-3)
    reference, state = DenseReference(rule, weight), init_state(rule, weight)
    for step in range(1, data.draw(st.integers(1, 3)) + 1):
        rows, offsets = bags(generator, num_rows, num_bags)
        grad = torch.randn(num_bags, dim, generator=generator, dtype=torch.float64)
        factors = (
            torch.rand(rows.numel(), generator=generator, dtype=torch.float64) if data.draw(st.booleans()) else None
        )
        sparse_update(rule, weight, state, rows, offsets, grad, factors, learning_rate=RATE, step=step, backend=backend)
        reference.step(rows, offsets, grad, factors, step)
    torch.testing.assert_close(weight, reference.weight, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "peer"),
    [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad), ("adam", torch.optim.Adam)],
    ids=["sgd", "adagrad", "adam"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_torch_optim_when_every_row_is_touched(
    backend: str, optimizer: str, peer: type[torch.optim.Optimizer]
) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.rand(20, 8, generator=generator) * 0.2
    need(backend, optimizer, weight)
    rule = SparseOptimizer(name=optimizer, eps=1e-8)
    dense = torch.nn.Parameter(weight.double())
    options = {"lr": RATE} if optimizer == "sgd" else {"lr": RATE, "eps": rule.eps}
    peers, state = peer([dense], **options), init_state(rule, weight)  # type: ignore[call-arg]
    for step in (1, 2, 3):
        rows = torch.cat([torch.randperm(20, generator=generator), torch.randint(0, 20, (30,), generator=generator)])
        grad = torch.randn(50, 8, generator=generator)
        sparse_update(rule, weight, state, rows, None, grad, learning_rate=RATE, step=step, backend=backend)
        dense.grad = torch.zeros_like(dense).index_add_(0, rows, grad.double())
        peers.step()
    atol = 1e-7 if backend != "fbgemm" else 3e-7
    torch.testing.assert_close(weight.double(), dense.detach(), rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_first_adam_step_equals_torch_sparse_adam() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.rand(9, 4, generator=generator, dtype=torch.float64)
    peer = torch.nn.Parameter(weight.clone())
    rows = torch.tensor([1, 3, 3, 8])
    grad = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    rule = SparseOptimizer(name="adam", eps=1e-12)
    sparse_update(rule, weight, init_state(rule, weight), rows, None, grad, learning_rate=RATE, step=1)
    peer.grad = torch.sparse_coo_tensor(rows[None], grad, peer.shape)
    torch.optim.SparseAdam([peer], lr=RATE, eps=1e-12).step()
    torch.testing.assert_close(weight, peer.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backend", EXACT)
def test_results_are_bitwise_equal_over_runs_and_thread_counts(backend: str, optimizer: str) -> None:
    """More values than the threshold for several threads, with rows so hot that they straddle the threads' border."""
    generator = torch.Generator().manual_seed(1)
    count = 20_000
    rows = (torch.rand(count, generator=generator) ** 6 * 5000).long()
    grad, start = torch.randn(count, 8, generator=generator), torch.randn(5000, 8, generator=generator)
    rule = SparseOptimizer(name=optimizer)
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 2, 1):
            torch.set_num_threads(number)
            weight = start.clone()
            state = init_state(rule, weight)
            for step in (1, 2):
                sparse_update(rule, weight, state, rows, None, grad, learning_rate=RATE, step=step, backend=backend)
            results.append((weight, *state.values()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_is_updated_once_however_often_it_is_named(backend: str) -> None:
    """Adagrad tells: a thousand updates with g differ from one update with 1000 g, whose first step has length lr."""
    weight = torch.zeros(3, 4)
    need(backend, "adagrad", weight)
    rule = SparseOptimizer(name="adagrad")
    sparse_update(
        rule, weight, init_state(rule, weight), torch.ones(1000, dtype=torch.int64), None, torch.ones(1000, 4),
        learning_rate=RATE, step=1, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(weight[1], torch.full((4,), -RATE))
    assert not weight[0].any()
    assert not weight[2].any()


@pytest.mark.parametrize("backend", EXACT)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 40))
def test_order_of_bags_does_not_matter(backend: str, seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rule = SparseOptimizer(name="rowwise_adagrad")
    rows = torch.randint(0, 6, (size,), generator=generator)
    grad = torch.randint(-64, 64, (size, 3), generator=generator).float()  # sums of these are exact
    shuffle = torch.randperm(size, generator=generator)
    first, second = torch.zeros(6, 3), torch.zeros(6, 3)
    for weight, order in ((first, torch.arange(size)), (second, shuffle)):
        state = init_state(rule, weight)
        sparse_update(rule, weight, state, rows[order], None, grad[order], learning_rate=1.0, step=1, backend=backend)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sample_major_gradients_are_read_where_they_lie(backend: str, dtype: torch.dtype) -> None:
    """A gradient ``[B, F, D]``, also a slice of a wider tensor, means the same as feature-major ``[N, D]``."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(40, 6, generator=generator)
    need(backend, "rowwise_adagrad", start)
    rule = SparseOptimizer(name="rowwise_adagrad")
    wide = torch.randn(7, 4, 6, generator=generator).to(dtype)
    grad = wide[:, 1:]  # what the backward of cat([dense, embeddings]) hands over
    rows, offsets = bags(generator, 40, 21)
    results = []
    for piece in (grad, grad.transpose(0, 1).reshape(21, 6), grad.transpose(0, 2).contiguous().transpose(0, 2)):
        weight = start.clone()
        state = init_state(rule, weight)
        sparse_update(rule, weight, state, rows, offsets, piece, learning_rate=RATE, step=1, backend=backend)
        results.append(weight)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_of_single_values_mean_no_offsets(backend: str, offset_dtype: torch.dtype) -> None:
    start = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    need(backend, "sgd", start)
    rule, rows, grad = SparseOptimizer(name="sgd"), torch.tensor([3, 1, 3, 9]), torch.randn(4, 3)
    first, second = start.clone(), start.clone()
    sparse_update(rule, first, {}, rows, None, grad, learning_rate=RATE, step=1, backend=backend)
    bounds = torch.arange(5, dtype=offset_dtype)
    sparse_update(rule, second, {}, rows, bounds, grad, learning_rate=RATE, step=1, backend=backend)
    assert torch.equal(first, second)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backend", EXACT)
def test_a_gradient_that_is_not_finite_shows_in_its_row_and_only_there(
    backend: str, optimizer: str, bad: float
) -> None:
    rule, weight = SparseOptimizer(name=optimizer), torch.ones(4, 2)
    grad = torch.ones(3, 2)
    grad[1] = bad
    state = init_state(rule, weight)
    rows = torch.tensor([0, 2, 3])
    sparse_update(rule, weight, state, rows, None, grad, learning_rate=RATE, step=1, backend=backend)
    assert not weight[2].isfinite().any()
    assert weight[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("backend", EXACT)
def test_no_values_change_nothing(backend: str) -> None:
    rule, weight = SparseOptimizer(name="adam"), torch.ones(4, 2)
    empty, bounds = torch.empty(0, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    state = init_state(rule, weight)
    sparse_update(rule, weight, state, empty, bounds, torch.ones(5, 2), learning_rate=1.0, step=1, backend=backend)
    assert torch.equal(weight, torch.ones(4, 2))


def test_rows_of_very_large_tables_keep_their_numbers() -> None:
    """Row numbers beyond 2**31 share a sort key with their position; three digits and more are sorted."""
    numba_embeddings = pytest.importorskip("cordillera.kernels.embeddings.numba_backend")
    import numpy as np

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 2**40, (5000,), generator=generator)
    rows[2500:] = rows[:2500].flip(0)
    none = np.empty(0, np.int64)
    for threads in (1, 2):
        keys, starts = numba_embeddings._sort(rows.numpy(), none, True, True, 5000, 4, 0, 40, 13, threads)
        assert np.array_equal(keys & 8191, torch.sort(rows, stable=True).indices.numpy())
        assert np.array_equal(starts, np.arange(5000) * 4)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("order", ["random", "ascending", "one row", "none"])
def test_sums_by_row_are_those_of_float64(order: str, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    count = 0 if order == "none" else 9000
    rows = torch.randint(0, 1 if order == "one row" else 700, (count,), generator=generator)
    if order == "ascending":
        rows = rows.sort().values
    lengths = torch.bincount(torch.randint(0, 4000, (count,), generator=generator), minlength=4000)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    grad = torch.randn(2000, 2, 18, generator=generator)
    factors = torch.rand(count, generator=generator) if weighted else None
    of_bag = grad.transpose(0, 1).reshape(4000, 18).double()  # bag f * B + b is sample b of feature f
    each = of_bag.repeat_interleave(lengths, 0)
    if factors is not None:
        each = factors.double().unsqueeze(1) * each
    expected = torch.zeros(700, 18, dtype=torch.float64)
    np.add.at(expected.numpy(), rows.numpy(), each.numpy())  # one after another
    for dtype in (torch.float32, torch.float64):
        distinct, sums = sum_by_row(rows, offsets, grad, factors, 700, dtype)
        assert torch.equal(distinct, rows.unique())
        assert torch.equal(sums, expected[distinct].to(dtype))


def test_sums_by_row_are_made_where_no_back_end_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    rows, factors = torch.randint(0, 50, (600,), generator=generator), torch.rand(600, generator=generator)
    offsets, grad = torch.arange(0, 601, 3), torch.randn(200, 18, generator=generator)
    expected = sum_by_row(rows, offsets, grad, factors, 50, torch.float32)
    monkeypatch.setattr(update, "_unavailable", lambda name: "it does not load")
    update._misfit.cache_clear()
    try:
        found = sum_by_row(rows, offsets, grad, factors, 50, torch.float32)
    finally:
        update._misfit.cache_clear()
    torch.testing.assert_close(found, expected)


THREADS = """
import torch
from cordillera.kernels.embeddings.update import SparseOptimizer, sparse_update
torch.set_num_threads(1)
rows, weight = torch.arange(9000) % 7, torch.zeros(7, 2)
sparse_update(SparseOptimizer(name="sgd"), weight, {}, rows, None, torch.ones(9000, 2), learning_rate=1.0, step=1)
print(torch.get_num_threads())
"""


@pytest.mark.slow
def test_the_number_of_torch_threads_is_left_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "1"


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    from cordillera.kernels.compiling import compiled

    compile_function = numba.njit

    def njit(*functions: object, **options: object) -> object:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_function(*functions, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled()(lambda x: x + 1)(1) == 2


def test_fbgemm_repeats_bit_for_bit_on_one_thread_count() -> None:
    start = torch.zeros(50, 16)
    need("fbgemm", "sgd", start)
    generator = torch.Generator().manual_seed(0)
    rows, grad = torch.randint(50, (20_000,), generator=generator), torch.randn(20_000, 16, generator=generator)
    rule, results = SparseOptimizer(name="sgd"), []
    for _ in range(3):
        weight = start.clone()
        sparse_update(rule, weight, {}, rows, None, grad, learning_rate=1.0, step=1, backend="fbgemm")
        results.append(weight)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_back_end_that_cannot_is_refused_by_name_and_passed_over_by_auto() -> None:
    weight = torch.zeros(2, 2)
    with pytest.raises(DependencyError, match=r"adam|FBGEMM|fbgemm"):
        choose_backend("fbgemm", SparseOptimizer(name="adam"), weight)
    assert choose_backend("auto", SparseOptimizer(name="adam"), weight) in ("numba", "torch")
    with pytest.raises(DependencyError, match="float32 or float64"):
        choose_backend("torch", SparseOptimizer(name="sgd"), weight.half())


def test_an_fbgemm_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cordillera.kernels.embeddings import fbgemm_backend as fbgemm_embeddings

    monkeypatch.setattr(fbgemm_embeddings.importlib.metadata, "version", lambda name: "1.6.0")
    reason = fbgemm_embeddings.unavailable()
    assert reason is not None
    assert "1.6.0" in reason
    assert torch.__version__ in reason


def test_shapes_that_do_not_fit_are_refused() -> None:
    rule, rows = SparseOptimizer(name="sgd"), torch.tensor([0, 1])
    with pytest.raises(TrainingError, match="2 bags"):
        sparse_update(rule, torch.zeros(3, 4), {}, rows, None, torch.zeros(3, 4), learning_rate=1.0, step=1)
    with pytest.raises(TrainingError, match="contiguous"):
        sparse_update(rule, torch.zeros(4, 3).t(), {}, rows, None, torch.zeros(2, 4), learning_rate=1.0, step=1)
    with pytest.raises(TrainingError, match="as many weights"):
        sparse_update(
            rule, torch.zeros(3, 4), {}, rows, None, torch.zeros(2, 4), torch.ones(3), learning_rate=1.0, step=1
        )
