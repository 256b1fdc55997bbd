"""Bit flips in stored weights, and their exact reversal.

A :class:`Region` is memory of a model that holds numbers of one layout: a parameter or buffer, the packed int4 payload
of a ``uint8`` tensor, or those columns of fused embedding rows that hold a scale. Bit ``b`` of number ``i`` has the
address ``i * width + b``, with numbers counted in the row-major order of the tensor's shape and bits from the lowest,
whatever the strides are. A flip changes the storage itself, by exclusive or on an integer view, never a dequantized
copy. So two flips of the same bits restore the model exactly, including payloads of NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cordillera.errors import NumericsError

# Integers as wide as a stored element; their signs do not matter to exclusive or.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
_NOT_PLAIN = (torch.float4_e2m1fn_x2,)  # holds two numbers in an element


@dataclass(frozen=True)
class BitLayout:
    """Meaning of the bits of a stored number.

    Attributes:
        name: Name of the format.
        width: Number of bits of a number.
        exponent_bits: Number of exponent bits, above the mantissa; 0 for integers.
        mantissa_bits: Number of mantissa bits, the lowest ones; 0 for integers. A sign bit lies above both if there is
            room.
    """

    name: str
    width: int
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @classmethod
    def of(cls, dtype: torch.dtype, where: str = "dtype") -> BitLayout:
        """Return the layout of a dtype's elements.

        Args:
            dtype: Dtype of a floating-point or integer tensor.
            where: Name for the error message.

        Raises:
            NumericsError: If an element is not one real number in plain bits (bool, complex, quantised, two in a byte).
        """
        name = str(dtype).removeprefix("torch.")
        if dtype in _INTEGERS:
            return cls(name, 8 * dtype.itemsize)
        if not dtype.is_floating_point or dtype in _NOT_PLAIN:
            raise NumericsError(
                f"elements of {name} are not plain numbers of one format",
                where=where,
                remedy="give the stored bytes as a uint8 tensor, with the layout of what they hold",
            )
        if dtype == torch.float8_e8m0fnu:
            return cls(name, 8, 8, 0)
        info = torch.finfo(dtype)
        mantissa = round(-torch.tensor(info.eps, dtype=torch.float64).log2().item())
        return cls(name, info.bits, info.bits - 1 - mantissa, mantissa)

    def part(self, bit: int) -> str:
        """Return the part of a number to which a bit belongs: ``sign``, ``exponent``, ``mantissa`` or ``integer``."""
        if not self.exponent_bits:
            return "integer"
        if bit < self.mantissa_bits:
            return "mantissa"
        return "exponent" if bit < self.mantissa_bits + self.exponent_bits else "sign"


INT4 = BitLayout("int4", 4)
"""Layout of two integers in a byte, the first in its low half."""


@dataclass(frozen=True, eq=False)
class Region:
    """Memory of a model that holds numbers of one layout.

    Attributes:
        name: Name of the tensor in the model, with the part that is meant.
        owner: Whole tensor, of any shape.
        stored: Part of ``owner`` that is meant: all of it, or some columns of its last dimension; shares its memory.
        layout: Meaning of the bits. Narrower than an element if several numbers are packed into one; wider if
            neighbouring bytes of a row form one number, the lowest byte first.
        aliases: Other names of the same memory.
        first_column: First column of ``stored`` in the last dimension of ``owner``.
        is_whole: Whether ``stored`` has the shape of ``owner`` and no other tensor of the model uses this memory.
    """

    name: str
    owner: Tensor
    stored: Tensor
    layout: BitLayout
    aliases: tuple[str, ...] = ()
    first_column: int = 0
    is_whole: bool = True

    @classmethod
    def of(
        cls,
        name: str,
        tensor: Tensor,
        layout: BitLayout | None = None,
        columns: slice | None = None,
        aliases: tuple[str, ...] = (),
    ) -> Region:
        """Return the region of a parameter or a buffer.

        Args:
            name: Name for reports and errors.
            tensor: Tensor of any shape, strides and number of elements, on any device.
            layout: Layout of its content; None for that of its dtype.
            columns: Columns of the last dimension, such as the bytes of a scale in fused rows; None for all.
            aliases: Other names of the tensor.

        Raises:
            NumericsError: If the tensor has no plain memory, or its rows do not hold whole numbers of that layout.
        """
        if tensor.layout != torch.strided or tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
            kind = "has no memory" if tensor.is_meta else f"is stored as {type(tensor).__name__} ({tensor.layout})"
            raise NumericsError(f"{kind}: there are no plain bits to flip", where=name)
        stored = tensor.detach()
        first, last, step = (0, 1, 1) if columns is None else columns.indices(tensor.shape[-1])
        if columns is not None:
            if step != 1:
                raise NumericsError(f"columns must be neighbours, got {columns}", where=name)
            stored = stored[..., first:last]
        for dim, stride in enumerate(stored.stride()):
            if stride == 0 and stored.shape[dim] > 1:  # expanded: the same memory appears many times
                stored = stored.narrow(dim, 0, 1)
        if layout is None:
            layout = BitLayout.of(tensor.dtype, name)
        word = 8 * tensor.dtype.itemsize
        row = word * (stored.shape[-1] if stored.ndim else 1)
        if layout.width > word:
            fits = row % layout.width == 0 and layout.width % word == 0
        else:
            fits = word % layout.width == 0
        if not fits:
            raise NumericsError(
                f"rows of {row} bits in elements of {word} do not hold whole numbers of {layout.width} bits", where=name
            )
        return cls(name, tensor, stored, layout, aliases, first, stored.shape == tensor.shape)

    @property
    def num_bits(self) -> int:
        """Number of bits of storage."""
        return self.stored.numel() * 8 * self.stored.dtype.itemsize

    @property
    def num_numbers(self) -> int:
        """Number of stored numbers."""
        return self.num_bits // self.layout.width

    @property
    def words(self) -> Tensor:
        """Memory as integers, in the shape of ``stored``."""
        return self.stored.view(_WORDS[self.stored.dtype.itemsize])

    def beyond(self, bits: Sequence[int]) -> NumericsError:
        """Return the error for addresses ``bits`` that are not all inside the region."""
        return NumericsError(f"has bits 0 to {self.num_bits - 1}, asked for {list(bits)}", where=self.name)

    def locate(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions and masks of addresses.

        Args:
            bits: Addresses, ``int64`` of any shape.

        Returns:
            Flat positions in ``words``, ``int64``, and masks in the dtype of ``words``; both in the shape of ``bits``.

        Raises:
            NumericsError: If an address is outside the region.
        """
        if bits.numel() and not 0 <= int(bits.min()) <= int(bits.max()) < self.num_bits:
            raise self.beyond(bits.flatten().tolist())
        word = 8 * self.stored.dtype.itemsize
        masks = torch.bitwise_left_shift(torch.ones_like(bits), bits % word)
        return bits // word, masks.to(_WORDS[self.stored.dtype.itemsize])


