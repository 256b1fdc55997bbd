"""Training steps on a GPU: of a Llama beside transformers', and of ranking models beside those with torch's tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _gpu_embeddings import EPS, RATE
from _gpu_timing import interleave_on_gpu, peak_bytes
from _ranking_batches import criteo_batches, criteo_features
from _timing import Spread, times_faster
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from cordillera.data.ranking.features import RankingBatch
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.language.flops import peak_flops, training_flops
from cordillera.models.language.llama import LlamaConfig
from cordillera.models.ranking import ModelConfig, build
from cordillera.models.ranking.dlrm import DLRMConfig
from cordillera.models.ranking.wukong import WukongConfig
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens
from cordillera.training.optimizers import build_adamw
from cordillera.training.ranking.scoring import autocast
from cordillera.training.ranking.tasks.losses import weighted_loss

ROUNDS = 7
ROWS, LENGTH = 8, 2048


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a Llama.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        ffn: Width of the feed-forward net.
        vocabulary: Number of tokens.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int


LLAMA = LlamaSizes(16, 1024, 16, 16, 2816, 32000)
QUICK_LLAMA = LlamaSizes(2, 128, 2, 2, 256, 512)
RANKING: dict[str, ModelConfig] = {
    "DLRM": DLRMConfig(embedding_dim=64, bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512)),
    "Wukong": WukongConfig(
        embedding_dim=64, layers=3, fmb_embeddings=16, lcb_embeddings=16, rank=24, fmb_mlp=(1024,), top_mlp=(512, 256)
    ),
}
RANKING_ROWS, RANKING_BATCH = 100_000, 16384

Step = Callable[[], object]


def our_llama(sizes: LlamaSizes, batches: list[Tensor], compiles: bool) -> tuple[Step, int]:
    """Return a training step of our engine, packed rows of one document each, and the number of weights."""
    rows, length = batches[0].shape
    model = LlamaConfig(**asdict(sizes), tied=False, context=length)
    training = LanguageConfig(precision="bf16", compile=compiles)
    engine = LanguageEngine(training, model, ProcessMesh(ParallelConfig(), "cuda"))
    offsets = torch.arange(rows + 1) * length
    packed = itertools.cycle([PackedTokens(batch.flatten(), offsets) for batch in batches])
    parameters = sum(weight.numel() for stage in engine.stages.values() for weight in stage.parameters())
    return lambda: engine.step([next(packed)]), parameters


def transformers_llama(sizes: LlamaSizes, batches: list[Tensor], compiles: bool) -> tuple[Step, int]:
    """Return a training step of transformers' Llama with the same sizes and settings, and the number of weights.

    Weights are in float32 and products in bfloat16 by autocast, attention is torch's, AdamW is fused, and gradients are
    clipped. Compilation is by block, as ours.
    """
    import transformers

    settings = transformers.LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.ffn, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, vocab_size=sizes.vocabulary,
        max_position_embeddings=batches[0].shape[1], tie_word_embeddings=False, use_cache=False, rope_theta=500_000.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(settings).cuda().train()
    if compiles:
        for layer in model.model.layers:
            layer.compile()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = itertools.cycle(batches)

    def step() -> None:
        batch = next(tokens).cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, sum(weight.numel() for weight in weights)


def _language(console: Console, quick: bool) -> dict[str, Any]:
    sizes, (rows, length) = (QUICK_LLAMA, (2, 256)) if quick else (LLAMA, (ROWS, LENGTH))
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, sizes.vocabulary, (rows, length), generator=draw) for _ in range(4)]
    steps: dict[str, Step] = {}
    counts, failed = {}, {}
    for name, make in (("ours", our_llama), ("transformers", transformers_llama)):
        for compiles in (False, True):
            key = f"{name}, compiled" if compiles else name
            torch.manual_seed(0)
            try:
                step, counts[key] = make(sizes, batches, compiles)
                step()
            except Exception as error:
                if name == "ours":
                    raise
                failed[key] = str(error)[:300]
                console.print(f"{key}: left out, {failed[key]}", markup=False)
                continue
            steps[key] = step
    assert len(set(counts.values())) == 1, counts
    timings = interleave_on_gpu(steps, rounds=2 if quick else ROUNDS, warmup=3, least_s=0.0 if quick else 0.25)
    flops = training_flops(LlamaConfig(**asdict(sizes), tied=False, context=length), [length] * rows)
    peak = peak_flops("cuda", torch.bfloat16)
    tokens = rows * length
    ratios = {}
    for ours, peer in (("ours", "transformers"), ("ours, compiled", "transformers, compiled")):
        if peer in timings:
            ratios[peer] = times_faster(timings[ours], timings[peer]).to_json()
    rates = {name: Spread.of([tokens / one for one in timing.seconds]) for name, timing in timings.items()}
    mfu = {
        name: None if peak is None else flops / timing.spread.median / peak.flops_per_s
        for name, timing in timings.items()
    }
    table = Table(title="tokens trained on a second (measured)", title_justify="left")
    for heading in ("trainer", "tokens/s", "quartiles", "MFU", "peak GiB"):
        table.add_column(heading)
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    for name, rate in rates.items():
        share = mfu[name]
        table.add_row(
            name, f"{rate.median:,.0f}", f"{rate.low:,.0f} to {rate.high:,.0f}",
            "" if share is None else f"{share:.1%}", f"{peaks[name] / 2**30:.2f}",
        )  # fmt: skip
    console.print(table)
    return asdict(sizes) | {
        "rows": rows, "length": length, "parameters": next(iter(counts.values())), "flops": flops,
        "peak": None if peak is None else peak._asdict(), "left_out": failed, "times_faster": ratios, "mfu": mfu,
        "tokens_per_s": {name: rate.to_json() for name, rate in rates.items()}, "peak_bytes": peaks,
        "rounds_seconds": {name: timing.seconds for name, timing in timings.items()},
    }  # fmt: skip


class RankingSteps:
    """A ranking model with its optimizers on a GPU, and the training step of ``cordillera train``.

    With ``plain`` tables, these are one EmbeddingBag with torch's sparse Adagrad; the dense part is the same.
    """

    def __init__(self, config: ModelConfig, batches: list[RankingBatch], plain: bool) -> None:
        torch.manual_seed(0)
        features = criteo_features(RANKING_ROWS if len(batches[0]) > 1024 else 1000)
        tables = TablesConfig.model_validate({"name": "adagrad", "learning_rate": RATE, "eps": EPS})
        self.model = build(config, features, tables).cuda()
        self.optimizer = build_adamw(
            self.model, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
        )  # fmt: skip
        self.batches = itertools.cycle(batches)
        self.bag: nn.EmbeddingBag | None = None
        if plain:
            sizes = torch.tensor(list(features.tables.values()))
            self.first = (sizes.cumsum(0) - sizes).cuda()[:, None]
            self.bag = nn.EmbeddingBag.from_pretrained(
                self.model.tables.weight.detach(), freeze=False, mode="sum", sparse=True
            )
            self.of_bag = torch.optim.Adagrad(self.bag.parameters(), lr=RATE, eps=EPS)

    def _looked_up(self, batch: RankingBatch) -> Tensor:
        if self.bag is None:
            return self.model.look_up(batch)
        ids = (batch.sparse.values.view(len(self.first), -1) + self.first).t().reshape(-1)
        found: Tensor = self.bag(ids, torch.arange(ids.numel(), device=ids.device))
        return found.view(len(batch), len(self.first), -1)

    def __call__(self) -> float:
        """Take a step: move the batch, forward, loss, backward, dense and table update."""
        batch = next(self.batches).to("cuda", non_blocking=True)
        with autocast(torch.device("cuda"), "bf16"):
            logits = self.model.score(batch.dense, self._looked_up(batch))
        assert batch.labels is not None
        loss, _ = weighted_loss(logits, batch.labels, batch.weights, None)
        loss.backward()
        self.optimizer.step()
        if self.bag is None:
            self.model.tables.update()
        else:
            self.of_bag.step()
            self.of_bag.zero_grad(set_to_none=True)
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def _ranking(console: Console, quick: bool) -> list[dict[str, Any]]:
    found = []
    table = Table(title="samples trained on a second (measured)", title_justify="left")
    for heading in ("model", "ours", "torch's tables", "times as fast", "losses apart"):
        table.add_column(heading)
    size = 64 if quick else RANKING_BATCH
    batches = criteo_batches(criteo_features(1000 if quick else RANKING_ROWS), 4, size)
    for name, config in RANKING.items():
        steps = {kind: RankingSteps(config, batches, kind != "ours") for kind in ("ours", "torch's tables")}
        losses = {kind: [step() for _ in range(8)] for kind, step in steps.items()}
        apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        timings = interleave_on_gpu(steps, rounds=2 if quick else ROUNDS, least_s=0.05)
        rates = {kind: Spread.of([size / one for one in timing.seconds]) for kind, timing in timings.items()}
        ratio = times_faster(timings["ours"], timings["torch's tables"])
        found.append(
            {
                "model": name, "batch": size, "rows": RANKING_ROWS, "times_faster": ratio.to_json(), "apart": apart,
                "samples_per_s": {kind: rate.to_json() for kind, rate in rates.items()},
                "peak_bytes": {kind: peak_bytes(step) for kind, step in steps.items()},
            }
        )  # fmt: skip
        table.add_row(name, *(f"{rate.median:,.0f}" for rate in rates.values()), f"{ratio.median:.2f}", f"{apart:.1e}")
        torch.cuda.empty_cache()
    console.print(table)
    return found


def measure_training(console: Console, quick: bool) -> dict[str, Any]:
    """Measure training steps of a Llama and of ranking models in bfloat16, and print rates and ratios."""
    return {
        "evidence": "measured",
        "rounds": 2 if quick else ROUNDS,
        "language": _language(console, quick),
        "ranking": _ranking(console, quick),
    }
