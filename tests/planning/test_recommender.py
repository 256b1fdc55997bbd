"""Recommendation models: published sizes, bytes counted by hand and pair by pair, steps against their bounds."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from _scaleacross_tables import A100_40GB, PUBLISHED, criteo
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cordillera import topology
from cordillera.cost import Calibration, CostModel
from cordillera.errors import PlanError
from cordillera.planning import workloads
from cordillera.planning.network.settings import production_network, tuned_network
from cordillera.planning.ranking.exchange import INSIDE, Exchange, Operation, TableLayout, TableSchedule, exposed, run
from cordillera.planning.ranking.explorer import SCHEDULES, RecommenderExplorer, group_sizes
from cordillera.planning.ranking.step import TableJob
from cordillera.planning.ranking.workload import Cross, Recommender, Tables, place_tables
from cordillera.planning.search import ALL
from cordillera.topology import Topology
from cordillera.workflows import planning as commands
from tests.planning.flows import route

SMALL = Recommender(
    tables=(Tables(count=4, rows=1_000_000, dim=64, lookups=10), Tables(count=2, rows=100, dim=64)),
    dense=16,
    bottom=(128, 64),
    top=(256, 1),
    batch=65_536,
)


def toy() -> Topology:
    """Two rooms of four and two hosts with four devices each, and shared links."""
    device = {
        "name": "toy",
        "matrix_flops_per_s": 1e12,
        "memory_bytes": 1e9,
        "memory_bytes_per_s": 1e11,
        "nic_bytes_per_s": 10.0,
    }
    levels = [
        {"name": "host", "members": 4, "latency_s": 1, "bytes_per_s": 100.0},
        {"name": "room", "members": [4, 2], "latency_s": 10, "oversubscription": 2.0},
        {"name": "site", "members": 2, "latency_s": 100, "oversubscription": 4.0},
    ]
    return Topology.model_validate({"device": device, "levels": levels})


def two_pods() -> Topology:
    """64 devices in two buildings."""
    return topology.load("two-buildings").changed({"pod.members": 2, "building.members": 1})


def numbers_in_tables(work: Recommender) -> int:
    """Number of parameters of all tables."""
    return sum(one.count * one.rows * one.dim for one in work.tables)


def table_bytes(work: Recommender) -> float:
    """Bytes of all tables with their optimizer state."""
    return sum(one.count * one.rows * (one.dim * one.weight_bytes + work.optimizer_bytes) for one in work.tables)


def test_shipped_models_have_their_published_sizes() -> None:
    dcn = workloads.load("dlrm-dcnv2")
    assert isinstance(dcn, Recommender)
    assert sum(one.count for one in dcn.tables) == 26
    assert sum(one.lookups for one in dcn.tables) == 214
    assert numbers_in_tables(dcn) == 204_184_588 * 128
    assert dcn.width == 27 * 128
    cross = 3 * 2 * 3456 * 512
    top = 3456 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert dcn.dense_parameters == 13 * 512 + 512 * 256 + 256 * 128 + cross + top
    large = workloads.load("dlrm-12t")
    assert isinstance(large, Recommender)
    assert numbers_in_tables(large) == pytest.approx(12e12, rel=1e-6)
    assert 3 * large.products / 1e6 == pytest.approx(5, rel=0.1)  # as the paper counts
    assert table_bytes(large) == pytest.approx(24.2e12, rel=0.01)
    assert sum(one.rows * one.dim for one in criteo(1).tables) * 4 / 2**30 == pytest.approx(91.10, rel=0.07)


def test_dot_products_are_those_of_all_pairs() -> None:
    assert SMALL.vectors == 7
    assert SMALL.top_layers == [(64 + 21, 256), (256, 1)]
    assert SMALL.products == 16 * 128 + 128 * 64 + 85 * 256 + 256 + 21 * 64
    assert SMALL.flops == 6 * 65_536 * SMALL.products


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch = 8", r"has neither \[model\] nor \[\[tables\]\]"),
        ("[model]\nlayers = 1\n[[tables]]\nrows = 1", r"has both \[model\] and \[\[tables\]\]"),
        (
            "batch = 0\ntop = [1]\nbotom = [2]\n[[tables]]\nrows = 0\ndim = 64\nlookups = nan",
            r"4 mistakes[\s\S]*tables\[0\].rows[\s\S]*tables\[0\].lookups[\s\S]*batch[\s\S]*botom: .*'bottom'",
        ),
        ("batch = 8\ntop = [1]\ndense = 3\n[[tables]]\nrows = 9\ndim = 64", "dense features and a bottom net need"),
        (
            'batch = 8\ntop = [1]\ninteraction = "cross"\n[[tables]]\nrows = 9\ndim = 64',
            r'"cross" and \[cross\] need each other',
        ),
        (
            "batch = 8\ntop = [1]\n[[tables]]\nrows = 9\ndim = 64\n[[tables]]\nrows = 9\ndim = 32",
            "embeddings of one width, not 32, 64",
        ),
        (
            "batch = 65536\ntop = [64, 1]\n[[tables]]\nrows = 9\ndim = 64",
            '"dot" multiplies pairs of vectors.*interaction = "concat"',
        ),
    ],
)
def test_mistakes_in_a_file_are_all_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(PlanError, match=message):
        workloads.load(tmp_path / "mine.toml")


@settings(max_examples=60)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 400_000), st.sampled_from([32, 64, 96, 256]), st.floats(0.1, 50)),
        min_size=1,
        max_size=5,
    ),
    size=st.integers(1, 32),
    grain=st.sampled_from([math.inf, 1.0, 0.5]),
    room=st.floats(1.5, 4),
)
def test_parts_cover_every_table_once_and_fit(
    groups: list[tuple[int, int, int, float]], size: int, grain: float, room: float
) -> None:
    tables = tuple(Tables(count=c, rows=r, dim=d, lookups=x) for c, r, d, x in groups)
    work = Recommender(tables=tables, interaction="concat", top=(1,), batch=64)
    space = room * table_bytes(work) / size
    try:
        dealt = place_tables(work, size, space, 10.0, grain)
    except PlanError:
        assume(False)  # a table cut in columns has the state of its rows in each part
    area: Counter[tuple[int, int]] = Counter()
    for shard in dealt.shards:
        area[shard.table, shard.copy] += shard.rows * shard.columns
        assert 0 <= shard.first_row < shard.first_row + shard.rows <= tables[shard.table].rows
        assert 0 <= shard.first_column < shard.first_column + shard.columns <= tables[shard.table].dim
    assert area == {(i, copy): t.rows * t.dim for i, t in enumerate(tables) for copy in range(t.count)}
    assert len(set(dealt.shards)) == len(dealt.shards)
    assert (dealt.memory + dealt.optimizer <= space * (1 + 1e-6)).all()
    ids = sum(s.columns / tables[s.table].dim * x for s, x in zip(dealt.shards, dealt.lookups, strict=True))
    assert ids == pytest.approx(sum(t.count * t.lookups for t in tables))
    assert sum(dealt.ways().values()) == sum(t.count for t in tables)


def test_equal_tables_are_dealt_out_equally() -> None:
    work = SMALL.model_copy(update={"tables": (Tables(count=16, rows=1000, dim=64, lookups=3),)})
    dealt = place_tables(work, 8, 1e9, 1.0, 1.0)
    assert dealt.ways() == {"whole": 16, "columns": 0, "rows": 0, "both": 0}
    assert set(dealt.sent_columns) == {128.0}
    hot = work.model_copy(update={"tables": (Tables(rows=10**6, dim=64, lookups=1000), *work.tables)})
    assert place_tables(hot, 8, 1e9, 1.0, math.inf).ways()["whole"] == 17
    ways = place_tables(hot, 8, 1e9, 1.0, 1.0)
    assert ways.ways() == {"whole": 16, "columns": 0, "rows": 0, "both": 1}
    assert ways.read.max() < 1.5 * ways.read.mean()


def test_tables_that_do_not_fit_say_how_much_is_missing() -> None:
    one = SMALL.model_copy(update={"tables": (Tables(rows=10**9, dim=64),)})
    with pytest.raises(PlanError, match="tables over 8 devices: 180 GB do not fit"):
        place_tables(one, 8, 10e9, 1.0, 1.0)  # 256 GB and 4 GB of state on 80 GB
    with pytest.raises(PlanError, match=r"tables over 8 devices: 0\.4 GB do not fit"):
        place_tables(one, 8, 32.45e9, 1.0, 1.0)


@pytest.mark.parametrize(("group", "copies"), [(24, 1), (12, 2), (6, 4), (4, 6), (8, 3), (2, 12), (5, 2)])
@pytest.mark.parametrize("order", INSIDE)
@pytest.mark.parametrize("backwards", [False, True])
def test_an_exchange_is_that_of_a_count_over_routes(group: int, copies: int, order: tuple, backwards: bool) -> None:
    cluster = toy()
    weights = np.random.default_rng(group).uniform(1, 9, group)
    members = [[g * group + i if order[0] == "tables" else i * copies + g for i in range(group)] for g in range(copies)]
    load: Counter[int] = Counter()
    met: Counter[int] = Counter()
    for ranks in members:
        for i, a in enumerate(ranks):
            for j, b in enumerate(ranks):
                if i != j:
                    size = weights[j if backwards else i] / group
                    met[cluster.shared_level(a, b)] += size
                    for resource in route(cluster, a, b)[0]:
                        load[resource] += size
    exchange = Exchange(cluster, group, copies, order)
    ideal = [1.0] * len(exchange.crossing(weights)[0])
    slowest = max(size / cluster.capacities[resource] for resource, size in load.items())
    assert exchange.busy(weights, backwards, ideal) == pytest.approx(slowest)
    leaving, entering = exchange.crossing(weights)
    assert leaving.sum(axis=1) == pytest.approx(entering.sum(axis=1))  # what is sent is received, level by level
    assert exchange.volumes(weights) == pytest.approx([met[level] for level in range(len(ideal))])


def test_volumes_are_those_counted_by_hand() -> None:
    cluster, layout = two_pods(), TableLayout(8, 8)
    work = SMALL
    dealt = place_tables(work, 8, 1e9, 1.0, math.inf)  # six whole tables on eight devices
    job = TableJob(work, cluster, layout, dealt, CostModel(cluster.device, Calibration()))
    assert job.samples == 1024
    assert job.group_samples == 8192
    ids, forward = job.weights["ids"], job.weights["forward"]
    assert ids.max() == 8192 * (10 * 8 + 4)
    assert forward.max() == 8192 * 64 * 4
    assert sorted(forward) == [0, 0] + [8192 * 64 * 4] * 6
    step = job.step(TableSchedule())
    # each of six tables goes to seven others, eight groups; there and back, and the ids
    pooled = 8 * 6 * (8192 * 64 * 4) * 7 / 8
    known = 8 * 7 / 8 * 8192 * (4 * 84 + 2 * 12)
    assert step.crossed == pytest.approx({"host": 2 * pooled + known, "rack": 0, "pod": 0, "building": 0, "region": 0})
    reduced, gathered, _ = dealt.synchronised(8192, 8)
    assert sorted(reduced) == [0] * 6 + [100 * 64 * 4] * 2  # a small gradient is added up whole
    assert gathered.max() == 8192 * (64 * 4 + 10 * 8)  # of others, pooled gradients and ids are gathered


class CountedBytes(CostModel):
    """A device that takes a second for a byte and none for arithmetic."""

    def stream(self, size: float) -> float:
        return size

    def linear(self, rows: float, outputs: int, inputs: int) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0

    def product(self, *sizes: float) -> float:
        return 0.0


def test_the_top_net_reads_what_arrives_and_lays_it_side_by_side() -> None:
    cluster = two_pods()
    dealt = place_tables(SMALL, 8, 1e9, 1.0, math.inf)
    job = TableJob(SMALL, cluster, TableLayout(8, 8), dealt, CountedBytes(cluster.device, Calibration(layer_s=0.0)))
    for chunks in (1, 4):
        found, rows = job.layers(chunks), 1024 / chunks
        laid = rows * (
            4 * dealt.sent_columns.sum() + 2 * 7 * 64
        )  # in float32; all vectors beside each other, in bfloat16
        for way in ("forward", "backward"):
            # activations of a layer take the same bytes for each of its outputs, in both nets
            of_output = found[f"bottom {way}"] / (1024 * (128 + 64))
            assert found[f"top {way}"] - laid == pytest.approx(of_output * rows * (256 + 1))


class CountedProducts(CountedBytes):
    """A device that takes a second for a multiplication of two matrices' numbers, and almost none for bytes."""

    def stream(self, size: float) -> float:
        return 1e-20 * size

    def product(self, *sizes: float) -> float:
        return math.prod(sizes)


