"""Runs that begin with the weights of another, whose new ids get rows after those that are known, or go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import cordillera
from cordillera import workflows
from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import Schema
from cordillera.errors import CheckpointError, DataError, RecipeError, RunError
from cordillera.recipe import RankingRecipe, load, validate
from cordillera.run import Run
from cordillera.workflows.trained import model_of, start_from

pytestmark = pytest.mark.usefixtures("one_thread")

DAY = 86_400


def write_day(path: Path, day: int, rows: int = 400, users: int = 30, noise: int = 0) -> Path:
    """A day of clicks; every day has users that the day before had not, and a taste that drifts."""
    draw = np.random.default_rng(day + 1000 * noise)
    user = draw.integers(5 * day, 5 * day + users, rows)
    item = draw.integers(0, 20, rows)
    chance = 1 / (1 + np.exp(-1.5 * np.sin(user * 1.7) - 1.5 * np.cos(item + 0.1 * day)))
    pl.DataFrame(
        {
            "time": day * DAY + np.arange(rows),
            "user": [f"u{one}" for one in user],
            "item": item,
            "price": draw.lognormal(0, 1, rows),
            "seen": ["|".join(map(str, draw.integers(0, 20, draw.integers(0, 4)))) for _ in range(rows)],
            "click": (draw.random(rows) < chance).astype(int),
        }
    ).write_csv(path)
    return path


def recipe_of(tmp_path: Path, path: Path, **changes: Any) -> RankingRecipe:
    content: dict[str, Any] = {
        "threads": 1,
        "data": {
            "path": str(path),
            "batch_size": 50,
            "cache_dir": str(tmp_path / "cache"),
            "schema": {
                "labels": ["click"],
                "timestamp": "time",
                "dense": [{"name": "price"}],
                "categorical": [{"name": "user"}, {"name": "item"}],
                "lists": [{"name": "seen", "table": "item"}],
            },
        },
        "model": {"name": "dcn", "embedding_dim": 4, "mlp": [8]},
        "tables": {"name": "adagrad", "learning_rate": 0.05},
        "training": {"epochs": 2, "precision": "fp32"},
    }
    for key, value in changes.items():
        section, _, last = key.rpartition("__")
        place = content
        for part in section.split("__") if section else ():
            place = place[part]
        place[last] = value
    found = validate(content)
    assert isinstance(found, RankingRecipe)
    return found


@pytest.fixture(scope="module")
def day_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on day 1, beside its log; runs that begin with it only read it."""
    folder = tmp_path_factory.mktemp("day-1")
    path = write_day(folder / "day-1.csv", 1)
    return workflows.train(recipe_of(folder, path), folder / "day-1").run.folder


def after(tmp_path: Path, run: Path, day: int = 2, **changes: Any) -> RankingRecipe:
    path = write_day(tmp_path / f"day-{day}.csv", day)
    return recipe_of(tmp_path, path, training__start=str(run), **changes)


def test_known_ids_keep_their_rows_and_scales(tmp_path: Path, day_1: Path) -> None:
    recipe = after(tmp_path, day_1)
    assert recipe.data.encoder == str(day_1)
    before = Encoder.load(day_1 / "encoder")
    workflows.train(recipe, tmp_path / "day-2")
    grown = Encoder.load(tmp_path / "day-2" / "encoder")
    for name, values in before.vocabularies.items():
        assert grown.vocabularies[name].to_list()[: len(values)] == values.to_list()
    new = set(grown.vocabularies["user"]) - set(before.vocabularies["user"])
    assert len(new) == 5
    assert grown.dense_state == before.dense_state
    assert grown.rows == before.rows + 320


