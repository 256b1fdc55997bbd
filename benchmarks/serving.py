"""A server of text and scores under load, beside answers one by one: ``cordillera bench serving``."""

from __future__ import annotations

import enum
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer
from _llama_peer import PeerUnavailable
from _program import Program
from _serving_fp8 import fp8
from _serving_pipeline import pipeline
from _serving_scores import scores
from _serving_soak import soak
from _tables import print_notes
from rich.console import Console
from rich.table import Table
from speculation import GREEDY, PROMPTS, SETS, Peer

from cordillera.data.assets import stored_asset
from cordillera.errors import DataError
from cordillera.serving.language.language_model import load_language_model
from cordillera.serving.language.text_service import TextDelta, TextRequest, TextService

TOGETHER, REQUESTS, TOKENS, ROUNDS = (1, 2, 4, 8, 16), 16, 64, 2
GAP = 0.25  # mean seconds between arrivals, whose gaps are exponential
TARGET_DRAFTS, TARGET_SEQUENTIAL = 1.0, 2.0
SOAK_SECONDS, SOAK_CLIENTS, TARGET_HEALTH_MS = 300.0, 64, 50


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    arrivals = "arrivals"
    scores = "scores"
    soak = "soak"
    pipeline = "pipeline"
    fp8 = "fp8"


def _arrive(service: TextService, prompts: Sequence[list[int]], gaps: Sequence[float], tokens: int) -> dict[str, Any]:
    """Send requests one after the other, and return texts, seconds to first tokens, and between tokens."""
    texts: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    ended = threading.Semaphore(0)

    def listen(number: int, delta: TextDelta) -> None:
        if delta.error is not None:
            raise delta.error
        texts[number] += delta.tokens
        times[number] += [time.perf_counter()] * len(delta.tokens)
        if delta.finish:
            ended.release()

    began, sent = time.perf_counter(), []
    for number, (prompt, gap) in enumerate(zip(prompts, gaps, strict=True)):
        time.sleep(gap)
        sent.append(time.perf_counter())
        service.submit(TextRequest(prompt, tokens, GREEDY), lambda delta, number=number: listen(number, delta))
    for _ in prompts:
        if not ended.acquire(timeout=600):
            raise RuntimeError("a request was not answered within ten minutes")
    return {
        "texts": texts,
        "seconds": time.perf_counter() - began,
        "first": [own[0] - begin for own, begin in zip(times, sent, strict=True)],
        "between": [b - a for own in times for a, b in pairwise(own)],
    }


def _one_by_one(peer: Peer, prompts: Sequence[list[int]], gaps: Sequence[float], tokens: int) -> dict[str, Any]:
    """Let transformers answer the same requests, each when it has come and the one before it is answered."""
    began = time.perf_counter()
    due, count, whole = began, 0, []
    for prompt, gap in zip(prompts, gaps, strict=True):
        due += gap
        time.sleep(max(0.0, due - time.perf_counter()))
        count += len(peer(prompt, tokens, None)[0])
        whole.append(time.perf_counter() - due)
    return {"tokens": count, "seconds": time.perf_counter() - began, "whole": whole}


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}


