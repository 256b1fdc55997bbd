"""Recipes: every mistake at once, each with its path; what is shown is a recipe again."""

import random
import re
import typing

import pytest
from pydantic import BaseModel

from cordillera import recipe as recipes
from cordillera.errors import RecipeError
from cordillera.mistakes import field_descriptions, models_of
from cordillera.recipe import (
    LanguageRecipe,
    RankingRecipe,
    dump,
    load,
    parse_override,
    validate,
)
from cordillera.topology import shipped
from tests.fuzzing import damaged, survives

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


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", sorted(shipped("cordillera.recipes")))
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
        ("name='../x'\n" + GOOD, "name", "letters, digits"),
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


def test_sizes_that_are_left_out_fit_those_that_are_given(tmp_path):
    text = "[data]\npath='python-library'\n[model]\nname='llama'\nlayers=2\nhidden=64\nheads=4\n"
    model = load(write(tmp_path, text)).model
    assert (model.vocabulary, model.kv_heads) == (264, 4)  # of the tokenizer `bytes`; one for each head
    assert load(write(tmp_path, text + "kv_heads=2\nvocabulary=300\n")).model.kv_heads == 2
    assert load(write(tmp_path, text.replace("heads=4", "heads=16"))).model.kv_heads == 8
    other = text.replace("python-library'", "python-library'\ntokenizer='llama3-tokenizer'")
    assert load(write(tmp_path, other)).model.vocabulary == 128256


def test_an_override_in_brackets_that_is_no_toml_is_not_taken_for_text():
    with pytest.raises(RecipeError, match="text within it stands in quotation marks"):
        parse_override("data.schema.labels=[purchase]")
    assert parse_override('data.schema.labels=["purchase"]') == ("data.schema.labels", ["purchase"])
    assert parse_override("name=pur[chase]") == ("name", "pur[chase]")
    assert parse_override("name=[draft] first") == ("name", "[draft] first")


@pytest.mark.parametrize("value", ["2026-03-02", "2026-03-02T10:00:00Z", "10:30:00"])
def test_an_override_that_looks_like_a_date_is_text(value):
    assert parse_override(f"data.path= {value} ") == ("data.path", value)
    assert load("movielens-lr", ["name=2026-03-02"]).name == "2026-03-02"


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


CONFIGS = sorted(_configs(RankingRecipe, set()) | _configs(LanguageRecipe, set()), key=lambda config: config.__name__)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_key_is_explained_and_can_be_written_as_toml(config: type[BaseModel]):
    texts = field_descriptions(config)
    missing = [name for name in config.model_fields if not texts.get(name) and name != "name"]
    assert not missing, f"{config.__name__}: no explanation of {missing}"
    assert not [text for text in texts.values() if re.search(r":[a-z]+:`", text)], "roles are for docstrings"
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


WIDE = "".join(f'{{ name = "column {i}" }},\n' for i in range(5000))
WIDE = f'[data]\npath = "x.csv"\n[data.schema]\nlabels = ["y"]\ndense = [\n{WIDE}]\n[model]\nname = "lr"\n'
LANGUAGE = (
    '[data]\npath = "x.txt"\ntokenizer = "bytes"\n[packing]\ntokens = 512\ncontext = 256\n[model]\nname = "llama"\n'
    "layers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 128\nvocabulary = 300\n[training]\nsteps = 5\n"
)


