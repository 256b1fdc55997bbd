"""Which matrix products a workload needs, so that they can be measured on a device."""

from __future__ import annotations

from itertools import product

from cordillera.cost import Calibration, CostModel
from cordillera.planning.workload import Layout, Workload, head_seconds, layer_seconds
from cordillera.topology import Device

Shape = tuple[int, int, int, int]


class _Listing(CostModel):
    """A cost model that lists the products that it is asked for."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Calibration())
        self.asked: set[Shape] = set()

    def product(self, rows: float, columns: float, inner: float, count: float = 1.0) -> float:
        self.asked.add((max(1, round(rows)), max(1, round(columns)), max(1, round(inner)), max(1, round(count))))
        return super().product(rows, columns, inner, count)


def shapes(workload: Workload, device: Device, host: int) -> list[Shape]:
    """The products of one device, over the degrees of tensor parallelism and the microbatches that a search tries.

    Args:
        workload: What is trained.
        device: On what; its figures do not matter.
        host: Devices of a host, within which tensor parallelism stays.

    Returns:
        ``(rows, columns, inner, count)`` of each, see :meth:`cordillera.cost.CostModel.product`.
    """
    listing = _Listing(device)
    tensors = [1 << i for i in range(host.bit_length()) if workload.model.heads % (1 << i) == 0 and 1 << i <= host]
    for tensor, microbatch in product(tensors, (1, 2, 4, 8)):
        layout = Layout(tensor=tensor, microbatch=microbatch)
        layer_seconds(workload, layout, listing, 0.0)
        head_seconds(workload, layout, listing, 0.0)
    return sorted(listing.asked)
