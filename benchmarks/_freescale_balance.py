"""Samples balanced over ranks: shares of waiting, counted, and steps of two processes, measured."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _processes import run_processes
from _timing import Spread, Timing, times_faster
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from cordillera.data.ranking.balance import SampleBalance, divide, sample_costs
from cordillera.jagged import JaggedBatch, offsets_from_lengths, take_samples

KINDS: tuple[SampleBalance, ...] = ("none", "fixed", "variable")
MU, SIGMA, LONGEST = 7.0, 1.6, 21_000  # lognormal lengths of histories, those of the dossiers on the paper
COUNTED_RANKS, COUNTED_SAMPLES, DRAWS = 64, 128, 20
RANKS, SAMPLES, SHORTER = 2, 16, 4  # of the steps: samples of a rank; histories are this many times shorter
DIM, LAYERS, HEADS, IDS, ROUNDS = 64, 2, 2, 5_000, 16
OF_SQUARE = 1 / (2 * DIM)  # FLOPs of attention, 4 D for a pair of positions, over those of projections, 8 D^2 for one
FEWER, PLANNED, FASTER = 9.0, 0.1, 1.25  # asked


def straggler_share(costs: NDArray[np.float64], divided: list[NDArray[np.int64]]) -> float:
    """Return the mean share of a step for which ranks wait for the slowest: ``1 - mean(load) / max(load)``.

    ``costs`` and ``divided`` are those of :func:`divide`.
    """
    work = np.array([costs[samples].sum() for samples in divided])
    return float(1 - work.mean() / work.max()) if work.max() else 0.0


def lengths_of(samples: int, seed: int, shorter: int = 1) -> np.ndarray:
    """Return lengths of histories, ``int64 [samples]``, at least 1."""
    drawn = np.random.default_rng([11, seed]).lognormal(MU - math.log(shorter), SIGMA, samples)
    return np.clip(drawn.round(), 1, LONGEST // shorter).astype(np.int64)


def counted(draws: int) -> list[dict[str, Any]]:
    """Return the mean shares of waiting on many virtual ranks, for work that is linear or quadratic in the lengths."""
    rows = []
    for work, square in (("ids", 0.0), ("ids and attention", OF_SQUARE)):
        shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for draw in range(draws):
            lengths = lengths_of(COUNTED_RANKS * COUNTED_SAMPLES, draw)
            costs = lengths + square * lengths.astype(np.float64) ** 2
            for kind in KINDS:
                began = time.perf_counter()
                divided = divide(costs, COUNTED_RANKS, kind)
                seconds[kind].append(time.perf_counter() - began)
                shares[kind].append(straggler_share(costs, divided))
        means = {kind: float(np.mean(found)) for kind, found in shares.items()}
        rows.append(
            {
                "work": work,
                "shares": means,
                "fewer": {kind: means["none"] / means[kind] for kind in KINDS[1:]},
                "seconds": {kind: Spread.of(seconds[kind]).to_json() for kind in KINDS[1:]},
            }
        )
    return rows


class _Reader(nn.Module):
    """Two layers of attention over each history, whose mean is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(IDS, DIM)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"into": nn.Linear(DIM, 3 * DIM), "out": nn.Linear(DIM, DIM)}) for _ in range(LAYERS)
        )
        self.score = nn.Linear(DIM, 1)

    def forward(self, batch: JaggedBatch) -> Tensor:
        """Return logits ``[B]``."""
        x, edges = self.rows(batch.values), batch.offsets.tolist()
        for layer in self.layers:
            parts = layer["into"](x).view(-1, 3, HEADS, DIM // HEADS)
            found = []
            for first, end in pairwise(edges):
                q, k, v = parts[first:end].permute(1, 2, 0, 3)
                found.append(functional.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1))
            x = x + layer["out"](torch.cat(found).flatten(1))
        sums = torch.segment_reduce(x, "mean", offsets=batch.offsets)
        return self.score(sums)[:, 0]


