"""Text prepared once: the same files however it is interrupted or shared out, and damage that is named."""

from __future__ import annotations

import fcntl
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cordillera.data.language import tokenised as module
from cordillera.data.language.cleaning import CleaningConfig
from cordillera.data.language.shards import ShardWriter, TextDataset, token_dtype
from cordillera.data.language.tokenised import TextConfig, prepare_text
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import DataError
from tests.data import vocabularies as v
from tests.fuzzing import flips

TEXTS = [f"the cat number {i} sat on the mat, the end of {'é' * (i % 7)} 漢字\nfooter" for i in range(40)]


@pytest.fixture
def config(tmp_path: Path) -> TextConfig:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(lines[:25]))
    pl.DataFrame({"text": TEXTS[25:]}).write_parquet(folder / "b.parquet")
    (tmp_path / "model").mkdir()
    return TextConfig(
        path=str(folder),
        tokenizer=str(v.write_json(tmp_path / "model")),
        shard_tokens=200,
        cache_dir=str(tmp_path / "cache"),
    )


def _shards(dataset: TextDataset) -> list[str]:
    return sorted(path.name for path in dataset.folder.iterdir())


def test_documents_are_the_texts_in_order_with_their_ends(config: TextConfig) -> None:
    dataset = prepare_text(config)
    tokenizer = load_tokenizer(config.tokenizer)
    assert len(dataset) == len(TEXTS)
    for tokens, text in zip(dataset, TEXTS, strict=True):
        assert tokens[-1] == tokenizer.special_tokens["<|endoftext|>"]
        assert tokenizer.decode(tokens[:-1].tolist()) == text
    assert dataset.offsets[-1] == sum(map(len, dataset))
    assert len(_shards(dataset)) > 4
    assert all(len(dataset._tokens[i]) < 200 + 200 for i in range(len(dataset._tokens)))
    other = prepare_text(config.model_copy(update={"bos": True, "eos": False}))
    assert other[3].tolist() == [1, *dataset[3][:-1].tolist()]
    with pytest.raises(IndexError):
        dataset[len(TEXTS)]


def test_what_was_prepared_is_found_again(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_text(config)
    monkeypatch.setattr(module, "read_documents", lambda *args, **kwargs: pytest.fail("read again"))
    assert prepare_text(config.model_copy(update={"processes": 3})).folder == first.folder
    monkeypatch.undo()
    for change in ({"eos": False}, {"shard_tokens": 100}, {"cleaning": CleaningConfig()}):
        assert prepare_text(config.model_copy(update=change)).folder != first.folder
    path = Path(str(config.path)) / "a.jsonl"
    path.write_text(path.read_text() + '\n{"text": "more"}')
    assert len(prepare_text(config)) == len(first) + 1


def test_the_report_says_what_was_dropped(config: TextConfig) -> None:
    path = Path(str(config.path)) / "c.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("", "new one", TEXTS[0])))
    plain = prepare_text(config).facts["report"]
    assert (plain["kept"], plain["dropped"]["empty"], plain["dropped"]["exact duplicate"]) == (42, 1, 0)
    cleaning = CleaningConfig(near_duplicates=None)
    report = prepare_text(config.model_copy(update={"cleaning": cleaning})).facts["report"]
    assert (report["kept"], report["dropped"]["exact duplicate"], report["lines dropped"]) == (41, 1, 40)
    pages = CleaningConfig(exact=False, near_duplicates=None, line_repeats=None, repeated_ngrams={}, url_field="url")
    path.write_text("\n".join(json.dumps({"text": text, "url": "u"}) for text in ("older", "newer")))
    newest = prepare_text(config.model_copy(update={"path": str(path), "cleaning": pages}))
    assert newest.facts["report"]["dropped"]["older version of its page"] == 1
    assert load_tokenizer(config.tokenizer).decode(newest[0][:-1].tolist()) == "newer"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("", "new one", TEXTS[0])))
    quality = CleaningConfig(min_quality=0.5)
    chosen = prepare_text(
        config.model_copy(update={"cleaning": quality}), quality=lambda text: 1.0 if "new" in text else 0.0
    )
    assert len(chosen) == 1


