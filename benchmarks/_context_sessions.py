"""Conversations over ranks compared with one process: tokens, logits, balance and bytes, for the part ``sessions``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from _processes import run_processes
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cordillera.data.assets import fetch_asset
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.distributed.context.cache import ContextCacheConfig
from cordillera.models.language.checkpoints import load
from cordillera.models.language.llama import PRESETS, Llama
from cordillera.serving.language.context_sessions import ContextSessions
from cordillera.serving.language.sampler import Sampling

Asked = Literal["pass_kv", "pass_q", "auto"]
SIZES = (1, 2, 3, 4)
CONVERSATIONS = (
    (
        "A cordillera is an extensive chain of mountains or mountain ranges that form one system. The Andes, the "
        "longest of them on land, run along the western edge of South America through seven countries, from Venezuela "
        "in the north to the southern tip of Chile and Argentina. They are some seven thousand kilometres long and up "
        "to seven hundred wide, and on the high plateau between their ranges lie several of the largest cities",
        " Their highest mountain is",
        " It rises near the border of two countries, which are",
    ),
    (
        "Snow",
        " falls on the mountains in winter. In spring it melts, and the rivers that it feeds",
        " Then",
    ),
)


def _model(path: Path | None) -> Llama:
    if path is not None:
        return load(path)[1]
    model = Llama(PRESETS["llama-debug"])
    model.init_weights(0)
    return model


def _rows(path: Path | None) -> list[list[list[int]]]:
    """Return ids ``[turns][conversations]``; without a tokenizer, those of letters."""
    encode = load_tokenizer(path).encode if path is not None else lambda text: [ord(letter) for letter in text]
    return [[list(encode(text)) for text in texts] for texts in zip(*CONVERSATIONS, strict=True)]


class _Recorded(ContextSessions):
    """Sessions that record the logits, the state and the traffic of each reading."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[Tensor] = []
        self.readings: list[dict[str, Any]] = []

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        self.cache.ledger.clear()
        logits = super().read(rows)
        turn = self.cache.turn
        assert turn is not None
        self.logits.append(logits.clone())
        self.readings.append(
            {
                "new": list(turn.plan.lengths),
                "cached": list(turn.cached),
                "held": [sum(held) for held in self.cache.held],
                "transport": self.cache.transport,
                "bytes": {name: one.bytes for name, one in self.cache.ledger.traffic.items()},
            }
        )
        return logits


def _work(rank: int, folder: str, path: Path | None, count: int) -> dict[str, Any]:
    model, rows = _model(path), _rows(path)
    found: dict[str, Any] = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for transport in get_args(Asked):
            config = ContextCacheConfig(transport=transport)
            sessions = _Recorded(model, config, len(CONVERSATIONS), group=group)
            replies = [sessions.reply(row, count, sampling=Sampling(temperature=0)) for row in rows]
            logits = torch.stack(sessions.logits)  # [readings, conversations, vocabulary]
            found[f"{size} {transport}"] = {"replies": replies, "logits": logits, "readings": sessions.readings}
    return found


def _expected(
    model: Llama, rows: list[list[list[int]]], replies: list[list[list[int]]]
) -> tuple[list[list[list[int]]], Tensor]:
    """Return replies and logits of one process that reads the same tokens at once."""
    logits = []
    for conversation in range(len(CONVERSATIONS)):
        tokens: list[int] = []
        asked: list[int] = []
        for row, reply in zip(rows, replies, strict=True):
            tokens += row[conversation]
            asked += range(len(tokens) - 1, len(tokens) - 1 + len(reply[conversation]))
            tokens += reply[conversation]
        with torch.inference_mode():
            logits.append(model(torch.tensor(tokens), torch.tensor([0, len(tokens)]))[asked])
    whole = torch.stack(logits, 1)  # [readings, conversations, vocabulary]
    said = whole.argmax(-1).unflatten(0, (len(rows), -1)).transpose(1, 2)
    return said.tolist(), whole


def _formulas(model: Llama, size: int, reading: dict[str, Any]) -> dict[str, int]:
    """Return bytes of all ranks: ``2 (T + P) KV D e (N - 1)``, or ``T H D e (N - 1)`` and ``T H (D + 1) e (N - 1)``."""
    config, element = model.config, model.embedding.weight.element_size()
    times = config.layers * (size - 1) * element
    new = sum(reading["new"])
    if reading["transport"] == "pass_kv":
        rows = new + sum(p for t, p in zip(reading["new"], reading["cached"], strict=True) if t)
        return {"keys and values": 2 * rows * config.kv_heads * config.head_width * times}
    return {
        "queries": new * config.heads * config.head_width * times,
        "partial outputs": new * config.heads * (config.head_width + 1) * times,
    }


def sessions(console: Console, quick: bool) -> dict[str, Any]:
    """Compare every number of ranks and transport with one process; ``quick`` uses a tiny random model."""
    path = None if quick else fetch_asset("smollm2")
    count = 3 if quick else 8
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(max(SIZES), Path(folder), partial(_work, path=path, count=count), 3000)
    if any(ended.codes):
        raise SystemExit(f"ranks ended with {ended.codes}\n{ended.said}")
    torch.set_num_threads(1)
    model, rows = _model(path), _rows(path)
    name = "llama-debug, random" if path is None else path.name
    table = Table(title=f"{name}: {len(rows)} turns of {len(CONVERSATIONS)} conversations", title_justify="left")
    for heading in (
        "ranks",
        "transport",
        "tokens",
        "largest logit difference",
        "KV rows",
        "bytes",
        "readings by pass-Q",
    ):
        table.add_column(heading)
    runs = []
    for size in SIZES:
        for transport in get_args(Asked):
            ranks = [ended.found[rank][f"{size} {transport}"] for rank in range(size)]
            said, logits = _expected(model, rows, ranks[0]["replies"])
            exact, sent = True, 0
            for readings in zip(*(one["readings"] for one in ranks), strict=True):
                formulas = _formulas(model, size, readings[0])
                found = {kind: sum(reading["bytes"].get(kind, 0) for reading in readings) for kind in formulas}
                exact &= found == formulas
                sent += sum(found.values())
            readings = ranks[0]["readings"]
            run = {
                "ranks": size,
                "transport": transport,
                "tokens_identical": all(one["replies"] == said for one in ranks),
                "largest_logit_difference": max(float((one["logits"] - logits).abs().max()) for one in ranks),
                "largest_kv_difference": max(max(reading["held"]) - min(reading["held"]) for reading in readings),
                "kv_held": readings[-1]["held"],
                "attention_bytes": sent,
                "bytes_as_formulas": exact,
                "readings": len(readings),
                "pass_q_readings": sum(reading["transport"] == "pass_q" for reading in readings),
            }
            runs.append(run)
            table.add_row(
                str(size), transport, "identical" if run["tokens_identical"] else "DIFFERENT",
                f"{run['largest_logit_difference']:.1e}", str(run["kv_held"]),
                f"{sent:,} {'as formulas' if exact else 'NOT as formulas'}",
                f"{run['pass_q_readings']} of {run['readings']}",
            )  # fmt: skip
    console.print(table)
    return {
        "evidence": "measured",
        "model": name,
        "dtype": "float32",
        "new_tokens": [[len(row) for row in turn] for turn in rows],
        "reply_tokens": count,
        "runs": runs,
    }
