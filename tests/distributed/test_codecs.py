"""Codecs: what their guarantees say, frames that are damaged or forged, streams of codes, bounds and selection."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.distributed.codecs import frames, range_coder
from cordillera.distributed.codecs.bounds import BoundClass, BoundDecay, classes_by_cardinality
from cordillera.distributed.codecs.codecs import Bounded, Codec, Distinct, Guarantee, Half, IntegerRows, Raw, decode
from cordillera.distributed.codecs.distinct_rows import distinct_rows
from cordillera.distributed.codecs.frames import read_varint, varint
from cordillera.distributed.codecs.selection import CodecRecord, record, select
from cordillera.errors import DataError, NumericsError

DTYPES = list(frames.DTYPES)
LOSSLESS = [Raw(), Distinct()]
BOUNDED = [
    Bounded(0.03),
    Bounded(0.01, fast=True),
    Bounded(0.5, relative=False),
    Bounded(1e-3, relative=False, fast=True),
]
EVERY = [*LOSSLESS, *BOUNDED, Half(torch.float16), Half(torch.bfloat16), IntegerRows(8), IntegerRows(4, seed=1)]
SPECIAL = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-42, -1e-44, 2.0**-126, 3.4e38, -3.4e38, 65504.0, 6e-8]


def name_of(codec: Codec) -> str:
    return f"{codec.name}-{codec.guarantee.value}"


FRAMES = [*(f"{name_of(codec)}-{place}" for place, codec in enumerate(EVERY)), "outliers", "empty"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)


def skewed_rows(rows: int, dim: int, seed: int = 0, distinct: int = 40) -> torch.Tensor:
    """Rows of a table of different scales, some of them several times."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((distinct, dim)) * rng.exponential(1.0, (distinct, 1))
    return torch.from_numpy(table[(distinct * rng.random(rows) ** 2).astype(int)].astype(np.float32))


