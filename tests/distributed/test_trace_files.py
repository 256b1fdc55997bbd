"""Files of traces: what is written comes back, torch reads it, and anything else is refused in one sentence."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _blame_incidents import FAULTS, JobShape, incident
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.flight_recorder.components import builder, config_manager, loader

from cordillera.distributed.tracing.blame import blame
from cordillera.distributed.tracing.flight_recorder import (
    from_flight_recorder,
    read_trace,
    read_traces,
    to_flight_recorder,
    write_trace,
)
from cordillera.distributed.tracing.plain_pickle import load_plain
from cordillera.distributed.tracing.rank_trace import Collective, RankTrace, TracedCommunicator
from cordillera.errors import CordilleraError, DataError
from tests.distributed.processes import needs_gloo, run_processes

PAIR = TracedCommunicator("0", "default_pg", (0, 1))
TINY = JobShape(2, 2, 2)


def simple(rank: int = 0) -> RankTrace:
    sizes = {"input_sizes": ((4,),), "output_sizes": ((4,),), "input_dtypes": ("Float",), "output_dtypes": ("Float",)}
    done = Collective("0", 1, "all_reduce", **sizes, state="completed", enqueued_ns=10, started_ns=20, ended_ns=30)
    send = Collective("0", 1, "send", ((9,),), (), ("Half",), (), enqueued_ns=40, peer=1 - rank, channel=7)
    return RankTrace(rank, 50, (PAIR,), (done, send), "running", "an error", True, False)


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_written_is_read(tmp_path: Path, name: Any, form: Any) -> None:
    made = incident(TINY, (name,), 3)
    for trace in made.traces:
        write_trace(trace, tmp_path, form=form)
    read = read_traces(tmp_path)
    assert read == sorted(made.traces, key=lambda trace: trace.rank)
    assert blame(read).causes == blame(made.traces).causes


def test_every_field_survives(tmp_path: Path) -> None:
    assert read_trace(write_trace(simple(), tmp_path, name="nccl_trace_rank"), 0) == simple()
    assert from_flight_recorder(json.loads(json.dumps(to_flight_recorder(simple()))), 0, "here") == simple()


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.enable()  # torch's reader turns it off


@pytest.mark.usefixtures("quiet")
def test_torch_reads_what_is_written_and_finds_who_is_missing(tmp_path: Path) -> None:
    sizes = {"input_sizes": ((4,),), "output_sizes": ((4,),), "input_dtypes": ("Float",), "output_dtypes": ("Float",)}
    for rank in range(2):
        records = [Collective("0", number, "all_reduce", **sizes, state="completed") for number in (1, 2)]
        records += [] if rank == 1 else [Collective("0", 3, "all_reduce", **sizes, state="started", work=2.5)]
        write_trace(RankTrace(rank, 50, (PAIR,), tuple(records)), tmp_path)
    arguments = config_manager.JobConfig().parse_args([str(tmp_path)])
    database = builder.build_db(*(lambda read: (read[0], arguments, read[1]))(loader.read_dir(arguments)))
    assert [one.pass_check for one in database.collectives] == [True, True, True]
    assert [one.missing_ranks for one in database.collectives] == [None, None, {1}]
    assert database.groups[0].size == 2
    assert blame(read_traces(tmp_path), stalled_after_s=0).culprits == {1}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", FAULTS)
def test_torch_reads_every_incident(tmp_path: Path, name: Any) -> None:
    for trace in incident(TINY, (name,), 5).traces:
        write_trace(trace, tmp_path)
    arguments = config_manager.JobConfig().parse_args([str(tmp_path), "--allow-incomplete-ranks"])
    details, version = loader.read_dir(arguments)
    assert builder.build_db(details, arguments, version).ncclcalls


def _gloo(rank: int, folder: str) -> dict[str, Any]:
    """Let rank 1 leave out an operation that rank 0 calls."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    work = dist.all_reduce(tensor, async_op=True) if rank == 0 else None
    until = time.monotonic() + 30  # Gloo records the end of an operation a moment after it
    while sum(one["retired"] for one in json.loads(_dump_fr_trace_json())["entries"]) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    Path(folder, "pickle").mkdir(exist_ok=True)
    Path(folder, "json").mkdir(exist_ok=True)
    Path(folder, "pickle", f"trace_{rank}").write_bytes(_dump_fr_trace())
    Path(folder, "json", f"trace_{rank}.json").write_bytes(_dump_fr_trace_json())
    if rank == 1:
        while not Path(folder, "json", "trace_0.json").exists():  # rank 0 waits in its traces
            time.sleep(0.01)
        dist.all_reduce(tensor)
    else:
        assert work is not None
        work.wait()
    return {}


