"""Matrix products that a workload needs, to be measured, and the share of a plan that rests on measured ones."""

from __future__ import annotations

from itertools import product

from cordillera.cost import Calibration, CostModel, ProductShape, whole
from cordillera.planning.language.explorer import MICROBATCHES, expert_degrees, inner_degrees
from cordillera.planning.language.layers import head_seconds, layer_seconds
from cordillera.planning.language.workload import Layout, Workload
from cordillera.topology import Device


class _Listing(CostModel):
    """A cost model that lists the requested products."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Calibration())
        self.asked: set[ProductShape] = set()

    def product(self, rows: float, columns: float, inner: float, count: float = 1.0, fp8: bool = False) -> float:
        self.asked.add(whole(rows, columns, inner, count))
        return super().product(rows, columns, inner, count, fp8)


class _ProductsAlone(CostModel):
    """A cost model in which only matrix products take time: all of them, or the measured ones."""

    def __init__(self, cost: CostModel, counted: set[ProductShape] | None) -> None:
        super().__init__(cost.device, cost.calibration.model_copy(update={"layer_s": 0.0}), cost.products)
        self._counted = counted

    def product(self, rows: float, columns: float, inner: float, count: float = 1.0, fp8: bool = False) -> float:
        if self._counted is not None and (fp8 or whole(rows, columns, inner, count) not in self._counted):
            return 0.0
        return super().product(rows, columns, inner, count, fp8)

    def stream(self, size: float) -> float:
        return 0.0

    def attention(self, flops: float) -> float:
        return 0.0


def shapes(workload: Workload, device: Device, host: int) -> list[ProductShape]:
    """Return the products of one device, over the degrees and the microbatches that a search tries.

    Tensor parallelism of the ``workload`` stays within the ``host`` devices of a host. The figures of ``device`` do not
    matter. Each product is ``(rows, columns, inner, count)``, in ascending order; see
    :meth:`cordillera.cost.CostModel.product`.
    """
    listing = _Listing(device)
    degrees = product(inner_degrees(workload, host), expert_degrees(workload), MICROBATCHES)
    for (tensor, context), expert, microbatch in degrees:
        layout = Layout(tensor=tensor, context=context, expert=expert, data=expert, microbatch=microbatch)
        if workload.batch % microbatch == 0 and not layout.problems(workload):
            layer_seconds(workload, layout, listing, 0.0)
            head_seconds(workload, layout, listing, 0.0)
    return sorted(listing.asked, key=lambda shape: (shape[0] * shape[1] * shape[2] * shape[3], shape))


def measured_share(workload: Workload, layout: Layout, cost: CostModel) -> float:
    """Return the share, from 0 to 1, of the time of a step's matrix products that rests on shapes measured in ``cost``.

    The products are those of all devices for a ``workload`` in a ``layout``. Fused attention and collectives do not
    count as matrix products.
    """

    def seconds(counted: set[ProductShape] | None) -> float:
        alone = _ProductsAlone(cost, counted)
        layers = workload.model.layers * layer_seconds(workload, layout, alone, 0.0).total
        return layers + head_seconds(workload, layout, alone, 0.0).total

    return seconds(set(cost.products.seconds) if cost.products is not None else set()) / seconds(None)
