"""Language models in an emulated format: every product, all policies of weights, interruptions, refusals, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cordillera import workflows
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.errors import CordilleraError, RunError
from cordillera.kernels.attention.documents import document_attention
from cordillera.models.language.llama import PRESETS, LlamaConfig
from cordillera.models.language.plain_attention import plain_attention
from cordillera.numerics.formats.formats import FORMATS
from cordillera.numerics.formats.rounding import round_to
from cordillera.recipe import LanguageRecipe, validate
from cordillera.run import Run
from cordillera.training.checkpoints import folder_of, steps
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens
from tests.distributed.processes import found_by, needs_gloo

pytestmark = pytest.mark.slow

SMALL = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=64, context=64, tied=True)


def iteration(seed: int, vocabulary: int) -> list[PackedTokens]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 9, 9, 30, 48])
    return [PackedTokens(torch.randint(0, vocabulary, (48,), generator=generator), offsets) for _ in range(2)]


def trained(model: LlamaConfig, count: int, **emulate: Any) -> tuple[list[float], dict[str, Tensor], LanguageEngine]:
    """Losses of steps, then the weights that are computed with."""
    config = LanguageConfig(learning_rate=0.01, weight_decay=0.0, emulate=emulate or None)
    engine = LanguageEngine(config, model, ProcessMesh(ParallelConfig()))
    losses = [engine.step(iteration(0, model.vocabulary)).loss for _ in range(count)]
    named = {name: weight.full_tensor().detach().clone() for name, weight in engine.stages[0].named_parameters()}
    return losses, named, engine


def run_formats(rank: int, folder: str) -> dict[str, Any]:
    debug, bf16 = PRESETS["llama-debug"], FORMATS["bf16"]
    found: dict[str, Any] = {"exact": trained(debug, 2)[0]}
    for policy in ("master", "none", "split"):
        drawn = {"weight_rounding": "stochastic"} if policy == "none" else {}
        losses, weights, engine = trained(debug, 2, weights=policy, **drawn)
        matrices = [name for name, weight in weights.items() if weight.dim() >= 2]
        found[policy] = {
            "losses": losses,
            "of the format": all(torch.equal(weights[name], round_to(weights[name], bf16)) for name in matrices),
            "kept": all(torch.equal(engine.storage.full(name), weights[name]) for name in matrices),
        }
    found["twice"] = [trained(SMALL, 2, rounding="stochastic")[0] for _ in range(2)]
    fp8 = {"format": "e4m3fn", "gradient_format": "e5m2"}
    for name, emulate in {
        "unscaled": {"format": "e4m3fn"},
        "row": {**fp8, "scale": "row", "weight_gradients": "float32"},
        "tensor": {**fp8, "scale": "tensor"},
        "block": {**fp8, "scale": "block"},
        "loss scale": {"format": "fp16", "loss_scale": "dynamic"},
    }.items():
        found[name] = trained(SMALL, 12, **emulate)[0]
    found["small"] = trained(SMALL, 12)[0]
    engine = LanguageEngine(
        LanguageConfig(emulate={"format": "fp16", "loss_scale": "dynamic"}), SMALL, ProcessMesh(ParallelConfig())
    )
    engine.loss_scale.value = 2.0**31
    report = engine.step(iteration(0, 64))
    found["overflow"] = (report.is_skipped, engine.loss_scale.value, engine.skipped)
    return found


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(1, tmp_path_factory.mktemp("formats"), run_formats, 120)[0]


@needs_gloo
@pytest.mark.parametrize("policy", [pytest.param("master", marks=pytest.mark.slow), "none", "split"])
def test_a_model_computes_with_numbers_of_the_format_near_float32(formats: dict[str, Any], policy: str) -> None:
    found = formats[policy]
    assert found["of the format"]
    assert found["kept"] is (policy == "none")
    assert found["losses"] != formats["exact"]
    assert found["losses"] == pytest.approx(formats["exact"], rel=0.02)


@needs_gloo
@pytest.mark.parametrize("name", ["row", "tensor", "block", "loss scale"])
def test_short_formats_learn_with_scales(formats: dict[str, Any], name: str) -> None:
    learnt = formats["small"][0] - formats["small"][-1]
    assert learnt > 0.5
    assert formats[name][0] - formats[name][-1] > 0.9 * learnt
    assert formats[name] != formats["small"]


@needs_gloo
def test_stochastic_rounding_gives_the_same_bits_twice(formats: dict[str, Any]) -> None:
    assert formats["twice"][0] == formats["twice"][1]


@needs_gloo
def test_eight_bits_without_scales_learn_less(formats: dict[str, Any]) -> None:
    assert formats["unscaled"][0] - formats["unscaled"][-1] < 0.88 * (formats["small"][0] - formats["small"][-1])


@needs_gloo
def test_gradients_that_overflow_halve_the_loss_scale_and_change_nothing_else(formats: dict[str, Any]) -> None:
    assert formats["overflow"] == (True, 2.0**30, 1)


@pytest.mark.parametrize("lengths", [[5, 0, 1, 7], [13], [], [0]])
def test_plain_attention_is_attention_within_documents(lengths: list[int]) -> None:
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    found = []
    for attention in (plain_attention, document_attention):
        generator = torch.Generator().manual_seed(0)
        shapes = ((sum(lengths), heads, 8) for heads in (6, 2, 2))
        q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
        out = attention(q, k, v, offsets)
        if len(q):
            out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in (q, k, v) if len(q))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    lines = ("far sea " * (1 + number % 20) for number in range(60))
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"{n} {line}"}) + "\n" for n, line in enumerate(lines)))
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 32, "vocabulary": 258, "context": 64}

    def made(**training: Any) -> LanguageRecipe:
        parallel = training.pop("parallel", {})
        content: dict[str, Any] = {
            "data": {"path": "text.jsonl", "tokenizer": "bytes", "held_out": 0.1},
            "packing": {"tokens": 256, "context": 64},
            "model": {"name": "llama", **sizes},
            "training": {"steps": 4, "log_every": 2, **training},
        }
        found = validate({"device": "cpu", "threads": 1, "parallel": parallel, **content})
        assert isinstance(found, LanguageRecipe)
        return found

    return made


@needs_gloo
@pytest.mark.parametrize(
    "emulate",
    [
        {"weights": "master", "rounding": "stochastic"},
        {"weights": "split"},
        {"weights": "none", "format": "e4m3fn", "scale": "row", "weight_rounding": "stochastic"},
        {"format": "fp16", "loss_scale": "dynamic", "loss_scale_window": 1},
    ],
    ids=["master", "split", "none", "loss scale"],
)
def test_an_emulated_run_resumes_to_the_same_bits_and_says_what_it_emulated(recipe: Any, emulate: Any) -> None:
    whole = workflows.train(recipe(emulate=emulate, decay="none"), "whole").run
    part = workflows.train(recipe(emulate=emulate, decay="none", steps=2), "part").run
    part.recipe_file.write_text(part.recipe_file.read_text().replace("steps = 2", "steps = 4"))
    workflows.train(part)
    contents = [
        {name: tensor for file in newest(run).glob("*.safetensors") for name, tensor in load_file(file).items()}
        for run in (whole, part)
    ]
    assert contents[0].keys() == contents[1].keys()
    for name, tensor in contents[0].items():
        assert torch.equal(tensor.view(torch.int32), contents[1][name].view(torch.int32)), name
    engines = [json.loads((newest(run) / "state.json").read_text())["engine"] for run in (whole, part)]
    assert engines[0] == engines[1]
    assert ("loss_scale" in engines[0]) is ("loss_scale" in emulate)
    assert "Emulated weights" in (whole.folder / "report.html").read_text()
    # and what is read back is that too
    assert workflows.evaluate(part).loss == json.loads((whole.folder / "evaluation.json").read_text())["loss"]


def newest(run: Run) -> Path:
    return folder_of(run.checkpoints, steps(run.checkpoints)[-1])


@needs_gloo
def test_a_checkpoint_of_another_policy_is_refused(recipe: Any) -> None:
    run = workflows.train(recipe(emulate={"weights": "split"}), "a").run
    run.recipe_file.write_text(run.recipe_file.read_text().replace('"split"', '"master"'))
    with pytest.raises(RunError, match=r'training\.emulate\.weights: "split" -> "master"'):
        workflows.train(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"shard": 2}}, "in one process, the mesh has 2"),
        ({"parallel": {"context": 2}}, "in one process, the mesh has 2"),
        ({"parallel": {"recompute": "full"}}, "set parallel.recompute = 'none'"),
        ({"precision": "bf16"}, "set precision = 'fp32'"),
        ({"compile": True}, "set compile = false"),
        ({"emulate": {"format": "fp16", "weights": "split"}}, "halves of float32 are bf16"),
    ],
)
def test_what_cannot_be_emulated_is_refused_by_one_error_before_there_is_a_run(
    recipe: Any, changes: Any, message: str
) -> None:
    with pytest.raises(CordilleraError, match=message) as caught:
        workflows.train(recipe(**{"emulate": {}, **changes}), "a")
    assert str(caught.value).count(message) == 1
    assert not Path("a").exists()
