"""The adapter: what it leaves as it is, whom an image reaches, and the encoder beside a formula in double precision."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from cordillera.errors import CheckpointError, DataError, NumericsError
from cordillera.jagged import offsets_from_lengths
from cordillera.models.language.checkpoints.vision_adapter import load_vision, save_vision
from cordillera.models.language.llama import Llama
from cordillera.models.language.vision import (
    NO_IMAGE,
    GatedCrossAttention,
    ImageEncoder,
    VisionConfig,
    VisionLlama,
    answer,
)

from .conftest import MakeLlama

SMALL = VisionConfig(image=8, patch=4, channels=5, layers=2, hidden=16, heads=2, ffn=24, every=1)
IMAGE_OF = [1, NO_IMAGE, 0, 2, NO_IMAGE, 1]


@pytest.fixture
def seeing(make_llama: MakeLlama) -> VisionLlama:
    """An adapter after every block of a small Llama, all gates open."""
    model = VisionLlama(make_llama(), SMALL)
    model.init_weights(3)
    open_gates(model)
    return model


def open_gates(model: VisionLlama) -> None:
    with torch.no_grad():
        for name, weight in model.seeing().items():
            if name.endswith("gate"):
                weight.fill_(0.7)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Six documents, one of them empty, of which four have one of three images."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 7, 0, 3, 4, 6])
    tokens = torch.randint(0, 61, (int(lengths.sum()),), generator=generator)
    images = torch.rand(3, 3, 8, 8, generator=generator)
    return tokens, offsets_from_lengths(lengths), images, torch.tensor(IMAGE_OF)


def documents(logits: Tensor, offsets: Tensor) -> list[Tensor]:
    return list(logits.split((offsets[1:] - offsets[:-1]).tolist()))


@torch.inference_mode()
def test_a_new_adapter_changes_no_bit(make_llama: MakeLlama) -> None:
    alone = make_llama()
    model = VisionLlama(alone, SMALL)
    model.init_weights()
    tokens, offsets, images, image_of = batch()
    assert torch.equal(model(tokens, offsets, images, image_of), alone(tokens, offsets))


@torch.inference_mode()
def test_documents_without_an_image_keep_their_bits_and_others_do_not(seeing: VisionLlama) -> None:
    tokens, offsets, images, image_of = batch()
    found = documents(seeing(tokens, offsets, images, image_of), offsets)
    alone = documents(seeing.model(tokens, offsets), offsets)
    same = [torch.equal(a, b) for a, b in zip(found, alone, strict=True)]
    assert same == [False, True, True, False, True, False]  # the third is empty


@torch.inference_mode()
def test_no_images_at_all_are_fine(seeing: VisionLlama) -> None:
    tokens, offsets, images, image_of = batch()
    found = seeing(tokens, offsets, images[:0], torch.full_like(image_of, NO_IMAGE))
    assert torch.equal(found, seeing.model(tokens, offsets))


@torch.inference_mode()
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_an_image_reaches_its_own_documents_only(seeing: VisionLlama, changed: int) -> None:
    tokens, offsets, images, image_of = batch()
    before = documents(seeing(tokens, offsets, images, image_of), offsets)
    images[changed] = 1 - images[changed]
    after = documents(seeing(tokens, offsets, images, image_of), offsets)
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a, b) == (IMAGE_OF[number] != changed or not len(a)), number


@torch.inference_mode()
def test_a_document_sees_what_it_sees_alone(seeing: VisionLlama) -> None:
    tokens, offsets, images, image_of = batch()
    together = documents(seeing(tokens, offsets, images, image_of), offsets)
    for number in (0, 3, 5):
        own = tokens[offsets[number] : offsets[number + 1]]
        image = images[IMAGE_OF[number]][None]
        found = seeing(own, torch.tensor([0, len(own)]), image, torch.tensor([0]))
        torch.testing.assert_close(found, together[number], rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_encoder_and_the_adapter_only(seeing: VisionLlama) -> None:
    tokens, offsets, images, image_of = batch()
    seeing(tokens, offsets, images, image_of).square().sum().backward()
    assert all(weight.grad is None for weight in seeing.model.parameters())
    assert all(bool((weight.grad != 0).any()) for weight in seeing.seeing().values() if weight.grad is not None)
    assert [name for name, weight in seeing.seeing().items() if weight.grad is None] == []


def test_closed_gates_have_gradients(make_llama: MakeLlama) -> None:
    """Otherwise, they would never open."""
    model = VisionLlama(make_llama(), SMALL)
    model.init_weights()
    tokens, offsets, images, image_of = batch()
    model(tokens, offsets, images, image_of).square().sum().backward()
    for name, weight in model.seeing().items():
        if name.endswith("gate"):
            assert weight.grad is not None
            assert float(weight.grad.abs().sum()) > 0, name


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of every row of ``q [n, D]`` to every row of ``k`` and ``v [m, D]``, one number after the other."""
    out = np.zeros((len(q), v.shape[1]))
    for i, row in enumerate(q):
        scores = np.array([sum(a * b for a, b in zip(row, key, strict=True)) for key in k]) / np.sqrt(len(row))
        shares = np.exp(scores - scores.max())
        for share, value in zip(shares / shares.sum(), v, strict=True):
            out[i] += share * value
    return out


