"""Plans spend each budget on sizes around the expected optimum; studies resume, and name what failed."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cordillera.errors import DataError, Interrupted, PlanError, RunError, TrainingError
from cordillera.models.language.llama import PRESETS, LlamaConfig, parameter_count
from cordillera.recipe import parse_override
from cordillera.run import Run
from cordillera.training.scaling.isoflop_laws import study
from cordillera.training.scaling.isoflop_plan import (
    IsoFlopOutcome,
    PlannedRun,
    expected_tokens,
    ladder,
    plan_runs,
    sizes_for,
    train_plan,
)
from tests.training.loss_surface import CHINCHILLA, loss_of, surface_runs

BASE = PRESETS["llama-debug"].model_copy(update={"vocabulary": 256, "context": 128})
LENGTHS = [128, 100, 28]
BUDGETS = [1e13, 4e13, 1.6e14]


def count_flops(config: LlamaConfig, lengths: Sequence[int]) -> float:
    """Six operations a parameter and token, twelve a pair, width and layer."""
    pairs = sum(d * (d + 1) / 2 for d in lengths)
    return 6 * parameter_count(config) * sum(lengths) + 12 * config.layers * config.hidden * pairs


@functools.cache
def usual_sizes(budgets: tuple[float, ...]) -> list[LlamaConfig]:
    return list(sizes_for(BASE, budgets))


def make_plan(budgets: Sequence[float] = BUDGETS, **changes: object) -> list[PlannedRun]:
    given: dict[str, object] = {"training_flops": count_flops, "lengths": LENGTHS, "tokens_per_step": 4096} | changes
    sizes = given.pop("sizes", None) or usual_sizes(tuple(budgets))
    return plan_runs(budgets, sizes, **given)  # type: ignore[arg-type]


def in_recipe(planned: PlannedRun) -> dict[str, object]:
    return dict(map(parse_override, planned.overrides))


@given(st.floats(3e4, 1e6), st.floats(0.7, 1.5), st.integers(2, 6))
@settings(max_examples=20)
def test_a_ladder_rises_in_even_steps_of_valid_models(smallest: float, step: float, count: int) -> None:
    sizes = ladder(BASE, smallest, smallest * math.exp(step * (count - 1)), count)
    for rung, config in enumerate(sizes):
        assert abs(math.log(parameter_count(config) / smallest) - rung * step) <= step / 2
        assert 12 <= config.hidden / config.layers <= 48
        assert (config.vocabulary, config.context, config.tied) == (256, 128, True)
    counts = [parameter_count(config) for config in sizes]
    assert counts == sorted(set(counts))


def test_ladders_that_no_family_has_are_refused() -> None:
    with pytest.raises(PlanError, match="not to be had"):
        ladder(BASE, 100, 1e5, 5)
    with pytest.raises(PlanError, match="not to be had"):
        ladder(BASE, 3e4, 6e4, 20)
    for smallest, largest, count in [(0, 1e5, 3), (1e5, 1e4, 3), (1e4, 1e5, 1)]:
        with pytest.raises(PlanError, match="no ladder"):
            ladder(BASE, smallest, largest, count)


@pytest.mark.parametrize("ratio", [20, 80, 200])
def test_budgets_of_minutes_find_sizes_though_small_models_are_far_apart(ratio: float) -> None:
    base, budgets = BASE.model_copy(update={"vocabulary": 264}), [3e11, 1e12, 3e12]
    sizes = sizes_for(base, budgets, tokens_per_parameter=ratio)
    plan = make_plan(budgets, sizes=sizes, tokens_per_step=2048, tokens_per_parameter=ratio)
    assert {budget: sum(run.budget == budget for run in plan) >= 4 for budget in budgets} == dict.fromkeys(
        budgets, True
    )


def test_every_run_costs_its_budget_in_whole_steps_and_sizes_lie_on_both_sides_of_the_optimum() -> None:
    plan = make_plan()
    assert len({run.name for run in plan}) == len(plan)
    for budget in BUDGETS:
        runs = [run for run in plan if run.budget == budget]
        assert 5 <= len(runs) <= 8
        for run in runs:
            rate = count_flops(run.model, LENGTHS) / sum(LENGTHS)
            assert run.tokens == run.steps * 4096
            assert run.compute == pytest.approx(rate * run.tokens)
            assert run.compute == pytest.approx(budget, rel=0.5 / run.steps + 1e-9)
            assert run.steps >= 100
        tokens = [run.tokens for run in runs]
        assert tokens[-1] < expected_tokens(budget) < tokens[0]
        assert tokens == sorted(tokens, reverse=True)


def test_adding_a_budget_does_not_rename_runs_of_equal_sizes() -> None:
    sizes = usual_sizes(tuple(BUDGETS))
    few, all_ = make_plan(BUDGETS[:2], sizes=sizes), make_plan(sizes=sizes)
    assert {run.name: run for run in few}.items() <= {run.name: run for run in all_}.items()


def test_overrides_are_a_recipes() -> None:
    (first, *_) = plan = make_plan(warmup=0.1)
    values = in_recipe(first)
    assert values["training.steps"] == first.steps
    assert values["training.warmup_steps"] == round(0.1 * first.steps)
    for run in plan:
        model = {key[6:]: value for key, value in in_recipe(run).items() if key.startswith("model.")}
        assert LlamaConfig.model_validate(BASE.model_dump() | model) == run.model


def test_what_cannot_be_planned_is_refused_with_what_would_do() -> None:
    with pytest.raises(PlanError, match=r"fewer than 4; .* would train for \d+ steps, fewer than 100") as caught:
        make_plan(tokens_per_step=65536)
    assert "lower packing.tokens" in str(caught.value)
    with pytest.raises(PlanError, match=r"would need [\d,]+ tokens of the text's 1,000,000") as caught:
        make_plan(most_tokens=1_000_000)
    assert "give more text" in str(caught.value)
    assert "larger budget" not in str(caught.value)
    for count in (4, 30):  # no number of sizes adds one that widths of whole heads do not have
        budgets = [1e8, 3e8, 1e9]
        with pytest.raises(PlanError, match="as widths are whole heads of 8") as caught:
            make_plan(budgets, sizes=sizes_for(BASE, budgets, per_budget=count), tokens_per_step=16)
        assert "take a larger budget, or a smaller vocabulary" in str(caught.value)
    with pytest.raises(PlanError, match=r"0 of the sizes fit") as caught:
        make_plan(sizes=[PRESETS["llama3-8b"], PRESETS["llama3-70b"]])
    assert "of about" in str(caught.value)
    small = ladder(BASE, 1.3e5, 4e5, 4)
    with pytest.raises(PlanError, match="all sizes take tokens above the expected optimum"):
        make_plan([4e13], sizes=small)
    with pytest.raises(PlanError, match="too close to be told apart"):
        make_plan([1e13, 1.1e13], sizes=small)
    for budgets in ([], [0.0], [math.nan], [-1e13]):
        with pytest.raises(PlanError, match="budgets must be numbers of FLOPs above 0"):
            make_plan(budgets, sizes=small)
        with pytest.raises(PlanError, match="budgets must be numbers of FLOPs above 0"):
            sizes_for(BASE, budgets)
    with pytest.raises(PlanError, match="no tokens to plan with"):
        make_plan(lengths=[])
    sizes = usual_sizes(tuple(BUDGETS))
    with pytest.raises(PlanError, match="two sizes have as many layers"):
        make_plan(sizes=[*sizes, *(size.model_copy(update={"ffn": size.ffn + 16}) for size in sizes)])


def trainer(
    plan: Sequence[PlannedRun], *, fails: str = "", stops: str = "", short: str = ""
) -> tuple[Callable[[list[str], Path], Run], list[str]]:
    """What stands in for training: losses of the surface; and the names of what was trained."""
    trained: list[str] = []

    def train(overrides: list[str], folder: Path) -> Run:
        planned = next(run for run in plan if run.name == folder.name)
        assert overrides == planned.overrides
        trained.append(folder.name)
        run = Run(folder) if folder.exists() else Run.create(folder, "name = 'small'\n")
        if folder.name == fails:
            raise TrainingError("10 steps in a row were not finite")
        parameters = parameter_count(planned.model)
        config = planned.model.model_dump(mode="json")
        run.write_json("model.json", {"config": config, "parameters": parameters, "flops_per_token": 6 * parameters})
        run.log({"kind": "train", "seconds": 1, "tokens_per_second": 1e3,
                 "flops_per_second": 1e3 * planned.compute / planned.tokens})  # fmt: skip
        if folder.name != stops:
            rates = planned.compute / planned.tokens / 6  # what the budget pays for, attention counted
            steps = planned.steps // 2 if folder.name == short else planned.steps
            loss = loss_of(rates, planned.tokens, **CHINCHILLA)
            run.write_json(
                "evaluation.json", {"kind": "language", "step": steps, "tokens": planned.tokens, "loss": loss}
            )
        return run

    return train, trained


def test_a_study_trains_what_is_planned_once_and_fits_it(tmp_path: Path) -> None:
    plan = make_plan(tokens_per_parameter=9.0, sizes=sizes_for(BASE, BUDGETS, tokens_per_parameter=9.0))
    stopped = plan[3].name
    train, trained = trainer(plan, stops=stopped)
    with pytest.raises(Interrupted, match="everything is saved"):
        train_plan(plan, tmp_path, train)
    assert trained == [run.name for run in plan[:4]]
    Run(tmp_path / stopped).write_json("evaluation.json", {"step": plan[3].steps - 1})  # somebody was curious
    train, trained = trainer(plan)
    said: list[str] = []
    outcome = train_plan(plan, tmp_path, train, target=1e18, title="surface", say=said.append)
    assert trained == [run.name for run in plan[3:]]
    assert sum("done before" in line for line in said) == 3
    law = outcome.study.laws["tokens"]
    assert law.exponent == pytest.approx(CHINCHILLA["a"] / (CHINCHILLA["a"] + CHINCHILLA["b"]), rel=0.05)
    content = json.loads((tmp_path / "isoflop.json").read_text())
    assert content["laws"]["tokens"]["exponent"] == law.exponent
    assert content["forecast"]["compute"] == 1e18
    assert content["counts_attention"]
    assert outcome.plot.is_file()
    assert (tmp_path / "isoflop.svg").is_file()


def test_a_run_that_diverges_is_left_out_and_named(tmp_path: Path) -> None:
    plan = make_plan()
    outcome = train_plan(plan, tmp_path, trainer(plan, fails=plan[2].name)[0])
    assert outcome.study.left_out == {plan[2].name: "10 steps in a row were not finite"}
    assert f"Left out: {plan[2].name}" in outcome.study.summary


def test_folders_of_another_plan_and_texts_that_end_early_are_refused(tmp_path: Path) -> None:
    plan = make_plan()
    with pytest.raises(DataError, match=f"ended at step {plan[1].steps // 2} of {plan[1].steps}"):
        train_plan(plan, tmp_path / "a", trainer(plan, short=plan[1].name)[0])
    with pytest.raises(Interrupted, match="everything is saved"):
        train_plan(plan, tmp_path / "b", trainer(plan, stops=plan[1].name)[0])
    train, trained = trainer(plan)
    with pytest.raises(RunError, match=f"{plan[1].name}: holds a run of another recipe"):
        train_plan(plan, tmp_path / "b", train, agrees=lambda overrides, place: overrides != plan[1].overrides)
    assert trained == []
    card = tmp_path / "b" / plan[0].name / "model.json"
    content = json.loads(card.read_text())
    content["config"]["ffn"] += 16
    del content["seal"]
    card.write_text(json.dumps(content))
    with pytest.raises(RunError, match="holds a run of another recipe or plan"):
        train_plan(plan, tmp_path / "b", trainer(plan)[0])


def test_the_command_prints_optima_law_and_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from cordillera import workflows
    from cordillera.cli.isoflop import isoflop

    asked: dict[str, object] = {}

    def fake(source: str, budgets: list[float], **options: object) -> IsoFlopOutcome:
        asked.update(options, source=source, budgets=budgets)
        return IsoFlopOutcome(
            tmp_path, study(surface_runs([6e18, 6e19, 6e20]), target=3.8e25), tmp_path / "isoflop.png"
        )

    monkeypatch.setattr(workflows, "isoflop", fake, raising=False)
    app = typer.Typer()
    app.command()(isoflop)
    budgets = ["--budget", "6e18", "--budget", "6e19", "--budget", "6e20"]
    result = CliRunner().invoke(app, ["llama-debug", *budgets, "--target", "3.8e25", "--set", "seed=2"])
    assert result.exit_code == 0, result.output
    assert asked["budgets"] == [6e18, 6e19, 6e20]
    assert asked["overrides"] == ["seed=2"]
    assert "Optimal tokens: " in result.output
    assert "Optimal parameters: " in result.output
    assert "At 3.8e25 FLOPs (63.3k times the largest budget that was trained: an extrapolation)" in result.output
    assert "isoflop.png" in result.output
    assert "isoflop.html" in result.output
