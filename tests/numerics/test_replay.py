"""Replay gives the verdicts of a model whose bits are really flipped, on every kind of layer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from _pvf_models import Argmax
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import NumericsError
from cordillera.numerics.faults.bit_flips import INT4, BitLayout, Region, regions_of
from cordillera.numerics.faults.fault_model import Component, FaultModel, draw
from cordillera.numerics.faults.replay import Replay, Threshold, Touched
from cordillera.numerics.faults.substitution import Trace
from cordillera.numerics.faults.vulnerability import Campaign


class Attention(nn.Module):
    """One block of a small transformer with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.mT / 8**0.5, -1) @ v)
        return self.head(x[:, -1])


class Packed(nn.Module):
    """A linear layer whose weight is int4 packed in bytes with a scale a row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("payload", torch.randint(0, 256, (5, 4), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(5, 1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.payload & 15, self.payload >> 4
        values = torch.stack([low, high], -1).flatten(-2).to(torch.float32) - 8
        return F.linear(x, values * self.scale.float())


def perceptron() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 2)), torch.randn(
        20, 6
    )


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = (
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2, padding=1),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    return nn.Sequential(*layers), torch.randn(12, 1, 8, 8)


def half() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).to(torch.bfloat16), torch.randn(
        16, 6
    ).bfloat16()


def transposed() -> tuple[nn.Module, Tensor]:
    """Weights whose rows do not lie one after another."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().mT.contiguous().mT)
        layer.bias = nn.Parameter(torch.randn(len(layer.bias), 2)[:, 0])
    return model, torch.randn(10, 6)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "attention": lambda: (Attention(), torch.randint(0, 11, (9, 5))),
    "packed": lambda: (Packed(), torch.randn(16, 8)),
    "bfloat16": half,
    "transposed": transposed,
}


def regions(model: nn.Module) -> list[Region]:
    found = regions_of(model, buffers=True)
    return [Region.of(r.name, r.owner, INT4) if r.name == "payload" else r for r in found]


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fault", [FaultModel(), FaultModel(3), FaultModel(2, burst=True)], ids=lambda m: m.name)
def test_verdicts_are_those_of_real_flips(name: str, fault: FaultModel) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    before = copy.deepcopy(model.state_dict())
    replay = Replay(lambda: model(inputs), Argmax())
    wrong = 0
    for hits in draw(Component.of("all", regions(model)), fault, 0, range(6)):
        replayed, real = replay(hits.region, hits.bits), replay.flip_each(hits.region, hits.bits)
        assert replayed.silent.equal(real.silent), hits.region.name
        assert replayed.detected.equal(real.detected), hits.region.name
        wrong += int(real.silent.sum() + real.detected.sum())
    assert wrong
    assert not replay.one_by_one
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "attention", "packed"])
def test_outputs_are_those_of_real_flips_nan_and_infinity_included(name: str) -> None:
    torch.manual_seed(1)
    model, inputs = MODELS[name]()
    model.eval()
    replay = Replay(lambda: model(inputs), Argmax())
    non_finite = 0
    for region in regions(model):
        top = region.layout.width - 2 if region.layout.exponent_bits else region.layout.width - 1
        numbers = torch.arange(min(20, region.num_numbers))
        bits = torch.cat([numbers * region.layout.width + bit for bit in (0, top, top - 1)]).unsqueeze(1)
        found = replay.outputs(region, bits)
        for addresses, outputs in zip(bits.tolist(), found, strict=True):
            real = replay._run_flipped(region, addresses)
            non_finite += int((~real.isfinite()).sum())
            assert (outputs.isnan() == real.isnan()).all()
            torch.testing.assert_close(
                outputs, real, rtol=1e-4, atol=1e-4 * float(replay.golden.abs().max()), equal_nan=True
            )
    assert non_finite or name in ("packed", "convolutions")


