"""Frames, proofs, the coordinator's service and log, and the transfer of a state: what is refused, and how."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import queue
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cordillera.distributed.fault_tolerance import events
from cordillera.distributed.fault_tolerance.coordination import (
    Ask,
    Commit,
    CoordinationRules,
    FaultToleranceConfig,
    Membership,
    initial_commit,
)
from cordillera.distributed.fault_tolerance.coordinator import Coordinator, CoordinatorLog
from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog, read_events
from cordillera.distributed.fault_tolerance.link import CoordinatorLink, StepMembers
from cordillera.distributed.fault_tolerance.messages import (
    MOST_JSON,
    Channel,
    MessageError,
    packed,
    reached_at,
)
from cordillera.distributed.fault_tolerance.replica import Replica, ReplicaPlace
from cordillera.distributed.fault_tolerance.state_transfer import StateProvider, fetch_state
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.distributed.transport.process_group import TransportProcessGroup
from cordillera.errors import CheckpointError, CordilleraError, PeerError, PlanError, RunError

TOKEN, JOB = b"secret", "configuration"
RULES = CoordinationRules(2, lease_s=0.5, grace_s=2.0, start_s=1.0)
PATIENT = CoordinationRules(2, lease_s=30.0, grace_s=30.0, start_s=30.0)  # for processors that others use as well


def pair() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return Channel(one, "one", 30.0), Channel(other, "other", 30.0)


@contextlib.contextmanager
def served(coordinator: Coordinator) -> Iterator[Coordinator]:
    thread = threading.Thread(target=coordinator.serve)
    thread.start()
    try:
        yield coordinator
    finally:
        coordinator.close()
        thread.join(5)
        assert not thread.is_alive()


def link_to(coordinator: Coordinator, name: str, **others: Any) -> CoordinatorLink:
    given = {"configuration": JOB, "token": TOKEN, "beat_s": 0.1, "patience_s": 30.0, **others}
    return CoordinatorLink(coordinator.address, given.pop("token"), name, given.pop("configuration"), [name], **given)


def answer(link: CoordinatorLink) -> StepMembers:
    found = link.answer(30.0)  # a deadline: others may use the processors
    assert found is not None
    return found


def test_an_address_that_stands_for_all_has_the_name_of_this_machine() -> None:
    for host in ("0.0.0.0", "", "::", "[::]"):
        assert reached_at(f"{host}:29400") == f"{socket.gethostname()}:29400"
    for address in ("127.0.0.1:29400", "node07:29400", "[::1]:29400", "10.0.0.1:1"):
        assert reached_at(address) == address


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_messages_come_whole_out_of_pieces_of_any_size(size: int) -> None:
    messages = [{"text": "ä" * size}, [], {"number": size}]
    stream = b"".join(map(packed, messages))
    for step in (1, 7, len(stream)):
        one, other = pair()
        pieces = [stream[first : first + step] for first in range(0, len(stream), step)]
        sender = threading.Thread(target=lambda end=one, parts=pieces: [end.connection.sendall(part) for part in parts])
        sender.start()
        assert [other.receive() for _ in messages] == messages
        sender.join()
        one.close()
        other.close()


def refused(frame: bytes) -> str:
    """What a channel says to a frame, or to one that ends too early."""
    one, other = pair()
    one.connection.sendall(frame)
    one.close()
    with contextlib.closing(other), pytest.raises(MessageError) as error:
        other.receive()
    return str(error.value)


def test_no_flipped_byte_of_a_frame_passes() -> None:
    frame = packed({"kind": "ask", "state": [1, 2, "abc"]})
    for place in range(len(frame)):
        for bit in (1, 128):
            damaged = bytearray(frame)
            damaged[place] ^= bit
            refused(bytes(damaged))


def test_a_message_that_is_too_long_is_refused_on_both_sides() -> None:
    with pytest.raises(MessageError, match="longer than"):
        packed("x" * MOST_JSON)
    said = refused(b"CDLR" + (1).to_bytes(4, "big") + (MOST_JSON + 1).to_bytes(4, "big") + bytes(4))
    assert "none of this program" in said


def _prove(channel: Channel, token: bytes, role: Any, failed: list[BaseException]) -> None:
    try:
        channel.prove(token, role)
    except MessageError as error:
        failed.append(error)


def test_a_secret_is_proved_by_both_sides() -> None:
    for tokens, passes in (((TOKEN, TOKEN), True), ((TOKEN, b"other"), False)):
        one, other = pair()
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=_prove, args=(one, tokens[0], "server", failed)),
            threading.Thread(target=_prove, args=(other, tokens[1], "client", failed)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(failed) == (0 if passes else 2)
        assert all("does not know the secret" in str(error) for error in failed)


def test_a_proof_cannot_be_reflected() -> None:
    one, other = pair()

    def reflect() -> None:
        challenge = other.receive()
        other.send(challenge)
        other.send(other.receive())  # its own proof, of the role that it has

    threading.Thread(target=reflect, daemon=True).start()
    with pytest.raises(MessageError, match="does not know the secret"):
        one.prove(TOKEN, "server")


def test_who_sends_half_a_message_is_named_at_the_deadline() -> None:
    one, other = pair()
    one.deadline_s = 0.2
    other.connection.sendall(packed({"a": 1})[:20])
    began = time.monotonic()
    with pytest.raises(MessageError, match=r"one: sent nothing for 0\.2 s"):
        one.receive()
    assert time.monotonic() - began < 10.0
    other.close()
    with pytest.raises(MessageError, match="closed the connection"):
        one.receive()


def test_two_replicas_take_a_step_together() -> None:
    with served(Coordinator(PATIENT, JOB, TOKEN)) as coordinator:
        links = [link_to(coordinator, name) for name in ("r1", "r0")]
        for link, name in zip(links, ("r1", "r0"), strict=True):
            link.ask(Ask(name, initial_commit(JOB)))
        found = [answer(link) for link in links]
        assert found[0] == found[1]
        assert found[0].membership.members == ("r0", "r1")
        assert found[0].addresses == {"r0": ["r0"], "r1": ["r1"]}
        for link in links:
            link.close()


def test_a_replica_that_ends_is_not_awaited_for_its_lease() -> None:
    with served(Coordinator(PATIENT, JOB, TOKEN)) as coordinator:
        one, other = link_to(coordinator, "r0"), link_to(coordinator, "r1")
        for link, name in ((one, "r0"), (other, "r1")):
            link.ask(Ask(name, initial_commit(JOB)))
        state = answer(one).membership.result
        answer(other)
        one.ask(Ask("r0", state))
        began = time.monotonic()
        other._is_closed.set()  # or its thread would connect again
        other._channel.connection.shutdown(socket.SHUT_RDWR)  # as when its process is killed
        assert answer(one).membership.members == ("r0",)
        assert time.monotonic() - began < 10.0
        one.close()


class NoState:
    """State without tensors."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def facts(self) -> Any:
        return None

    def install(self, tensors: Any, facts: Any) -> None:
        raise AssertionError("nobody has another state")


