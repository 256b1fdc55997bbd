"""Searchers: they propose genomes, and learn from the results of those before.

A searcher is a function of its seed and of the results in the order in which it receives them, so a search that is
played again from its record takes the same path.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cordillera.errors import DependencyError, PlanError
from cordillera.training.ranking.architecture_search.regression import GaussianProcess, expected_improvement
from cordillera.training.ranking.architecture_search.space import Genome, SearchSpace

Goal = Literal["ne", "front"]
"""Goal of a search: the lowest NE, or the front of NE and FLOPs."""

_TRIES = 50
_POOL = 2_000


@dataclass(frozen=True)
class SearchScore:
    """NE of an architecture (infinite if it died or is not a number) and forward FLOPs an example (0 if unknown)."""

    ne: float
    flops: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.ne):
            object.__setattr__(self, "ne", math.inf)


class Searcher:
    """Base class of searchers: proposes every architecture once.

    Args:
        space: Space to search.
        seed: Seed of the searcher.
        goal: What is searched.
    """

    def __init__(self, space: SearchSpace, seed: int = 0, goal: Goal = "ne") -> None:
        self.space, self.goal = space, goal
        self.random = np.random.default_rng([seed, 7])
        self.seen: set[str] = set()
        self.results: list[tuple[Genome, SearchScore]] = []

    def ask(self) -> Genome | None:
        """Propose a genome of an architecture that was not proposed before; None if there is none left."""
        genome = self.propose()
        if genome is None or self.is_seen(genome):
            genome = self.space.unseen(self.seen, self.random)
        if genome is not None:
            self.seen.add(self.space.identify(genome))
        return genome

    def tell(self, genome: Genome, score: SearchScore) -> None:
        """Learn the result of a proposal."""
        self.results.append((genome, score))

    def propose(self) -> Genome | None:
        """Return a genome, or None for a random one; the base class knows random ones only."""
        return None

    def is_seen(self, genome: Genome) -> bool:
        """Whether the architecture of a genome was proposed."""
        return self.space.identify(genome) in self.seen

    def limit(self) -> float:
        """Draw a limit of FLOPs for one proposal: none if NE alone is searched, else between the extremes seen."""
        known = [score.flops for _, score in self.results if score.flops and math.isfinite(score.ne)]
        if self.goal == "ne" or not known:
            return math.inf
        low, high = math.log(min(known)), math.log(max(known))
        return math.exp(low + (high - low) * float(self.random.random())) * (1 + 1e-9)


class RandomSearcher(Searcher):
    """Draws genomes uniformly, without repetition."""


class GridSearcher(Searcher):
    """Goes through the whole space in order, for tables of all architectures."""

    def __init__(self, space: SearchSpace, seed: int = 0, goal: Goal = "ne") -> None:
        super().__init__(space, seed, goal)
        self._genomes = space.enumerate()

    def ask(self) -> Genome | None:
        for genome in self._genomes:
            if not self.is_seen(genome):
                self.seen.add(self.space.identify(genome))
                return genome
        return None


class EvolutionSearcher(Searcher):
    """Regularised evolution: the oldest die, children are mutations of the best of a few.

    Source: Real et al. 2019 (arXiv 1802.01548), section 3.1; its use for recommendation: Zhang et al. 2023 (NASRec).
    With the goal ``front``, those of the front do not die. The defaults met the best percent soonest on random
    landscapes of pairwise effects, for searches of some tens to hundreds of trials.

    Args:
        population: Number of newest results that may become parents; the first proposals, a half of it, are random.
        tournament: Number of candidates for a parent, of which the best becomes it.
    """

    def __init__(
        self, space: SearchSpace, seed: int = 0, goal: Goal = "ne", *, population: int = 8, tournament: int = 8
    ) -> None:
        super().__init__(space, seed, goal)
        self.population, self.tournament = population, tournament

    def propose(self) -> Genome | None:
        alive = [one for one in self.results[-self.population :] if math.isfinite(one[1].ne)]
        if self.goal == "front":
            alive += [self.results[index] for index in front([score for _, score in self.results])]
        if len(self.results) < self.population // 2 or not alive:
            return None
        limit = self.limit()
        within = [one for one in alive if one[1].flops <= limit] or alive
        drawn = self.random.choice(len(within), min(self.tournament, len(within)), replace=False)
        parent = min((within[index] for index in drawn), key=lambda one: one[1].ne)[0]
        for attempt in range(_TRIES):
            child = self.space.mutate(parent, self.random, 1 + attempt // 15)
            if not self.is_seen(child):
                return child
        return None


class PredictorSearcher(Searcher):
    """Proposes the genome with the largest expected improvement, by a Gaussian process, on the best result so far.

    With the goal ``front``, each proposal improves on the best result within a FLOPs limit that is drawn for it; a
    second process predicts FLOPs. Source of the criterion: Jones et al. 1998.

    Args:
        first: Number of random proposals before.
    """

    def __init__(self, space: SearchSpace, seed: int = 0, goal: Goal = "ne", *, first: int = 8) -> None:
        super().__init__(space, seed, goal)
        self.first = first
        self._waiting: list[Genome] = []

    def tell(self, genome: Genome, score: SearchScore) -> None:
        super().tell(genome, score)
        if genome in self._waiting:
            self._waiting.remove(genome)

    def propose(self) -> Genome | None:
        known = [(genome, score) for genome, score in self.results if math.isfinite(score.ne)]
        if len(self.results) < self.first or len(known) < 3:
            return None
        pool = self._pool()
        if not pool:
            return None
        features = [self.space.features(genome) for genome, _ in known]
        values = np.array([score.ne for _, score in known])
        candidates = np.stack([self.space.features(genome) for genome in pool])
        x, y = np.stack(features), values
        if self._waiting:  # these are taken to be as expected, so that a batch is not of one kind
            waiting = np.stack([self.space.features(genome) for genome in self._waiting])
            x, y = np.concatenate([x, waiting]), np.concatenate([y, GaussianProcess(x, y).predict(waiting)[0]])
        mean, deviation = GaussianProcess(x, y).predict(candidates)
        limit = self.limit()
        within = [score.ne for _, score in known if score.flops <= limit]
        gain = expected_improvement(mean, deviation, min(within, default=math.inf))
        if math.isfinite(limit):
            logs = np.log([max(1, score.flops) for _, score in known])
            predicted, _ = GaussianProcess(np.stack(features), logs).predict(candidates)
            gain = np.where(predicted <= math.log(limit), gain, -np.inf)
        chosen = pool[int(np.argmax(gain))]
        self._waiting.append(chosen)
        return chosen

    def _pool(self) -> list[Genome]:
        """Return genomes of architectures that are not seen: all of a small space, else random ones and neighbours."""
        if self.space.size <= _POOL:
            drawn = list(self.space.enumerate())
        else:
            best = sorted((one for one in self.results if math.isfinite(one[1].ne)), key=lambda one: one[1].ne)[:10]
            drawn = [self.space.sample(self.random) for _ in range(_POOL // 2)]
            drawn += [self.space.mutate(best[i % len(best)][0], self.random, 1 + i % 2) for i in range(_POOL // 2)]
        unique = {self.space.identify(genome): genome for genome in drawn}
        return [genome for name, genome in unique.items() if name not in self.seen]


class LearntSearcher(Searcher):
    """Proposes by the probabilities that a supernet has learnt: the most likely architecture first, then drawn ones.

    Args:
        chances: Probabilities of the values of genes, by the gene's name; other genes are drawn uniformly.

    Raises:
        PlanError: If they are of another space.
    """

    def __init__(
        self, space: SearchSpace, seed: int = 0, goal: Goal = "ne", *, chances: Mapping[str, Sequence[float]]
    ) -> None:
        super().__init__(space, seed, goal)
        self.chances = {gene.name: np.full(len(gene.values), 1 / len(gene.values)) for gene in space.genes}
        for name, values in chances.items():
            if len(self.chances.get(name, ())) != len(values):
                raise PlanError(f"the supernet decides about {name}, this space does not", where="supernet")
            self.chances[name] = np.asarray(values, dtype=np.float64) / sum(values)

    def propose(self) -> Genome | None:
        likely = tuple(int(self.chances[gene.name].argmax()) for gene in self.space.genes)
        if not self.is_seen(likely):
            return likely
        for _ in range(_TRIES):
            drawn = tuple(int(self.random.choice(len(one), p=one)) for one in self.chances.values())
            if not self.is_seen(drawn):
                return drawn
        return None


class OptunaSearcher(Searcher):
    """A sampler of optuna: its tree-structured Parzen estimator, or NSGA-II.

    Args:
        sampler: ``tpe`` or ``nsga2``.

    Raises:
        DependencyError: If optuna is not installed.
    """

    def __init__(self, space: SearchSpace, seed: int = 0, goal: Goal = "ne", *, sampler: str = "tpe") -> None:
        super().__init__(space, seed, goal)
        try:
            import optuna
        except ImportError as error:
            raise DependencyError(
                "is not installed",
                where="optuna",
                remedy="pip install -e '.[search]' in the repository, or choose 'evolution'",
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        samplers = optuna.samplers
        made = samplers.TPESampler(seed=seed) if sampler == "tpe" else samplers.NSGAIISampler(seed=seed)
        self.study = optuna.create_study(directions=["minimize"] * (1 + (goal == "front")), sampler=made)
        self._values: dict[str, SearchScore] = {}
        self._trials: dict[str, Any] = {}

    def propose(self) -> Genome | None:
        for _ in range(_TRIES):
            trial = self.study.ask()
            genome = tuple(
                int(
                    trial.suggest_int(gene.name, 0, len(gene.values) - 1)
                    if gene.is_ordered
                    else trial.suggest_categorical(gene.name, range(len(gene.values)))
                )
                for gene in self.space.genes
            )
            name = self.space.identify(genome)
            if name not in self.seen:
                self._trials[name] = trial
                return genome
            if name in self._values:  # repeat the known value, and ask again
                self._tell(trial, self._values[name])
        return None

    def tell(self, genome: Genome, score: SearchScore) -> None:
        super().tell(genome, score)
        name = self.space.identify(genome)
        self._values[name] = score
        trial = self._trials.pop(name, None)
        if trial is not None:
            self._tell(trial, score)

    def _tell(self, trial: Any, score: SearchScore) -> None:
        import optuna

        if math.isfinite(score.ne):
            self.study.tell(trial, [score.ne, score.flops] if self.goal == "front" else score.ne)
        else:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)


SEARCHERS: dict[str, Callable[..., Searcher]] = {
    "random": RandomSearcher,
    "grid": GridSearcher,
    "evolution": EvolutionSearcher,
    "predictor": PredictorSearcher,
    "tpe": lambda *args, **options: OptunaSearcher(*args, sampler="tpe", **options),
    "nsga2": lambda *args, **options: OptunaSearcher(*args, sampler="nsga2", **options),
}
"""Searchers by name."""


def make_searcher(name: str, space: SearchSpace, seed: int = 0, goal: Goal = "ne") -> Searcher:
    """Make the searcher of a name.

    Raises:
        PlanError: If there is no such searcher, or the space has one architecture only.
        DependencyError: If it needs optuna, which is not installed.
    """
    if name not in SEARCHERS:
        close = difflib.get_close_matches(name, SEARCHERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = f"{', '.join(SEARCHERS)}, learnt"
        raise PlanError(f"there is no searcher {name!r}; {hint}choose one of {known}", where="searcher")
    if not space.genes:
        raise PlanError("the space has one architecture only", where="space", remedy="give a key several values")
    return SEARCHERS[name](space, seed, goal)


def front(scores: Sequence[SearchScore]) -> list[int]:
    """Return the indices of the scores that no other dominates in NE and FLOPs, in the order of FLOPs.

    Of equal scores the first is returned.
    """
    order = sorted(range(len(scores)), key=lambda index: (scores[index].flops, scores[index].ne, index))
    found: list[int] = []
    best = math.inf
    for index in order:
        if scores[index].ne < best:
            best = scores[index].ne
            found.append(index)
    return found