def test_before_the_first_step_known_ids_have_the_scores_of_the_start(tmp_path: Path, day_1: Path) -> None:
    recipe = after(tmp_path, day_1, training__learning_rate=1e-30, tables__learning_rate=0.0)
    workflows.train(recipe, tmp_path / "day-2")
    rows = pl.read_csv(day_1.parent / "day-1.csv")
    old, new = (cordillera.load_model(run).predict(rows) for run in (day_1, tmp_path / "day-2"))
    assert np.array_equal(old, new)
    later = pl.read_csv(tmp_path / "day-2.csv")
    unknown = ~later["user"].is_in(Encoder.load(day_1 / "encoder").vocabularies["user"].to_list())
    old, new = (cordillera.load_model(run).predict(later) for run in (day_1, tmp_path / "day-2"))
    differs = pl.Series(old != new)
    assert not differs.filter(~unknown).any()
    assert differs.filter(unknown).any()  # rows of their own


@pytest.mark.cases(2)
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam", "sgd"])
def test_a_warm_start_equals_a_run_that_had_all_ids(tmp_path: Path, optimizer: str) -> None:
    """Both days' ids were in the tables on day 1 of one run, and of the other those of day 1; weights began equal."""
    first, second = write_day(tmp_path / "day-1.csv", 1), write_day(tmp_path / "day-2.csv", 2)
    kind = {"tables__name": optimizer, "tables__learning_rate": 0.01}
    apart = workflows.train(recipe_of(tmp_path, first, **kind), tmp_path / "apart-1").run
    warm = recipe_of(tmp_path, second, training__start=str(apart.folder), **kind)
    workflows.train(warm, tmp_path / "apart-2")
    # the encoder of the other run knows the ids of day 2 from the beginning
    all_along = tmp_path / "all-along"
    (all_along / "encoder").mkdir(parents=True)
    Encoder.load(tmp_path / "apart-2" / "encoder").save(all_along / "encoder")
    whole_1 = recipe_of(tmp_path, first, data__encoder=str(all_along), training__epochs=2, **kind)
    model = model_of(whole_1, Encoder.load(all_along / "encoder").features)
    small = model_of(recipe_of(tmp_path, first, **kind), Encoder.load(apart.folder / "encoder").features)
    for name in small.tables.features.tables:
        rows = small.tables.table(name)
        model.tables.table(name)[: len(rows)] = rows
    for name, weight in small.named_parameters():
        if not name.startswith("tables."):
            model.get_parameter(name).data.copy_(weight.data)
    trained = _trained(whole_1, model, tmp_path / "whole-1")
    whole_2 = recipe_of(tmp_path, second, data__encoder=str(all_along), **kind)
    _trained(whole_2, trained, tmp_path / "whole-2")  # moments of dense weights begin anew with each trainer
    warmed = cordillera.load_model(tmp_path / "apart-2").module
    known = Encoder.load(apart.folder / "encoder").vocabularies
    for name, values in known.items():
        ours, theirs = (one.tables.table(name)[: len(values) + 1] for one in (warmed, trained))
        assert torch.equal(ours, theirs), name
    for name, weight in warmed.named_parameters():
        if not name.startswith("tables."):
            assert torch.equal(weight, trained.get_parameter(name)), name