class _Contender:
    """A model whose samples are divided in one way."""

    def __init__(self, kind: SampleBalance, model: _Reader) -> None:
        self.kind, self.model = kind, copy.deepcopy(model)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.planning: list[float] = []

    def step(self, batch: JaggedBatch, labels: Tensor, rank: int) -> None:
        """Take one step of all ranks, on this rank."""
        dist.barrier()
        began = time.perf_counter()
        divided = divide(sample_costs(batch, of_square=OF_SQUARE), RANKS, self.kind)
        own = divided[rank]
        planned = time.perf_counter() - began
        logits = self.model(take_samples(batch, own))
        given = labels.index_select(0, torch.from_numpy(own))
        loss = functional.binary_cross_entropy_with_logits(logits, given, reduction="sum") / len(labels)
        loss.backward()
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients] + [loss.detach().view(1)])
        dist.all_reduce(flat)
        with torch.no_grad():
            for weight, gradient in zip(
                self.model.parameters(), flat[:-1].split([one.numel() for one in gradients]), strict=True
            ):
                weight -= 0.1 * gradient.view_as(weight)
                weight.grad = None
        dist.barrier()
        self.seconds.append(time.perf_counter() - began)
        self.planning.append(planned)
        self.losses.append(float(flat[-1]))


def _batch(seed: int, samples: int) -> tuple[JaggedBatch, Tensor]:
    lengths = torch.from_numpy(lengths_of(samples, 1000 + seed, SHORTER))
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(IDS, (int(lengths.sum()),), generator=draw)
    labels = torch.randint(2, (samples,), generator=draw).float()
    return JaggedBatch(("history",), values, offsets_from_lengths(lengths)), labels


def _on_rank(rank: int, folder: str, *, rounds: int, samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = _Reader()
    made = [_Contender(kind, model) for kind in KINDS]
    for i in range(rounds + 1):
        batch, labels = _batch(i, RANKS * samples)
        for one in made[i % len(made) :] + made[: i % len(made)]:
            one.step(batch, labels, rank)
    return {one.kind: {"seconds": one.seconds[1:], "planning": one.planning[1:], "losses": one.losses} for one in made}


def measure_balance(quick: bool) -> dict[str, Any]:
    """Return counted shares of waiting, and times of steps with and without balance."""
    rounds, samples = (2, 3) if quick else (ROUNDS, SAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(RANKS, Path(folder), partial(_on_rank, rounds=rounds, samples=samples), 900)
    if ended.codes != [0] * RANKS:
        raise RuntimeError(ended.said)
    ranks = list(ended.found.values())

    def timing(kind: str) -> Timing:
        return Timing(kind, [max(one) for one in zip(*(rank[kind]["seconds"] for rank in ranks), strict=True)])

    steps = []
    for kind in KINDS:
        planned = [s / t for rank in ranks for s, t in zip(rank[kind]["planning"], rank[kind]["seconds"], strict=True)]
        pairs = zip(ranks[0][kind]["losses"], ranks[0]["none"]["losses"], strict=True)
        steps.append(
            {
                "balance": kind,
                "seconds": timing(kind).to_json(),
                "times_faster": times_faster(timing(kind), timing("none")).to_json(),
                "planning": Spread.of(planned).to_json(),
                "loss_difference": max(abs(one - other) for one, other in pairs),
            }
        )
    return {
        "evidence": "measured",
        "conditions": {
            "lognormal": [MU, SIGMA, LONGEST],
            "counted": {"ranks": COUNTED_RANKS, "samples_per_rank": COUNTED_SAMPLES},
            "steps": {"ranks": RANKS, "samples_per_rank": samples, "shorter": SHORTER, "dim": DIM, "layers": LAYERS},
        },
        "counted": counted(2 if quick else DRAWS),
        "steps": steps,
        "asked": {"fewer": FEWER, "planning": PLANNED, "times_faster": FASTER},
        "notes": [
            "counted: share of a step for which ranks wait, 1 - mean(load) / max(load), mean over draws of lengths",
            "steps: two processes with two layers of attention over histories 4 times shorter; the time of dividing "
            "the batch is in the step",
            "losses of all divisions are of the same batches from the same weights",
        ],
    }
