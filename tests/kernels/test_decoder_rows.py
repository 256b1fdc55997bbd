"""All blocks for a few rows in one call against the same blocks layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.dense import bf16_tiles, decoder_rows, few_rows, packed_rows
from cordillera.kernels.dense.few_rows import use_few_rows
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama, LlamaConfig, few_rows_of
from cordillera.numerics.quantization.packed_linear import PackedLinear, pack_rows
from cordillera.numerics.sites import replace, sites
from tests.kernels.conftest import by

CONFIG = LlamaConfig(hidden=96, heads=6, kv_heads=2, head_dim=32, ffn=160, layers=3, vocabulary=64, context=64)
WAYS = ["amx", "tiles"]


FAMILIES = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"head_norms": True},
    "phi-4-mini": {"rotary_dim": CONFIG.head_width // 2},
}


def model_of(bits: int | None, seed: int = 0, family: str = "llama") -> Llama:
    torch.manual_seed(seed)
    model = Llama(CONFIG.model_copy(update=FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.dim() == 2 else 1.0, 0.2)
    model.bfloat16().requires_grad_(False)
    if bits is not None:
        for name, layer in sites(model.layers).items():
            replace(model.layers, name, PackedLinear(pack_rows(layer.weight, bits)))
    use_few_rows(model)
    return model


def in_one_call(model: Llama) -> Llama:
    model.few = few_rows_of(model.layers)
    return model


@torch.inference_mode()
def outputs(
    model: Llama, texts: Sequence[Sequence[int]], before: int = 0, taps: dict[int, Tensor] | None = None
) -> list[Tensor]:
    """Features of the last tokens of texts, of which ``before`` are read first, and all keys and values."""
    cache = KVCache(CONFIG, len(texts), 48, torch.bfloat16)
    for part in (slice(0, before), slice(before, None)):
        rows = [list(text)[part] for text in texts]
        if tokens := [token for row in rows for token in row]:
            offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows]))
            hidden = model.hidden(torch.tensor(tokens), offsets, cache=cache, taps=taps)
    kept = [part for b in range(len(texts)) for layer in range(CONFIG.layers) for part in cache.read(layer, b)]
    return [*hidden.split([len(text) - before for text in texts]), *kept]


def texts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 64, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("lengths", [(1,), (2,), (5, 1, 16), (16, 1), (16, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_what_their_layers_compute(
    way: str, bits: int | None, lengths: tuple[int, ...], family: str
) -> None:
    model, texts = model_of(bits, family=family), texts_of(*lengths)
    with by(way, few_rows, packed_rows, decoder_rows):
        taps, by_layers = dict.fromkeys((0, 2), torch.empty(0)), dict.fromkeys((0, 2), torch.empty(0))
        apart = outputs(model, texts, taps=by_layers)
        found = outputs(in_one_call(model), texts, taps=taps)
    # sums and exponentials are made in another order, which can move a rounding to bfloat16
    for one, other in [*zip(found, apart, strict=True), *((taps[n], by_layers[n]) for n in (0, 2))]:
        scale = float(other.float().abs().mean())
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-5, atol=2**-4 * scale)
    assert torch.equal(found[len(texts)], apart[len(texts)])  # keys of the first layer
    first, other = taps[0], by_layers[0]  # of one block
    scale = float(other.float().abs().mean())
    torch.testing.assert_close(first.float(), other.float(), rtol=2**-6, atol=2**-6 * scale)
    assert (first == other).float().mean() > 0.9


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [None, 4])
def test_a_text_is_the_same_beside_any_others(way: str, bits: int | None) -> None:
    model, texts = in_one_call(model_of(bits)), texts_of(3, 9, 1, 16)
    with by(way, few_rows, packed_rows, decoder_rows):
        whole = outputs(model, texts)
        for number, text in enumerate(texts):
            assert torch.equal(outputs(model, [text])[0], whole[number])
        for number, text in enumerate(longer := texts_of(25, 18)):
            assert torch.equal(outputs(model, [text], before=15)[0], outputs(model, longer, before=15)[number])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_change_nothing(way: str, threads: int) -> None:
    model, texts, before = in_one_call(model_of(4)), texts_of(4, 3), torch.get_num_threads()
    with by(way, few_rows, packed_rows, decoder_rows):
        whole = outputs(model, texts)
        try:
            torch.set_num_threads(threads)
            for _ in range(20):
                assert all(torch.equal(*pair) for pair in zip(outputs(model, texts), whole, strict=True))
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_text(way: str, wrong: float) -> None:
    model = in_one_call(model_of(None))
    texts = [[5, 6, 7], [8, 9, 63], [1, 2]]
    with by(way, few_rows, packed_rows, decoder_rows):
        whole = outputs(model, texts)
        model.embedding.weight[63, 11] = wrong
        found = outputs(model, texts)
    assert not found[1][2].isfinite().any()
    assert torch.equal(found[1][:2], whole[1][:2])
    assert all(torch.equal(found[number], whole[number]) for number in (0, 2))


def test_large_numbers_are_gated_as_in_torch() -> None:
    gate = torch.tensor([-1e30, -300.0, -88.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 300.0, 1e30] + [1.0] * 6).bfloat16()
    gates, ups, out = (x.view(1, 16).view(torch.uint16).numpy() for x in (gate, torch.ones_like(gate), gate.clone()))
    decoder_rows._gate(gates, ups, out, 0)
    expected = nn.functional.silu(gate.double())
    found = torch.from_numpy(out).view(torch.bfloat16)[0]
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-8)


def _takes(model: Llama, rows: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    step = KVCache(CONFIG, 2, 48, dtype).extend(torch.tensor([0, min(rows, 16), rows]))
    assert model.few is not None
    return model.few.takes(torch.zeros(rows, CONFIG.hidden, dtype=dtype), step.few_rows(), range(CONFIG.layers))


def test_what_is_not_made_for_it_is_computed_by_layers() -> None:
    model, texts = in_one_call(model_of(None)), texts_of(3, 1)
    with torch.inference_mode():
        assert _takes(model, 4) == bf16_tiles.available()
        assert not _takes(model, 33)
        assert not _takes(model, 4, torch.float32)
    assert not _takes(model, 4)  # with gradients
    before = outputs(model, texts)[0]
    net = model.layers[1].feed_forward
    net.down = nn.Linear(CONFIG.ffn, CONFIG.hidden, bias=False).bfloat16()
    assert not torch.equal(outputs(model, texts)[0], before)
    copied = copy.deepcopy(model)
    expected = outputs(copied, texts)[0]
    model.to(torch.float32).to(torch.bfloat16)  # weights move
    assert torch.equal(outputs(model, texts)[0], expected)
    other = model_of(None, seed=1)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(outputs(model, texts)[0], outputs(other, texts)[0])
    model.layers[0] = model_of(None, seed=2).layers[0]
    assert not torch.equal(outputs(model, texts)[0], outputs(other, texts)[0])
    odd = nn.ModuleList(Llama(CONFIG.model_copy(update={"ffn": 100})).bfloat16().layers)
    few = few_rows_of(odd)
    with torch.inference_mode():
        step = KVCache(CONFIG, 1, 48, torch.bfloat16).extend(torch.tensor([0, 2]))
        assert few is not None
        assert not few.takes(torch.zeros(2, CONFIG.hidden, dtype=torch.bfloat16), step.few_rows(), range(3))
