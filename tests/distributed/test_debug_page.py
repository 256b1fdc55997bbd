"""The page of torch's debug server that names whom others wait for."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from cordillera.distributed import debug_page
from cordillera.distributed.debug_page import BlameHandler, trace_of
from cordillera.distributed.tracing.blame import blame
from cordillera.distributed.tracing.flight_recorder import to_flight_recorder
from cordillera.distributed.tracing.rank_trace import RankTrace
from cordillera.errors import CordilleraError, DataError, PlanError
from tests.conftest import ROOT
from tests.distributed.processes import free_port, needs_gloo

LIMIT_S = 60.0
PROGRAM = ROOT / "docs" / "blame.md"
"""The page whose program is run."""


def program() -> str:
    """The program of the documentation, which ranks run."""
    found = re.search(r'```python title="debugged.py"\n(.*?)```', PROGRAM.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@contextlib.contextmanager
def job(folder: Path, backend: str) -> Iterator[tuple[list[subprocess.Popen[bytes]], str]]:
    """Two ranks that run the documentation's program, and the address of the page."""
    port, server = free_port(), free_port()
    text = program().replace("25999", str(server)).replace('"cordillera")', f'"{backend}")')
    (folder / "debugged.py").write_text(text.replace("fetch_timeout=10", "fetch_timeout=2"))
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ranks = []
    try:
        for rank in range(2):
            log = (folder / f"{rank}.log").open("wb")
            command = [sys.executable, "debugged.py"]
            ranks.append(
                subprocess.Popen(
                    command, cwd=folder, env={**environment, "RANK": str(rank)}, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip
        yield ranks, f"http://127.0.0.1:{server}/blame"
    finally:
        for one in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)  # and the server that rank 0 started
            one.wait()


def shows(address: str, folder: Path, *wanted: str) -> None:
    """Wait until a page has all of some words."""
    text, until = "", time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(address, timeout=20) as answer:
                text = html.unescape(answer.read().decode())
            if all(words in text for words in wanted):
                return
        time.sleep(0.3)
    raise AssertionError(text + "".join((folder / f"{rank}.log").read_text() for rank in range(2)))


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cordillera", "gloo"])
def test_the_page_names_the_rank_that_the_other_waits_for_while_the_job_runs(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("tabulate", reason="torch's debug server needs it")
    with job(tmp_path, backend) as (ranks, address):
        absent = "rank 1 has not joined all_reduce 6 of communicator 0 (default_pg)"
        victim = "1 of 2 ranks waits for others and is not to blame"
        shows(address + "?after=0.5", tmp_path, "RANK_NOT_JOINED", absent, victim)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        shows(address + "?after=0.5", tmp_path, "RANK_UNRESPONSIVE", "rank 1 did not answer")
        os.kill(ranks[1].pid, signal.SIGKILL)
        shows(address, tmp_path, "RANK_PROCESS_DEAD", "rank 1 died")
        for after, said in (("x%22%3E", 'x"> is not a number of seconds'), ("nan", "nan is not a time in seconds")):
            with urllib.request.urlopen(f"{address}?after={after}", timeout=60) as answer:
                page = answer.read().decode()
            assert said in html.unescape(page)
            assert 'x">' not in page


def test_answers_that_are_no_traces_are_refused_by_name() -> None:
    whole = RankTrace(3, 5)
    assert trace_of(3, 200, json.dumps(to_flight_recorder(whole))) == whole
    assert trace_of(3, 503, "ConnectionError: refused").status == "died"
    assert trace_of(3, 408, "TimeoutError").status == "unresponsive"
    for rank, status, text, kind, said in (
        (3, 404, "Handler not found", PlanError, "rank 3 does not answer with traces"),
        (2, 200, json.dumps(to_flight_recorder(whole)), DataError, "is the trace of rank 3"),
        (3, 200, "{}", DataError, "answer of rank 3"),
        (3, 200, "{", DataError, "answer of rank 3"),
        (3, 200, "[1", DataError, "answer of rank 3"),
    ):
        with pytest.raises(kind, match=said):
            trace_of(rank, status, text)


@needs_gloo
def test_a_rank_that_no_launcher_started_answers_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(debug_page, "current_trace", lambda: None)
    response = Mock()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        debug_page._answer(None, response)
    finally:
        dist.destroy_process_group()
    response.set_status.assert_called_once_with(200)
    (text, _), _ = response.set_content.call_args
    assert json.loads(text)["cordillera"]["rank"] == 0


def test_the_dump_is_the_text_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = pytest.importorskip("torch.distributed.debug._frontend")
    answers = [frontend.Response(200, json.dumps(to_flight_recorder(RankTrace(rank, 5)))) for rank in range(2)]
    monkeypatch.setattr(frontend, "fetch_all", lambda endpoint, timeout: ([], answers))
    handler = BlameHandler()
    assert handler.dump_filename() == "blame"
    assert handler.dump().startswith("no rank is to blame: none of 2 ranks")
    answers[1] = frontend.Response(200, "{")
    assert "answer of rank 1" in handler.dump()
    assert issubclass(DataError, CordilleraError)
    assert blame([RankTrace(0, 5)]).causes == ()
