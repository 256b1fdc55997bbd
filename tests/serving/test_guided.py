"""Texts keep to their form, whatever the model would rather write, with and without drafts."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import DataError
from cordillera.serving.language.guided import Guide, Guides, choice_form, json_form, regex_form
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import DraftTree
from tests.data.vocabularies import write_json
from tests.serving.small_models import write_model

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bb"]},
        "fit": {"type": "boolean"},
    },
    "required": ["age", "kind", "fit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def guides(tmp_path_factory: pytest.TempPathFactory) -> Guides:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_json(folder)
    return Guides(load_tokenizer(folder))


def _is_valid(document: Any) -> bool:
    return (
        list(document) == ["age", "kind", "fit"]
        and type(document["age"]) is int
        and 0 <= document["age"] <= 99
        and document["kind"] in ("a", "bb")
        and type(document["fit"]) is bool
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_documents_are_of_their_schema_and_the_same_with_drafts(folder: Path, temperature: float) -> None:
    prompts, form = [f"the cat {n}" for n in range(8)], json_form(SCHEMA)
    found = []
    for drafter in ("none", "ngram"):
        model = LanguageModel(folder, drafter=drafter)
        model.__dict__["speculation"] = model.speculation and dataclasses.replace(model.speculation, costs=[1.0] * 32)
        sampling = Sampling(temperature=temperature, top_p=1, seed=4)
        found.append(model.generate(prompts, max_new_tokens=60, chat=False, sampling=sampling, form=form))
    plain, drafted = found
    assert [one.text for one in plain] == [one.text for one in drafted]
    for one in drafted:
        assert one.finish == "stop"
        assert _is_valid(json.loads(one.text))
    if temperature:
        assert len({one.text for one in drafted}) > 3
    assert sum(one.forwards for one in drafted) < 0.7 * sum(one.forwards for one in plain)


def test_texts_match_an_expression_or_are_a_choice(folder: Path) -> None:
    model = LanguageModel(folder)
    sampling = Sampling(temperature=2.0, top_p=1)
    prompts = [f"{n}" for n in range(10)]
    for one in model.generate(prompts, chat=False, sampling=sampling, form=regex_form(r"[a-c]{3,5}-[0-9]+!")):
        assert one.finish == "length" or re.fullmatch(r"[a-c]{3,5}-[0-9]+!", one.text)
    choices = ['say "no"', "yes", "a\nb"]
    texts = {one.text for one in model.generate(prompts, chat=False, sampling=sampling, form=choice_form(choices))}
    assert texts <= set(choices)
    assert len(texts) > 1


def _walk(guide: Guide, choose: Any, steps: int, end: int) -> list[int]:
    """A path that the form allows, not to its end."""
    path = []
    for _ in range(steps):
        allowed = [token for token in guide.allowed(DraftTree([], [], []))[0].nonzero()[:, 0].tolist() if token != end]
        if not allowed:
            break
        path.append(allowed[choose(len(allowed))])
        guide.add(path[-1:])
    return path


@settings(max_examples=25)
@given(seed=st.integers(0, 999), steps=st.integers(0, 12))
def test_what_a_tree_allows_is_what_a_replay_of_each_path_allows(guides: Guides, seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def choose(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    form = json_form(SCHEMA)
    guide = guides.start(form)
    text = _walk(guide, choose, steps, guides.end)
    paths = []
    for _ in range(3):
        replayed = guides.start(form)
        replayed.add(text)
        paths.append(_walk(replayed, choose, 3, guides.end))
    tree, places = DraftTree([], [], []), dict[tuple[int, ...], int]()
    for path in [*paths, [choose(guides.vocabulary) for _ in range(2)]]:
        for length in range(1, len(path) + 1):
            if tuple(path[:length]) not in places:
                places[tuple(path[:length])] = len(tree.tokens)
                tree.tokens.append(path[length - 1])
                tree.parents.append(places.get(tuple(path[: length - 1]), -1))
                tree.chances.append(1.0)
    pruned = guide.prune(tree)
    allowed = guide.allowed(pruned)
    kept = [path for path in places if guides.start(form).accepts([*text, *path])]
    assert len(pruned.tokens) == len(kept)
    for row, path in zip(allowed, [(), *kept], strict=True):
        fresh = guides.start(form)
        fresh.add([*text, *path])
        assert torch.equal(row, fresh.allowed(DraftTree([], [], []))[0])
    assert torch.equal(guide.allowed(pruned), allowed)


def test_what_is_forced_is_allowed_and_spells_the_names_of_fields(guides: Guides) -> None:
    guide = guides.start(json_form(SCHEMA))
    forced = guide.forced(16)
    assert forced
    assert guide.forced(1) == forced[:1]
    assert guide.accepts(forced)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: json_form("{"), "JSON schema: is not JSON"),
        (lambda: json_form("[1]"), "JSON schema: is a list, not an object"),
        (lambda: choice_form([]), "choice: needs texts that are not empty"),
        (lambda: choice_form(["a", ""]), "choice: needs texts that are not empty"),
        (lambda: json_form({"type": "what"}), "JSON schema: "),
        (lambda: json_form("{", "form.json"), "form.json: is not JSON"),
        (lambda: regex_form("(a"), "regular expression: .*: unclosed group"),
    ],
)
def test_forms_that_make_no_sense_are_refused(guides: Guides, make: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        guides.start(make())


def test_a_form_is_checked_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cordillera.serving.language.language_model.read_model", lambda *_: 1 / 0)
    with pytest.raises(DataError, match="regular expression"):
        LanguageModel(folder).stream("the", form=regex_form("(a"))


def test_a_tokenizer_without_an_end_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="has no token that ends a text"):
        Guides(dataclasses.replace(load_tokenizer(folder), stop_ids=()))


def test_tokens_that_the_form_does_not_allow_are_refused(guides: Guides) -> None:
    guide = guides.start(choice_form(["yes"]))
    with pytest.raises(DataError, match="form: does not allow the tokens"):
        guide.add([guides.end])