def _trained(recipe: RankingRecipe, model: Any, folder: Path) -> Any:
    """Train a model that exists, and return it."""
    from cordillera.data.ranking.datasets import prepare
    from cordillera.recipe import dump
    from cordillera.run import Run
    from cordillera.training.ranking.trainer import Trainer
    from cordillera.workflows.trained import loader_of

    splits = prepare(recipe.data, progress=False)
    torch.manual_seed(recipe.seed)
    Trainer(
        recipe.training, model, loader_of(recipe, splits.train, training=True), None, Run.create(folder, dump(recipe)),
        tasks=splits.features.tasks, device=torch.device("cpu"),
    ).fit()  # fmt: skip
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*are blank or unknown")
def test_days_one_after_another_are_better_than_the_last_one_alone(tmp_path: Path) -> None:
    ne: dict[str, list[float]] = {"warm": [], "alone": []}
    previous: Path | None = None
    for day in range(1, 5):
        path = write_day(tmp_path / f"day-{day}.csv", day, rows=1500)
        alone = workflows.train(recipe_of(tmp_path, path, seed=day), tmp_path / f"alone-{day}").run.folder
        start = {} if previous is None else {"training__start": str(previous)}
        previous = workflows.train(recipe_of(tmp_path, path, seed=day, **start), tmp_path / f"warm-{day}").run.folder
        following = write_day(tmp_path / f"next-{day}.csv", day + 1, rows=1500, noise=1)
        for name, run in (("warm", previous), ("alone", alone)):
            ne[name].append(workflows.evaluate(run, file=following).metrics()["click"]["ne"])
    assert all(warm < alone for warm, alone in zip(ne["warm"][1:], ne["alone"][1:], strict=True)), ne


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*are blank or unknown")
def test_progressive_ne_over_ten_days_is_better_than_of_each_day_alone(tmp_path: Path) -> None:
    """Each sample is scored before it is learnt, by a model that knows the days before it or none of them."""
    ne: dict[str, list[float]] = {"warm": [], "alone": []}
    previous: dict[str, Any] = {}
    for day in range(1, 11):
        path = write_day(tmp_path / f"day-{day}.csv", day, rows=1000)
        once = {"training__progressive": True, "training__epochs": 1, "data__shuffle": "none"}
        for name, start in (("alone", {}), ("warm", previous)):
            run = workflows.train(recipe_of(tmp_path, path, **once, **start), tmp_path / f"{name}-{day}").run
            progressive = json.loads((run.folder / "progressive.json").read_text())
            ne[name].append(progressive["click"]["ne"])
        previous = {"training__start": str(run.folder)}
    assert ne["warm"][0] == ne["alone"][0]
    assert all(warm < alone for warm, alone in zip(ne["warm"][1:], ne["alone"][1:], strict=True)), ne
    assert sum(ne["warm"]) / 10 < ne["alone"][-1]


def test_a_warm_start_is_resumed_without_starting_again(tmp_path: Path, day_1: Path) -> None:
    recipe = after(tmp_path, day_1)
    whole = workflows.train(recipe, tmp_path / "whole")
    short = recipe.model_copy(update={"training": recipe.training.model_copy(update={"max_steps": 5})})
    workflows.train(short, tmp_path / "parts")
    text = (tmp_path / "parts" / "recipe.toml").read_text()
    (tmp_path / "parts" / "recipe.toml").write_text(text.replace("max_steps = 5\n", ""))
    resumed = workflows.train(load(tmp_path / "parts"), tmp_path / "parts", resume=True)
    assert resumed.evaluation is not None
    assert whole.evaluation is not None
    assert resumed.evaluation.metrics() == whole.evaluation.metrics()
    assert workflows.evaluate(tmp_path / "parts").metrics() == whole.evaluation.metrics()


def test_dynamic_tables_start_with_all_rows(tmp_path: Path) -> None:
    dynamic: dict[str, Any] = {"tables__dynamic": {}, "tables__learning_rate": 0.05}

    def recipe(day: int, **changes: Any) -> RankingRecipe:
        made = recipe_of(tmp_path, write_day(tmp_path / f"day-{day}.csv", day), **dynamic, **changes)
        schema = made.data.schema_
        assert schema is not None
        content = schema.model_dump(mode="json", exclude_defaults=True)
        content["categorical"] = [{"name": name, "encoding": "hash"} for name in ("user", "item")]
        content["lists"] = []
        data = made.data.model_copy(update={"schema_": Schema.model_validate(content)})
        return made.model_copy(update={"data": data})

    first = workflows.train(recipe(1), tmp_path / "one").run.folder
    frozen = recipe(2, training__start=str(first), training__learning_rate=1e-30)
    frozen = frozen.model_copy(update={"tables": frozen.tables.model_copy(update={"learning_rate": 0.0})})
    workflows.train(frozen, tmp_path / "two")
    rows = pl.read_csv(tmp_path / "day-1.csv")
    old, new = (cordillera.load_model(tmp_path / name).predict(rows) for name in ("one", "two"))
    assert np.array_equal(old, new)


