"""Models with packed weights against the same models in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cordillera.errors import CheckpointError
from cordillera.kernels.dense.packed_rows import unpacked
from cordillera.models.language.adapters import AdapterConfig
from cordillera.models.language.checkpoints import open_checkpoint, read_model, save_hugging_face
from cordillera.models.language.llama import Llama
from cordillera.numerics.quantization.packed_linear import PackedLinear, pack_rows
from cordillera.numerics.sites import sites
from cordillera.serving.language.generation import for_decoding, generate
from cordillera.serving.language.sampler import Sampling
from tests.models.language.conftest import MakeLlama
from tests.models.language.sharded_folders import write_step
from tests.models.language.test_checkpoints import write_gguf

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@torch.inference_mode()
def logits(model: Llama) -> Tensor:
    found: Tensor = model(TOKENS, torch.tensor([0, 3, 8]))
    return found


def of(path: Path, bits: int | None) -> Llama:
    return for_decoding(read_model(open_checkpoint(path), torch.bfloat16, bits=bits).eval())


@pytest.mark.cases(2)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8), ("Q4_1", 8)])
def test_codes_of_a_file_are_kept(make_llama: MakeLlama, tmp_path: Path, kind: str, bits: int, tied: bool) -> None:
    """Texts are those of the unpacked model, as logits are, to the bit."""
    path = write_gguf(make_llama(ffn=64, vocabulary=64, tied=tied), tmp_path / "model.gguf", kind=kind)
    packed, plain = of(path, bits), of(path, None)
    assert not sites(packed)
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 15
    assert torch.equal(logits(packed), logits(plain))
    sampling = Sampling(temperature=0.8, seed=1)
    texts = [list(generate(model, [[1, 2, 3], [4]], 20, sampling=sampling)) for model in (packed, plain)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_other_weights_are_rounded(make_llama: MakeLlama, tmp_path: Path, bits: int) -> None:
    """Matrices of blocks in so many bits, the head in eight; layers that cannot be packed stay."""
    model = make_llama(ffn=72, vocabulary=64)
    save_hugging_face(model, tmp_path / "model")
    found = of(tmp_path / "model", bits)
    assert {name.rsplit(".", 1)[1] for name in sites(found)} == {"down", "gate", "up"}
    plain = of(tmp_path / "model", None)
    before = logits(plain)
    weights = dict(model.named_parameters())
    for name, module in found.named_modules():
        if isinstance(module, PackedLinear):
            packed = pack_rows(weights[f"{name}.weight"], 8 if name == "head" else bits)
            plain.get_parameter(f"{name}.weight").data = unpacked(packed)
    assert torch.equal(logits(found), logits(plain))
    assert not torch.equal(logits(found), before)


def test_a_matrix_in_more_bits_than_asked_for_is_rounded(make_llama: MakeLlama, tmp_path: Path) -> None:
    path = write_gguf(make_llama(ffn=64, vocabulary=64), tmp_path / "model.gguf", kind="Q8_0")
    layer = of(path, 4).get_submodule("layers.0.attention.query")
    plain = of(path, None).get_submodule("layers.0.attention.query").weight
    assert isinstance(layer, PackedLinear)
    assert isinstance(plain, Tensor)
    assert layer.codes.dtype == torch.uint8
    assert (unpacked(layer.packed) - plain).float().norm() < 0.1 * plain.float().norm()


def test_weights_that_are_no_numbers_are_named(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama(ffn=64, vocabulary=64)
    with torch.no_grad():
        model.layers[1].attention.key.weight[3, 7] = torch.inf
    save_hugging_face(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj"):
        of(tmp_path / "model", 4)


def test_adapters_are_merged_before_weights_are_rounded(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama(ffn=64, vocabulary=64, adapter=AdapterConfig(rank=4))
    write_step(tmp_path / "step-000000001", model)
    found, plain = of(tmp_path / "step-000000001", 8), of(tmp_path / "step-000000001", None)
    assert not sites(found)
    layer = found.get_submodule("layers.0.attention.query")
    weight = plain.get_submodule("layers.0.attention.query").weight
    assert isinstance(layer, PackedLinear)
    assert isinstance(weight, Tensor)
    assert torch.equal(unpacked(layer.packed), unpacked(pack_rows(weight, 8)))
