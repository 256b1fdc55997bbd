"""Whatever is wrong in a file of settings, the mistake is told in words of ours, with its dotted key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from pydantic import BaseModel

from cordillera import topology
from cordillera.errors import CordilleraError, DataError, RecipeError
from cordillera.files import parse_toml
from cordillera.mistakes import models_of, text_of
from cordillera.planning.language.workload import Workload
from cordillera.planning.ranking.workload import Recommender
from cordillera.recipe import set_key, validate
from cordillera.training.ranking.architecture_search.space import SpaceConfig, load_space

PYDANTIC = ("Input should be", "Field required", "should match pattern", "Extra inputs", "validation error",
            "pydantic", "^", "[type=", "valid integer", "should have", "input should", "Value error",
            "not valid here")  # fmt: skip
WRONG: list[Any] = ["", "no such", -1, -0.5, 10**30, float("nan"), None, [], [1, "x", []], {"no_such": 1}, "x" * 9_000]
WHOLE = ("recipe", "file", "levels[0]")  # places of mistakes of several keys


def fields(model: type[BaseModel], content: Any, place: str = "") -> Iterator[str]:
    """Dotted keys of a model and of the models in its fields, which the content says which of several it is."""
    for name, field in model.model_fields.items():
        key = f"{place}{field.alias or name}"
        yield key
        inner = content.get(field.alias or name) if isinstance(content, dict) else None
        kinds = list(models_of(field.annotation))
        if isinstance(inner, dict) and "name" in inner and len(kinds) > 1:
            kinds = [kind for kind in kinds if inner["name"] in str(kind.model_fields["name"].annotation)]
        for kind in kinds[:1]:
            if not (isinstance(inner, list) or str(field.annotation).startswith(("tuple", "list", "dict"))):
                yield from fields(kind, inner, f"{key}.")


def listed(said: str) -> list[str]:
    """The places of mistakes that an error lists, one a line."""
    return [line.strip().partition(":")[0] for line in said.splitlines()[1:]] or [said]


def refusal(make: Callable[[dict[str, Any]], Any], content: Any, key: str, value: Any) -> CordilleraError | None:
    try:
        set_key(content, key, value)
        make(content)
    except CordilleraError as error:
        return error
    return None


def check(make: Callable[[dict[str, Any]], Any], content: dict[str, Any], key: str) -> int:
    """Put wrong values at a key; return how many of them are refused."""
    refused = 0
    for value in WRONG:
        changed = copy.deepcopy(content)
        error = refusal(make, changed, key, value)
        if error is None:
            continue
        refused += 1
        said = str(error).replace("'no such'", "")
        assert not [phrase for phrase in PYDANTIC if phrase in said], (key, value, said)
        places = [place for place, _ in error.problems] if isinstance(error, RecipeError) else listed(said)
        section = key.rpartition(".")[0]
        near = [place for place in places if key in place or key.startswith(place) or place in WHOLE]
        # a section that is not in the content lacks other keys too
        near += [place for place in places if section and place.startswith(section)]
        # a checkpoint that is not there is named itself
        assert near or isinstance(error, DataError), (key, value, said[:500])
    return refused


def recipes() -> dict[str, dict[str, Any]]:
    """One shipped recipe of every model and objective."""
    found: dict[str, dict[str, Any]] = {}
    folder = resources.files("cordillera.recipes")
    for name in topology.shipped("cordillera.recipes"):
        content = parse_toml((folder / f"{name}.toml").read_text(encoding="utf-8"), name)
        kind = content["model"]["name"] + content.get("objective", {}).get("name", "")
        if content.get("training", {}).pop("start", None):  # of a checkpoint that is not here
            content["model"]["preset"] = "smollm2-135m"
        found.setdefault(kind, content | {"name": name})
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("wukong", "llama") else [pytest.mark.slow]) for kind in recipes()]
)
def test_mistakes_in_recipes_are_told_in_own_words(kind: str) -> None:
    content = recipes()[kind]
    model = type(validate(copy.deepcopy(content)))
    for key in fields(model, content):
        # the objective of a reward model sets model.scores whatever the recipe says
        assert check(validate, content, key) or (kind, key) == ("llamareward", "model.scores"), key


@pytest.mark.parametrize("cluster", ["a100-node", "two-buildings"])
def test_mistakes_in_clusters_are_told_in_own_words(cluster: str) -> None:
    content = parse_toml((resources.files("cordillera.clusters") / f"{cluster}.toml").read_text(), cluster)

    def make(changed: dict[str, Any]) -> Any:
        return topology.validate(topology.Topology, changed, cluster)

    for key in fields(topology.Topology, content):
        assert check(make, content, key), key
    for key in fields(topology.Level, content["levels"][0]):
        assert check(
            lambda level: make(content | {"levels": [level, *content["levels"][1:]]}), content["levels"][0], key
        ), key


@pytest.mark.parametrize(("name", "model"), [("gpt-22b", Workload), ("dlrm-dcnv2", Recommender)])
def test_mistakes_in_workloads_are_told_in_own_words(name: str, model: type[BaseModel]) -> None:
    content = parse_toml((resources.files("cordillera.workloads") / f"{name}.toml").read_text(), name)
    for key in fields(model, content):
        assert check(lambda changed: topology.validate(model, changed, name), content, key), key


@pytest.mark.parametrize("name", ["blocks", "settings"])
def test_mistakes_in_search_spaces_are_told_in_own_words(name: str, tmp_path: Path) -> None:
    content = parse_toml((resources.files("cordillera.spaces") / f"{name}.toml").read_text(), name)

    def make(changed: dict[str, Any]) -> Any:
        try:
            text = tomlkit.dumps(changed)
        except Exception:  # TOML has no null
            return None
        (tmp_path / "space.toml").write_text(text)
        return load_space(tmp_path / "space.toml")

    for key in fields(SpaceConfig, content):
        assert check(make, content, key), key


@pytest.mark.parametrize(
    ("pattern", "good", "bad"), [("[a-z]+", "abc", "abc\n"), ("a|bc", "bc", "abc"), (r"[\t,]", "\t", ",,")]
)
def test_a_text_matches_as_a_whole_and_is_refused_in_words(pattern: str, good: str, bad: str) -> None:
    check = text_of(pattern, "such and such").func
    assert check(good) == good  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^must be such and such$"):
        check(bad)  # type: ignore[call-arg]