@pytest.mark.parametrize("saved", [None, 1, 2], ids=["never", "before it asks", "while it waits"])
def test_a_replica_does_not_train_from_a_checkpoint_once_there_is_a_newer_one(saved: int | None) -> None:
    """The others may have gone on, saved and left, while it restored the one before."""
    tolerance = FaultToleranceConfig(replicas=2, deadline_s=1.0, start_s=1.0)
    checkpoints, restored, looks = [75], Commit(3, 75, "restored"), itertools.count()

    def newest() -> int:
        """The newest checkpoint at each look: when it is made, before it asks, after the answer."""
        return max(checkpoints) if saved is None or next(looks) < saved else 83

    with served(Coordinator(tolerance.rules, JOB, TOKEN)) as coordinator:
        place = ReplicaPlace("r1", coordinator.address, TOKEN, JOB)
        mesh = ProcessMesh(ParallelConfig())
        with Replica(place, tolerance, mesh, NoState(), restored, restored=75, durable=newest) as replica:
            if saved is not None:
                with pytest.raises(PeerError, match="step 75, and a newer checkpoint"):
                    replica.begin()
                return
            assert replica.begin().head == restored
            with replica.committing():
                checkpoints.append(76)  # its own one
            assert replica.begin().head.step == 76


class GroupReducer:
    """Sums over a process group of torch.distributed for each epoch."""

    address = "in the store"

    def __init__(self, store: dist.Store) -> None:
        self._store, self._contributes = store, False
        self._group: TransportProcessGroup | None = None

    def connect(self, epoch: int, ring: Any, own: str, contributing: Any, deadline_s: float) -> None:
        self.close()
        names, store = sorted(member.name for member in ring), dist.PrefixStore(f"epoch {epoch}", self._store)
        limit = timedelta(seconds=deadline_s)
        self._group = TransportProcessGroup(store, names.index(own), len(names), limit)
        self._contributes = own in contributing

    def reduce(self, tensor: torch.Tensor, *, step: int, bucket: int, deadline_s: float) -> None:
        assert self._group is not None
        if not self._contributes:
            tensor.zero_()
        self._group.allreduce([tensor]).wait(timedelta(seconds=deadline_s))

    def abort(self, reason: str) -> None:
        if self._group is not None:
            self._group.communicator.abort(reason)

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()


