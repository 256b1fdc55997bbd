"""Advice names the bits whose protection buys most, and the page shows what was found."""

from __future__ import annotations

import math
from typing import Any

import torch

from cordillera.numerics.faults.bit_flips import Region
from cordillera.numerics.faults.fault_model import Component
from cordillera.numerics.faults.vulnerability import Campaign, Verdicts
from cordillera.reports.heat_maps import heat_map
from cordillera.reports.ranking.injection import advice, injection_page


def found(name: str, numbers: int, harm: dict[int, float], detected: float = 0.0) -> dict[str, Any]:
    """What a campaign says of float32 numbers whose faults at these bits are wrong on these shares of inputs."""

    def judge(region: Region, bits: torch.Tensor) -> Verdicts:
        wrong = torch.tensor([harm.get(int(bit) % 32, 0.0) for bit in bits[:, 0]]) * 1000
        caught = (wrong * detected).round().long()
        return Verdicts(wrong.round().long() - caught, caught, 1000)

    campaign = Campaign([Component.of(name, [Region.of("w", torch.zeros(numbers))])], judge)
    campaign.run(4)
    return campaign.found[name].to_json()


def test_bits_are_protected_in_order_of_what_they_cause() -> None:
    components = [found("top", 100, {30: 0.4, 29: 0.2, 3: 0.01}), found("bottom", 300, {30: 0.1})]
    lines = advice(components)
    harm = 100 * 0.4 + 100 * 0.2 + 100 * 0.01 + 300 * 0.1  # of numbers times rates, over 400 numbers of 32 bits
    assert f"probability of {100 * harm / 12800:.3g} %" in lines[0]
    assert "0 % of the wrong outputs are NaN" in lines[1]
    assert lines[2].startswith(
        "Protect bits 29 to 30 of every float32 of top: costs 25 bytes (1.56 % of these weights)"
    )
    assert f"{100 * 60 / harm:.3g} %" in lines[2]
    assert lines[3].startswith("Protect bit 30 of every float32 of bottom: costs 38 bytes")
    assert f"{100 * 1 / 12800:.3g} %" in lines[4]  # what is left


def test_components_that_cause_little_are_left_alone_and_a_check_finds_nan() -> None:
    lines = advice([found("top", 100, {30: 0.4}, detected=0.5), found("tables", 1000, {})])
    assert "50 % of the wrong outputs are NaN" in lines[1]
    assert lines[-2].startswith("Leave tables unprotected: 90.9 % of these weights")
    assert lines[-1].startswith("Some bit positions were hit 4 times only")


def test_nothing_wrong_and_nothing_injected_are_said() -> None:
    (line,) = advice([found("top", 100, {})])
    assert line.startswith("No fault made an output wrong. At 95 % confidence the PVF is below")
    empty = Campaign([Component.of("empty", [])], lambda region, bits: Verdicts(bits, bits, 1))
    assert advice([empty.found["empty"].to_json()]) == ["Nothing was injected: there is nothing to say."]


def test_a_heat_map_has_a_cell_a_rate_and_shades_by_magnitude() -> None:
    rates = {"a<b": {2: 0.0, 1: 1.0, 0: 1e-5}, "c": {2: math.nan, 1: 1e-9, 0: 0.1}}
    drawing = heat_map("words", rates, {2: "sign", 1: "exponent", 0: "mantissa"})
    assert drawing.count("<rect") == 5 + 6  # the legend has a cell for each power of ten from 1e-5
    assert "a&lt;b, 1: 1<" in drawing
    opacity = [cell.split('"')[0] for cell in drawing.split("fill-opacity:")[1:6]]
    assert opacity == ["0.000", "1.000", "0.080", "0.080", "0.816"]


def test_the_page_names_what_was_interrupted_left_out_and_judged_one_by_one() -> None:
    components = [found("top & more", 100, {30: 0.4})]
    content = {
        "run": "r",
        "fault": {"name": "single bit", "bits": 1, "burst": False},
        "seed": 0,
        "split": "test",
        "samples": 1000,
        "samples_left_out": 2,
        "threshold": 0.5,
        "interrupted": True,
        "rounds": 4,
        "judged": 128,
        "judged_again_by_flipping": 3,
        "judged_one_by_one": {"table": "no operator of torch reads it"},
        "seconds": 1.0,
        "components": components,
        "advice": advice(components),
    }
    page = injection_page(content)
    for text in (
        "were interrupted",
        "2 samples were left out",
        "table (no operator of torch reads it)",
        "top &amp; more",
    ):
        assert text in page
    assert page.count("<rect") == 32 + 6
    assert "<script" not in page
