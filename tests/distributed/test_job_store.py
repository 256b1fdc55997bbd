"""What processes of a job tell each other through a store that strangers reach; variables of a launcher."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from cordillera.distributed.job import job
from cordillera.distributed.job.environment import JobPlace, is_silent, job_key, place_in_job
from cordillera.distributed.job.heartbeats import Beat, HeartbeatBoard, Verdict
from cordillera.distributed.job.store import JobStore, StoreError, StoreSilent, within
from cordillera.errors import PlanError, RankError

KEY = job_key("job", "a secret")
BEAT = Beat(1, 2, 3, "at step 4", True)
JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_values_come_back_and_absent_ones_are_none() -> None:
    store = JobStore(dist.HashStore(), KEY)
    store.set("a", {"b": [1, 2.5, None, "é"]})
    assert store.read(["a", "c"]) == [{"b": [1, 2.5, None, "é"]}, None]
    assert store.first("d", 1) == 1
    assert store.first("d", 2) == 1
    store.close()
    with pytest.raises(StoreSilent):
        store.read(["a"])


def test_values_of_strangers_are_as_good_as_absent() -> None:
    reached = dist.HashStore()
    store = JobStore(reached, KEY)
    store.set("other", "moved")
    for text in (
        b"",
        b"not JSON",
        b"\xff\x00\x1b[2J",
        b"0" * 100_000,
        b'"unsigned"',
        reached.get("other"),  # of the job, under another key
        JobStore(reached, job_key("job", "a guess"))._sign("value", "forged").encode(),
        JobStore(reached, job_key("other", "a secret"))._sign("value", "of another job").encode(),
        ("[" * 50_000).encode(),
    ):
        reached.set("value", text)
        assert store.read(["value"]) == [None]
    assert store.first("value", "ours") == "ours"
    assert store.read(["value"]) == ["ours"]


def test_hearts_take_nothing_from_strangers() -> None:
    reached, now = dist.HashStore(), [0.0]
    ours, theirs = JobStore(reached, KEY), JobStore(reached, job_key("job", ""))
    hearts = HeartbeatBoard(ours, 2, 10.0, 60.0, lambda: now[0])
    hearts.beat(0, BEAT)
    theirs.set("heart/1", BEAT)
    theirs.set("verdict", [[1], "\x1b[31mgive up", "and go home", False])
    hearts.look()
    assert (hearts.verdict, hearts.describe(1)) == (None, "rank 1 has not come yet")
    replayed = reached.get("heart/0")
    hearts.beat(0, BEAT._replace(number=2, where="at step 5"))
    hearts.look()
    reached.set("heart/0", replayed)  # an old beat does not keep a rank alive
    for now[0] in (4.0, 8.0):
        hearts.look()
    now[0] = 11.0
    assert hearts.silent(10.0) == [0]
    assert "step 5" in hearts.describe(0)
    for key in ("heart/0", "heart/1", "verdict"):
        reached.delete_key(key)
    hearts.look()
    assert hearts.accuse(Verdict((1,), "rank 1 ended", "see why")).what == "rank 1 ended"


def test_values_without_a_secret_are_checked_before_they_are_used(fuzz_inputs: Any) -> None:
    generator = random.Random(7)
    atoms: list[Any] = [None, True, -1, 0, 1, 2**70, 1e300, "", "\x1b[2J\x07", "x" * 20_000, [], {}, [0], [5], [[]]]
    store = JobStore(dist.HashStore())
    for _ in range(fuzz_inputs(300)):
        hearts = HeartbeatBoard(store, 2, 10.0, 60.0)
        for key in ("heart/0", "heart/1", "verdict"):
            value = [generator.choice(atoms) for _ in range(generator.choice([4, 4, 5, 5, 1]))]
            store.set(key, generator.choice([value, value, value, generator.choice(atoms)]))
        hearts.look()
        hearts.judge()
        hearts.late(0.0)
        said = hearts.describe(0) + hearts.describe(1) + (str(hearts.verdict.error()) if hearts.verdict else "")
        assert said.replace("\n", "").isprintable()
        assert len(said) < 40_000
    store.close()


class Unplugged:
    """A store that answers only when it is told to."""

    def __init__(self) -> None:
        self.plugged = threading.Event()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.plugged.wait(60)
        return desired.encode()


def test_a_store_that_does_not_answer_is_given_up_by_the_deadline() -> None:
    reached = Unplugged()
    store = JobStore(reached, KEY, deadline_s=0.5)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(StoreSilent, match=r"^did not answer for 0.5 s$"):
        store.read(["a"])
    with pytest.raises(StoreSilent):  # and is not asked again
        store.read(["a"])
    with pytest.raises(TimeoutError):
        within(0.3, lambda: reached.plugged.wait(60))
    assert time.monotonic() - began < 10
    reached.plugged.set()
    store.close()


def test_what_a_store_raises_is_one_error() -> None:
    store = JobStore(None, KEY)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="compare_set"):
        store.read(["a"])
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 // 0)
    assert within(60.0, lambda: 5) == 5
    store.close()


def test_a_process_finds_its_place_in_a_job() -> None:
    assert place_in_job(JOB) == JobPlace(1, 2, 0, "127.0.0.1", 29500, 0, False)
    agent = {"LOCAL_RANK": "3", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert place_in_job(JOB | agent) == JobPlace(1, 2, 3, "127.0.0.1", 29500, 2, True)
    for name in ("RANK", "WORLD_SIZE"):
        assert place_in_job({key: value for key, value in JOB.items() if key != name}) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "x", r"RANK must be a whole number from 0 to 1 \(WORLD_SIZE is 2\), got 'x'"),
        ("RANK", "2", "got '2'"),
        ("RANK", "-1", "got '-1'"),
        ("RANK", "", "got ''"),
        ("WORLD_SIZE", "0", "WORLD_SIZE must be a whole number from 1 to 1000000, got '0'"),
        ("WORLD_SIZE", "x", "got 'x'"),
        ("WORLD_SIZE", "2.0", "got '2.0'"),
        ("WORLD_SIZE", "9" * 5000, "got '999"),
        ("LOCAL_RANK", "\x1b[2J", "LOCAL_RANK must be a whole number"),
        ("MASTER_PORT", "99999", "MASTER_PORT must be a whole number from 1 to 65535, got '99999'"),
        ("MASTER_PORT", "1_0", "got '1_0'"),
        ("MASTER_PORT", "\u0661", "MASTER_PORT must be a whole number"),
        ("MASTER_ADDR", " ", "RANK and WORLD_SIZE are set, MASTER_ADDR is not"),
        ("TORCHELASTIC_RESTART_COUNT", "x", "TORCHELASTIC_RESTART_COUNT must be a whole number"),
    ],
)
def test_variables_that_make_no_sense_are_refused_by_name(name: str, value: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as raised:
        place_in_job(JOB | {name: value})
    assert str(raised.value).replace("\n", "").isprintable()


def test_only_ranks_of_a_job_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    assert not is_silent()
    monkeypatch.setenv("RANK", "1")
    assert not is_silent()
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert is_silent()
    monkeypatch.setenv("WORLD_SIZE", "1")  # rank 1 of one process
    assert not is_silent()


def test_beats_are_signed_json() -> None:
    reached = dist.HashStore()
    HeartbeatBoard(JobStore(reached, KEY), 1, 10.0, 60.0).beat(0, BEAT)
    signature, _, text = reached.get("heart/0").decode().partition(" ")
    assert (len(signature), json.loads(text)) == (64, [1, 2, 3, "at step 4", True])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_another_program_uses_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_TAKEN_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(RankError) as found:
            job._rendezvous(JobPlace(rank, 2, rank, "127.0.0.1", port, 0, False), 1.0)
    said = str(found.value)
    assert f"(port {port} is in use by a program that does not answer as this store" in said
    assert "choose another MASTER_PORT" in said
    assert f"127.0.0.1:{port} (" in said
    assert "; waited 1 s\n" in said
