"""Tables in a file behind a cache: the bits of tables in memory, and a file that is whole after any failure."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.embeddings import row_file
from cordillera.embeddings.file_tables import FileTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import CheckpointError, DataError, DependencyError, RunError, TrainingError
from cordillera.jagged import JaggedBatch
from tests.embeddings.popular import DIM, OPTIMIZERS, popular, spec

pytest.importorskip("numba")

SPEC = spec(900, 300)


def in_file(
    folder: Path,
    optimizer: str = "rowwise_adagrad",
    policy: str = "lfu",
    cache: float = 0.05,
    seed: int = 0,
    read_only: bool = False,
) -> FileTables:
    config = _config(optimizer, cache=cache, cache_policy=policy)
    generator = torch.Generator().manual_seed(seed)
    return FileTables(SPEC, DIM, config, folder, read_only=read_only, generator=generator)


def in_memory(optimizer: str = "rowwise_adagrad") -> EmbeddingTables:
    return EmbeddingTables(SPEC, DIM, _config(optimizer), generator=torch.Generator().manual_seed(0))


def _config(optimizer: str, **options: object) -> TablesConfig:
    values = {"name": optimizer, "learning_rate": 0.1, "initial_accumulator": 0.01, "backend": "auto"}
    return TablesConfig.model_validate({**values, **options})


def batch(seed: int, size: int = 40) -> JaggedBatch:
    return popular(seed, size, 900, 300, 3)


def step(tables: EmbeddingTables, seed: int, following: int | None = None) -> Tensor:
    output = tables(batch(seed))
    if following is not None and isinstance(tables, FileTables):
        tables.prefetch(batch(following))
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(seed + 1000)))
    tables.update()
    return output.detach()


def same(tables: FileTables, expected: EmbeddingTables) -> None:
    for name in SPEC.tables:
        assert torch.equal(tables.table(name), expected.table(name)), name
        start, rows = expected._place_of(name)
        for part, tensor in expected._state().items():
            assert torch.equal(tables._part(part, *tables._place_of(name)), tensor[start : start + rows]), part


@pytest.mark.cases(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("ahead", [False, True])
def test_training_gives_the_bits_of_tables_in_memory(
    optimizer: str, policy: str, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cordillera.embeddings.file_tables._AGE_EVERY", 7)
    tables, expected = in_file(tmp_path, optimizer, policy), in_memory(optimizer)
    same(tables, expected)
    for seed in range(20):
        assert torch.equal(step(tables, seed, seed + 1 if ahead else None), step(expected, seed))
        if seed % 6 == 5:
            tables.flush()
            tables.eval()
            with torch.no_grad():
                assert torch.equal(tables(batch(seed + 50)), expected(batch(seed + 50)))
            tables.train()
    same(tables, expected)
    events = tables.statistics
    assert events["outside"] > 0
    assert events["hits"] > 0
    assert events["writes"] > 0


@pytest.mark.slow
def test_rows_that_become_popular_get_lines_after_one_halving_however_popular_others_were(tmp_path: Path) -> None:
    spec = FeatureSpec((), (SparseFeature("a", "t"),), {"t": 64}, ("y",))
    tables = FileTables(spec, 2, _config("sgd", cache=0.5, cache_policy="lfu"), tmp_path / "t")

    def reads_after(rows: range, updates: int) -> int:
        """Rows of the last step that were in no line."""
        one = JaggedBatch(("a",), torch.tensor([*rows]), torch.arange(len(rows) + 1), one_hot=True)
        for _ in range(updates):
            before = tables.statistics["reads"]
            tables(one).sum().backward()
            tables.update()
        return tables.statistics["reads"] - before

    assert reads_after(range(32), 3000) == 0
    assert reads_after(range(32, 64), 1) == 32
    assert reads_after(range(32, 64), 1100) == 0


def test_several_passes_and_a_wrong_forecast_change_nothing(tmp_path: Path) -> None:
    tables, expected = in_file(tmp_path), in_memory()
    for seed in range(8):
        for model in (tables, expected):
            for part in range(2):
                output = model(batch(10 * seed + part))
                if isinstance(model, FileTables):
                    model.prefetch(batch(777 + seed))
                output.backward(output.detach() + 1)
            model.update()
    late, expected_late = tables(batch(90)), expected(batch(90))
    step(tables, 91), step(expected, 91)
    for model, output in ((tables, late), (expected, expected_late)):
        output.sum().backward()
        model.update()
        model(batch(92)).sum().backward()
        model.discard()
    same(tables, expected)


@pytest.mark.cases(2)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_gives_the_bits_of_tables_in_memory(
    policy: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_file, "_FEW_ROWS", 2)  # several threads read
    tables, expected = in_file(tmp_path, policy=policy, cache=0.02), in_memory()
    random = np.random.default_rng(seed)
    for _ in range(60):
        number, ahead = (int(one) for one in random.integers(0, 12, 2))
        action = random.choice(
            ["step", "ahead", "look", "late", "discard", "flush"], p=[0.3, 0.3, 0.15, 0.1, 0.1, 0.05]
        )
        if action in ("step", "ahead"):
            assert torch.equal(step(tables, number, ahead if action == "ahead" else None), step(expected, number))
        elif action == "flush":
            tables.flush()
        else:
            for model in (tables, expected):
                model.train(action != "look")
                with torch.set_grad_enabled(action != "look"):
                    outputs = [model(batch(number)), model(batch(ahead))]
                model.train()
                if action != "look":
                    outputs[0].sum().backward()
                if action == "late":
                    model.update()
                    outputs[1].sum().backward()
                    model.update()
                if action == "discard":
                    model.discard()
    same(tables, expected)


def test_a_file_is_replaced_by_another_and_read_by_many(tmp_path: Path) -> None:
    first, second, expected = in_file(tmp_path / "a"), in_file(tmp_path / "b", seed=4), in_memory()
    for seed in range(5):
        step(first, seed), step(expected, seed)
        step(second, seed + 50, seed + 51)
    first.flush()
    second.load(tmp_path / "a")
    assert second.step == 5
    same(second, expected)
    readers = [in_file(tmp_path / "a", read_only=True) for _ in range(2)]
    for reader in readers:
        reader.eval()
        assert torch.equal(reader(batch(70)), expected.eval()(batch(70)))
        with pytest.raises(RunError, match="read only"):
            reader.flush()
    expected.train()
    for seed in range(5, 9):
        assert torch.equal(step(second, seed, seed + 1), step(expected, seed))
    same(second, expected)
    with pytest.raises(CheckpointError, match="does not exist"):
        second.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="expected"):
        in_file(tmp_path / "c", "adam").load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="does not exist"):
        in_file(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_opened_folder_goes_on_from_its_last_flush(optimizer: str, tmp_path: Path) -> None:
    first, expected = in_file(tmp_path / "a", optimizer), in_memory(optimizer)
    for seed in range(6):
        step(first, seed), step(expected, seed)
    first.flush()
    state = first.state_dict()
    for seed in range(50, 54):  # lost, as the process ends without a flush
        step(first, seed)
    assert first.file._log_end > 0
    first.close()
    second = in_file(tmp_path / "a", optimizer, seed=9, cache=0.1)
    assert second.step == 6
    second.load_state_dict(state)
    same(second, expected)
    for seed in range(6, 12):
        assert torch.equal(step(second, seed), step(expected, seed))
    same(second, expected)


def test_a_copy_is_of_one_update_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "_COPY_ROWS", 64)
    tables, expected = in_file(tmp_path / "a"), in_memory()
    for seed in range(5):
        step(tables, seed), step(expected, seed)
    copying = tables.save(tmp_path / "b", wait=False)
    for seed in range(5, 15):
        step(tables, seed)
    copying.result()
    copied = in_file(tmp_path / "b", seed=3)
    assert copied.step == 5
    same(copied, expected)
    tables.flush()


def test_rows_overwritten_before_they_are_copied_are_restored_in_the_copy(tmp_path: Path) -> None:
    tables, expected = in_file(tmp_path / "a"), in_memory()
    for seed in range(5):
        step(tables, seed), step(expected, seed)
    tables.flush()
    for seed in range(5, 9):
        step(tables, seed)
    tables.file.copy(tmp_path / "b")
    same(in_file(tmp_path / "b", seed=3), expected)


def _fails_once_full(tables: FileTables) -> None:
    def train() -> None:
        for seed in range(4, 30):
            step(tables, seed)

    with pytest.raises(RunError, match=r"(the disk is full|larger than may be)[\s\S]*as of update 4"):
        train()
    tables.discard()
    with pytest.raises(RunError, match="an earlier write failed"):
        tables.flush()
    tables.close()


@pytest.mark.parametrize("after", [0, 3])
def test_a_full_disk_leaves_the_file_as_of_the_last_flush(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, expected = in_file(tmp_path), in_memory()
    for seed in range(4):
        step(tables, seed), step(expected, seed)
    tables.flush()
    write, calls = os.pwrite, iter(range(1000))

    def short_then_full(file: int, block: bytes, offset: int) -> int:
        call = next(calls)
        if call < after:
            return write(file, block, offset)
        if call == after:
            return write(file, block[: len(block) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_file.os, "pwrite", short_then_full)
    _fails_once_full(tables)
    monkeypatch.undo()
    again = in_file(tmp_path)
    assert again.step == 4
    same(again, expected)


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    tables, expected = in_file(tmp_path), in_memory()
    for seed in range(4):
        step(tables, seed), step(expected, seed)
    tables.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        _fails_once_full(tables)
        with pytest.raises(RunError, match="larger than may be"):
            in_file(tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    same(in_file(tmp_path), expected)


def test_a_torn_log_counts_up_to_its_last_whole_block(tmp_path: Path) -> None:
    file = row_file.RowFile(tmp_path / "a", 10, 2, {})
    file.records[:] = 1
    file.commit(3)
    for row in (4, 6):
        file.write(np.array([row]), [np.full((1, 2), 9, np.float32)], np.array([0]))
    file.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    log = tmp_path / "b" / "undo.log"
    log.write_bytes(log.read_bytes()[:-3])  # a process that ends while it writes this has not overwritten the row
    whole, torn = (row_file.RowFile(tmp_path / name, 10, 2, {}) for name in "ab")
    assert (whole.records == 1).all()
    assert torn.records[:, 0].tolist() == [1, 1, 1, 1, 1, 1, 9, 1, 1, 1]
    assert torn.step == 3


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="cache > 0"):
        FileTables(SPEC, DIM, TablesConfig(), tmp_path)
    tables = in_file(tmp_path)
    with pytest.raises(CheckpointError, match="expected"):
        in_file(tmp_path, "adam")
    bad = batch(0)
    bad.values[3] = 900
    with pytest.raises(DataError, match="id 900"):
        tables(bad)
    tables.prefetch(bad)  # the lookup will say so
    with pytest.raises(CheckpointError, match="the file of update 0"):
        tables.set_extra_state(torch.tensor(2))
    tables(batch(0)).sum().backward()
    with pytest.raises(TrainingError, match="wait for an update"):
        tables.flush()
    tables.update()
    tables.flush()
    (tmp_path / "rows.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="bytes"):
        in_file(tmp_path)


def test_memory_is_that_of_the_cache(tmp_path: Path) -> None:
    tables = in_file(tmp_path, cache=0.1)
    lines = tables.memory_bytes()["lines"]
    assert lines == (tables.slots + 1024) * (DIM + 1) * 4
    assert tables.memory_bytes()["file"] == 1200 * (DIM + 1) * 4 == (tmp_path / "rows.bin").stat().st_size
