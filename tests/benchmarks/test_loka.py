"""``cordillera bench loka`` with few points: its parts run and write what docs quote."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import _loka_mods
import loka
import pytest
import torch
from _results import make_console

from cordillera.recipe import load

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]


def read(folder: Path, part: str) -> Any:
    content = json.loads((folder / f"loka-{part}.json").read_text())
    assert (content["system"], content["quick"]) == ("loka", True)
    assert content["evidence"].startswith("measured")
    return content


@pytest.mark.slow
def test_the_parts_that_train_nothing(tmp_path: Path) -> None:
    loka.main([loka.Part.probe, loka.Part.shapes], quick=True, results=tmp_path)
    probe = read(tmp_path, "probe")
    assert probe["reached"] == {"cancellation": True}
    assert probe["errors"]["ours"] < 1e-3 < probe["errors"]["E[xx] - E[x]E[x], float32"]
    shapes = read(tmp_path, "shapes")
    assert [row["shape"] for row in shapes["rows"]] == 2 * [list(shape) for shape in loka.SHAPES[:2]]
    assert [bool(row["outlier"]) for row in shapes["rows"]] == [False, False, False, True]
    for row in shapes["rows"]:
        chosen = row["milliseconds"][row["kernel"]]
        assert row["times_fp32"] == pytest.approx(row["milliseconds"]["fp32"] / chosen)
        assert row["kernel"] not in row["refused"]
    for rows, found in ((shapes["rows"][:2], shapes), (shapes["rows"][2:], shapes["with_outliers"])):
        times = [row["milliseconds"]["fp32"] / row["milliseconds"][found["best"]] for row in rows]
        best = math.sqrt(math.prod(times))
        assert found["over_best_uniform"] == pytest.approx(found["geometric_mean"] / best)
        assert not any(found["best"] in row["refused"] for row in rows)
    assert shapes["reached"]["times_fp32"] == (shapes["geometric_mean"] >= shapes["targets"]["times_fp32"])


@pytest.mark.slow
def test_mods_are_timed_beside_what_they_replace() -> None:
    found = _loka_mods.times(make_console(), quick=True)
    assert {(row["what"], row["pass"]) for row in found["rows"]} == {
        (what, kind) for what in _loka_mods.PAIRS for kind in ("forward", "forward and backward")
    }
    for row in found["rows"]:
        assert row["times_as_fast"]["median"] > 0
        key = f"{row['what']}, eager, {row['pass']}"
        assert found["geometric_means"][key] == pytest.approx(row["times_as_fast"]["median"])
    assert len(found["reached"]) == 4
    assert found["not_compiled"] == "not with --quick"


@pytest.mark.slow
def test_what_is_timed_are_the_layers_that_they_are_called() -> None:
    """A layer is its product with its epilogue; the modified one is torch's formulas."""
    x, weight, bias, scale, shift = (tensor.detach() for tensor in _loka_mods._operands("layer", 8, 512, 16)[0])
    usual, modified = (layer(x, weight, bias, scale, shift) for layer in _loka_mods.PAIRS["layer"])
    y = x @ weight.T
    torch.testing.assert_close(usual, _loka_mods._usual(y, bias, scale, shift), rtol=1e-4, atol=1e-5)
    expected = torch.nn.functional.rms_norm(y.view(8, 2, 256), (256,), eps=1e-5).flatten(1)
    torch.testing.assert_close(modified, torch.nn.functional.hardswish(expected), rtol=1e-4, atol=1e-5)


def test_variants_differ_in_their_mods_alone() -> None:
    base = load("movielens-wukong")
    for mods in _loka_mods.VARIANTS.values():
        recipe = _loka_mods._recipe(mods, 3, quick=False)
        assert recipe.seed == 3
        assert recipe.data == base.data
        assert recipe.model == base.model.model_copy(update={"mods": mods})


@pytest.mark.slow
def test_models_with_and_without_mods_are_trained_and_paired(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/loka.py"), "--quick", "--part", "mods"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    quality = read(tmp_path, "mods")["quality"]["variants"]
    assert set(quality) == {"as it was", "all three"}
    assert quality["as it was"]["change_percent"] == [0.0]
    assert quality["all three"]["ne"] != quality["as it was"]["ne"]
    assert quality["all three"]["shown_within"] is False  # one seed shows nothing