@pytest.mark.slow
@needs_gloo
def test_traces_of_torch_itself_name_who_has_not_joined(tmp_path: Path) -> None:
    ended = run_processes(2, tmp_path, _gloo, 120)
    assert ended.codes == [0, 0], ended.said
    for form in ("pickle", "json"):
        traces = read_traces(tmp_path / form)
        assert [trace.rank for trace in traces] == [0, 1]
        assert [one.op for one in traces[1].collectives] == ["all_reduce", "broadcast"]
        assert traces[1].collectives[0].state == "ended"
        assert all(trace.estimated for trace in traces)
        newest = max(one.enqueued_ns for trace in traces for one in trace.collectives) / 1e9
        for after in (0.2, 300):  # a busy machine may write the files late
            for path in (tmp_path / form).iterdir():
                os.utime(path, (newest + after, newest + after))
            found = blame(read_traces(tmp_path / form))
            assert bool(found.causes) == (after == 300)
        assert [(cause.kind, cause.ranks) for cause in found.causes] == [("RANK_NOT_JOINED", (1,))]
        assert "how long ranks have waited is taken from the times of the files" in found.notes
        assert any("slow ranks cannot be told" in note for note in found.notes)


def test_an_operation_of_gloo_that_timed_out_counts_as_a_wait() -> None:
    records = Collective("0", 1, "all_reduce", state="ended", enqueued_ns=10)
    traces = [RankTrace(0, 500 * 10**9, (PAIR,), (records,)), RankTrace(1, 500 * 10**9, (PAIR,))]
    assert blame(traces).culprits == {1}


def test_an_operation_that_another_rank_has_forgotten_is_no_wait() -> None:
    old = Collective("0", 1, "all_reduce", state="ended", enqueued_ns=10)
    traces = [RankTrace(0, 500 * 10**9, (PAIR,), (old,)), RankTrace(1, 500 * 10**9, (PAIR,), dropped=True)]
    assert blame(traces).causes == ()
    content = to_flight_recorder(simple())
    assert not from_flight_recorder(content, 0, "here").dropped
    del content["cordillera"]
    assert from_flight_recorder(content, 0, "here").dropped
    content["entries"][0]["record_id"] = 0
    assert not from_flight_recorder(content, 0, "here").dropped


def test_operations_that_were_called_together_have_the_state_of_the_whole() -> None:
    content = to_flight_recorder(simple())
    send = content["entries"][1]
    whole = {**send, "profiling_name": "nccl:coalesced", "state": "completed", "time_discovered_completed_ns": 60}
    content["entries"].append(whole)
    read = from_flight_recorder(content, 0, "here")
    assert [(one.op, one.state, one.ended_ns) for one in read.collectives] == [
        ("all_reduce", "completed", 30),
        ("send", "completed", 60),
    ]


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_traces(path)
    return str(caught.value)


def test_folders_without_one_trace_a_rank_are_refused(tmp_path: Path) -> None:
    assert "is not a folder of traces" in refused(tmp_path / "absent")
    assert "holds no traces" in refused(tmp_path)
    (tmp_path / "README").write_text("not a trace")
    assert "holds no traces" in refused(tmp_path)
    write_trace(simple(), tmp_path)
    write_trace(simple(), tmp_path, form="json")
    assert "rank 0 has two files, trace_0 and trace_0.json" in refused(tmp_path)