def test_a_schema_with_five_thousand_features_is_read(tmp_path):
    assert len(load(write(tmp_path, WIDE)).data.schema_.dense) == 5000


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a" + ".b" * 100_000 + " = 1\n" + GOOD, "nested more than 16 levels deep"),
        ("a" + ' . "b"' * 100_000 + " = 1\n" + GOOD, "nested more than 16 levels deep"),
        ("".join(f"a{i}.b.c.d.e.f.g.h.i.j.k = 1\n" for i in range(30_000)) + GOOD, "more than 100,000 dots"),
        ("".join(f"k{i} = 1\n" for i in range(40_000)) + GOOD, "and 39,900 more mistakes"),
        ("a = " + "[" * 100_000, "nested more than 16 levels deep"),
        ("a" * 500_000, "not TOML"),
        ('a = "' + '\\"' * 400_000, "not TOML"),
        ("seed = 1" + "0" * 100_000 + GOOD, "not TOML"),
        ("#" + "x" * (1 << 20), "larger than 1,048,576"),
        ("description = '" + "x" * 100_000 + "\x1b[2J'", "not TOML"),
    ],
    ids=range(10),
)
def test_small_recipes_that_cost_much_are_refused(tmp_path, text, says):
    found = survives(lambda: load(write(tmp_path, text)), says)
    assert isinstance(found, RecipeError)
    assert says in str(found)
    assert len(str(found)) < 20_000


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        (GOOD, "training.betas", ["[2, 2]", "[-1, 0.9]", "[nan, 0.9]", "[0.9, 1.0]"]),
        (GOOD, "training.learning_rate", ["inf", "nan", "-1", "0", "1e999"]),
        (GOOD, "training.weight_decay", ["inf", "nan", "-1"]),
        (GOOD, "training.gradient_clip", ["inf", "nan", "0"]),
        (GOOD, "training.epochs", [str(2**62), "0"]),
        (GOOD, "data.batch_size", [str(2**62), "0", "-1"]),
        (GOOD, "data.prefetch", [str(10**9)]),
        (GOOD, "model.embedding_dim", [str(2**62)]),
        (GOOD, "model.layers", ["10000", str(2**62)]),
        (GOOD, "model.top_mlp", [f"[{2**62}]"]),
        (LANGUAGE, "model.layers", ["10000", str(2**62)]),
        (LANGUAGE, "model.hidden", [str(2**62)]),
        (LANGUAGE, "model.vocabulary", [str(2**62)]),
        (LANGUAGE, "training.betas", ["[2, 2]"]),
        (LANGUAGE, "training.steps", [str(2**62)]),
        (LANGUAGE, "packing.tokens", [str(2**62)]),
        (LANGUAGE, "parallel.shard", [str(2**62)]),
    ],
)
def test_numbers_of_no_use_are_refused_with_their_path(tmp_path, text, key, values):
    path = write(tmp_path, text)
    assert load(path)
    for value in values:
        with pytest.raises(RecipeError) as caught:
            load(path, [f"{key}={value}"])
        assert [place.split("[")[0] for place, _ in caught.value.problems] in ([key], [key, key])


@pytest.mark.parametrize(
    "override",
    [
        "a" + ".b" * 100_000 + "=1",
        "data.schema=" + "[" * 100_000,
        "seed=1" + "0" * 100_000,
        "x" * 100_000 + "=1",
        "\ud800=1",
    ],
    ids=range(5),
)
def test_overrides_of_no_use_are_refused(tmp_path, override):
    found = survives(lambda: load(write(tmp_path, GOOD), [override]), "override")
    assert isinstance(found, RecipeError)


@pytest.mark.parametrize("source", ["\x00", "x" * 5000, "/dev/null", "/dev", "\ud800"], ids=range(5))
def test_names_that_no_recipe_can_have_are_refused(source):
    assert isinstance(survives(lambda: load(source), "name"), RecipeError)


def test_damaged_recipes_are_read_or_refused(tmp_path, fuzz_inputs):
    draw = random.Random(0)
    good = [GOOD, LANGUAGE, dump(validate(_parse(GOOD))), dump(validate(_parse(LANGUAGE))), WIDE[:900] + WIDE[-40:]]
    words = [b'"', b"'", b"[", b"]", b"{", b"}", b"=", b".", b"\n", b"'''", b'"""', b"inf", b"nan", b"-1", b"1e999"]
    words += [
        b"9" * 30,
        b"true",
        b"[[data]]",
        b"[model]",
        b"2020-01-01",
        b"\\u0000",
        b"\xff",
        b"\x1b[2J",
        b"none",
        b"llama",
    ]
    for number in range(fuzz_inputs(250)):
        path = tmp_path / "mine.toml"
        path.write_bytes(damaged(draw.choice(good).encode(), draw, words))
        found = survives(lambda: load(tmp_path / "mine.toml"), f"recipe {number}")
        if not isinstance(found, RecipeError):
            assert validate(_parse(dump(found))) == found, number