def test_dot_products_are_multiplied_once_forward_and_twice_backward() -> None:
    cluster = two_pods()
    for interaction, count in (("dot", 1), ("concat", 0)):
        work = Recommender.model_validate({**SMALL.model_dump(), "interaction": interaction})
        dealt = place_tables(work, 8, 1e9, 1.0, math.inf)
        cost = CountedProducts(cluster.device, Calibration(layer_s=0.0))
        found = TableJob(work, cluster, TableLayout(8, 8), dealt, cost).layers(2)
        pairs = count * work.vectors**2 * 64 * 1024 / 2
        assert found["top forward"] == pytest.approx(pairs, abs=1e-9)
        assert found["top backward"] == pytest.approx(2 * pairs, abs=1e-9)
        assert max(found["bottom forward"], found["bottom backward"]) < 1e-9


def test_every_gradient_is_reduced_once_in_each_order() -> None:
    cluster = two_pods()
    dealt = place_tables(SMALL, 8, 1e9, 1.0, math.inf, 1_000)
    layout = TableLayout(8, 8, copied_rows=1_000)
    job = TableJob(SMALL, cluster, layout, dealt, CostModel(cluster.device, Calibration()))
    top, bottom = job.reduced
    bottom_weights = 16 * 128 + 128 * 64
    assert bottom == 4 * bottom_weights
    assert top == 4 * (SMALL.dense_parameters - bottom_weights + 2 * 100 * 64)  # and the gradients of copied tables
    reduced = {}
    for way in ("whole", "split", "last"):
        made = [one for one in job.program(TableSchedule(reduction=way)) if one.cause == "dense reduction"]  # type: ignore[arg-type]
        reduced[way] = [one.seconds for one in made]
    assert reduced["whole"] == reduced["last"] == [job.all_reduce(job._all, "devices", top + bottom)]
    assert reduced["split"] == [job.all_reduce(job._all, "devices", size) for size in (top, bottom)]
    assert reduced["whole"][0] > max(reduced["split"])


