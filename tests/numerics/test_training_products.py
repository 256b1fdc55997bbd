"""A training step by a plan: each of its three products is the chosen kernel's, everything else as without a plan."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.files import sealed_json
from cordillera.models.ranking.interactions import MLP
from cordillera.numerics.dispatch import training_products
from cordillera.numerics.dispatch.candidates import CANDIDATES
from cordillera.numerics.dispatch.dispatch import DispatchConfig, apply
from cordillera.numerics.dispatch.plan import PASSES, KernelChoice, Pass, PrecisionPlan, machine
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig, Probed
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.dispatch.training_linear import TrainedLinear, apply_for_training
from cordillera.numerics.dispatch.training_products import by_kernel, exact, profile_training, trained_layers

QUICK = DispatchConfig(rows=(64,), draws=2, judged_rows=64, rounds=1)
ROWS = 64
KERNELS = [name for name, one in CANDIDATES.items() if not one.calibrated]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32, bias=False))


def given(rows: int = ROWS, seed: int = 7) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def plan_of(net: nn.Module, kernels: dict[tuple[str, Pass], str], rows: int = ROWS) -> PrecisionPlan:
    choices = []
    for (site, of), kernel in kernels.items():
        weight = net.get_submodule(site).weight
        choices.append(KernelChoice(site, of, rows, *weight.shape, kernel))
    return PrecisionPlan(tuple(choices), machine(), {"sqnr_db": 30.0}, purpose="training")


def everywhere(net: nn.Module, kernel: str, rows: int = ROWS) -> PrecisionPlan:
    return plan_of(net, dict.fromkeys(itertools.product(("0", "2"), PASSES), kernel), rows)


def gradients(net: nn.Module, x: Tensor, weigh: Tensor | None = None) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    out = net(x)
    (out * (1 if weigh is None else weigh)).float().square().sum().backward()
    return out.detach(), x.grad, *(parameter.grad for parameter in net.parameters())


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_are_those_of_the_kernel_itself(kernel: str) -> None:
    net = model()
    first, last = net[0], net[2]
    x, pack = given(), CANDIDATES[kernel].pack
    hidden = pack(first.weight, first.bias.detach(), None)(x).relu()
    out = pack(last.weight, None, None)(hidden)
    g = 2 * out
    of_last = pack(hidden.T.contiguous(), None, None)(g.T.contiguous())
    g = pack(last.weight.T.contiguous(), None, None)(g) * (hidden > 0)
    of_first, of_x = (
        pack(x.T.contiguous(), None, None)(g.T.contiguous()), pack(first.weight.T.contiguous(), None, None)(g)
    )  # fmt: skip
    applied = apply_for_training(net, everywhere(net, kernel))
    found = gradients(net, x)
    expected = (out, of_x, of_first, g.sum(0), of_last)
    for one, other in zip(found, expected, strict=True):
        if kernel == "fp32":
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)
    assert applied.unplanned == 0
    assert (set(applied.planned), applied.left) == (({"0", "2"}, ()) if kernel != "fp32" else (set(), ("0", "2")))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(64,), (4, 16)])
def test_products_in_fp32_have_the_bits_of_torchs_layer(autocast: bool, shape: tuple[int, ...]) -> None:
    x = given().unflatten(0, shape)
    weigh = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(3))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(model(), x, weigh)
        net = model()
        net[0], net[2] = (TrainedLinear(net[i], str(i), everywhere(net, "fp32")) for i in (0, 2))
        found = gradients(net, x, weigh)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("of", PASSES)
def test_a_kernel_for_one_product_leaves_the_others_bits(of: Pass) -> None:
    exact_ones, net = gradients(model(), given()), model()
    applied = apply_for_training(net, plan_of(net, {("2", of): "bf16", ("2", "forward"): "fp32"} | {("2", of): "bf16"}))
    found = gradients(net, given())
    assert applied.left == applied.unknown == ("0",)
    changed = {number for number, pair in enumerate(zip(found, exact_ones, strict=True)) if not torch.equal(*pair)}
    after = {"forward": {0, 1, 2, 3, 4}, "input_gradient": {1, 2, 3}, "weight_gradient": {4}}
    assert changed == after[of]


def test_products_that_the_plan_has_no_kernel_for_are_counted() -> None:
    net = model()
    applied = apply_for_training(net, everywhere(net, "bf16", rows=32))
    for one, other in zip(gradients(net, given()), gradients(model(), given()), strict=True):
        assert torch.equal(one, other)
    assert applied.unplanned == 6
    only = model()
    applied = apply_for_training(only, plan_of(only, {("0", "forward"): "bf16"}))
    gradients(only, given())
    assert applied.planned["0"].unplanned == {"forward": 0, "input_gradient": 1, "weight_gradient": 1}
    odd = model()
    applied = apply_for_training(odd, everywhere(odd, "int4 weights"))
    gradients(odd, given(30))  # int4 takes 32 rows at a time where they are summed over
    assert applied.planned["0"].unplanned == {"forward": 0, "input_gradient": 0, "weight_gradient": 1}


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "fp32"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_goes_on(kernel: str, bad: float) -> None:
    net, x = model(), given()
    x[3, 5] = bad
    apply_for_training(net, everywhere(net, kernel))
    out, _, of_first, _, _ = gradients(net, x)
    assert not out[3].isfinite().all()
    assert not out[torch.arange(ROWS) != 3].isnan().any()
    assert not of_first.isfinite().all()


def test_parameters_keep_their_names_and_optimizers_their_states() -> None:
    net = model()
    before = dict(net.named_parameters())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    apply_for_training(net, everywhere(net, "bf16"))
    assert all(before[name] is parameter for name, parameter in net.named_parameters())
    assert set(net.state_dict()) == set(model().state_dict())
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (net(given()) - given()[:, :32]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_autocast_keeps_its_dtype() -> None:
    net = model()
    apply_for_training(net, everywhere(net, "int8 dynamic"))
    with torch.autocast("cpu", torch.bfloat16):
        out = net(given())
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert net[0].weight.grad.dtype == torch.float32


def test_evaluation_is_torchs() -> None:
    net = model()
    applied = apply_for_training(net, everywhere(net, "int8 dynamic"))
    assert not torch.equal(net(given()), model()(given()))
    assert torch.equal(net.eval()(given()), model()(given()))
    assert applied.unplanned == 0


def test_layers_that_are_fused_with_relu_are_not_passed_by() -> None:
    torch.manual_seed(0)
    net = MLP(64, [32], 16)
    plan = PrecisionPlan(
        (KernelChoice("layers.0", "forward", 64, 32, 64, "int8 dynamic"),), machine(), {}, purpose="training"
    )
    before = net(given())
    apply_for_training(net, plan)
    assert not torch.equal(net(given()), before)


def probed(net: nn.Module, **options: object) -> Probe:
    with Probe(net, ProbeConfig(interval=1, gradients=True, **options)) as probe:
        for seed in range(4):
            probe.step()
            net(given(seed=seed)).square().mean().backward()
    return probe


def test_gradients_are_gathered_as_they_are_and_written(tmp_path: Path) -> None:
    net = model()
    with Probe(net, ProbeConfig(interval=2, gradients=True)) as probe:
        expected = {"0": RowStatistics(32), "2": RowStatistics(32)}
        for seed in range(4):
            probe.step()
            hidden = net[0](given(seed=seed))
            out = net[2](net[1](hidden))
            hidden.retain_grad()
            out.retain_grad()
            out.square().mean().backward()
            if seed % 2 == 0:
                expected["0"].update(hidden.grad)
                expected["2"].update(out.grad)
        probe.save(tmp_path / "probe.safetensors")
    back = Probed(tmp_path / "probe.safetensors").gradients
    for name, statistics in expected.items():
        assert torch.equal(probe.gradients[name].covariance(), statistics.covariance())
        assert torch.equal(back[name].covariance(), statistics.covariance())
    resumed = Probe(net, ProbeConfig(gradients=True))
    resumed.load_state_dict(probe.state_dict())
    assert resumed.gradients["0"].count == expected["0"].count
    with pytest.raises(NumericsError, match="statistics of"):
        Probe(net, ProbeConfig()).load_state_dict(probe.state_dict())


def test_all_three_products_are_planned_from_probed_gradients(tmp_path: Path) -> None:
    net = model()
    probe = probed(net)
    found = profile_training(trained_layers(net, probe.inputs, probe.gradients), QUICK)
    assert set(found.trials) == {(site, of, 64) for site in ("0", "2") for of in PASSES}
    assert all((c.outputs, c.inputs) == tuple(net.get_submodule(c.site).weight.shape) for c in found.plan.choices)
    for (_, of, _), trials in found.trials.items():
        refused = {trial.kernel: trial.refused for trial in trials}
        assert "while a model is trained" in refused["int8 static"]
        assert refused["fp32"] == ""
        if of != "weight_gradient":  # what gradients have in common adds up there, and errors do not
            assert "dB" in refused["int4 weights"]
    path = tmp_path / "plan.json"
    found.plan.save(path)
    assert PrecisionPlan.load(path) == found.plan
    with pytest.raises(NumericsError, match="gradients of 0 were not probed"):
        trained_layers(net, probe.inputs, {})


def test_a_looser_bound_never_makes_a_product_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    layers = trained_layers(net, (probe := probed(net)).inputs, probe.gradients)
    times = {name: 1.0 / (1 + number) for number, name in enumerate(CANDIDATES)}
    monkeypatch.setattr(
        training_products, "median_seconds", lambda calls, rounds: {name: times[name] for name in calls}
    )
    chosen = []
    for bound in (60.0, 45.0, 30.0, 10.0):
        config = QUICK.model_copy(update={"sqnr_db": bound, "median_relative": 10.0})
        chosen.append([times[choice.kernel] for choice in profile_training(layers, config).plan.choices])
    for slower, faster in itertools.pairwise(chosen):
        assert all(one >= other for one, other in zip(slower, faster, strict=True))
    assert chosen[0] != chosen[-1]


@pytest.mark.parametrize("of", PASSES)
def test_a_kernels_error_is_judged_on_the_product_that_it_computes(of: Pass) -> None:
    """Against float64, for each product, whatever its layout."""
    net = model()
    layers = trained_layers(net, (probe := probed(net)).inputs, probe.gradients)
    first, second, bias = layers[0].operands(of, 64, torch.Generator().manual_seed(0))
    reference = exact(of, first.double(), second.double(), None if bias is None else bias.double())
    found = by_kernel(CANDIDATES["bf16"], of, first, second, bias)
    assert (
        found.shape
        == reference.shape
        == ((64, 32) if of == "forward" else (64, 64) if of == "input_gradient" else (32, 64))
    )
    error = (found - reference).norm() / reference.norm()
    assert 1e-4 < error < 1e-2
    trials = training_products.try_product(layers[0], of, [CANDIDATES["fp32"], CANDIDATES["bf16"]], QUICK)[64]
    assert trials[1].accuracy.sqnr_db == pytest.approx(-20 * float(error.log10()), abs=1.5)


def test_plans_of_one_purpose_are_not_used_for_the_other(tmp_path: Path) -> None:
    net = model()
    plan = everywhere(net, "bf16")
    with pytest.raises(NumericsError, match="is for training, not for scoring"):
        apply(net, plan)
    with pytest.raises(NumericsError, match="is for scoring, not for training"):
        apply_for_training(net, dataclasses.replace(plan, purpose="scoring"))
    with pytest.raises(NumericsError, match=r"0 is \(32, 64\), the plan's \(32, 63\)"):
        apply_for_training(net, dataclasses.replace(plan, choices=(KernelChoice("0", "forward", 1, 32, 63, "bf16"),)))
    with pytest.raises(NumericsError, match="0 cannot be trained by int8 static"):
        apply_for_training(net, everywhere(net, "int8 static"))
    with pytest.raises(NumericsError, match=r"float64, plans train float32"):
        apply_for_training(model().double(), plan)


@pytest.mark.parametrize(
    ("change", "message"), [({"schema": 2}, "of version 2, this library reads 3"), ({"purpose": "painting"}, "no plan")]
)
def test_a_plan_of_an_earlier_version_or_of_no_purpose_is_refused(change, message, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    everywhere(model(), "bf16").save(path)
    path.write_text(sealed_json({**json.loads(path.read_text()), **change}))
    with pytest.raises(NumericsError, match=message):
        PrecisionPlan.load(path)
