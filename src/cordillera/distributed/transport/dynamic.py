"""An exchange between ranks of which only the senders know the sizes, as that of tokens for experts.

Source: NCCLX (arXiv 2510.20171), whose all-to-all reads its sizes on the device when it runs; here the offer of a part
says how large it is, and the other rank makes room for it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cordillera.distributed.transport.operations import Offer, Take, Task, as_bytes
from cordillera.distributed.transport.process_group import TransportProcessGroup
from cordillera.errors import PlanError


def all_to_all_dynamic(
    group: TransportProcessGroup, parts: Sequence[Tensor], *, most_rows: int | None = None, options: Any = None
) -> tuple[dist.Work, list[Tensor]]:
    """Send each rank a part whose number of rows only this rank knows.

    Nothing is padded, and no sizes are exchanged before.

    Args:
        group: Ranks that exchange; all of them call this.
        parts: Part ``[n, ...]`` for each rank, contiguous and on the CPU, equal but for ``n``.
        most_rows: Most rows that another rank may send; None for any number.
        options: Options of torch.distributed's all-to-all, of which the timeout counts.

    Returns:
        The work, and the list of the parts of all ranks, which is filled once the work is done. This rank's own part is
        not copied.

    Raises:
        PlanError: If the parts are not acceptable. Waiting raises a TransportError if those of another rank are not.
    """
    own = parts[group.rank()] if len(parts) == group.size() else None
    if own is None or any(part.shape[1:] != own.shape[1:] or part.dtype != own.dtype for part in parts):
        raise PlanError(
            f"parts are {[list(part.shape) for part in parts]} for {group.size()} ranks",
            where="all_to_all_dynamic",
            remedy="a part for each rank, with equal types and equal sizes but the first",
        )
    row = own.new_empty(1, *own.shape[1:])
    if not row.nbytes:
        raise PlanError("rows without numbers cannot be counted", where="all_to_all_dynamic")
    found = list(parts)

    def make(peer: int, size: int) -> Tensor | None:
        rows, rest = divmod(size, row.nbytes)
        if rest or (most_rows is not None and rows > most_rows):
            return None
        found[peer] = own.new_empty(rows, *own.shape[1:])
        return found[peer]

    tasks: list[Task] = []
    for peer in range(group.size()):
        if peer != group.rank():
            tasks.append(Offer(peer=peer, views=[as_bytes(parts[peer])]))
            tasks.append(Take(peer=peer, make=partial(make, peer)))
    return group.run("all_to_all_dynamic", tasks, [], own.dtype, options), found
