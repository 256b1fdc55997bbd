"""``cordillera data``."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from cordillera.cli.data import app
from cordillera.data.ranking import datasets
from cordillera.data.ranking import rows as raw
from cordillera.data.ranking.logs.synthetic import SyntheticConfig
from cordillera.errors import DataError


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    small = SyntheticConfig(rows=5_000)
    whole = raw.configure
    monkeypatch.setattr(
        "cordillera.data.ranking.rows.configure",
        lambda name, path: whole(name, path).model_copy(update={"synthetic": small}),
    )


def run_data(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_list_names_every_data_set_with_its_terms() -> None:
    text = run_data("list")
    assert all(name in text for name in datasets.DATASETS)
    assert "redistribute" in text


def test_describe_shows_splits_features_and_the_best_possible_entropy() -> None:
    text = run_data("describe", "synthetic")
    for part in ("train", "4,000", "click = 1", "C26", "identity", "best possible NE", "terms:"):
        assert part in text


def test_get_prints_terms_and_exports_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    text = run_data("get", "synthetic", "--export", str(out), "--rows", "20")
    assert "terms:" in text
    assert len(pl.read_csv(out)) == 20


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="choose one of"):
        run_data("get", "netflix")