@st.composite
def tensors(draw: st.DrawFn, special: bool = True) -> torch.Tensor:
    """Tensors of every type and of odd shapes, with repeated rows, special numbers, and any strides."""
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 17]), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, dim = math.prod(shape[:-1]), shape[-1]
    scale = 10.0 ** draw(st.integers(-6, 4))
    table = rng.standard_normal((max(1, rows // 2), dim)) * scale + draw(st.sampled_from([0.0, 0.0, 100.0])) * scale
    values = table[rng.integers(0, len(table), rows)].reshape(shape)
    if special and values.size and draw(st.booleans()):
        places = rng.integers(0, values.size, 3)
        values.reshape(-1)[places] = rng.choice(draw(st.sampled_from([SPECIAL, SPECIAL[:3], SPECIAL[3:5]])), 3)
    with np.errstate(over="ignore"):
        found = torch.from_numpy(values.astype(np.float32)).to(draw(st.sampled_from(DTYPES)))
    return found.t().contiguous().t() if found.dim() == 2 and draw(st.booleans()) else found


def assert_within(found: torch.Tensor, given: torch.Tensor, bound: float) -> None:
    """Finite numbers are within the bound and a unit in the last place; what no bound can state is kept bit for bit."""
    assert found.shape == given.shape
    assert found.dtype == given.dtype
    single = given.float()
    kept = ~single.isfinite() | ((single == 0) & single.signbit()) | ((single != 0) & (single.abs() < 2.0**-126))
    assert torch.equal(bits(found)[kept], bits(given)[kept])
    mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[given.dtype]
    least = {torch.float32: -149, torch.float16: -24, torch.bfloat16: -133}[given.dtype]
    exact = given.double()[~kept]
    place = torch.exp2(torch.clamp(torch.frexp(exact)[1].double() - 1 - mantissa, min=least))
    assert bool(((found.double()[~kept] - exact).abs() <= bound * (1 + 2.0**-20) + place).all())


def absolute_bound(codec: Bounded, tensor: torch.Tensor) -> float:
    finite = tensor.double()[tensor.isfinite()]
    if not codec.relative or not finite.numel():
        return codec.bound
    return codec.bound * float(finite.max() - finite.min())


@settings(max_examples=150)
@given(tensor=tensors())
def test_lossless_frames_keep_every_bit(tensor: torch.Tensor) -> None:
    for codec in LOSSLESS:
        found = codec.decode(codec.encode(tensor))
        assert found.shape == tensor.shape
        assert found.dtype == tensor.dtype
        assert torch.equal(bits(found), bits(tensor))


@settings(max_examples=200)
@given(tensor=tensors(), codec=st.sampled_from(BOUNDED))
def test_every_element_is_within_the_bound(tensor: torch.Tensor, codec: Bounded) -> None:
    frame = codec.encode(tensor)
    found = codec.decode(frame)
    assert_within(found, tensor, absolute_bound(codec, tensor))
    assert frames.unpack(frame).bound <= absolute_bound(codec, tensor)
    assert torch.equal(bits(codec.decode(codec.encode(tensor))), bits(found))


@settings(max_examples=100)
@given(tensor=tensors(special=False), codec=st.sampled_from(EVERY))
def test_a_frame_is_never_much_longer_than_its_tensor(tensor: torch.Tensor, codec: Codec) -> None:
    try:
        frame = codec.encode(tensor)
    except NumericsError:
        assert not isinstance(codec, (Raw, Distinct, Bounded))
        return
    assert frame.numel() <= tensor.numel() * tensor.itemsize + 64
    assert codec.decode(frame).shape == tensor.shape


@settings(max_examples=60)
@given(data=st.data(), tensor=tensors(), codec=st.sampled_from([*LOSSLESS, *BOUNDED]))
def test_a_permutation_of_rows_permutes_what_is_decoded(
    data: st.DataObject, tensor: torch.Tensor, codec: Codec
) -> None:
    order = torch.tensor(data.draw(st.permutations(range(tensor.shape[0]))), dtype=torch.long)
    if tensor.dim() == 1:
        return
    found = decode(codec.encode(tensor[order]))
    assert torch.equal(bits(found), bits(decode(codec.encode(tensor))[order]))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_larger_bound_never_makes_a_frame_more_than_one_percent_larger(fast: bool, seed: int) -> None:
    tensor = skewed_rows(700, 16, seed, 400)
    sizes = [Bounded(bound, fast=fast).encode(tensor).numel() for bound in np.geomspace(1e-6, 0.5, 40)]
    for i, size in enumerate(sizes):
        assert size <= 1.01 * min(sizes[: i + 1])


def test_bounds_of_extreme_tensors() -> None:
    for tensor in (torch.full((9, 4), 3.7), torch.zeros(5, 3), torch.full((3, 2), math.nan), -torch.zeros(4, 4)):
        assert torch.equal(bits(decode(Bounded(0.03).encode(tensor))), bits(tensor))
    wide = torch.tensor([[-3.4e38, 3.4e38, 1.0]])
    assert_within(decode(Bounded(0.01).encode(wide)), wide, 0.01 * 6.8e38)
    largest = torch.tensor([[65504.0, 60000.0, 1.0]], dtype=torch.float16)
    assert decode(Bounded(5000.0, relative=False).encode(largest)).isfinite().all()
    assert torch.equal(decode(Bounded(0.0).encode(wide)), wide)
    far = 1e6 + torch.rand(50, 8)
    assert_within(decode(Bounded(1e-3, relative=False).encode(far)), far, 1e-3)
    with pytest.raises(NumericsError, match="bound"):
        Bounded(math.nan)


def test_repeated_rows_cost_little_and_new_rows_nearly_nothing() -> None:
    fresh = torch.randn(1000, 8)
    assert Distinct().encode(fresh).numel() <= fresh.numel() * 4 + 24
    repeated = fresh[:10][torch.randint(0, 10, (1000,))]
    assert Distinct().encode(repeated).numel() < 10 * 32 + 1000 * math.log2(10) / 8 * 1.05 + 40


@settings(max_examples=50)
@given(st.integers(0, 60), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_distinct_rows_are_those_of_a_dictionary(rows: int, width: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 3, (rows, width)).astype(np.uint8)
    first, inverse = distinct_rows(values)
    known: dict[bytes, int] = {}
    expected = [known.setdefault(row.tobytes(), len(known)) for row in values]
    assert inverse.tolist() == expected
    assert first.tolist() == [expected.index(number) for number in range(len(known))]


@settings(max_examples=100)
@given(
    st.integers(1, 40), st.integers(1, 70), st.sampled_from([1, 2, 30, 255, 65535]), st.integers(0, 2**32 - 1),
    st.floats(0.1, 9.0),
)  # fmt: skip
def test_streams_of_codes_are_read_as_they_were_written(rows: int, dim: int, most: int, seed: int, skew: float) -> None:
    rng = np.random.default_rng(seed)
    codes = (rng.random((rows, dim)) ** skew * (most + 1)).astype(np.uint16 if most > 255 else np.uint8)
    centre = int(rng.integers(0, most + 1))
    stream, found = range_coder.encode_codes(codes, centre), np.empty_like(codes)
    assert range_coder.decode_codes(stream, centre, found)
    assert np.array_equal(found, codes)


@settings(max_examples=100)
@given(st.integers(1, 400), st.floats(0.0, 8.0), st.integers(0, 2**32 - 1))
def test_streams_of_indices_are_read_as_they_were_written(rows: int, skew: float, seed: int) -> None:
    drawn = (np.random.default_rng(seed).random(rows) ** skew * rows).astype(np.int64)
    first, inverse = distinct_rows(drawn.reshape(-1, 1))
    found = np.empty_like(inverse)
    assert range_coder.decode_indices(range_coder.encode_indices(inverse), first.size, found)
    assert np.array_equal(found, inverse)
    assert not range_coder.decode_indices(range_coder.encode_indices(inverse), first.size + 1, found)


def test_streams_that_were_written_before_are_read() -> None:
    """Written by version 1 of the frames: another reader would not read what other processes or files hold."""
    at = np.arange(60)
    codes = (at * 37 % 11 * (at % 7)).astype(np.uint8).reshape(6, 10)
    stream = "0c5182fa92ff3fb7cb6574164c4fbfd68725b5e0c7e4be56bf96615bc3774d13c1d05fa128f331d3f619f1ef9daf6edebd487151"
    assert bytes(range_coder.encode_codes(codes, 5)).hex() == stream
    found = np.empty_like(codes)
    assert range_coder.decode_codes(np.frombuffer(bytes.fromhex(stream), np.uint8), 5, found)
    assert np.array_equal(found, codes)
    _, inverse = distinct_rows((np.arange(40) ** 2 % 13).reshape(-1, 1))
    assert bytes(range_coder.encode_indices(inverse)).hex() == "50537a988fe61983372192bff014d7b514"


@pytest.mark.parametrize("scale", [0.3, 2.0, 20.0])
def test_streams_of_codes_are_as_short_as_the_entropy_of_their_source(scale: float) -> None:
    values = np.clip(np.rint(np.random.default_rng(1).laplace(0, scale, (2000, 32))) + 128, 0, 255).astype(np.uint8)
    counts = np.bincount(values.ravel())
    ideal = -(counts[counts > 0] * np.log2(counts[counts > 0] / counts.sum())).sum() / 8
    assert range_coder.encode_codes(values, 128).size <= 1.02 * ideal + 60


def test_streams_of_indices_are_as_short_as_their_source_allows() -> None:
    inverse = distinct_rows(np.random.default_rng(1).integers(0, 50, (20000, 1)))[1]
    assert range_coder.encode_indices(inverse).size <= 1.01 * 20000 * math.log2(50) / 8 + 60
    assert range_coder.encode_indices(np.arange(5000)).size <= 16


def test_rows_of_different_scale_cost_less_than_their_common_entropy() -> None:
    rng = np.random.default_rng(0)
    values = np.clip(np.rint(rng.standard_normal((500, 64)) * rng.choice([0.4, 12.0], (500, 1))) + 128, 0, 255)
    counts = np.bincount(values.astype(int).ravel())
    together = -(counts[counts > 0] * np.log2(counts[counts > 0] / counts.sum())).sum() / 8
    assert range_coder.encode_codes(values.astype(np.uint8), 128).size < 0.85 * together


@functools.cache
def small_frames() -> dict[str, bytes]:
    """Frames by name; made when a test asks, as collection would compile their kernels in each process."""
    tensor = skewed_rows(24, 6, distinct=5)
    with_outliers = tensor.clone()
    with_outliers[3, 2], with_outliers[20, 0] = math.nan, -0.0
    made = [codec.encode(tensor) for codec in EVERY]
    made += [Bounded(0.02).encode(with_outliers), Raw().encode(torch.empty(0, 3))]
    return {name: frame.numpy().tobytes() for name, frame in zip(FRAMES, made, strict=True)}


@pytest.mark.parametrize("name", FRAMES)
def test_damaged_frames_are_refused(name: str) -> None:
    content = small_frames()[name]
    decode(content)
    for at in range(len(content)):
        for flip in (1, 128, 255):
            damaged = bytearray(content)
            damaged[at] ^= flip
            with pytest.raises(DataError):
                decode(bytes(damaged))
    for end in range(len(content)):
        with pytest.raises(DataError):
            decode(content[:end])
    with pytest.raises(DataError):
        decode(content + b"\0")


def signed(content: bytearray) -> bytes:
    """The content with a checksum that fits."""
    struct.pack_into("<I", content, 6, zlib.crc32(bytes(content[10:]), zlib.crc32(bytes(content[:6]))))
    return bytes(content)


@pytest.mark.parametrize("name", FRAMES)
def test_forged_frames_give_a_tensor_or_an_error(name: str) -> None:
    content, rng = small_frames()[name], np.random.default_rng(0)
    for at in range(len(content)):
        for flip in (1, 2, 64, 128, 255):
            forged = bytearray(content)
            forged[at] ^= flip
            with contextlib.suppress(DataError):
                decode(signed(forged), most_bytes=1 << 20)
    for _ in range(300):
        forged = bytearray(content)
        place = int(rng.integers(10, len(forged)))
        forged[place:] = rng.bytes(int(rng.integers(0, 60)))
        with contextlib.suppress(DataError):
            decode(signed(forged), most_bytes=1 << 20)


def test_a_forged_shape_allocates_nothing() -> None:
    payload = Distinct().encode(torch.zeros(8, 2)).numpy().tobytes()
    assert len(payload) < 64
    for shape in ((2**40, 2), (2**31, 2**31), (2**62,), (2**60, 0), (1 << 20, 1 << 10)):
        forged = frames.pack(frames.Frame(5, torch.float32, shape, 0.0, b"\1\0" + bytes(8)))
        with pytest.raises(DataError, match="larger than"):
            decode(forged)
    with pytest.raises(DataError, match="larger than 100 bytes"):
        decode(Raw().encode(torch.zeros(26)), most_bytes=100)


def test_frames_of_other_versions_and_other_bytes_are_refused_by_name() -> None:
    content = bytearray(Raw().encode(torch.ones(2)).numpy().tobytes())
    content[2] = 9
    with pytest.raises(DataError, match="version 9"):
        decode(signed(content))
    with pytest.raises(DataError, match="begins with"):
        decode(b"PK" + bytes(40))
    with pytest.raises(DataError, match="unknown format 200"):
        decode(frames.pack(frames.Frame(200, torch.float32, (1,), 0.0, b"1234")))
    with pytest.raises(DataError, match="uint8"):
        decode(torch.ones(30))
    with pytest.raises(NumericsError, match="float64"):
        Raw().encode(torch.ones(3, dtype=torch.float64))
    with pytest.raises(NumericsError, match="dimensions"):
        Raw().encode(torch.tensor(1.0))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_to_nearest(half: torch.dtype) -> None:
    tensor = torch.tensor([[1.0001, -3.3, math.nan, math.inf, 1e-7, -0.0]])
    assert torch.equal(bits(decode(Half(half).encode(tensor))), bits(tensor.to(half).float()))
    assert Half(half).encode(torch.randn(100, 64)).numel() < 100 * 64 * 2 + 64
    with pytest.raises(NumericsError, match="row 1, column 0"):
        Half(torch.float16).encode(torch.tensor([[1.0], [1e6]]))


@pytest.mark.parametrize(("bits_of", "dim"), [(8, 64), (8, 33), (4, 64), (4, 33)])
def test_integer_rows_are_those_of_embedding_tables(bits_of: int, dim: int) -> None:
    tensor = skewed_rows(50, dim)
    operations = torch.ops.quantized
    padded = tensor if dim % 2 == 0 or bits_of == 8 else torch.cat([tensor, tensor[:, -1:]], dim=1)
    if bits_of == 8:
        expected = operations.embedding_bag_byte_unpack(operations.embedding_bag_byte_prepack(padded))
    else:
        expected = operations.embedding_bag_4bit_unpack(operations.embedding_bag_4bit_prepack(padded))
    frame = IntegerRows(bits_of).encode(tensor)
    torch.testing.assert_close(decode(frame), expected[:, :dim], rtol=1e-6, atol=1e-6)
    assert len(frames.unpack(frame).payload) == 50 * (dim + 8 if bits_of == 8 else (dim + 1) // 2 + 4)
    tensor[7, 3] = math.nan
    with pytest.raises(NumericsError, match="row 7"):
        IntegerRows(bits_of).encode(tensor)


@pytest.mark.parametrize("bits_of", [8, 4])
def test_stochastic_integer_rows_are_unbiased(bits_of: int) -> None:
    codec, tensor = IntegerRows(bits_of, seed=3), torch.randn(4, 32)
    assert codec.guarantee is Guarantee.UNBIASED
    draws = torch.stack([decode(codec.encode(tensor)) for _ in range(400)]).double()
    step = (tensor.max(1).values - tensor.min(1).values)[:, None] / (2**bits_of - 1)
    assert bool(((draws.mean(0) - tensor).abs() <= 5 * 0.51 * step / math.sqrt(400) + 1e-6).all())
    assert draws.std(0).max() > 0


def test_every_codec_states_its_guarantee() -> None:
    assert {codec.guarantee for codec in EVERY} == set(Guarantee)
    assert all(codec.name for codec in EVERY)


# Table-wise classes of the paper's artefact, by its configurations, over the public cardinalities.
KAGGLE = [
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652),
    *(2173, 4, 7046547, 18, 15, 286181, 105, 142572),
]
TERABYTE = [
    *(9980333, 36084, 17217, 7378, 20134, 3, 7112, 1442, 61, 9758201, 1333352, 313829, 10, 2208, 11156, 122, 4, 970),
    *(14, 9994222, 7267859, 9946608, 415421, 12420, 101, 36),
]


def members(found: list[BoundClass], kind: BoundClass) -> set[int]:
    return {table for table, own in enumerate(found) if own is kind}


def test_cardinality_reproduces_the_published_classes() -> None:
    kaggle, terabyte = classes_by_cardinality(KAGGLE), classes_by_cardinality(TERABYTE)
    assert members(kaggle, BoundClass.TIGHT) == {2, 3, 9, 11, 15, 20, 23, 25}
    assert members(kaggle, BoundClass.LOOSE) == {8, 16, 19, 21, 22, 24} | {5, 13}
    assert members(terabyte, BoundClass.TIGHT) == {0, 9, 10, 19, 20, 21, 22} | {11}
    assert members(terabyte, BoundClass.LOOSE) == {5, 8, 12, 15, 16, 17, 18, 24, 25} - {17}
    exact = classes_by_cardinality(TERABYTE, tight=7 / 26, loose=9 / 26)
    assert members(exact, BoundClass.TIGHT) == {0, 9, 10, 19, 20, 21, 22}
    assert members(exact, BoundClass.LOOSE) == {5, 8, 12, 15, 16, 17, 18, 24, 25}
    assert [one.bound for one in (BoundClass.TIGHT, BoundClass.BASE, BoundClass.LOOSE)] == [0.01, 0.03, 0.05]
    with pytest.raises(NumericsError, match="shares"):
        classes_by_cardinality([1, 2], tight=0.8, loose=0.8)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [2, 1.95, 1.75, 1.5, 1.25, 1.01]),
        ("log", [2, 1.9176, 1.6426, 1.3799, 1.172, 1.0063]),
        ("step", [2, 2, 1.8, 1.5, 1.3, 1.1]),
        ("constant", [2] * 6),
    ],
)
def test_decays_have_the_published_values(shape: str, expected: list[float]) -> None:
    decay = BoundDecay(100, shape=shape)
    assert [decay.multiplier(iteration) for iteration in (0, 5, 25, 50, 75, 99)] == pytest.approx(expected, abs=1e-4)
    assert decay.multiplier(100) == decay.multiplier(10**9) == 1.0
    assert BoundDecay(0, shape=shape).multiplier(0) == 1.0
    assert all(
        BoundDecay(977, 3.0, shape).multiplier(i) >= BoundDecay(977, 3.0, shape).multiplier(i + 1) for i in range(977)
    )


def test_the_selection_is_the_largest_predicted_speedup() -> None:
    # Rates of the paper's artefact: LZ 45 and 290 GB/s, Huffman 60 and 40 GB/s, over 4 GB/s.
    lz, huffman = CodecRecord(1e9, 1e9 / 8, 1 / 45, 1 / 290), CodecRecord(1e9, 1e9 / 10, 1 / 60, 1 / 40)
    assert lz.speedup(4e9) == pytest.approx(1 / (1 / 8 + 4 * (1 / 45 + 1 / 290)))
    assert select({"lz": lz, "huffman": huffman}, 4e9) == ("lz", lz.speedup(4e9))
    assert select({"huffman": huffman, "lz": lz}, 1e8)[0] == "huffman"
    assert select({"lz": lz, "huffman": huffman}, 1e12) == ("raw", 1.0)
    assert select({}, 1e9) == ("raw", 1.0)
    assert select({"b": lz, "a": lz}, 1e9)[0] == "a"
    assert select({"lz": lz}, 4e9, margin=lz.speedup(4e9)) == ("raw", 1.0)
    assert lz.plus(huffman) == CodecRecord(2e9, 1e9 / 8 + 1e9 / 10, 1 / 45 + 1 / 60, 1 / 290 + 1 / 40)
    with pytest.raises(NumericsError, match="record"):
        select({"lz": CodecRecord()}, 1e9)
    with pytest.raises(NumericsError, match="link"):
        lz.speedup(0.0)


def test_a_record_counts_the_bytes_of_frames() -> None:
    tensor = skewed_rows(100, 8)
    found = record(Bounded(0.03), tensor)
    assert found.raw_bytes == 3200
    assert found.frame_bytes == Bounded(0.03).encode(tensor).numel()
    assert found.ratio > 4
    assert select({"bounded": found}, 1.0)[0] == "bounded"
    assert select({"bounded": found}, 1e15)[0] == "raw"


@pytest.mark.parametrize(
    ("number", "length"), [(0, 1), (1, 1), (127, 1), (128, 2), (2**14 - 1, 2), (2**14, 3), (2**62, 9)]
)
def test_numbers_take_a_byte_for_every_seven_bits(number: int, length: int) -> None:
    written = varint(number)
    assert len(written) == length
    assert read_varint(b"x" + written + b"\xff", 1) == (number, 1 + length)
    with pytest.raises(DataError, match="cut off or too large"):
        read_varint(written[:-1], 0)
    with pytest.raises(DataError, match="cut off or too large"):
        read_varint(b"\xff" * 10, 0)