def test_a_process_group_may_carry_the_sums_and_the_others_go_on_without_one_that_left() -> None:
    tolerance = FaultToleranceConfig(replicas=3, deadline_s=10.0, start_s=20.0, grace_s=10.0)
    store, steps, leaves = dist.HashStore(), 4, {"r1": 2}
    began = threading.Barrier(3)

    def train(name: str) -> list[tuple[int, float]]:
        place, found = ReplicaPlace(name, coordinator.address, TOKEN, JOB), []
        state, mesh = initial_commit(JOB), ProcessMesh(ParallelConfig())
        with Replica(place, tolerance, mesh, NoState(), state, reducer=GroupReducer(store)) as replica:
            began.wait(10)
            while replica.held.step < steps:
                membership = replica.begin()
                if membership.head.step == leaves.get(name):
                    break
                tensor = torch.full((50_000,), 2.0 ** int(name[1]))
                if not replica.agree(replica.add(tensor)):
                    replica.discard()
                    continue
                with replica.committing():
                    found.append((len(membership.participants), float(tensor[-1])))
        return found

    with served(Coordinator(tolerance.rules, JOB, TOKEN)) as coordinator, ThreadPoolExecutor(3) as pool:
        found = dict(zip(("r0", "r1", "r2"), pool.map(train, ("r0", "r1", "r2")), strict=True))
    assert found["r0"] == found["r2"] == [(3, 7.0)] * 2 + [(2, 5.0)] * 2
    assert found["r1"] == [(3, 7.0)] * 2


def test_another_configuration_or_secret_is_refused_by_name() -> None:
    heard: list[dict[str, Any]] = []
    with served(Coordinator(RULES, JOB, TOKEN, hear=heard.append)) as coordinator:
        wrong = link_to(coordinator, "r0", configuration="another")
        with pytest.raises(PlanError, match="configuration differs"):
            wrong.answer(5.0)
        wrong.close()
        with pytest.raises(MessageError, match=r"closed the connection|does not know|is gone"):
            link_to(coordinator, "r0", token=b"guess", patience_s=0.3)
    assert [event["kind"] for event in heard] == ["refused"]


def test_a_replica_that_others_do_not_reach_is_named_with_the_time_for_which_it_is_left_out() -> None:
    heard: list[dict[str, Any]] = []
    with served(Coordinator(PATIENT, JOB, TOKEN, hear=heard.append)) as coordinator:
        links, held = {name: link_to(coordinator, name) for name in ("r0", "r1")}, initial_commit(JOB)
        for name, link in links.items():
            link.ask(Ask(name, held))
        for _ in range(3):  # attempts with the same members
            assert {answer(link).membership.members for link in links.values()} == {("r0", "r1")}
            for name, link in links.items():
                link.ask(Ask(name, held, discarded=True, missed=tuple(links.keys() - {name})))
        assert answer(links["r0"]).membership.members == ("r0",)
        for link in links.values():
            link.close()
    found = [event for event in heard if event["kind"] == "isolated"]
    assert found == [{"kind": "isolated", "replica": "r1", "why": found[0]["why"]}]
    assert re.fullmatch(r"others did not reach it; steps are taken without it for [23]\d s", found[0]["why"])


def test_strangers_do_not_hold_up_the_service() -> None:
    with served(Coordinator(RULES, JOB, TOKEN)) as coordinator:
        host, port = coordinator.address.split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
        for stranger in strangers[:10]:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        link = link_to(coordinator, "r0")
        link.ask(Ask("r0", initial_commit(JOB)))
        assert answer(link).membership.members == ("r0",)  # after start_s
        link.close()
        for stranger in strangers:
            stranger.close()