def test_nan_and_infinity_are_detected_and_other_changes_silent() -> None:
    weight = nn.Parameter(torch.tensor([[1.5]]))
    replay = Replay(lambda: F.linear(torch.tensor([[1.0], [-1.0], [0.0]]), weight), Threshold(0.0))
    region = Region.of("w", weight)
    verdicts = replay(region, torch.tensor([[30], [31], [0]]))  # 1.5 with a full exponent is NaN; the sign; one ulp
    assert verdicts.detected.tolist() == [3, 0, 0]
    assert verdicts.silent.tolist() == [0, 2, 0]  # 1 and -1 change sides, 0 does not


def test_inputs_whose_golden_output_is_not_finite_are_not_judged() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, float("nan")], [2.0, 1.0]]))
    inputs = torch.tensor([[1.0], [3.0]])
    replay = Replay(lambda: inputs * weight[:, :1], Threshold(0.0))
    assert (replay.inputs, replay.skipped) == (2, 0)  # the NaN is in no output

    rows = torch.tensor([[1.0], [float("inf")], [2.0]])
    replay = Replay(lambda: F.linear(rows, weight[1:, :1]), Threshold(0.0))
    assert (replay.inputs, replay.skipped) == (2, 1)
    verdicts = replay(Region.of("w", weight), torch.tensor([[2 * 32 + 31], [32]]))
    assert verdicts.inputs == 2
    assert verdicts.silent.tolist() == [2, 0]
    assert verdicts.detected.tolist() == [0, 0]
    with pytest.raises(NumericsError, match="NaN or infinite on every input"):
        Replay(lambda: F.linear(rows, weight[:1, 1:]), Threshold(0.0))
    with pytest.raises(NumericsError, match="or there is none"):
        Replay(lambda: torch.zeros(0, 1), Threshold(0.0))


def test_a_flip_of_a_nan_weight_is_judged_like_any_other() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[1, 1] = torch.nan
        model.weight[0] = torch.tensor([1.0, 1.0])
        model.bias.zero_()
    inputs = torch.tensor([[1.0, 0.5], [2.0, 1.0]])
    replay = Replay(lambda: model(inputs)[:, :1], Threshold(0.0))
    region = Region.of("weight", model.weight)
    before = model.weight.detach().view(torch.int32).clone()
    assert replay(region, torch.tensor([[3 * 32 + 5], [32 + 31]])).silent.tolist() == [0, 0]  # unread; 1 - 0.5
    assert replay(region, torch.tensor([[30]])).detected.tolist() == [2]
    assert model.weight.detach().view(torch.int32).equal(before)


def test_a_flip_in_rows_that_no_input_reads_is_harmless() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(50, 4), nn.Linear(4, 1)
    used = torch.tensor([3, 7, 7, 20])
    replay = Replay(lambda: head(table(used)), Threshold(0.0))
    region = Region.of("table", table.weight)
    unread = torch.tensor([row for row in range(50) if row not in (3, 7, 20)])
    bits = (unread[:, None] * 128 + torch.arange(128)).reshape(-1, 1)
    verdicts = replay(region, bits)
    assert int(verdicts.silent.sum() + verdicts.detected.sum()) == 0
    read = replay(region, torch.tensor([[7 * 128 + 30]]))
    assert int(read.silent + read.detected) in (0, 2)  # both inputs that read the row, or none


def test_layers_without_numbers_and_no_faults_are_fine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is nothing to initialise
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 0), nn.Linear(0, 2))
    inputs = torch.randn(5, 3)
    replay = Replay(lambda: model(inputs), Threshold(0.0))
    campaign = Campaign([Component.of(r.name, [r]) for r in regions_of(model)], replay)
    assert campaign.run(3)
    assert campaign.found["1.weight"].injections == 0
    assert campaign.found["0.weight"].rate().value == 0  # nothing of it reaches the output
    assert len(replay(regions_of(model)[0], torch.zeros(0, 1, dtype=torch.int64)).silent) == 0


