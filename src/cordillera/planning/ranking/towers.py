"""Towers: groups of features that are looked up, and may be compressed, on one host each.

The partitioner reads how alike the embeddings of a trained model are, places every feature in a plane so that distances
there match, and divides the plane among towers of bounded load. Everything is a pure function of numbers and a seed.

Source: Disaggregated Multi-Tower (arXiv 2403.00877), Tower Partitioner, as third-party notes describe it. Bounds on
bytes and lookups beside the number of features, and features of one table in one tower, are completions of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cordillera.errors import PlanError
from cordillera.files import read_sealed, sealed_json
from cordillera.partition import Bins, Weights
from cordillera.planning.ranking.assignment import assign_well, loads_by_rank

TowerAim = Literal["coherent", "diverse"]
"""Whether features that interact share a tower (``coherent``) or are spread over towers (``diverse``)."""

COUNT = "features"
"""Name of the load that counts features."""

_SCHEMA = "cordillera towers 1"
_STARTS = 20  # random starts of the clustering; the best result is kept
_MAP_STARTS = 4  # random starts of the map, beside that of classical scaling
_ITERATIONS, _TOLERANCE = 300, 1e-6
_LEAST_GAIN = 1e-12  # smaller gains, relative to all distances, are rounding
_SLACK = 1 + 1e-9  # rounding of sums of loads


class Similarities:
    """Mean absolute cosine between the embeddings of every pair of features, over samples given batch by batch.

    An embedding of zeros, as of an empty list, has no direction: its sample does not count for its pairs. Features that
    no sample has together have similarity 0.

    Attributes:
        samples: Number of samples so far.
    """

    def __init__(self, features: int) -> None:
        self.samples = 0
        self._sums, self._counts = np.zeros((features, features)), np.zeros((features, features))

    def add(self, embeddings: NDArray[Any]) -> None:
        """Add a batch of embeddings ``[B, F, d]``, with ``d`` of at least 2.

        Raises:
            PlanError: If ``d`` is 1, for which all cosines are 1, or an embedding is not finite.
        """
        if embeddings.shape[-1] < 2:
            raise PlanError("embeddings of width 1 have no directions to compare", where="towers")
        x = embeddings.astype(np.float64)
        if not np.isfinite(x).all():
            raise PlanError("embeddings are not finite", where="towers", remedy="train the model without divergence")
        norms = np.sqrt(np.square(x).sum(-1, keepdims=True))
        directions = np.divide(x, norms, out=np.zeros_like(x), where=norms > 0)
        self._sums += np.abs(directions @ directions.transpose(0, 2, 1)).sum(0)
        there = (norms[..., 0] > 0).astype(np.float64)
        self._counts += there.T @ there
        self.samples += len(x)

    def mean(self) -> Weights:
        """Return the similarities, ``float64 [F, F]``: symmetric, between 0 and 1, with ones on the diagonal."""
        found = np.divide(self._sums, self._counts, out=np.zeros_like(self._sums), where=self._counts > 0)
        found = np.clip((found + found.T) / 2, 0.0, 1.0)
        np.fill_diagonal(found, 1.0)
        return found


def interaction_distances(similarities: Weights, aim: TowerAim = "coherent") -> Weights:
    """Return the distances ``[F, F]`` of features whose ``similarities`` are ``[F, F]``.

    With the ``aim`` ``coherent`` they are one minus the similarity, so that features that interact are near each other;
    with ``diverse`` they are the similarity, so that such features are far from each other.
    """
    found = 1.0 - similarities if aim == "coherent" else similarities.copy()
    np.fill_diagonal(found, 0.0)
    return found


def feature_map(distances: Weights, dimensions: int = 2, seed: int = 0) -> tuple[Weights, float]:
    """Place features so that Euclidean distances match given ones, by majorising the stress (SMACOF, de Leeuw 1977).

    Classical scaling and some random starts are tried; the map with the lowest stress is rotated to its principal axes.

    Args:
        distances: ``float64 [F, F]``, symmetric, at least 0, zero on the diagonal.
        dimensions: Number of coordinates of a feature.
        seed: Seed of the random starts.

    Returns:
        Coordinates, ``float64 [F, dimensions]``, and the stress: the root of the sum of squared errors of distances,
        relative to the root of the sum of squared distances; 0 if all distances are 0.

    Raises:
        PlanError: If distances are not finite, negative or not symmetric, or there are no dimensions.
    """
    if dimensions < 1:
        raise PlanError(f"a map of {dimensions} dimensions holds nothing", where="dimensions", remedy="at least 1")
    if not np.isfinite(distances).all() or (distances < 0).any() or not np.array_equal(distances, distances.T):
        raise PlanError("must be finite, at least 0 and symmetric", where="distances")
    scale = math.sqrt(np.square(distances).sum())
    count = len(distances)
    if not scale:
        return np.zeros((count, dimensions)), 0.0
    random = np.random.default_rng([seed, count])
    starts = [_classical(distances, dimensions)]
    starts += [random.standard_normal((count, dimensions)) * distances.mean() for _ in range(_MAP_STARTS)]
    best, lowest = starts[0], math.inf
    for start in starts:
        found, stress = _majorised(distances, start)
        if stress < lowest * (1 - _TOLERANCE):
            best, lowest = found, stress
    best = best - best.mean(0)
    axes = np.linalg.svd(best, full_matrices=False)[2]
    best = best @ axes.T
    if best.shape[1] < dimensions:  # fewer features than dimensions
        best = np.pad(best, ((0, 0), (0, dimensions - best.shape[1])))
    signs = np.sign(best[np.abs(best).argmax(0), np.arange(dimensions)])
    return best * np.where(signs == 0, 1.0, signs), lowest / scale


def _classical(distances: Weights, dimensions: int) -> Weights:
    """Return the coordinates of classical scaling: leading eigenvectors of the doubly centred squared distances."""
    squares = np.square(distances)
    centred = -0.5 * (squares - squares.mean(0) - squares.mean(1)[:, None] + squares.mean())
    values, vectors = np.linalg.eigh(centred)
    leading = np.argsort(-values, kind="stable")[:dimensions]
    found = vectors[:, leading] * np.sqrt(np.maximum(values[leading], 0.0))
    return np.pad(found, ((0, 0), (0, dimensions - found.shape[1])))


def _between(points: Weights) -> Weights:
    return np.sqrt(np.square(points[:, None] - points[None]).sum(-1))


def _majorised(distances: Weights, points: Weights) -> tuple[Weights, float]:
    """Return points after Guttman transforms, which never raise the stress, and the root of the stress."""
    now = _between(points)
    stress = math.sqrt(np.square(now - distances).sum())
    for _ in range(_ITERATIONS):
        ratios = np.divide(distances, now, out=np.zeros_like(now), where=now > 0)
        moved = (ratios.sum(1)[:, None] * points - ratios @ points) / len(points)
        now = _between(moved)
        after = math.sqrt(np.square(now - distances).sum())
        if not after < stress * (1 - _TOLERANCE):
            break
        points, stress = moved, after
    return points, stress


def clustered(
    points: Weights, loads: Weights, towers: int, tables: Sequence[str], balance: float = 1.2, seed: int = 0
) -> tuple[Bins, Weights]:
    """Divide features among towers near their centres, within bounds of loads (constrained K-means).

    The bound of a load is ``balance`` times its mean over towers, or what a search for balance alone attains if that is
    more. Features go to the nearest centre that has room, then move or change places as long as that brings them nearer
    to the centres; centres are means of their features. Several starts are made, of which the tightest towers are kept.

    Args:
        points: Coordinates of features, ``float64 [F, n]``.
        loads: Loads of features, ``float64 [F, K]``.
        towers: Number ``T`` of towers; none stays empty.
        tables: Table of each feature; features of one table go to one tower.
        balance: Largest load of a tower relative to the mean, at least 1.
        seed: Seed of the first centres.

    Returns:
        Tower of each feature, ``int64 [F]``, numbered by their first features; and the bounds, ``float64 [K]``.

    Raises:
        PlanError: If there are fewer tables than towers, no tower, or ``balance`` is below 1.
    """
    names = list(dict.fromkeys(tables))
    if not 1 <= towers <= len(names):
        raise PlanError(
            f"{towers} towers for {len(names)} tables", where="towers", remedy=f"1 to {len(names)}: none is empty"
        )
    if not 1 <= balance < math.inf:
        raise PlanError(f"{balance} cannot be kept", where="balance", remedy="at least 1: 1.2 allows 20 % more")
    unit_of = np.array([names.index(table) for table in tables])
    sizes = np.bincount(unit_of).astype(np.float64)
    middle = np.zeros((len(names), points.shape[1]))
    np.add.at(middle, unit_of, points)
    units = _Units(middle / sizes[:, None], sizes, loads_by_rank(loads, unit_of, len(names)), towers)
    totals = units.loads.sum(0)
    balanced = assign_well(
        np.divide(units.loads, totals, out=np.zeros_like(units.loads), where=totals > 0),
        np.zeros(len(names)), towers, math.inf,
    )  # fmt: skip
    assert balanced is not None  # room is unlimited
    units.fill_empty(balanced)
    bounds = np.maximum(balance * totals / towers, loads_by_rank(units.loads, balanced, towers).max(0))
    best, lowest = balanced, math.inf
    for start in range(_STARTS):
        places = units.search(balanced, bounds, np.random.default_rng([seed, start]))
        spread = units.spread(places)
        if spread < lowest * (1 - 1e-9):
            best, lowest = places, spread
    found = best[unit_of]
    _, first = np.unique(found, return_index=True)
    number = np.empty(towers, dtype=np.int64)
    number[found[np.sort(first)]] = np.arange(towers)
    return number[found], bounds


@dataclass
class _Units:
    """Units of the clustering: tables, each with its features.

    Attributes:
        points: Means of the features' coordinates, ``[U, n]``.
        sizes: Numbers of features, ``[U]``.
        loads: Loads, ``[U, K]``.
        towers: Number of towers.
    """

    points: Weights
    sizes: Weights
    loads: Weights
    towers: int

    def fill_empty(self, places: Bins) -> None:
        """Move a unit of the fullest tower to each empty one."""
        for tower in range(self.towers):
            counts = np.bincount(places, minlength=self.towers)
            if not counts[tower]:
                places[np.flatnonzero(places == counts.argmax())[0]] = tower

    def costs(self, centres: Weights) -> Weights:
        """Return the squared distances of every unit's features to every centre, less a constant: ``[U, T]``."""
        return self.sizes[:, None] * np.square(self.points[:, None] - centres[None]).sum(-1)

    def centres(self, places: Bins) -> Weights:
        """Return the mean coordinates of every tower's features."""
        sums = loads_by_rank(self.points * self.sizes[:, None], places, self.towers)
        return sums / np.bincount(places, self.sizes, self.towers)[:, None]

    def spread(self, places: Bins) -> float:
        """Return the sum of squared distances to the own centres."""
        return float(self.costs(self.centres(places))[np.arange(len(places)), places].sum())

    def search(self, balanced: Bins, bounds: Weights, random: np.random.Generator) -> Bins:
        """Return the towers that follow from random first centres; ``balanced`` serves if no others are found."""
        costs = self.costs(self._first_centres(random))
        places = self._nearest(costs, bounds)
        moved = self._exchanged(costs, balanced if places is None else places, bounds)
        while places is None or not np.array_equal(moved, places):
            places = moved
            moved = self._exchanged(self.costs(self.centres(places)), places, bounds)
        return places

    def _first_centres(self, random: np.random.Generator) -> Weights:
        """Draw units as first centres, far from each other more often (k-means++)."""
        chosen = [int(random.integers(len(self.points)))]
        while len(chosen) < self.towers:
            near = self.costs(self.points[chosen]).min(1)
            near[chosen] = 0.0
            if near.sum() > 0:
                chosen.append(int(random.choice(len(near), p=near / near.sum())))
            else:  # all remaining points coincide with a centre
                chosen.append(int(np.setdiff1d(np.arange(len(near)), chosen)[0]))
        return self.points[chosen]

    def _nearest(self, costs: Weights, bounds: Weights) -> Bins | None:
        """Put units on the nearest centres with room, those with most to lose first; None if one finds no room."""
        ordered = np.sort(costs, 1)
        regret = ordered[:, 1] - ordered[:, 0] if self.towers > 1 else ordered[:, 0]
        places, loads = np.zeros(len(costs), dtype=np.int64), np.zeros((self.towers, len(bounds)))
        for unit in np.argsort(-regret, kind="stable").tolist():
            room = (loads + self.loads[unit] <= bounds * _SLACK).all(1)
            if not room.any():
                return None
            places[unit] = int(np.where(room, costs[unit], np.inf).argmin())
            loads[places[unit]] += self.loads[unit]
        self.fill_empty(places)
        return places

    def _exchanged(self, costs: Weights, places: Bins, bounds: Weights) -> Bins:
        """Move or swap units as long as the sum of costs decreases and loads stay within bounds."""
        places, rows = places.copy(), np.arange(len(places))
        least = _LEAST_GAIN * float(costs.sum())
        while True:
            loads, counts = loads_by_rank(self.loads, places, self.towers), np.bincount(places, minlength=self.towers)
            own = costs[rows, places]
            moves = costs - own[:, None]  # [U, T]
            fits = (loads[None] + self.loads[:, None] <= bounds * _SLACK).all(-1)
            moves = np.where(fits & (counts[places] > 1)[:, None], moves, 0.0)
            across = costs[:, places]  # [U, U]: cost of a unit at the tower of another
            swaps = across + across.T - own[:, None] - own[None]
            after = (
                loads[places][:, None] - self.loads[:, None] + self.loads[None]
            )  # [U, U, K] of the first one's tower
            fits = (after <= bounds * _SLACK).all(-1)
            swaps = np.where(fits & fits.T, swaps, 0.0)
            if min(moves.min(), swaps.min()) >= -least:
                return places
            if moves.min() <= swaps.min():
                unit, tower = divmod(int(moves.argmin()), self.towers)
                places[unit] = tower
            else:
                first, second = divmod(int(swaps.argmin()), len(places))
                places[[first, second]] = places[[second, first]]


