"""Checkpoints are complete or absent, and every byte is verified."""

import errno
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cordillera.errors import CheckpointError, RunError
from cordillera.training import checkpoints


def _tensors():
    return {
        "model.weight": torch.arange(12.0).view(3, 4).t(),  # not contiguous
        "model.bf16": torch.ones(3, dtype=torch.bfloat16),
        "model.nan": torch.tensor([float("nan"), float("inf")]),
        "step": torch.tensor(7),
    }


def test_what_is_saved_comes_back_to_the_bit(tmp_path):
    state = {"step": 12, "best": None, "big": 3**80}
    folder = checkpoints.save(tmp_path, _tensors(), state)
    loaded = checkpoints.load(folder)
    assert loaded.state == state
    assert loaded.step == 12
    for name, tensor in _tensors().items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(
            loaded.tensors[name].contiguous().view(torch.uint8) if tensor.dim() else loaded.tensors[name],
            tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor,
        )


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "checksums.json"])
@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.999])
def test_one_flipped_byte_anywhere_is_refused_by_name(tmp_path, name, where):
    folder = checkpoints.save(tmp_path, _tensors(), {"step": 1})
    content = bytearray((folder / name).read_bytes())
    content[int(where * len(content))] ^= 0x40
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(folder)
    assert str(folder) in str(caught.value)
    if name != "checksums.json":
        assert name in str(caught.value)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "checksums.json"])
def test_a_missing_or_cut_file_is_refused_by_name(tmp_path, name):
    folder = checkpoints.save(tmp_path, _tensors(), {"step": 1})
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=name):
        checkpoints.load(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        checkpoints.load(folder)


def test_a_full_disk_leaves_earlier_checkpoints_and_nothing_half_written(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, _tensors(), {"step": 1})

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "flush", full)
    with pytest.raises(RunError, match="disk is full"):
        checkpoints.save(tmp_path, _tensors(), {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    checkpoints.load(checkpoints.folder_of(tmp_path, 1))


def test_a_write_that_died_does_not_count_and_is_cleared_away(tmp_path):
    checkpoints.save(tmp_path, _tensors(), {"step": 1})
    (tmp_path / ".step-000000002.99.tmp").mkdir()
    assert checkpoints.steps(tmp_path) == [1]
    checkpoints.prune(tmp_path, {1})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_pruning_keeps_what_it_is_told_to(tmp_path):
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, {"a": torch.ones(1)}, {"step": step})
    checkpoints.prune(tmp_path, {1, 3})
    assert checkpoints.steps(tmp_path) == [1, 3]


plain = st.recursive(
    st.none() | st.integers() | st.text() | st.booleans() | st.just(torch.arange(3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
)


@given(plain)
def test_packed_state_is_json_and_unpacks_to_the_same(value):
    def same(a, b):
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        return a == b

    packed, tensors = checkpoints.pack(value, "x")
    assert same(value, checkpoints.unpack(json.loads(json.dumps(packed)), tensors))


def test_random_state_is_restored(tmp_path):
    state = checkpoints.random_state()
    first = torch.rand(3)
    checkpoints.restore_random_state(state)
    assert torch.equal(first, torch.rand(3))


def test_an_error_about_a_file_names_the_folder_that_its_remedy_means(tmp_path):
    folder = checkpoints.save(tmp_path, _tensors(), {"step": 12})
    (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"folder step-000000012\n  -> .*delete this folder"):
        checkpoints.load(folder)
    (folder / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"is missing from the folder step-000000012\n  -> .*delete this folder"):
        checkpoints.load(folder)


def test_the_newest_checkpoint_of_one_process_is_set_aside_only_if_it_is_corrupt(tmp_path):
    older, newest = (checkpoints.save(tmp_path, _tensors(), {"step": step}) for step in (1, 2))
    file = older / checkpoints.TENSORS
    file.write_bytes(file.read_bytes()[:-1])  # an earlier one is damaged
    assert checkpoints.set_aside_if_corrupt(tmp_path) is None
    assert checkpoints.steps(tmp_path) == [1, 2]
    (newest / checkpoints.TENSORS).unlink()
    assert checkpoints.set_aside_if_corrupt(tmp_path) == (tmp_path / "corrupt-step-000000002-1", 1)
    assert checkpoints.steps(tmp_path) == [1]
    assert checkpoints.set_aside_if_corrupt(tmp_path) is None  # there is no earlier one


def test_a_checkpoint_whose_deletion_was_killed_does_not_count(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoints.save(tmp_path, _tensors(), {"step": step})

    def killed(folder, ignore_errors):
        raise KeyboardInterrupt

    monkeypatch.setattr("cordillera.run.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.prune(tmp_path, {2})
    monkeypatch.undo()
    assert checkpoints.steps(tmp_path) == [2]
    checkpoints.prune(tmp_path, {2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]