def test_copied_tables_are_updated_whole_for_the_samples_of_a_device() -> None:
    cluster = two_pods()

    def moved(rows: int) -> float:
        work = SMALL.model_copy(update={"tables": (SMALL.tables[0], Tables(count=2, rows=rows, dim=64))})
        layout = TableLayout(8, 8, copied_rows=1_000)
        dealt = place_tables(work, 8, 1e9, 1.0, math.inf, 1_000)
        return TableJob(work, cluster, layout, dealt, CostModel(cluster.device, Calibration()))._local[1]

    # each of 2 tables: weights are read and written, gradients read, state read and written
    of_row = 2 * (64 * (4 + 4 + SMALL.gradient_bytes) + 2 * SMALL.optimizer_bytes)
    assert moved(300) - moved(100) == pytest.approx(200 * of_row)
    assert moved(100) > 100 * of_row


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 60)), min_size=2, max_size=6))
def test_memory_is_that_of_the_fullest_device(tables: list[tuple[int, int, int]]) -> None:
    cluster = two_pods()
    made = tuple(Tables(count=1, rows=1_000 * rows, dim=16 * dim, lookups=lookups) for dim, rows, lookups in tables)
    work = SMALL.model_copy(update={"tables": made})
    dealt = place_tables(work, 8, 1e12, 1.0, math.inf)
    job = TableJob(work, cluster, TableLayout(8, 8), dealt, CostModel(cluster.device, Calibration()))
    for prefetch in (True, False):
        found = job.memory(TableSchedule(prefetch))
        sent = job.weights["forward"] + job.weights["backward"] + (2 if prefetch else 1) * job.weights["ids"]
        arrived = found["buffers"] - max(
            of_device
            for of_device, all_of_it in zip(sent, dealt.memory + dealt.optimizer + sent, strict=True)
            if all_of_it == (dealt.memory + dealt.optimizer + sent).max()
        )
        total = found["tables"] + found["optimizer"] + found["buffers"] - arrived
        assert total == pytest.approx((dealt.memory + dealt.optimizer + sent).max())
        assert arrived == pytest.approx(
            job.samples * dealt.sent_columns.sum() * (work.forward_bytes + work.backward_bytes)
        )


