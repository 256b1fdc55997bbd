"""Tensors that lie in files part by part: any box of them is what was cut, and nothing that is wrong goes unnoticed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cordillera.distributed.tensor_parts import Parts, describe_parts
from cordillera.errors import CheckpointError, CordilleraError
from cordillera.files import sealed_json
from cordillera.models.language.checkpoints import load, open_checkpoint, read_model, save_hugging_face
from cordillera.models.language.llama import Llama, LlamaConfig
from tests.models.language.conftest import MakeLlama
from tests.models.language.sharded_folders import grid, seal, write_parts, write_step

UP = "layers.1.feed_forward.up.weight"
FILE = "weights-00001.safetensors"


@settings(max_examples=40)
@given(st.data())
def test_any_box_of_a_tensor_is_what_was_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), max_size=3))
    whole = torch.randn(shape)
    boxes = list(grid(whole, [data.draw(st.lists(st.integers(0, size), max_size=3)) for size in shape]))
    folder = tmp_path_factory.mktemp("parts")
    for number, box in enumerate(data.draw(st.permutations(boxes))):
        write_parts(folder / f"{number}.safetensors", {"x": box})
    parts = Parts(folder, sorted(os.listdir(folder)))
    assert parts.shapes == {"x": tuple(shape)}
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    high = [data.draw(st.integers(first + 1, size)) for first, size in zip(low, shape, strict=True)]
    expected = whole[tuple(slice(*pair) for pair in zip(low, high, strict=True))]
    out = torch.empty_like(expected)
    parts.read("x", low, out)
    assert torch.equal(out, expected)


@settings(max_examples=30)
@given(st.data())
def test_a_part_that_is_missing_or_there_twice_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    boxes = list(grid(torch.randn(6, 6), [[2, 4], [3]]))
    gone, instead = data.draw(st.permutations(range(6)))[:2]
    boxes[gone] = boxes[instead]  # as many numbers as there should be, or fewer
    if data.draw(st.booleans()):
        del boxes[gone]
    folder = tmp_path_factory.mktemp("parts")
    for number, box in enumerate(boxes):
        write_parts(folder / f"{number}.safetensors", {"x": box})
    with pytest.raises(CheckpointError, match=r"x, 30 numbers of 36|x holds NaN or infinity, or lacks a part"):
        Parts(folder, sorted(os.listdir(folder))).read("x", (0, 0), torch.empty(6, 6))


def same(first: Llama, second: Llama) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return first.config == second.config and all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_is_a_checkpoint_like_others_and_becomes_one_for_others(
    make_llama: MakeLlama, tmp_path: Path, tied: bool
) -> None:
    model = make_llama(tied=tied)
    step = write_step(tmp_path / "step-000000007", model)
    other = read_model(open_checkpoint(str(step)))
    assert same(other, model)
    save_hugging_face(other, tmp_path / "hf")
    assert same(load(tmp_path / "hf")[1], model)


def test_weights_are_cast_where_they_are_read(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama()
    _, half = load(write_step(tmp_path / "step", model), torch.bfloat16)
    for ours, theirs in zip(half.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


Damage = Callable[[Path], object]


def edit(change: Callable[[dict[str, Tensor]], Any], **header: Any) -> Damage:
    """Change the tensors of a file, whose checksum is then made to fit."""

    def damage(folder: Path) -> None:
        with safe_open(folder / FILE, "pt") as file:
            information = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        tensors = load_file(folder / FILE)
        change(tensors)
        new = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
        offsets = {name: (new | information)[name]["saved_offsets"] for name in tensors}
        (folder / FILE).unlink()
        save_file(tensors, folder / FILE, {**describe_parts(offsets), **header})
        seal(folder)

    return damage


def put(name: str, make: Callable[[Tensor], Tensor]) -> Damage:
    return edit(lambda tensors: tensors.update({name: make(tensors[name]).contiguous()}))


def sums(**changes: Any) -> Damage:
    """Change what the checksums say, and their own seal."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "checksums.json").read_text())
        (folder / "checksums.json").write_text(sealed_json({**content, **changes}))

    return damage


