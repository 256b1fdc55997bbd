"""How far FP8 moves a language model's distributions, by rows and by whole tensors, for the part ``fp8``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from _tables import print_notes
from rich.console import Console
from torch import Tensor, nn

from cordillera.models.language.llama import Llama
from cordillera.numerics.quantization.fp8_rows import BOUND, LARGEST, Fp8Linear
from cordillera.numerics.sites import replace, sites
from cordillera.serving.language.generation import fp8_feed_forward
from cordillera.serving.language.language_model import LanguageModel

PROMPTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "prompts" / "sum.jsonl"
TEXTS, TOKENS = 10, 256


class _TensorWise(nn.Module):
    """The same layer with one scale for the weight and one for all rows of the input."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = self._rounded(weight.detach().float())

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax() / LARGEST
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    def forward(self, x: Tensor) -> Tensor:
        return (self._rounded(x.float()) @ self.weight.T).to(x.dtype)


def _model(kind: str) -> Llama:
    model = LanguageModel("smollm2", device="cpu", drafter="none").model
    if kind == "bfloat16":
        return model
    if kind in ("rows", "rows without bound"):
        return fp8_feed_forward(model, BOUND if kind == "rows" else None)
    ends = ("layers.0.", f"layers.{model.config.layers - 1}.")
    for name, layer in sites(model, only=["layers.*.feed_forward.*"]).items():
        if not name.startswith(ends):
            replace(model, name, _TensorWise(layer.weight))
    return model


@torch.inference_mode()
def _distributions(model: Llama, texts: list[list[int]]) -> list[Tensor]:
    """Log-probabilities of the token after each token of each text."""
    return [model(torch.tensor(text), torch.tensor([0, len(text)])).double().log_softmax(-1) for text in texts]


def fp8(console: Console, quick: bool) -> dict[str, Any]:
    """Measure the Kullback-Leibler divergence from bfloat16 on real text, and with a planted outlier."""
    opened = LanguageModel("smollm2", device="cpu", drafter="none")
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: 2 if quick else TEXTS]
    size = 24 if quick else TOKENS
    texts = [ids[:size] for ids in opened.encode([json.loads(line)["turns"][0] for line in lines])]
    exact = _distributions(_model("bfloat16"), texts)
    results = {}
    for kind in ("rows", "rows without bound", "tensor"):
        found = _distributions(_model(kind), texts)
        each = [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(exact, found, strict=True)]
        results[kind] = {"divergence": statistics.mean(each), "of_texts": each}
        console.print(f"{kind}: {results[kind]['divergence']:.4f} nats a token from bfloat16")
    smaller = sum(
        a < b for a, b in zip(results["rows without bound"]["of_texts"], results["tensor"]["of_texts"], strict=True)
    )
    planted = _planted()
    console.print(f"rows without bound are nearer than tensors in {smaller} of {len(texts)} texts")
    console.print(
        f"beside an outlier of 1e4, the error of the rest is {planted['bounded']:.3f} with the bound {BOUND:g}, "
        f"{planted['unbounded']:.3f} without"
    )
    notes = ["feed-forward nets but the first and the last in FP8, emulated; texts are beginnings of news"]
    print_notes(console, notes)
    return {
        "evidence": "emulated",
        "texts": len(texts),
        "tokens": size,
        "results": results,
        "largest": _largest(texts),
        "smaller": smaller,
        "planted": planted,
        "notes": notes,
    }


def _largest(texts: list[list[int]]) -> float:
    """Largest magnitude that enters a layer of the feed-forward nets that are put into FP8."""
    model, found = _model("bfloat16"), [0.0]
    ends = ("layers.0.", f"layers.{model.config.layers - 1}.")
    for name, layer in sites(model, only=["layers.*.feed_forward.*"]).items():
        if not name.startswith(ends):
            layer.register_forward_pre_hook(lambda _, given: found.append(float(given[0].abs().max())))
    _distributions(model, texts)
    return max(found)


def _planted() -> dict[str, float]:
    """Relative errors of a product of rows with one outlier each, apart from the outlier's own share."""
    generator = torch.Generator().manual_seed(1)
    x, weight = 0.02 * torch.randn(64, 576, generator=generator), 0.1 * torch.randn(1536, 576, generator=generator)
    x[:, 17], weight[:, 17] = 1e4, 0
    exact = x @ weight.T
    errors = {
        name: float((Fp8Linear(weight, bound)(x) - exact).norm() / exact.norm())
        for name, bound in (("bounded", BOUND), ("unbounded", None))
    }
    return errors
