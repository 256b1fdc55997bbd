"""Runs of post-training: answers, rewards, preferences, groups of samples, on a model that can already answer."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import cordillera
from cordillera import workflows
from cordillera.data.language.chats.corpora import prepare_chats
from cordillera.data.tokenizers.chat import Message
from cordillera.errors import (
    CheckpointError,
    CordilleraError,
    DataError,
    Interrupted,
    PlanError,
    RecipeError,
    RunError,
)
from cordillera.models.language.checkpoints import load, save_hugging_face
from cordillera.models.language.checkpoints.sharded import OPTIMIZER
from cordillera.recipe import dump, validate
from cordillera.recipe import load as load_recipe
from cordillera.run import Run
from cordillera.serving.language.reward_model import RewardModel
from cordillera.training.language.engine import LanguageEngine
from cordillera.workflows.post_training import groups
from cordillera.workflows.post_training.sampling import SampledAnswer
from tests.distributed.processes import needs_gloo
from tests.training.post_training_runs import SIZES, facts, newest, post_recipe, same, train, weights

OBJECTIVES = ("sft", "reward", "dpo", "grpo", "draft")
MOSTLY = [pytest.param(name, marks=() if name == "dpo" else pytest.mark.slow) for name in OBJECTIVES]
"""All objectives, of which a usual run takes one."""

ADAPTER = {"adapter": {"rank": 4, "layers": ["query", "value", "down"]}}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))


def losses(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.metrics() if record["kind"] == "train"]


# Ends and beginnings


@pytest.mark.parametrize(
    "name", ["dpo", "grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sft", "reward", "draft"))]
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(begun: Path, name: str) -> None:
    more = {"objective": {"kl": 0.1}} if name == "grpo" else {}
    recipe = post_recipe(begun, name, begun / "start", training={"steps": 3, "evaluate_every": 2}, **more)
    whole = train(recipe, "whole").run
    stopped = train(recipe, "stopped", stop_at=1)
    assert (stopped.report.ended, stopped.report.progress.step) == ("interrupted", 2)
    assert workflows.train(stopped.run).report.ended == "finished"
    for kind in ("weights", OPTIMIZER):
        assert same(weights(whole, kind), weights(stopped.run, kind))
    assert facts(whole) == facts(stopped.run)
    assert not same(weights(whole), weights(begun / "start"))


def test_preferences_go_on_with_the_reference_that_was_computed_first(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun / "start", tmp_path / "start")
    recipe = post_recipe(begun, "dpo", tmp_path / "start", training={"steps": 3})
    run = train(recipe, "a", stop_at=1).run
    (tmp_path / "start").rename(tmp_path / "moved")
    path = run.folder / "reference.safetensors"
    values = path.read_bytes()
    path.unlink()
    with pytest.raises(RunError, match=r"(?s)reference\.safetensors.*cannot be read.*start a new run"):
        workflows.train(run)
    path.write_bytes(values[:-8])
    with pytest.raises(RunError, match="cannot be read"):
        workflows.train(run)
    path.write_bytes(values)
    assert workflows.train(run).report.ended == "finished"
    assert path.read_bytes() == values


def test_preferences_go_on_with_the_pairs_that_have_a_reference_and_no_fewer_steps(begun: Path) -> None:
    data, training = {"held_out": 0.5}, {"steps": 3, "decay": "none", "evaluation_tokens": 130}
    run = train(post_recipe(begun, "dpo", begun / "start", data=data, training=training), "a", stop_at=1).run
    assert run.status().step == 2
    with pytest.raises(RunError, match=r"training\.evaluation_tokens: 130 -> 9999"):
        workflows.train(run, changes=["training.evaluation_tokens=9999"])
    with pytest.raises(RunError, match=r"is at step 2, beyond training\.steps, 1"):
        workflows.train(run, changes=["training.steps=1"])
    assert workflows.train(run, changes=["training.steps=2"]).report.ended == "finished"


def test_the_reference_is_the_log_probability_of_each_answer_under_the_start(begun: Path) -> None:
    recipe = post_recipe(begun, "dpo", begun / "start", training={"steps": 12}, data={"held_out": 0.3})
    found = load_file(train(recipe, "a").run.folder / "reference.safetensors")
    corpora = prepare_chats(recipe.data, "preferences")
    _, model = load(newest(begun / "start"))
    for name, items in (("training", corpora.training), ("held_out", corpora.held_out)):
        assert found[name].shape == (len(items), 2)
        for item, values in zip(items, found[name].tolist(), strict=True):
            for chat, value in zip(item, values, strict=True):
                tokens = torch.from_numpy(chat.tokens).long()
                rows = model(tokens, torch.tensor([0, len(tokens)])).log_softmax(1)
                own = [float(rows[place - 1, tokens[place]]) for place in range(len(tokens)) if chat.kinds[place] == 1]
                assert value == pytest.approx(sum(own), abs=1e-3)


def test_a_request_to_stop_is_heard_before_the_first_step(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = {"tokens": 64, "context": 64, "bound": 128}
    recipe = post_recipe(begun, "dpo", begun / "start", packing=packing, training={"steps": 2})
    compute, calls = LanguageEngine.log_probabilities, [0]

    def asked(engine: LanguageEngine, one: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(engine, one)

    monkeypatch.setattr(LanguageEngine, "log_probabilities", asked)
    with pytest.raises(Interrupted, match=r"\d of \d+ pairs .*\n.*cordillera train stopped --resume"):
        train(recipe, "stopped")
    assert calls == [2]
    stopped = workflows.train(Run("stopped"))
    assert stopped.report.ended == "finished"
    assert same(weights(stopped.run), weights(train(recipe, "whole").run))


def test_pairs_without_a_reference_are_not_learnt_from(begun: Path) -> None:
    few = {"packing": {"tokens": 64, "context": 64, "bound": 128}, "data": {"held_out": 0}}
    run = train(post_recipe(begun, "dpo", begun / "start", training={"steps": 1, "decay": "none"}, **few), "a").run
    text = run.recipe_file.read_text()
    run.recipe_file.write_text(text.replace("\nsteps = 1\n", "\nsteps = 8\n"))
    with pytest.raises(RunError, match=r"no log-probabilities of the reference for .* pairs, which the first 8 steps"):
        workflows.train(run)
    run.recipe_file.write_text(text)
    assert workflows.train(run).report.ended == "finished"


def test_a_start_that_is_no_number_is_refused(begun: Path, tmp_path: Path) -> None:
    _, model = load(newest(begun / "start"))
    with torch.no_grad():
        model.layers[0].feed_forward.up.weight[3, 2] = torch.nan
    save_hugging_face(model, tmp_path / "broken")
    for name in OBJECTIVES:
        recipe = post_recipe(begun, name, tmp_path / "broken", data={"tokenizer": "bytes"})
        with pytest.raises(CheckpointError, match=r"up_proj\.weight holds NaN or infinity"):
            train(recipe, name)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_that_is_not_finite_is_skipped(begun: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update = LanguageEngine.update

    def broken(engine: LanguageEngine, loss: float, *given: Any) -> Any:
        return update(engine, math.nan if engine.steps == 2 else loss, *given)

    monkeypatch.setattr(LanguageEngine, "update", broken)
    run = train(post_recipe(begun, name, begun / "start", training={"steps": 3, "log_every": 1}), "a").run
    assert [record["step"] for record in run.metrics() if record["kind"] == "skipped"] == [2]
    assert [record["step"] for record in losses(run) if record["loss"] is not None] == [1, 3]


# Answers


@pytest.mark.slow
def test_chats_are_learnt_the_same_in_any_microbatches(begun: Path) -> None:
    changed = [{"packing": {"tokens": 256, "microbatches": count}} for count in (4, 9)]
    runs = [
        train(post_recipe(begun, "sft", begun / "start", **one), f"{place}").run for place, one in enumerate(changed)
    ]
    for one, other in zip(losses(runs[0]), losses(runs[1]), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["targets"] == other["targets"]
    for name, tensor in weights(runs[0]).items():
        torch.testing.assert_close(weights(runs[1])[name], tensor, rtol=0, atol=1e-5)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"shard": 2}, {"replicate": 2}, {"pipeline": 2}, {"tensor": 2}, {"context": 2}])
def test_two_processes_learn_chats_as_one_does(begun: Path, parallel: dict[str, int]) -> None:
    """Each of the meshes of two processes."""
    sizes = SIZES | {"layers": 2, "kv_heads": 2}
    common: dict[str, Any] = {"model": sizes, "packing": {"tokens": 256, "microbatches": 4}}
    alone = train(post_recipe(begun, **common), "alone").run
    both = train(post_recipe(begun, **common, parallel=parallel), "both").run
    for one, other in zip(losses(alone), losses(both), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    merged = dict(load(newest(both))[1].named_parameters())
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(merged[name].detach(), tensor, rtol=0, atol=1e-5)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"shard": 2},
        {"replicate": 2},
        {"context": 2},
        {"pipeline": 2},
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"recompute": "full"},
        {"recompute": "selective"},
    ],
)
def test_adapters_are_trained_on_any_mesh_as_in_one_process(begun: Path, parallel: dict[str, Any]) -> None:
    common: dict[str, Any] = {"model": SIZES | {"layers": 2} | ADAPTER, "packing": {"tokens": 256, "microbatches": 4}}
    alone = train(post_recipe(begun, **common), "alone").run
    both = train(post_recipe(begun, **common, parallel=parallel), "both").run
    for one, other in zip(losses(alone), losses(both), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    ours, theirs = (dict(load(newest(run))[1].named_parameters()) for run in (alone, both))
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name].detach(), tensor.detach(), rtol=0, atol=1e-5)


# Rewards


@pytest.mark.parametrize("adapter", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_reward_model_scores_as_it_was_trained(begun: Path, adapter: bool) -> None:
    model = ADAPTER if adapter else {}
    recipe = post_recipe(begun, "reward", begun / "start", model=model, training={"steps": 8}, data={"held_out": 0.4})
    done = train(recipe, "a")
    judge = RewardModel("a")
    rows = [json.loads(line) for line in (begun / "pairs.jsonl").read_text().splitlines()]
    tokenised = {tuple(item[0].tokens.tolist()) for item in prepare_chats(recipe.data, "preferences").held_out}
    chats = [
        [(Message("user", row["prompt"]), Message("assistant", row[kind])) for row in rows]
        for kind in ("chosen", "rejected")
    ]
    scores = [judge.score(one) for one in chats]
    is_held = [tuple(_tokens(judge, chat)) in tokenised for chat in chats[0]]
    margins = [own - other for own, other, held in zip(*scores, is_held, strict=True) if held]
    measures = done.report.evaluation.measures
    assert len(margins) == done.report.evaluation.targets > 4
    assert measures["margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert measures["accuracy"] == sum(margin > 0 for margin in margins) / len(margins)
    assert done.report.evaluation.loss == pytest.approx(
        sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins), abs=1e-5
    )
    assert judge.score(chats[0][:1]) == pytest.approx(scores[0][:1], abs=1e-5)


def _tokens(judge: RewardModel, chat: tuple[Message, ...]) -> list[int]:
    from cordillera.data.language.chats.tokens import tokenise_chat

    return tokenise_chat(judge.tokenizer, chat).tokens.tolist()


def test_a_reward_model_prefers_what_it_learnt_to_prefer(begun: Path) -> None:
    rows = [{"prompt": f"{number}?", "chosen": "far", "rejected": "near"} for number in range(20)]
    Path("taste.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": "taste.jsonl", "held_out": 0.2}
    found = train(post_recipe(begun, "reward", begun / "start", data=data, training={"steps": 10}), "a")
    assert found.report.evaluation.measures["accuracy"] == 1
    assert found.report.evaluation.loss < 0.5
    better, worse = RewardModel("a").score(
        [(Message("user", "100?"), Message("assistant", answer)) for answer in ("far", "near")]
    )
    assert better > worse


def test_a_reward_model_gives_no_text_and_others_no_scores(begun: Path) -> None:
    train(post_recipe(begun, "reward", begun / "start", training={"steps": 1}), "a")
    with pytest.raises(DataError, match="is a reward model, which gives scores and no text"):
        cordillera.load_language_model("a")
    with pytest.raises(DataError, match=r"(?s)is no reward model.*objective\.name = 'reward'"):
        RewardModel(begun / "start")
    judge = RewardModel("a")
    with pytest.raises(DataError, match=r"chat 1: has .* tokens, the context is 64"):
        judge.score([[Message("assistant", "a")], [Message("assistant", "a" * 80)]])
    with pytest.raises(DataError, match="no turn of the assistant"):
        judge.score([[Message("user", "a")]])
    with torch.no_grad():
        judge.model.score.weight.fill_(torch.inf)
    with pytest.raises(DataError, match="a score is not finite"):
        judge.score([[Message("assistant", "a")]])


# Preferences


@pytest.mark.parametrize("ends", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_preferences_begin_at_the_logarithm_of_two_and_the_likelihood(begun: Path, ends: bool) -> None:
    still = {"steps": 2, "learning_rate": 0.0, "log_every": 1}
    runs = [
        train(
            post_recipe(begun, "dpo", begun / "start", objective={"nll": nll, "ends": ends}, training=still), f"{nll}"
        )
        for nll in (0.0, 0.5)
    ]
    plain, weighed = (losses(outcome.run) for outcome in runs)
    assert [record["loss"] for record in plain] == pytest.approx([math.log(2)] * 2, abs=1e-6)
    assert all(abs(record["margin"]) < 1e-5 for record in plain)
    corpora = prepare_chats(post_recipe(begun, "dpo", begun / "start").data, "preferences")
    _, model = load(newest(begun / "start"))
    counted = (1, 2) if ends else (1,)
    means = []
    for chosen, _ in corpora.held_out:
        tokens = torch.from_numpy(chosen.tokens).long()
        rows = model(tokens, torch.tensor([0, len(tokens)])).log_softmax(1)
        own = [
            float(rows[place - 1, tokens[place]]) for place in range(1, len(tokens)) if chosen.kinds[place] in counted
        ]
        means.append(sum(own) / len(own))
    expected = math.log(2) - 0.5 * sum(means) / len(means)
    assert runs[1].report.evaluation.loss == pytest.approx(expected, abs=1e-5)
    assert weighed[0]["chosen_log_probability"] == pytest.approx(plain[0]["chosen_log_probability"], abs=1e-4)


@pytest.mark.slow
def test_the_likelihood_keeps_what_is_chosen_likely(begun: Path) -> None:
    data = {"path": str(begun / "alike.jsonl"), "held_out": 0}
    training = {"steps": 16, "log_every": 1, "learning_rate": 1e-3, "weight_decay": 0.0, "decay": "none"}
    found = {}
    for nll in (0.0, 0.5):
        recipe = post_recipe(
            begun, "dpo", begun / "start", objective={"nll": nll}, data=data, training=training, packing={"tokens": 512}
        )
        first, *_, last = losses(train(recipe, f"{nll}").run)
        assert last["margin"] > first["margin"] == pytest.approx(0, abs=1e-4)
        found[nll] = last["chosen_log_probability"] - first["chosen_log_probability"]
    assert found[0.0] < -1
    assert found[0.5] > -0.3


# Groups of samples


@pytest.mark.slow
def test_groups_of_samples_learn_to_solve_problems(begun: Path) -> None:
    objective = {"samples": 8, "problems": 4}
    training = {"steps": 12, "log_every": 1, "learning_rate": 3e-3, "weight_decay": 0.0}
    done = train(post_recipe(begun, "grpo", begun / "start", objective=objective, training=training), "a")
    rewards = [record["reward"] for record in losses(done.run)]
    assert 0.1 < rewards[0] < 0.9
    assert rewards[-1] > rewards[0] + 0.1
    assert done.report.evaluation.measures["solved"] == 1 - done.report.evaluation.loss == 1
    assert all(record["clipped"] == 0 and record["drift"] < 1e-4 for record in losses(done.run))


@pytest.mark.slow
def test_two_trainings_on_groups_of_samples_are_equal_bit_for_bit(begun: Path) -> None:
    runs = [train(post_recipe(begun, "grpo", begun / "start"), name).run for name in "ab"]
    other = train(post_recipe(begun, "grpo", begun / "start", seed=2), "c").run
    assert same(weights(runs[0]), weights(runs[1]))
    assert facts(runs[0]) == facts(runs[1])
    assert not same(weights(runs[0]), weights(other))


def test_an_answer_that_does_not_end_solves_nothing(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in training nor in an evaluation, though its last number so far is right."""
    cut = SampledAnswer([49], [0.0], "1", is_whole=False)
    monkeypatch.setattr(
        groups, "sample_answers", lambda model, tokenizer, prompts, most, samplings: [cut] * len(prompts)
    )
    run = train(post_recipe(begun, "grpo", begun / "start", training={"steps": 1, "log_every": 1}), "a").run
    assert run.read_json("evaluation.json")["measures"]["solved"] == 0
    assert losses(run)[-1]["reward"] == 0