def test_what_replay_cannot_see_is_flipped_one_by_one_and_said() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_numpy = nn.Parameter(torch.randn(3, 2))
            self.by_value = nn.Parameter(torch.randn(2))
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x @ torch.from_numpy(self.by_numpy.detach().numpy().copy())
            return self.head(x) + (1.0 if float(self.by_value[0]) > 0 else -1.0)

    torch.manual_seed(0)
    model, inputs = Hidden(), torch.randn(8, 3)
    replay = Replay(lambda: model(inputs), Threshold(0.0))
    for region in regions_of(model):
        bits = torch.arange(0, region.num_bits, 5).unsqueeze(1)
        replayed, real = replay(region, bits), replay.flip_each(region, bits)
        assert replayed.silent.equal(real.silent)
        assert replayed.detected.equal(real.detected)
    assert set(replay.one_by_one) == {"by_numpy", "by_value"}


def test_a_kept_suffix_and_a_lookup_give_the_verdicts_of_the_whole_model() -> None:
    torch.manual_seed(0)
    rows = torch.randint(0, 256, (12, 10), dtype=torch.uint8)  # 6 payload bytes, a float32 scale, as fused rows
    rows[:, 6:] = torch.rand(12, 1).view(torch.uint8)
    head, ids = nn.Linear(6, 1), torch.randint(0, 12, (30,))

    def dequantise(fused: Tensor) -> Tensor:
        return (fused[..., :6].float() - 128) * fused[..., 6:].contiguous().view(torch.float32)

    def lookup(region: Region, bits: Tensor) -> Touched:
        from cordillera.numerics.faults.bit_flips import corrupted

        places, masks = region.locate(bits)
        width = region.stored.shape[-1]
        row = places[:, 0] // width
        copies = corrupted(rows[row], places % width + region.first_column, masks)
        fault, sample = (row[:, None] == ids).nonzero(as_tuple=True)
        with torch.no_grad():
            return Touched(fault, sample, head(dequantise(copies)[fault]))

    def forward() -> Tensor:
        return head(dequantise(rows[ids]))

    kept = dequantise(rows[ids])
    payload = Region.of("payload", rows, columns=slice(0, 6))
    scale = Region.of("scale", rows, BitLayout.of(torch.float32), slice(6, 10))
    lookups = {"payload": lookup, "scale": lookup}
    replay = Replay(forward, Threshold(0.0), suffix=lambda: head(kept), lookups=lookups)
    generic = Replay(forward, Threshold(0.0))
    wrong = 0
    for region in (payload, scale, *regions_of(head)):
        bits = torch.arange(0, region.num_bits, 3).unsqueeze(1)
        verdicts, real = replay(region, bits), replay.flip_each(region, bits)
        by_copies = generic(region, bits)
        for name in ("silent", "detected"):
            assert getattr(verdicts, name).equal(getattr(real, name)), region.name
            assert getattr(by_copies, name).equal(getattr(real, name)), region.name
        wrong += int(real.silent.sum())
    assert wrong
    assert not replay.one_by_one
    assert not generic.one_by_one


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(NumericsError, match=r"must be \[inputs, n\], got \(3,\)"):
        Replay(lambda: torch.zeros(3), Threshold(0.0))


def test_a_model_in_training_mode_is_refused() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), torch.randn(30, 4)
    with pytest.raises(NumericsError, match="evaluation mode"):
        Replay(lambda: model(inputs), Argmax())
    model.eval()
    assert Replay(lambda: model(inputs), Argmax()).inputs == 30


def test_answers_and_their_distance_from_others_are_those_of_their_rules() -> None:
    outputs = torch.tensor([[1.0, 4.0, 2.5], [-1.0, -7.0, -1.0]])
    assert Argmax().decide(outputs).tolist() == [[1], [0]]
    assert Argmax().margin(outputs).tolist() == [[1.5], [0.0]]
    assert Argmax().decide(outputs[:, :1]).tolist() == [[0], [0]]
    assert Argmax().margin(outputs[:, :1]).tolist() == [[torch.inf], [torch.inf]]  # one class has no rival
    threshold = Threshold(2.5)
    assert threshold.decide(outputs).tolist() == [[False, True, True], [False, False, False]]
    assert threshold.margin(outputs).tolist() == [[1.5, 1.5, 0.0], [3.5, 9.5, 3.5]]


