"""Hostile requests to ``cordillera serve``: each is answered or ended, and the server answers the next."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks import made
from tests.attacks.commands import ROOT, Commands, Outcome
from tests.serving.small_models import write_model

pytestmark = pytest.mark.slow

SECONDS = 30.0
"""Deadline of one answer, many times what it takes."""

PATIENCE = 120.0
"""Deadline for clients that send nothing, or too slowly."""

FILES = 256
"""Number of files that the server may have open."""


class Attacked:
    """A server that is attacked.

    Attributes:
        address: Its address.
        port: Its port.
    """

    def __init__(self, folder: Path, *models: str) -> None:
        self._log, self._read = folder / "log", 0
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cordillera", "serve", *models, "--port", "0", "--drafter", "none"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
            )
        until = time.monotonic() + 240  # kernels may have to be compiled
        while not (found := re.search(r"serving at http://127.0.0.1:(\d+)", self.said)):
            assert self._process.poll() is None, self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.1)
        self.port = int(found[1])
        self.address = f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def memory(self) -> int:
        """Largest resident memory so far, in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) << 10

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(("127.0.0.1", self.port), SECONDS)

    def send(self, content: bytes, seconds: float = SECONDS) -> bytes:
        """Send bytes and return what comes back until the connection ends; it is an error if it does not end."""
        with self.connect() as made_:
            made_.settimeout(seconds)
            with contextlib.suppress(ConnectionError):
                made_.sendall(content)
            with contextlib.suppress(OSError):
                made_.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while block := made_.recv(1 << 16):
                    answer += block
            return answer

    def is_well(self) -> None:
        """It answers, has printed no traceback and has taken little memory."""
        said, self._read = self.said[self._read :], len(self.said)
        assert self._process.poll() is None, said
        assert httpx.get(f"{self.address}/health", timeout=SECONDS).status_code == 200
        defects = Outcome([], 0, "", said, False, 0.0, 0).defects()
        assert not defects, f"{defects}\n{said[-3000:]}"
        assert self.memory < 3 << 30

    def close(self) -> None:
        """Stop it as Ctrl-C would."""
        self._process.terminate()
        try:
            assert self._process.wait(90) in (0, 130, -15), self.said
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def server(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server of a model that writes and of one that ranks."""
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "text", head_dim=32, tied=False, context=400)
    made.trained(commands, folder)
    found = Attacked(folder, "text", "run")
    yield found
    found.close()


def _request(head: str, body: bytes = b"", length: object = None) -> bytes:
    size = len(body) if length is None else length
    return f"{head}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode() + body


GET, CHAT, SCORE = "GET /health HTTP/1.1", "POST /v1/chat/completions HTTP/1.1", "POST /v1/score HTTP/1.1"
CHUNKS = f"{CHAT}\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
RAW: dict[str, bytes] = {
    "nothing": b"",
    "zero bytes": bytes(10_000),
    "random bytes": bytes(range(256)) * 100,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a line of 10 MiB": b"GET /" + b"a" * (10 << 20),
    "a header of 10 MiB": f"{GET}\r\nX: ".encode() + b"a" * (10 << 20),
    "200,000 headers": f"{GET}\r\n".encode() + b"a: b\r\n" * 200_000 + b"\r\n",
    "headers that never end": f"{GET}\r\n".encode() + b"X-A: b\r\n" * 100,
    "a header without a name": f"{GET}\r\n: x\r\n\r\n".encode(),
    "a header with a zero byte": f"{GET}\r\nX: \0\r\n\r\n".encode(),
    "a header over two lines": f"{GET}\r\nX: a\r\n b\r\n\r\n".encode(),
    "two lengths": f"{CHAT}\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello".encode(),
    "a length and chunks": f"{CHUNKS}Content-Length: 5\r\n\r\n0\r\n\r\n".encode(),
    "a length of 2^63": _request(CHAT, b"{}", 1 << 63),
    "a length of 10^4000": _request(CHAT, b"{}", "9" * 4000),
    "a negative length": _request(CHAT, b"{}", -1),
    "a length in words": _request(CHAT, b"{}", "two"),
    "a length in other digits": _request(CHAT, b"{}", "\u0662"),
    "less than its length": _request(CHAT, b"{}", 1000),
    "less than its length, of scores": _request(SCORE, b"{}", 1000),
    "more than its length": _request(CHAT, b"{}" * 1000, 2),
    "a chunk of 2^64": f"{CHUNKS}\r\nffffffffffffffff\r\n".encode(),
    "a chunk of no size": f"{CHUNKS}\r\nzz\r\n".encode(),
    "a million chunks": f"{CHUNKS}\r\n".encode() + b"1\r\n \r\n" * 300_000,
    "an expectation without a body": f"{CHAT}\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode(),
    "version 9": b"GET /health HTTP/9.9\r\n\r\n",
    "version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an upgrade": f"{GET}\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode(),
    "a method of 100,000 letters": b"A" * 100_000 + b" / HTTP/1.1\r\n\r\n",
    "a method that nobody knows": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path that is no text": b"GET /%ff%fe%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path that is not escaped": "GET /ö\u202e HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "a path with control characters": b"GET /\x1b[2J HTTP/1.1\r\nHost: x\r\n\r\n",
    "an address of another server": b"GET http://evil/health HTTP/1.1\r\nHost: evil\r\n\r\n",
    "a tunnel": b"CONNECT evil:443 HTTP/1.1\r\nHost: evil\r\n\r\n",
    "1,000 requests at once": f"{GET}\r\nHost: x\r\n\r\n".encode() * 1000,
}


@pytest.mark.parametrize("name", RAW)
def test_bytes(server: Attacked, name: str) -> None:
    """The connection ends, and nothing but an answer to what is valid of it comes back."""
    answer = server.send(RAW[name], PATIENCE)
    for status in re.findall(rb"HTTP/1.1 (\d+)", answer):
        assert status in (b"100", b"200", b"400", b"404", b"405", b"408", b"413", b"422", b"426", b"431", b"501"), (
            answer[:300]
        )
    assert not set(answer) & {0, 27}
    server.is_well()


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/v1/models/../../../etc/passwd", "/%00",
     "/v1/models/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%1b%5b2J", "/v1/models/" + "a" * 50_000, "/?" + "a=b&" * 10_000,
     "/docs", "/static/../page.html", "/\\..\\..\\etc\\passwd", "/v1/models/text/../run", "/v1/schema?model=../run",
     "/v1/models/%E2%80%AE"],
)  # fmt: skip
def test_paths(server: Attacked, path: str) -> None:
    answer = server.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert b"root:" not in answer
    assert re.match(rb"HTTP/1.1 (200|400|404|405|414|422|431) ", answer), answer[:300]
    assert not set(answer) & {0, 27}
    server.is_well()


HI = [{"role": "user", "content": "hi"}]


def _chat(**values: Any) -> bytes:
    return json.dumps({"model": "text", "messages": HI, "max_tokens": 4, **values}).encode()


def _regex(pattern: str) -> dict[str, Any]:
    return {"response_format": {"type": "regex", "pattern": pattern}}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _tree(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": _tree(depth - 1)}} if depth else {"type": "string"}


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "UTF-16": '{"model": "text"}'.encode("utf-16"),
    "half a character": b'{"model": "\\ud800"}',
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "arrays in arrays": b"[" * 1_000_000,
    "objects in objects": b'{"a":' * 500_000,
    "arrays in arrays that end": b"[" * 100_000 + b"]" * 100_000,
    "nested arrays in a parameter": _chat(tools=None).replace(b"null", b"[" * 50_000 + b"]" * 50_000),
    "a number of 10^6 digits": b'{"model": "text", "max_tokens": ' + b"9" * 10**6 + b"}",
    "NaN": _chat(temperature=float("nan")),
    "infinity": _chat(temperature=float("inf")),
    "10^400": _chat(temperature=0).replace(b'"temperature": 0', b'"temperature": 1e400'),
    "a key a million times": b"{" + b'"model": "text", ' * 100_000 + b'"a": 1}',
    "100,000 keys": json.dumps({f"k{n}": n for n in range(100_000)}).encode(),
    "100,000 messages": _chat(messages=HI * 60_000),
    "a message of 3 MiB": _chat(messages=[{"role": "user", "content": "x" * (3 << 20)}]),
    "a message of control characters": _chat(messages=[{"role": "user", "content": "\x1b[2J\0\u202e" * 20}]),
    "a model that steers the terminal": _chat(model="\x1b[2J\u202e"),
    "a model by path": _chat(model="../../etc/passwd"),
    "128 choices of 10^9 tokens": _chat(n=128, max_tokens=10**9),
    "2^63 tokens": _chat(max_tokens=1 << 63),
    "negative tokens": _chat(max_tokens=-1),
    "a bias of every token": _chat(logit_bias={str(n): 1 for n in range(100_000)}),
    "a bias of a token that is not there": _chat(logit_bias={"999999999": 1}),
    "nested repetition": _chat(**_regex("(a+)+$")),
    "a repetition of 10^9": _chat(**_regex("a{1000000000}")),
    "repetitions of repetitions": _chat(**_regex("((a{99}){99}){99}")),
    "a pattern of 10^6 letters": _chat(**_regex("a" * 10**6)),
    "many alternatives": _chat(**_regex("|".join(f"{n:x}" * 9 for n in range(50_000)))),
    "a pattern of brackets": _chat(**_regex("(" * 50_000 + ")" * 50_000)),
    "a schema of itself": _chat(**_schema({"$ref": "#"})),
    "a schema from elsewhere": _chat(**_schema({"$ref": "http://127.0.0.1:1/x"})),
    "a schema of a file": _chat(**_schema({"$ref": "file:///etc/passwd"})),
    "a deep schema": _chat(**_schema(_tree(200))),
    "a schema of 10^9 items": _chat(**_schema({"type": "array", "items": {"type": "string"}, "minItems": 10**9})),
    "a schema of any of any": _chat(**_schema({"anyOf": [{"anyOf": [{"type": "string"}] * 100}] * 100})),
    "a schema that is no schema": _chat(**_schema({"type": 7})),
    "16 stops of 1,000 letters": _chat(stop=["a" * 1000] * 16),
    "10^5 stops": _chat(stop=["a"] * 100_000),
    "no messages": _chat(messages=[]),
    "tools with deep parameters": _chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": _tree(300)}}]
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies(server: Attacked, name: str, path: str) -> None:
    """Each is answered in seconds: with a text, or with a refusal in words without control characters."""
    body = BODIES[name].replace(b'"messages"', b'"prompt"') if path.endswith("/completions") else BODIES[name]
    _answered(server, path, body)


def _answered(server: Attacked, path: str, body: bytes, kind: str = "application/json") -> httpx.Response:
    answer = httpx.post(f"{server.address}{path}", content=body, headers={"Content-Type": kind}, timeout=SECONDS)
    assert answer.status_code in (200, 400, 404, 413, 415, 422, 429), answer.text[:500]
    if answer.status_code != 200:
        said = answer.json()["error"]["message"]
        assert said
        assert len(said) < 2000
        assert not [letter for letter in said if letter < " " or letter == "\u202e"], said
    server.is_well()
    return answer


ROW = {"id": "a", "time": 1_700_000_000, "user": "u1", "device": "phone", "price": 1.0, "seen": ["1"]}
ROWS: dict[str, Any] = {
    "no rows": [],
    "rows that are no objects": [1, None, "a", []],
    "a row of 50,000 keys": [{f"k{n}": 1 for n in range(50_000)}],
    "100,000 rows": [ROW] * 30_000,
    "a list of 10^6 ids": [{**ROW, "seen": ["1"] * 500_000}],
    "an id of 3 MiB": [{**ROW, "user": "x" * (3 << 20)}],
    "control characters": [{**ROW, "user": "\x1b[2J\0\u202e"}],
    "a price of 10^308": [{**ROW, "price": 1e308}],
    "a price in words": [{**ROW, "price": "\x1b[2J"}],
    "a price of NaN": [{**ROW, "price": float("nan")}],
    "a time of 2^70": [{**ROW, "time": 1 << 70}],
    "a negative time": [{**ROW, "time": -(1 << 62)}],
    "lists in lists": [{**ROW, "seen": [[["1"]]]}],
    "half a character": [{**ROW, "user": "\ud800"}],
    "an object in place of a list": {"a": ROW},
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(server: Attacked, name: str) -> None:
    body = json.dumps({"model": "run", "rows": ROWS[name]}).encode()
    answer = _answered(server, "/v1/score", body)
    if answer.status_code == 200:
        assert "NaN" not in answer.text
        assert "Infinity" not in answer.text


@pytest.mark.parametrize("kind", ["application/vnd.apache.arrow.stream", "application/vnd.apache.arrow.file"])
@pytest.mark.parametrize(
    "content", [b"", bytes(1000), b"ARROW1\0\0" + b"\xff" * 100, b"\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
def test_rows_in_arrow(server: Attacked, kind: str, content: bytes) -> None:
    assert _answered(server, "/v1/score?model=run", content, kind).status_code != 200


def test_clients_that_leave_while_they_are_answered(server: Attacked) -> None:
    body = json.dumps({"model": "text", "prompt": "the", "max_tokens": 300, "n": 4, "stream": True}).encode()
    for _ in range(20):
        with server.connect() as left:
            left.sendall(_request("POST /v1/completions HTTP/1.1", body))
    server.is_well()


SLOW = {
    "nothing": b"",
    "half of a header": f"{GET}\r\nHost: x\r\nX: a".encode(),
    "half of a second request": f"{GET}\r\nHost: x\r\n\r\nGET /hea".encode(),
    "half of a body": _request(CHAT, b'{"model":', 1000),
    "half of a body of scores": _request(SCORE, b'{"model":', 1000),
    "half of a chunk": f"{CHUNKS}\r\nff\r\nab".encode(),
}


def test_clients_that_are_slow(server: Attacked) -> None:
    """A connection that does not come to the end of a request is ended, also if a byte comes now and then."""
    until = time.monotonic() + PATIENCE
    waiting = {}
    for name, content in SLOW.items():
        waiting[name] = server.connect()
        waiting[name].sendall(content)
        waiting[name].settimeout(0.01)
    while waiting:
        assert time.monotonic() < until, f"not ended: {list(waiting)}"
        for name, one in list(waiting.items()):
            with contextlib.suppress(TimeoutError):
                try:
                    if name != "nothing":
                        one.sendall(b"x")
                    while one.recv(1 << 16):
                        pass
                except ConnectionError:
                    pass
                one.close()
                del waiting[name]
        time.sleep(0.5)
    server.is_well()


def test_more_connections_than_files(server: Attacked) -> None:
    """Many connections keep others away for a while at most, and the server says so in a line."""
    with contextlib.ExitStack() as held:
        for _ in range(FILES + 32):
            one = socket.socket()
            held.callback(one.close)
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", server.port))
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{server.address}/health", timeout=2).status_code == 200:
                    break
            assert time.monotonic() < until, "nobody else is answered"
            time.sleep(0.5)
    server.is_well()
