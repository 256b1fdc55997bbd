"""``cordillera search``: its record, its path after a stop, candidates that die, and what it says when it cannot."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.cli.search import _beside_own as beside_own
from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.datasets import prepare
from cordillera.errors import DataError, Interrupted, RecipeError, RunError
from cordillera.reports.runs_status import run_states
from cordillera.run import Run
from cordillera.training.ranking.architecture_search.searchers import front
from cordillera.workflows.architectures import search as module
from cordillera.workflows.architectures.search import SearchCandidate, read_proposals
from cordillera.workflows.architectures.trials import SearchTrial, TrialConfig, try_candidate
from cordillera.workflows.architectures.workers import TrialWorkers

RECIPE = """
seed = 1
threads = 1
device = "cpu"

[data]
dataset = "synthetic"
batch_size = 64

[data.synthetic]
rows = 1500
dense = 3
categorical = 3
lists = 1
largest_vocabulary = 20

[model]
name = "dnn"
embedding_dim = 4
mlp = [4]

[training]
learning_rate = 0.01
precision = "fp32"
"""
SPACE = """
[blocks]
count = 2
vector = ["linear", "cross"]
widths = [4, 8]
embeddings = ["none", "mix"]
rows = [2]
connections = "chain"
"""
SOURCE = Path(__file__).parents[2] / "src"
MARK = "CORDILLERA_TEST_OF_SEARCH"  # in the environment of all that a search starts
LINEAR = {"name": "a", "op": "linear", "inputs": ["dense", "embeddings"], "width": 4}


def graph(*nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    content = {"name": "graph", "embedding_dim": 4, "nodes": list(nodes), "output": [nodes[-1]["name"]]}
    return {"model": {**content, **changes}}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A recipe and a space, by path."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    (tmp_path / "space.toml").write_text(SPACE)
    return str(tmp_path / "tiny.toml"), str(tmp_path / "space.toml")


def entries(folder: Path, kind: str = "candidate") -> list[dict[str, Any]]:
    found = [one for one in Run(folder, of_search=True).metrics() if one["kind"] == kind]
    return sorted(found, key=lambda one: one.get("number", 0))


def without_clock(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key != "seconds"} for one in entries(folder)]


# The search, with trials that take no time


class InstantWorkers:
    """Trials whose results are made of the candidates' text; the last of a batch is finished first."""

    tried: list[str]
    given: list[tuple[int, TrialConfig]]

    def __init__(self, count: int, content: dict[str, Any], config: TrialConfig, most_seconds: float) -> None:
        self.given.append((content["seed"], config))
        self.config = config

    def __enter__(self) -> InstantWorkers:
        return self

    def __exit__(self, *_: object) -> None: ...

    def try_all(
        self, candidates: Sequence[dict[str, Any]], has_time: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[int, SearchTrial]]:
        for index in reversed(range(len(candidates) if has_time() else 0)):
            text = json.dumps(candidates[index], sort_keys=True)
            number = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
            self.tried.append(text)
            if number % 5 == 0:
                yield index, SearchTrial("reach", "no gradient reaches C1", flops=7)
            else:
                ne = 0.8 + number % 97 / 1000
                of_test = tuple(ne + 0.01 * seed for seed in range(self.config.seeds)) if self.config.test else ()
                yield (
                    index,
                    SearchTrial("finished", "", ne, ne - 0.1, ne + 0.1, (ne,), of_test, 1_000 + number % 13, 5, 0.1),
                )


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Candidates that are tried, by workers that need no time."""
    found: list[str] = []
    monkeypatch.setattr(module, "TrialWorkers", InstantWorkers)
    monkeypatch.setattr(InstantWorkers, "tried", found, raising=False)
    monkeypatch.setattr(InstantWorkers, "given", [], raising=False)
    return found


def settings(**changes: Any) -> workflows.SearchConfig:
    return workflows.SearchConfig.model_validate({"trials": 11, "batch": 4, "searcher": "predictor", **changes})


def test_a_search_leaves_a_record_and_the_recipes_of_its_front(files: Any, tried: list[str], tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []

    def show(candidate: SearchCandidate, planned: int) -> None:
        shown.append((candidate.number, planned))

    outcome = workflows.search(*files, settings(), folder=tmp_path / "run", on_candidate=show)
    assert shown == [(number, 11) for number in range(11)]
    record = entries(tmp_path / "run")
    assert [one["number"] for one in record] == list(range(11))
    assert {one["origin"] for one in record} == {"search"}
    assert len({one["name"] for one in record}) == 11
    for entry, candidate in zip(record, outcome.candidates, strict=True):
        assert (entry["name"], entry["overrides"]) == (candidate.name, candidate.overrides)
        assert dataclasses.astuple(SearchTrial.from_dict(entry))[:3] == dataclasses.astuple(candidate.trial)[:3]
    finished = [one for one in outcome.candidates if one.trial.is_finished]
    assert 0 < len(finished) < 11
    assert outcome.front == [finished[index] for index in front([one.score for one in finished])]
    assert outcome.best == min(finished, key=lambda one: one.trial.ne)
    recipes_of = sorted((tmp_path / "run" / "front").iterdir())
    assert [path.stem for path in recipes_of] == sorted(one.name for one in outcome.front)
    by_name = {one.name: one for one in outcome.front}
    for path in recipes_of:
        recipe = recipes.load(path)
        candidate = by_name[path.stem]
        assert recipe.model.name == "graph"
        assert list(recipe.model.output) == candidate.overrides["model"]["output"]
        assert [node.name for node in recipe.model.nodes] == [
            one["name"] for one in candidate.overrides["model"]["nodes"]
        ]
        assert recipe.data == recipes.load(files[0]).data
        assert f"NE {candidate.trial.ne:.4f} on the validation split" in recipe.description
    assert outcome.report.is_file()


@pytest.mark.cases(2)
@pytest.mark.parametrize("searcher", ["evolution", "predictor", "random", "grid"])
@pytest.mark.parametrize("kept", [0, 1, 4, 6, 10])
def test_a_search_goes_on_where_it_was(files: Any, tried: list[str], tmp_path: Path, searcher: str, kept: int) -> None:
    config = settings(searcher=searcher)
    whole = workflows.search(*files, config, folder=tmp_path / "whole")
    workflows.search(*files, config, folder=tmp_path / "cut")
    path = tmp_path / "cut" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    torn = lines[kept][:40] if kept else ""  # it was killed while it wrote a line
    path.write_text("".join(lines[:kept]) + torn)
    (tmp_path / "cut" / "status.json").unlink()  # which is of a search that has ended
    tried.clear()
    again = workflows.search(*files, config, folder=tmp_path / "cut")
    assert len(tried) == 11 - kept
    assert [one.name for one in again.candidates] == [one.name for one in whole.candidates]
    assert without_clock(tmp_path / "cut") == without_clock(tmp_path / "whole")
    tried.clear()
    workflows.search(*files, config, folder=tmp_path / "cut")
    assert tried == []


def test_a_search_may_be_given_more_trials_or_fewer(files: Any, tried: list[str], tmp_path: Path) -> None:
    first = workflows.search(*files, settings(), folder=tmp_path / "run")
    more = workflows.search(*files, settings(trials=16), folder=tmp_path / "run")
    assert [one.name for one in more.candidates[:11]] == [one.name for one in first.candidates]
    assert len(more.candidates) == len(tried) == 16
    fewer = workflows.search(*files, settings(trials=3), folder=tmp_path / "run")
    assert [one.name for one in fewer.candidates] == [one.name for one in first.candidates[:3]]
    kept = {path.stem for path in (tmp_path / "run" / "front").iterdir()}
    assert kept == {one.name for one in fewer.front}
    assert len(tried) == 16


def test_a_search_begins_nothing_after_its_hours_and_goes_on(files: Any, tried: list[str], tmp_path: Path) -> None:
    whole = workflows.search(*files, settings(), folder=tmp_path / "whole")
    none = workflows.search(*files, settings(), folder=tmp_path / "run", hours=0)
    assert (none.candidates, none.best) == ([], None)
    assert not none.is_exhausted
    assert none.is_out_of_time
    assert "This search has not ended" in (page := none.report.read_text())
    assert module.report_search(tmp_path / "run").read_text() == page
    tried.clear()
    some = workflows.search(*files, settings(), folder=tmp_path / "run", hours=1)
    assert [one.name for one in some.candidates] == [one.name for one in whole.candidates]
    tried.clear()
    again = workflows.search(*files, settings(), folder=tmp_path / "run", hours=0)  # those on record are read
    assert len(again.candidates) == len(whole.candidates)
    assert not tried
    assert not again.is_out_of_time
    assert "This search has not ended" not in module.report_search(tmp_path / "run").read_text()


def test_a_search_begins_nothing_that_would_end_after_its_hours(
    files: Any, tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    def one_by_one(
        self: InstantWorkers, candidates: Sequence[dict[str, Any]], has_time: Callable[[], bool]
    ) -> Iterator[tuple[int, SearchTrial]]:
        for index in range(len(candidates)):
            if not has_time():
                return
            clock.now += 100.0
            yield index, SearchTrial("finished", "", 0.9, flops=1, seconds=100.0)

    monkeypatch.setattr(InstantWorkers, "try_all", one_by_one)
    proposals = [graph({**LINEAR, "width": width}) for width in (4, 5, 6)]
    whole = workflows.search(*files, settings(), proposals=proposals, folder=tmp_path / "whole")

    def names(hours: float) -> list[str]:
        clock.now = 0.0
        found = workflows.search(*files, settings(), proposals=proposals, folder=tmp_path / "run", hours=hours)
        assert not found.is_exhausted
        return [one.name for one in found.candidates]

    expected = [one.name for one in whole.candidates]
    assert len(expected) == 3 + settings().trials
    assert names(250 / 3600) == expected[:2]  # not all proposals
    assert names(350 / 3600) == expected[:5]  # those on record take no time; within a batch of four
    assert names(50 / 3600) == expected[:6]  # how long one takes is not known before the first
    assert names(0) == expected[:6]
    assert names(1) == expected


def test_workers_begin_nothing_without_time() -> None:
    content, _ = material()
    with TrialWorkers(2, content, TrialConfig(sample=0), 300) as workers:
        assert list(workers.try_all([graph(LINEAR)] * 3, lambda: False)) == []
        assert not workers._workers


@pytest.mark.parametrize("setting", [False, True])
def test_the_page_of_a_search_is_written_again(cli: Any, files: Any, tried: list[str], setting: bool) -> None:
    space = "settings" if setting else files[1]
    made = cli("search", files[0], "--space", space, "--run", "run", "--trials", 9, "--judge", 2)
    assert made.code == 0, made.err
    page = Path("run/report.html")
    before = page.read_text()
    page.unlink()
    done = cli("report", "run")
    assert (done.code, done.out) == (0, "run/report.html\n")
    assert page.read_text() == before
    assert ("training.learning_rate = " in made.out) == ("training.learning_rate = " in before) == setting


@pytest.mark.parametrize("kept", [0, 1, 8])
def test_a_record_that_was_cut_is_refused(cli: Any, files: Any, tried: list[str], kept: int) -> None:
    search = ("search", files[0], "--space", files[1], "--run", "run", "--trials", 9)
    assert cli(*search).code == 0
    path = Path("run/metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:kept]))
    for arguments in (search, ("report", "run")):
        done = cli(*arguments)
        assert done.code == 2
        assert f"metrics.jsonl: holds {kept} whole records, 9 were written" in " ".join(done.err.split())
    path.unlink()
    assert cli("report", "run").code == 2


def test_the_page_of_a_search_that_has_not_ended_says_so(files: Any, tried: list[str], tmp_path: Path) -> None:
    def stop(candidate: SearchCandidate, planned: int) -> None:
        if candidate.number == 5:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        workflows.search(*files, settings(), folder=tmp_path / "run", on_candidate=stop)
    banner = f"has not ended: it runs, or was stopped. Candidates on record: {len(entries(tmp_path / 'run'))}."
    assert banner in module.report_search(tmp_path / "run").read_text()
    outcome = workflows.search(*files, settings(), folder=tmp_path / "run")
    assert "has not ended" not in outcome.report.read_text()
    assert "has not ended" not in module.report_search(tmp_path / "run").read_text()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "command",
    [
        *("train run --resume", "train run", "train FILE --run run --resume", "predict run log.csv", "export run"),
        *(
            "evaluate run",
            "quantize run",
            "compare run run",
            "serve run",
            "inject run",
            "probe run",
            "watch run log.csv",
        ),
        *("train FILE --set training.start=run", "generate run hello"),
    ],
)
def test_the_folder_of_a_search_is_no_run(cli: Any, files: Any, tried: list[str], command: str) -> None:
    workflows.search(*files, settings(), folder="run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused = cli(*command.replace("FILE", files[0]).split())
    assert refused.code == 2
    said = " ".join(refused.err.split())
    assert "is the folder of a search" in said
    assert "train a recipe of run/front" in said
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_the_front_is_judged_with_new_seeds_on_the_test_split(
    cli: Any, files: Any, tried: list[str], tmp_path: Path
) -> None:
    plain = workflows.search(*files, settings(trial=TrialConfig(seeds=2)), folder=tmp_path / "run")
    assert plain.judged == {}
    assert InstantWorkers.given == [(1, TrialConfig(seeds=2))]
    assert "--judge" in plain.report.read_text()
    tried.clear()
    outcome = workflows.search(*files, settings(trial=TrialConfig(seeds=2), judge=3), folder=tmp_path / "run")
    assert InstantWorkers.given[-1] == (1 + 2, TrialConfig(seeds=3, test=True, sample=0))  # seeds 3, 4 and 5
    assert len(tried) == len(outcome.front) > 1
    assert list(outcome.judged) == [one.name for one in plain.front] == [one.name for one in outcome.front]
    for one in outcome.front:
        assert outcome.judged[one.name].test_ne == pytest.approx(one.trial.ne + 0.01)
        recipe = recipes.load(tmp_path / "run" / "front" / f"{one.name}.toml")
        assert f"{one.trial.ne + 0.01:.4f} on the test split" in recipe.description
    text = outcome.report.read_text()
    assert "3 more trainings" in text
    best = min(outcome.front, key=lambda one: one.trial.ne).trial.ne
    assert f"{best + 0.01:.4f}" in text
    assert f"{best:.4f} to {best + 0.02:.4f}" in text
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))  # killed before the last was judged
    (tmp_path / "run" / "status.json").unlink()
    tried.clear()
    again = workflows.search(*files, settings(trial=TrialConfig(seeds=2), judge=3), folder=tmp_path / "run")
    assert len(tried) == 1
    assert again.judged == outcome.judged
    assert len(entries(tmp_path / "run", "judged")) == len(outcome.front)
    shown = cli("search", files[0], "--space", files[1], "--run", "other", "--trials", 9, "--judge", 2)
    assert shown.code == 0, shown.err
    assert "NE (new seeds)" in shown.out
    assert "NE (test)" in shown.out
    assert "train the best, by its mean NE over new seeds" in shown.out
    assert "by the test split, new seeds for each: 2" in shown.out


def test_the_best_is_that_of_the_new_seeds_if_the_front_was_judged() -> None:
    def trial(ne: float) -> SearchTrial:
        return SearchTrial("finished", "", ne)

    lucky, better, dead = (SearchCandidate(i, "abc"[i], "search", {}, trial(0.8 + i / 100)) for i in range(3))
    judged = {"a": trial(0.95), "b": trial(0.9), "c": SearchTrial("training", "failed")}
    found = module.SearchOutcome(Path("run"), [], [lucky, better, dead], Path("page"))
    assert found.best == lucky
    assert dataclasses.replace(found, judged=judged).best == better


def test_an_architecture_that_dies_with_a_new_seed_is_named(
    cli: Any, files: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = InstantWorkers.try_all
    dead = SearchTrial("training", "the NE of the test split is not a number")

    def dying(self: InstantWorkers, candidates: Sequence[dict[str, Any]], *has_time: Any) -> Any:
        every = ((place, dead) for place in range(len(candidates)))
        return every if self.config.test else plain(self, candidates, *has_time)

    monkeypatch.setattr(InstantWorkers, "try_all", dying)
    result = cli("search", files[0], "--space", files[1], "--run", "run", "--trials", 9, "--judge", 2)
    assert result.code == 0, result.err
    assert "died: training: the NE of the test split is not a number" in result.out
    assert "nan" not in result.out
    for path in Path("run/front").iterdir():
        assert "test split" not in recipes.load(path).description


def test_without_a_test_split_nothing_is_judged(files: Any, tried: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs a test split"):
        workflows.search(
            *files, settings(judge=1), folder=tmp_path / "run", overrides=["data.fractions=[0.9, 0.1, 0.0]"]
        )


def test_a_search_of_before_a_setting_was_added_goes_on(files: Any, tried: list[str], tmp_path: Path) -> None:
    workflows.search(*files, settings(), folder=tmp_path / "run")
    run = Run(tmp_path / "run", of_search=True)
    saved = run.read_json("search.json")
    del saved["config"]["most_seconds"], saved["config"]["trial"]["test"]
    run.write_json("search.json", saved)
    tried.clear()
    assert len(workflows.search(*files, settings(), folder=tmp_path / "run").candidates) == 11
    assert tried == []
    run.write_json("search.json", {**saved, "config": {"unknown": 1}})
    with pytest.raises(RunError, match=r"another config \(config: null -> "):
        workflows.search(*files, settings(), folder=tmp_path / "run")


def test_a_search_ends_with_its_space(files: Any, tried: list[str], tmp_path: Path) -> None:
    space = tmp_path / "few.toml"
    space.write_text('[choices]\n"model.mlp" = [[4], [8], [16]]\n"training.learning_rate" = [0.1, 0.01]\n')
    outcome = workflows.search(files[0], space, settings(trials=50), folder=tmp_path / "run")
    assert len(outcome.candidates) == len(tried) == 6
    assert outcome.is_exhausted
    assert not workflows.search(files[0], space, settings(trials=2), folder=tmp_path / "run").is_exhausted
    for path in (tmp_path / "run" / "front").iterdir():
        assert recipes.load(path).model.name == "dnn"


def test_another_search_in_the_folder_is_refused(files: Any, tried: list[str], tmp_path: Path) -> None:
    recipe, space = files
    other = tmp_path / "other.toml"
    other.write_text(SPACE.replace("[4, 8]", "[4, 16]"))
    folder = tmp_path / "run"
    workflows.search(recipe, space, settings(), folder=folder)
    record = (folder / "metrics.jsonl").read_bytes()
    different: list[tuple[str, str, dict[str, Any]]] = [
        ("recipe", "recipe.model.dropout: 0.0 -> 0.5", {"overrides": ["model.dropout=0.5"]}),
        ("recipe", "recipe.data.synthetic.rows: ", {"overrides": ["data.synthetic.rows=1600"]}),
        ("space", "space.blocks.widths: [4, 8] -> [4, 16]", {"space": other}),
        ("config", 'config.searcher: "predictor" -> "random"', {"config": settings(searcher="random")}),
        ("config", "config.seed: ", {"config": settings(seed=1)}),
        ("config", "config.batch: ", {"config": settings(batch=3)}),
        ("config", "config.trial.most_flops: ", {"config": settings(trial=TrialConfig(most_flops=10**9))}),
        ("proposals", "proposals: [] -> ", {"proposals": [graph(LINEAR)]}),
        (
            "config and recipe and space",
            "recipe.seed: 1 -> 2",
            {"space": other, "config": settings(goal="ne"), "overrides": ["seed=2"]},
        ),
    ]
    for what, change, changes in different:
        given = {"source": recipe, "space": space, "config": settings(), "folder": folder, **changes}
        with pytest.raises(RunError, match=rf"holds a search of another {what} \(.*{re.escape(change)}") as error:
            workflows.search(given.pop("source"), given.pop("space"), given.pop("config"), **given)
        assert error.value.where == str(folder)
        assert (folder / "metrics.jsonl").read_bytes() == record
    with Run(folder, of_search=True).lock(), pytest.raises(RunError, match="another process"):
        workflows.search(recipe, space, settings(), folder=folder)
    lines = [json.loads(line) for line in record.decode().splitlines()]
    for line in lines:
        del line["seal"]
    (folder / "metrics.jsonl").unlink()
    for line in lines:
        Run(folder, of_search=True).log({**line, "name": "0" * 16} if line["number"] == 2 else line)
    with pytest.raises(RunError, match="candidate 2 on record is 0000000000000000, the search proposes"):
        workflows.search(recipe, space, settings(), folder=folder)


def test_a_folder_of_a_training_is_refused(cli: Any, files: Any, tried: list[str], tmp_path: Path) -> None:
    run = Run.create(tmp_path / "trained", recipes.dump(recipes.load(files[0])))
    run.write_status("finished", 1, 1)
    result = cli("search", *files[:1], "--space", files[1], "--run", tmp_path / "trained")
    assert result.code == 2
    assert "holds no search" in result.err


def test_proposals_are_tried_first(cli: Any, files: Any, tried: list[str], tmp_path: Path) -> None:
    proposals = [graph(LINEAR), {"model.mlp": [7]}, graph({**LINEAR, "inputs": ["zzz"]})]
    (tmp_path / "given.jsonl").write_text("\n\n".join(map(json.dumps, proposals)) + "\n")
    arguments = ("search", files[0], "--space", files[1], "--proposals", tmp_path / "given.jsonl", "--run", "run")
    result = cli(*arguments, "--trials", 4)
    assert result.code == 0, result.err
    assert "[1/7]" in result.out
    assert "[7/7]" in result.out
    record = entries(tmp_path / "run")
    assert [one["origin"] for one in record] == ["proposal"] * 3 + ["search"] * 4
    assert [one["overrides"] for one in record[:3]] == proposals
    alone = cli("search", files[0], "--space", files[1], "--run", "alone", "--trials", 4, "--quiet")
    assert alone.code == 0
    assert [one["name"] for one in entries(tmp_path / "alone")] == [one["name"] for one in record[3:]]
    assert "[1/" not in alone.out


def test_a_candidate_is_shown_once_all_before_it_are_tried(
    files: Any, tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    trial = SearchTrial("finished", "", 0.9, 0.8, 1.0, (0.9,), (), 10, 5, 0.1)

    def one_by_one(self: InstantWorkers, *_: Any) -> Iterator[tuple[int, SearchTrial]]:
        for index, before in ((1, 0), (0, 0), (2, 2)):
            assert len(shown) == before
            yield index, trial

    monkeypatch.setattr(InstantWorkers, "try_all", one_by_one)
    proposals = [{"model.mlp": [width]} for width in (2, 3, 5)]
    workflows.search(
        *files, settings(trials=0), folder=tmp_path / "run", proposals=proposals,
        on_candidate=lambda one, _: shown.append(one.number),
    )  # fmt: skip
    assert shown == [0, 1, 2]


def test_a_search_without_a_survivor_says_so(
    cli: Any, files: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = SearchTrial("budget", "4,000 flops, of at most 10")
    monkeypatch.setattr(
        InstantWorkers, "try_all", lambda self, some, has_time: iter([(place, dead) for place in range(len(some))])
    )
    for searcher in ("evolution", "predictor"):
        result = cli("search", files[0], "--space", files[1], "--trials", 20, "--run", searcher, "--searcher", searcher)
        assert result.code == 2
        assert "died: budget: 4,000 flops, of at most 10" in result.out
        assert "20 candidates tried, 0 trained" in result.out
        assert "20 died at stage budget" in result.out
        assert "train the best with" not in result.out
        said = " ".join(result.err.split())
        assert "none of 20 candidates was trained; the first died at stage budget: 4,000 flops, of at most 10" in said
        assert "search in another --run folder" in said
    none = cli("search", files[0], "--space", files[1], "--trials", 0, "--run", "none")
    assert none.code == 0, none.err


def test_with_one_goal_there_is_one_best_beside_the_recipes_own(
    cli: Any, files: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nes = iter([0.9, 0.7, 0.8])  # the second is the largest, so all three would be on a front
    sizes = iter([10, 30, 20])

    def all_of_them(self: InstantWorkers, some: Sequence[dict[str, Any]], _: Any) -> Iterator[tuple[int, SearchTrial]]:
        for place in range(len(some)):
            yield place, SearchTrial("finished", "", next(nes), flops=next(sizes))

    monkeypatch.setattr(InstantWorkers, "try_all", all_of_them)
    Path("few.toml").write_text('[choices]\n"training.learning_rate" = [0.01, 0.1, 0.2]\n"model.mlp" = [[4], [8]]\n')
    search = ("search", files[0], "--space", "few.toml", "--run", "run", "--trials", 2, "--searcher", "random", "-q")
    shown = cli(*search, "--goal", "ne")
    assert shown.code == 0, shown.err
    record = entries(Path("run"))
    assert record[0]["overrides"] == {"training.learning_rate": 0.01, "model.mlp": [4]}  # the recipe's own
    assert [one["origin"] for one in record] == ["proposal", "search", "search"]
    assert "lowest NE, by the validation split" in shown.out
    assert "front of NE" not in shown.out
    assert "architecture" not in shown.out
    assert record[1]["name"] in shown.out
    assert record[2]["name"] not in shown.out
    changes = [
        f"{key}: {json.dumps(value)} -> {json.dumps(record[1]['overrides'][key])}"
        for key, value in record[0]["overrides"].items()
        if value != record[1]["overrides"][key]
    ]
    sentence = f"the recipe's own settings: NE 0.9000; the best differs in {'; '.join(changes)}"
    assert sentence in " ".join(shown.out.split())
    document = json.loads(cli(*search, "--goal", "ne", "--json").out)
    assert document["own_ne"] == 0.9
    assert len(document["front"]) == 1


def test_the_recipes_own_settings_may_be_the_best_or_die(cli: Any, files: Any, tried: list[str]) -> None:
    best = SearchCandidate(0, "a", "proposal", {"model.mlp": [4]}, SearchTrial("finished", "", 0.8))
    assert beside_own(best, best) == "no candidate is better than the recipe's own settings, NE 0.8000"
    dead = dataclasses.replace(best, trial=SearchTrial("reach", "no gradient reaches C1"))
    assert beside_own(best, dead) == "the recipe's own settings died at stage reach: no gradient reaches C1"


def test_ctrl_c_between_trials_says_how_to_go_on(files: Any, tried: list[str], tmp_path: Path) -> None:
    def interrupt(candidate: SearchCandidate, planned: int) -> None:
        if candidate.number == 5:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="6 trials are saved") as error:
        workflows.search(*files, settings(), folder=tmp_path / "run", on_candidate=interrupt)
    assert error.value.remedy == "give the same command again"
    assert len(workflows.search(*files, settings(), folder=tmp_path / "run").candidates) == len(tried) == 11


def test_ctrl_c_and_the_end_of_a_space_are_told_by_status(
    cli: Any, files: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any, on_candidate: Any, **options: Any) -> None:
        def interrupt(candidate: SearchCandidate, planned: int) -> None:
            on_candidate(candidate, planned)
            if candidate.number == 2:
                raise KeyboardInterrupt

        return search(*arguments, on_candidate=interrupt, **options)

    search = workflows.search
    monkeypatch.setattr(workflows, "search", stop)
    command = ("search", files[0], "--space", files[1], "--run", "runs/one", "--trials", 6, "--workers", 2)
    assert cli(*command).code == 130
    (state,) = run_states(["runs/one"])
    assert (state.state, state.step, state.steps) == ("search: interrupted", 3, 6)
    monkeypatch.setattr(workflows, "search", search)
    assert cli(*command).code == 0
    (state,) = run_states(["runs/one"])
    assert (state.state, state.step) == ("search: finished", 6)
    Run("runs/one", of_search=True).write_status("exhausted", 6, 9)
    assert run_states(["runs/one"])[0].state == "search: space exhausted"


def test_ctrl_c_while_the_data_is_prepared_says_how_to_go_on_and_status_tells_of_it(
    cli: Any, files: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stopped, prepared = [True], module.prepare

    def prepare(config: Any) -> Any:
        if is_stopped[0]:
            raise KeyboardInterrupt
        return prepared(config)

    monkeypatch.setattr(module, "prepare", prepare)
    command = ("search", files[0], "--space", files[1], "--run", "runs/one", "--trials", 6)
    for on_record in (0, 6):
        is_stopped[0] = True
        stopped = cli(*command)
        assert stopped.code == 130
        said = "interrupted: finished trials are saved\n  -> give the same command again to go on\n"
        assert stopped.err.endswith(said)
        (state,) = run_states(["runs/one"])
        assert (state.state, state.step, state.steps) == ("search: interrupted", on_record, 6)
        is_stopped[0] = False
        assert cli(*command).code == 0


def test_a_search_starts_no_more_processes_than_proposals(
    cli: Any, files: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def searched(*arguments: Any, workers: int, **options: Any) -> None:
        asked.append(workers)
        raise Interrupted("that is enough", where="none")

    monkeypatch.setattr(workflows, "search", searched)
    monkeypatch.setattr("cordillera.kernels.threads.usable_cores", lambda: 64)
    for more in ((), ("--batch", 8), ("--workers", 20)):
        cli("search", files[0], "--space", files[1], *more)
    assert asked == [4, 8, 20]


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--searcher", "evolutoin"], "there is no searcher 'evolutoin'; did you mean 'evolution'"),
        (["--goal", "nee"], "must be ne or front, got 'nee'"),
        (["--space", "smal"], "is neither a shipped space (blocks, settings, small) nor a file"),
        (["--set", "model.mlpp=[3]"], "did you mean 'mlp'?"),
        (["--set", "data.fractions=[0.9, 0.0, 0.1]"], "needs a validation split"),
        (["--proposals", "absent.jsonl"], "absent.jsonl"),
        (["--trials", "-1"], "--trials"),
        (["--trials", "2000000"], "--trials"),
        (["--batch", "5000"], "--batch"),
        (["--seeds", "1000"], "--seeds"),
        (["--fine-tune", "2000000000"], "--fine-tune"),
        (["--sample", "1.5"], "--sample"),
        (["--workers", "0"], "--workers"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(cli: Any, files: Any, tried: list[str], arguments: list[str], message: str) -> None:
    result = cli("search", files[0], *([] if "--space" in arguments else ["--space", files[1]]), *arguments)
    assert result.code == 2
    assert message in " ".join((result.out + result.err).split())
    assert "Traceback" not in result.err
    assert not tried


def test_a_space_that_the_recipe_does_not_know_is_refused(
    cli: Any, files: Any, tried: list[str], tmp_path: Path
) -> None:
    for name, content, message in (
        ("key", '[choices]\n"model.mlpp" = [[3], [4]]\n', "model.mlpp: is not a key here; did you mean 'mlp'?"),
        ("single", '[choices]\n"model.mlp" = [[3]]\n', "the space has one architecture only"),
        ("empty", "", "is empty: give [blocks], [choices] or both"),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(content)
        result = cli("search", files[0], "--space", path, "--trials", 1)
        assert result.code == 2
        assert message in " ".join(result.err.split())
    language = cli("search", "llama-debug", "--space", files[1])
    assert language.code == 2
    assert "a search is for ranking models" in language.err
    path = tmp_path / "kinds.toml"
    path.write_text('[choices]\n"model.name" = ["dnn", "dcn"]\n"model.cross_layers" = [1, 2]\n')
    assert not tried
    assert cli("search", files[0], "--space", path, "--trials", 1).code == 0  # keys of one kind of model only


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model": {"name": "graph"}}\n{"model": \n', "given, line 2"),
        ("[1, 2]\n", "given, line 1: is not a JSON object"),
        ("{}\n", "given, line 1: is not a JSON object"),
        ('\n\n{"data": {"batch_size": 3}}\n', "given, line 3: sets 'data', no key of model, training or tables"),
        ('{"seed": 3}\n', "given, line 1: sets 'seed'"),
    ],
)
def test_a_line_that_is_no_proposal_is_named(text: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        read_proposals(text, "given")
    assert message in str(error.value)


# Trials


@functools.cache
def material() -> tuple[dict[str, Any], Splits]:
    recipe = recipes.validate({**recipes.parse_toml(RECIPE, "recipe")})
    return recipe.model_dump(mode="json", exclude_none=True), prepare(recipe.data)


def attempt(overrides: dict[str, Any], **config: Any) -> SearchTrial:
    content, splits = material()
    splits = dataclasses.replace(splits, test=None)  # the test split is not read
    return try_candidate(content, overrides, splits, TrialConfig.model_validate({"sample": 0, **config}))


CYCLE = ({**LINEAR, "inputs": ["b"]}, {**LINEAR, "name": "b", "inputs": ["a", "dense"]})
ONLY_DENSE = {**LINEAR, "inputs": ["dense"]}


@pytest.mark.parametrize(
    ("overrides", "config", "stage", "why"),
    [
        (graph({**LINEAR, "op": "lineer"}), {}, "settings", "model.nodes[0].op: must be 'linear'"),
        (graph({**LINEAR, "op": "none"}), {}, "settings", "model.nodes[0].op: must be 'linear'"),
        (graph(*CYCLE), {}, "settings", "nodes read each other in a cycle"),
        (graph({**LINEAR, "width": 0}), {}, "settings", "model.nodes[0].width: must be at least"),
        (graph({**LINEAR, "width": "wide"}), {}, "settings", "model.nodes[0].width: must be a whole number"),
        ({"model": {"name": "gpt"}}, {}, "settings", "model.name: must be one of"),
        ({"model": 3}, {}, "settings", "model"),
        ({"model.mlp.deep": 3}, {}, "settings", "'mlp' is a value, not a section"),
        ({"training.epochs": -1}, {}, "settings", "training.epochs"),
        (graph(LINEAR), {"most_flops": 100}, "budget", " flops, of at most 100"),
        (graph(LINEAR), {"most_parameters": 10}, "budget", " parameters, of at most 10"),
        (graph(ONLY_DENSE), {}, "reach", "no gradient reaches C1, C2, C3, L1"),
        (graph({**LINEAR, "inputs": ["embeddings"]}), {}, "reach", "no gradient reaches I1, I2, I3"),
        ({"model.norm": "batch"}, {}, "future", "depends on later samples in training, as with batch norm"),
        ({"training.learning_rate": 30.0}, {"sample": 0.5, "sample_ne": 0.5}, "sample", "steps on 640 rows"),
    ],
)  # fmt: skip
def test_a_candidate_dies_where_it_should(
    overrides: dict[str, Any], config: dict[str, Any], stage: str, why: str
) -> None:
    trial = attempt(overrides, **config)
    assert trial.stage == stage, trial
    assert why in trial.why
    assert trial.ne == float("inf")
    assert not trial.is_finished
    assert SearchTrial.from_dict(json.loads(json.dumps(trial.to_dict()))).ne == float("inf")
    assert (trial.flops > 0) == (stage not in ("settings", "shape"))


def test_a_candidate_within_its_budget_is_trained() -> None:
    free = attempt(graph(LINEAR))
    assert free.is_finished
    assert free.low < free.ne < free.high
    bound = attempt(graph(LINEAR), most_flops=free.flops, most_parameters=free.parameters, sample=0.1)
    assert dataclasses.replace(bound, seconds=free.seconds) == free
    several = attempt(graph(LINEAR), seeds=3)
    assert several.ne_of_seeds[0] == free.ne
    assert len(set(several.ne_of_seeds)) == 3
    assert several.ne == pytest.approx(sum(several.ne_of_seeds) / 3, rel=1e-12)
    again = SearchTrial.from_dict(json.loads(json.dumps({**several.to_dict(), "kind": "candidate"})))
    assert again == several


def test_a_dense_tower_in_a_candidate_may_have_dropout() -> None:
    assert attempt(graph(LINEAR, dropout=0.5)).is_finished


# With processes


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(cli: Any, files: Any, tmp_path: Path) -> None:
    arguments = ("search", files[0], "--space", files[1], "--trials", 5, "--batch", 3, "--searcher", "random")
    for workers in (1, 2):
        result = cli(*arguments, "--workers", workers, "--run", f"with-{workers}")
        assert result.code == 0, result.err
    assert without_clock(tmp_path / "with-1") == without_clock(tmp_path / "with-2")
    assert {one["stage"] for one in entries(tmp_path / "with-1")} == {"finished"}
    (one, *_) = sorted((tmp_path / "with-1" / "front").iterdir())
    trained = cli("train", one, "--run", "trained")
    assert trained.code == 0, trained.out + trained.err
    (ne,) = (entry["ne"] for entry in entries(tmp_path / "with-1") if entry["name"] == one.stem)
    evaluation = workflows.evaluate(tmp_path / "trained", "validation")
    assert evaluation.tasks["click"].metrics["ne"] == ne


@pytest.mark.slow
def test_a_worker_that_is_killed_fails_one_trial(files: Any) -> None:
    content, _ = material()
    with TrialWorkers(1, content, TrialConfig(sample=0), 300) as workers:
        candidates = [graph({**LINEAR, "width": width}) for width in (4, 5, 6)]
        trials: dict[int, SearchTrial] = {}
        found = workers.try_all([{**candidates[0], "training.epochs": 10**4}, *candidates[1:]])

        def kill() -> None:
            while not (workers._workers and workers._workers[0].number == 0):
                time.sleep(0.02)
            time.sleep(8)  # by then it trains, and goes on for minutes
            os.kill(workers._workers[0].process.pid or 0, signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        for index, trial in found:
            trials[index] = trial
        killer.join()
        assert sorted(trials) == [0, 1, 2]
        assert (trials[0].stage, trials[0].why) == ("process", "its process ended with signal 9")
        assert trials[1].is_finished
        assert trials[2].is_finished


@pytest.mark.slow
def test_a_trial_that_takes_too_long_is_given_up() -> None:
    content, _ = material()
    with TrialWorkers(1, content, TrialConfig(sample=0), 6.0) as workers:
        candidates = [{**graph(LINEAR), "training.epochs": 10**4}]
        ((index, trial),) = workers.try_all(candidates)
    assert (index, trial.stage, trial.why) == (0, "process", "was not finished after 6 s")


def started(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        MARK: str(folder),
        "CORDILLERA_CACHE": str(folder / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "cordillera", *map(str, arguments)],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not path.is_file() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.05)


def left_over(folder: Path) -> list[int]:
    """Processes that a search started and that still run."""
    mark, found = f"{MARK}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_search_that_is_stopped_goes_on(cli: Any, files: Any, tmp_path: Path, number: signal.Signals) -> None:
    arguments = ("search", files[0], "--space", files[1], "--batch", 3, "--workers", 1, "--set",
                 "data.synthetic.rows=6000")  # fmt: skip
    process = started(tmp_path, *arguments, "--trials", 1000, "--run", "stopped")
    wait_for_lines(tmp_path / "stopped" / "metrics.jsonl", 2, process)
    if number == signal.SIGKILL:
        process.kill()
        process.communicate(timeout=60)
    else:
        os.killpg(process.pid, number)  # as Ctrl-C does
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "trials are saved" in " ".join(err.split())
        assert "Traceback" not in err
    until = time.monotonic() + 60
    while left_over(tmp_path) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left_over(tmp_path)
    before = entries(tmp_path / "stopped")
    assert len(before) >= 2
    for folder in ("stopped", "whole"):
        result = cli(*arguments, "--trials", max(8, len(before) + 2), "--run", folder)
        assert result.code == 0, result.err
    after = {one["number"]: one for one in entries(tmp_path / "stopped")}
    assert [after[one["number"]] for one in before] == before
    assert without_clock(tmp_path / "stopped") == without_clock(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_while_workers_start_prints_no_traceback(files: Any, tmp_path: Path) -> None:
    process = started(tmp_path, "search", files[0], "--space", files[1], "--workers", 2, "--run", "stopped",
                      "--set", "training.epochs=10000")  # fmt: skip
    until = time.monotonic() + 120
    while len(left_over(tmp_path)) < 3 and time.monotonic() < until:  # it and two workers, or what tracks resources
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "0 trials are saved" in " ".join(err.split())
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err


@pytest.mark.slow
def test_trials_may_inherit_the_weights_of_a_supernet(cli: Any, files: Any, tmp_path: Path) -> None:
    net = tmp_path / "net.toml"
    blocks = SPACE.replace("[blocks]", "[model.blocks]")
    net.write_text(RECIPE.replace('name = "dnn"', 'name = "supernet"').replace("mlp = [4]\n", "") + blocks)
    trained = cli("train", net, "--run", "net")
    assert trained.code == 0, trained.out + trained.err
    (tmp_path / "given.jsonl").write_text(json.dumps(graph({**LINEAR, "op": "cross"})) + "\n")
    result = cli("search", files[0], "--space", files[1], "--trials", 3, "--workers", 1, "--run", "run",
                 "--supernet", "net", "--proposals", "given.jsonl")  # fmt: skip
    assert result.code == 0, result.err
    foreign, *others = entries(tmp_path / "run")
    assert foreign["stage"] == "training"
    assert "the supernet has no weights of it" in foreign["why"]
    assert {one["stage"] for one in others} == {"finished"}


def test_a_supernet_that_is_not_there_is_named(cli: Any, files: Any, tried: list[str], tmp_path: Path) -> None:
    Run.create(tmp_path / "other", recipes.dump(recipes.load(files[0])))
    for folder, message in (("nothing", "nothing"), ("other", "other")):
        result = cli("search", files[0], "--space", files[1], "--trials", 1, "--supernet", folder)
        assert result.code == 2
        assert message in result.err
        assert "Traceback" not in result.err
    assert not tried
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "change", ["training.slices=2", "parallel.processes=2", "training.plan='plan.json'", "training.start='runs/a'"]
)
def test_what_candidates_would_leave_out_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(RecipeError, match=change.partition("=")[0]):
        workflows.search(
            "synthetic-dcn", "small", overrides=[change, "training.precision='fp32'"], folder=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