@pytest.mark.parametrize(
    ("weight", "bit", "tolerance", "again"),
    [
        (1.5, 0, None, False),  # an output of 1.5 is far from the threshold
        (1.5, 0, 0.7, True),  # 1.5 <= 0.7 * (1 + 1.5), the largest output
        (1.5, 0, 0.55, False),
        (3e-6, 0, None, True),  # nearer than 1e-5 * (1 + 3e-6)
        (3e-5, 0, None, False),
        (1.5, 29, None, True),  # 1.5 with the exponent's second bit flipped: small, so the threshold is near
        (3.0, 29, None, False),  # 3 * 2 ** 64 is far below the largest number, but
        (2.0**-3, 30, None, True),  # 2 ** 125 is within a factor of a hundred of it
    ],
)
def test_a_fault_near_a_decision_or_an_overflow_is_judged_again(
    weight: float, bit: int, tolerance: float | None, again: bool
) -> None:
    parameter = nn.Parameter(torch.tensor([[weight]]))
    replay = Replay(lambda: F.linear(torch.ones(1, 1), parameter), Threshold(0.0), tolerance=tolerance)
    replay(Region.of("w", parameter), torch.tensor([[bit]]))
    assert (replay.judged, replay.repeated) == (1, int(again))


@pytest.mark.parametrize(
    ("shape", "read", "by_rows"),
    [
        ((4, 3), lambda w, x: F.linear(x[:, 0], w), True),
        ((4, 3), lambda w, x: F.linear(w, x[0, :2]), False),  # the weight is the input
        ((4, 3), lambda w, x: x[:, 0] @ w.T, False),
        ((4, 3), lambda w, x: F.linear(x[:, 0], w) * w.sum(), False),  # one of two reads is of the whole
        ((4, 2, 3), lambda w, x: F.conv1d(x, w), True),
        ((4, 2, 3), lambda w, x: F.conv1d(x[0], w), False),  # without a batch
        ((4, 1, 3), lambda w, x: F.conv1d(x, w, groups=2), False),
        ((4, 1, 3), lambda w, x: F.conv1d(x, w, None, 1, 0, 1, 2), False),
        ((4, 2, 3), lambda w, x: F.conv1d(x, w, None, 1, 0, 1, 1), True),
        ((4, 3), lambda w, x: F.embedding(torch.tensor([0, 2]), w), True),
        ((4, 3), lambda w, x: F.embedding(torch.tensor([0, 2]), w, scale_grad_by_freq=True), False),
        ((4, 3), lambda w, x: F.embedding(torch.tensor([0, 2]), w, None, None, 2.0, True), False),
        ((4,), lambda w, x: x[0, 0, 0] * w, False),
    ],
)
def test_rows_are_replayed_alone_where_each_makes_its_own_outputs(
    shape: tuple[int, ...], read: Callable[[Tensor, Tensor], Tensor], by_rows: bool
) -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(shape)), torch.randn(5, 2, 3)
    region = Region.of("w", weight)
    trace = Trace()
    with torch.no_grad(), trace:
        read(weight, x)
    assert trace.reads(region)
    assert trace.has_rows(region) == by_rows
    replay = Replay(lambda: read(weight, x).reshape(1, -1), Threshold(0.3))
    bits = torch.arange(0, region.num_bits, 7).unsqueeze(1)
    found, real = replay(region, bits), replay.flip_each(region, bits)
    assert found.silent.equal(real.silent)
    assert found.detected.equal(real.detected)
    assert not replay.one_by_one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "attention", "packed"])
def test_verdicts_on_an_accelerator_are_those_of_real_flips(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model, inputs = model.eval().cuda(), inputs.cuda()
    before = copy.deepcopy(model.state_dict())
    replay = Replay(lambda: model(inputs), Argmax(), tolerance=2e-3)  # convolutions in TF32
    for hits in draw(Component.of("all", regions(model)), FaultModel(), 0, range(4)):
        replayed, real = replay(hits.region, hits.bits), replay.flip_each(hits.region, hits.bits)
        assert replayed.silent.equal(real.silent), hits.region.name
        assert replayed.detected.equal(real.detected), hits.region.name
    assert not replay.one_by_one
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())