@dataclass(frozen=True, eq=False)
class TowerPlan:
    """Features divided among towers, with the reasons.

    Attributes:
        features: Names of the features, in the data's order.
        towers: Tower of each feature.
        aim: ``coherent`` or ``diverse``.
        similarities: Mean absolute cosines of the probe model's embeddings, ``float64 [F, F]``.
        coordinates: Places of the features on the map, ``float64 [F, n]``.
        stress: Relative error of the distances on the map.
        loads: Loads of each feature, by name of the load; a table's bytes count for its first feature.
        bounds: Largest load that a tower may have, by name of the load.
        source: Origin of the similarities: the run, its checkpoint, the fingerprint of the data, samples and seed.
    """

    features: tuple[str, ...]
    towers: tuple[int, ...]
    aim: TowerAim
    similarities: Weights
    coordinates: Weights
    stress: float
    loads: Mapping[str, tuple[float, ...]]
    bounds: Mapping[str, float]
    source: Mapping[str, Any] = field(default_factory=dict)

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of every tower's features."""
        return tuple(
            tuple(name for name, at in zip(self.features, self.towers, strict=True) if at == tower)
            for tower in range(max(self.towers) + 1)
        )

    def tower_loads(self, name: str) -> list[float]:
        """Return the load of every tower, for the ``name`` of a load."""
        return np.bincount(self.towers, self.loads[name]).tolist()

    def mean_similarity(self) -> tuple[float, float]:
        """Return the mean similarity of two features of one tower, and of two towers; NaN without such pairs."""
        at = np.array(self.towers)
        same, pairs = at[:, None] == at[None], ~np.eye(len(at), dtype=bool)
        inside, across = (self.similarities[pairs & one] for one in (same, ~same))
        return (float(inside.mean()) if inside.size else math.nan, float(across.mean()) if across.size else math.nan)

    def to_text(self) -> str:
        """Return the plan as text with a digest of its content, for a file."""
        return sealed_json(
            {
                "schema": _SCHEMA,
                "aim": self.aim,
                "towers": dict(zip(self.features, self.towers, strict=True)),
                "loads": {name: list(values) for name, values in self.loads.items()},
                "tower_loads": {name: self.tower_loads(name) for name in self.loads},
                "bounds": dict(self.bounds),
                "stress": self.stress,
                "coordinates": self.coordinates.tolist(),
                "similarities": self.similarities.tolist(),
                "distances": interaction_distances(self.similarities, self.aim).tolist(),
                "source": dict(self.source),
            }
        )

    @classmethod
    def read(cls, path: Path | str) -> TowerPlan:
        """Read a plan from a file that holds :meth:`to_text`.

        Raises:
            PlanError: If the file is absent, corrupt, or of another kind or version.
        """
        content = read_sealed(Path(path), error=PlanError)
        if content.get("schema") != _SCHEMA:
            raise PlanError(f"holds no towers that this library reads ({_SCHEMA})", where=str(path))
        try:
            towers = tuple(int(tower) for tower in content["towers"].values())
            if set(towers) != set(range(max(towers) + 1)):
                raise ValueError("a tower is empty")
            return cls(
                tuple(content["towers"]),
                towers,
                content["aim"],
                np.array(content["similarities"], dtype=np.float64),
                np.array(content["coordinates"], dtype=np.float64),
                float(content["stress"]),
                {name: tuple(map(float, values)) for name, values in content["loads"].items()},
                {name: float(value) for name, value in content["bounds"].items()},
                content["source"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"is malformed: {error}", where=str(path)) from error


def plan_towers(
    features: Sequence[str],
    tables: Sequence[str],
    similarities: Weights,
    loads: Mapping[str, Sequence[float]],
    towers: int,
    *,
    aim: TowerAim = "coherent",
    balance: float = 1.2,
    dimensions: int = 2,
    seed: int = 0,
    source: Mapping[str, Any] | None = None,
) -> TowerPlan:
    """Divide features among towers; equal arguments give equal plans.

    Args:
        features: Names of the features.
        tables: Table of each feature; features of one table go to one tower.
        similarities: Mean absolute cosines (:class:`Similarities`), ``float64 [F, F]``.
        loads: Loads of each feature by name, such as bytes and lookups; the number of features is one more.
        towers: Number of towers.
        aim: Which features are to share a tower.
        balance: Largest load of a tower relative to the mean.
        dimensions: Number of coordinates of the map.
        seed: Seed of the map's and the clustering's starts.
        source: Origin of the similarities, for the file.

    Raises:
        PlanError: If there are fewer tables than towers, or a number is out of its range.
    """
    all_loads = {COUNT: tuple(1.0 for _ in features)} | {name: tuple(values) for name, values in loads.items()}
    columns = np.array(list(all_loads.values())).T
    if not np.isfinite(columns).all() or (columns < 0).any():
        raise PlanError("must be finite and at least 0", where="loads")
    coordinates, stress = feature_map(interaction_distances(similarities, aim), dimensions, seed)
    places, bounds = clustered(coordinates, columns, towers, tables, balance, seed)
    return TowerPlan(
        tuple(features), tuple(places.tolist()), aim, similarities, coordinates, stress, all_loads,
        dict(zip(all_loads, bounds.tolist(), strict=True)), {**(source or {}), "seed": seed, "balance": balance},
    )  # fmt: skip
