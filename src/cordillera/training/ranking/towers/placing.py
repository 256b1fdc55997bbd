"""Placement of the tables of towers: whole tables of tower ``h`` on the ranks of host ``h``.

Source: Disaggregated Multi-Tower (arXiv 2403.00877): one tower for each host. The distribution of a
tower's tables over the ranks of its host is a choice of this library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cordillera.data.ranking.features import FeatureSpec
from cordillera.distributed.towers import TowerLayout
from cordillera.errors import PlanError
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.towers import TowerModules, TowersConfig
from cordillera.planning.ranking.assignment import assign, improve
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.planning.ranking.placer import PlacementConfig, PlannedPlacement
from cordillera.planning.ranking.table_cost import TableCosts, TableProfile, TableRates, table_loads
from cordillera.training.ranking.config import RankingParallelConfig


def tower_problems(parallel: RankingParallelConfig, towers: TowersConfig | None) -> list[tuple[str, str]]:
    """Return what contradicts ``parallel.exchange = "towers"``, if that is set: recipe keys, each with the reason.

    Args:
        parallel: Division of the training.
        towers: Towers of the model; None if it has none.
    """
    if parallel.exchange != "towers":
        return []
    problems = []
    if towers is None:
        problems.append(("model.towers", "exchange = 'towers' needs this section, in dlrm, dcn or wukong"))
    else:
        count = (towers.count or 1) if towers.groups is None else len(towers.groups)
        if count != parallel.hosts:
            why = f"each host computes one tower: there are {count} towers, and hosts = {parallel.hosts}"
            problems.append(("parallel.hosts", why))
    for key, wanted, why in (
        ("codec", "raw", "towers exchange embeddings as they are"),
        ("dense", "replicated", "towers are computed with whole weights"),
        ("copies", 1, "the tables of a tower are on its host only"),
    ):
        if getattr(parallel, key) != wanted:
            problems.append((f"parallel.{key}", f"{why}: set {wanted!r}, or exchange = 'plain'"))
    if parallel.pool == "rows":
        why = "towers read sums of bags, which the ranks that hold the rows make: set 'auto', or exchange = 'plain'"
        problems.append(("parallel.pool", why))
    return problems


def towers_of_tables(places: Sequence[Sequence[int]], features: FeatureSpec) -> dict[str, int]:
    """Return the tower of every table; a table without features is in the first.

    Args:
        places: Positions of the features of each tower.
        features: Features and tables.

    Raises:
        PlanError: If features of different towers share a table.
    """
    found = dict[str, int]()
    for tower, members in enumerate(places):
        for feature in (features.sparse[i] for i in members):
            if found.setdefault(feature.table, tower) != tower:
                raise PlanError(
                    f"table {feature.table!r} is of features in towers {found[feature.table]} and {tower}; with "
                    "parallel.exchange = 'towers', a table is on the host of one tower",
                    where="model.towers",
                    remedy="put features of one table into one tower, as `cordillera towers` does",
                )
    return {table: found.get(table, 0) for table in features.tables}


def towers_of(model: RankingModel) -> dict[str, int]:
    """Return the tower of every table of a ``model`` with towers; for errors, see :func:`towers_of_tables`."""
    assert isinstance(model.towers, TowerModules)
    return towers_of_tables(model.towers.places, model.features)


def place_towers(
    tables: Mapping[str, TableProfile],
    towers: Mapping[str, int],
    size: int,
    hosts: int,
    config: PlacementConfig,
    *,
    batch: int,
) -> PlannedPlacement:
    """Place whole tables over the ranks of the hosts of their towers, so that ranks of a host have equal loads.

    Loads are those of :func:`cordillera.planning.ranking.placer.place`. Tables are assigned by descending load or
    size, then exchanged between ranks as long as that saves time.

    Args:
        tables: Tables and their traffic, by name.
        towers: Tower of each table.
        size: Number of ranks.
        hosts: Number of hosts, and of towers, with equally many consecutive ranks; it divides ``size``.
        config: Limits of the placement, of which ``memory_gb`` counts.
        batch: Samples of a step, over all ranks.

    Raises:
        PlanError: If the tables of a tower do not fit on its host as whole tables.
    """
    local, rates = size // hosts, TableRates()
    room = math.inf if config.memory_gb is None else config.memory_gb * 1e9
    ordered = {name: tables[name] for name in sorted(tables)}
    costs = TableCosts(ordered, rates)
    every = np.arange(len(ordered), dtype=np.int64)
    seconds = costs.seconds(every, costs.rows, costs.columns, np.zeros(len(every), bool), float(batch), size, 1)
    held = costs.bytes(every, costs.rows, costs.columns)
    ranks, reasons = dict[str, int](), dict[str, str]()
    for host in range(hosts):
        own = np.array([i for i, name in enumerate(ordered) if towers[name] == host], dtype=np.int64)
        places = assign(seconds[own], held[own], local, room)
        if places is None:
            raise PlanError(
                f"the tables of tower {host} take {held[own].sum() / 1e9:,.3g} GB and do not fit, as whole tables, on "
                f"{local} ranks of {room / 1e9:,.3g} GB",
                where="parallel.memory_gb",
                remedy="more memory_gb, more processes on each host, or exchange = 'plain', which cuts tables",
            )
        places = improve(seconds[own], held[own], places, local, room)
        for i, place in zip(own.tolist(), places.tolist(), strict=True):
            ranks[costs.names[i]] = host * local + place
    read = costs.lookup_bytes(every, costs.rows, costs.columns, 1.0)
    shares = read / (read.sum() or 1.0)
    for i, name in enumerate(costs.names):
        reasons[name] = (
            f"whole on rank {ranks[name]}: {held[i] / 1e6:,.3g} MB, {100 * shares[i]:.2g} % of the lookups; it is of "
            f"tower {towers[name]}, which host {towers[name]} computes"
        )
    parts = tuple(TablePart(name, 0, one.rows, 0, one.columns, (ranks[name],)) for name, one in tables.items())
    placement = Placement(size, {name: (one.rows, one.columns) for name, one in tables.items()}, parts)
    loads = table_loads(placement, ordered, batch, rates)
    return PlannedPlacement(placement, loads, {name: reasons[name] for name in tables})


def check_tower_placement(placement: Placement, towers: Mapping[str, int], hosts: int, where: str) -> None:
    """Check that a placement over ``hosts`` has every table whole, on a rank of the host of its tower in ``towers``.

    Raises:
        PlanError: If it has not; the message names the first such table, and ``where`` the placement is from.
    """
    local = placement.size // hosts
    for part in placement.parts:
        if placement.tables[part.table] != (part.rows, part.columns) or len(part.ranks) > 1:
            wrong = "is cut or copied"
        elif part.ranks[0] // local != towers[part.table]:
            wrong = (
                f"is on rank {part.ranks[0]} of host {part.ranks[0] // local}, its tower on host {towers[part.table]}"
            )
        else:
            continue
        raise PlanError(
            f"table {part.table!r} {wrong}; exchange = 'towers' needs it whole on one rank of its tower's host",
            where=where,
            remedy="set parallel.placement = 'auto', or parallel.exchange = 'plain'",
        )


def held_features(placement: Placement, features: FeatureSpec, rank: int) -> list[int]:
    """Return the positions of the features of the tables that ``placement`` has on a ``rank``, part by part."""
    tables = [part.table for part in placement.parts_on(rank)]
    return [i for table in tables for i, feature in enumerate(features.sparse) if feature.table == table]


def tower_layout(placement: Placement, features: FeatureSpec, hosts: int) -> TowerLayout:
    """Return the layout of the exchange by towers for a ``placement`` of whole tables of ``features`` over ``hosts``.

    Raises:
        PlanError: If ranks cannot be divided over the hosts, or a host has no feature.
    """
    return TowerLayout(hosts, tuple(tuple(held_features(placement, features, rank)) for rank in range(placement.size)))
