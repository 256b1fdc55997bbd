"""A flipped bit is that bit of that number, in the model's own memory, and comes back as it was."""

from __future__ import annotations

import signal
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.numerics.faults.bit_flips import INT4, BitLayout, Region, flip, flipped, regions_of, unaliased

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def contents(tensor: Tensor) -> bytes:
    """All bytes in the order of the shape."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bit pattern, NaN of every payload included."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same values on other strides."""
    if kind == "transposed":
        return tensor.mT.contiguous().mT
    if kind == "every other":
        wide = torch.stack([tensor, tensor], dim=-1)
        return wide[..., 0]
    return tensor


@settings(max_examples=60)
@given(st.sampled_from(FLOATS + INTEGERS), st.sampled_from(["plain", "transposed", "every other"]), st.data())
def test_a_flip_changes_these_bits_and_a_second_one_puts_them_back(dtype: torch.dtype, kind: str, data) -> None:
    tensor = strided(random_bytes(dtype, (3, 5), data.draw(st.integers(0, 99))), kind)
    region = Region.of("w", tensor)
    assert region.num_bits == 15 * 8 * dtype.itemsize
    bits = data.draw(st.lists(st.integers(0, region.num_bits - 1), min_size=1, max_size=5, unique=True))
    before = contents(tensor)
    expected = bytearray(before)
    for bit in bits:  # little-endian: bit b of number i is bit b % 8 of byte i * size + b // 8
        expected[bit // 8] ^= 1 << bit % 8
    flip(region, bits)
    assert contents(tensor) == bytes(expected)
    flip(region, bits)
    assert contents(tensor) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, None])
def test_memory_is_as_it_was_after_the_with_statement_whatever_ends_it(error: type[BaseException] | None) -> None:
    weight = random_bytes(torch.float32, (4, 4), 1)
    before = contents(weight)
    region = Region.of("w", weight)
    with pytest.raises(error) if error else torch.no_grad(), flipped(region, [30, 31, 70]):
        assert contents(weight) != before
        if error:
            raise error
    assert contents(weight) == before


def test_ctrl_c_at_any_moment_leaves_the_model_whole() -> None:
    weight = torch.randn(8, 8)
    before, region = contents(weight), Region.of("w", weight)
    random = np.random.default_rng(0)
    interrupted = 0
    previous = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, float(random.uniform(1e-5, 1.5e-3)))
                for bit in range(40):
                    with flipped(region, [bit]):
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert contents(weight) == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 10


@pytest.mark.parametrize(
    ("dtype", "exponent", "mantissa"),
    [
        (torch.float64, 11, 52),
        (torch.float32, 8, 23),
        (torch.bfloat16, 8, 7),
        (torch.float16, 5, 10),
        (torch.float8_e4m3fn, 4, 3),
        (torch.float8_e4m3fnuz, 4, 3),
        (torch.float8_e5m2, 5, 2),
    ],
)
def test_bits_of_floats_are_sign_exponent_and_mantissa(dtype: torch.dtype, exponent: int, mantissa: int) -> None:
    layout = BitLayout.of(dtype)
    parts = [layout.part(bit) for bit in range(layout.width)]
    assert parts == ["mantissa"] * mantissa + ["exponent"] * exponent + ["sign"]
    one = torch.ones(1, dtype=dtype)
    flip(Region.of("w", one), [layout.width - 1])
    assert one.float().item() == -1
    one = torch.ones(1, dtype=dtype)
    flip(Region.of("w", one), [mantissa])  # the lowest exponent bit of 1 is set in all of them but fnuz
    assert one.float().item() in (0.5, 2)


def test_scales_in_powers_of_two_have_no_sign_and_integers_no_parts() -> None:
    layout = BitLayout.of(torch.float8_e8m0fnu)
    assert {layout.part(bit) for bit in range(8)} == {"exponent"}
    assert {BitLayout.of(torch.int8).part(bit) for bit in range(8)} == {"integer"}


@pytest.mark.parametrize("layout", [INT4, BitLayout("int2", 2)])
def test_packed_integers_are_counted_from_the_low_bits(layout: BitLayout) -> None:
    packed = torch.zeros(2, 3, dtype=torch.uint8)
    region = Region.of("w", packed, layout)
    per_byte = 8 // layout.width
    assert region.num_numbers == 6 * per_byte
    number = 3 * per_byte + 1  # the second of the first byte of the second row
    flip(region, [number * layout.width])
    assert packed[1, 0].item() == 1 << layout.width
    assert packed.count_nonzero() == 1