def _arrivals(console: Console, quick: bool) -> dict[str, Any]:
    tokens, requests, rounds = (4, 3, 1) if quick else (TOKENS, REQUESTS, ROUNDS)
    models = {
        on: load_language_model("smollm2", device="cpu", drafter="ngram" if on else "none") for on in (False, True)
    }
    ours = models[True]
    peer = Peer(ours)
    lines = [(PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in SETS]
    prompts = ours.encode([json.loads(lines[n % len(lines)][n // len(lines)])["turns"][0] for n in range(requests)])
    draw = random.Random(1)
    gaps = [draw.expovariate(1 / GAP) for _ in prompts]
    runs: dict[tuple[int, bool], list[dict[str, Any]]] = {(texts, on): [] for texts in TOGETHER for on in (False, True)}
    sequential: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    peer(prompts[0], 2, None)
    for turn in range(rounds):
        for texts, on in list(runs)[:: 1 if turn % 2 else -1]:
            service = TextService(models[on], texts=texts)  # anew, so that no prompt has been read
            run = _arrive(service, prompts, gaps, tokens)
            service.close()
            expected = expected or run["texts"]
            if run.pop("texts") != expected:
                raise RuntimeError(f"{texts} texts at a time, drafts {on}: a text differs")
            runs[texts, on].append(run)
        sequential.append(_one_by_one(peer, prompts, gaps, tokens))
    total = sum(map(len, expected))
    rate_of_peer = [run["tokens"] / run["seconds"] for run in sequential]
    results = []
    for texts in TOGETHER:
        off, drafted = ([total / run["seconds"] for run in runs[texts, on]] for on in (False, True))
        row: dict[str, Any] = {
            "texts": texts,
            "tokens_per_s": {"off": statistics.median(off), "ngram": statistics.median(drafted)},
            "ngram_over_off": statistics.median(a / b for a, b in zip(drafted, off, strict=True)),
            "over_transformers": statistics.median(a / b for a, b in zip(drafted, rate_of_peer, strict=True)),
        }
        for name, on in (("off", False), ("ngram", True)):
            for key in ("first", "between"):
                row[f"{key}_{name}"] = _spread([one for run in runs[texts, on] for one in run[key]])
        results.append(row)
    table = Table(title=f"{requests} requests that arrive at random, up to {tokens} greedy tokens (measured)")
    for heading in ("texts at a time", "tokens/s", "drafts over off", "over transformers", "first token p50, p99",
                    "between tokens p50, p99"):  # fmt: skip
        table.add_column(heading)
    for row in results:
        first, between = row["first_ngram"], row["between_ngram"]
        table.add_row(
            str(row["texts"]), f"{row['tokens_per_s']['ngram']:.1f}", f"{row['ngram_over_off']:.2f}",
            f"{row['over_transformers']:.2f}", f"{first['p50']:.2f}, {first['p99']:.2f} s",
            f"{1e3 * between['p50']:.0f}, {1e3 * between['p99']:.0f} ms",
        )  # fmt: skip
    console.print(table)
    notes = [
        f"gaps between arrivals are exponential with a mean of {GAP} s, the same in every run",
        "every text is the same, token by token, in all runs",
        f"transformers answers one request after the other, in {str(peer.dtype).removeprefix('torch.')}",
    ]
    print_notes(console, notes)
    return {
        "evidence": "measured",
        "requests": requests,
        "new_tokens": tokens,
        "gap": GAP,
        "targets": {"drafts": TARGET_DRAFTS, "sequential at 8": TARGET_SEQUENTIAL},
        "transformers": {
            "tokens_per_s": statistics.median(rate_of_peer),
            "whole": _spread([one for run in sequential for one in run["whole"]]),
        },
        "results": results,
        "notes": notes,
    }


def _soak(console: Console, quick: bool) -> dict[str, Any]:
    found = soak(5.0 if quick else SOAK_SECONDS, 8 if quick else SOAK_CLIENTS)
    console.print(
        f"{found.answered:,} answers in {found.seconds:.0f} s, {found.crossed} crossed, {found.lost} lost; "
        f"{found.cancelled:,} cancelled, {found.bad_refused:,} bad bodies and {found.overloaded:,} others refused, "
        f"{found.unexplained} without a reason"
    )
    console.print(
        f"memory {', '.join(f'{one:.0f}' for one in found.memory)} MiB; /health {1e3 * found.health_p50:.1f} ms, "
        f"p99 {1e3 * found.health_p99:.1f} ms ({TARGET_HEALTH_MS} asked)"
    )
    notes = ["clients, server and the process that asks for /health share two cores"]
    print_notes(console, [*notes, *found.problems])
    return {"evidence": "measured", "clients": SOAK_CLIENTS, **found._asdict(), "notes": notes}


def _left_out(part: Part) -> str | None:
    if part is not Part.scores:
        stored_asset("smollm2")
    if part in (Part.arrivals, Part.fp8) and not PROMPTS.is_dir():
        return f"there is no folder {PROMPTS} with the prompts of EAGLE's six sets"
    return None


main = Program(
    "serving",
    {Part.arrivals: _arrivals, Part.scores: scores, Part.soak: _soak, Part.pipeline: pipeline, Part.fp8: fp8},
    "Answer requests that arrive at random, beside answers one by one.",
    left_out=_left_out,
    threads=2,
    excused=(DataError, PeerUnavailable),
).command()


if __name__ == "__main__":
    typer.run(main)
