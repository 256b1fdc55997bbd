"""Formulas of sharded weights against torch's own shards, rings played step by step, and torch's memory tracker."""

from __future__ import annotations

import math

import pytest
import torch
from _fsdp_models import fake_processes, make_stage, track, units_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.fsdp.sharding_law import (
    CollectiveCounts,
    Unit,
    bytes_across_hosts,
    collectives,
    parameter_memory,
    sent_bytes,
)
from cordillera.distributed.mesh import ParallelConfig
from cordillera.errors import PlanError
from cordillera.models.language.llama import PRESETS, LlamaConfig
from cordillera.numerics.formats.precision import Precision

DEBUG = PRESETS["llama-debug"]
# 4 blocks of 8B, between the stage with the embedding and the one with the head
STAGE = (PRESETS["llama3-8b"].model_copy(update={"layers": 12}), 1, 3)
UNEVEN = LlamaConfig(layers=3, hidden=36, heads=3, kv_heads=1, ffn=50, vocabulary=101, tied=False)

shapes = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3), min_size=1, max_size=4)
counts = st.integers(1, 6)


@given(shapes=shapes, shards=st.integers(1, 30))
@settings(max_examples=80)
def test_a_shard_is_the_largest_of_torchs_chunks(shapes: list[list[int]], shards: int) -> None:
    unit = Unit.of(shapes)
    expected = sum(max(chunk.numel() for chunk in torch.empty(shape).chunk(shards)) for shape in shapes)
    assert unit.shard(shards) == expected
    assert unit.elements <= unit.gathered(shards)
    assert unit.gathered(shards) - unit.elements <= (shards - 1) * sum(math.prod(shape[1:]) for shape in shapes)


def test_a_parameter_without_dimensions_is_refused() -> None:
    with pytest.raises(PlanError, match="without dimensions"):
        Unit.of([(3, 4), ()])


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5), shards=st.sampled_from([2, 4, 8]))
@settings(max_examples=60)
def test_even_units_follow_the_published_law(sizes: list[int], shards: int) -> None:
    units = [Unit.of([(8 * size, 3)]) for size in sizes]
    law = parameter_memory(units, shards)
    assert law.total == 4 * (sum(24 * size for size in sizes) // shards + 24 * max(sizes))
    kept = parameter_memory(units, shards, reshards=False)
    assert kept.total == law.sharded + 4 * sum(24 * size for size in sizes)
    with_root = parameter_memory(units[1:], shards, units[0])
    assert law.total <= with_root.total <= kept.total
    half = parameter_memory(units, shards, gathered_bytes=2)
    assert (half.sharded, 2 * half.gathered) == (law.sharded, law.gathered)


def ring(ranks: list[int], chunk: int, rounds: int, ranks_per_host: int, across: list[int]) -> None:
    """Play a ring: in each round every rank hands a chunk to the next."""
    for _ in range(rounds):
        for place, rank in enumerate(ranks):
            if rank // ranks_per_host != ranks[(place + 1) % len(ranks)] // ranks_per_host:
                across[rank] += chunk


@given(shards=counts, replicas=counts, ranks_per_host=counts, size=st.integers(1, 5), reshards=st.booleans())
@settings(max_examples=80)
def test_bytes_across_hosts_are_those_of_rings(
    shards: int, replicas: int, ranks_per_host: int, size: int, reshards: bool
) -> None:
    part = size * replicas  # elements, so that rings over replicas have equal chunks
    units, root = [Unit.of([(shards * part,)])] * 3, Unit.of([(shards * part, 2)])
    world, across = shards * replicas, [0] * (shards * replicas)
    for elements, gathers in [(part, 1 + reshards)] * 3 + [(2 * part, 1)]:
        for first in range(0, world, shards):
            group = list(range(first, first + shards))
            ring(group, 4 * elements, (gathers + 1) * (shards - 1), ranks_per_host, across)
        for first in range(shards):
            group = list(range(first, world, shards))
            ring(group, 4 * elements // replicas, 2 * (replicas - 1), ranks_per_host, across)
    sent = sent_bytes(units, shards, replicas, root, reshards)
    assert bytes_across_hosts(sent, shards, replicas, ranks_per_host) == across


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (4, 8), (64, 8)])
def test_the_published_traffic_is_that_of_the_busiest_rank(hosts: int, ranks_per_host: int) -> None:
    world = hosts * ranks_per_host
    units = [Unit.of([(world * world,)])] * 2
    size = 4 * sum(unit.elements for unit in units)

    def busiest(shards: int, replicas: int) -> int:
        return max(bytes_across_hosts(sent_bytes(units, shards, replicas), shards, replicas, ranks_per_host))

    assert busiest(1, world) == 2 * size * (world - 1) / world
    assert busiest(world, 1) == 3 * size * (world - 1) / world
    hybrid = bytes_across_hosts(sent_bytes(units, ranks_per_host, hosts), ranks_per_host, hosts, ranks_per_host)
    assert set(hybrid) == {2 * size / ranks_per_host * (hosts - 1) / hosts}