def truncate(folder: Path) -> None:
    os.truncate(folder / FILE, 1000)


def other_model(**shapes: Any) -> Damage:
    """Change what the model is said to be."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "model.json").read_text())
        (folder / "model.json").write_text(json.dumps({**content, **shapes}))
        seal(folder)

    return damage


CASES: dict[str, tuple[Damage, str]] = {
    "file missing": (lambda folder: (folder / FILE).unlink(), f"{FILE}: is missing"),
    "truncated": (truncate, f"{FILE}: has 1,000 bytes, .* were written"),
    "checksums missing": (lambda folder: (folder / "checksums.json").unlink(), "checksums.json: does not exist"),
    "state missing": (lambda folder: (folder / "state.json").unlink(), "state.json: is missing"),
    "state not listed": (lambda folder: ((folder / "state.json").unlink(), seal(folder)), "state.json: is missing"),
    "outside": (sums(**{"../x": {"sha256": "", "bytes": 0}}), "names ../x, outside of the folder"),
    "no size": (sums(**{FILE: {"sha256": ""}}), "checksums.json: does not name the files of step"),
    "no files": (lambda folder: (folder / "checksums.json").write_text("[]"), "checksums.json: is not a JSON object"),
    "absurd model": (other_model(layers=0), "model.json: layers: "),
    "more layers": (other_model(layers=3), r"step: tensor layers.2.attention_norm.weight is not there"),
    "fewer layers": (other_model(layers=1), r"tensor layers.1.attention.key.weight \(of 9\) has no place"),
    "vocabulary": (other_model(vocabulary=60), r"embedding.weight has shape \(61, 32\), .* makes it \(60, 32\)"),
    "part absent": (edit(lambda tensors: tensors.pop(UP)), rf"of tensor {UP}, 1024 numbers of 1536 are there"),
    "wrong shape": (put("norm.weight", lambda t: t[:8]), r"tensor norm.weight, \d+ numbers of \d+"),
    "another dtype": (put(UP, Tensor.half), f"{FILE}: is truncated or damaged .*{UP} is F16"),
    "other dimensions": (put(UP, lambda t: t[None]), f"{FILE}: is truncated or damaged .*{UP}"),
    "stranger": (edit(lambda tensors: tensors.update(spare=torch.ones(2))), rf"{FILE}: tensor spare \(of 1\) has no"),
    "no offsets": (edit(lambda tensors: None, DCP_SHARDING_INFO="{}"), f"{FILE}: is truncated or damaged"),
    "negative": (
        edit(
            lambda tensors: tensors.update(spare=torch.ones(1)), DCP_SHARDING_INFO='{"spare": {"saved_offsets": [-1]}}'
        ),
        f"{FILE}: is truncated or damaged",
    ),
    "not a number": (put(UP, lambda t: t * torch.nan), f"step .*{FILE}.*: tensor {UP} holds NaN"),
    "infinity": (put(UP, lambda t: t / 0.0), f"tensor {UP} holds NaN or infinity"),
}


@pytest.fixture(scope="module")
def model() -> Llama:
    made = Llama(LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61))
    made.init_weights()
    return made


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said(model: Llama, tmp_path: Path, case: str) -> None:
    damage, said = CASES[case]
    folder = write_step(tmp_path / "step", model)
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_flipped_bytes_are_refused_wherever_they_are(model: Llama, tmp_path: Path) -> None:
    folder = write_step(tmp_path / "step", model)
    draw = random.Random(0)
    files = sorted(path for path in folder.iterdir() if path.name != "state.json")  # of no use to the weights
    for number in range(40):
        file = files[number % len(files)]
        good = file.read_bytes()
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(CordilleraError):
            load(folder)
        file.write_bytes(good)
    assert same(load(folder)[1], model)