def _hit(region: Region, bits: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Return the elements that hold some bits, as views of the memory, and the mask to flip in each."""
    if len(set(bits)) != len(bits):
        raise NumericsError(f"the same bit twice would not be flipped: {list(bits)}", where=region.name)
    words, size = region.words, 8 * region.stored.dtype.itemsize
    masks: dict[int, int] = {}
    for bit in bits:
        if not 0 <= bit < region.num_bits:
            raise region.beyond(bits)
        place, position = divmod(bit, size)
        # the highest bit of a signed integer is its sign
        value = -(1 << position) if position == size - 1 and size > 8 else 1 << position
        masks[place] = masks.get(place, 0) ^ value
    hit = []
    for place, mask in masks.items():
        index, rest = [], place
        for length in reversed(words.shape):
            rest, at = divmod(rest, length)
            index.append(at)
        hit.append((words[tuple(reversed(index))], mask))
    return hit


def flip(region: Region, bits: Sequence[int]) -> None:
    """Flip bits of a model in its memory; the same call again undoes it.

    Args:
        region: Memory that holds the bits.
        bits: Addresses, all different.

    Raises:
        NumericsError: If an address is outside the region or repeated.
    """
    hit = _hit(region, bits)
    with torch.inference_mode():  # weights created in inference mode can only be written in that mode
        for element, mask in hit:
            element.bitwise_xor_(mask)


@contextmanager
def flipped(region: Region, bits: Sequence[int]) -> Iterator[None]:
    """Flip bits within a ``with`` statement and restore them at its end, also after an error.

    The stored values are written back rather than flipped again, so that an interruption (Ctrl-C) at any point cannot
    leave a bit flipped. Changes that the body makes elsewhere in the region are kept. The arguments ``region`` and
    ``bits`` and the errors are those of :func:`flip`.
    """
    before = [(element, int(element), mask) for element, mask in _hit(region, bits)]

    def restore() -> None:
        with torch.inference_mode():
            for element, value, _ in before:
                element.fill_(value)

    try:
        with torch.inference_mode():
            for element, _, mask in before:
                element.bitwise_xor_(mask)
        yield
    finally:
        try:
            restore()
        except BaseException:  # a second Ctrl-C, right here
            restore()
            raise


def corrupted(slices: Tensor, places: Tensor, masks: Tensor) -> Tensor:
    """Flip bits in copies of stored values, other bits in each copy, and return the copies.

    Args:
        slices: Stored values, ``[M, ...]``, one contiguous copy for each fault; modified in place.
        places: Flat positions of elements within a copy, ``int64 [M, k]``.
        masks: Masks, ``[M, k]`` integers as wide as an element.
    """
    words = slices.view(_WORDS[slices.dtype.itemsize]).view(len(slices), -1)
    fault = torch.arange(len(slices), device=slices.device)
    for column in range(places.shape[1]):  # one column at a time, as two bits of a fault may lie in one element
        words[fault, places[:, column]] ^= masks[:, column].to(slices.device)
    return slices


def regions_of(module: nn.Module, *, buffers: bool = False) -> list[Region]:
    """Return every stored weight of a model once, however many names it has.

    Args:
        module: Model.
        buffers: Whether to include floating-point and one-byte buffers. Wider integers are never included: they are
            counters and indices, and a flipped index may read out of bounds.

    Returns:
        Regions in the order of ``named_parameters``, then of ``named_buffers``. A tensor that lies within the memory of
        another becomes an alias of it.

    Raises:
        NumericsError: If a tensor has no plain memory, or two overlap and neither contains the other.
    """
    named: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
    if buffers:
        named += [
            (name, buffer)
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if buffer.dtype.is_floating_point or (buffer.dtype in _INTEGERS and buffer.dtype.itemsize == 1)
        ]
    return unaliased(Region.of(name, tensor) for name, tensor in named)


def unaliased(regions: Iterable[Region]) -> list[Region]:
    """Leave out regions that lie within another or equal an earlier one, whose aliases then include their names.

    Raises:
        NumericsError: If two regions overlap and neither contains the other.
    """
    kept: list[Region] = []
    for region in regions:
        beside: list[Region] = []
        holder: Region | None = None
        held: list[str] = []
        for other in kept:
            shared = _shared_bytes(region, other)
            if not shared or holder is not None:
                beside.append(other)
            elif shared == region.num_bits // 8:
                holder = other
                alone = other.is_whole and other.owner is region.owner
                beside.append(replace(other, aliases=(*other.aliases, region.name), is_whole=alone))
            elif shared == other.num_bits // 8:
                held += [other.name, *other.aliases]
            else:
                raise NumericsError(
                    f"shares {shared} bytes of its memory with {other.name!r}, and neither holds the other",
                    where=region.name,
                    remedy="name regions that do not overlap",
                )
        if holder is None:
            beside.append(replace(region, aliases=(*region.aliases, *held), is_whole=region.is_whole and not held))
        kept = beside
    return kept


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in memory and the end of its last."""
    first = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.dtype.itemsize


def _shared_bytes(one: Region, other: Region) -> int:
    """Return the number of bytes that two regions share; exact also if their memory interleaves."""
    if not one.num_bits or not other.num_bits or one.stored.device != other.stored.device:
        return 0
    (first, last), (begin, end) = _span(one.stored), _span(other.stored)
    if last <= begin or end <= first:
        return 0
    low = min(first, begin)
    sets = []
    for region, start in ((one, first), (other, begin)):
        place = torch.full((), start - low)
        size = region.stored.dtype.itemsize
        for length, stride in zip(region.stored.shape, region.stored.stride(), strict=True):
            place = place.unsqueeze(-1) + torch.arange(length) * (stride * size)
        sets.append((place.unsqueeze(-1) + torch.arange(size)).flatten())
    return int(torch.isin(sets[0], sets[1]).sum())
