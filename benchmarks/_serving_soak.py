"""A server of text under many clients for some minutes: clients that go, read slowly, or send what is no request.

Every whole answer is compared with the text that the model alone writes for its prompt and seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.sampler import Sampling

_SOURCE = Path(__file__).parents[1] / "src"
_NAME = "served"
_DISTINCT = 24  # requests whose answers are known
_TOKENS = 32
_MOST = 200_000  # requests in all
_PATIENCE = 120.0

# Asks for /health from a process of its own, so that the clients' work is not measured.
_PROBE = """
import http.client, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    begun = time.perf_counter()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    print(time.perf_counter() - begun if answer.status == 200 else "inf")
    time.sleep(0.02)
"""

_BAD: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b"", 400),
    (b"[" * 100_000, 400),
    (b'{"model": "served", "prompt": "a", "wrong": 1}', 400),
    (b'{"model": "served", "prompt": []}', 400),
    (b'{"model": "served", "prompt": "\\ud800"}', 400),
    (b'{"model": "served", "prompt": "a", "temperature": -1}', 400),
    (b'{"model": "served", "prompt": "a", "response_format": {"type": "regex", "pattern": "("}}', 400),
    (b'{"model": "served", "prompt": [' + b"1.5, " * 20_000 + b"1.5]}", 400),
    (b'{"model": "other", "prompt": "a"}', 404),
    (b" " * (5 << 20), 413),
]


class SoakResult(NamedTuple):
    """What happened.

    Attributes:
        answered: Answers that are the text of their prompt alone.
        crossed: Answers that are another text.
        lost: Requests without a whole answer, or with an error of the server.
        cancelled: Requests that their client ended.
        overloaded: Requests that were refused because too many waited, with that reason.
        bad_refused: Bad bodies that were refused with their reason.
        unexplained: Refusals with another status than expected, or without a reason.
        memory: Resident memory of the server in MiB: after the first requests, at half time, at the end.
        health_p50: Median of the time of a request for ``/health``, in seconds.
        health_p99: Its 99th percentile.
        health_worst: The longest one.
        seconds: Duration.
        left: Texts that the server still wrote when all clients had gone; 0 if it forgot none.
        status: Exit status of the server after SIGTERM.
        problems: What was said about the first requests that were crossed, lost or unexplained.
    """

    answered: int
    crossed: int
    lost: int
    cancelled: int
    overloaded: int
    bad_refused: int
    unexplained: int
    memory: tuple[float, float, float]
    health_p50: float
    health_p99: float
    health_worst: float
    seconds: float
    left: float
    status: int
    problems: list[str]


class _Known(NamedTuple):
    """A request and its answer."""

    body: dict[str, Any]
    text: str


def _known(model: str | Path, rng: random.Random) -> list[_Known]:
    """Return requests with the answers that the model writes alone, one after another and without drafts."""
    alone = LanguageModel(model, device="cpu", drafter="none")
    found = []
    for number in range(_DISTINCT):
        prompt = rng.choice(["", "Once upon a time there was a cat. " * 3]) + f"The number {rng.randrange(1000)} is"
        seed, count = rng.randrange(1000), rng.choice([4, 12, _TOKENS])
        sampling = Sampling(temperature=1.0, top_p=1.0, seed=seed)
        text = alone.generate(prompt, max_new_tokens=count, chat=False, sampling=sampling)[0].text
        body = {"model": _NAME, "prompt": prompt, "seed": seed, "max_tokens": count, "user": f"{number}"}
        found.append(_Known(body, text))
    return found


class _Clients:
    """Clients of a server, which count what becomes of their requests."""

    def __init__(self, address: str, known: list[_Known], until: float) -> None:
        self.address, self.known, self.until = address, known, until
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def run(self, clients: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=self.address, timeout=_PATIENCE, limits=limits) as http:
            await asyncio.gather(*(self._client(http, random.Random(number)) for number in range(clients)))

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while time.monotonic() < self.until and sum(self.counts.values()) < _MOST:
            kinds = [self._whole, self._stream, self._slow, self._goes, self._impatient, self._bad]
            kind = rng.choices(kinds, [8, 6, 1, 2, 2, 2])[0]
            try:
                outcome, said = await kind(http, rng)
            except Exception as error:
                outcome, said = "lost", f"{kind.__name__}: {error!r}"
            self.counts[outcome] += 1
            if outcome in ("crossed", "lost", "unexplained"):
                self.problems.append(f"{outcome}: {said}")
            if outcome == "overloaded":
                await asyncio.sleep(rng.random())

    def _refused(self, status: int, content: bytes, expected: int) -> tuple[str, str]:
        said = content.decode(errors="replace")[:300]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if status == expected and json.loads(content)["error"]["message"]:
                return "overloaded" if status == 429 else "bad_refused", said
        return ("lost" if status >= 500 else "unexplained"), f"{status} {said}"

    def _compared(self, found: str, known: _Known) -> tuple[str, str]:
        return ("answered", "") if found == known.text else ("crossed", f"{known.text!r} became {found!r}")

    async def _whole(self, http: httpx.AsyncClient, rng: random.Random) -> tuple[str, str]:
        known = rng.choice(self.known)
        answer = await http.post("/v1/completions", json=known.body)
        if answer.status_code != 200:
            return self._refused(answer.status_code, answer.content, 429)
        return self._compared(answer.json()["choices"][0]["text"], known)

    async def _stream(
        self, http: httpx.AsyncClient, rng: random.Random, pause: float = 0.0, most: int | None = None
    ) -> tuple[str, str]:
        known, text, events = rng.choice(self.known), "", 0
        async with http.stream("POST", "/v1/completions", json={**known.body, "stream": True}) as answer:
            if answer.status_code != 200:
                return self._refused(answer.status_code, await answer.aread(), 429)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return self._compared(text, known)
                if line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    events += 1
                if most is not None and events >= most:
                    return "cancelled", ""
                await asyncio.sleep(pause)
        return "lost", f"a stream ended after {text!r}"

    async def _slow(self, http: httpx.AsyncClient, rng: random.Random) -> tuple[str, str]:
        return await self._stream(http, rng, pause=0.1)

    async def _goes(self, http: httpx.AsyncClient, rng: random.Random) -> tuple[str, str]:
        return await self._stream(http, rng, most=rng.randrange(1, 6))

    async def _impatient(self, http: httpx.AsyncClient, rng: random.Random) -> tuple[str, str]:
        try:
            return await asyncio.wait_for(self._whole(http, rng), rng.random() * 0.3)
        except asyncio.TimeoutError:  # noqa: UP041
            return "cancelled", ""

    async def _bad(self, http: httpx.AsyncClient, rng: random.Random) -> tuple[str, str]:
        content, status = rng.choice(_BAD)
        answer = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        return self._refused(answer.status_code, answer.content, status)


@contextlib.contextmanager
def _serving(model: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server in a process of its own; return it and its address."""
    paths = os.pathsep.join([str(_SOURCE), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "cordillera", "serve", f"{_NAME}={model}", "--port", "0", "--device", "cpu"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200", "CORDILLERA_API_KEY": ""},
        )
        try:
            until, address = time.monotonic() + _PATIENCE, None
            while address is None:
                time.sleep(0.05)
                log.seek(0)
                said = log.read()
                address = re.search(r"serving at (http://\S+)", said)
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server does not start: {said}")
            yield server, address[1]
        finally:
            server.kill()
            server.wait()


def _memory(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _left(address: str) -> float:
    """Return how many texts a server still has some seconds later."""
    until = time.monotonic() + 30
    while True:
        text = httpx.get(f"{address}/metrics", timeout=_PATIENCE).text
        counts = re.findall(r"^cordillera_num_requests_(?:running|waiting)\{.*\} (.*)$", text, re.MULTILINE)
        if not (left := sum(map(float, counts))) or time.monotonic() > until:
            return left
        time.sleep(0.1)


def soak(seconds: float, clients: int, model: str | Path = "smollm2", seed: int = 1) -> SoakResult:
    """Let clients use a server of this machine for some time.

    Args:
        seconds: Duration.
        clients: Number of clients, each with one request at a time.
        model: Model, as ``cordillera serve`` takes it.
        seed: Seed of the requests.
    """
    known = _known(model, random.Random(seed))
    with _serving(model) as (server, address):
        probe = subprocess.Popen(
            [sys.executable, "-c", _PROBE, address.rpartition(":")[2], str(seconds)], stdout=subprocess.PIPE, text=True
        )
        begun = time.monotonic()
        users = _Clients(address, known, begun + seconds)

        async def everything() -> list[float]:
            running = asyncio.ensure_future(users.run(clients))
            memory = []
            for share in (0.15, 0.5):
                await asyncio.sleep(max(0.0, begun + share * seconds - time.monotonic()))
                memory.append(_memory(server.pid))
            await running
            return memory

        try:
            memory = [*asyncio.run(everything()), _memory(server.pid)]
            took = time.monotonic() - begun
            times = sorted(float(line) for line in probe.communicate(timeout=_PATIENCE)[0].split())
        finally:
            probe.kill()
            probe.wait()
        left = _left(address)
        server.send_signal(signal.SIGTERM)
        status = server.wait(_PATIENCE)
    counts = [users.counts[name] for name in SoakResult._fields[:7]]
    return SoakResult(
        *counts,
        memory=(memory[0], memory[1], memory[2]),
        health_p50=times[len(times) // 2],
        health_p99=times[int(0.99 * (len(times) - 1))],
        health_worst=times[-1],
        seconds=took,
        left=left,
        status=status,
        problems=users.problems[:10],
    )
