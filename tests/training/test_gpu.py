"""Runs on a GPU: ranking models learn what they learn on a CPU, and language models learn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import cordillera
from cordillera.recipe import LanguageRecipe, RankingRecipe
from cordillera.workflows import language, ranking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HISTORIES = ("data.histories.requests=64", "data.histories.longest=200", "training.evaluate_every=100")
SYNTHETIC = ("data.synthetic.rows=6000", "data.batch_size=512", "training.evaluate_every=100")
RANKING = {
    "synthetic-dlrm": SYNTHETIC,
    "synthetic-wukong": SYNTHETIC,
    "histories-hstu": HISTORIES,
    "histories-hstu, window": (*HISTORIES, "model.window=40"),
}
TEXT = (
    "training.steps=12", "training.warmup_steps=2", "packing.context=256", "packing.tokens=1024",
    "training.evaluate_every=12", "training.checkpoint_every=6", "training.log_every=1",
    "training.evaluation_tokens=2048",
)  # fmt: skip
LANGUAGE = {
    "llama-debug": (),
    "llama-debug, bf16": ("training.precision=bf16",),
    "llama-debug, compiled": ("training.precision=bf16", "training.compile=true"),
    "llama-moe": (),
    "llama-moe, bf16": ("training.precision=bf16",),
}


def _losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.parametrize("name", RANKING)
def test_ranking_models_learn_the_same_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    losses, found = {}, {}
    for device in ("cpu", "cuda"):
        overrides = [*RANKING[name], f"device={device}", "training.precision=fp32", "training.log_every=1"]
        recipe = cordillera.load_recipe(name.split(",")[0], overrides)
        assert isinstance(recipe, RankingRecipe)
        outcome = ranking.train(recipe, tmp_path / device)
        assert outcome.evaluation is not None
        losses[device] = _losses(tmp_path / device)
        found[device] = outcome.evaluation.tasks["click"].metrics["ne"]
    assert losses["cuda"][:3] == pytest.approx(losses["cpu"][:3], rel=1e-4)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=2e-2)
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-2)


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_learn(name: str, tmp_path: Path) -> None:
    recipe = cordillera.load_recipe(name.split(",")[0], [*TEXT, *LANGUAGE[name], "device=cuda"])
    assert isinstance(recipe, LanguageRecipe)
    outcome = language.train(recipe, tmp_path / "whole")
    losses = _losses(tmp_path / "whole")
    assert losses[0] == pytest.approx(math.log(264), rel=0.1)
    assert losses[-1] < losses[0] - 0.5
    assert math.isfinite(outcome.report.evaluation.loss)
