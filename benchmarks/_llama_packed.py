"""Text generation with packed weights beside the same weights in bfloat16."""

from __future__ import annotations

from typing import Any

from _tables import print_notes
from _timing import Spread, interleave, times_faster
from rich.console import Console
from rich.table import Table
from torch import nn

from cordillera.models.language.llama import Llama
from cordillera.numerics.quantization.packed_linear import PackedLinear
from cordillera.serving.language.generation import generate
from cordillera.serving.language.language_model import load_language_model
from cordillera.serving.language.sampler import Sampling

TEXTS = (1, 4, 16)
QUESTION = "Tell me about the number {}."
GREEDY = Sampling(temperature=0)


def _bytes(model: Llama) -> int:
    """Return the bytes of the matrices that a pass reads."""
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, PackedLinear))]
    return sum(tensor.nbytes for layer in layers for tensor in layer.state_dict().values())


def packed(console: Console, quick: bool) -> dict[str, Any]:
    """Write the same greedy texts with weights in bfloat16, in codes of eight bits, and in those of the file."""
    tokens, rounds = (6, 2) if quick else (64, 5)
    models = {dtype: load_language_model("smollm2", dtype=dtype, device="cpu") for dtype in ("bfloat16", "int4")}
    plain = models["bfloat16"]
    results = []
    for texts in TEXTS:
        prompts = plain.encode([QUESTION.format(n) for n in range(texts)])

        def written(dtype: str, prompts: list[list[int]] = prompts) -> list[tuple[int, int]]:
            found = generate(models[dtype].model, prompts, tokens, sampling=GREEDY)
            return sorted((one.sequence, one.token) for one in found)

        runs = {dtype: (lambda dtype=dtype: written(dtype)) for dtype in models}
        if runs["bfloat16"]() != runs["int4"]():
            raise RuntimeError("packed weights changed a text")
        timings = interleave(runs, rounds=rounds, warmup=0)  # all have warmed up
        rates = {
            dtype: Spread.of([texts * tokens / seconds for seconds in timing.seconds]).to_json()
            for dtype, timing in timings.items()
        }
        times = times_faster(timings["int4"], timings["bfloat16"]).to_json()
        results.append({"texts": texts, "times_bfloat16": times, "tokens_per_s": rates})
    sizes = {dtype: _bytes(one.model) for dtype, one in models.items()}
    table = Table(title=f"{tokens} greedy tokens a text, prompts included (measured)", title_justify="left")
    for heading in ("texts at a time", "int4 over bfloat16", "quartiles", "bfloat16", "int4"):
        table.add_column(heading)
    for one in results:
        times, rates = one["times_bfloat16"], one["tokens_per_s"]
        table.add_row(
            str(one["texts"]), f"{times['median']:.2f}", f"{times['low']:.2f} to {times['high']:.2f}",
            *(f"{rates[dtype]['median']:.1f} tokens/s" for dtype in models),
        )  # fmt: skip
    console.print(table)
    notes = [f"{sizes['int4'] / 2**20:.0f} MiB of weights a pass, {sizes['bfloat16'] / 2**20:.0f} in bfloat16"]
    print_notes(console, notes)
    return {"evidence": "measured", "new_tokens": tokens, "pass_bytes": sizes, "results": results, "notes": notes}