def test_a_key_of_other_libraries_is_not_answered_with_one_that_means_something_else() -> None:
    feature = {"name": "user", "embedding_dim": 8, "share_embedding": "item", "vocab_size": 9}
    schema = {"dense": [], "categorical": [feature], "labels": ["click"]}
    with pytest.raises(RecipeError) as caught:
        load({"data": {"path": "log.csv", "schema": schema}, "model": {"name": "dcn"}})
    said = dict(caught.value.problems)
    place = "data.schema.categorical[0]"
    assert said[f"{place}.embedding_dim"] == "is not a key here; all features have the width model.embedding_dim"
    assert said[f"{place}.share_embedding"] == "is not a key here; features that name the same table share it"
    assert said[f"{place}.vocab_size"] == "is not a key here; did you mean 'num_embeddings'?"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.lr", "learning_rate"),
        ("training.wd", "weight_decay"),
        ("training.steps", "max_steps"),
        ("training.clip", "gradient_clip"),
        ("training.epoch", "epochs"),
        ("data.bs", "batch_size"),
        ("data.cache", "cache_dir"),
        ("data.bacth_size", "batch_size"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(key: str, meant: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("adult-dcn", {key: 1})
    assert caught.value.problems == [(key, f"is not a key here; did you mean {meant!r}?")]


def test_a_key_like_no_other_lists_no_long_line() -> None:
    with pytest.raises(RecipeError) as caught:
        load("adult-dcn", {"training.zzz": 1})
    assert caught.value.problems == [("training.zzz", "is not a key here")]


def test_a_recipe_is_changed_by_loading_it_again() -> None:
    recipe = load("movielens-dlrm", {"training.epochs": 3})
    changed = load(recipe, {"training.epochs": 1, "model.embedding_dim": 8})
    assert (changed.training.epochs, changed.model.embedding_dim) == (1, 8)
    assert changed.training.model_copy(update={"epochs": 3}) == recipe.training
    assert load(recipe) == recipe
    assert load(recipe, "training.epochs=1").training.epochs == 1
    with pytest.raises(RecipeError, match=r"lr: is not a key here; did you mean 'learning_rate' or 'loss_rows'"):
        load("llama-debug", ["training.lr=1"])
    with pytest.raises(RecipeError, match=r"learning_rate: is not a key here; did you mean 'training.learning_rate'"):
        load("llama-debug", ["learning_rate=1"])
    with pytest.raises(RecipeError, match=r"training\.epoch: is not a key here; did you mean 'epochs'"):
        load(recipe, {"training.epoch": 1})


def test_a_recipe_is_given_as_its_sections_and_printed_as_its_file() -> None:
    sections = {"data": {"dataset": "movielens-100k"}, "model": {"name": "dlrm"}}
    recipe = load(sections, {"data.batch_size": 64})
    assert (recipe.data.batch_size, recipe.model.name, recipe.name) == (64, "dlrm", "recipe")
    assert sections == {"data": {"dataset": "movielens-100k"}, "model": {"name": "dlrm"}}
    assert str(recipe) == dump(recipe)
    assert repr(recipe) == "<RankingRecipe 'recipe'; print() shows its keys>"


def test_a_section_that_would_lose_its_other_keys_is_not_replaced() -> None:
    with pytest.raises(
        RecipeError, match=r"training: is a section, whose other keys .* set one of them: training\.epochs"
    ):
        load("movielens-dlrm", {"training": {"epochs": 1}})
    with pytest.raises(RecipeError, match=r"training: is a section"):
        load("movielens-dlrm", ["training={epochs = 1}"])


def test_what_is_no_recipe_is_refused_by_its_type() -> None:
    class Frame:
        columns = ()

    with pytest.raises(RecipeError, match=r"tables are given as rows=, got Frame"):
        load(Frame())  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"must be a name, a path, a recipe or a dict, got int"):
        load(7)  # type: ignore[arg-type]


def test_a_recipe_that_starts_elsewhere_takes_over_the_ids_of_that_run(tmp_path) -> None:
    first = load("movielens-dlrm", {"training.start": "runs/a"})
    assert first.data.encoder == "runs/a"
    assert load(first, {"training.start": "runs/b"}).data.encoder == "runs/b"
    assert load(first, {"training.start": None}).data.encoder is None
    own = load("movielens-dlrm", {"training.start": "runs/a", "data.encoder": "runs/c"})
    assert load(own, {"training.start": "runs/b"}).data.encoder == "runs/c"
    language = load("llama-debug")
    for key, value in (("model.preset", "llama-15m"), ("training.start", "smollm2")):
        with pytest.raises(RecipeError, match=f"{key}: has decided on sizes .* load its file again with this change"):
            load(language, {key: value})


def test_a_model_that_names_itself_replaces_another() -> None:
    changed = load("movielens-wukong", ["model={name = 'lr'}"])
    assert changed.model.name == "lr"
    assert load(load("movielens-wukong"), {"model": {"name": "lr"}}).model.name == "lr"