@pytest.mark.slow
def test_the_newer_of_two_processes_of_one_name_stays() -> None:
    with served(Coordinator(CoordinationRules(2, start_s=4.0), JOB, TOKEN)) as coordinator:
        old = link_to(coordinator, "r0", beat_s=5.0)  # a stall of four beats would make it the newer one
        old.ask(Ask("r0", initial_commit(JOB)))
        new = link_to(coordinator, "r0", beat_s=5.0)

        def wait_for_end() -> None:
            while old.answer(30.0) is not None:  # on a busy machine, its question may have been answered before
                pass

        with pytest.raises(PeerError, match="another process has taken the place"):
            wait_for_end()
        new.ask(Ask("r0", initial_commit(JOB)))
        found = new.answer(20.0)
        assert found is not None
        assert found.membership.members == ("r0",)
        new.close()


def test_a_coordinator_goes_on_from_its_log_and_replicas_find_it(tmp_path: Path) -> None:
    log, start = tmp_path / "log", initial_commit(JOB)
    first = Coordinator(PATIENT, JOB, TOKEN, log=CoordinatorLog(log))
    port = int(first.address.split(":")[1])
    with served(first):
        links = {name: link_to(first, name) for name in ("r0", "r1")}
        for name, link in links.items():
            link.ask(Ask(name, start))
        states = {name: answer(link).membership.result for name, link in links.items()}
        epoch = states["r0"].epoch
    assert states["r0"] == states["r1"]
    with served(Coordinator(PATIENT, JOB, TOKEN, log=CoordinatorLog(log), port=port)):
        links["r0"].ask(Ask("r0", states["r0"]))  # the first to come back does not go on alone
        time.sleep(0.1)
        links["r1"].ask(Ask("r1", states["r1"]))
        found = [answer(link).membership for link in links.values()]
        assert found[0] == found[1]
        assert found[0].members == ("r0", "r1")
        assert found[0].head == states["r0"]
        assert found[0].epoch >= epoch
        for link in links.values():
            link.close()


@contextlib.contextmanager
def on_another_machine(
    coordinator: Callable[[str], Coordinator],
) -> Iterator[tuple[Coordinator, Callable[[str], None]]]:
    """A coordinator in a network of its own, and what sets its cable ``up`` or ``down``."""
    name, found = f"c{os.getpid() % 10**9}", queue.SimpleQueue[Coordinator]()

    def ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"networks of its own need root and the command ip: {done.stderr.strip()}")

    def serve() -> None:
        with open(f"/var/run/netns/{name}") as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0) == 0  # of this thread
        made = coordinator("198.18.0.2")
        found.put(made)
        made.serve()

    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("networks of its own need root and the command ip")
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", "198.18.0.1/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", "198.18.0.2/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        thread = threading.Thread(target=serve)
        thread.start()
        served = found.get(timeout=60)
        try:
            yield served, lambda state: ip("link", "set", name, state)
        finally:
            served.close()
            thread.join(60)
            assert not thread.is_alive()
    finally:
        for kind in ("link", "netns"):
            subprocess.run(["ip", kind, "del", name], capture_output=True, check=False)


@pytest.mark.slow
def test_a_network_that_drops_everything_in_silence_is_as_a_coordinator_that_ended() -> None:
    with on_another_machine(lambda host: Coordinator(RULES, JOB, TOKEN, host=host)) as (coordinator, cable):
        links = {name: link_to(coordinator, name, patience_s=5.0) for name in ("r0", "r1")}
        for name, link in links.items():
            link.ask(Ask(name, initial_commit(JOB)))
        state = [answer(link).membership.result for link in links.values()].pop()
        cable("down")
        for name, link in links.items():
            link.ask(Ask(name, state))
        time.sleep(0.8)  # longer than signs of life may be unconfirmed
        cable("up")
        together: dict[str, Membership] = {}  # the first to be back may take steps alone before
        until = time.monotonic() + 20
        while len(together) < 2 and time.monotonic() < until:
            for name, link in links.items():
                if (found := link.answer(0.05)) is not None:
                    if found.membership.members == ("r0", "r1"):
                        together[name] = found.membership
                    else:
                        link.ask(Ask(name, found.membership.result))
        assert together["r0"] == together["r1"]
        cable("down")
        began = time.monotonic()
        for name, link in links.items():
            link.ask(Ask(name, together[name].result))
        for link in links.values():
            with pytest.raises(PeerError, match="no other came within 5 s"):
                answer(link)
        assert 5.0 < time.monotonic() - began < 20.0
        for link in links.values():
            link.close()


