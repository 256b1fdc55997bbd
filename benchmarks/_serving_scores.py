"""Requests for scores per second: a service that scores requests together, and one prediction at a time.

All contenders score the same rows with the same loaded model. ``single`` calls the scorer in a loop, one row at a time,
without a queue or a server; ``batched`` has clients in threads that each wait for the answer to a row before they send
the next; ``http`` and ``http, unbatched`` do so over connections that stay open, the latter with one request a batch.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import uvicorn
from _tables import print_notes
from _timing import Spread
from fastapi import FastAPI
from rich.console import Console
from rich.table import Table

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.ranking.rows import raw_rows
from cordillera.serving.http.scores import score_router
from cordillera.serving.ranking.score_service import ScoreService, ScoreServiceConfig
from cordillera.workflows.prediction import open_scorer
from cordillera.workflows.serving.server import SWITCH_SECONDS, ServerConfig, bind

CLIENTS = 16
ROWS = 512
ASKED = 3.0

Latencies = list[float]


def scores(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Measure requests per second and latencies of one-row requests of 16 clients, in rounds of all contenders."""
    sys.setswitchinterval(SWITCH_SECONDS)  # as the server does
    recipe = recipes.load("movielens-dlrm", ["training.max_steps=4"] if quick else ["training.epochs=2"])
    console.print("training movielens-dlrm")
    run = workflows.train(recipe, folder / "movielens-dlrm").run
    rounds, seconds = (2, 0.3) if quick else (9, 3.0)
    scorer = open_scorer(run)
    names = [f.name for f in (*scorer.encoder.schema.dense, *scorer.encoder.schema.categorical)]
    names += [f.name for f in scorer.encoder.schema.lists]
    frame = pl.concat(list(raw_rows(recipe.data, "test", rows=ROWS))).select(names)
    samples = [{name: _plain(value) for name, value in row.items()} for row in frame.to_dicts()]
    expected = scorer.score(frame)
    batched = ScoreService("dlrm", scorer)
    # The same model in a second service: rounds follow one another, so that only one of them computes at a time.
    alone = ScoreService("dlrm", scorer, ScoreServiceConfig(max_rows=1))
    contenders: dict[str, Callable[[float], Latencies]] = {
        "single": lambda limit: _single(batched, samples, expected, limit),
        "batched": lambda limit: _threads(batched, samples, expected, limit),
    }
    try:
        # Clients have a process of their own, as they would elsewhere.
        clients = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        with clients, _served(batched) as url, _served(alone) as other:
            contenders["http"] = lambda limit: clients.submit(_http, url, samples, expected, limit).result()
            contenders["http, unbatched"] = lambda limit: clients.submit(
                _http, other, samples, expected, limit
            ).result()
            found = _rounds(contenders, rounds, seconds)
    finally:
        batched.close()
        alone.close()
    figures = {name: _figures(of_rounds, found["single"]) for name, of_rounds in found.items()}
    over_http = Spread.of(
        [ours[0] / peer[0] for ours, peer in zip(found["http"], found["http, unbatched"], strict=True)]
    )
    _print(console, figures)
    return {
        "evidence": "measured",
        "clients": CLIENTS,
        "rounds": rounds,
        "seconds_per_round": seconds,
        "rows_per_request": 1,
        "asked": ASKED,
        "contenders": figures,
        "http_times_unbatched": over_http.to_json(),
    }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _rounds(
    contenders: dict[str, Callable[[float], Latencies]], rounds: int, seconds: float
) -> dict[str, list[tuple[float, Latencies]]]:
    """Return requests per second and latencies of each round; each round starts with the next contender in turn."""
    names, found = list(contenders), {name: list[tuple[float, Latencies]]() for name in contenders}
    for contender in contenders.values():
        contender(min(seconds, 0.3))
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            began = time.perf_counter()
            latencies = contenders[name](seconds)
            found[name].append((len(latencies) / (time.perf_counter() - began), latencies))
    return found