def test_a_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    write_trace(simple(), tmp_path).rename(tmp_path / "trace_3")
    assert "is the trace of rank 0, and its name says rank 3" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": "3.0"}, "has the version '3.0'"),
        ({"version": None}, "version cannot be"),
        ({"entries": [3]}, "entry 0: is a int and not a dict"),
        ({"entries": {}}, "entries cannot be"),
        ({"pg_config": {"0": {"ranks": "[0, 0]"}}}, "ranks cannot be"),
        ({"pg_config": {"0": {"ranks": "__import__('os')"}}}, "ranks cannot be"),
        ({"pg_config": {"0": []}}, "pg_config '0': is a list"),
        ({"cordillera": {"rank": -1}}, "rank cannot be '-1'"),
        ({"cordillera": {"status": "tired"}}, "status cannot be 'tired'"),
        ({"cordillera": {"written_ns": "now"}}, "written_ns cannot be 'now'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=r"^here") as caught:
        from_flight_recorder({**to_flight_recorder(simple()), **change}, 0, "here")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("time_created_ns", -5),
        ("time_created_ns", float("nan")),
        ("time_discovered_completed_ns", 1 << 70),
        ("collective_seq_id", True),
        ("state", "lost"),
        ("process_group", ["0"]),
        ("profiling_name", 3),
        ("input_sizes", [[-1]]),
        ("input_sizes", [4]),
        ("input_dtypes", [4]),
        ("is_p2p", "yes"),
        ("cordillera", {"work": float("nan")}),
        ("cordillera", {"work": -1}),
        ("cordillera", {"peers": [[1, 2]]}),
        ("cordillera", {"input_splits": [0.5]}),
    ],
)
def test_a_wrong_field_of_an_entry_is_named(key: str, value: Any) -> None:
    content = to_flight_recorder(simple())
    content["entries"][0] = {**content["entries"][0], key: value}
    with pytest.raises(DataError, match="entry 0"):
        from_flight_recorder(content, 0, "here")


def test_a_message_to_a_rank_outside_of_the_group_is_refused() -> None:
    content = to_flight_recorder(simple())
    content["entries"][1]["profiling_name"] = "gloo:send 0->9"
    with pytest.raises(DataError, match="names rank 9 of a communicator of 2"):
        from_flight_recorder(content, 0, "here")


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_that_want_code_are_refused_by_name_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "trace_0").write_bytes(pickle.dumps({"version": _Hostile()}, protocol))
    assert "wants posix.mkdir, and only plain data is read" in refused(tmp_path / "traces").replace(
        "nt.mkdir", "posix.mkdir"
    )
    assert not (tmp_path / "was-run").exists()


def test_pickles_that_would_take_all_memory_are_refused() -> None:
    with pytest.raises(DataError, match="it numbers more values than it has bytes"):
        load_plain(b"\x80\x02]r\xff\xff\xff\x7f.", "here")
    for content in (
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
    ):
        with pytest.raises(DataError, match="here: "):
            load_plain(content, "here")


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4) | st.tuples(inner)
    ),
    max_leaves=20,
)


@given(value=plain, protocol=st.sampled_from((2, 3, 4, 5)))
@settings(max_examples=150)
def test_plain_pickles_are_read(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol), "here") == value


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255), form=st.sampled_from(("pickle", "json")))
@settings(max_examples=400)
def test_a_damaged_file_is_read_or_refused(position: int, byte: int, form: str) -> None:
    content = to_flight_recorder(simple())
    data = bytearray(pickle.dumps(content, protocol=2) if form == "pickle" else json.dumps(content).encode())
    data[position % len(data)] = byte
    _read_or_refused(bytes(data))


@given(length=st.integers(0, 10_000), form=st.sampled_from(("pickle", "json")))
@settings(max_examples=60)
def test_a_truncated_file_is_refused(length: int, form: str) -> None:
    content = to_flight_recorder(simple())
    data = pickle.dumps(content, protocol=2) if form == "pickle" else json.dumps(content).encode()
    assert not _read_or_refused(data[: length % len(data)])


def _read_or_refused(data: bytes) -> bool:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace_0")
        path.write_bytes(data)
        try:
            blame([read_trace(path, 0)])
        except CordilleraError:
            return False
        return True


def test_a_trace_replaces_an_older_one_as_a_whole(tmp_path: Path) -> None:
    write_trace(simple(), tmp_path)
    write_trace(replace(simple(), error=""), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace_0"]
    assert read_traces(tmp_path)[0].error == ""
