"""Models of one's own: a recipe names a class as ``module:Class``, and every command takes its runs."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cordillera
from cordillera import recipe as recipes
from cordillera.errors import RecipeError
from cordillera.models import imported
from cordillera.models.ranking import MODELS
from cordillera.serving.ranking.standalone import Scorer
from tests.distributed.processes import needs_gloo

MODULE = '''
import torch
from torch import Tensor

from cordillera.models.ranking.base import DeepConfig, DeepModel, Sizes
from cordillera.models.ranking.interactions import MLP


class Flat(DeepModel):
    class Config(DeepConfig):
        """Settings.

        Attributes:
            widths: Widths of the layers.
        """

        widths: Sizes = (8,)

    def __init__(self, config, features, tables):
        super().__init__(config, features, tables)
        self.mlp = MLP(len(features.sparse) * config.embedding_dim + len(features.dense), config.widths)
        self.heads = self.make_heads(config.widths[-1])

    def represent(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        return self.mlp(torch.cat([dense, embeddings.flatten(1)], 1))


class Bare(DeepModel):
    Config = None


class Other:
    pass
'''


@pytest.fixture
def own(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipe whose model is of a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "flat_model.py").write_text(MODULE)
    (tmp_path / "broken_model.py").write_text("1 / 0\n")
    (tmp_path / "ended_model.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needy_model.py").write_text("import a_library_that_is_missing\n")
    text = Path(recipe).read_text()
    begin, end = text.index("[model]"), text.index("[training]")
    model = '[model]\nname = "flat_model:Flat"\nembedding_dim = 4\nwidths = [8, 4]\n\n'
    path = tmp_path / "own.toml"
    path.write_text(text[:begin] + model + text[end:])
    yield path
    for name in [name for name in MODELS if imported.is_imported(name)]:
        del MODELS[name]
    sys.modules.pop("flat_model", None)


def test_every_command_takes_a_model_of_ones_own(cli: Any, own: Path, tmp_path: Path) -> None:
    trained = cli("train", own, "--run", "runs/own", "--set", "training.epochs=2")
    assert trained.code == 0, trained.err
    assert "model: flat_model:Flat" in trained.out + trained.err
    assert cli("train", "runs/own", "--resume").code == 0
    assert cli("evaluate", "runs/own", "--split", "validation").code == 0
    assert cli("report", "runs/own").code == 0
    shown = cli("recipe", "show", "runs/own")
    assert "# Widths of the layers.\nwidths = [8, 4]" in shown.out
    again = recipes.load("runs/own")
    assert pickle.loads(pickle.dumps(again)) == again
    assert pickle.loads(pickle.dumps(again.model)) == again.model


@pytest.mark.slow
@needs_gloo
def test_processes_import_it_too(cli: Any, own: Path) -> None:
    trained = cli("train", own, "--run", "runs/two", "--nproc", 2, "--set", "training.epochs=1")
    assert trained.code == 0, trained.err


def test_an_export_scores_as_predict(cli: Any, own: Path, tmp_path: Path) -> None:
    outcome = cordillera.train(cordillera.load_recipe(own, ["training.epochs=1"]), tmp_path / "runs/own")
    rows = [
        {"price": 1.5, "user": "u1", "device": "d1", "seen": "a"},
        {"price": None, "user": None, "device": "x", "seen": None},
    ]
    scores = cordillera.load_model(outcome.run).predict(rows)
    cordillera.export(outcome.run, tmp_path / "exported")
    exported = torch.as_tensor(Scorer(tmp_path / "exported").predict(rows)).flatten()
    torch.testing.assert_close(exported.double(), torch.as_tensor(scores).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flat_modle:Flat", "no module 'flat_modle' here"),
        ("flat_model.part:Flat", "no module 'flat_model.part' here"),
        ("flat_model:Flatt", "module 'flat_model' has no class 'Flatt'; did you mean 'Flat'?"),
        ("flat_model:", "module 'flat_model' has no class ''; it has Flat, Bare"),
        ("flat_model:Other", "'flat_model:Other' is no subclass of cordillera.models.ranking.RankingModel"),
        ("flat_model:Bare", "'Bare' needs a class Config, derived from RankingConfig or DeepConfig"),
        ("os:system", "'os:system' is no subclass of"),
        ("../x:Flat", "'../x' is no name of a Python module"),
        (":Flat", "'' is no name of a Python module"),
        ("broken_model:Flat", "module 'broken_model' cannot be imported: ZeroDivisionError: division by zero"),
        ("ended_model:Flat", "module 'ended_model' cannot be imported: SystemExit: 3"),
        ("needy_model:Flat", "module 'needy_model' cannot be imported: No module named 'a_library_that_is_missing'"),
    ],
)
def test_a_name_that_is_no_model_is_refused_with_its_reason(own: Path, name: str, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        recipes.load(own, [f"model.name={name}"])
    assert error.value.problems[0][0] == "model.name"
    assert said in error.value.problems[0][1]


def test_its_keys_are_checked_as_those_of_other_models(own: Path) -> None:
    with pytest.raises(RecipeError) as error:
        recipes.load(own, ["model.width=[3]", "model.widths=x", "training.epoch=3"])
    assert error.value.problems == [
        ("model.widths", "must be an array, got 'x'"),
        ("model.width", "is not a key here; did you mean 'widths'?"),
        ("training.epoch", "is not a key here; did you mean 'epochs'?"),
    ]


def test_a_file_here_does_not_stand_in_for_a_library(own: Path, tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('not the library')\n")
    with pytest.raises(RecipeError, match=r"module 'colorsys' was imported from .*, and there is another in"):
        recipes.load(own, ["model.name=colorsys:Flat"])


def test_the_module_of_another_folder_is_not_taken_in_silence(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes.load(own)
    other = tmp_path / "other"
    other.mkdir()
    (other / "flat_model.py").write_text(MODULE)
    monkeypatch.chdir(other)
    with pytest.raises(RecipeError, match=r"was imported from .*, and there is another in"):
        recipes.load(own)


def test_a_module_that_is_loaded_again_gives_its_new_class(own: Path, tmp_path: Path) -> None:
    before = recipes.load(own).model
    (tmp_path / "flat_model.py").write_text(
        MODULE.replace("widths: Sizes = (8,)", "widths: Sizes = (8,)\n        deep: int = 7")
    )
    importlib.reload(sys.modules["flat_model"])
    after = recipes.load(own).model
    assert not hasattr(before, "deep")
    assert after.deep == 7
    assert MODELS["flat_model:Flat"] is sys.modules["flat_model"].Flat


def test_what_a_module_prints_is_not_among_the_results(cli: Any, own: Path, tmp_path: Path) -> None:
    (tmp_path / "flat_model.py").write_text(f"print('hello')\n{MODULE}")
    trained = cli("train", own, "--run", "runs/own", "--set", "training.epochs=1", "--json")
    assert trained.code == 0, trained.err
    assert json.loads(trained.out)
    assert "hello" in trained.err


def test_a_configuration_with_aliases_and_computed_fields_is_sent_to_processes(own: Path, tmp_path: Path) -> None:
    fields = 'decay: float = Field(0.5, alias="lambda")\n\n        @computed_field\n        def total(self) -> int:\n'
    fields += "            return len(self.widths)\n\n        widths: Sizes = (8,)"
    text = f"from pydantic import Field, computed_field\n{MODULE.replace('widths: Sizes = (8,)', fields)}"
    (tmp_path / "flat_model.py").write_text(text)
    recipe = recipes.load(own, ["model.lambda=0.25"])
    for one in (recipe, recipe.model):
        assert pickle.loads(pickle.dumps(one)) == one
    assert recipe.model.decay == 0.25


def test_messages_do_not_depend_on_what_was_imported_before(own: Path) -> None:
    recipes.load(own)
    with pytest.raises(RecipeError) as error:
        recipes.load(own, ["model.name=flat"])
    assert "flat_model:Flat" not in str(error.value)
    with pytest.raises(RecipeError, match=r"is a ranking model, for which there is no \[packing\]"):
        recipes.load("llama-debug", ["model.name=flat_model:Flat"])


def test_a_working_directory_that_is_gone_is_no_traceback(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(RecipeError, match="no module 'nowhere' here"):
        recipes.load(own, ["model.name=nowhere:Flat"])
    monkeypatch.chdir(tmp_path)


def test_a_model_that_looks_up_in_its_own_way_is_not_exported(cli: Any, own: Path, tmp_path: Path) -> None:
    text = (
        MODULE
        + """

class Halved(Flat):
    def look_up(self, batch):
        return super().look_up(batch) / 2
"""
    )
    (tmp_path / "flat_model.py").write_text(text)
    own.write_text(own.read_text().replace("flat_model:Flat", "flat_model:Halved"))
    done = cli("train", own, "--run", "run", "-q", "--set", "training.epochs=1")
    assert done.code == 0, done.err
    refused = cli("export", "run")
    assert refused.code == 2
    assert "Halved has a look_up of its own" in refused.err
    assert not (tmp_path / "run/export").exists()
