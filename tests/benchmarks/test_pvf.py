"""``cordillera bench pvf`` with few faults: every part runs and writes what the docs quote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pvf
import pytest
import torch
from _pvf_models import LeNet, Transformer, classifier, lenet_part, stored_as, transformer_part

from cordillera.numerics.faults.fault_model import FaultModel, draw
from cordillera.numerics.faults.vulnerability import Campaign
from tests.benchmarks.programs import run


def test_networks_are_judged_by_replay_as_by_real_flips() -> None:
    """A convolutional net, a transformer, and weights stored in bfloat16; nothing falls back to one by one."""
    torch.manual_seed(0)
    lenet, transformer = LeNet().eval(), Transformer().eval()
    images, tokens = torch.randn(10, 1, 8, 8), torch.randint(0, 10, (6, 8))
    targets = [
        classifier("LeNet", lenet, images, "", lenet_part),
        classifier("transformer", transformer, tokens, "", transformer_part),
        stored_as(torch.bfloat16, "LeNet", lenet, (images,), lenet_part),
    ]
    for target in targets:
        wrong = 0
        for component in target.components:
            for hits in draw(component, FaultModel(), 0, range(3)):
                found, real = target.replay(hits.region, hits.bits), target.replay.flip_each(hits.region, hits.bits)
                assert found.silent.equal(real.silent), hits.region.name
                assert found.detected.equal(real.detected), hits.region.name
                wrong += int(real.silent.sum() + real.detected.sum())
        assert wrong
        assert not target.replay.one_by_one


def test_exponent_bits_dominate_and_their_share_of_bits_is_larger_in_bfloat16() -> None:
    torch.manual_seed(0)
    model, inputs = (
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 12)),
        torch.randn(16, 8),
    )
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        target = stored_as(dtype, "net", model, (inputs,), lambda name: "all")
        campaign = Campaign(target.components, target.replay)
        campaign.run(128)
        found = campaign.found["all"]
        assert found.share_of_part("exponent") > 0.8
        assert found.rate(part="exponent").low > found.rate(part="mantissa").high
        rates[dtype] = found.rate()
    assert rates[torch.bfloat16].low > rates[torch.float32].high  # half of the bits are exponents, not a quarter


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    run(pvf, tmp_path, "--threads", "1")

    def read(part: str) -> Any:
        content = json.loads((tmp_path / f"pvf-{part}.json").read_text())
        assert content["quick"] is True
        return content["results"]

    models = read("models")
    assert [one["model"] for one in models] == ["DLRM", "LeNet", "transformer"]
    assert isinstance(models[0]["ordered_with_intervals_apart"], bool)
    for one in models:
        assert one["judged_one_by_one"] == {}
        for part in one["components"]:
            assert 0 <= part["pvf"]["low"] <= part["pvf"]["value"] <= part["pvf"]["high"] <= 1
            assert math.isclose(
                part["pvf"]["value"], part["silent"]["value"] + part["detected"]["value"], rel_tol=1e-6, abs_tol=1e-12
            )
    formats = {one["model"]: [part["name"] for part in one["components"]] for one in read("formats")}
    assert formats["int8 tables"] == ["int8 payload", "fp32 scales", "fp32 biases"]
    assert {"DLRM in fp32", "DLRM in bf16", "LeNet in fp32", "LeNet in bf16"} < set(formats)
    for one in read("speed"):
        assert one["verdicts_are_the_same"]
        assert one["times_faster"]["median"] > 0
