"""``cordillera serve`` as a process: it starts, answers, finishes what it accepted, and says what is wrong."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cordillera import workflows
from cordillera.recipe import load
from cordillera.workflows.serving.opening import ServerConfig, named_models
from cordillera.workflows.serving.server import serve
from tests.cli.conftest import RECIPE, write_log
from tests.serving.servers import eventually
from tests.serving.small_models import write_model

SECONDS = 120.0
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals there")
LONG: dict[str, Any] = {"model": "small", "prompt": "the cat", "max_tokens": 250, "seed": 1}

# The command, with texts of which no token is written as long as there is a file ``held`` in its folder.
HELD = """
import time
from pathlib import Path

from cordillera.__main__ import main
from cordillera.serving.language.engine import Engine

step = Engine.step

def held(engine):
    if not Path("held").exists():
        return step(engine)
    time.sleep(0.01)
    return []

Engine.step = held
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small", head_dim=32, tied=False, context=400)


class Server:
    """A process of ``cordillera serve``.

    Attributes:
        process: The process.
    """

    def __init__(self, folder: Path, *arguments: str | Path, script: str = "", **environment: str) -> None:
        self.log = folder / "log"
        (folder / "temporary").mkdir(parents=True)
        program = ["-c", script] if script else ["-m", "cordillera"]
        own = {name: value for name, value in os.environ.items() if name != "CORDILLERA_API_KEY"}
        own |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
        own |= {"TMPDIR": str(folder / "temporary"), "CORDILLERA_CACHE": str(folder / "cache"), "COLUMNS": "200"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", *map(str, arguments), "--port", "0", "--drafter", "none"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=folder,
                env=own | environment,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def address(self) -> str:
        """Wait until the server says where it listens."""
        eventually(lambda: "serving at" in self.said or self.process.poll() is not None, "it does not start", SECONDS)
        found = re.search(r"serving at (http://\S+)", self.said)
        assert found, self.said
        return found[1]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address()}/v1", api_key=key, max_retries=0, timeout=SECONDS)

    def ends(self) -> int:
        """Wait for the process's end; return its status."""
        return self.process.wait(SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers, of which none is left after the test."""
    servers: list[Server] = []

    def begin(*arguments: str | Path, **environment: str) -> Server:
        servers.append(Server(tmp_path / f"server{len(servers)}", *arguments, **environment))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()
        server.process.wait(SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_finishes_what_it_accepted(
    start: Callable[..., Server], folder: Path, number: signal.Signals
) -> None:
    server = start(folder, "--texts", "3", script=HELD)
    client, held = server.client(), server.log.parent / "held"
    expected = client.completions.create(extra_body={"ignore_eos": True}, **LONG).choices[0].text
    assert len(expected) > 100
    held.touch()

    def ask(place: int) -> str:
        with server.client() as own:
            if place % 2:
                return own.completions.create(extra_body={"ignore_eos": True}, **LONG).choices[0].text
            stream = own.completions.create(stream=True, extra_body={"ignore_eos": True}, **LONG)
            return "".join(chunk.choices[0].text for chunk in stream)

    def running() -> float:
        text = httpx.get(f"{server.address()}/metrics", timeout=SECONDS).text
        counts = re.findall(r"^cordillera_num_requests_(?:running|waiting)\{.*\} (.*)$", text, re.MULTILINE)
        return sum(map(float, counts))

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, place) for place in range(8)]
        eventually(lambda: running() == 8, "they are not accepted", SECONDS)
        server.process.send_signal(number)
        eventually(lambda: "stops after 8 requests" in server.said, "it says nothing", SECONDS)
        held.unlink()
        assert [answer.result(SECONDS) for answer in answers] == [expected] * 8
    assert server.ends() == 0, server.said
    assert "stops after 8 requests that it has accepted (at most 60 s); Ctrl-C ends it at once" in server.said
    assert server.said.strip().endswith("stopped")
    assert "Traceback" not in server.said
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.slow
def test_a_server_with_little_time_to_stop_ends_in_time_and_its_clients_notice(
    start: Callable[..., Server], folder: Path
) -> None:
    server = start(folder, "--drain", "1", "--texts", "1")
    with server.client() as client:
        stream = client.completions.create(stream=True, n=100, extra_body={"ignore_eos": True}, **LONG)
        next(stream)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        assert server.ends() == 0, server.said
        assert time.monotonic() - started < 30
    assert server.said.strip().endswith("stopped")
    assert "Traceback" not in server.said


@pytest.mark.slow
def test_a_second_ctrl_c_cuts_off_what_was_accepted_without_a_traceback(
    start: Callable[..., Server], folder: Path
) -> None:
    server = start(folder, "--texts", "1")
    with server.client() as client:
        stream = client.completions.create(stream=True, n=100, extra_body={"ignore_eos": True}, **LONG)
        next(stream)
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: "stops after 1 request that it has accepted" in server.said, "it says nothing", SECONDS)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        server.ends()
        assert time.monotonic() - started < 30
    assert "Traceback" not in server.said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_still_reads_its_model_can_be_stopped(
    start: Callable[..., Server], folder: Path, number: signal.Signals
) -> None:
    server = start(folder)
    eventually(lambda: "reads small" in server.said, "it does not start", SECONDS)
    server.process.send_signal(number)
    assert server.ends() != 0 or "stopped" in server.said
    assert "Traceback" not in server.said


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_behind(start: Callable[..., Server], folder: Path) -> None:
    server = start(folder, "--texts", "1")
    port = int(server.address().rpartition(":")[2])
    with server.client() as client:
        stream = client.completions.create(stream=True, n=100, extra_body={"ignore_eos": True}, **LONG)
        next(stream)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        assert not children.exists() or children.read_text() == ""
        server.process.kill()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
    assert server.ends() == -signal.SIGKILL
    assert list((server.log.parent / "temporary").iterdir()) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.slow
def test_the_key_comes_from_the_environment_or_a_file(
    start: Callable[..., Server], folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("from a file\n")
    for server, key in (
        (start(folder, CORDILLERA_API_KEY="from outside"), "from outside"),
        (start(f"other={folder}", "--api-key-file", file, CORDILLERA_API_KEY="from outside"), "from a file"),
    ):
        with server.client(key) as client:
            assert [one.id for one in client.models.list()] in (["small"], ["other"])
        with server.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert httpx.get(f"{server.address()}/health", timeout=SECONDS).status_code == 200
        assert httpx.get(f"{server.address()}/live", timeout=SECONDS).json() == {"status": "ok"}
        assert httpx.head(f"{server.address()}/live", timeout=SECONDS).status_code == 200
        assert httpx.post(f"{server.address()}/live", timeout=SECONDS).status_code == 405
        assert key not in server.said
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0


@pytest.mark.slow
def test_serving_ends_at_sigterm_and_leaves_signals_and_collections_as_they_were(folder: Path) -> None:
    frozen: list[int] = []

    def ready(address: str) -> None:
        frozen.append(gc.get_freeze_count())  # what is loaded: each full collection of it would take 0.2 s
        os.kill(os.getpid(), signal.SIGTERM)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = [signal.getsignal(number) for number in numbers]
    serve([str(folder)], ServerConfig(port=0, device="cpu", drafter="none"), ready=ready)
    assert len(frozen) == 1
    assert frozen[0] > 50_000
    assert gc.get_freeze_count() == 0
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("text service small")]


def test_a_reload_asked_for_too_early_or_too_late_does_not_end_the_server(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr("cordillera.workflows.serve", lambda *_: found.append(signal.getsignal(signal.SIGUSR1)))
    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert cli("serve", "none").code == 0
        assert [*found, signal.getsignal(signal.SIGUSR1)] == [signal.SIG_IGN, signal.SIG_IGN]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_port_that_is_taken_is_one_error(cli: Callable[..., Any], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli("serve", folder, "--port", port)
    assert result.code == 2
    assert f"127.0.0.1:{port}: cannot be listened at: Address already in use" in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_a_run_of_a_sweep_is_known_by_the_name_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    assert named_models([f"{tmp_path}/lr=0.1", f"a={tmp_path}/b"]) == {
        "lr=0.1": f"{tmp_path}/lr=0.1",
        "a": f"{tmp_path}/b",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "is no file, no folder and no model's name"),
        (["a={folder}", "a={folder}"], "two models have the name 'a'"),
        (["={folder}"], "is not NAME=MODEL"),
        (["{folder}", "--device", "tpu"], "unknown device 'tpu'"),
        (["{folder}", "--dtype", "int3"], "unknown dtype 'int3'"),
        (["{folder}", "--drafter", "ghost"], "ghost"),
        (["{folder}", "--host", "host.invalid"], "cannot be listened at"),
        (["{folder}", "--host", "192.0.2.1"], "cannot be listened at"),
        (["{folder}", "--api-key-file", "{folder}/nothing"], "nothing"),
        (["{folder}", "--port", "70000"], "65535"),
    ],
)
def test_what_is_wrong_is_one_error(cli: Callable[..., Any], folder: Path, arguments: list[str], said: str) -> None:
    given = [one.format(folder=folder) for one in arguments]
    result = cli("serve", *given, *([] if "--port" in given else ["--port", 0]))
    assert result.code == 2
    assert said in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_an_empty_key_file_is_refused(cli: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(" \n")
    result = cli("serve", folder, "--port", 0, "--api-key-file", tmp_path / "key")
    assert (result.code, "holds no key" in result.err) == (2, True)


def test_a_damaged_checkpoint_is_one_error(cli: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folder.iterdir():
        content = file.read_bytes()
        (damaged / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    result = cli("serve", damaged, "--port", 0)
    assert result.code == 2
    assert "damaged" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("host", "key", "warns"), [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("::1", "", False)])
def test_a_server_without_a_key_that_others_reach_is_warned_about(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, host: str, key: str, warns: bool
) -> None:
    monkeypatch.setenv("CORDILLERA_API_KEY", key)
    result = cli("serve", "nothing", "--host", host, "--port", 0)
    assert result.code == 2
    assert ("can use this server" in result.err) == warns


@pytest.mark.slow
def test_a_server_behind_a_proxy_leaves_before_it_stops(start: Callable[..., Server], folder: Path) -> None:
    server = start(folder, "--leave", "15", "--access-log")
    with httpx.Client(base_url=server.address(), timeout=SECONDS) as plain:
        assert plain.get("/health").status_code == 200
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "answers for 15 s more" in server.said, "it says nothing", SECONDS)
        assert plain.get("/health").status_code == 503
        assert plain.get("/live").status_code == 200
        models = plain.get("/v1/models")
        assert (models.status_code, models.headers["connection"]) == (200, "close")
    assert server.ends() == 0, server.said
    assert '"GET /v1/models" 200' in server.said
    assert server.said.strip().endswith("stopped")


@pytest.mark.slow
def test_a_server_reads_ranking_models_again_at_sigusr1_and_stops_at_sigterm(
    start: Callable[..., Server], folder: Path, tmp_path: Path
) -> None:
    path, link = tmp_path / "small.toml", tmp_path / "current"
    path.write_text(RECIPE.format(path=write_log(tmp_path / "log.csv", rows=300)))
    for name, steps in (("first", 2), ("second", 1)):
        keys = {"data.cache_dir": str(tmp_path / "cache"), "training.max_steps": steps}
        workflows.train(load(path, keys), tmp_path / name)
    link.symlink_to(tmp_path / "first")
    server = start(folder, f"current={link}")
    row = {"price": 12.5, "user": "u3", "device": "phone", "seen": ["1"]}
    with httpx.Client(base_url=server.address(), timeout=SECONDS) as client:

        def answered() -> tuple[float, str, str]:
            answer = client.post("/v1/score", json={"model": "current", "rows": [row]})
            assert answer.status_code == 200, answer.text
            headers = answer.headers
            return answer.json()["data"][0]["scores"]["click"], headers["cordillera-run"], headers["cordillera-step"]

        before = answered()
        assert before[1:] == ("first", "2")
        link.unlink()
        link.symlink_to(tmp_path / "second")
        server.process.send_signal(signal.SIGUSR1)
        eventually(lambda: "current answers with second, step 1" in server.said, "it reads nothing", SECONDS)
        after = answered()
        assert after[1:] == ("second", "1")
        assert after[0] != before[0]
        assert "language models are not read again: that takes a new server" in server.said
        (tmp_path / "second" / "model.json").unlink()
        server.process.send_signal(signal.SIGUSR1)
        eventually(lambda: "current was not read again and answers as before" in server.said, "no error", SECONDS)
        assert answered() == after
        assert "Traceback" not in server.said
        assert [client.get(place).status_code for place in ("/health", "/live")] == [200, 200]
        server.process.send_signal(signal.SIGTERM)
    assert server.ends() == 0, server.said


@pytest.mark.slow
def test_a_request_that_never_arrived_whole_does_not_hold_a_server(start: Callable[..., Server], folder: Path) -> None:
    server = start(folder)
    port = int(server.address().rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as half,
        socket.create_connection(("127.0.0.1", port)) as late,
    ):
        body = b'{"model": "small", "prompt": "a", "max_tokens": 2}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        late.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body[:20])
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert httpx.get(f"{server.address()}/health", timeout=SECONDS).status_code == 200  # it has them as well
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        late.sendall(body[20:])
        late.settimeout(SECONDS)
        assert late.recv(100).startswith(b"HTTP/1.1 200")
        assert server.ends() == 0, server.said
        assert time.monotonic() - begun < 40
    assert "1 request did not arrive whole" in server.said
    assert "ERROR" not in server.said
    assert "Traceback" not in server.said
