"""Training on groups of samples: the reference of its divergence, and requests to stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from cordillera import workflows
from cordillera.errors import Interrupted
from cordillera.workflows.post_training import groups
from tests.training.post_training_runs import post_recipe, train


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))


def test_ids_beyond_the_tokenizer_give_no_divergence(begun: Path) -> None:
    train(post_recipe(begun, model={"vocabulary": 400}, training={"steps": 1}), "wide")
    training = {"steps": 1, "log_every": 1}
    recipe = post_recipe(begun, "grpo", "wide", objective={"kl": 0.1}, data={"held_out": 0}, training=training)
    (record,) = [one for one in train(recipe, "a").run.metrics() if one["kind"] == "train"]
    assert record["divergence"] == pytest.approx(0, abs=1e-6)


def test_an_evaluation_needs_no_reference(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun / "start", tmp_path / "start")
    recipe = post_recipe(begun, "grpo", tmp_path / "start", objective={"kl": 0.1}, training={"steps": 1})
    run = train(recipe, "a").run
    (tmp_path / "start").rename(tmp_path / "moved")
    assert workflows.evaluate(run).loss == run.read_json("evaluation.json")["loss"]


def test_a_request_to_stop_is_heard_while_problems_are_answered(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.loads(line) for line in (begun / "problems.jsonl").read_text().splitlines()]
    more = [row | {"prompt": f"{number} {row['prompt']}"} for row in rows for number in range(2)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    recipe = post_recipe(
        begun, "grpo", begun / "start", data={"path": "problems.jsonl", "held_out": 0.8}, training={"steps": 1}
    )
    run = train(recipe, "a").run
    before = (run.folder / "evaluation.json").read_text()
    sample, found = groups.sample_answers, list[int]()

    def asked(model: Any, tokenizer: Any, prompts: Any, *more: Any) -> Any:
        if not found:
            os.kill(os.getpid(), signal.SIGTERM)
        found.append(len(prompts))
        return sample(model, tokenizer, prompts, *more)

    with monkeypatch.context() as patch:
        patch.setattr(groups, "sample_answers", asked)
        with pytest.raises(Interrupted, match=r"16 of 42 held-out .* nothing was written\n  -> .* again$"):
            workflows.evaluate(run)
    assert found == [16]
    assert (run.folder / "evaluation.json").read_text() == before
    monkeypatch.setattr(groups, "TOGETHER", 10**6)  # all at once
    assert workflows.evaluate(run).measures == json.loads(before)["measures"]
