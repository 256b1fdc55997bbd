"""Recipes: every mistake at once, each with its path; what is shown is a recipe again."""

import typing

import pytest
from pydantic import BaseModel

from cordillera import recipe as recipes
from cordillera.errors import RecipeError
from cordillera.mistakes import models_of
from cordillera.recipe import LanguageRecipe, Recipe, dump, field_descriptions, load, parse_override, shipped, validate

GOOD = """
seed = 3
[data]
dataset = "synthetic"
[model]
name = "wukong"
"""


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_is_valid_says_what_it_is_and_survives_show(name):
    recipe = load(name)
    assert recipe.description
    assert recipe.name == name
    for comments in (False, True):
        assert validate(_parse(dump(recipe, comments=comments))) == recipe


def _parse(text):
    return recipes.tomllib.loads(text)


def test_every_mistake_is_reported_at_once_with_its_path(tmp_path):
    path = write(
        tmp_path,
        """
        sede = 1
        seed = -1
        [data]
        dataset = "synthetic"
        batch_size = "many"
        [model]
        name = "wukong"
        layerz = 3
        rank = 0
        [training]
        epochs = 0
        precision = "fp8"
        """,
    )
    with pytest.raises(RecipeError) as caught:
        load(path)
    found = dict(caught.value.problems)
    assert set(found) == {
        "sede", "seed", "data.batch_size", "model.layerz", "model.rank", "training.epochs", "training.precision"
    }  # fmt: skip
    assert "'seed'" in found["sede"]
    assert "'layers'" in found["model.layerz"]
    assert "'many'" in found["data.batch_size"]
    assert str(path) in str(caught.value)
    assert "7 mistakes" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ("[model\n", "file", "not TOML"),
        ("[data]\ndataset='synthetic'\n", "model", "missing"),
        ("[data]\ndataset='synthetic'\n[model]\nlayers=2\n", "model.name", "choose one of"),
        ("[data]\ndataset='synthetic'\n[model]\nname='wukon'\n", "model.name", "must be one of"),
        ("[model]\nname='wukong'\n", "data", "missing"),
        ("[data]\ndataset='synthetic'\n[model]\nname='wukong'\n[tables]\nname='rmsprop'\n", "tables.name", "sgd"),
        ("name='../x'\n" + GOOD, "name", "pattern"),
        ("[data]\npath='python-library'\n[model]\nname='llama'\n", "model", "name a preset"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, path, says):
    with pytest.raises(RecipeError) as caught:
        load(write(tmp_path, text))
    assert path in dict(caught.value.problems)
    assert says in dict(caught.value.problems)[path]


def test_a_name_that_is_misspelt_is_the_mistake_not_what_another_family_of_models_lacks(tmp_path):
    text = "[data]\npath='a.txt'\n[model]\nname='lama'\npreset='llama-debug'\n[packing]\ntoken=3\n"
    with pytest.raises(RecipeError) as caught:
        load(write(tmp_path, text))
    problems = dict(caught.value.problems)
    assert set(problems) == {"model.name", "packing.token"}
    assert "did you mean 'llama'?" in problems["model.name"]
    assert "did you mean 'tokens'" in problems["packing.token"]
    with pytest.raises(RecipeError) as caught:
        load(write(tmp_path, text.replace("lama'", "zzz'", 1)))
    assert set(dict(caught.value.problems)) == {"model.name"}


def test_an_unknown_recipe_is_answered_with_the_nearest_name():
    with pytest.raises(RecipeError, match="did you mean 'movielens-wukong'"):
        load("movilens-wukong")


def test_overrides_reach_every_section_and_are_typed(tmp_path):
    path = write(tmp_path, GOOD)
    recipe = load(
        path, ["model.layers=4", "training.precision=fp32", "training.learning_rate=1e-2", "model.top_mlp=[8, 4]"]
    )
    assert recipe.model.layers == 4
    assert recipe.training.precision == "fp32"
    assert recipe.training.learning_rate == 0.01
    assert recipe.model.top_mlp == (8, 4)
    assert load(path, {"model.layers": 4}).model.layers == 4
    assert load("movielens-wukong", ["training.patience=null"]).training.patience is None


@pytest.mark.parametrize("text", ["model.layers", "=3", ""])
def test_an_override_without_key_or_value_is_refused(text):
    with pytest.raises(RecipeError, match=r"section\.key=value"):
        parse_override(text)


def test_an_override_below_a_value_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="not a section"):
        load(write(tmp_path, GOOD), ["seed.more=1"])


def _configs(config, seen):
    seen.add(config)
    for field in config.model_fields.values():
        for inner in models_of(field.annotation):
            if inner not in seen:
                _configs(inner, seen)
    return seen


CONFIGS = sorted(_configs(Recipe, set()) | _configs(LanguageRecipe, set()), key=lambda config: config.__name__)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_key_is_explained_and_can_be_written_as_toml(config: type[BaseModel]):
    texts = field_descriptions(config)
    missing = [name for name in config.model_fields if not texts.get(name) and name != "name"]
    assert not missing, f"{config.__name__}: no explanation of {missing}"
    for name, field in config.model_fields.items():
        options = typing.get_args(field.annotation)
        if type(None) in options and field.default is not None:
            assert str not in options, f"{config.__name__}.{name}: TOML cannot say null, so None must be the default"


def test_what_is_set_to_nothing_stays_so_in_the_file_of_a_run(tmp_path):
    changes = ["training.clip=null", "data.cleaning.near_duplicates=none", "data.cleaning.line_repeats='none'"]
    recipe = load("llama-debug", changes)
    assert recipe.training.clip is None
    assert recipe.data.cleaning.near_duplicates is recipe.data.cleaning.line_repeats is None
    for comments in (False, True):
        assert load(write(tmp_path, dump(recipe, comments=comments))) == recipe


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama-debug", "training.decay"),
        ("llama-debug", "parallel.recompute"),
        ("movielens-wukong", "training.decay"),
        ("movielens-wukong", "model.top_norm"),
    ],
)
def test_none_is_a_word_where_a_key_has_it(name, key):
    section, last = key.split(".")
    assert getattr(getattr(load(name, [f"{key}=none"]), section), last) == "none"


def test_a_language_model_needs_no_section_but_data_and_model(tmp_path):
    recipe = load(write(tmp_path, "[data]\npath='python-library'\n[model]\nname='llama'\npreset='llama-debug'\n"))
    assert recipe.packing.context == 2048
