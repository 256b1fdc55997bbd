"""Trained drafters change how many passes a text takes, and nothing else; levels follow what drafters give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera.models.language.checkpoints.drafter_file import write_drafter
from cordillera.models.language.draft_model import DraftConfig, DraftModel
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.stages import LlamaStage
from cordillera.serving.language import draft_models, language_model
from cordillera.serving.language.draft_models import ModelDrafter, ModelDrafts
from cordillera.serving.language.engine import Engine, Generated
from cordillera.serving.language.generation import generate
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import DraftLevels, NGramDrafter, Speculation, joined
from cordillera.serving.language.speculation import DraftTree as Tree
from cordillera.training.language.drafting import DraftObjective
from cordillera.training.language.objectives import DraftingConfig
from tests.serving.test_speculation import CONTEXT, EXACT, FREE, GREEDY, HALF, VOCABULARY

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [("head", 1), ("head", 2), ("block", 2)]


def drafter_for(model: Llama, kind: Any = "head", layers: int = 1) -> DraftModel:
    config = model.config.model_copy(
        update={"draft": DraftConfig(kind=kind, layers=layers, length=5, vocabulary=VOCABULARY - 4)}
    )
    held = Llama(config)
    held.init_weights(7)
    assert held.draft is not None
    with torch.no_grad():
        for parameter in held.draft.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return held.draft.to(model.embedding.weight.dtype).requires_grad_(False)


def by(model: Llama, draft: DraftModel, *, also_ngram: bool = False) -> Speculation:
    drafts = ModelDrafts(draft, model)
    makers: list[Any] = [NGramDrafter, drafts.start] if also_ngram else [drafts.start]
    return Speculation(makers, FREE, drafts.taps)


def texts(found: list[Generated], count: int) -> list[list[int]]:
    return [[one.token for one in found if one.sequence == number] for number in range(count)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("model", [EXACT, HALF], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, top_p=1, seed=2)])
@pytest.mark.parametrize(("kind", "layers"), KINDS)
def test_texts_are_those_without_drafts(model: Llama, sampling: Sampling, kind: str, layers: int) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [1, 2]]
    plain = list(generate(model, prompts, 25, sampling=sampling))
    for also_ngram in (False, True):
        speculation = by(model, drafter_for(model, kind, layers), also_ngram=also_ngram)
        found = list(generate(model, prompts, 25, sampling=sampling, speculation=speculation))
        assert texts(found, 4) == texts(plain, 4)


def test_a_text_with_a_shared_beginning_is_drafted_from_where_it_was_read() -> None:
    """The features of a prompt that another text had read are not there; the second text is whole or begins alike."""
    prompt = [n % VOCABULARY for n in range(20)]
    speculation = by(HALF, drafter_for(HALF))
    engine = Engine(HALF, texts=1, speculation=speculation)
    plain = Engine(HALF, texts=1)
    for asked in (prompt, prompt, [*prompt[:18], 3]):
        found = []
        for own in (engine, plain):
            own.add(asked, 12, sampling=GREEDY)
            tokens = []
            while own.waiting or own.running:
                tokens += [one.token for one in own.step()]
            found.append(tokens)
        assert found[0] == found[1]
    assert engine.counts.shared_tokens > 0
    assert engine.counts.drafted > 0


def test_a_text_that_waits_outside_goes_on_with_its_drafter() -> None:
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8]]
    plain = list(generate(HALF, prompts, 30, sampling=GREEDY))
    engine = Engine(HALF, texts=3, room=48, speculation=by(HALF, drafter_for(HALF)))
    for number, prompt in enumerate(prompts):
        engine.add(prompt, 30, sampling=GREEDY.model_copy(update={"seed": number}))
    found = []
    while engine.waiting or engine.running:
        found += engine.step()
    assert texts(found, 3) == texts(plain, 3)
    assert engine.counts.set_aside > 0


def test_auto_takes_what_ships_for_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {}
    for name, model in (("own", HALF), ("other", Llama(HALF.config))):
        draft = drafter_for(HALF)
        tensors = {f"draft.{key}": value for key, value in draft.named_parameters()}
        weights = {**tensors, "embedding.weight": model.embedding.weight.detach()}

        class Held:
            config = HALF.config.model_copy(update={"draft": draft.config})
            path = tmp_path

            def read(self, key: str, out: torch.Tensor, weights: dict[str, torch.Tensor] = weights) -> None:
                out.copy_(weights[key])

        source: Any = Held()
        files[name] = tmp_path / f"{name}.safetensors"
        write_drafter(source, files[name], {})
    for shipped in ({"other": files["other"]}, {"other": files["other"], "own": files["own"]}):
        monkeypatch.setattr(language_model, "shipped_drafters", lambda shipped=shipped: shipped)
        found = language_model.drafters_for(HALF)
        assert [one and one.path.stem for one in found] == [None, *(["own"] if "own" in shipped else [])]
        speculation = language_model.make_speculation(HALF, found, FREE)
        assert len(speculation.drafters) == len(shipped)
        plain = list(generate(HALF, [[1, 2]], 9, sampling=GREEDY))
        assert texts(list(generate(HALF, [[1, 2]], 9, sampling=GREEDY, speculation=speculation)), 1) == texts(plain, 1)


def begun(drafts: ModelDrafts, prompts: list[list[int]]) -> list[ModelDrafter]:
    """Drafters of texts whose last token the model has not read."""
    found = []
    for prompt in prompts:
        taps = dict.fromkeys(drafts.taps, torch.empty(0))
        drafts.model.hidden(torch.tensor(prompt[:-1]), torch.tensor([0, len(prompt) - 1]), taps=taps)
        drafter = drafts.start()
        drafter.add(prompt)
        drafter.see(0, torch.cat(list(taps.values()), 1))
        found.append(drafter)
    return found


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (2 + n % 7,), generator=draws).tolist() for n in range(count)]


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "layers"), KINDS)
def test_texts_are_drafted_together_as_alone(monkeypatch: pytest.MonkeyPatch, kind: str, layers: int) -> None:
    monkeypatch.setattr(draft_models, "_WORTH", 0.0)  # a level is worth its time for all texts or for none
    draft, prompts = drafter_for(EXACT, kind, layers), prompts_of(12)
    together = ModelDrafts(draft, EXACT)
    depths = [1 + n % 6 for n in range(12)]
    order = [*range(5, 12), *range(5)]  # slots are given in another order than the one that is asked in
    drafters = begun(together, prompts)
    together.propose([drafters[n] for n in order], 15, 10**6, [depths[n] for n in order])
    for drafter in drafters:
        drafter.add([3])
    found = together.propose(drafters, 15, 10**6, depths)
    assert found == [Tree([], [], [])] * 12  # the features of the last token are not there
    for drafter in drafters:
        drafter.see(len(drafter._tokens) - 2, torch.ones(1, draft.fuse.in_features, dtype=torch.float64))
    found = together.propose(drafters, 15, 10**6, depths)
    for number, prompt in enumerate(prompts):
        apart = ModelDrafts(draft, EXACT)
        (alone,) = begun(apart, [prompt])
        alone.propose(15, depths[number])
        alone.add([3])
        alone.see(len(prompt) - 1, torch.ones(1, draft.fuse.in_features, dtype=torch.float64))
        apart._right, apart._tried = together._right, together._tried
        own = alone.propose(15, depths[number])
        tree = found[number]
        assert isinstance(tree, Tree)
        assert (tree.tokens, tree.parents) == (own.tokens, own.parents)
        assert tree.chances == pytest.approx(own.chances, rel=1e-9)


@torch.inference_mode()
def test_with_little_room_only_likely_tokens_are_gone_on_from() -> None:
    draft, prompts = drafter_for(EXACT), prompts_of(8)
    sizes = []
    for room in (2, 10**6):
        drafts = ModelDrafts(draft, EXACT)
        found = drafts.propose(begun(drafts, prompts), 15, room, [5] * 8)
        trees = [tree for tree in found if isinstance(tree, Tree)]
        assert len(trees) == 8
        best = sorted((chance for tree in trees for chance in tree.chances), reverse=True)[:2]
        sizes.append((sum(len(tree.tokens) for tree in trees), best))
    assert sizes[0][0] < sizes[1][0]
    assert sizes[0][1] == pytest.approx(sizes[1][1], rel=1e-9)


@torch.inference_mode()
def test_more_texts_than_there_is_memory_for_take_turns() -> None:
    draft, prompts = drafter_for(EXACT), prompts_of(40)
    drafts = ModelDrafts(draft, EXACT)
    drafters = begun(drafts, prompts)
    for first in (0, 20):
        found = drafts.propose(drafters[first : first + 20], 4, 100, [2] * 20)
        assert all(isinstance(tree, Tree) and tree.tokens for tree in found)
    assert sum(drafter.slot < 0 for drafter in drafters) == 8
    slots = [drafter.slot for drafter in drafters if drafter.slot >= 0]
    assert len(set(slots)) == len(slots) == 32
    del drafters[20:]  # the sequences of texts that ended are free
    for drafter in drafters:
        drafter.add([1])
        drafter.see(len(drafter._tokens) - 2, torch.ones(1, draft.fuse.in_features, dtype=torch.float64))
    assert all(isinstance(tree, Tree) and tree.tokens for tree in drafts.propose(drafters, 4, 100, [2] * 20))
    assert all(drafter.slot >= 0 for drafter in drafters)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["head", "block"])
def test_a_text_that_cannot_be_drafted_leaves_the_others(kind: str) -> None:
    drafts = ModelDrafts(drafter_for(EXACT, kind), EXACT)
    drafters = begun(drafts, prompts_of(4))
    drafters[2]._tapped[0][-1] = torch.nan
    found = drafts.propose(drafters, 15, 100, [3] * 4)
    assert [isinstance(tree, Exception) for tree in found] == [False, False, True, False]


def test_a_long_text_begins_anew_when_its_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_models, "_REMEMBERED", 8)
    speculation = by(HALF, drafter_for(HALF))
    plain = list(generate(HALF, [[1, 2, 3], [4]], 30, sampling=GREEDY))
    found = list(generate(HALF, [[1, 2, 3], [4]], 30, sampling=GREEDY, speculation=speculation))
    assert texts(found, 2) == texts(plain, 2)


@pytest.mark.parametrize("kind", ["head", "block"])
def test_a_drafter_with_nan_is_dropped_with_a_warning(kind: str) -> None:
    draft = drafter_for(EXACT, kind)
    with torch.no_grad():
        draft.fuse.weight[0, 0] = torch.nan
    plain = list(generate(EXACT, [[1, 2]], 8, sampling=GREEDY))
    with pytest.warns(UserWarning, match="goes on without a drafter"):
        found = list(generate(EXACT, [[1, 2]], 8, sampling=GREEDY, speculation=by(EXACT, draft)))
    assert found == plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "block"])
def test_a_drafter_learns_what_its_model_writes(kind: Any) -> None:
    """A model that was taught to count is drafted after a short training, most of a tree right at each pass."""
    torch.manual_seed(0)
    config = LlamaConfig(
        layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=96, vocabulary=17, context=CONTEXT, tied=True,
        draft=DraftConfig(kind=kind, length=4, vocabulary=17),
    )  # fmt: skip
    model = Llama(config)
    model.init_weights(1)
    starts = torch.arange(17)
    tokens = ((starts[:, None] * 3 + torch.arange(24) * 5) % 17).flatten()
    offsets = 24 * torch.arange(18)
    labels = torch.cat([tokens[1:], tokens[:1]]).index_fill(0, offsets[1:] - 1, -100)
    stage = LlamaStage(model)
    for objective, weights in ((None, False), (DraftObjective(DraftingConfig()), True)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("draft.") == weights)
        stage.objective = objective
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
        for _ in range(60):
            (stage(tokens, offsets, None, labels) / len(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.requires_grad_(False)
    assert model.draft is not None
    plain = list(generate(model, [[2, 7, 12]], 30, sampling=GREEDY))
    found = list(generate(model, [[2, 7, 12]], 30, sampling=GREEDY, speculation=by(model, model.draft)))
    assert [one.token for one in found] == [one.token for one in plain]
    assert len(plain) / (1 + found[-1].forward) > 2.5


def test_trees_are_laid_over_each_other() -> None:
    first = Tree([1, 2, 3], [-1, 0, 0], [0.5, 0.4, 0.1])
    second = Tree([4, 1, 2], [-1, -1, 1], [0.7, 0.3, 0.2])
    found = joined([first, second], 4)
    assert found == Tree([4, 1, 2, 3], [-1, -1, 1, 1], [0.7, 0.5, 0.4, 0.1])
    assert joined([first, second], 2) == Tree([4, 1], [-1, -1], [0.7, 0.5])
    assert joined([Tree([], [], []), first], 9) is first


class Clock:
    """Levels beside drafters and passes that take as long as told."""

    def __init__(self, drafters: int) -> None:
        self.costs = [1.0 + 0.05 * row for row in range(32)]
        self.levels, self.asked = DraftLevels(drafters, self.costs), list[int]()

    def run(self, passes: int, texts: int, gains: list[float], drafting: list[float], load: float = 1.0) -> list[int]:
        """Levels of passes; ``gains`` are further tokens of a text by level, ``drafting`` the times of a text."""
        found = []
        for _ in range(passes):
            level = self.levels.choose(texts)
            rows = texts * (1 if not level else 3)
            passing = load * self.costs[rows - 1]
            self.levels.note(texts, level, rows, texts * (1 + gains[level]), texts * drafting[level], passing)
            found.append(level)
        return found


def test_a_drafter_that_gives_more_than_it_takes_is_asked() -> None:
    clock = Clock(2)
    found = clock.run(200, 1, [0, 0.3, 1.0], [0, 0.01, 0.1])
    assert found.count(2) > 170
    assert found.count(0) < 12
    # beside many texts its time is too long, and the cheaper one is asked
    found = clock.run(200, 8, [0, 1.0, 1.1], [0, 0.001, 0.3])
    assert found[-60:].count(1) > 50
    # other numbers of texts begin with what is known
    assert [clock.levels.choose(16) for _ in range(5)][3:] == [1, 1]  # after those that are tried again


def test_a_machine_that_is_busy_for_a_while_changes_no_choice() -> None:
    clock = Clock(1)
    clock.run(100, 2, [0, 0.4], [0, 0.02])
    found = clock.run(200, 2, [0, 0.4], [0, 0.02 * 9], 9.0)
    assert found.count(1) >= 190


@pytest.mark.parametrize("load", [1.0, 7.0])
def test_without_a_gain_nothing_is_drafted_and_it_is_tried_again(load: float) -> None:
    """However much longer passes take at present than when they were measured."""
    clock = Clock(1)
    found = clock.run(200, 4, [0, 0.02], [0, 0.1 * load], load)
    assert found[-64:].count(0) >= 60
    assert found[-64:].count(1) >= 1
    found = clock.run(400, 4, [0, 2.0], [0, 0.1 * load], load)
    assert found[-60:].count(1) >= 58


def test_more_texts_than_costs_are_known_for_get_no_drafts() -> None:
    assert DraftLevels(1, FREE).choose(33) == 0
