"""The exchange by towers beside the flat one: exactness on virtual ranks, and steps over emulated hosts.

Four processes are two hosts of two ranks. A rank's messages to its own host and to the other one leave by two emulated
links of their own. Four steps are timed in turns: with the flat exchange; with the exchange by towers and no modules;
with a part of each tower's embeddings, repeated after the exchange until the model above has as many inputs as before;
and with modules that compute as many embeddings as that part has, which the model above takes as they are. From each to
the next, only the way of messages, then the number of bytes, then the computation changes. The models above are those
that the paper names: products of embeddings and an MLP, as in DLRM, and crosses beside an MLP, as in DCN-V2.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _emulated_links import EmulatedLinks
from _processes import run_processes
from _tables import print_notes
from _virtual_ranks import run_ranks
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.towers import _FLAT, TowerExchange, TowerLayout, _ascending, _checked
from cordillera.models.ranking.interactions import MLP, CrossNetwork, DotInteraction
from cordillera.models.ranking.towers import CombinedTower, CrossedTower

HOSTS, LOCAL = 2, 2
FEATURES, DIM, SAMPLES, COMPRESSION = 64, 32, 256, 4
WITHIN_S, BETWEEN_S = (1e9, 20e-6), (50e6, 100e-6)  # bytes per second and seconds per message
ROUNDS, WARM_UP, ASKED = 15, 2, 1.9
MLP_WIDTHS, CROSSES = (512, 256), 3  # the library's defaults for DCN-V2
SHAPES = ((1, 1), (1, 4), (4, 1), (2, 2), (3, 5), (4, 8), (8, 8))
STEPS = ("flat", "towers", "fewer bytes", "compressed")


def flat_exchange(layout: TowerLayout, links: Collectives, pooled: Tensor, samples: Sequence[int]) -> Tensor:
    """Exchange embeddings among all ranks at once.

    Args:
        layout: Features of the ranks.
        links: The ranks; consecutive ones are on one host.
        pooled: Embeddings of this rank's features for the samples of all ranks, ``[sum(n), f, D]``.
        samples: Number ``n`` of samples of each rank.

    Returns:
        Embeddings of all features for this rank's samples, ``[n, F, D]``.

    Raises:
        PlanError: If the layout or a shape does not fit the ranks.
        PeerError: If a rank does not respond in time, or a connection broke.
    """
    ranks = _checked(layout, links)
    ranks.check(pooled, samples)
    parts = dict(enumerate(pooled.split(list(samples))))
    own, dim = samples[links.rank], pooled.shape[2]
    shapes = {rank: (own, len(features), dim) for rank, features in enumerate(layout.features)}
    found = ranks.exchange("embeddings", _FLAT, parts, shapes)
    return _ascending(torch.cat(found, 1), list(chain.from_iterable(layout.features)))


class HostLinks(EmulatedLinks):
    """Emulated links of a rank, one to its own host and one to others, for messages of one kind at a time."""

    def __init__(self, ledger: Ledger, deadline_s: float, ranks_per_host: int) -> None:
        super().__init__(ledger, deadline_s, bytes_per_s=BETWEEN_S[0], latency_s=BETWEEN_S[1])
        self.ranks_per_host = ranks_per_host
        self.within = EmulatedLinks(ledger, deadline_s, bytes_per_s=WITHIN_S[0], latency_s=WITHIN_S[1])

    def close(self) -> None:
        """End both threads once all messages are sent."""
        self.within.close()
        super().close()

    def _messages(self, name: str, sends: Any, arrivals: Any, *rest: Any) -> Any:
        hosts = {peer // self.ranks_per_host for peer, _ in (*sends, *arrivals)}
        if hosts == {self.rank // self.ranks_per_host}:
            return self.within._messages(name, sends, arrivals, *rest)
        return super()._messages(name, sends, arrivals, *rest)


def formulas(
    layout: TowerLayout, rank: int, samples: list[int], dim: int, outputs: list[int], width: int, itemsize: int = 4
) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the bytes and messages of one forward and backward pass of a rank, by the ledger's names.

    Args:
        layout: Features of the ranks.
        rank: Rank that sends.
        samples: Number of samples of each rank.
        dim: Width of the embeddings.
        outputs: Number of embeddings that leave each tower.
        width: Width of these.
        itemsize: Bytes of a number.

    Returns:
        For ``flat`` and ``towers``, bytes and messages by name; names without messages are left out.
    """
    host, own = rank // layout.ranks_per_host, layout.peers(rank)
    held = [len(features) for features in layout.features]
    together = sum(samples[peer] for peer in own)
    mates = [one for one in layout.host_ranks(host) if one != rank]
    others = [one for one in range(len(held)) if one // layout.ranks_per_host != host]
    peers = [peer for peer in own if peer != rank]
    of_mates = [sum(samples[peer] for peer in layout.peers(one)) for one in mates]

    def sums(numbers: Iterable[int]) -> tuple[int, int]:
        sent = [number for number in numbers if number]
        return sum(sent) * itemsize, len(sent)

    flat, towers = {}, {}
    for kind, to in (("within", mates), ("between", others)):
        flat[f"embeddings {kind} hosts"] = sums(samples[one] * held[rank] * dim for one in to)
        flat[f"gradients of embeddings {kind} hosts"] = sums(samples[rank] * held[one] * dim for one in to)
    towers["embeddings of towers within hosts"] = sums(count * held[rank] * dim for count in of_mates)
    towers["gradients of embeddings of towers within hosts"] = sums(together * held[one] * dim for one in mates)
    towers["outputs of towers between hosts"] = sums(samples[one] * outputs[host] * width for one in peers)
    towers["gradients of outputs of towers between hosts"] = sums(
        samples[rank] * outputs[one // layout.ranks_per_host] * width for one in peers
    )
    return {
        "flat": {name: one for name, one in flat.items() if one[1]},
        "towers": {name: one for name, one in towers.items() if one[1]},
    }


def counted(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """Return the bytes and messages that a ledger holds, without names that have none."""
    return {name: (one.bytes, one.messages) for name, one in ledger.traffic.items() if one.messages}


def uneven(hosts: int, local: int, seed: int) -> tuple[TowerLayout, list[int]]:
    """Return a layout with uneven ranks, some without features, and numbers of samples, some zero."""
    draw, size = torch.Generator().manual_seed(seed), hosts * local
    counts = torch.randint(0, 4, (hosts, local), generator=draw)
    counts[:, -1] += counts.sum(1) == 0
    order = torch.randperm(int(counts.sum()), generator=draw).split(counts.flatten().tolist())
    samples = torch.randint(0, 5, (size,), generator=draw).tolist()
    samples[0] += 1
    return TowerLayout(hosts, tuple(tuple(one.tolist()) for one in order)), samples


def is_exact(hosts: int, local: int, seed: int = 0, dim: int = 3) -> dict[str, bool]:
    """Compare both exchanges with the rows that they copy, and their traffic with formulas, on virtual ranks."""
    layout, samples = uneven(hosts, local, seed)
    features, total = sum(map(len, layout.features)), sum(samples)
    whole = torch.randn(total, features, dim, generator=torch.Generator().manual_seed(seed))
    whole[whole.abs() < 0.1] = -0.0
    whole[0, 0, 0] = torch.nan
    upstream = whole.flip(2)
    outputs = [len(layout.tower(host)) for host in range(hosts)]

    def work(links: Collectives) -> dict[str, bool]:
        own, first = list(layout.features[links.rank]), sum(samples[: links.rank])
        mine = slice(first, first + samples[links.rank])
        expected = formulas(layout, links.rank, samples, dim, outputs, dim)
        found = {}
        exchanges: dict[str, Callable[..., Tensor]] = {
            "flat": partial(flat_exchange, layout, links),
            "towers": TowerExchange(layout, links),
        }
        for name, exchange in exchanges.items():
            links.ledger.clear()
            pooled = whole[:, own].requires_grad_(bool(own))
            output = exchange(pooled, samples)
            output.backward(upstream[mine])
            found[f"{name} output"] = same_bits(output, whole[mine])
            found[f"{name} gradient"] = not own or same_bits(pooled.grad, upstream[:, own])
            found[f"{name} traffic"] = counted(links.ledger) == expected[name]
        return found

    ranks = run_ranks(hosts * local, work)
    return {what: all(one[what] for one in ranks) for what in ranks[0]}


def same_bits(found: Tensor | None, expected: Tensor) -> bool:
    """Return whether two float32 tensors are equal bit for bit, signs of zeros and NaN included."""
    if found is None or found.shape != expected.shape:
        return False
    return torch.equal(found.detach().contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


class _First(nn.Module):
    """The first embeddings of a tower, ``[B, F, D] -> [B, outputs, D]``: fewer bytes without computation."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.outputs]


class _Dots(nn.Module):
    """Dot products between embeddings, then an MLP: ``[B, F, D] -> [B, 256]``."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.dots = DotInteraction(features, False)
        self.mlp = MLP(self.dots.outputs, MLP_WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.dots(x))


class _Crosses(nn.Module):
    """Crosses of the flattened embeddings beside an MLP: ``[B, F, D] -> [B, F * D + 256]``."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.cross, self.mlp = CrossNetwork(features * DIM, CROSSES), MLP(features * DIM, MLP_WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return torch.cat([self.cross(x), self.mlp(x)], 1)


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int, int], nn.Module]]] = {
    "DLRM": (_Dots, lambda features, outputs: CombinedTower(features, DIM, outputs, DIM)),
    "DCN-V2": (_Crosses, lambda features, outputs: CrossedTower(features * DIM, outputs, DIM, 1, None)),
}
"""The model above of so many embeddings, and the module of a tower of so many features and outputs."""


def _made(model: str, name: str, layout: TowerLayout, links: Collectives) -> Callable[[Tensor, list[int]], None]:
    """Return one step of training without tables, and without the sum of the model's gradients over all ranks."""
    torch.manual_seed(0)
    outputs = [len(layout.tower(host)) // COMPRESSION for host in range(layout.hosts)]
    model_above, module = MODELS[model]
    above = model_above(sum(outputs) if name == "compressed" else FEATURES)
    modules = {"fewer bytes": _First, "compressed": module}
    tower = None
    if name in modules:
        host = links.rank // LOCAL
        tower = modules[name](len(layout.tower(host)), outputs[host])
    exchange = TowerExchange(layout, links, tower, None if tower is None else outputs, DIM)

    def step(pooled: Tensor, samples: list[int]) -> None:
        x = flat_exchange(layout, links, pooled, samples) if name == "flat" else exchange(pooled, samples)
        if name == "fewer bytes":
            x = x.repeat_interleave(COMPRESSION, 1)
        above(x).square().mean().backward()
        exchange.sum_gradients()

    return step


def _steps(rank: int, folder: str, *, model: str, rounds: int, samples: int) -> dict[str, Any]:
    """Time the steps of one rank with a model, in turns."""
    links = HostLinks(Ledger(), 60.0, LOCAL)
    each = FEATURES // HOSTS
    layout = TowerLayout.of([range(host * each, (host + 1) * each) for host in range(HOSTS)], LOCAL)
    steps = {name: _made(model, name, layout, links) for name in STEPS}
    counts = [samples] * links.size
    found: dict[str, Any] = {name: {"seconds": [], "exposed": [], "computed": []} for name in STEPS}
    for turn in range(WARM_UP + rounds):
        for name in STEPS if turn % 2 else reversed(STEPS):
            pooled = torch.randn(sum(counts), len(layout.features[rank]), DIM, requires_grad=True)
            links.ledger.clear()
            dist.barrier()
            began, computed = time.perf_counter(), time.thread_time()
            steps[name](pooled, counts)
            spent, computed = time.perf_counter() - began, time.thread_time() - computed
            if turn >= WARM_UP:
                found[name]["seconds"].append(spent)
                found[name]["computed"].append(computed)
                found[name]["exposed"].append(links.ledger.total().exposed_seconds)
            found[name]["traffic"] = counted(links.ledger)
    dist.barrier()
    links.close()
    return found


def _between(traffic: dict[str, tuple[int, int]]) -> tuple[int, int]:
    of = [one for name, one in traffic.items() if name.endswith("between hosts")]
    return sum(one[0] for one in of), sum(one[1] for one in of)


def _slowest(found: dict[int, dict[str, Any]], name: str, what: str = "seconds") -> list[float]:
    """Return the time of the slowest rank in each round, since ranks wait for each other."""
    return [max(of) for of in zip(*(one[name][what] for one in found.values()), strict=True)]


def _rows(found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in STEPS:
        exposed = zip(*(one[name]["exposed"] for one in found.values()), strict=True)
        sent = [_between(one[name]["traffic"]) for one in found.values()]
        rows.append(
            {
                "step": name,
                "seconds": median(_slowest(found, name)),
                "computed": median(_slowest(found, name, "computed")),
                "exposed": median(sum(of) / len(of) for of in exposed),
                "faster": _ratio(found, "flat", name),
                "bytes_between": max(one[0] for one in sent),
                "messages_between": max(one[1] for one in sent),
            }
        )
    return rows


def _ratio(found: dict[int, dict[str, Any]], first: str, second: str) -> float:
    """Return the median over rounds of the time of one step relative to another."""
    pairs = zip(_slowest(found, first), _slowest(found, second), strict=True)
    return median(one / other for one, other in pairs)


def _measured(console: Console, model: str, quick: bool) -> dict[str, Any]:
    """Time steps with a model over emulated hosts, and say where the gain comes from."""
    work = partial(_steps, model=model, rounds=1 if quick else ROUNDS, samples=16 if quick else SAMPLES)
    size = HOSTS * LOCAL
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(size, Path(folder), work, 600)
    if ended.codes != [0] * size:
        raise RuntimeError(ended.said)
    rows = _rows(ended.found)
    gains = {
        "way": _ratio(ended.found, "flat", "towers"),
        "bytes": _ratio(ended.found, "towers", "fewer bytes"),
        "computation": _ratio(ended.found, "fewer bytes", "compressed"),
        "all": _ratio(ended.found, "flat", "compressed"),
    }
    table = Table(title=f"{model}: a step of {HOSTS} hosts of {LOCAL} ranks (emulated links)", title_justify="left")
    headings = ("step", "seconds", "times faster", "processor time", "exchange exposed", "to other hosts", "messages")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for row in rows:
        table.add_row(
            row["step"], f"{row['seconds']:.4f}", f"{row['faster']:.2f}", f"{row['computed']:.4f}",
            f"{row['exposed']:.4f}", f"{row['bytes_between'] / 1e6:.3f} MB", str(row["messages_between"]),
        )  # fmt: skip
    console.print(table)
    return {"model": model, "rows": rows, "gains": gains, "exchange_share": rows[0]["exposed"] / rows[0]["seconds"]}


def run(console: Console, quick: bool) -> dict[str, Any]:
    """Check exactness on virtual ranks, and time steps with each model over emulated hosts."""
    shapes = SHAPES[:4] if quick else SHAPES
    exact = {f"{hosts} x {local}": is_exact(hosts, local) for hosts, local in shapes}
    models = [_measured(console, model, quick) for model in MODELS]
    right = sum(all(one.values()) for one in exact.values())
    notes = [
        f"equal to the bit, with traffic as by formulas: {right} of {len(exact)} shapes of virtual ranks "
        f"({', '.join(exact)})"
    ]
    for one in models:
        gains, share = one["gains"], one["exchange_share"]
        notes += [
            f"{one['model']}, compression {COMPRESSION}: {gains['all']:.2f} times faster ({ASKED} asked) = way of "
            f"messages {gains['way']:.2f} x bytes {gains['bytes']:.2f} x computation {gains['computation']:.2f} "
            "(medians of rounds)",
            f"{one['model']}: exchanges take {share:.0%} of the flat step: without any, it would be "
            f"{1 / (1 - share):.2f} times faster",
        ]
    print_notes(console, notes)
    return {
        "evidence": "emulated",
        "conditions": {
            "hosts": HOSTS, "ranks_per_host": LOCAL, "features": FEATURES, "dim": DIM, "samples_of_rank": SAMPLES,
            "compression": COMPRESSION, "rounds": ROUNDS, "mlp": MLP_WIDTHS, "crosses": CROSSES,
            "within_bytes_per_s": WITHIN_S[0], "within_latency_s": WITHIN_S[1], "between_bytes_per_s": BETWEEN_S[0],
            "between_latency_s": BETWEEN_S[1],
        },
        "exact": exact,
        "models": models,
        "asked": ASKED,
        "notes": [*notes, "the sum of the dense gradients over all ranks is not part of a step"],
    }  # fmt: skip