@pytest.mark.parametrize("model", [{}, ADAPTER])
def test_groups_of_samples_begin_without_divergence(begun: Path, model: dict[str, Any]) -> None:
    training = {"steps": 2, "log_every": 1, "learning_rate": 1e-2}
    recipe = post_recipe(begun, "grpo", begun / "start", objective={"kl": 0.1}, model=model, training=training)
    first, *others = losses(train(recipe, "a").run)
    assert first["divergence"] == pytest.approx(0, abs=1e-6)
    assert max(record["divergence"] for record in others) > 10 * max(first["divergence"], 1e-7)
    assert all(record["divergence"] >= 0 for record in others)


def test_problems_longer_than_the_context_are_refused(begun: Path) -> None:
    Path("long.jsonl").write_text(json.dumps({"prompt": "a" * 80, "answer": "1"}) + "\n")
    recipe = post_recipe(begun, "grpo", begun / "start", data={"path": "long.jsonl", "held_out": 0})
    with pytest.raises(DataError, match="context"):
        train(recipe, "a")


# Adapters


def test_only_adapters_and_the_scores_change(begun: Path) -> None:
    before, short = weights(begun / "start"), {"steps": 1}
    learnt = weights(train(post_recipe(begun, "draft", begun / "start", training=short), "draft").run)
    assert {key for key in learnt if key not in before} == {key for key in learnt if key.startswith("draft.")}
    assert all(torch.equal(learnt[key], before[key]) for key in before)
    for name in OBJECTIVES[:4]:
        recipe = post_recipe(begun, name, begun / "start", model=ADAPTER, training=short)
        after = weights(train(recipe, name).run)
        thin = {key for key in after if key.endswith((".narrow", ".wide"))}
        assert len(thin) == 6
        assert after.keys() - thin == (before.keys() - {"head.weight"} if name == "reward" else before.keys()) | (
            {"score.weight"} if name == "reward" else set()
        )
        for key in after.keys() & before.keys():
            assert torch.equal(after[key], before[key]), key
        assert all(after[key].any() for key in thin)