def test_two_coordinators_cannot_hold_one_log(tmp_path: Path) -> None:
    held = CoordinatorLog(tmp_path / "log")
    with pytest.raises(RunError, match="another coordinator holds it"):
        CoordinatorLog(tmp_path / "log")
    held.close()
    CoordinatorLog(tmp_path / "log").close()


def _logged(path: Path) -> bytes:
    log = CoordinatorLog(path)
    with served(Coordinator(RULES, JOB, TOKEN, log=log)) as coordinator:
        link, state = link_to(coordinator, "r0"), initial_commit(JOB)
        for _ in range(3):
            link.ask(Ask("r0", state))
            state = answer(link).membership.result
        link.close()
    return path.read_bytes()


def test_no_changed_byte_of_a_log_passes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = _logged(path)
    generator = torch.Generator().manual_seed(1)
    for place in torch.randint(0, len(content) - 1, (100,), generator=generator).tolist():
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 7
        path.write_bytes(damaged)
        log = CoordinatorLog(path)
        with pytest.raises(CheckpointError, match="log, line"):
            log.read(RULES)
        log.close()


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    content = _logged(path)
    lines = content.splitlines(keepends=True)
    path.write_bytes(content[:-9])
    log = CoordinatorLog(path)
    found = log.read(RULES)
    assert found is not None
    assert found.head.step == json.loads(lines[-2])["head"]["step"]
    assert path.read_bytes() == b"".join(lines[:-1])
    log.close()


def test_a_log_of_another_job_is_refused(tmp_path: Path) -> None:
    _logged(tmp_path / "log")
    with pytest.raises(CheckpointError, match="another configuration"):
        Coordinator(RULES, "another", TOKEN, log=CoordinatorLog(tmp_path / "log"))


def test_nobody_hears_of_a_decision_that_is_not_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, heard, plain = CoordinatorLog(tmp_path / "log"), list[dict[str, Any]](), CoordinatorLog.write
    full = [True]

    def write(self: CoordinatorLog, *arguments: Any, **others: Any) -> None:
        if full[0]:
            raise RunError("the disk is full", where=str(self.path))
        plain(self, *arguments, **others)

    monkeypatch.setattr(CoordinatorLog, "write", write)
    with served(Coordinator(CoordinationRules(1), JOB, TOKEN, log=log, hear=heard.append)) as coordinator:
        link = link_to(coordinator, "r0")
        link.ask(Ask("r0", initial_commit(JOB)))
        assert link.answer(0.5) is None
        until = time.monotonic() + 30
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
        assert heard[0]["kind"] == "waiting"
        full[0] = False
        assert answer(link).membership.members == ("r0",)
        link.close()


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "weight": torch.randn(3, 5, generator=generator),
        "empty": torch.empty(0, 4),
        "step": torch.tensor(7.0),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "large": torch.randn(6_000_000, generator=generator),
    }


COMMIT = Commit(3, 7, "ab")


def test_a_state_arrives_as_it_is(state: dict[str, torch.Tensor]) -> None:
    provider = StateProvider(lambda: state, lambda: {"step": 7}, TOKEN)
    with provider.changing(COMMIT):
        pass
    found, facts = fetch_state(provider.address, TOKEN, COMMIT, 5.0)
    assert facts == {"step": 7}
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)
    provider.close()


def _receive_rest(channel: Channel, state: dict[str, torch.Tensor]) -> None:
    for name in ("step", "half", "large"):
        whole = torch.empty_like(state[name]).view(-1).view(torch.uint8)
        for first in range(0, len(whole), 4 << 20):
            channel.receive_bytes(whole[first : first + (4 << 20)].numpy().data)


def test_a_state_that_changes_in_between_is_given_up(state: dict[str, torch.Tensor]) -> None:
    provider = StateProvider(lambda: state, dict, TOKEN)
    with provider.changing(COMMIT):
        pass
    channel = Channel.connect(provider.address, TOKEN, "donor", 5.0)
    channel.send([COMMIT.epoch, COMMIT.step, COMMIT.lineage])
    content = channel.receive()
    assert list(content["tensors"]) == list(state)
    out = torch.empty(3, 5)
    channel.receive_bytes(out.view(-1).view(torch.uint8).numpy().data)
    with provider.changing(Commit(3, 8, "cd")):
        pass  # the large tensor does not fit into the buffers of a socket
    with pytest.raises(MessageError):
        _receive_rest(channel, state)
    channel.close()
    provider.close()