def test_one_group_in_one_host_sends_nothing_out() -> None:
    plan = RecommenderExplorer(SMALL, two_pods(), devices=8).explore().best
    assert {name for name, size in plan.step.crossed.items() if size} <= {"host"}
    single = RecommenderExplorer(SMALL, two_pods(), devices=1).production()
    assert sum(single.step.crossed.values()) == 0
    assert single.step.parts["pooled exchange"] == single.step.parts["input exchange"] == 0


durations = st.lists(st.floats(0, 10), min_size=12, max_size=12)


@settings(max_examples=80)
@given(seconds=durations, faster=durations, schedule=st.sampled_from(SCHEDULES))
def test_steps_keep_their_bounds(seconds: list[float], faster: list[float], schedule: TableSchedule) -> None:
    cluster = two_pods()
    layout = TableLayout(8, 8)
    job = TableJob(
        SMALL, cluster, layout, place_tables(SMALL, 8, 1e9, 1.0, 1.0), CostModel(cluster.device, Calibration())
    )
    program = job.program(schedule)

    def with_times(times: list[float]) -> list[Operation]:
        return [Operation(one.name, one.cause, one.stream, times[i % 12], one.after) for i, one in enumerate(program)]

    slow = [a + b for a, b in zip(seconds, faster, strict=True)]
    steps = {}
    for name, times in {"fast": seconds, "slow": slow}.items():
        made = with_times(times)
        batches = run(made)
        parts = exposed(batches)
        steps[name] = sum(parts.values())
        assert min(parts.values()) >= 0
        for stream in ("compute", "exchange", "reduce"):  # no stream does two things at a time
            assert steps[name] >= sum(one.seconds for one in made if one.stream == stream) * (1 - 1e-9)
        serial = sum(one.seconds for one in made)
        assert steps[name] <= serial * (1 + 1e-9)
        ends = [max(one.end for one in batch if one.stream == "compute") for batch in batches]
        assert steps[name] == pytest.approx((ends[-1] - ends[-9]) / 8)
        assert steps[name] == pytest.approx(sum(exposed(run(made, 60)).values()))  # it has settled
        for batch in batches:
            for one in batch:
                assert one.end == one.start + one.seconds
    assert steps["fast"] <= steps["slow"] * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_nothing_begins_before_what_it_needs(schedule: TableSchedule) -> None:
    cluster = two_pods().changed({"region.distance_km": 300.0})
    dealt = place_tables(SMALL, 8, 1e9, 1.0, 1.0)
    job = TableJob(SMALL, cluster, TableLayout(8, 8), dealt, CostModel(cluster.device, Calibration(layer_s=1e-4)))
    batches = [{one.name: one for one in batch} for batch in run(job.program(schedule))]
    for before, now in pairwise(batches):
        ids = before if schedule.prefetch else now  # a prefetch is for the batch after its own
        last = schedule.chunks - 1
        assert now["lookup 0"].start >= max(ids["ids"].end, before["update"].end)
        for i in range(schedule.chunks):
            assert now[f"embeddings {i}"].start >= now[f"lookup {i}"].end
            assert now[f"top forward {i}"].start >= max(now[f"embeddings {i}"].end, now["bottom forward"].end)
            assert now[f"gradients {i}"].start >= now[f"top backward {i}"].end
        assert now["synchronisation"].start >= now[f"gradients {last}"].end
        assert now["update"].start >= now["synchronisation"].end
        assert now["reduce"].start >= now["bottom backward"].end
        assert now["optimizer"].start >= now["reduce"].end
        assert now["bottom forward"].start >= before["optimizer"].end
        if not schedule.prefetch:
            assert now["ids"].start >= before["optimizer"].end


