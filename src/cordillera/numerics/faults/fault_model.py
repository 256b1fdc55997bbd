"""Fault models of storage: the bits of a component that a fault hits.

Every bit of a component's memory is equally likely to be hit. Faults are drawn by strata, one for each bit position of
each layout, the same number in each; estimates weight them by the stratum's share of the component's bits (see
:mod:`cordillera.numerics.faults.vulnerability`). A fault is one bit, several bits of one stored number, or a burst of
neighbouring bits (Jiao et al. 2024, arXiv 2405.01741).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.faults.bit_flips import BitLayout, Region, unaliased

StratumKey = tuple[BitLayout, int]


@dataclass(frozen=True)
class FaultModel:
    """Number of bits that one fault flips in one stored number; the bits of a burst are neighbours."""

    bits: int = 1
    burst: bool = False

    def __post_init__(self) -> None:
        if self.bits < 1:
            raise NumericsError(f"a fault flips at least one bit, got {self.bits}", where="bits")

    @property
    def name(self) -> str:
        """Name for display."""
        if self.bits == 1:
            return "single bit"
        return f"burst of {self.bits} bits" if self.burst else f"{self.bits} bits of one number"


@dataclass(frozen=True)
class Component:
    """Regions of a model that are reported together, without overlaps."""

    name: str
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, name: str, regions: Sequence[Region]) -> Component:
        """Return a component of regions that may be aliases of each other."""
        return cls(name, tuple(unaliased(regions)))

    @property
    def num_bits(self) -> int:
        """Number of bits of storage."""
        return sum(region.num_bits for region in self.regions)

    @property
    def layouts(self) -> list[BitLayout]:
        """Layouts of the numbers in the regions."""
        return list(dict.fromkeys(region.layout for region in self.regions if region.num_bits))


@dataclass(frozen=True)
class Injections:
    """Faults in one region.

    Attributes:
        strata: Layout and position of the flipped bit (the lowest of a burst) for each of the ``M`` faults.
        bits: Addresses of the flipped bits, ``int64 [M, k]``.
    """

    region: Region
    strata: tuple[StratumKey, ...]
    bits: Tensor


def positions(layout: BitLayout, model: FaultModel) -> range:
    """Return the bit positions that form strata: of the bit, of one of several bits, or of a burst's lowest bit."""
    if model.bits > layout.width:
        raise NumericsError(f"a number of {layout.name} has {layout.width} bits, not {model.bits}", where="bits")
    return range(layout.width - model.bits + 1 if model.burst else layout.width)


def draw(component: Component, model: FaultModel, seed: int, rounds: range) -> list[Injections]:
    """Draw the faults of some rounds, grouped by region; each round holds one for every stratum of the component.

    A round depends only on the seed, the component's name and the round's number. So a longer campaign begins with the
    faults of a shorter one, and ``FaultModel(bits=1)`` draws the same faults as a burst of one bit.
    """
    gathered: dict[int, tuple[list[StratumKey], list[list[int]]]] = {}
    key = zlib.crc32(component.name.encode())
    sized = {
        layout: [(i, region) for i, region in enumerate(component.regions) if region.layout == layout]
        for layout in component.layouts
    }
    for number in rounds:
        random = np.random.default_rng([seed, key, number])
        for layout, holders in sized.items():
            ends = np.cumsum([region.num_numbers for _, region in holders])
            strata = positions(layout, model)
            places = random.integers(0, ends[-1], len(strata))
            chosen = _positions_of_faults(layout, model, strata, random)
            for bit, place, holder in zip(strata, places, np.searchsorted(ends, places, side="right"), strict=True):
                index, region = holders[holder]
                first = int(place - ends[holder] + region.num_numbers) * layout.width
                of_region, addresses = gathered.setdefault(index, ([], []))
                of_region.append((layout, bit))
                addresses.append([first + position for position in chosen[bit]])
    return [
        Injections(component.regions[index], tuple(strata), torch.tensor(addresses, dtype=torch.int64))
        for index, (strata, addresses) in gathered.items()
    ]


def _positions_of_faults(
    layout: BitLayout, model: FaultModel, strata: range, random: np.random.Generator
) -> list[list[int]]:
    """Return the positions of each stratum's flipped bits, the stratum's own first."""
    if model.burst or model.bits == 1:
        return [list(range(bit, bit + model.bits)) for bit in strata]
    order = random.random((len(strata), layout.width))
    order[np.arange(len(strata)), np.array(strata)] = -1
    return np.argsort(order, axis=1)[:, : model.bits].tolist()


def strata_of(component: Component, model: FaultModel) -> list[tuple[BitLayout, int, float]]:
    """Return layout, bit position and share of the component's bits for each stratum; the shares sum to one.

    The share of a burst's lowest position is that of the places where the burst fits.
    """
    strata = []
    for layout in component.layouts:
        bits = sum(region.num_bits for region in component.regions if region.layout == layout)
        places = positions(layout, model)
        strata += [(layout, bit, bits / component.num_bits / len(places)) for bit in places]
    return strata
