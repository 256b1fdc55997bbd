"""The score of a row has the same bits alone, in any company, and in a file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from scipy.special import expit

from cordillera import workflows
from cordillera.data.ranking.rows import read_rows
from cordillera.errors import DataError, NumericsError, RunError
from cordillera.kernels.repeatable import BLOCK, products_repeat
from cordillera.numerics.dispatch.candidates import CANDIDATES, Shape
from cordillera.numerics.dispatch.dispatch import apply
from cordillera.numerics.dispatch.plan import KernelChoice, PrecisionPlan, machine, weights_digest
from cordillera.numerics.dispatch.stored_linear import StoredLinear
from cordillera.numerics.formats.precision import Precision
from cordillera.numerics.quantization.engines import saturates
from cordillera.numerics.quantization.integer_linear import quantize_weight
from cordillera.numerics.quantization.row_ranges import linear_by_rows
from cordillera.numerics.sites import sites
from cordillera.recipe import load
from cordillera.run import Run
from cordillera.serving.ranking import quantized_model
from cordillera.serving.ranking.scorer import RowScorer
from cordillera.workflows.prediction import open_scorer, predict
from cordillera.workflows.quantization import quantize
from tests.cli.conftest import RECIPE, write_log

from .small_scorers import SIZES, encoder, frame_of, rows, scorer


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def compositions(count: int, generator: random.Random, rounds: int) -> list[list[int]]:
    """Positions of rows in random order: few and many, with and without repetitions, and one row many times."""
    found = [[generator.randrange(count)] for _ in range(3)]
    for _ in range(rounds):
        size = generator.choice([2, 3, 5, 17, BLOCK - 1, BLOCK, BLOCK + 1, 300])
        found.append([generator.randrange(count) for _ in range(size)])
    found.append([generator.randrange(count)] * generator.choice([2, 3, 40]))
    found.append(sorted(generator.choices(range(count), k=200)))
    return found


def check_any_company(one: RowScorer, seed: int = 0, rounds: int = 6) -> None:
    """Rows scored among all others have the bits that they have in any other batch, with any number of threads."""
    frame, generator = frame_of(rows(1500, seed=7)), random.Random(seed)
    torch.set_num_threads(1)
    whole = one.score(frame)
    assert len(np.unique(whole)) > 50
    for positions in compositions(len(frame), generator, rounds):
        torch.set_num_threads(generator.choice([1, 2, 3]))
        assert np.array_equal(one.score(frame[positions]), whole[positions]), (len(positions), torch.get_num_threads())


def test_products_keep_the_bits_of_their_rows() -> None:
    assert products_repeat()


@pytest.mark.cases(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SIZES)
def test_a_row_has_the_same_score_in_any_company(name: str, precision: Precision) -> None:
    check_any_company(scorer(name, precision))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SIZES)
def test_a_row_has_the_same_score_in_many_companies(name: str, seed: int) -> None:
    check_any_company(scorer(name, "fp32", ("click", "like"), seed), seed, rounds=40)


def test_scores_are_those_of_the_model_up_to_rounding() -> None:
    for name in SIZES:
        one, frame = scorer(name), frame_of(rows(40, seed=2))
        with torch.inference_mode():
            logits = one.model(one.encoder.encode(frame, labels=False).batch()).double().numpy()
        assert np.allclose(one.score(frame), expit(logits), rtol=1e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kernel", [name for name in CANDIDATES if name != "fp32"])
def test_a_row_has_the_same_score_in_any_company_with_every_kernel(kernel: str) -> None:
    one = scorer("dnn", mlp=(64, 32))
    layers = sites(one.model)
    kernels = {
        name: kernel
        for name, layer in layers.items()
        if CANDIDATES[kernel].supports(Shape(1, *layer.weight.shape), torch.device("cpu")) is None
    }
    assert kernels
    calibration = {name: torch.randn(64, layers[name].in_features) for name in kernels}
    tables = dict(zip(one.encoder.features.tables, ["int8", "int4", "fp16", "fp32", "int8"], strict=False))
    model = quantized_model.quantize_model(one.model, tables, kernels, calibration)
    assert any(isinstance(layer, StoredLinear) for layer in model.modules())
    check_any_company(RowScorer(one.encoder, model, one.tasks, torch.device("cpu"), "fp32"))


@pytest.mark.parametrize("kernel", ["int8 dynamic", "bf16", "fp32"])
def test_a_row_has_the_same_score_in_any_company_under_a_plan(kernel: str) -> None:
    one = scorer("dnn", mlp=(64, 32))
    choices = [
        KernelChoice(name, "forward", 256, layer.out_features, layer.in_features, kernel, "asked for")
        for name, layer in sites(one.model).items()
    ]
    weights = weights_digest({name: (layer.weight, layer.bias) for name, layer in sites(one.model).items()})
    plan = PrecisionPlan(tuple(choices), machine(), {}, weights=weights)
    apply(one.model, plan)
    check_any_company(RowScorer(one.encoder, one.model, one.tasks, torch.device("cpu"), "fp32", fixed=256))


@pytest.mark.parametrize("inner", [1, 33, 1500])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_rows_have_ranges_of_their_own(relu: bool, inner: int, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a row is within half a step of each input of the exact one, and the same in any batch."""
    if not narrow and saturates():
        pytest.skip("products of eight-bit codes saturate on this processor")
    monkeypatch.setattr("cordillera.numerics.quantization.row_ranges.saturates", lambda: narrow)
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(7, inner), torch.randn(7))
    run = linear_by_rows(weight, relu=relu)
    x = torch.randn(50, inner) * torch.logspace(-12, 12, 50)[:, None]
    x[3], x[4], x[5] = 0, x[5].abs(), -x[5].abs()
    found = run(x)
    exact = x.double() @ weight.dequantize().double().T + weight.bias.double()
    step = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)) / (127 if narrow else 255)
    bound = 0.51 * step[:, None].double() * weight.dequantize().double().abs().sum(1)
    error = (found - (exact.relu() if relu else exact)).abs()
    assert bool((error <= bound + 1e-6 * exact.abs() + 1e-6).all())
    assert torch.equal(torch.cat([run(one) for one in x.split(3)]), found)
    whole = x.clone()
    x[6, 0], x[7, 0], x[8, 0], x[9, 0], x[9, -1] = torch.nan, torch.inf, -torch.inf, 3e38, -3e38
    spoilt = run(x)
    assert bool(spoilt[6:9].isnan().all())
    assert bool(spoilt[9].isnan().all()) == (inner > 1)
    assert torch.equal(spoilt[:6], found[:6])
    assert torch.equal(spoilt[10:], found[10:])
    assert torch.equal(run(whole), found)
    assert run(x[:0]).shape == (0, 7)