@pytest.mark.parametrize("cleaning", [None, CleaningConfig(near_duplicates=None)])
def test_an_interrupted_preparation_goes_on_to_the_same_files(
    config: TextConfig, cleaning: CleaningConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped again and again, after every few documents: nothing whole is tokenised twice."""
    config = config.model_copy(update={"cleaning": cleaning})
    whole = prepare_text(config.model_copy(update={"cache_dir": f"{config.cache_dir}-whole"}))
    append = ShardWriter.append
    stops = 0
    tokenised = 0

    def stopping(writer: ShardWriter, tokens: list[int], text_hash: int) -> None:
        nonlocal left, tokenised
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        tokenised += 1
        append(writer, tokens, text_hash)

    monkeypatch.setattr(ShardWriter, "append", stopping)
    while True:
        left = 11
        try:
            dataset = prepare_text(config)
            break
        except KeyboardInterrupt:
            stops += 1
            assert stops < len(TEXTS)
            assert not list((Path(str(config.cache_dir)) / "text").glob("corpus*"))
    assert stops >= 3
    assert tokenised < 2 * len(TEXTS)
    assert dataset.fingerprint == whole.fingerprint
    assert dataset.facts["report"] == whole.facts["report"]
    assert _shards(dataset) == _shards(whole)
    for name in _shards(dataset):
        if name != "meta.json":
            assert (dataset.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert [path.suffix for path in dataset.folder.parent.iterdir() if path.name.startswith(".")] == [".lock"]


def test_a_stop_before_the_renaming_is_made_up_for(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare_text(config)
    monkeypatch.undo()
    assert len(prepare_text(config)) == len(TEXTS)


def test_several_processes_write_the_same_files(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_DOCUMENTS", 3)
    alone = prepare_text(config)
    shared = prepare_text(config.model_copy(update={"processes": 2, "cache_dir": f"{config.cache_dir}-2"}))
    assert shared.fingerprint == alone.fingerprint


def test_a_process_that_dies_is_reported(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = module.load_tokenizer

    def load_and_lose(path: str) -> Any:
        tokenizer = whole(path)
        Path(path).unlink()
        return tokenizer

    monkeypatch.setattr(module, "load_tokenizer", load_and_lose)
    with pytest.raises(DataError, match="a process that tokenises has died"):
        prepare_text(config.model_copy(update={"processes": 1}))


def test_a_second_process_is_turned_away(config: TextConfig) -> None:
    dataset = prepare_text(config)
    moved = dataset.folder.with_name("moved")
    dataset.folder.rename(moved)
    with open(dataset.folder.with_name(f".{dataset.folder.name}.lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare_text(config)
    assert prepare_text(config).fingerprint == dataset.fingerprint


def test_processes_that_wait_find_what_one_prepares(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    whole = module.read_documents

    def slow(*args: Any, **options: Any) -> Iterator[Any]:
        reads.append(threading.current_thread().name)
        time.sleep(0.3)
        yield from whole(*args, **options)

    monkeypatch.setattr(module, "read_documents", slow)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: prepare_text(config, wait_s=20), range(3)))
    assert len(reads) == 1
    assert len({(dataset.folder, dataset.fingerprint) for dataset in found}) == 1


def test_bad_input_stops_before_a_corpus_is_there(config: TextConfig) -> None:
    folder = Path(str(config.path))
    for name, content, message in (
        ("z.jsonl", b'{"text": "a"}\n{"x": 1}', r"z.jsonl:2: there is no field 'text'"),
        ("z.txt", b"", "the file is empty"),
        ("z.txt", b"\xff", r"z.txt:1: byte 0 \(0xff\) is not UTF-8"),
    ):
        (folder / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            prepare_text(config)
        (folder / name).unlink()
    assert not list((Path(str(config.cache_dir)) / "text").glob("corpus*"))
    for path, message in ((str(folder / "absent.txt"), "no such file"), (str(folder / "*.csv"), "no file fits")):
        with pytest.raises(DataError, match=message):
            prepare_text(config.model_copy(update={"path": path}))
    (folder / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="no document is left: 1 were read, dropped: 1 empty"):
        prepare_text(config.model_copy(update={"path": str(folder / "blank.txt")}))


def test_a_token_that_the_vocabulary_lacks_is_not_asked_for(config: TextConfig, tmp_path: Path) -> None:
    content = v.json_content()
    content["added_tokens"] = []
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    bare = config.model_copy(update={"tokenizer": str(path)})
    with pytest.raises(DataError, match="no token for eos"):
        prepare_text(bare)
    assert len(prepare_text(bare.model_copy(update={"eos": False}))) == len(TEXTS)


def test_damage_is_found_and_the_shard_named(config: TextConfig) -> None:
    dataset = prepare_text(config)
    for name in ("shard-00001.tokens", "shard-00002.offsets", "meta.json"):
        path = dataset.folder / name
        good = path.read_bytes()
        half = len(good) // 2
        for bad, verify in (
            (good[:half] + bytes([good[half] ^ 1]) + good[half + 1 :], True),
            (good[:-1], False),
            (good + b"\0", False),
        ):
            path.write_bytes(bad)
            with pytest.raises(DataError, match=name):
                TextDataset(dataset.folder, verify=verify)
        path.unlink()
        with pytest.raises(DataError, match=name):
            TextDataset(dataset.folder, verify=False)
        path.write_bytes(good)
    path = dataset.folder / "shard-00000.offsets"
    ends = np.fromfile(path, "<i8")
    ends[1] = ends[-1] + 1
    ends.tofile(path)
    with pytest.raises(DataError, match=r"shard-00000\.offsets: the file is damaged: offsets do not go up"):
        TextDataset(dataset.folder, verify=False)


def test_any_flip_or_cut_of_any_file_of_a_corpus_is_refused_by_its_name(
    config: TextConfig, fuzz_inputs: Callable[[int], int]
) -> None:
    dataset, rng = prepare_text(config), random.Random(3)
    for path in sorted(dataset.folder.iterdir()):
        content = path.read_bytes()
        for number in range(fuzz_inputs(7) if content else 0):
            path.write_bytes(flips(content, rng) if number % 5 else content[: rng.randrange(len(content))])
            with pytest.raises(DataError, match=path.name):
                TextDataset(dataset.folder)
        path.write_bytes(content)
    assert len(TextDataset(dataset.folder)) == len(dataset)


@given(
    documents=st.lists(st.lists(st.integers(0, 70_000), max_size=9), max_size=12),
    size=st.integers(1, 20),
    large=st.booleans(),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shards_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], size: int, large: bool
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    limit = 70_001 if large else 65_536
    documents = [[token % limit for token in document] for document in documents]
    writer = ShardWriter(folder, limit, size)
    for number, document in enumerate(documents):
        writer.append(document, 2**64 - 1 - number)
    writer.finish({})
    dataset = TextDataset(folder)
    assert dataset.hashes.tolist() == [2**64 - 1 - number for number in range(len(documents))]
    assert dataset.dtype == token_dtype(limit) == (np.uint32 if large else np.uint16)
    assert [tokens.tolist() for tokens in dataset] == documents
    assert dataset.offsets[-1] == sum(map(len, documents))


def test_a_full_disk_is_said(config: TextConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: ShardWriter) -> Iterator[None]:
        with module.disk_errors(self.folder):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "close", full)
    with pytest.raises(DataError, match="the disk is full"):
        prepare_text(config)


def test_preparation_needs_no_torch() -> None:
    code = (
        "import sys, cordillera.data.language.tokenised, cordillera.data.language.stream\n"
        "import cordillera.data.tokenizers.load\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
