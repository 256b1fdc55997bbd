"""Warnings of values of a cluster that seem to be in another unit."""

from __future__ import annotations

import warnings
from pathlib import Path

from cordillera.topology import Topology

_LEAST = {
    "matrix_flops_per_s": (1e10, "FLOP/s"),
    "memory_bytes": (1e8, "bytes"),
    "memory_bytes_per_s": (1e8, "bytes/s"),
    "nic_bytes_per_s": (1e6, "bytes/s"),
}
_FASTEST_CARD = 2e11  # bytes/s: 1.6 Tb/s
_HALF_THE_EARTH_KM = 20_100
_LONGEST_LATENCY_S = 0.1  # besides the latency of the distance


def warn_of_units(topology: Topology, cluster: str | Path) -> None:
    """Warn of values that fit no machine, so that the unit is probably wrong."""
    places = {topology.device: "device"}  # each kind where it is first described
    for i, group in enumerate(topology.groups):
        places.setdefault(group.device, f"groups[{i}].device")
    for device, place in places.items():
        for key, (least, unit) in _LEAST.items():
            value = getattr(device, key)
            if value < least:
                other = f" ({value:g} GB are {value:g}e9)" if key == "memory_bytes" and 1 <= value <= 1000 else ""
                warnings.warn(f"{cluster}: {place}.{key} is {value:g}; its unit is {unit}{other}", stacklevel=3)
        if (rate := device.nic_bytes_per_s) > _FASTEST_CARD:
            other = f"its unit is bytes/s ({rate / 1e9:g} Gb/s are {rate / 8:g})"
            warnings.warn(f"{cluster}: {place}.nic_bytes_per_s is {rate:g}; {other}", stacklevel=3)
    rates = [
        *((f"{level.name}.bytes_per_s", level.bytes_per_s) for level in topology.levels),
        *((f"links[{i}].bytes_per_s", link.bytes_per_s) for i, link in enumerate(topology.links)),
        *((f"groups[{i}].port_bytes_per_s", group.port_bytes_per_s) for i, group in enumerate(topology.groups)),
    ]
    for place, slow in rates:
        if slow is not None and slow < _LEAST["nic_bytes_per_s"][0]:
            warnings.warn(f"{cluster}: {place} is {slow:g}; its unit is bytes/s", stacklevel=3)
    for level in topology.levels:
        if level.latency_s > _LONGEST_LATENCY_S:
            value = level.latency_s
            other = f" ({value:g} µs are {value:g}e-6)" if value <= 1000 else ""
            warnings.warn(f"{cluster}: {level.name}.latency_s is {value:g}; its unit is s{other}", stacklevel=3)
        if level.distance_km > _HALF_THE_EARTH_KM:
            far = f"{level.name}.distance_km is {level.distance_km:g}, more than half the way around the earth"
            warnings.warn(f"{cluster}: {far}", stacklevel=3)