def test_columns_of_fused_rows_are_numbers_of_their_own() -> None:
    rows = torch.randint(0, 256, (5, 14), dtype=torch.uint8)  # 6 payload bytes, a scale and a bias, at odd places
    scale = Region.of("scale", rows, BitLayout.of(torch.float32), slice(6, 10))
    payload = Region.of("payload", rows, columns=slice(0, 6))
    before = rows.clone()
    assert (scale.num_numbers, payload.num_numbers) == (5, 30)
    with flipped(scale, [2 * 32 + 31]):
        old, new = (struct.unpack("<f", bytes(table[2, 6:10].tolist()))[0] for table in (before, rows))
        assert struct.pack("<f", -old) == struct.pack("<f", new)
        assert (rows != before).sum() == 1
    with flipped(payload, [7 * 8]):
        assert rows[1, 1] == before[1, 1] ^ 1
    assert rows.equal(before)


def test_weights_of_inference_mode_and_scalars_and_nothing_can_be_flipped() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    flip(Region.of("w", made), [31])
    assert made.tolist() == [-1, 1, 1]
    scalar = torch.tensor(2.0)
    flip(Region.of("w", scalar), [31])
    assert scalar.item() == -2
    assert Region.of("w", torch.zeros(0, 4)).num_bits == 0
    parameter = nn.Parameter(torch.ones(2))
    flip(Region.of("w", parameter), [31])
    assert parameter.tolist() == [-1, 1]
    assert parameter.requires_grad


def test_an_expanded_tensor_is_its_memory_once() -> None:
    base = torch.arange(3.0)
    region = Region.of("w", base.expand(100, 3))
    assert region.num_bits == 96
    flip(region, [63])
    assert base.tolist() == [0, -1, 2]


def test_tied_weights_are_one_region_with_all_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight
            self.row = nn.Parameter(self.embedding.weight.detach()[2])  # another tensor on the same memory
            self.register_buffer("scale", torch.ones(1))
            self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    regions = regions_of(Tied())
    assert [(region.name, region.aliases) for region in regions] == [("embedding.weight", ("row", "head.weight"))]
    assert not regions[0].is_whole  # a third tensor reads it too
    assert [region.name for region in regions_of(Tied(), buffers=True)][1:] == ["scale"]


def test_neighbours_in_one_storage_are_not_aliases_and_overlaps_are_refused() -> None:
    fused = torch.zeros(6, 8)
    halves = [Region.of("left", fused[:, :4]), Region.of("right", fused[:, 4:])]
    assert [region.aliases for region in unaliased(halves)] == [(), ()]
    assert [region.name for region in unaliased([*halves, Region.of("all", fused)])] == ["all"]
    with pytest.raises(NumericsError, match=r"middle: shares 24 bytes of its memory with 'left'"):
        unaliased([halves[0], Region.of("middle", fused[1:4, 2:6])])


REFUSED = {
    "bool": (lambda: Region.of("w", torch.zeros(2, dtype=torch.bool)), "bool are not plain numbers"),
    "complex": (lambda: Region.of("w", torch.zeros(2, dtype=torch.complex64)), "complex64 are not plain"),
    "meta": (lambda: Region.of("w", torch.zeros(2, device="meta")), "has no memory"),
    "sparse": (lambda: Region.of("w", torch.zeros(2, 2).to_sparse()), "no plain bits"),
    "odd rows": (lambda: Region.of("w", torch.zeros(2, 3, dtype=torch.uint8), BitLayout.of(torch.float32)), "24 bits"),
    "too far": (lambda: flip(Region.of("w", torch.zeros(2)), [64]), r"bits 0 to 63"),
    "negative": (lambda: flip(Region.of("w", torch.zeros(2)), [-1]), r"bits 0 to 63"),
    "twice": (lambda: flip(Region.of("w", torch.zeros(2)), [3, 3]), "same bit twice"),
    "nothing there": (lambda: flip(Region.of("w", torch.zeros(0)), [0]), "bits 0 to -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_flipped_is_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(NumericsError, match=f"(?s)w: .*{message}"):
        call()