def test_a_run_with_adapters_opens_merged_and_others_begin_with_it(begun: Path) -> None:
    recipe = post_recipe(begun, "sft", begun / "start", model=ADAPTER, training={"learning_rate": 1e-2})
    run = train(recipe, "a").run
    held = weights(run)
    assert run.read_json("model.json")["parameters"] == sum(tensor.numel() for tensor in held.values())
    opened = cordillera.load_language_model("a", dtype="float32")
    merged = dict(opened.model.named_parameters())
    assert not [name for name in merged if name.endswith((".narrow", ".wide"))]
    scale = 16 / 4
    for name, tensor in merged.items():
        thin = name.removesuffix("weight")
        expected = held[name]
        if f"{thin}wide" in held:
            product = held[f"{thin}wide"].double() @ held[f"{thin}narrow"].double()
            expected = (expected.double() + scale * product).float()
            assert not torch.equal(tensor, held[name])
        torch.testing.assert_close(tensor.detach(), expected, rtol=0, atol=1e-6)
    still = {"learning_rate": 0.0, "steps": 1}
    plain = train(post_recipe(begun, "sft", "a", training=still), "plain").run
    assert same(weights(plain), {name: tensor.detach() for name, tensor in merged.items()})
    again = train(post_recipe(begun, "sft", "a", training=still, model={"adapter": {"rank": 2}}), "again").run
    renewed = weights(again)
    for name, tensor in merged.items():
        assert torch.equal(renewed[name], tensor)
    assert not any(tensor.any() for name, tensor in renewed.items() if name.endswith(".wide"))


