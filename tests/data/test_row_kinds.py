"""Files for language models that are given as logs of ranking models: the error says what learns from them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from cordillera import recipe as recipes
from cordillera.data.language.row_kinds import check_is_log
from cordillera.errors import DataError

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
KINDS = {
    "smollm2-sft": [{"messages": TURNS}, {"prompt": "a", "completion": "b"}, {"prompt": TURNS[:1], "answer": "b"}],
    "smollm2-dpo": [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"chosen": TURNS, "rejected": TURNS}],
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("recipe", "row"), [(recipe, row) for recipe, rows in KINDS.items() for row in rows])
def test_rows_of_chats_name_the_recipe_that_learns_from_them(
    recipe: str, row: dict[str, Any], ending: str, tmp_path: Path
) -> None:
    file = tmp_path / f"it's mine.{ending}"
    frame = pl.DataFrame([row])
    frame.write_ndjson(file) if ending == "jsonl" else frame.write_parquet(file)
    with pytest.raises(DataError, match="for a language model") as refused:
        recipes.write_recipe(str(file), tmp_path / "mine.toml")
    _, name, option, change = shlex.split(str(refused.value.remedy).split("`")[1])[1:]
    assert (name, option) == (recipe, "--set")
    assert recipes.load(name, [change, "model.preset=smollm2-135m"]).data.path == str(file)
    assert not (tmp_path / "mine.toml").exists()


def test_texts_and_other_forms_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for row, said in (
        ({"text": "a"}, "train llama-debug"),
        ({"instruction": "a", "output": "b"}, "`prompt` and `completion`"),
        ({"conversations": []}, "`prompt` and `completion`"),
    ):
        pl.DataFrame([row]).write_ndjson(file)
        with pytest.raises(DataError) as refused:
            check_is_log([file])
        assert said in str(refused.value.remedy)


def test_a_log_in_lines_of_json_is_told_how_to_become_parquet(tmp_path: Path) -> None:
    file = tmp_path / "clicks.jsonl"
    pl.DataFrame({"click": [0, 1], "price": [0.5, 2.0]}).write_ndjson(file)
    with pytest.raises(DataError, match="logs are not read from lines of JSON") as refused:
        check_is_log([file])
    _, *arguments = shlex.split(str(refused.value.remedy).partition(": ")[2])
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, timeout=60)
    assert pl.read_parquet(tmp_path / "clicks.parquet").to_dicts() == pl.read_ndjson(file).to_dicts()


def test_logs_and_damaged_tables_are_left_to_their_reader(tmp_path: Path) -> None:
    pl.DataFrame({"click": [0, 1], "messages": [3, 4], "text": ["a", "b"]}).write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    for file in ("a.parquet", "b.parquet", "c.csv"):
        check_is_log([tmp_path / file])