def test_what_does_not_fit_is_one_error(tmp_path: Path, day_1: Path) -> None:
    with pytest.raises(RunError, match=r"training\.start: there is no folder .*missing"):
        workflows.train(after(tmp_path, tmp_path / "missing"), tmp_path / "a")
    with pytest.raises(RunError, match=r"training\.start: .* is not a run folder"):
        workflows.train(after(tmp_path, tmp_path), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"training\.start: .*: model\.mlp is \[8\] there, \[16\] here"):
        workflows.train(after(tmp_path, day_1, model__mlp=[16]), tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"training\.start: .*: model\.embedding_dim is 4 there, 8 here"):
        workflows.train(after(tmp_path, day_1, model__embedding_dim=8), tmp_path / "c")
    dense = [{"name": "price", "transform": "quantile"}]
    with pytest.raises(DataError, match="feature 'price' differs beside the run"):
        workflows.train(after(tmp_path, day_1, data__schema__dense=dense), tmp_path / "d")
    with pytest.raises(RunError, match="takes over tables in float32 in memory"):
        workflows.train(after(tmp_path, day_1, tables__storage="file", tables__cache=0.5), tmp_path / "e")
    with pytest.raises(RecipeError, match=r"training\.start"):
        workflows.train(after(tmp_path, day_1), tmp_path / "f", processes=2)
    assert not any((tmp_path / name).exists() for name in "abcd")
    other = after(tmp_path, day_1, tables__name="adam")
    features = Encoder.load(day_1 / "encoder").features
    assert "0 rows of tables are new" in start_from(model_of(other, features), other)


@pytest.fixture(scope="module")
def two_labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two labels on day 1, beside the logs of both days; runs that begin with it only read it."""
    folder = tmp_path_factory.mktemp("two-labels")
    for day in (1, 2):
        rows = pl.read_csv(write_day(folder / f"day-{day}.csv", day))
        rows.with_columns(bought=1 - pl.col("click")).write_csv(folder / f"both-{day}.csv")
    begun = recipe_of(folder, folder / "both-1.csv", data__schema__labels=["click", "bought"])
    return workflows.train(begun, folder / "one").run.folder


@pytest.mark.parametrize("labels", [["bought", "click"], ["bought"], ["click"]])
def test_other_labels_or_another_order_are_refused(tmp_path: Path, two_labels: Path, labels: list[str]) -> None:
    """Heads have no names: those of other labels would be taken in silence."""
    log, start = two_labels.parent / "both-2.csv", str(two_labels)
    other = recipe_of(tmp_path, log, data__schema__labels=labels, training__start=start)
    with pytest.raises(CheckpointError, match=rf"one learnt click, bought, here the labels are {', '.join(labels)}"):
        workflows.train(other, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_features_in_another_order_are_refused(tmp_path: Path, day_1: Path) -> None:
    """Weights are taken by the places of features: those of others would be taken in silence."""
    names = [{"name": "item"}, {"name": "user"}]
    with pytest.raises(CheckpointError, match=r"day-1 reads the features .*user, item.* here they are .*item, user"):
        workflows.train(after(tmp_path, day_1, data__schema__categorical=names), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_run_goes_on_with_a_copy_of_its_file_and_with_no_other(tmp_path: Path) -> None:
    path = write_day(tmp_path / "day-1.csv", 1)
    endless: dict[str, Any] = {"training__decay": "none", "training__patience": None}
    run = workflows.train(recipe_of(tmp_path, path, **endless), tmp_path / "run").run.folder
    copy = Path(shutil.copy(path, tmp_path / "copy.csv"))
    path.unlink()
    outcome = workflows.train(Run(run), changes=[f"data.path={copy}", "training.epochs=3"])
    assert outcome.report.progress.epoch == 3
    write_day(copy, 1, noise=1)
    with pytest.raises(DataError, match="has changed since the run began"):
        workflows.train(Run(run), changes=["training.epochs=4"])
