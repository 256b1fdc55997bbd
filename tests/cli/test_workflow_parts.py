"""Parts of workflows that need no training: what ranks report, losses side by side, kinds of runs that do not mix."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cordillera import workflows
from cordillera.cli import generate
from cordillera.errors import DataError, RecipeError, RunError
from cordillera.recipe import LanguageRecipe, RankingRecipe, dump
from cordillera.recipe import load as load_recipe
from cordillera.run import Run
from cordillera.topology import shipped
from cordillera.workflows import processes, scaling
from cordillera.workflows.scores import Losses
from cordillera.workflows.trained import recipe_of


def test_what_rank_0_reports_arrives_where_it_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(processes, "tell", sent.append)
    on_step, say = processes.to_launcher(0)
    assert on_step is not None
    on_step({"loss": 1.0}, "progress", 9)
    say("a line")
    other_step, other_say = processes.to_launcher(1)
    assert other_step is None
    other_say("nothing")
    assert len(sent) == 2
    steps: list[tuple[Any, ...]] = []
    lines: list[str] = []
    hear = processes.from_ranks(lambda *step: steps.append(step), lines.append)
    for message in sent:
        hear(message)
    assert (steps, lines) == ([({"loss": 1.0}, "progress", 9)], ["a line"])
    quiet = processes.from_ranks(None, lines.append)
    for message in sent:
        quiet(message)
    assert lines == ["a line"] * 2


@pytest.mark.parametrize(("samples", "parts", "left"), [(10, 2, 5), (10, 3, 4), (7, 1, 7), (9, 9, 1), (5, 2, 3)])
@pytest.mark.parametrize("is_plain", [True, False])
def test_the_last_part_of_losses_is_at_least_an_equal_one(samples: int, parts: int, left: int, is_plain: bool) -> None:
    values = np.arange(samples, dtype=np.float64)
    others = (None, None) if is_plain else (values + 200, values.astype(int))
    whole = Losses(values, values + 50, values + 100, *others)
    part = whole.tail(parts)
    assert part.first == samples - left
    assert part.losses.tolist() == list(range(samples - left, samples))
    assert (part.labels - 100).tolist() == (part.task_losses - 50).tolist() == part.losses.tolist()
    if is_plain:
        assert part.weights is None
        assert part.groups is None
    else:
        assert part.weights is not None
        assert part.groups is not None
        assert (part.weights - 200).tolist() == part.groups.tolist() == part.losses.tolist()


@pytest.mark.parametrize("is_weighted", [True, False])
def test_normalised_entropies_are_relative_to_the_base_rate(is_weighted: bool) -> None:
    random = np.random.default_rng(0)
    labels = (random.random(50) < 0.3).astype(np.float64)
    weights = random.random(50) if is_weighted else np.ones(50)
    rate = np.average(labels, weights=weights)
    constant = np.where(labels == 1, -np.log(rate), -np.log(1 - rate))
    given = weights if is_weighted else None
    base, twice = (Losses(by * constant, by * constant, labels, given, None) for by in (1, 2))
    assert base.ne_beside(twice) == pytest.approx((1.0, 2.0))
    assert base.beside(twice).mean == pytest.approx(1.0)
    assert twice.beside(base).mean == pytest.approx(-0.5)
    alone = Losses(constant, constant, np.ones(50), given, None)
    assert all(map(math.isnan, alone.ne_beside(alone)))
    of_two = Losses(3 * constant, constant, labels, given, None)  # with the losses of a second task
    assert of_two.ne_beside(of_two) == pytest.approx((1.0, 1.0))
    losses, blank = (np.append(values, more) for values, more in ((constant, 0.0), (labels, np.nan)))
    with_blank = Losses(losses, losses, blank, None if given is None else np.append(given, 9.0), None)
    assert with_blank.ne_beside(with_blank) == pytest.approx((1.0, 1.0))


def runs(folder: Path) -> dict[str, Path]:
    """A folder with a recipe of each kind."""
    from tests.training.sample_language_runs import make_language_run
    from tests.training.sample_runs import make_evaluation, make_run

    small = make_evaluation(examples=200, users=10)
    language, ranking = folder / "language", folder / "ranking"
    make_language_run(language, 100)
    make_run(ranking, evaluation=small)
    return {"language": language, "ranking": ranking}


def test_runs_of_two_kinds_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runs(tmp_path)
    kinds = {path.name: LanguageRecipe if name == "language" else RankingRecipe for name, path in made.items()}

    def load(path: Path, *rest: Any) -> Any:
        kind = kinds[Path(path).parent.name]
        return kind.__new__(kind)

    monkeypatch.setattr("cordillera.recipe.load", load)
    for first, second in (("language", "ranking"), ("ranking", "language")):
        with pytest.raises(RunError, match=f"{second}: is a run of another kind"):
            workflows.compare([made[first], made[second]])
    assert [row.name for row in workflows.compare([made["language"]]).rows] == ["language"]
    assert [row.name for row in workflows.compare([made["ranking"]]).rows] == ["ranking"]
    for path in made.values():
        assert workflows.report(path) == path / "report.html"
    assert "held-out" not in (made["ranking"] / "report.html").read_text()
    with pytest.raises(RunError, match="held-out text of a language model"):
        workflows.evaluate(made["ranking"], tokens=5)


def test_studies_take_recipes_of_their_own_kind() -> None:
    kinds = {name: isinstance(load_recipe(name), LanguageRecipe) for name in shipped("cordillera.recipes")}
    language = "llama-debug"
    ranking = next(name for name, is_language in kinds.items() if not is_language)
    assert scaling._language_recipe(language, ["seed=7"]).seed == 7
    assert scaling._ranking_recipe(ranking, ["seed=7"]).seed == 7
    with pytest.raises(RecipeError, match="a study is of pre-training"):
        scaling._language_recipe("arithmetic-sft", [])
    for ratio in (-20.0, 0.0, math.nan, math.inf):
        with pytest.raises(DataError, match="must be a number above 0"):
            workflows.isoflop(language, [1e9, 1e10, 1e11], tokens_per_parameter=ratio)
    with pytest.raises(RecipeError, match="cordillera sweep"):
        scaling._language_recipe(ranking, [])
    with pytest.raises(DataError, match="cordillera isoflop"):
        scaling._ranking_recipe(language, [])


@pytest.mark.parametrize("quiet", [True, False])
def test_completions_that_were_not_streamed_are_numbered(capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    found: Any = [SimpleNamespace(text=text) for text in ("one\n", "two")]
    generate._finish(["a", "b"], found, as_json=False, quiet=quiet)
    assert capsys.readouterr().out == ("one\ntwo\n" if quiet else "[1] one\n[2] two\n")
    for text, end in (("one\n", ""), ("one", "\n")):
        generate._finish(["a"], [SimpleNamespace(text=text)], as_json=False, quiet=quiet)  # type: ignore[list-item]
        assert capsys.readouterr().out == end, "the text itself was streamed"


def test_a_sweep_without_a_finite_loss_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [scaling.scaling_laws.MeasuredRun("dcn", 1e6, value) for value in (math.nan, math.inf)]
    monkeypatch.setattr(scaling.scaling_laws, "measure", lambda runs: found)
    with pytest.raises(DataError, match="no run has a finite NE on the test split"):
        scaling._measured([], tmp_path)


def test_a_run_of_a_language_model_is_answered_with_a_command_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create("my run", dump(load_recipe("llama-debug")))
    with pytest.raises(RunError, match="scores no samples\n  -> `cordillera generate 'my run'` writes with it, "):
        recipe_of(run)


def test_folders_that_hold_runs_are_left_out_of_a_comparison_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, study = Run.create(tmp_path / "a", "seed = 1\n").folder, tmp_path / "sweep"
    Run.create(study / "size-1-seed-1", "seed = 1\n")

    def compared(opened: list[Run], *_: Any) -> SimpleNamespace:
        return SimpleNamespace(notes=[one.name for one in opened])

    monkeypatch.setattr("cordillera.workflows.runs._compare", compared)
    found = workflows.compare([run, str(study)])
    assert found.notes == ["a", f"{study} is a folder of runs, which can be named one by one, and is left out."]
    for refused in ([study], [run, tmp_path / "none"]):
        with pytest.raises(RunError, match="is not a run folder"):
            workflows.compare(refused)