def test_only_the_version_that_is_asked_for_is_given(state: dict[str, torch.Tensor]) -> None:
    provider = StateProvider(lambda: state, dict, TOKEN)
    with pytest.raises(MessageError, match="holds none, not step 7"):
        fetch_state(provider.address, TOKEN, COMMIT, 5.0)
    with provider.changing(Commit(3, 7, "other history")):
        pass
    with pytest.raises(MessageError, match="holds step 7 of epoch 3, not step 7 of epoch 3"):
        fetch_state(provider.address, TOKEN, COMMIT, 5.0)
    with pytest.raises(MessageError):
        fetch_state(provider.address, b"guess", COMMIT, 5.0)
    provider.close()
    with pytest.raises(MessageError, match="does not answer"):
        fetch_state(provider.address, TOKEN, COMMIT, 1.0)


def test_a_change_that_fails_is_given_to_nobody(state: dict[str, torch.Tensor]) -> None:
    provider = StateProvider(lambda: state, dict, TOKEN)
    with provider.changing(COMMIT):
        pass
    with pytest.raises(ZeroDivisionError), provider.changing(Commit(3, 8, "cd")):
        1 / 0  # noqa: B018
    with pytest.raises(MessageError, match="holds none"):
        fetch_state(provider.address, TOKEN, COMMIT, 5.0)
    provider.close()


def test_events_of_several_writers_are_read_by_time_and_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    one, other = (EventLog(tmp_path / FOLDER / f"{name}.jsonl") for name in ("r0", "launcher"))
    one.write("joined", step=0)
    other.write("started", replica="r0")
    one.write("step", outcome="committed", step=1)
    path = tmp_path / FOLDER / "r0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert [event["kind"] for event in read_events(tmp_path)] == ["joined", "started"]
    EventLog(path).write("joined", step=1)  # a restarted writer begins a line of its own
    assert [event["kind"] for event in read_events(tmp_path)] == ["joined", "started", "joined"]
    path.write_bytes(whole.replace(b"committed", b"discarded"))
    with pytest.raises(CordilleraError, match=r"r0\.jsonl, line 2"):
        read_events(tmp_path)


def test_threads_write_each_event_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / FOLDER / "launcher.jsonl")
    threads = [
        threading.Thread(target=lambda n=n: [log.write("step", step=k, own=n) for k in range(50)]) for n in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(event["own"], event["step"]) for event in read_events(tmp_path)]
    assert sorted(found) == [(n, k) for n in "abcd" for k in range(50)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_events_wait_for_space_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / FOLDER / "r0.jsonl")
    log.write("joined", step=0)
    path, log.path = log.path, Path("/dev/full")
    for step in (1, 2):
        log.write("step", step=step)
    log.path = path
    log.write("step", step=3)
    assert [event["step"] for event in read_events(tmp_path)] == [0, 1, 2, 3]
    monkeypatch.setattr(events, "_MOST_WAITING", 2)
    log.path = Path("/dev/full")
    for step in (4, 5, 6):
        log.write("step", step=step)
    log.path = path
    log.write("step", step=7)
    log.write("step", step=8)
    found = [(event["step"], event.get("lost")) for event in read_events(tmp_path)[4:]]
    assert found == [(4, None), (5, None), (7, 1), (8, None)]


def test_no_decision_follows_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the day is set by two days at each look at it; leases and deadlines follow another one."""
    real, jumps = time.time, iter(range(10**6))
    log = EventLog(tmp_path / FOLDER / "r0.jsonl")
    monkeypatch.setattr(time, "time", lambda: real() + 86_400 * (2 if next(jumps) % 2 else -2))
    with served(Coordinator(PATIENT, JOB, TOKEN)) as coordinator:
        links = {name: link_to(coordinator, name) for name in ("r0", "r1")}
        head = initial_commit(JOB)
        for step in range(1, 5):
            for name, link in links.items():
                link.ask(Ask(name, head))
            found = [answer(link).membership for link in links.values()]
            assert found[0] == found[1]
            assert found[0].members == ("r0", "r1")
            head = found[0].result
            assert head.step == step
            log.write("step", step=step)
            time.sleep(0.25)
        for link in links.values():
            link.close()
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2, 3, 4]
    users = [path.name for path in Path(events.__file__).parent.rglob("*.py") if "time.time()" in path.read_text()]
    assert sorted(users) == ["events.py", "processes.py"]  # of what is read by people, and by the injector of faults