def test_what_is_hidden_is_not_counted_and_the_rest_is() -> None:
    program = [
        Operation("lookup", "lookup", "compute", 1.0, ("-ids",)),
        Operation("send", "pooled exchange", "exchange", 4.0, ("lookup",)),
        Operation("bottom", "layers", "compute", 1.0),
        Operation("ids", "input exchange", "exchange", 2.0),
        Operation("top", "layers", "compute", 3.0, ("send",)),
    ]
    # lookup 0 to 1, send 1 to 5 beside bottom, three seconds of it seen; ids 5 to 7 beside top, which ends at 8
    assert exposed(run(program)) == pytest.approx(
        dict.fromkeys(exposed(run(program)), 0.0) | {"lookup": 1, "layers": 4, "pooled exchange": 3}
    )
    program[3].seconds = 6.0  # now ids end at 11, three seconds after top
    assert exposed(run(program))["input exchange"] == pytest.approx(3)


def test_a_machine_that_is_twice_as_slow_takes_twice_as_long() -> None:
    cluster = two_pods()
    levels = [
        level.model_copy(
            update={
                "latency_s": 2 * level.latency_s,
                "bytes_per_s": level.bytes_per_s and level.bytes_per_s / 2,
            }
        )
        for level in cluster.levels
    ]
    halves = ("matrix_flops_per_s", "memory_bytes_per_s", "nic_bytes_per_s")
    device = cluster.device.model_copy(update={name: getattr(cluster.device, name) / 2 for name in halves})
    slow = cluster.model_copy(update={"levels": tuple(levels), "device": device})
    constants = Calibration()
    names = ("collective_s", "message_s", "layer_s")
    twice = constants.model_copy(update={name: 2 * getattr(constants, name) for name in names})
    for layout in (TableLayout(64), TableLayout(8, 8), TableLayout(16, 4, INSIDE[1])):
        dealt = place_tables(SMALL, layout.group, 1e9, 1.0, 1.0)
        times = [
            TableJob(SMALL, top, layout, dealt, CostModel(top.device, one), network).step(TableSchedule()).parts
            for top, one in ((cluster, constants), (slow, twice))
            for network in [production_network(top)]
        ]
        assert times[1] == pytest.approx({name: 2 * value for name, value in times[0].items()})