def _figures(of_rounds: list[tuple[float, Latencies]], single: list[tuple[float, Latencies]]) -> dict[str, Any]:
    latencies = [latency for _, some in of_rounds for latency in some]
    times = Spread.of([rate / base for (rate, _), (base, _) in zip(of_rounds, single, strict=True)])
    return {
        "requests_per_second": Spread.of([rate for rate, _ in of_rounds]).to_json(),
        "times_single": times.to_json(),
        "p50_s": float(np.quantile(latencies, 0.5)),
        "p99_s": float(np.quantile(latencies, 0.99)),
        "requests": len(latencies),
    }


def _check(found: Any, expected: Any) -> None:
    if not np.array_equal(found, expected):
        raise AssertionError(f"a score differs: {found} instead of {expected}")


def _single(service: ScoreService, samples: list[dict[str, Any]], expected: Any, limit: float) -> Latencies:
    """Read and score one row after another, without a queue."""
    latencies, until = list[float](), time.perf_counter() + limit
    for position in itertools.cycle(range(len(samples))):
        began = time.perf_counter()
        if began > until:
            return latencies
        found = service.scorer.score(service.reader.frame([service.reader.read_objects([samples[position]])]))
        latencies.append(time.perf_counter() - began)
        _check(found[0], expected[position])
    raise AssertionError


def _threads(service: ScoreService, samples: list[dict[str, Any]], expected: Any, limit: float) -> Latencies:
    """Let clients in threads send one row after another each."""
    found: list[Latencies] = [[] for _ in range(CLIENTS)]
    failures, until = list[BaseException](), time.perf_counter() + limit

    def client(number: int) -> None:
        try:
            for turn in itertools.count(number * 31):
                began = time.perf_counter()
                if began > until:
                    return
                position = turn % len(samples)
                answer = service.submit(service.read([samples[position]])).result(30)
                found[number].append(time.perf_counter() - began)
                _check(answer.scores[0], expected[position])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [latency for some in found for latency in some]


def _http(url: str, samples: list[dict[str, Any]], expected: Any, limit: float) -> Latencies:
    return asyncio.run(_over_http(url, samples, expected, limit))


async def _over_http(url: str, samples: list[dict[str, Any]], expected: Any, limit: float) -> Latencies:
    """Let clients with a connection each send one row after another."""
    found = list[float]()

    async def ask(client: httpx.AsyncClient, number: int, until: float) -> None:
        for turn in itertools.count(number * 31):
            began = time.perf_counter()
            if began > until:
                return
            position = turn % len(samples)
            answer = await client.post("/v1/score", json={"rows": [samples[position]]})
            found.append(time.perf_counter() - began)
            _check(list(answer.json()["data"][0]["scores"].values()), expected[position].tolist())

    # A client takes tens of milliseconds to read certificates, which plain HTTP does not need.
    async with httpx.AsyncClient(base_url=url, timeout=30, verify=False, trust_env=False) as client:
        until = time.perf_counter() + limit
        await asyncio.gather(*(ask(client, number, until) for number in range(CLIENTS)))
    return found


@contextmanager
def _served(service: ScoreService) -> Iterator[str]:
    """Serve on a free port of this machine, in a thread, and return the address."""
    app = FastAPI()
    app.include_router(score_router({service.name: service}))
    with bind(ServerConfig(port=0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until = time.monotonic() + 20
        while not server.started:
            if time.monotonic() > until or not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def _print(console: Console, figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title=f"Requests of one row, {CLIENTS} clients")
    for name in ("contender", "requests/s", "times single", "p50", "p99"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for name, found in figures.items():
        rate, times = found["requests_per_second"], found["times_single"]
        table.add_row(
            name,
            f"{rate['median']:,.0f}",
            f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})",
            f"{1e3 * found['p50_s']:.1f} ms",
            f"{1e3 * found['p99_s']:.1f} ms",
        )
    console.print(table)
    print_notes(console, [f"asked: at least {ASKED:g} times the requests of single predictions"])