def weights_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: weight.detach().double().numpy() for name, weight in module.named_parameters()}


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * weight + bias


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + torch.erf(torch.from_numpy(x) / 2**0.5).numpy())


def convolved(pixels: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Every pixel's square of nine, zeros outside of the image, times the weights of every feature."""
    padded = np.pad(pixels, ((0, 0), (1, 1), (1, 1)))
    out = np.zeros((len(weight), *pixels.shape[1:]))
    for row, column in np.ndindex(*pixels.shape[1:]):
        out[:, row, column] = (weight * padded[:, row : row + 3, column : column + 3]).sum((1, 2, 3)) + bias
    return out


@pytest.mark.parametrize("channels", [0, 5])
def test_patches_follow_the_formula(make_llama: MakeLlama, channels: int) -> None:
    model = VisionLlama(make_llama(), SMALL.model_copy(update={"channels": channels}))
    model.init_weights(3)
    encoder = model.encoder
    with torch.no_grad():
        for weight in encoder.parameters():  # biases and norms matter too
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
    w = weights_of(encoder)
    image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(1))
    pixels = (image.double().numpy() - 0.25) / 0.25
    if channels:
        pixels = gelu(convolved(pixels, w["features.weight"], w["features.bias"]))
    squares = [pixels[:, r : r + 4, c : c + 4].ravel() for r in (0, 4) for c in (0, 4)]
    x = np.stack(squares) @ w["embedding.weight"].T + w["embedding.bias"] + w["positions"]
    for layer in ("layers.0.", "layers.1."):
        normed = layer_norm(x, w[f"{layer}attention_norm.weight"], w[f"{layer}attention_norm.bias"])
        qkv = (normed @ w[f"{layer}qkv.weight"].T + w[f"{layer}qkv.bias"]).reshape(4, 3, 2, 8)
        heads = [attended(*(qkv[:, part, head] for part in range(3))) for head in range(2)]
        x = x + np.concatenate(heads, 1) @ w[f"{layer}output.weight"].T + w[f"{layer}output.bias"]
        normed = layer_norm(x, w[f"{layer}feed_forward_norm.weight"], w[f"{layer}feed_forward_norm.bias"])
        up = normed @ w[f"{layer}up.weight"].T + w[f"{layer}up.bias"]
        x = x + gelu(up) @ w[f"{layer}down.weight"].T + w[f"{layer}down.bias"]
    expected = layer_norm(x, w["norm.weight"], w["norm.bias"])
    found = encoder(image[None])[0].detach().double().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_cross_attention_follows_the_formula(seeing: VisionLlama) -> None:
    """Query heads share heads of keys in pairs, every token sees all patches, and gates are hyperbolic tangents."""
    adapter = seeing.adapters[0]
    assert isinstance(adapter, GatedCrossAttention)
    w = weights_of(adapter)
    generator = torch.Generator().manual_seed(2)
    text, patches = torch.randn(3, 32, generator=generator), torch.randn(1, 4, 16, generator=generator)
    x, seen = text.double().numpy(), patches[0].double().numpy()
    q = rms_norm(
        (rms_norm(x, w["attention_norm.weight"]) @ w["query.weight"].T).reshape(3, 4, 8), w["query_norm.weight"]
    )
    k = rms_norm((seen @ w["key.weight"].T).reshape(4, 2, 8), w["key_norm.weight"])
    v = (seen @ w["value.weight"].T).reshape(4, 2, 8)
    heads = np.concatenate([attended(q[:, head], k[:, head // 2], v[:, head // 2]) for head in range(4)], 1)
    x = x + np.tanh(0.7) * heads @ w["output.weight"].T
    normed = rms_norm(x, w["feed_forward_norm.weight"])
    gate = normed @ w["feed_forward.gate.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (normed @ w["feed_forward.up.weight"].T)
    expected = x + np.tanh(0.7) * inner @ w["feed_forward.down.weight"].T
    found = adapter(text, patches, [3]).detach().double().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_layers_come_after_every_fourth_block(make_llama: MakeLlama) -> None:
    model = VisionLlama(make_llama(layers=9), SMALL.model_copy(update={"every": 4}))
    assert len(model.adapters) == 2
    order: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(("model.layers.", "adapters.")) and name.count(".") == name.startswith("model") + 1:
            module.register_forward_hook(lambda *_, name=name: order.append(name))
    tokens, offsets, images, image_of = batch()
    model(tokens, offsets, images, image_of)
    blocks = [f"model.layers.{number}" for number in range(9)]
    assert order == [*blocks[:4], "adapters.0", *blocks[4:8], "adapters.1", blocks[8]]


def bad_batches() -> Iterator[object]:
    tokens, offsets, images, image_of = batch()
    spoiled = images.clone()
    spoiled[1, 0, 2, 2] = torch.nan
    wrong = {
        "size": (images[..., :7], image_of, r"float32 of shape \[I, 3, 8, 8\], got torch.float32 of shape"),
        "channels": (images[:, :1], image_of, r"\[3, 1, 8, 8\]"),
        "dtype": ((255 * images).byte(), image_of, "uint8"),
        "nan": (spoiled, image_of, "images: holds NaN or infinity"),
        "no such image": (images[:2], image_of, "image 2 does not exist: there are 2"),
        "below -1": (images, image_of - 1, "image -2 does not exist"),
        "documents": (images, image_of[:3], r"int64 of shape \[6\]"),
        "dtype of numbers": (images, image_of.float(), "float32"),
    }
    for name, (given, numbers, said) in wrong.items():
        yield pytest.param(tokens, offsets, given, numbers, said, id=name)


@pytest.mark.parametrize(("tokens", "offsets", "images", "image_of", "said"), list(bad_batches()))
def test_wrong_images_are_refused(
    seeing: VisionLlama, tokens: Tensor, offsets: Tensor, images: Tensor, image_of: Tensor, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        seeing(tokens, offsets, images, image_of)


def test_impossible_shapes_are_refused(make_llama: MakeLlama) -> None:
    with pytest.raises(ValidationError, match=r"patch \(5\) must divide image \(32\)"):
        VisionConfig(patch=5)
    with pytest.raises(ValidationError, match=r"heads \(7\) must divide hidden \(64\)"):
        VisionConfig(heads=7)
    with pytest.raises(DataError, match="the language model has 2 blocks"):
        VisionLlama(make_llama(), VisionConfig(every=3))


def test_answers_are_the_most_likely_tokens(seeing: VisionLlama) -> None:
    prompts, images = [[1, 2, 3], [4], [5, 6]], batch()[2]
    found = answer(seeing, prompts, images, torch.tensor([0, NO_IMAGE, 2]), 4)
    for prompt, tokens, image in zip(prompts, found, (0, NO_IMAGE, 2), strict=True):
        text = list(prompt)
        for token in tokens:
            logits = seeing(torch.tensor(text), torch.tensor([0, len(text)]), images, torch.tensor([image]))
            assert token == int(logits[-1].argmax())
            text.append(token)
        assert len(tokens) == 4
    stop = found[0][2]
    stopped = answer(seeing, prompts, images, torch.tensor([0, NO_IMAGE, 2]), 4, stop=[stop])
    assert stopped == [one[: one.index(stop)] if stop in one else one for one in found]


def test_answers_end_at_the_context(seeing: VisionLlama) -> None:
    (found,) = answer(seeing, [[1] * 62], batch()[2], torch.tensor([0]), 9)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("prompts", "said"),
    [([[1], []], "prompt 2: has 0 tokens"), ([[1] * 64], "prompt 1: has 64 tokens"), ([[61]], "61 is no token")],
)
def test_wrong_prompts_are_refused(seeing: VisionLlama, prompts: list[list[int]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        answer(seeing, prompts, batch()[2], torch.zeros(len(prompts), dtype=torch.int64), 2)


def test_answers_that_are_not_finite_are_refused(seeing: VisionLlama) -> None:
    with torch.no_grad():
        seeing.adapters[0].attention_gate.fill_(torch.nan)
    with pytest.raises(DataError, match="logits are not finite"):
        answer(seeing, [[1]], batch()[2], torch.tensor([0]), 2)


@torch.inference_mode()
def test_a_saved_adapter_comes_back_to_the_bit(seeing: VisionLlama, make_llama: MakeLlama, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    save_vision(path, seeing)
    loaded = load_vision(path, make_llama())
    assert loaded.config == SMALL
    given = batch()
    assert torch.equal(loaded(*given), seeing(*given))
    assert path.stat().st_size < 8 * sum(weight.numel() for weight in seeing.seeing().values())


def test_the_file_is_safetensors_with_its_config(seeing: VisionLlama, tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "adapter.safetensors"
    save_vision(path, seeing)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(seeing.seeing())
        assert json.loads(file.metadata()["content"])["config"] == SMALL.model_dump()


def test_an_adapter_of_other_weights_is_refused(seeing: VisionLlama, make_llama: MakeLlama, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    save_vision(path, seeing)
    with pytest.raises(CheckpointError, match="other weights"):
        load_vision(path, make_llama(seed=1))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(NumericsError, match="damaged"):
        load_vision(path, make_llama())
    with pytest.raises(NumericsError, match="no such file"):
        load_vision(tmp_path / "none", make_llama())


def test_weights_follow_the_seed_and_the_adapter_has_the_dtype_of_the_model(make_llama: MakeLlama) -> None:
    first, second = (VisionLlama(make_llama(dtype=torch.bfloat16), SMALL) for _ in range(2))
    for model in (first, second):
        model.init_weights(4)
    for name, weight in first.seeing().items():
        assert torch.equal(weight, second.seeing()[name])
        assert weight.dtype == torch.bfloat16
    open_gates(first)
    assert first(*batch()).dtype == torch.bfloat16
    first.init_weights(4)
    assert all(not weight.any() for name, weight in first.seeing().items() if name.endswith("gate"))


def test_the_encoder_has_no_direction() -> None:
    """Patches see each other both ways: without positions, their order only orders the output."""
    encoder = ImageEncoder(SMALL.model_copy(update={"channels": 0}))
    image = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    turned = torch.cat([image[..., 4:], image[..., :4]], -1)
    torch.testing.assert_close(encoder(turned), encoder(image)[:, [1, 0, 3, 2]])


def test_the_language_model_is_the_same_object(make_llama: MakeLlama) -> None:
    alone = make_llama()
    model = VisionLlama(alone, SMALL)
    assert isinstance(model.model, Llama)
    assert model.model is alone
    assert not any(weight.requires_grad for weight in alone.parameters())
