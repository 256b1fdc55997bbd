"""Choices are the fastest that are accurate enough on what layers see; plans hold for one machine and one model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.files import sealed_json
from cordillera.numerics.dispatch import dispatch
from cordillera.numerics.dispatch.accuracy import Accuracy
from cordillera.numerics.dispatch.candidates import CANDIDATES, Candidate, StoredWeight, chosen, load_fp8, then_relu
from cordillera.numerics.dispatch.dispatch import (
    DispatchConfig,
    Product,
    Trial,
    apply,
    choose,
    forward_products,
    judge,
    profile,
)
from cordillera.numerics.dispatch.plan import PrecisionPlan, bucket
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig
from cordillera.numerics.dispatch.training_linear import apply_for_training
from cordillera.numerics.dispatch.training_products import TrainedLayer, try_product

QUICK = DispatchConfig(rows=(16,), draws=2, judged_rows=64, rounds=1)


def normal(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 64, generator=generator)


def product(weight: Tensor | None = None, draw: Callable[[int, torch.Generator], Tensor] = normal) -> Product:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) if weight is None else weight
    return Product("top", "forward", weight, None, draw, calibration=draw(256, torch.Generator().manual_seed(9)))


def accuracy(sqnr: float, median: float = 0.0) -> Accuracy:
    return Accuracy(sqnr, median, median, median, 0.0, 0, 100)


trials = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.floats(0.01, 10), st.booleans()), unique_by=lambda t: t[0]
)


@given(found=trials, reference=st.floats(0.01, 10))
def test_the_choice_is_the_fastest_that_passed(found: list[tuple[str, float, bool]], reference: float) -> None:
    tried = [Trial("fp32", accuracy(130), reference)]
    tried += [Trial(name, accuracy(40), ms if good else math.nan, "" if good else "bad") for name, ms, good in found]
    choice = choose(product(), 100, tried, QUICK)
    passing = [ms for _, ms, good in found if good and reference > 1.05 * ms]
    assert choice.expected["ms"] == (min(passing) if passing else reference)
    assert (choice.kernel == "fp32") == (not passing) == bool(choice.why)
    assert choice.rows == 128


def test_a_tie_goes_to_the_more_accurate() -> None:
    tried = [
        Trial("fp32", accuracy(130), 9.0),
        Trial("b", accuracy(40, 0.02), 1.0),
        Trial("a", accuracy(40, 0.03), 1.0),
    ]
    assert choose(product(), 16, tried, QUICK).kernel == "b"


def test_a_looser_bound_never_makes_a_plan_slower() -> None:
    times = {name: 1.0 / (1 + number) for number, name in enumerate(CANDIDATES)}
    chosen = []
    for bound in (60.0, 45.0, 30.0, 15.0):
        config = QUICK.model_copy(update={"sqnr_db": bound, "median_relative": 1.0})
        found = dispatch.try_all(product(), list(CANDIDATES.values()), config)[16]
        fixed = [replace(trial, milliseconds=math.nan if trial.refused else times[trial.kernel]) for trial in found]
        chosen.append(choose(product(), 16, fixed, config).expected["ms"])
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] < chosen[0]


def scales_off_by_one(weight: Tensor, rows: Tensor | None) -> StoredWeight:
    """fp8 with scales that are powers of two, each output channel taking that of its neighbour."""
    scale = torch.exp2(torch.ceil(torch.log2(weight.abs().amax(1, keepdim=True) / 448)))
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "scale": scale.roll(1, 0)}


PLANTED = Candidate("planted", scales_off_by_one, then_relu(load_fp8), lambda device, k, n: None)


def test_a_scale_off_by_one_row_is_found_on_probed_inputs_only() -> None:
    """Standard-normal weights have the same scale in every row; learned ones do not."""
    generator = torch.Generator().manual_seed(4)
    config = QUICK.model_copy(update={"sqnr_db": 20.0})
    made_up = torch.randn(16, 64, generator=generator).clamp(-3.4, 3.4)
    made_up[:, 0] = 3.0  # the largest of each row lies between 1.75 and 3.5
    learned = made_up * torch.logspace(-4, 0, 16).unsqueeze(1)
    faulty, sound = ([one.pack(w, None, None) for w in (made_up, learned)] for one in (PLANTED, CANDIDATES["fp8 rows"]))
    of_made_up, of_learned = product(made_up), product(learned)
    assert judge(of_made_up, faulty[0], config).sqnr_db == pytest.approx(
        judge(of_made_up, sound[0], config).sqnr_db, abs=1.0
    )
    assert judge(of_learned, faulty[1], config).sqnr_db < 15
    assert judge(of_learned, sound[1], config).sqnr_db > 25
    tried = [CANDIDATES["fp32"], PLANTED]
    assert not dispatch.try_all(of_made_up, tried, config)[16][1].refused
    assert "dB" in dispatch.try_all(of_learned, tried, config)[16][1].refused


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))


def profiled(net: nn.Module, **changes: Any) -> dispatch.Profile:
    with Probe(net, ProbeConfig(interval=1)) as probe:
        for seed in range(4):
            probe.step()
            net(normal(128, torch.Generator().manual_seed(seed)))
    return profile(forward_products(net, probe.inputs), QUICK.model_copy(update=changes))


@pytest.fixture(scope="module")
def plan() -> PrecisionPlan:
    return profiled(model()).plan


def test_a_model_with_a_plan_computes_what_its_kernels_do() -> None:
    net = model()
    plan = profiled(net).plan.uniform("bf16")
    x = normal(16, torch.Generator().manual_seed(7))
    hidden = CANDIDATES["bf16"].pack(net[0].weight, net[0].bias.detach(), None)(x).relu()
    expected = CANDIDATES["bf16"].pack(net[2].weight, net[2].bias.detach(), None)(hidden)
    exact = net(x)
    with torch.no_grad():
        assert torch.equal(apply(net, plan)(x), expected)
        more = net(torch.cat([x] * 2))  # the plan knows of 16 rows
    assert [net[0].unplanned, net[2].unplanned] == [1, 1]
    torch.testing.assert_close(more[:16], exact.detach(), rtol=1e-5, atol=1e-5)


def test_a_profile_says_what_was_tried() -> None:
    found = profiled(model(), rows=(8, 16), sqnr_db=20.0, median_relative=0.1)
    assert set(found.trials) == {(site, "forward", rows) for site in ("0", "2") for rows in (8, 16)}
    assert "emulated" in next(t.refused for t in found.trials["0", "forward", 8] if t.kernel == "fp8 rows")
    assert found.geometric_mean() >= 1.0
    assert {"fp32", "bf16"} <= set(found.uniform_milliseconds())
    assert found.plan.find("0", "forward", 3).rows == 8
    assert found.plan.find("0", "forward", 9).rows == 16
    assert found.plan.find("0", "forward", 17) is None
    back = found.plan.with_reference("0", "costs quality")
    assert back.find("0", "forward", 8).kernel == "fp32"
    assert back.find("2", "forward", 8) == found.plan.find("2", "forward", 8)


def test_a_layer_that_was_not_probed_is_refused() -> None:
    with pytest.raises(NumericsError, match="0 was not probed"):
        forward_products(model(), {})


def test_the_bound_of_each_measure_holds_for_the_worst_input() -> None:
    """One input has the lower signal-to-noise ratio, another the larger median error."""
    both = accuracy(40.0, 0.06).worse(accuracy(35.0, 0.04))
    assert (both.sqnr_db, both.median_relative) == (35.0, 0.06)
    assert both == accuracy(35.0, 0.04).worse(accuracy(40.0, 0.06))


def test_numbers_of_rows_that_share_a_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="must differ"):
        DispatchConfig(rows=(200, 256))
    assert DispatchConfig(rows=(256, 257)).rows == (256, 257)


def test_a_plan_is_written_and_read(tmp_path: Path) -> None:
    plan, path = profiled(model()).plan, tmp_path / "plan.json"
    plan.save(path)
    assert PrecisionPlan.load(path) == plan


def changed(path: Path, change: Callable[[dict[str, Any]], None], sign: bool = False) -> None:
    content = json.loads(path.read_text())
    change(content)
    if sign:
        path.write_text(sealed_json(content))
    else:
        path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["machine"].update(name="another processor"), "made with name 'another processor'"),
        (lambda c: c["machine"]["libraries"].update(torch="1.0"), "made with libraries"),
        (lambda c: c["machine"].update(threads=99), "made with threads 99"),
        (lambda c: c["machine"].update(instructions=["DEFAULT"]), "made with instructions"),
        (lambda c: c.update(schema=99), "version 99"),
        (lambda c: c["choices"][0].update(kernel="int3"), "names the kernel 'int3'"),
        (lambda c: c["choices"][0].pop("rows"), "is no plan"),
    ],
)
def test_a_plan_of_another_machine_library_or_version_is_refused(
    plan: PrecisionPlan, change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    changed(path, change, sign=True)
    with pytest.raises(NumericsError, match=message):
        PrecisionPlan.load(path)


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(NumericsError, match="no such plan"):
        PrecisionPlan.load(path)
    profiled(model()).plan.save(path)
    changed(path, lambda c: c["choices"][0].update(rows=1 << 20))
    with pytest.raises(NumericsError, match="does not fit its checksum"):
        PrecisionPlan.load(path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(NumericsError, match="is not JSON"):
        PrecisionPlan.load(path)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = profiled(model()).plan
    with pytest.raises(NumericsError, match="no layer '0'"):
        apply(nn.Sequential(nn.ReLU()), plan)
    with pytest.raises(NumericsError, match=r"0 is \(4, 64\)"):
        apply(nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(48, 16)), plan)


@pytest.mark.parametrize(("rows", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (256, 256), (257, 512)])
def test_sizes_are_rounded_up_to_powers_of_two(rows: int, expected: int) -> None:
    assert bucket(rows) == expected


def test_a_plan_has_one_identity_however_long_its_kernels_took() -> None:
    plan = profiled(model()).plan.uniform("bf16")
    slower = replace(
        plan, choices=tuple(replace(c, expected={"ms": 9.0}, why="no other is faster") for c in plan.choices)
    )
    assert slower.identity == plan.identity
    others = [
        replace(plan, weights="others"), replace(plan, statistics="others"), replace(plan, seed=3),
        replace(plan, bound={"sqnr_db": 20.0}), replace(plan, kernels=("fp32",)), plan.uniform("fp32"),
        replace(plan, machine={**plan.machine, "instructions": ["AVX2"]}), replace(plan, purpose="training"),
        replace(plan, choices=tuple(replace(c, input_range=(0.0, 1.0)) for c in plan.choices)),
    ]  # fmt: skip
    assert len({plan.identity, *(other.identity for other in others)}) == 1 + len(others)


def test_the_library_refuses_a_plan_of_other_weights_or_of_another_machine() -> None:
    net = model()
    plan = profiled(net).plan.uniform("int8 static")
    elsewhere = replace(plan, machine={**plan.machine, "instructions": ["AVX2"]})
    with pytest.raises(NumericsError, match="made with instructions"):
        apply(net, elsewhere)
    with pytest.raises(NumericsError, match="made with instructions"):
        apply_for_training(net, replace(elsewhere, purpose="training"))
    with torch.no_grad():
        net[2].bias[3] += 1e-3
    with pytest.raises(NumericsError, match="made for other weights"):
        apply(net, plan)


def test_static_ranges_are_part_of_a_plan(tmp_path: Path) -> None:
    """Rows to calibrate on cannot be exchanged, as a plan asks for none."""
    net = model()
    plan = profiled(net).plan.uniform("int8 static")
    plan.save(tmp_path / "plan")
    x = normal(16, torch.Generator().manual_seed(7))
    found = apply(model(), PrecisionPlan.load(tmp_path / "plan"))(x)
    low, high = plan.choices[0].input_range
    kernel = CANDIDATES["int8 static"].pack(net[0].weight.detach(), net[0].bias.detach(), torch.tensor([[low], [high]]))
    assert torch.equal(dispatch.planned(net, plan)["0"](x), kernel(x))
    assert torch.equal(apply(net, plan)(x), found)


@pytest.mark.parametrize(("inputs", "weight", "unable"), [(64, 1e30, "fp16 weights"), (70_000, 0.02, "int8 dynamic")])
def test_a_kernel_that_cannot_take_a_layer_is_skipped_with_its_reason(inputs: int, weight: float, unable: str) -> None:
    """A weight beyond fp16; more inputs than whole numbers of 32 bits can sum."""
    weights = 0.02 * torch.randn(16, inputs, generator=torch.Generator().manual_seed(0))
    weights[0, 0] = weight

    def draw(rows: int, generator: torch.Generator, columns: int = inputs) -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    config = QUICK.model_copy(update={"draws": 1, "judged_rows": 2, "rows": (2,), "kernels": ("bf16", unable)})
    found = profile([Product("top", "forward", weights, None, draw, calibration=draw(2, torch.Generator()))], config)
    assert list(found.skipped()) == [unable]
    assert list(found.skipped()[unable].values()) == [1]
    assert "cannot take it: " in next(iter(found.skipped()[unable]))
    assert found.plan.choices[0].kernel != unable
    layer = TrainedLayer("top", weights, None, draw, partial(draw, columns=16))
    (trials,) = try_product(layer, "forward", chosen(config.kernels), config).values()
    assert [trial.kernel for trial in trials if "cannot take it: " in trial.refused] == [unable]
