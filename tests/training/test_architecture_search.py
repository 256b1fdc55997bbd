"""Search for architectures: spaces, searchers that end and can be played again, fronts, and the regression beneath."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _rankitect_fronts import hypervolume
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera import recipe as recipes
from cordillera.errors import PlanError, RecipeError
from cordillera.training.ranking.architecture_search.regression import GaussianProcess, expected_improvement
from cordillera.training.ranking.architecture_search.searchers import (
    SEARCHERS,
    EvolutionSearcher,
    LearntSearcher,
    Searcher,
    SearchScore,
    front,
    make_searcher,
)
from cordillera.training.ranking.architecture_search.space import (
    Genome,
    SearchSpace,
    SpaceConfig,
    load_space,
    shipped_spaces,
)

MODEL = {"name": "dnn", "embedding_dim": 16, "mlp": [8], "dropout": 0.1}
CHOICES = {
    "model.embedding_dim": (2, 4, 8, 16),
    "model.mlp": ((8,), (16,), (8, 8)),
    "training.learning_rate": (1e-3, 1e-2),
    "tables.name": ("sgd", "adam"),
    "model.dropout": (0.0,),
}
BLOCKS = {
    "count": 2,
    "vector": ("linear", "none"),
    "widths": (4, 8),
    "embeddings": ("none", "mix"),
    "rows": (2,),
    "connections": "chain",
}


def space_of(choices: dict[str, Any] | None = None, blocks: dict[str, Any] | None = None) -> SearchSpace:
    content = {} if choices is None else {"choices": choices}
    return SearchSpace(SpaceConfig.model_validate(content | ({} if blocks is None else {"blocks": blocks})), MODEL)


def number_space(genes: int, values: int) -> SearchSpace:
    return space_of({f"model.g{gene}": tuple(range(values)) for gene in range(genes)})


SPACES = {
    "choices": space_of(CHOICES),
    "blocks": space_of(None, BLOCKS),
    "both": space_of({"model.embedding_dim": (2, 4), "training.learning_rate": (0.1, 0.2)}, {**BLOCKS, "count": 1}),
    "numbers": number_space(4, 3),
}
spaces = st.sampled_from(sorted(SPACES)).map(SPACES.__getitem__)


# Spaces


@given(spaces, st.integers(0, 10**6), st.integers(1, 9))
def test_a_mutation_changes_as_many_genes_as_wanted(space: SearchSpace, seed: int, changes: int) -> None:
    random = np.random.default_rng(seed)
    genome = space.sample(random)
    child = space.mutate(genome, random, changes)
    assert sum(one != other for one, other in zip(genome, child, strict=True)) == min(changes, len(space.genes))
    assert all(0 <= index < len(gene.values) for gene, index in zip(space.genes, child, strict=True))
    assert all(type(index) is int for index in child)
    assert set(space.decode(child)) == {gene.name for gene in space.genes} | set(space.fixed)


def test_a_mutation_may_take_every_other_value() -> None:
    space, random = number_space(1, 5), np.random.default_rng(0)
    found = [space.mutate((2,), random)[0] for _ in range(2_000)]
    counts = np.bincount(found, minlength=5)
    assert counts[2] == 0
    assert (np.abs(counts[[0, 1, 3, 4]] - 500) < 100).all()


def test_samples_are_uniform() -> None:
    space, random = number_space(2, 3), np.random.default_rng(0)
    counts = np.zeros((3, 3))
    for _ in range(4_500):
        counts[space.sample(random)] += 1
    assert (np.abs(counts - 500) < 110).all()


@pytest.mark.parametrize("name", SPACES)
def test_a_space_is_gone_through_once(name: str) -> None:
    space = SPACES[name]
    genomes = list(space.enumerate())
    assert len(genomes) == len(set(genomes)) == space.size == math.prod(len(gene.values) for gene in space.genes)
    if len(genomes) > 1:
        assert genomes[1][-1] == genomes[0][-1] + 1


def test_values_alone_are_fixed() -> None:
    space = SPACES["choices"]
    assert [gene.name for gene in space.genes] == [key for key in CHOICES if key != "model.dropout"]
    assert space.decode((0, 0, 0, 0))["model.dropout"] == 0.0
    for wrong in ((), (0, 0, 0), (0, 0, 0, 0, 0)):
        with pytest.raises(ValueError, match="a genome of this space has 4 genes"):
            space.decode(wrong)


def test_equal_architectures_have_one_name_and_others_another() -> None:
    for space in SPACES.values():
        again = SearchSpace(space.config, MODEL)
        by_name: dict[str, Any] = {}
        for genome in space.enumerate():
            name = space.identify(genome)
            assert name == again.identify(genome)
            assert len(name) == 16
            assert by_name.setdefault(name, space.overrides(genome)) == space.overrides(genome)
        assert len(by_name) == len({str(one) for one in by_name.values()})
    blocks = SPACES["blocks"]
    assert len({blocks.identify(genome) for genome in blocks.enumerate()}) < blocks.size  # widths of blocks of none


def test_what_a_genome_stands_for_is_a_recipe() -> None:
    data: dict[str, Any] = {"dataset": "synthetic"}
    random = np.random.default_rng(0)
    several = [*SPACES.values(), *(SearchSpace(load_space(name), MODEL) for name in shipped_spaces())]
    for space in several:
        if space is SPACES["numbers"]:
            continue
        for _ in range(15):
            genome = space.sample(random)
            sections: dict[str, Any] = {"data": data, "model": dict(MODEL)}
            for key, value in space.overrides(genome).items():
                recipes.set_key(sections, key, value)
            values = space.decode(genome)
            dim = values.get("model.embedding_dim", 16)
            if "token_mixing" in values.values() and any(
                rows and dim % rows for key, rows in values.items() if "rows" in key
            ):
                continue  # may not be built, which a search passes over
            recipe = recipes.validate(sections)
            assert recipe.model.embedding_dim == values.get("model.embedding_dim", 16)
            if space.config.blocks is not None:
                assert recipe.model.name == "graph"
                assert recipe.model.dropout == 0.1  # taken over from the recipe
                assert {node.op for node in recipe.model.nodes} <= {
                    *(value for value in values.values() if isinstance(value, str)), "linear", "embed", "fm", "sum",
                }  # fmt: skip


def test_numbers_for_regressions_are_ranks_or_one_of_many() -> None:
    space = SPACES["choices"]
    np.testing.assert_allclose(space.features((0, 1, 1, 0)), [0, 0, 1, 0, 1, 1, 0])
    np.testing.assert_allclose(space.features((1, 2, 0, 1)), [1 / 3, 0, 0, 1, 0, 0, 1])
    for one, other in itertools.combinations(list(space.enumerate())[:20], 2):
        assert not np.array_equal(space.features(one), space.features(other))
    switches = space_of({"training.compile": (False, True), "model.embedding_dim": (8, 2)})
    np.testing.assert_allclose(switches.features((1, 1)), [0, 1, 1])


@pytest.mark.parametrize("tries", [0, 5, 200])
def test_unseen_architectures_end(tries: int) -> None:
    space, random = SPACES["blocks"], np.random.default_rng(0)
    names = {space.identify(genome) for genome in space.enumerate()}
    seen: set[str] = set()
    for _ in names:
        genome = space.unseen(seen, random, tries)
        assert genome is not None
        assert space.identify(genome) not in seen
        seen.add(space.identify(genome))
    assert seen == names
    assert space.unseen(seen, random, tries) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: give [blocks], [choices] or both"),
        ("[choices]\n", "is empty: give [blocks], [choices] or both"),
        ("[blocs]\ncount = 2\n", "blocs: is not a key here; did you mean 'blocks'?"),
        ("[blocks]\nwidth = [2]\n", "blocks.width: is not a key here; did you mean 'widths'?"),
        ("[blocks]\nwidths = []\n", "widths: name at least one"),
        ("[blocks]\nwidths = [0]\n", "blocks.widths[0]: must be at least 1"),
        ("[blocks]\nwidths = [2, 2]\n", "widths: names a value twice"),
        ('[blocks]\nvector = ["liner"]\n', "blocks.vector[0]: must be 'linear', 'gate'"),
        ('[blocks]\nvector = ["none"]\nembeddings = ["none"]\n', "vector and embeddings: both are none"),
        ('[choices]\n"model.mlp" = []\n', "choices.model.mlp"),
        ('[choices]\n"data.batch_size" = [1, 2]\n', "'data.batch_size' is no key of model, training or tables"),
        ('[choices]\n"model.layers" = [1, 2, 1]\n', "'model.layers' names a value twice"),
        ("[blocks\n", "file: "),
    ],
)  # fmt: skip
def test_a_mistake_in_a_space_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_space(path)
    assert message in str(error.value)
    assert "in the search space" in str(error.value)
    assert "validation error" not in str(error.value)


def test_a_space_that_is_not_there_is_named() -> None:
    with pytest.raises(RecipeError, match=r"is neither a shipped space \(blocks, settings, small\) nor a file"):
        load_space("smal")


# Searchers


def ne_of(space: SearchSpace, genome: Genome) -> float:
    """A figure with one best architecture, to which every gene contributes."""
    ranks = [index / (len(gene.values) - 1) for gene, index in zip(space.genes, genome, strict=True)]
    return 0.8 + sum((rank - 0.4 - 0.05 * place) ** 2 for place, rank in enumerate(ranks)) / len(ranks)


def flops_of(space: SearchSpace, genome: Genome) -> int:
    return 1_000 * (1 + sum(genome))


Judge = Callable[[SearchSpace, Genome], SearchScore]


def alive(space: SearchSpace, genome: Genome) -> SearchScore:
    return SearchScore(ne_of(space, genome), flops_of(space, genome))


def all_dead(space: SearchSpace, genome: Genome) -> SearchScore:
    return SearchScore(math.nan if sum(genome) % 2 else math.inf)


def some_dead(space: SearchSpace, genome: Genome) -> SearchScore:
    return all_dead(space, genome) if sum(genome) % 3 else alive(space, genome)


def unknown_flops(space: SearchSpace, genome: Genome) -> SearchScore:
    return SearchScore(ne_of(space, genome))


def equal(space: SearchSpace, genome: Genome) -> SearchScore:
    return SearchScore(0.9, 1_000)


def run(searcher: Searcher, judge: Judge, trials: int, batch: int = 1) -> list[Genome]:
    """Genomes that are proposed, in batches whose results are told afterwards."""
    found: list[Genome] = []
    while len(found) < trials:
        asked = [searcher.ask() for _ in range(min(batch, trials - len(found)))]
        genomes = [genome for genome in asked if genome is not None]
        if not genomes:
            break
        for genome in genomes:
            searcher.tell(genome, judge(searcher.space, genome))
        found += genomes
    return found


needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")
NAMES = [pytest.param(name, marks=needs_optuna if name in ("tpe", "nsga2") else ()) for name in SEARCHERS]
JUDGES: list[Judge] = [alive, all_dead, some_dead, unknown_flops, equal]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("goal", ["ne", "front"])
@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.__name__)
def test_a_searcher_goes_through_a_small_space_and_ends(name: str, goal: Any, judge: Judge) -> None:
    space = space_of({"model.a": (1, 2, 3), "model.b": ("x", "y"), "model.c": (1, 2)})
    if judge is alive and name not in ("tpe", "nsga2"):
        space = SPACES["choices"]
    searcher = make_searcher(name, space, 3, goal)
    found = run(searcher, judge, 10**4, batch=3)
    names = [space.identify(genome) for genome in found]
    assert len(names) == len(set(names)) == space.size
    assert searcher.ask() is None
    assert searcher.ask() is None


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_equal_architectures_are_proposed_once(name: str) -> None:
    space = space_of(None, {**BLOCKS, "count": 1, "rows": (2, 3)})
    names = {space.identify(genome) for genome in space.enumerate()}
    assert len(names) < space.size
    found = run(make_searcher(name, space, 1), alive, 10**4, batch=4)
    assert sorted(map(space.identify, found)) == sorted(names)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("goal", ["ne", "front"])
def test_a_searcher_is_a_function_of_its_seed_and_of_results(name: str, goal: Any) -> None:
    space = number_space(5, 4)
    paths = [run(make_searcher(name, space, seed, goal), some_dead, 26, batch=4) for seed in (5, 5, 6)]
    assert paths[0] == paths[1]
    assert (paths[0] != paths[2]) == (name != "grid")
    for genome in paths[0]:
        assert len(genome) == 5
        assert all(type(index) is int and 0 <= index < 4 for index in genome)
    if name in ("evolution", "predictor", "tpe"):  # they learn; NSGA-II does after its first 50
        other = run(
            make_searcher(name, space, 5, goal),
            lambda space, genome: SearchScore(-ne_of(space, genome), 9),
            26,
            4,
        )
        assert other != paths[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_search_played_again_from_its_record_goes_on_where_it_was(name: str) -> None:
    space = number_space(5, 4)
    whole = run(make_searcher(name, space, 2, "front"), some_dead, 24, batch=4)
    record = {space.identify(genome): some_dead(space, genome) for genome in whole[:16]}
    asked: list[Genome] = []

    def judge(space: SearchSpace, genome: Genome) -> SearchScore:
        if space.identify(genome) in record:
            return record[space.identify(genome)]
        asked.append(genome)
        return some_dead(space, genome)

    assert run(make_searcher(name, space, 2, "front"), judge, 24, batch=4) == whole
    assert asked == whole[16:]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("goal", ["ne", "front"])
def test_many_proposals_may_be_made_before_results(name: str, goal: Any) -> None:
    space = number_space(5, 4)
    searcher = make_searcher(name, space, 0, goal)
    begun = run(searcher, alive, 14)
    batch = [searcher.ask() for _ in range(12)]
    names = [space.identify(genome) for genome in [*begun, *batch] if genome is not None]
    assert len(names) == len(set(names)) == 26
    for genome in reversed(batch):  # results come in any order
        assert genome is not None
        searcher.tell(genome, alive(space, genome))
    assert searcher.ask() is not None


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_results_of_others_may_be_told(name: str) -> None:
    """Such as of proposals from outside, which the searcher did not make."""
    space = number_space(3, 3)
    searcher = make_searcher(name, space, 0, "front")
    for genome in [(0, 0, 0), (1, 1, 1), (2, 2, 2), (0, 1, 2)] * 3:
        searcher.tell(genome, some_dead(space, genome))
    assert len(run(searcher, some_dead, 100)) == space.size


@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] != "grid"])
def test_a_large_space_is_not_gone_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space = number_space(10, 4)
    monkeypatch.setattr(space, "enumerate", lambda: pytest.fail("more than a million genomes"))
    paths = [run(make_searcher(name, space, 1, "front"), some_dead, 16, batch=4) for _ in range(2)]
    assert paths[0] == paths[1]
    assert len(set(paths[0])) == 16


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shares"), [("evolution", 0.75), ("predictor", 1 / 3)])
def test_a_searcher_that_learns_needs_fewer_trials(name: str, shares: float) -> None:
    """Trials until one of the best percent of 1,024 architectures is found, mean of seeds."""
    space = number_space(5, 4)
    good = {space.identify(one) for one in sorted(space.enumerate(), key=lambda one: ne_of(space, one))[:10]}

    def needed(name: str, seed: int) -> int:
        path = run(make_searcher(name, space, seed, "ne"), alive, 400 if name == "random" else 60, batch=2)
        return next((number for number, genome in enumerate(path, 1) if space.identify(genome) in good), len(path))

    seeds = range(8)
    assert np.mean([needed(name, seed) for seed in seeds]) < shares * np.mean(
        [needed("random", one) for one in range(40)]
    )


def test_a_parent_is_the_best_of_the_newest_and_never_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    space = number_space(4, 4)
    parents: list[Genome] = []
    mutate = space.mutate
    monkeypatch.setattr(space, "mutate", lambda genome, *others: parents.append(genome) or mutate(genome, *others))
    searcher = EvolutionSearcher(space, 0, "ne", population=24, tournament=12)
    results = {(place % 4, place // 4 % 4, place // 16, 0): SearchScore(1.0 - 0.01 * place) for place in range(40)}
    results |= {(place % 4, place // 4 % 4, place // 16, 1): SearchScore(math.nan) for place in range(10)}
    results[(3, 3, 3, 3)] = SearchScore(0.1)  # the best of all, but too old below
    for genome, score in sorted(results.items(), key=lambda one: one[1].ne != 0.1):
        searcher.tell(genome, score)
    for _ in range(40):
        assert searcher.propose() is not None
    newest = [genome for genome, score in searcher.results[-24:] if math.isfinite(score.ne)]
    assert set(parents) <= set(newest)
    ranked = sorted(newest, key=lambda genome: results[genome].ne)
    assert set(parents) <= set(ranked[: len(ranked) - 11])  # at least the best of 12
    assert parents.count(ranked[0]) > len(parents) / 2


def test_those_of_the_front_stay_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    space = number_space(4, 4)
    parents: list[Genome] = []
    mutate = space.mutate
    monkeypatch.setattr(space, "mutate", lambda genome, *others: parents.append(genome) or mutate(genome, *others))
    searcher = EvolutionSearcher(space, 0, "front", population=4, tournament=4)
    old = {(0, 0, 0, 0): SearchScore(0.5, 900), (1, 0, 0, 0): SearchScore(0.6, 90), (2, 0, 0, 0): SearchScore(0.9, 9)}
    for genome, score in old.items():
        searcher.tell(genome, score)
    for place in range(12):
        searcher.tell((3, place % 4, place // 4, 1), SearchScore(0.7, 950))
    for _ in range(60):
        assert searcher.propose() is not None
    assert set(old) == set(parents)  # each the best of some limit of FLOPs


def test_what_a_base_searcher_proposes_again_is_replaced() -> None:
    class Stubborn(Searcher):
        def propose(self) -> Genome:
            return (0, 0)

    searcher = Stubborn(number_space(2, 3))
    found = run(searcher, alive, 100)
    assert found[0] == (0, 0)
    assert len(set(found)) == len(found) == 9


def test_learnt_chances_are_proposed_by_their_size() -> None:
    space = number_space(3, 3)
    chances = {"model.g0": [0.1, 0.8, 0.1], "model.g2": [0.0, 0.0, 1.0]}
    paths = [run(LearntSearcher(space, seed, chances=chances), some_dead, 100, batch=4) for seed in (1, 1, 2)]
    assert paths[0] == paths[1]
    assert paths[0] != paths[2]
    for path in paths:
        assert path[0][::2] == (1, 2)  # the most likely first
        assert sorted(path) == list(space.enumerate())
        assert all(genome[2] == 2 for genome in path[:6])  # others are left for the end
    first = [LearntSearcher(space, seed, chances=chances) for seed in range(300)]
    second = [(searcher.ask(), searcher.ask())[1] for searcher in first]
    shares = np.bincount([genome[0] for genome in second if genome is not None], minlength=3) / 300
    # one of nine is out: the first; the others share 1 - 0.8 / 3
    np.testing.assert_allclose(shares, np.array([0.1, 0.8 * 2 / 3, 0.1]) / (1 - 0.8 / 3), atol=0.1)
    for wrong in ({"model.other": [0.5, 0.5]}, {"model.g0": [0.5, 0.5]}):
        with pytest.raises(PlanError, match=r"the supernet decides about model\.\w+, this space does not"):
            LearntSearcher(space, chances=wrong)


def test_nan_is_worse_than_all() -> None:
    assert SearchScore(math.nan).ne == math.inf
    assert front([SearchScore(math.nan, 1), SearchScore(math.inf, 2), SearchScore(2.0, 3)]) == [2]
    assert front([SearchScore(math.nan, 1), SearchScore(math.inf, 2)]) == []
    assert hypervolume([SearchScore(math.nan, 1), SearchScore(math.inf, 1)], ne=2.0, flops=10) == 0


def test_wrong_names_and_single_architectures_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match="there is no searcher 'evolutoin'; did you mean 'evolution'",
    ):
        make_searcher("evolutoin", SPACES["choices"])
    with pytest.raises(PlanError, match="the space has one architecture only"):
        make_searcher("random", space_of({"model.embedding_dim": (4,)}))


# Fronts

scores = st.lists(
    st.builds(SearchScore, st.sampled_from([0.5, 0.75, 0.8, 0.9, 1.0, 1.5, math.nan, math.inf]), st.integers(0, 8)),
    max_size=12,
)


def dominates(one: SearchScore, other: SearchScore) -> bool:
    return one.ne <= other.ne and one.flops <= other.flops and (one.ne, one.flops) != (other.ne, other.flops)


@given(scores)
def test_a_front_is_what_nothing_dominates(found: list[SearchScore]) -> None:
    expected = [
        index
        for index, score in enumerate(found)
        if math.isfinite(score.ne)
        and not any(dominates(other, score) for other in found)
        and score not in found[:index]
    ]
    assert front(found) == sorted(expected, key=lambda index: found[index].flops)


@given(scores, st.sampled_from([0.6, 0.9, 1.2, 2.0]), st.sampled_from([1.5, 4.0, 5.5, 20.0]))
def test_a_hypervolume_is_the_area_of_all_that_is_dominated(found: list[SearchScore], ne: float, flops: float) -> None:
    """Cut into cells between the figures of all scores."""
    lines = sorted({ne, *(score.ne for score in found if score.ne < ne)})
    columns = sorted({flops, *(max(1, score.flops) for score in found if score.flops < flops)})
    area = 0.0
    for (low, high), (left, right) in itertools.product(itertools.pairwise(lines), itertools.pairwise(columns)):
        if any(score.ne <= low and max(1, score.flops) <= left and score.flops < flops for score in found):
            area += (high - low) * (math.log(right) - math.log(left))
    assert hypervolume(found, ne=ne, flops=flops) == pytest.approx(area, abs=1e-12)


# Regression


def points(seed: int, number: int = 25, features: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x, other = draw.random((number, features)), draw.random((9, features))
    return x, 3 + 0.01 * (np.sin(4 * x[:, 0]) + x[:, 1] * x[:, 2]) + 1e-4 * draw.standard_normal(number), other


def dense_process(x: np.ndarray, y: np.ndarray, other: np.ndarray, length: float, noise: float) -> tuple[Any, ...]:
    """Logarithm of the likelihood, means and deviations, by inverses of whole matrices."""

    def kernel(one: np.ndarray, two: np.ndarray) -> np.ndarray:
        r = np.sqrt(((one[:, None] - two[None]) ** 2).sum(2)) / length
        return np.exp(-0.5 * r**2)

    mean, scale = y.mean(), y.std()
    z, covariance = (y - mean) / scale, kernel(x, x) + noise * np.eye(len(x))
    inverse, across = np.linalg.inv(covariance), kernel(other, x)
    likelihood = -0.5 * z @ inverse @ z - 0.5 * np.linalg.slogdet(covariance)[1]
    variance = 1 - np.einsum("ij,jk,ik->i", across, inverse, across)
    return likelihood, mean + scale * across @ inverse @ z, scale * np.sqrt(variance)


@pytest.mark.parametrize("seed", range(4))
def test_a_process_is_that_of_the_most_likely_length_and_noise(seed: int) -> None:
    x, y, other = points(seed)
    lengths, noises = (0.5, 1.0, 2.0, 4.0, 8.0), (1e-4, 1e-2, 1e-1)
    best = max(itertools.product(lengths, noises), key=lambda pair: dense_process(x, y, other, *pair)[0])
    process = GaussianProcess(x, y)
    assert process.length == best[0]
    mean, deviation = process.predict(other)
    _, expected, spread = dense_process(x, y, other, *best)
    np.testing.assert_allclose(mean, expected, rtol=1e-9)
    np.testing.assert_allclose(deviation, spread, rtol=1e-6)


def test_a_process_is_that_of_a_general_library() -> None:
    gaussian_process = pytest.importorskip("sklearn.gaussian_process")
    x, y, other = points(7)
    process = GaussianProcess(x, y)
    noise = max((1e-4, 1e-2, 1e-1), key=lambda one: dense_process(x, y, other, process.length, one)[0])
    kernel = gaussian_process.kernels.RBF(process.length)
    theirs = gaussian_process.GaussianProcessRegressor(kernel, alpha=noise, optimizer=None, normalize_y=True).fit(x, y)
    mean, deviation = theirs.predict(other, return_std=True)
    np.testing.assert_allclose(process.predict(other)[0], mean, rtol=1e-9)
    np.testing.assert_allclose(process.predict(other)[1], deviation, rtol=1e-6)


def test_a_process_bears_equal_points_and_equal_values() -> None:
    x = np.array([[0.0, 1.0]] * 4 + [[1.0, 0.0]])
    for y in (np.full(5, 0.1), np.full(5, 0.75), np.array([1.0, 2.0, 1.0, 2.0, 3.0])):
        mean, deviation = GaussianProcess(x, y).predict(np.array([[0.0, 1.0], [0.5, 0.5]]))
        assert np.isfinite(mean).all()
        assert (deviation > 0).all()
        assert (np.abs(mean - y.mean()) <= np.ptp(y) + 1e-9).all()


@given(st.floats(-3, 3), st.floats(0.01, 3), st.floats(-3, 3))
@settings(max_examples=25)
def test_an_expected_improvement_is_the_mean_of_improvements(mean: float, deviation: float, best: float) -> None:
    values = mean + deviation * np.random.default_rng(0).standard_normal(200_000)
    improvements = np.maximum(best - values, 0)
    found = expected_improvement(np.array([mean]), np.array([deviation]), best)
    error = improvements.std() / math.sqrt(len(values))
    assert found[0] == pytest.approx(improvements.mean(), abs=6 * error + 1e-6 * deviation + 1e-4)
    assert found[0] >= -1e-12


def test_without_a_best_the_lowest_mean_is_best() -> None:
    means = np.array([0.3, 0.1, 0.2])
    assert int(np.argmax(expected_improvement(means, np.ones(3), math.inf))) == 1
