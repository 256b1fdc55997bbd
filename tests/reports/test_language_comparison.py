"""Language runs side by side: differences only where they mean something."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from cordillera.errors import DataError
from cordillera.reports.language.comparison import compare_language
from cordillera.run import Run
from tests.training.sample_language_runs import make_evaluation, make_language_run, make_model, make_records


def run_of(folder: Path, loss: float, **changes: object) -> Run:
    run = make_language_run(folder, 100)
    content = {"kind": "language", "split": "validation", "step": 100, "tokens": 100} | make_evaluation(loss) | changes
    run.write_json("evaluation.json", content)
    return run


def test_differences_are_to_the_first(tmp_path: Path) -> None:
    result = compare_language([run_of(tmp_path / "a", 2.5), run_of(tmp_path / "b", 2.25), run_of(tmp_path / "c", 2.75)])
    assert [row.name for row in result.rows] == ["a", "b", "c"]
    assert math.isnan(result.rows[0].difference)
    assert [row.difference for row in result.rows[1:]] == [-0.25, 0.25]
    train = [record for record in make_records(100) if record["kind"] == "train"]
    tokens = sum(record["tokens_per_second"] * record["seconds"] for record in train)
    assert result.rows[1].tokens_per_second == pytest.approx(tokens / sum(record["seconds"] for record in train))
    assert (result.rows[0].tokens, result.rows[0].parameters, result.rows[0].processes) == (13_107_200, 134_515_008, 4)
    assert len(result.notes) == 1
    assert compare_language([run_of(tmp_path / "alone", 2.5)]).notes == []


def test_runs_whose_folders_have_one_name_are_told_apart(tmp_path: Path) -> None:
    targets = {"a/small": 7, "b/small": 8, "c": 7}
    result = compare_language([run_of(tmp_path / place, 2.5, targets=count) for place, count in targets.items()])
    first, second = str(tmp_path / "a" / "small"), str(tmp_path / "b" / "small")
    assert [row.name for row in result.rows] == [first, second, "c"]
    assert f"{second} has no difference: its evaluation is of other tokens than that of {first}." in result.notes


@pytest.mark.parametrize(
    ("objective", "unit"),
    [("sft", "nats a token"), ("dpo", "nats a pair"), ("reward", "nats a pair"), ("grpo", "of the objective")],
)
def test_losses_are_in_the_unit_of_the_runs(tmp_path: Path, objective: str, unit: str) -> None:
    runs = [run_of(tmp_path / name, 0.5) for name in "ab"]
    for run in runs:
        run.write_json("model.json", {**make_model(), "objective": objective})
    [note] = compare_language(runs).notes
    assert note.startswith(f"Losses are {unit if unit.startswith('of') else f'in {unit}'}; differences are to a")


def test_losses_over_other_tokens_are_not_compared(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", 2.5)
    longer = run_of(tmp_path / "longer", 2.0, targets=7)
    books = run_of(tmp_path / "books", 2.0, split="books")
    other = run_of(tmp_path / "other", 2.0)
    card = make_model()
    card["config"]["vocabulary"] = 128_256
    other.write_json("model.json", card)
    fresh = make_language_run(tmp_path / "fresh", 100, [])
    (fresh.folder / "evaluation.json").unlink()
    result = compare_language([first, longer, books, other, fresh])
    assert all(math.isnan(row.difference) for row in result.rows)
    notes = " ".join(result.notes)
    for text in (
        "longer has no difference: its evaluation is of other tokens than that of first",
        "books has no difference: its evaluation is of the split books, unlike that of first",
        "other has no difference: its evaluation is over another vocabulary than that of first",
        "fresh has not been evaluated",
    ):
        assert text in notes
    backwards = compare_language([fresh, first])
    assert math.isnan(backwards.rows[1].difference)
    assert len(backwards.notes) == 2


def test_runs_that_have_not_finished_or_predict_nothing_are_noted(tmp_path: Path) -> None:
    whole, cut, broken = (run_of(tmp_path / name, loss) for name, loss in (("a", 2.5), ("b", 2.4), ("c", math.nan)))
    cut.write_status("interrupted", 3, 1000)
    result = compare_language([whole, cut, broken])
    assert any(note.startswith("b: This run is not finished") and "step 3 of 1,000" in note for note in result.notes)
    assert any(note.startswith("c: the loss of its evaluation is NaN") for note in result.notes)
    assert "| c | NaN |" in result.to_markdown()
    assert not any(note.startswith("a:") for note in result.notes)


def test_the_table_reads_the_same_in_all_forms(tmp_path: Path) -> None:
    result = compare_language([run_of(tmp_path / "a|b", 2.5), run_of(tmp_path / "c", 2.25)])
    lines = [line for line in result.to_markdown().splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert "a\\|b" in lines[2]
    assert "| 2.2500 | -0.2500 | 9.488 |" in lines[3]
    assert {line.replace("\\|", "").count("|") for line in lines} == {11}
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result.to_table())
    assert "-0.2500" in console.export_text()
    assert json.loads(result.to_json())["rows"][0]["difference"] is None


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run"):
        compare_language([])
    run = run_of(tmp_path / "a", 2.5)
    (run.folder / "checkpoints").mkdir()
    with pytest.raises(DataError, match="given twice"):
        compare_language([run, Run(run.folder / "checkpoints" / "..")])
    pairs = run_of(tmp_path / "pairs", 0.6)
    pairs.write_json("model.json", {**make_model(), "objective": "dpo"})
    with pytest.raises(DataError, match="pairs: its losses are in nats a pair, those of a are in nats a token"):
        compare_language([run, pairs])
    (run.folder / "model.json").write_text("{")
    with pytest.raises(DataError, match=r"model\.json: is not JSON"):
        compare_language([run])
