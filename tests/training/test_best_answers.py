"""Answers weighed by a reward: the best of several, one model beside another; and means of models."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.language.chats.rows import read_chats, read_preferences
from cordillera.data.tokenizers.chat import Message
from cordillera.errors import CheckpointError, DataError
from cordillera.intervals import wilson_interval
from cordillera.models.language.checkpoints import load, save_hugging_face
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.serving.language.language_model import LanguageModel
from cordillera.workflows.post_training import answers
from cordillera.workflows.post_training.averaging import average
from tests.training.post_training_runs import SIZES, newest, post_recipe, train


class Judge:
    """A reward of texts that stands for a model's: the longer the answer, and more for a 1."""

    def __init__(self, name: object) -> None:
        self.calls: list[list[str]] = []

    @staticmethod
    def reward(text: str) -> float:
        return len(text) + 10.0 * text.count("1")

    def score(self, chats: Sequence[Sequence[Message]]) -> list[float]:
        assert all(chat[-1].role == "assistant" for chat in chats)
        return [self.reward(chat[-1].content) for chat in chats]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: Path) -> Path:
    """Folder with a few prompts, where a stub judges answers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "RewardModel", Judge)
    lines = (begun / "problems.jsonl").read_text().splitlines()[:5]
    Path("prompts.jsonl").write_text("\n".join(lines) + "\n")
    return begun / "start"


def best(model: Path, file: str = "best.jsonl", **more: Any) -> answers.BestOf:
    settings = {"samples": 4, "max_new_tokens": 6, "dtype": "float32", "temperature": 2.0, "seed": 7} | more
    return answers.best_of(model, "reward", "prompts.jsonl", file, **settings)


def rows(file: str = "best.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@settings(max_examples=60)
@given(
    rewards=st.lists(st.one_of(st.integers(-3, 3), st.floats(-5, 5)).map(float), min_size=1, max_size=8),
    data=st.data(),
)
def test_the_expected_best_is_the_mean_over_all_subsets(rewards: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(rewards)))
    subsets = [max(one) for one in itertools.combinations(rewards, count)]
    expected = statistics.fmean(subsets)
    assert answers.expected_best(rewards, count) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_best_of_disjoint_groups_is_as_good_as_expected() -> None:
    generator = random.Random(3)
    rewards = [generator.gauss(0, 1) for _ in range(4000)]
    for count in (1, 2, 4, 16):
        groups = [max(rewards[first : first + count]) for first in range(0, len(rewards), count)]
        error = statistics.stdev(groups) / math.sqrt(len(groups))
        assert abs(statistics.fmean(groups) - answers.expected_best(rewards, count)) < 4 * error + 1e-9


@pytest.mark.parametrize("count", [0, 4, -1])
def test_more_than_there_are_cannot_be_drawn(count: int) -> None:
    with pytest.raises(DataError, match=f"count: {count} cannot be drawn from 3 rewards"):
        answers.expected_best([1.0, 2.0, 3.0], count)


def test_the_divergence_of_the_best_is_bounded() -> None:
    assert answers.best_of_divergence(1) == 0
    assert answers.best_of_divergence(16) == pytest.approx(math.log(16) - 15 / 16)


def test_the_best_answer_to_each_prompt_is_written_and_the_worst_beside_it(judged: Path) -> None:
    told: list[tuple[int, int]] = []
    found = best(judged, on_answer=lambda *done: told.append(done))
    assert told == [(place, 5) for place in range(1, 6)]
    assert (found.prompts, found.samples, found.file) == (5, 4, Path("best.jsonl"))
    prompts = [json.loads(line)["prompt"] for line in Path("prompts.jsonl").read_text().splitlines()]
    for prompt, row in zip(prompts, rows(), strict=True):
        assert row["messages"][:-1] == [{"role": "user", "content": prompt}]
        assert len(row["rewards"]) == 4
        assert Judge.reward(row["messages"][-1]["content"]) == max(row["rewards"])
        if "rejected" in row:
            assert row["chosen"] == row["messages"][-1]["content"]
            assert Judge.reward(row["rejected"]) == min(row["rewards"])
        else:
            assert len(set(row["rewards"])) == 1
    assert any("rejected" in row for row in rows())
    assert list(found.rewards) == [1, 2, 4]
    for count, value in found.rewards.items():
        expected = [statistics.fmean(map(max, itertools.combinations(row["rewards"], count))) for row in rows()]
        assert value == pytest.approx(statistics.fmean(expected))


def test_what_is_written_can_be_learnt_from(judged: Path) -> None:
    best(judged)
    assert [chat.messages[-1].content for chat in read_chats("best.jsonl")] == [
        row["messages"][-1]["content"] for row in rows()
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows() if "rejected" in row))
    assert [(one.chosen, one.rejected) for one in read_preferences("pairs.jsonl")] == [
        (row["chosen"], row["rejected"]) for row in rows() if "rejected" in row
    ]


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_file_that_was_cut_anywhere_is_gone_on_with(judged: Path, cut: int) -> None:
    whole = best(judged)
    content = Path("best.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    part = b"".join(lines[:2]) + lines[2][:cut]
    Path("best.jsonl").write_bytes(part)
    told: list[int] = []
    again = best(judged, on_answer=lambda done, total: told.append(done))
    assert Path("best.jsonl").read_bytes() == content
    assert told == [3, 4, 5]
    assert again == whole
    assert best(judged, on_answer=lambda *_: pytest.fail("nothing is left to do")) == whole


def test_answers_depend_on_the_seed_alone(judged: Path) -> None:
    for file, seed in (("a.jsonl", 1), ("b.jsonl", 1), ("c.jsonl", 2)):
        best(judged, file, seed=seed)
    assert rows("a.jsonl") == rows("b.jsonl") != rows("c.jsonl")


def test_a_file_of_other_prompts_is_left_as_it_is(judged: Path) -> None:
    best(judged)
    before = Path("best.jsonl").read_bytes()
    prompts = Path("prompts.jsonl").read_text().splitlines(keepends=True)
    Path("prompts.jsonl").write_text("".join([*prompts[:1], *prompts[2:]]))
    with pytest.raises(DataError, match=r"(?s)best\.jsonl:2: is not a row of best answers.*name another file"):
        best(judged)
    Path("prompts.jsonl").write_text("".join(prompts[:3]))
    with pytest.raises(DataError, match=r"best\.jsonl:4: is not a row"):
        best(judged)
    assert Path("best.jsonl").read_bytes() == before
    Path("prompts.jsonl").write_text("".join(prompts))
    wrong = ["[1]\n", "no json\n", '{"messages": []}\n', '{"messages": 3, "rewards": [1]}\n', "\n", "\xff\n"]
    wrong += ["a letter", '{"messages": [{"role": "user", "content": "another', before.decode("latin-1")[:40] + "x"]
    for content in wrong:
        Path("other.jsonl").write_text(content, encoding="latin-1")
        with pytest.raises(DataError, match=r"other\.jsonl:1: is not a row"):
            best(judged, "other.jsonl")
        assert Path("other.jsonl").read_text(encoding="latin-1") == content


def test_a_file_of_another_number_of_answers_is_refused(judged: Path) -> None:
    best(judged, most=2)
    before = Path("best.jsonl").read_bytes()
    for samples in (3, 8):
        with pytest.raises(DataError, match=rf"best\.jsonl:1: has the rewards of 4 answers, not of {samples}"):
            best(judged, samples=samples)
    assert Path("best.jsonl").read_bytes() == before


def test_a_whole_file_with_something_after_it_is_left_as_it_is(judged: Path) -> None:
    best(judged)
    with Path("best.jsonl").open("a") as file:
        file.write('{"messages"')
    before = Path("best.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"best\.jsonl:6: is not a row"):
        best(judged)
    assert Path("best.jsonl").read_bytes() == before


@pytest.mark.parametrize("more", [{"samples": 1}, {"temperature": 0.0}, {"temperature": -1.0}])
def test_one_answer_has_no_best(judged: Path, more: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="needs at least 2 samples and a temperature above 0"):
        best(judged, **more)
    assert not Path("best.jsonl").exists()


@pytest.mark.parametrize("most", [0, -1])
def test_no_prompts_have_no_best(judged: Path, most: int) -> None:
    with pytest.raises(DataError, match="prompts: there is no prompt to answer"):
        best(judged, most=most)
    with pytest.raises(DataError, match="prompts: there is no prompt to answer"):
        answers.judge(judged, judged, "reward", "prompts.jsonl", most=most)


def test_wins_and_ties_are_counted_prompt_by_prompt(judged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"own": ["1", "aa", "a", "aaa", "1"], "other": ["a", "aa", "aa", "a", "aa"]}

    class Answering:
        def __init__(self, name: str, dtype: str) -> None:
            self.texts = iter(said[name])

        def answer(self, prompts: Sequence[Any], most: int, seeds: Sequence[int], sampling: Any) -> list[str]:
            assert len(prompts) == len(seeds)
            return list(itertools.islice(self.texts, len(prompts)))

    monkeypatch.setattr(answers, "_Answering", Answering)
    monkeypatch.setattr(answers, "_TOGETHER", 2)
    told: list[tuple[int, int]] = []
    found = answers.judge("own", "other", "reward", "prompts.jsonl", on_answer=lambda *done: told.append(done))
    assert told == [(2, 5), (4, 5), (5, 5)]
    assert (found.wins, found.ties, found.prompts) == (3, 1, 5)
    assert found.rate == pytest.approx(3.5 / 5)
    assert found.interval == wilson_interval(0.7, 5)
    assert found.rewards == pytest.approx((28 / 5, 8 / 5))


def test_a_model_beside_itself_ties(judged: Path) -> None:
    for temperature in (0.0, 1.5):
        found = answers.judge(
            judged, judged, "reward", "prompts.jsonl", max_new_tokens=4, temperature=temperature, dtype="float32"
        )
        assert (found.wins, found.ties, found.rate) == (0, 5, 0.5)
        assert found.rewards[0] == found.rewards[1]


# Means


def models(count: int, **others: Any) -> list[str]:
    """Folders of models with weights of their own."""
    names = []
    for seed in range(count):
        model = Llama(LlamaConfig(**{**SIZES, **others}))
        model.init_weights(seed)
        save_hugging_face(model, Path(f"model{seed}{'-'.join(others)}"))
        names.append(f"model{seed}{'-'.join(others)}")
    return names


def parameters(name: str | Path) -> dict[str, torch.Tensor]:
    return {key: one.detach() for key, one in load(name)[1].named_parameters()}


def test_the_mean_of_equal_models_is_the_model_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (name,) = models(1)
    for count in (2, 3):
        found, expected = parameters(average([name] * count, f"mean{count}")), parameters(name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_the_mean_of_models_is_that_of_each_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = models(3)
    given = [parameters(name) for name in names]
    found = parameters(average(names, "mean"))
    for key, tensor in found.items():
        expected = torch.stack([one[key].double() for one in given]).mean(0)
        assert torch.equal(tensor, expected.float())
    halves = parameters(average(names[:2], "half"))
    for key, tensor in halves.items():
        torch.testing.assert_close(tensor, (given[0][key] + given[1][key]) / 2, rtol=1e-6, atol=1e-8)


def test_what_has_no_common_mean_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = models(1) + models(1, ffn=64)
    with pytest.raises(CheckpointError, match="ffn is 64, that of the model is 48"):
        average(names, "mean")
    with pytest.raises(DataError, match="needs two models or more"):
        average(names[:1], "mean")
    assert not Path("mean").exists()
    Path("taken").mkdir()
    Path("taken/file").write_text("a")
    with pytest.raises(CheckpointError, match="is not empty"):
        average(names[:1] * 2, "taken")


def test_runs_are_averaged_with_their_adapters_and_rewards_are_not(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"adapter": {"rank": 4}}
    thin = train(post_recipe(begun, "sft", begun / "start", model=model, training={"steps": 2}), "thin").run
    merged, start = parameters(newest(thin)), parameters(newest(begun / "start"))
    found = parameters(average(["thin", begun / "start"], "mean"))
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, (merged[key] + start[key]) / 2, rtol=1e-6, atol=1e-8)
    mean, run = LanguageModel("mean").tokenizer, LanguageModel("thin").tokenizer
    chat = [Message("system", "Add."), Message("user", "1 + 1"), Message("assistant", "2"), Message("user", "é + 2?")]
    assert mean.encode_chat(chat) == run.encode_chat(chat)
    assert mean.stop_ids == run.stop_ids
    train(post_recipe(begun, "reward", begun / "start", training={"steps": 1}), "scores")
    with pytest.raises(DataError, match="scores: is a reward model"):
        average(["scores", "thin"], "other")


@pytest.mark.parametrize(
    ("texts", "best", "worst"),
    [
        (["a", " ", "b"], "b", "a"),
        (["", "a", "\n"], "a", None),
        (["", "a", "b"], "b", "a"),
        ([" ", "", " "], " ", None),
    ],
)
def test_blank_answers_are_passed_over(texts: list[str], best: str, worst: str | None) -> None:
    row = answers._row((Message("user", "ask"),), texts, [1.0, 2.0, 3.0])
    assert row["messages"][-1]["content"] == best
    assert row.get("rejected") == worst
    assert row["rewards"] == [1.0, 2.0, 3.0]