@pytest.mark.slow
def test_narrower_links_are_never_faster_for_the_best_plan() -> None:
    work = SMALL.model_copy(update={"batch": 64 * 8192})
    last = 0.0
    for by in (1.0, 2.8, 7.0, 50.0, 400.0):
        cluster = two_pods().changed({"region.oversubscription": by})
        seconds = RecommenderExplorer(work, cluster, Calibration(layer_s=0)).explore().best.seconds
        assert seconds >= last * (1 - 1e-9)
        last = seconds
    assert last > 0


def test_more_freedom_is_never_worse() -> None:
    changes = {"region.distance_km": 500.0, "region.oversubscription": 7.0, "region.loss_rate": 1e-4, "pod.members": 1}
    changes["rack.members"] = 1
    cluster = two_pods().changed(changes)
    explorer = RecommenderExplorer(SMALL, cluster, Calibration(layer_s=1e-4))
    base = explorer.production()
    assert (base.layout.copies, base.schedule.prefetch, base.schedule.chunks) == (1, True, 1)
    alone = {one: explorer.explore([one]).best.seconds for one in ALL}
    assert max(alone.values()) <= base.seconds
    joint = explorer.explore()
    assert joint.best.seconds <= min(alone.values())
    assert joint.best.seconds < 0.9 * base.seconds  # there is something to be found here
    assert [plan.seconds for plan in joint.plans] == sorted(plan.seconds for plan in joint.plans)
    again = explorer.explore()
    assert [plan.to_json() for plan in again.plans] == [plan.to_json() for plan in joint.plans]
    for plan in joint.plans:
        assert plan.layout.devices == 16
        assert plan.step.memory_bytes <= 0.94 * 80e9
        for stream in ("compute", "exchange", "reduce"):
            busy = sum(one.seconds for one in plan.step.timeline if one.stream == stream)
            assert plan.seconds >= busy * (1 - 1e-9)


