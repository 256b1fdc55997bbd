"""Folders as Hugging Face's ``datasets`` and its Hub lay them out, and the same tokens out of every kind of source."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.language.batches import BatchConfig, TextBatches
from cordillera.data.language.chats.rows import read_chats
from cordillera.data.language.cleaning import CleaningConfig
from cordillera.data.language.corpora import TextDataConfig, prepare_corpora
from cordillera.data.language.data_folders import data_files
from cordillera.data.language.documents import read_documents
from cordillera.data.language.shards import ShardWriter
from cordillera.data.language.tokenised import TextConfig, prepare_text
from cordillera.data.packing.work import DocumentWork
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import DataError

TEXTS = [f"document {number} of some that are made, é" for number in range(40)]


def save(folder: Path, rows: list[dict[str, Any]], shards: int = 1, **state: Any) -> Path:
    """Write what ``Dataset.save_to_disk`` of ``datasets`` 5.2 writes."""
    folder.mkdir(parents=True)
    size = -(-len(rows) // shards)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(rows[number * size : (number + 1) * size])
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    content = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(content | state))
    (folder / "dataset_info.json").write_text('{"citation": "", "features": {}}')
    return folder


def of(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text, "other": {"number": number}} for number, text in enumerate(texts)]


def read(path: Path | str) -> list[str]:
    return [document.text for document in read_documents(data_files(str(path)))]


def sources(folder: Path, texts: list[str]) -> dict[str, str]:
    """The same documents in every kind of source, by its name."""
    (folder / "plain").mkdir()
    for number, text in enumerate(texts):
        (folder / "plain" / f"{number:03}.txt").write_text(text, newline="")
    table = pa.Table.from_pylist(of(texts))
    (folder / "hub" / "data").mkdir(parents=True)
    (folder / "hub" / "README.md").write_text("---\nlicense: mit\n---\nA data set.")
    half = len(texts) // 2
    for number, part in enumerate((table[:half], table[half:]) if half else (table,)):
        pq.write_table(part, folder / "hub" / "data" / f"train-{number:05}-of-00002.parquet", row_group_size=3)
    lines = "".join(json.dumps(row) + "\n" for row in of(texts))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    save(folder / "saved", of(texts), 2 if half else 1)
    return {name: str(folder / name) for name in ("plain", "hub", "a.jsonl", "b.jsonl.gz", "saved")}


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff"), min_size=1), max_size=6
    )
)
@settings(max_examples=6)
def test_every_source_gives_the_same_shards(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("same")
    texts = [*texts, "not blank"]
    paths, decode = sources(folder, texts), load_tokenizer("bytes").decode
    for cleaning in (None, CleaningConfig(near_duplicates=None)):
        config = TextConfig(path="", cache_dir=str(folder / "cache"), shard_tokens=50, cleaning=cleaning)
        found = {}
        for name, path in paths.items():
            corpus = prepare_text(config.model_copy(update={"path": path}))
            files = {file.name: file.read_bytes() for file in corpus.folder.iterdir() if file.name != "meta.json"}
            found[name] = (
                files,
                corpus.facts["report"],
                [decode(tokens.tolist(), skip_special=True) for tokens in corpus],
            )
        assert all(one == found["plain"] for one in found.values())
        if cleaning is None:
            assert found["plain"][2] == [text for text in texts if text.strip()]


def test_an_interrupted_preparation_of_a_saved_set_goes_on_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TextConfig(path=str(save(tmp_path / "set", of(TEXTS), 3)), cache_dir=str(tmp_path / "a"), shard_tokens=200)
    whole = prepare_text(config.model_copy(update={"cache_dir": str(tmp_path / "b")}))
    append, left = ShardWriter.append, 0

    def stopping(writer: ShardWriter, tokens: list[int], text_hash: int) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        append(writer, tokens, text_hash)

    monkeypatch.setattr(ShardWriter, "append", stopping)
    stops = 0
    while True:
        left = 11
        try:
            corpus = prepare_text(config)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 3
    assert corpus.fingerprint == whole.fingerprint


def test_training_reads_the_same_batches_and_goes_on_exactly(tmp_path: Path) -> None:
    work = DocumentWork.of_model(hidden=8, ffn=16, heads=2, kv_heads=1)
    packing = BatchConfig(tokens=300, context=100)
    found = []
    for path in sources(tmp_path, TEXTS).values():
        text = TextDataConfig(path=path, cache_dir=str(tmp_path / "cache"), held_out=0.1, epochs=2)
        corpora = prepare_corpora(text)

        def batches(text: TextDataConfig = text, corpora: Any = corpora) -> TextBatches:
            return TextBatches(text, packing, corpora, work=work, microbatches=packing.count(), seed=1)

        first = batches()
        whole = [[one.tokens.tolist() for one in step.microbatches] for step in batches()]
        next(first), next(first)
        resumed = batches()
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [[one.tokens.tolist() for one in step.microbatches] for step in resumed] == whole[2:]
        found.append((whole, [list(map(int, held)) for held in corpora.held_out[0]]))
    assert len(found[0][0]) > 4
    assert all(one == found[0] for one in found)


def test_a_saved_set_is_what_its_state_lists(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", of(TEXTS), 3)
    shutil.copy(folder / "data-00001-of-00003.arrow", folder / "cache-487720c2ce1a28f9.arrow")  # as ``map`` leaves it
    assert read(folder) == TEXTS
    assert [path.name for path in data_files(str(folder))] == [
        f"data-0000{number}-of-00003.arrow" for number in range(3)
    ]
    assert read(tmp_path) == TEXTS  # of a folder around it
    assert read(folder / "data-00001*") == TEXTS[14:28]
    (folder / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003.arrow: state.json lists a file that is not there"):
        data_files(str(folder))


def test_files_outside_of_a_saved_set_are_not_reached(tmp_path: Path) -> None:
    save(tmp_path / "other", of(["secret"]))
    folder = save(tmp_path / "set", of(TEXTS), _data_files=[{"filename": "../other/data-00000-of-00001.arrow"}])
    assert read(folder) == TEXTS


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "state.json: is not JSON"),
        ("[]", "state.json: is not a JSON object"),
        ('{"_data_files": [3]}', "_data_files is no list of file names"),
        ('{"_data_files": 3}', "_data_files is no list of file names"),
        ('{"_data_files": [{"filename": ""}]}', "lists a file that is not there"),
        ('{"_data_files": []}', "the data set holds no rows"),
        ('{"epoch": 3}', "there is no column 'text'"),
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, state: str, message: str) -> None:
    folder = save(tmp_path / "set", [{"body": "a"}])
    (folder / "state.json").write_text(state)
    with pytest.raises(DataError, match=message):
        read(folder)


def test_rows_of_training_and_evaluation_are_not_mixed(tmp_path: Path) -> None:
    both = tmp_path / "both"
    save(both / "train", of(TEXTS))
    save(both / "test", of(["held out"]))
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    hub = tmp_path / "hub"
    for name, texts in (("train-00000-of-00001", TEXTS), ("validation-00000-of-00001", ["held out"])):
        (hub / "data").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(of(texts)), hub / "data" / f"{name}.parquet")
    for folder, others in ((both, "test, train"), (hub, "train, validation")):
        with pytest.raises(DataError, match=f"several splits: {others}") as error:
            data_files(str(folder))
        assert error.value.remedy is not None
        pattern = error.value.remedy.split()[-1]
        assert read(pattern) == TEXTS
    assert read(both / "test") == ["held out"]
    for name in ("train", "test"):
        (tmp_path / "nested" / name / "en").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(of(TEXTS)), tmp_path / "nested" / name / "en" / "0000.parquet")
    with pytest.raises(DataError, match="several splits: test, train"):
        data_files(str(tmp_path / "nested"))
    assert read(tmp_path / "nested" / "train") == TEXTS
    (tmp_path / "notes" / "test").mkdir(parents=True)
    for place in ("train.txt", "test/a.txt"):  # plain text has no splits
        (tmp_path / "notes" / place).write_text(place)
    assert read(tmp_path / "notes") == ["test/a.txt", "train.txt"]


def test_descriptions_beside_rows_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("My notes.")
    (tmp_path / "a.txt").write_text("text")
    assert read(tmp_path) == ["My notes.", "text"]
    (tmp_path / "b.jsonl").write_text('{"text": "row"}')
    assert read(tmp_path) == ["text", "row"]
    assert read(tmp_path / "README.md") == ["My notes."]


def test_chats_come_from_a_saved_set(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]}
        for n in range(20)
    ]
    chats = read_chats(str(save(tmp_path / "set", rows, 2)))
    assert [[message.content for message in chat.messages] for chat in chats] == [[f"q{n}", f"a{n}"] for n in range(20)]
    assert chats[-1].where == f"{tmp_path / 'set' / 'data-00001-of-00002.arrow'}:10"


def test_a_saved_set_in_a_store_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORDILLERA_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.put(str(save(tmp_path / "set", of(TEXTS), 2)), "/sets/one", recursive=True)
    try:
        with pytest.raises(DataError, match=r"is not read from a store"):
            data_files("memory://sets/one")
        assert read("memory://sets/one/data-*.arrow") == TEXTS
    finally:
        store.rm("/sets", recursive=True)