# The tracker sees one process of as many as there would be; no memory is taken.
@pytest.mark.cases(1)
@pytest.mark.parametrize("blocks", [1, 2, 4], ids=["blocks", "pairs", "whole"])
@pytest.mark.parametrize("shards", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (64, 512))])
def test_tracked_memory_is_the_published_law(shards: int, blocks: int) -> None:
    with fake_processes(shards):
        stage = make_stage(*STAGE, blocks)
        units, root = units_of(stage)
        tracked = track(stage, ParallelConfig(shard=shards))
    assert root == Unit()
    sizes = [4 * unit.elements for unit in units]
    assert tracked.parameters == pytest.approx(sum(sizes) / shards + max(sizes), rel=0.01)
    assert tracked.parameters == parameter_memory(units, shards).total
    assert tracked.collectives == collectives(len(units), shards, has_root=False)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("config", "shards", "replicas", "blocks", "reshards", "precision"),
    [
        (DEBUG, 8, 1, 1, True, "fp32"),
        (DEBUG, 64, 8, 2, True, "fp32"),
        pytest.param(DEBUG, 8, 1, 1, False, "fp32", marks=pytest.mark.slow),
        (DEBUG, 8, 1, 4, True, "bf16"),
        (DEBUG, 1, 8, 1, True, "fp32"),
        pytest.param(UNEVEN, 64, 1, 1, True, "fp32", marks=pytest.mark.slow),
        (UNEVEN, 7, 3, 2, False, "bf16"),
    ],
)
def test_tracked_memory_and_collectives_of_a_whole_model(
    config: LlamaConfig, shards: int, replicas: int, blocks: int, reshards: bool, precision: Precision
) -> None:
    parallel = ParallelConfig(shard=shards, replicate=replicas, reshard_after_forward=reshards)
    with fake_processes(shards * replicas):
        stage = make_stage(config, 0, 1, blocks)
        units, root = units_of(stage)
        tracked = track(stage, parallel, precision)
    law = parameter_memory(units, shards, root, reshards, 4, 2 if precision == "bf16" else 4)
    assert tracked.parameters == law.total
    assert tracked.collectives == collectives(len(units), shards, replicas, True, reshards)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((4, 4), CollectiveCounts(9, 5, 0)),
        ((4, 4, 1, True, False), CollectiveCounts(5, 5, 0)),
        ((4, 2, 2), CollectiveCounts(9, 5, 5)),
        ((4, 1, 4), CollectiveCounts(0, 0, 5)),
        ((4, 4, 1, False, True, 3), CollectiveCounts(24, 4, 0)),
    ],
)
def test_collectives_of_four_blocks(arguments: tuple[int, ...], expected: CollectiveCounts) -> None:
    assert collectives(*arguments) == expected