def test_a_fixed_number_of_rows_gives_the_same_scores() -> None:
    one, frame = scorer("dlrm"), frame_of(rows(300, seed=3))
    fixed = RowScorer(one.encoder, one.model, one.tasks, torch.device("cpu"), "fp32", fixed=256)
    assert np.array_equal(one.score(frame), fixed.score(frame))
    assert np.array_equal(fixed.score(frame[7:9]), fixed.score(frame)[7:9])


def test_an_index_of_the_vocabularies_finds_the_same_rows() -> None:
    frame = frame_of(rows(400, seed=6))
    joined = encoder().encode(frame, labels=False)
    indexed = encoder().index().encode(frame, labels=False)
    assert np.array_equal(joined.ids, indexed.ids)
    assert (joined.ids[:, :2] == 0).any()
    for (values, offsets), (other, others) in zip(joined.lists, indexed.lists, strict=True):
        assert np.array_equal(values, other)
        assert np.array_equal(offsets, others)
    assert joined.blanks == indexed.blanks


def test_no_rows_have_no_scores() -> None:
    assert scorer("dlrm").score(frame_of(rows(3))[:0]).shape == (0, 1)


def test_a_score_that_is_not_finite_names_its_row() -> None:
    one, frame = scorer("dlrm"), frame_of(rows(9, seed=2))
    known = one.encoder.encode(frame, labels=False).ids[4, 0]
    with torch.no_grad():
        one.model.tables.table("user")[known] = torch.nan
    with pytest.raises(NumericsError, match="logit is nan"):
        one.score(frame)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Finished runs by precision, the first with a quantised model."""
    folder = tmp_path_factory.mktemp("runs")
    log = write_log(folder / "log.csv", rows=600)
    path = folder / "small.toml"
    path.write_text(RECIPE.format(path=log))
    found = {}
    for precision in ("fp32", "bf16"):
        sizes = ["model.fmb_mlp=[64]", "model.top_mlp=[64]", "model.embedding_dim=8", "training.epochs=1"]
        recipe = load(path, [*sizes, f"training.precision={precision}", f"data.cache_dir={folder / 'cache'}"])
        found[precision] = workflows.train(recipe, folder / precision).run.folder
    quantize(Run(found["fp32"]), 1e-2, smallest=True)
    return found


@pytest.mark.parametrize(("precision", "quantized"), [("fp32", False), ("bf16", False), ("fp32", True)])
def test_a_row_of_a_file_and_of_a_request_have_the_same_score(runs, tmp_path, precision: str, quantized: bool) -> None:
    run = runs[precision]
    samples = write_log(tmp_path / "samples.csv", rows=700, seed=9)
    written, count = predict(run, samples, tmp_path / "scores.parquet", quantized=quantized)
    expected = pl.read_parquet(written)["score"].to_numpy()
    assert count == 700
    assert len(np.unique(expected)) > 200
    one = open_scorer(run, quantized=quantized)
    recipe = load(run / "recipe.toml")
    [(frame, _)] = read_rows(str(samples), recipe.data, one.encoder.schema)
    generator = random.Random(0)
    for positions in compositions(700, generator, 6):
        torch.set_num_threads(generator.choice([1, 2]))
        assert np.array_equal(one.score(frame[positions])[:, 0], expected[positions])
    again, _ = predict(run, samples, tmp_path / "few.parquet", quantized=quantized, batch_size=33)
    assert np.array_equal(pl.read_parquet(again)["score"].to_numpy(), expected)


def test_what_cannot_be_opened_is_refused(runs, tmp_path) -> None:
    with pytest.raises(RunError):
        open_scorer(tmp_path)
    with pytest.raises(RunError, match="no plan"):
        open_scorer(runs["fp32"], quantized=True, planned=True)
    with pytest.raises(DataError, match="'price' is missing"):
        open_scorer(runs["fp32"]).score(pl.DataFrame({"user": ["u1"]}))
