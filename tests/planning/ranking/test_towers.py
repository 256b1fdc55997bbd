"""Towers of features: planted groups are found again, loads stay within bounds, and the search meets an exact one."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from cordillera.errors import PlanError
from cordillera.planning.ranking.towers import (
    Similarities,
    TowerPlan,
    _Units,
    clustered,
    feature_map,
    interaction_distances,
    plan_towers,
)


def planted(seed: int, groups: int = 4, each: int = 6, samples: int = 200, dim: int = 8) -> tuple[np.ndarray, ...]:
    """Embeddings of features in random order whose groups share a direction in each sample, their groups and loads."""
    draw = np.random.default_rng(seed)
    group = draw.permutation(np.repeat(np.arange(groups), each))
    shared = draw.standard_normal((samples, groups, dim))
    strength = draw.choice([-1, 1], (samples, len(group), 1)) * draw.uniform(0.5, 1, (len(group), 1))
    embeddings = shared[:, group] * strength + 0.8 * draw.standard_normal((samples, len(group), dim))
    return embeddings, group, draw.uniform(0.9, 1.1, (len(group), 2))


def plan_of(embeddings: np.ndarray, loads: np.ndarray, towers: int, **options) -> TowerPlan:
    similarities = Similarities(embeddings.shape[1])
    for part in np.array_split(embeddings, 3):
        similarities.add(part)
    names = [f"f{i}" for i in range(embeddings.shape[1])]
    given = {"bytes": loads[:, 0].tolist(), "lookups": loads[:, 1].tolist()}
    return plan_towers(names, names, similarities.mean(), given, towers, **options)


def within_bounds(plan: TowerPlan) -> bool:
    return all(max(plan.tower_loads(name)) <= bound * (1 + 1e-9) for name, bound in plan.bounds.items())


def test_planted_groups_are_recovered_and_loads_bounded():
    found = 0
    for seed in range(5):
        embeddings, group, loads = planted(seed)
        plan = plan_of(embeddings, loads, 4, seed=seed)
        assert within_bounds(plan)
        found += len(set(zip(plan.towers, group.tolist(), strict=True))) == 4
    assert found == 5


def test_units_with_most_to_lose_are_placed_first():
    units = _Units(np.zeros((3, 1)), np.ones(3), np.ones((3, 1)), 3)
    costs = np.array([[0.0, 1.0, 9.0], [0.0, 5.0, 9.0], [0.0, 100.0, 101.0]])
    assert units._nearest(costs, np.ones(1)).tolist() == [2, 1, 0]
    alone = _Units(np.zeros((2, 1)), np.ones(2), np.ones((2, 1)), 1)
    assert alone._nearest(np.ones((2, 1)), np.full(1, 2.0)).tolist() == [0, 0]
    assert alone._nearest(np.ones((2, 1)), np.ones(1)) is None


def test_diverse_towers_spread_every_group():
    embeddings, _, loads = planted(3)
    plan = plan_of(embeddings, loads, 4, aim="diverse")
    inside, across = plan.mean_similarity()
    assert inside < across
    inside, across = plan_of(embeddings, loads, 4).mean_similarity()
    assert inside > across


def test_equal_arguments_give_equal_plans_to_the_bit():
    embeddings, _, loads = planted(5)
    assert plan_of(embeddings, loads, 3, seed=2).to_text() == plan_of(embeddings, loads, 3, seed=2).to_text()


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_what_trying_everything_finds(seed):
    draw = np.random.default_rng(seed)
    count, towers = int(draw.integers(5, 9)), int(draw.integers(2, 4))
    points, loads = draw.standard_normal((count, 2)), draw.lognormal(0, 0.5, (count, 2))
    places, bounds = clustered(points, loads, towers, [str(i) for i in range(count)], 1.3, seed)

    def spread(at: np.ndarray) -> float:
        return sum(float(np.square(points[at == t] - points[at == t].mean(0)).sum()) for t in range(towers))

    best = np.inf
    for one in itertools.product(range(towers), repeat=count):
        at = np.array(one)
        if len(set(one)) == towers:
            sums = np.stack([loads[at == t].sum(0) for t in range(towers)])
            if (sums <= bounds * (1 + 1e-9)).all():
                best = min(best, spread(at))
    assert set(places.tolist()) == set(range(towers))
    assert best * (1 - 1e-9) <= spread(places) <= best * 1.05


@pytest.mark.parametrize("seed", range(8))
def test_uneven_loads_stay_within_bounds_and_tables_whole(seed):
    draw = np.random.default_rng(seed)
    count, towers = 30, int(draw.integers(2, 7))
    tables = [f"t{draw.integers(0, 20)}" for _ in range(count)]
    loads = draw.lognormal(0, 2, (count, 3))
    places, bounds = clustered(draw.standard_normal((count, 2)), loads, towers, tables, 1.1, seed)
    sums = np.stack([loads[places == t].sum(0) for t in range(towers)])
    assert (sums <= bounds * (1 + 1e-9)).all()
    assert set(places.tolist()) == set(range(towers))
    assert all(len({p for p, t in zip(places, tables, strict=True) if t == name}) == 1 for name in tables)


def test_a_map_of_points_of_a_plane_keeps_their_distances():
    points = np.random.default_rng(0).standard_normal((12, 2))
    distances = np.sqrt(np.square(points[:, None] - points[None]).sum(-1))
    found, stress = feature_map((distances + distances.T) / 2)
    assert stress < 1e-5
    np.testing.assert_allclose(np.sqrt(np.square(found[:, None] - found[None]).sum(-1)), distances, atol=1e-4)
    on_a_line, worse = feature_map((distances + distances.T) / 2, 1)
    assert on_a_line.shape == (12, 1)
    assert worse > stress


@pytest.mark.parametrize("count", [1, 2, 3])
def test_maps_of_few_features_have_all_dimensions(count):
    distances = np.ones((count, count)) - np.eye(count)
    found, stress = feature_map(distances, 3)
    assert found.shape == (count, 3)
    assert stress < 1e-6
    assert np.isfinite(found).all()


def test_cosines_are_those_of_their_definition():
    draw = np.random.default_rng(1)
    x = draw.standard_normal((50, 4, 3)).astype(np.float32)
    x[::2, 1] = 0  # an empty list has no direction
    x[1::2, 3] = 0
    similarities = Similarities(4)
    similarities.add(x[:20])
    similarities.add(x[20:])
    found = similarities.mean()
    for i, j in itertools.product(range(4), repeat=2):
        pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(x[:, i], x[:, j], strict=True)]
        cosines = [abs(a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs if a.any() and b.any()]
        expected = 1.0 if i == j else np.mean(cosines) if cosines else 0.0
        assert found[i, j] == pytest.approx(expected, abs=1e-12)
    assert found[1, 3] == 0  # no sample has both
    assert np.array_equal(
        interaction_distances(found, "coherent") + interaction_distances(found, "diverse"), 1 - np.eye(4)
    )


def test_what_has_no_towers_is_refused():
    embeddings, _, loads = planted(0)
    for towers in (0, 25):
        with pytest.raises(PlanError, match="towers for 24 tables"):
            plan_of(embeddings, loads, towers)
    with pytest.raises(PlanError, match="cannot be kept"):
        plan_of(embeddings, loads, 2, balance=0.9)
    with pytest.raises(PlanError, match="not finite"):
        plan_of(np.where(embeddings > 0, embeddings, np.nan), loads, 2)
    with pytest.raises(PlanError, match="width 1"):
        plan_of(embeddings[..., :1], loads, 2)
    with pytest.raises(PlanError, match="loads"):
        plan_of(embeddings, -loads, 2)
    with pytest.raises(PlanError, match="dimensions"):
        feature_map(np.zeros((2, 2)), 0)


def test_a_file_gives_the_plan_back_or_an_error(tmp_path):
    embeddings, _, loads = planted(1)
    plan = plan_of(embeddings, loads, 4, source={"run": "probe"})
    path = tmp_path / "towers.json"
    path.write_text(plan.to_text())
    again = TowerPlan.read(path)
    assert again.to_text() == plan.to_text()
    assert again.groups() == plan.groups()
    assert {name for group in plan.groups() for name in group} == set(plan.features)
    path.write_text(path.read_text().replace('"f0": ', '"f0": 1', 1))
    with pytest.raises(PlanError):
        TowerPlan.read(path)
    path.write_text(json.dumps({"schema": "else"}))
    with pytest.raises(PlanError):
        TowerPlan.read(path)


def test_features_that_meet_in_one_sample_are_as_alike_as_there() -> None:
    similarities = Similarities(3)
    similarities.add(np.array([[[3.0, 4.0], [4.0, 3.0], [0.0, 0.0]]]))
    assert similarities.mean()[0, 1] == pytest.approx(0.96)
    assert similarities.mean()[0, 2] == 0.0