def test_tuned_settings_matter_over_distance() -> None:
    cluster = two_pods().changed({"region.distance_km": 2000.0, "region.loss_rate": 1e-3})
    exchange = Exchange(cluster, 64, 1)
    cost = CostModel(cluster.device, Calibration())
    plain, tuned = (exchange.efficiencies(cost, one(cluster)) for one in (production_network, tuned_network))
    assert plain[-1] < tuned[-1] <= cost.calibration.network
    assert exchange.efficiencies(cost, None)[1:] == [cost.calibration.network] * (len(plain) - 1)


def test_groups_are_those_that_the_levels_suggest() -> None:
    cluster = two_pods()
    assert group_sizes(cluster, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert group_sizes(cluster, 48) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    large = group_sizes(topology.load("two-buildings"), 24_576)
    assert {8, 16, 3072, 12_288, 24_576} <= set(large)
    assert all(24_576 % size == 0 for size in large)


def test_copies_of_small_tables_need_no_exchange() -> None:
    work = SMALL.model_copy(update={"tables": (Tables(count=6, rows=500, dim=64, lookups=5),)})
    plan = RecommenderExplorer(work, two_pods(), Calibration(layer_s=0)).explore().best
    assert plan.layout.copied_rows == 1000
    assert not plan.dealt.shards
    assert plan.cut == "6 on every device"
    assert plan.to_json()["tables"] == {"whole": 0, "columns": 0, "rows": 0, "both": 0, "copied": 6}
    assert plan.step.volumes["forward"] == 0
    dense = 4 * (work.dense_parameters + 6 * 500 * 64)
    assert plan.step.volumes["dense gradients"] == dense


def test_what_does_not_fit_is_dropped_with_how_much() -> None:
    large = workloads.load("dlrm-12t")
    assert isinstance(large, Recommender)
    found = RecommenderExplorer(large, topology.load("two-buildings"), devices=1024).explore(["placement"])
    missing = {
        int(size): float(gigabytes.replace(",", ""))
        for reason in found.dropped
        for size, gigabytes in re.findall(r"over (\d+) devices: ([\d,]+) GB do not fit", reason)
    }
    room = (table_bytes(large) / 1e9 - missing[256]) / 256  # of a device, after what else it has to hold
    assert 70 < room < 75.2
    assert missing[128] == pytest.approx(table_bytes(large) / 1e9 - 128 * room, rel=0.05)
    assert {plan.layout.group for plan in found.plans} == {512, 1024}
    with pytest.raises(PlanError, match=r"no plan is possible \(tables over 128 devices: [\d,]+ GB do not fit\)"):
        RecommenderExplorer(large, topology.load("two-buildings"), devices=128).explore()
    with pytest.raises(PlanError, match="a batch of 8 samples leaves some of 64 devices without any"):
        RecommenderExplorer(SMALL.model_copy(update={"batch": 8}), two_pods())
    with pytest.raises(PlanError, match="65 devices are asked for, the cluster has 64"):
        RecommenderExplorer(SMALL, two_pods(), devices=65)
    with pytest.raises(PlanError, match="65 devices are needed, the cluster has 64"):
        Exchange(two_pods(), 65, 1)


def test_an_interrupt_keeps_what_was_found() -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    explorer = RecommenderExplorer(SMALL, two_pods(), progress=stop)
    found = explorer.explore()
    assert found.interrupted
    assert found.best.seconds <= explorer.production().seconds


@pytest.mark.parametrize(("devices", "batch", "records_per_s"), PUBLISHED)
def test_published_throughput_is_missed_by_as_much_as_the_docs_say(
    devices: int, batch: int, records_per_s: float
) -> None:
    """facebookresearch/dlrm, torchrec_dlrm/README, 2022: A100 of 40 GB, TF32 as PyTorch had it then; published.

    About as fast at the smallest batch, a quarter to a third faster at the others. No constant was fitted to them, but
    the host's time for a linear layer was chosen with them in view; this holds what the docs say and is no proof of
    accuracy.
    """
    host = topology.load("a100-node").changed(A100_40GB)
    plan = RecommenderExplorer(criteo(batch), host, devices=devices).production()
    assert plan.seconds / (batch / records_per_s) - 1 == pytest.approx(0.02 if batch == 2048 else -0.28, abs=0.06)


def test_the_largest_published_model_is_slower_than_if_it_fitted() -> None:
    """Neo's model F ran at 1.7 M samples/s on 128 A100, most of it in the hosts' memory; published.

    Its tables are 24 TB and these devices have 5: the planner refuses. With memory that they do not have it would be
    4.8 times as fast; caches and the hosts' memory are not modelled.
    """
    large = workloads.load("dlrm-12t")
    assert isinstance(large, Recommender)
    cluster = topology.load("selene").changed({"building.members": 16, "device.memory_bytes_per_s": 1555e9})
    work = large.model_copy(update={"batch": 65_536})
    with pytest.raises(PlanError, match="GB do not fit"):
        RecommenderExplorer(work, cluster.changed({"device.memory_bytes": 40e9})).production()
    plan = RecommenderExplorer(work, cluster.changed({"device.memory_bytes": 400e9})).production()
    assert plan.samples_per_s / 1.7e6 == pytest.approx(4.8, rel=0.05)


def test_cross_layers_and_concatenation_are_planned_too() -> None:
    for update in ({"interaction": "concat"}, {"interaction": "cross", "cross": Cross(layers=2, rank=32)}):
        work = Recommender.model_validate({**SMALL.model_dump(), **update})
        assert RecommenderExplorer(work, two_pods(), devices=16).production().seconds > 0


def test_files_hold_what_they_should(tmp_path: Path) -> None:
    planned = commands.plan(
        "dlrm-dcnv2",
        "two-buildings",
        tmp_path,
        devices=16,
        changes=["region.distance_km=10"],
        what_if=["rack.latency_s*=1000"],
        compare=True,
    )
    content = json.loads((tmp_path / "plan.json").read_text())
    best = content["plans"][0]
    assert best["seconds"] == planned.found.best.seconds
    assert best["evidence"] == "simulated"
    assert math.prod(best["mesh"]["sizes"]) == 16
    assert content["cluster"]["levels"][-1]["distance_km"] == 10
    cells = sum(part["rows"] * part["columns"] for part in content["placement"])
    copied = sum(
        t.count * t.rows * t.dim for t in planned.explorer.workload.tables if t.rows <= best["layout"]["copied_rows"]
    )
    assert cells + copied == numbers_in_tables(planned.explorer.workload)
    assert [sum(plan["tables"].values()) for plan in content["plans"]] == [26] * len(content["plans"])
    assert {part["device"] for part in content["placement"]} <= set(range(best["layout"]["group"]))
    assert planned.what_if[0].seconds > planned.found.best.seconds
    assert [case["what"] for case in content["what_if"]] == ["rack.latency_s*=1000"]
    assert content["what_if"][0]["seconds"] == planned.what_if[0].seconds
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 3  # none over links that nothing crosses
    assert "placement alone" in page
    assert "<h2>What if</h2>" in page
    assert "rack.latency_s*=1000" in page
    assert not re.search(r"\b(nan|inf)\b", page, re.IGNORECASE)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"lookup 0", "embeddings 0", "gradients 0", "update", "ids"} <= set(names)
