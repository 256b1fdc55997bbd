"""Blocks of a few rows in two calls against the same blocks layer by layer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cordillera.kernels.dense import bf16_amx, bf16_tiles, decoder_rows, few_rows, packed_rows
from cordillera.kernels.dense.few_rows import use_few_rows
from cordillera.models.language.llama import Block, LlamaConfig, rope_table
from cordillera.numerics.quantization.packed_linear import PackedLinear, pack_rows
from cordillera.numerics.sites import replace, sites

CONFIG = LlamaConfig(hidden=96, heads=6, kv_heads=2, head_dim=32, ffn=160, layers=1, vocabulary=64, context=64)
WAYS = ["amx", "tiles"]


@contextlib.contextmanager
def _by(way: str) -> Iterator[None]:
    if not {"amx": bf16_amx.available, "tiles": bf16_tiles.available}[way]():
        pytest.skip(f"this processor has no instructions for {way}")
    with pytest.MonkeyPatch.context() as patch:
        for module in (few_rows, packed_rows, decoder_rows):
            patch.setattr(module, "amx_available", lambda: way == "amx")
        yield


def block_of(bits: int | None, seed: int = 0) -> Block:
    torch.manual_seed(seed)
    block = Block(CONFIG)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0 if parameter.dim() == 2 else 1.0, 0.2)
    block.bfloat16().requires_grad_(False)
    if bits is not None:
        for name, layer in sites(block).items():
            replace(block, name, PackedLinear(pack_rows(layer.weight, bits)))
    use_few_rows(block)
    return block


def core(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Something that depends on all three, row by row."""
    return (q.float() * k.float().repeat_interleave(3, 1).tanh() + v.float().repeat_interleave(3, 1)).to(q.dtype)


def rows_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, CONFIG.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


@torch.inference_mode()
def outputs(block: Block, x: Tensor, start: int = 0) -> Tensor:
    table = rope_table(CONFIG, torch.arange(start, start + len(x)))
    found: Tensor = block(x, torch.tensor([0, len(x)]), table, core)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 32])
def test_a_block_is_what_its_layers_compute(way: str, bits: int | None, rows: int) -> None:
    block, x = block_of(bits), rows_of(rows)
    with _by(way):
        apart = outputs(block, x)
        block.use_few_rows()
        assert block.few is not None
        found = outputs(block, x)
    # sums and exponentials are made in another order, which can move a rounding to bfloat16
    torch.testing.assert_close(found.float(), apart.float(), rtol=2**-6, atol=2**-6 * float(apart.float().abs().mean()))
    assert (found == apart).float().mean() > 0.9


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [None, 4])
def test_a_row_is_the_same_beside_any_others(way: str, bits: int | None) -> None:
    block, x = block_of(bits), rows_of(32)
    block.use_few_rows()
    with _by(way):
        whole = outputs(block, x)
        for first, last in ((0, 1), (3, 4), (5, 21), (14, 31)):
            assert torch.equal(outputs(block, x[first:last], first), whole[first:last])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(way: str, threads: int) -> None:
    block, x, before = block_of(4), rows_of(7), torch.get_num_threads()
    block.use_few_rows()
    with _by(way):
        whole = outputs(block, x)
        try:
            torch.set_num_threads(threads)
            assert all(torch.equal(outputs(block, x), whole) for _ in range(20))
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_row(way: str, wrong: float) -> None:
    block, x = block_of(None), rows_of(6)
    block.use_few_rows()
    with _by(way):
        whole = outputs(block, x)
        x[4, 11] = wrong
        found = outputs(block, x)
    assert not found[4].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 3, 5]], whole[[0, 1, 2, 3, 5]])


def test_large_numbers_are_gated_as_in_torch() -> None:
    gate = torch.tensor([-1e30, -300.0, -88.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 300.0, 1e30]).bfloat16()
    both = torch.cat([gate, torch.ones_like(gate)])
    out = torch.empty(1, len(gate), dtype=torch.bfloat16)
    decoder_rows._gate(both.view(torch.uint16).numpy(), out.view(torch.uint16).numpy())
    expected = nn.functional.silu(gate.double())
    torch.testing.assert_close(out[0].double(), expected, rtol=2**-7, atol=1e-8)


def test_what_is_not_made_for_it_is_computed_by_layers() -> None:
    block, x = block_of(None), rows_of(3)
    block.use_few_rows()
    assert block.few is not None
    layers, norms = block._linear_layers(), (block.attention_norm.weight, block.feed_forward_norm.weight)
    with torch.inference_mode():
        assert block.few.takes(x, norms, layers) == bf16_tiles.available()
        assert not block.few.takes(rows_of(33), norms, layers)
        assert not block.few.takes(x.float(), norms, layers)
        assert not block.few.takes(x[:0], norms, layers)
    assert not block.few.takes(x, norms, layers)  # with gradients
    before = outputs(block, x)
    block.feed_forward.down = nn.Linear(CONFIG.ffn, CONFIG.hidden, bias=False).bfloat16()  # type: ignore[union-attr]
    assert not torch.equal(outputs(block, x), before)
    copied = copy.deepcopy(block)
    expected = outputs(copied, x)
    block.to(torch.float32).to(torch.bfloat16)  # weights move
    assert torch.equal(outputs(block, x), expected)
    other = block_of(None, seed=1)
    block.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(outputs(block, x), outputs(other, x))
    odd = Block(CONFIG.model_copy(update={"ffn": 100})).bfloat16()
    odd.use_few_rows()
    assert odd.few is not None
    with torch.inference_mode():
        assert not odd.few.takes(x, norms, odd._linear_layers())