# Recipes


@pytest.mark.parametrize(
    ("name", "changes", "kind", "said"),
    [
        ("dpo", {"training": {"start": None}}, RecipeError, r"training\.start: is missing: dpo needs a model"),
        ("grpo", {"training": {"start": None}}, RecipeError, r"training\.start: is missing: grpo needs a model"),
        ("draft", {"training": {"start": None}}, RecipeError, r"training\.start: is missing: draft needs a model"),
        ("draft", {"model": {"draft": None}}, RecipeError, r"model\.draft: describes the drafter of objective\.name"),
        ("sft", {"model": {"draft": {"vocabulary": 9}}}, RecipeError, r"model\.draft: .* and goes with no other"),
        ("draft", {"parallel": {"shard": 2}}, PlanError, "muon needs whole matrices, the mesh has 2 processes"),
        ("sft", {"model": {"scores": True}}, RecipeError, r"model\.scores: are learnt by .*'reward', not by sft"),
        ("sft", {"packing": {"method": "fixed"}}, RecipeError, r"packing\.method: must not be fixed"),
        ("dpo", {"packing": {"method": "fixed"}}, RecipeError, r"packing\.method: must not be fixed"),
        ("sft", {"data": {"max_length": 65}}, RecipeError, r"data\.max_length: is above packing\.context, 64"),
        ("sft", {"data": {"max_length": 90}, "packing": {"context": 90}}, RecipeError, "the model's context is 64"),
        (
            "sft",
            {"model": {"kv_heads": 2, **ADAPTER}, "parallel": {"tensor": 2}},
            PlanError,
            r"parallel\.tensor: adapters are not split",
        ),
        ("grpo", {"parallel": {"shard": 2}}, PlanError, "objective: grpo is trained in one process, the mesh has 2"),
        ("dpo", {"parallel": {"replicate": 2}}, PlanError, "objective: dpo is trained in one process, the mesh has 2"),
        (
            "reward",
            {"parallel": {"shard": 3}},
            PlanError,
            "objective: reward is trained in one process, the mesh has 3",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    begun: Path, name: str, changes: dict[str, Any], kind: type[CordilleraError], said: str
) -> None:
    settings: dict[str, Any] = {"model": SIZES, "data": {"tokenizer": "bytes"}}
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    with pytest.raises(kind, match=said):
        train(post_recipe(begun, name, begun / "start", **settings), "a")
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": {"name": "ppo"}}, r"objective\.name: must be one of sft, reward, dpo, grpo, draft, got 'ppo'"),
        ({"objective": "dpo"}, "objective: "),
        ({"objective": {"name": "dpo", "beta": 0}}, r"objective\.beta: must be above 0"),
        ({"objective": {"name": "dpo", "nll": -1}}, r"objective\.nll: must be at least 0"),
        ({"objective": {"name": "dpo", "ends": "perhaps"}}, r"objective\.ends: "),
        ({"objective": {"name": "grpo", "samples": 1}}, r"objective\.samples: must be at least 2"),
        ({"objective": {"name": "grpo", "clip": 0}}, r"objective\.clip: "),
        ({"objective": {"name": "sft", "beta": 0.1}}, r"objective\.beta: is not a key here"),
        ({"objective": {"name": "dpo", "bta": 0.1}}, r"objective\.bta: .*beta"),
        ({"data": {"documents": 3}}, r"data\.documents"),
        ({"data": {"max_length": 1}}, r"data\.max_length"),
        ({"model": {"adapter": {"rank": 0}}}, r"model\.adapter\.rank"),
        ({"model": {"adapter": {"layers": ["head"]}}}, r"model\.adapter\.layers"),
        ({"model": {"adapter": {}, "experts": {"count": 4}}}, "adapter: layers of experts have none"),
        ({"model": {"name": "dcn"}}, "objective"),
    ],
)
def test_values_that_are_none_are_named(begun: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        post_recipe(begun, **changes)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("adapter", [False, True])
def test_a_recipe_that_is_shown_is_the_same_recipe(begun: Path, tmp_path: Path, name: str, adapter: bool) -> None:
    recipe = post_recipe(begun, name, begun / "start", model=ADAPTER if adapter and name != "draft" else {})
    for comments in (False, True):
        (tmp_path / "shown.toml").write_text(dump(recipe, comments=comments))
        assert load_recipe(tmp_path / "shown.toml") == recipe
    assert validate(load_recipe(tmp_path / "shown.toml").model_dump(mode="json", by_alias=True)) == recipe


def test_a_drafter_needs_its_objective_and_fits_its_model(begun: Path) -> None:
    recipe = load_recipe("llama-debug", ["model.draft.vocabulary=200"])
    with pytest.raises(RecipeError, match=r"model\.draft: is learnt by objective\.name = 'draft' alone"):
        workflows.train(recipe, "alone")
    with pytest.raises(RecipeError, match=r"draft\.vocabulary \(16384\) is above the model's 264"):
        load_recipe("llama-debug", ["model.draft.length=3"])
    with pytest.raises(RecipeError, match=r"draft\.taps: the model's layers are 0 to 3"):
        load_recipe("llama-debug", ["model.draft.vocabulary=200", "model.draft.taps=[4]"])


def test_scores_and_adapters_of_a_start_are_not_taken_over(begun: Path) -> None:
    train(post_recipe(begun, "reward", begun / "start", model=ADAPTER, training={"steps": 1}), "scores")
    train(post_recipe(begun, "sft", begun / "start", model=ADAPTER, training={"steps": 1}), "thin")
    assert post_recipe(begun, "sft", "thin").model.adapter is None
    assert post_recipe(begun, "reward", "scores").model.scores
    for name in ("sft", "dpo", "grpo"):
        recipe = post_recipe(begun, name, "scores")
        with pytest.raises(CheckpointError, match=r"training\.start, scores: is a reward model"):
            train(recipe, name)


def test_scores_without_an_objective_are_refused(begun: Path) -> None:
    Path("text.txt").write_text("far sea " * 200)
    content = {
        "data": {"path": "text.txt", "tokenizer": "bytes", "held_out": 0},
        "packing": {"tokens": 64, "context": 64},
        "model": {"name": "llama", **SIZES, "scores": True},
        "training": {"steps": 1},
    }
    with pytest.raises(RecipeError, match=r"model\.scores"):
        train(validate({"device": "cpu", "threads": 1, **content}), "a")


@pytest.mark.parametrize("name", MOSTLY)
def test_evaluating_a_run_finds_what_training_found(begun: Path, name: str) -> None:
    run = train(post_recipe(begun, name, begun / "start", training={"steps": 2}), "a").run
    before = {**run.read_json("evaluation.json"), "seconds": 0}
    (run.folder / "evaluation.json").unlink()
    found = workflows.evaluate(run)
    assert {**run.read_json("evaluation.json"), "seconds": 0} == before
    assert found.loss == before["loss"]
    assert bool(found.measures) == (name != "sft")


@pytest.mark.parametrize("name", MOSTLY[:3])
def test_an_evaluation_takes_no_more_tokens_than_asked(begun: Path, name: str) -> None:
    data, training = {"held_out": 0.5}, {"steps": 2, "evaluation_tokens": 130}
    packing = {"tokens": 64, "context": 64, "bound": 128}
    recipe = post_recipe(begun, name, begun / "start", data=data, training=training, packing=packing)
    run = train(recipe, "a").run
    few = run.read_json("evaluation.json")["targets"]
    assert workflows.evaluate(run).targets == few
    assert workflows.evaluate(run, tokens=1).targets < few
    if name == "dpo":
        with pytest.raises(RunError, match=r"reference for \d of \d+ pairs to evaluate on"):
            workflows.evaluate(run, tokens=10**9)
    else:
        assert workflows.evaluate(run, tokens=10**9).targets > 1.5 * few


def test_an_evaluation_of_problems_has_no_number_of_tokens(begun: Path) -> None:
    run = Run.create("a", dump(post_recipe(begun, "grpo", begun / "start")))
    with pytest.raises(RunError, match=r"tokens: has no effect with grpo\n  -> leave it out"):
        workflows.evaluate(run, tokens=100)


def test_preferences_begin_alike_in_an_emulated_format(begun: Path) -> None:
    still = {"steps": 1, "learning_rate": 0.0, "emulate": {"format": "bf16"}}
    run = train(post_recipe(begun, "dpo", begun / "start", objective={"nll": 0.0}, training=still), "a").run
    (record,) = losses(run)
    assert record["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert record["margin"] == pytest.approx(0, abs=1e-6)
