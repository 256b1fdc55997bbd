"""Clusters: sizes and routes of regular and irregular trees, shared links, what-ifs, and files that are wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from cordillera import topology
from cordillera.errors import PlanError
from cordillera.topology import Topology
from tests.planning.flows import route

DEVICE = {
    "name": "toy",
    "matrix_flops_per_s": 1e12,
    "memory_bytes": 1e9,
    "memory_bytes_per_s": 1e11,
    "nic_bytes_per_s": 10.0,
}


def cluster(*levels: dict[str, Any], **more: Any) -> Topology:
    first, *rest = levels
    first = {"bytes_per_s": 100.0, **first}
    return Topology.model_validate({"device": DEVICE, "levels": [first, *rest], **more})


def small(**region: Any) -> Topology:
    """Hosts of two; buildings of 3 and 1 hosts; a region of both."""
    return cluster(
        {"name": "host", "members": 2, "latency_s": 1},
        {"name": "building", "members": [3, 1], "latency_s": 10},
        {"name": "region", "members": 2, "latency_s": 100, "oversubscription": 4.0, **region},
    )


def test_sizes_of_unequal_buildings() -> None:
    assert small().sizes == ((2, 2, 2, 2), (6, 2), (8,))
    assert small().devices == 8
    assert [small().domain(device, 1) for device in range(8)] == [0] * 6 + [1] * 2


def test_bytes_inside_a_host_use_its_ports_and_others_the_network() -> None:
    c = small()
    resources, latency = route(c, 0, 1)
    assert latency == 1
    assert c.capacities[list(resources)].tolist() == [100.0, 100.0]
    resources, latency = route(c, 0, 7)
    assert latency == 100
    # card, host (two cards), building of six cards at 1:4, building of two cards at 1:4, host, card
    assert c.capacities[list(resources)].tolist() == [10.0, 20.0, 15.0, 5.0, 20.0, 10.0]
    assert route(c, 3, 3) == ((), 0.0)


@given(
    members=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    pair=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
@settings(max_examples=80)
def test_routes_mirror_each_other_and_stay_below_what_both_share(members: list[int], pair: tuple[int, int]) -> None:
    c = cluster(*({"name": f"l{i}", "members": n, "latency_s": 10**i} for i, n in enumerate(members)))
    a, b = (value % c.devices for value in pair)
    there, latency = route(c, a, b)
    back, same = route(c, b, a)
    assert latency == same
    assert len(there) == len(back) == len(set(there))
    assert {resource ^ 1 for resource in there} == set(back)  # the other direction of the same links
    top = c.shared_level(a, b)
    assert all(c.domain(a, level) == c.domain(b, level) for level in range(max(top, 0), len(members)))
    assert all(0 <= resource < len(c.capacities) for resource in there)


def test_capacities_are_those_of_members() -> None:
    c = small(planes=4, planes_lost=1)
    for level in range(3):
        for member in range(len(c.sizes[level - 1]) if level else c.devices):
            for inwards in (False, True):
                assert c.capacities[c.resource(level, member, inwards)] == c.member_bytes_per_s(level, member)
    assert c.member_bytes_per_s(2, 0) == 15.0 * 3 / 4


def test_a_single_link_can_differ() -> None:
    c = small().model_copy(update={"links": (topology.Link(level="region", member=1, bytes_per_s=7.0),)})
    assert [c.member_bytes_per_s(2, member) for member in (0, 1)] == [15.0, 7.0]
    assert c.capacities[c.resource(2, 1, True)] == 7.0


def test_distance_adds_the_time_of_light_in_glass() -> None:
    assert route(small(distance_km=1000.0), 0, 7)[1] == pytest.approx(100 + 5e-3)


def test_what_if() -> None:
    c = small()
    assert c.changed({"region.bytes_per_s": "*=2"}).member_bytes_per_s(2, 0) == 30.0
    lossy = small(planes=4, planes_lost=1).changed({"region.bytes_per_s": "*=2"})
    assert lossy.member_bytes_per_s(2, 0) == pytest.approx(30.0 * 3 / 4)
    several = {"region.oversubscription": 1, "region.bytes_per_s": "*=2"}
    assert c.changed(several).member_bytes_per_s(2, 0) == 120.0
    with pytest.raises(PlanError, match=r"\*=x has no number"):
        c.changed({"region.bytes_per_s": "*=x"})
    assert c.changed({"region.oversubscription": 1}).member_bytes_per_s(2, 0) == 60.0
    assert c.changed({"device.nic_bytes_per_s": "/=2"}).member_bytes_per_s(1, 0) == 10.0
    with pytest.raises(PlanError, match=r"is no key of a cluster[\s\S]*keys there are"):
        c.changed({"region.colour": 2})
    with pytest.raises(PlanError, match="no level 'planet'"):
        c.changed({"planet.bytes_per_s": 2})
    with pytest.raises(PlanError, match="bytes_per_s"):
        c.changed({"region.bytes_per_s": 0})
    with pytest.raises(PlanError, match="divided by 0"):
        c.changed({"region.bytes_per_s": "/=0"})


def test_a_level_states_one_rate_of_its_links() -> None:
    both = "bytes_per_s and oversubscription = 4 are two rates of one link"
    with pytest.raises(ValidationError, match=both):
        small(bytes_per_s=5.0)
    with pytest.raises(PlanError, match=both):
        small().changed({"region.bytes_per_s": 5.0})
    with pytest.raises(PlanError, match="oversubscription = 7 are two rates"):
        small().changed({"region.bytes_per_s": "*=2", "region.oversubscription": 7.0})
    assert small().changed({"region.bytes_per_s": "*=2"}).levels[-1].oversubscription == 1


@pytest.mark.parametrize("name", topology.shipped())
def test_shipped_clusters_can_be_read(name: str) -> None:
    c = topology.load(name)
    assert c.description
    assert c.source
    assert route(c, 0, c.devices - 1)[1] >= c.levels[0].latency
    assert (c.capacities > 0).all()


def test_published_shapes() -> None:
    llama3 = topology.load("llama3-building")
    assert llama3.devices == 24_576
    assert llama3.sizes[llama3.index("pod")] == (3_072,) * 8
    pod = llama3.member_bytes_per_s(llama3.index("building"), 0)
    assert pod == pytest.approx(3_072 * 50e9 / 7)
    region = topology.load("llama4-region")
    assert region.devices > 100_000
    assert region.changed({"region.planes_lost": 1}).member_bytes_per_s(4, 0) == pytest.approx(
        region.member_bytes_per_s(4, 0) * 75 / 76
    )


def test_one_message_names_every_mistake(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        '[device]\nname = "x"\nmatrix_flops_per_s = nan\n[[levels]]\nname = "host"\nmembers = 0\nlatency_s = -1\n'
        "bytes_per_s = 0\nmembrs = 3\n"
    )
    with pytest.raises(PlanError) as error:
        topology.load(path)
    for part in (
        "bad.toml: 8 mistakes",
        "device.matrix_flops_per_s: must be a finite number, got nan",
        "device.memory_bytes: is missing",
        "levels[0].members: must be at least 1, got 0",
        "levels[0].latency_s: must be at least 0, got -1",
        "levels[0].bytes_per_s: must be at least ",
        "levels[0].membrs: is not a key here; did you mean 'members'?",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "says", "more"),
    [
        (1, "1 mistake\n", ""),
        (20, "20 mistakes\n", ""),
        (21, "21 mistakes\n", "and 1 more"),
        (1000, "1,000 mistakes\n", "and 980 more"),
        (1001, "1,000 mistakes or more\n", "and 980 more"),
    ],
)
def test_many_mistakes_are_counted_and_a_few_listed(wrong: int, says: str, more: str) -> None:
    class Numbers(BaseModel):
        numbers: list[int]

    with pytest.raises(PlanError) as error:
        topology.validate(Numbers, {"numbers": ["x"] * wrong}, "here")
    assert says in str(error.value)
    assert str(error.value).count("numbers[") == min(wrong, 20)
    assert ("more" in str(error.value).split("\n", 1)[1]) == bool(more)
    assert more in str(error.value)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([{"name": "host", "members": 2, "latency_s": 1, "bytes_per_s": None}], "needs bytes_per_s"),
        ([{"name": "a", "members": 2, "latency_s": 1}, {"name": "a", "members": 2, "latency_s": 1}], "used once"),
        ([{"name": "a", "members": 2, "latency_s": 1}, {"name": "b", "members": [1, 2], "latency_s": 1}], "one domain"),
        ([{"name": "a", "members": [1, 2], "latency_s": 1}, {"name": "b", "members": 3, "latency_s": 1}], "lists 2"),
        ([{"name": "a", "members": 1, "latency_s": 1, "planes": 2, "planes_lost": 2}], "no way between"),
        ([{"name": "a", "members": 1, "latency_s": float("inf")}], "latency_s"),
        ([{"name": "a", "members": 2, "latency_s": 1, "loss_rate": 0.5}], r"levels\[0\]\.loss_rate: losses are"),
    ],
)
def test_what_does_not_fit_together_is_refused(levels: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        topology.validate(
            Topology, {"device": DEVICE, "levels": [{"bytes_per_s": 1.0, **level} for level in levels]}, "test"
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("members = 100000000", "members: must be at most 1048576, got 100000000"),
        ("members = 4611686018427387904", "members: must be at most 1048576"),
        ("members = true", "members: must be a number or an array, got True"),
        ('members = "8"', "members: must be a number or an array, got '8'"),
        ("members = 8\nplanes = 1000000", "planes: must be at most 4096"),
        ("members = 8\nloss_rate = nan", "loss_rate: must be a finite number"),
        ("members = 8\noversubscription = 1e300", "oversubscription: must be at most"),
        (
            "members = 1000000\n[[levels]]\nname = 'b'\nlatency_s = 0\nmembers = 2",
            "2,000,000 devices, at most 1,048,576",
        ),
        ("members = 2\n[[links]]\nlevel = 'c'\nmember = 0\nbytes_per_s = 1", "'c' is not one of the levels"),
        (
            "members = 2\n" + "[[links]]\nlevel = 'a'\nmember = 0\nbytes_per_s = 1\n" * 2,
            "is the link of links[0] again",
        ),
        ("members = [" + "0," * 200_000 + "]", "members[0]: must be at least 1"),
        (
            "members = 2\n" + "".join(f"[[levels]]\nname = 'l{i}'\nlatency_s = 0\nmembers = 1\n" for i in range(20)),
            "levels: must have at most 16 entries",
        ),
        ("members = 2\n" + ".".join("a" * 50_000) + " = 1", "nested more than 16 levels deep"),
    ],
    ids=range(13),
)
def test_costs_that_grow_with_a_number_in_the_file_are_limited(tmp_path: Path, text: str, message: str) -> None:
    device = "".join(f"{key} = {value!r}\n" for key, value in DEVICE.items())
    path = tmp_path / "c.toml"
    host = "[[levels]]\nname = 'host'\nmembers = 1\nbytes_per_s = 1e9\nlatency_s = 0\n"
    path.write_text(f"[device]\n{device}{host}[[levels]]\nname = 'a'\nlatency_s = 0\n{text}\n")
    with pytest.raises(PlanError) as caught:
        topology.load(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 5_000


def test_names_with_control_characters_are_refused(tmp_path: Path) -> None:
    device = "".join(f"{key} = {value!r}\n" for key, value in DEVICE.items()).replace("'toy'", '"\\u001b[2J"')
    host = "[[levels]]\nname = 'host'\nmembers = 1\nbytes_per_s = 1e9\nlatency_s = 0\n"
    (tmp_path / "c.toml").write_text('description = "\\u202e"\n[device]\n' + device + host)
    with pytest.raises(PlanError) as caught:
        topology.load(tmp_path / "c.toml")
    assert "2 mistakes" in str(caught.value)
    assert "device.name: control characters cannot be shown" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_unknown_keys_are_named_whatever_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('int = 1\n"tuple[" = 2\n"function-x".a = 3\n')
    with pytest.raises(PlanError) as caught:
        topology.load(tmp_path / "c.toml")
    for key in ("int", "tuple[", "function-x"):
        assert f"\n  {key}: is not a key here" in str(caught.value)


def test_names_that_are_nearly_right_are_suggested(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="did you mean llama4-region"):
        topology.load("llama4-regin")
    (tmp_path / "x.toml").write_text("a = [")
    with pytest.raises(PlanError, match="is not TOML"):
        topology.load(tmp_path / "x.toml")


def test_the_planner_does_not_import_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, cordillera.topology, cordillera.planning as p\n"
        "for m in pkgutil.iter_modules(p.__path__): importlib.import_module('cordillera.planning.' + m.name)\n"
        "assert not {'torch', 'numba', 'polars'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
