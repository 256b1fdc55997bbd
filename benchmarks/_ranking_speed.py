"""Training speed of ranking models, ours and the peers', and the cost of the fused table update alone."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _peers import PeerUnavailable
from _ranking_batches import criteo_batches, criteo_features
from _ranking_peers import (
    TorchRecDLRM,
    Update,
    embedding_bag_update,
    fbgemm_update,
    fuxictr_batch,
    fuxictr_model,
)
from _results import train_to_the_end
from _timing import Spread, Timing, interleave, times_faster
from torch import Tensor, nn

from cordillera.data.ranking.cache import Splits
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.features import FeatureSpec, RankingBatch
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs.synthetic import SyntheticConfig
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.kernels.embeddings.update import available_backends
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.models.ranking import ModelConfig, build
from cordillera.models.ranking.dlrm import DLRM, DLRMConfig
from cordillera.models.ranking.wukong import Wukong, WukongConfig
from cordillera.numerics.formats.precision import Precision
from cordillera.run import Run
from cordillera.training.optimizers import build_adamw
from cordillera.training.ranking.config import TrainingConfig
from cordillera.training.ranking.scoring import autocast
from cordillera.training.ranking.tasks.losses import weighted_loss
from cordillera.training.ranking.trainer import Trainer

EMBEDDING_DIM = 16
BATCH_SIZE = 4096
TABLE_RATE = 0.01
AGREEMENT = 1e-4
SMALLEST_JUDGED = 100_000  # smallest number of rows for which targets hold
ONE_THREAD = "one thread"
BAGS, MODULE = "EmbeddingBag(sparse) + Adagrad", "FBGEMM module"
DLRM_SIZES = DLRMConfig(embedding_dim=EMBEDDING_DIM, bottom_mlp=(512, 256, 64), top_mlp=(512, 256))
WUKONG_SIZES = WukongConfig(
    embedding_dim=EMBEDDING_DIM,
    layers=2,
    fmb_embeddings=16,
    lcb_embeddings=16,
    rank=8,
    fmb_mlp=(256, 256),
    top_mlp=(256, 256),
    compatibility="fuxictr",
)


@dataclass(frozen=True)
class Ratio:
    """Ratio of our rate to that of a peer.

    Attributes:
        ours: Name of our contender.
        peer: Name of the peer.
        case: Conditions of the measurement.
        times: The ratio, with quartiles over paired rounds.
        target: Least ratio to reach, or None.
    """

    ours: str
    peer: str
    case: str
    times: Spread
    target: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        times = self.times.to_json()
        return {"ours": self.ours, "peer": self.peer, "case": self.case, "times": times, "target": self.target}


@dataclass
class Figures:
    """Measurements of one part.

    Attributes:
        conditions: Sizes and settings.
        ratios: Our rates relative to those of peers.
        rates: Calls or examples per second by contender: name, case, value with quartiles, unit.
        notes: Remarks for readers: rows left out and why, agreement of outputs.
        values: Other JSON values.
    """

    conditions: dict[str, Any] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    rates: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add_rates(self, case: str, timings: dict[str, Timing], examples: int) -> None:
        """Record every contender's examples per second."""
        for name, timing in timings.items():
            rate = Spread.of([examples / seconds for seconds in timing.seconds])
            self.rates.append({"name": name, "case": case, "rate": rate.to_json(), "unit": "examples/s"})
            self.values.setdefault("rounds_seconds", {})[f"{case}: {name}"] = timing.seconds

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {
            "evidence": "measured",
            "conditions": self.conditions,
            "ratios": [ratio.to_json() for ratio in self.ratios],
            "rates": self.rates,
            "values": self.values,
            "notes": self.notes,
        }


# The fused update alone


def _our_update(features: FeatureSpec, backend: str) -> tuple[Update, list[Tensor]]:
    config = TablesConfig.model_validate({"learning_rate": TABLE_RATE, "backend": backend})
    tables = EmbeddingTables(features, EMBEDDING_DIM, config)

    def update(sparse: Any, gradient: Tensor) -> Tensor:
        out = tables(sparse)
        out.backward(gradient)
        tables.update()
        return out.detach()

    return update, [tables.table(name) for name in features.tables]


def measure_updates(rows: list[int], rounds: int, calls: int) -> Figures:
    """Measure forward, backward and row-wise Adagrad of 26 tables, ours and the peers'.

    Peers are ``EmbeddingBag`` with Adagrad, and FBGEMM. ``rows`` lists the sizes of tables, ``rounds`` is the number of
    interleaved rounds, and a value is the mean of ``calls`` updates. All are measured with torch's number of threads
    and again with one thread.
    """
    figures = Figures(
        {
            "tables": 26,
            "embedding_dim": EMBEDDING_DIM,
            "batch_size": BATCH_SIZE,
            "ids": "Zipf 1.05, one a bag",
            "optimizer": "row-wise Adagrad; EmbeddingBag: torch.optim.Adagrad over sparse gradients (element-wise)",
            "rounds": rounds,
            "calls_a_round": calls,
        }
    )
    ours = [name for name in ("fbgemm", "numba", "torch") if available_backends().get(name) is None]
    for name, why in available_backends().items():
        if why is not None:
            figures.notes.append(f"our back end {name} was left out: {why}")
    for size in rows:
        _measure_updates_of(size, ours, rounds, calls, figures)
        gc.collect()
    return figures


def _measure_updates_of(rows: int, backends: list[str], rounds: int, calls: int, figures: Figures) -> None:
    case = f"{rows:,} rows"
    features = criteo_features(rows)
    batches = criteo_batches(features, 4, BATCH_SIZE)
    gradients = [torch.randn(BATCH_SIZE, 26, EMBEDDING_DIM) * 1e-3 for _ in batches]
    makers: dict[str, Callable[[], tuple[Update, list[Tensor]]]] = {
        **{f"ours ({name})": partial(_our_update, features, name) for name in backends},
        BAGS: partial(embedding_bag_update, features, EMBEDDING_DIM, TABLE_RATE),
        MODULE: partial(fbgemm_update, features, EMBEDDING_DIM, TABLE_RATE),
    }
    updates: dict[str, Callable[[], object]] = {}
    first: list[Tensor] = []
    reference: Tensor | None = None
    for name, make in makers.items():
        try:
            update, weights = make()
        except PeerUnavailable as reason:
            figures.notes.append(f"{name} was left out: {reason}")
            continue
        if reference is None:
            first = [weight.clone() for weight in weights]
        else:
            for weight, start in zip(weights, first, strict=True):
                weight.copy_(start)
        # Two updates over the same batch: the second output shows the effect of the first update.
        update(batches[0].sparse, gradients[0])
        out = update(batches[0].sparse, gradients[0])
        if reference is None:
            reference = out
        elif name != BAGS:  # element-wise Adagrad is another rule
            difference = float((out - reference).abs().max())
            figures.notes.append(
                f"{case}: after an update {name} differs from {next(iter(makers))} by {difference:.1e}"
            )
            if not difference <= AGREEMENT:
                raise RuntimeError(f"{name} does not compute what ours does: outputs differ by {difference:.1e}")
        updates[name] = _cycle(update, [(batch.sparse, g) for batch, g in zip(batches, gradients, strict=True)])
    del first
    threads = torch.get_num_threads()
    for count in sorted({threads, 1}, reverse=True):
        torch.set_num_threads(count)
        timings = interleave(updates, rounds=rounds, calls=calls, warmup=2)
        of = case if count == threads else f"{case}, {ONE_THREAD}"
        figures.add_rates(of, timings, BATCH_SIZE)
        for backend in backends:
            mine = f"ours ({backend})"
            for peer, targets in ((BAGS, {"fbgemm": 7.0, "numba": 2.0}), (MODULE, {})):
                if peer in timings:
                    times = times_faster(timings[mine], timings[peer])
                    target = targets.get(backend) if rows >= SMALLEST_JUDGED and count == threads else None
                    figures.ratios.append(Ratio(mine, peer, of, times, target))
    torch.set_num_threads(threads)


# Whole training steps


class OurTraining:
    """One of our models with its optimizers, and the training step of ``cordillera train``."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, seed: int = 0, backend: str = "auto") -> None:
        torch.manual_seed(seed)
        keep_freed_memory()  # as the trainer does
        tables = TablesConfig.model_validate({"learning_rate": TABLE_RATE, "backend": backend})
        training = TrainingConfig()
        self.model = build(config, features, tables)
        self.optimizer = build_adamw(
            self.model,
            learning_rate=training.learning_rate,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
        )

    def step(self, batch: RankingBatch, precision: Precision) -> float:
        """Take a step like the trainer: forward, loss, backward, dense and table update."""
        with autocast(torch.device("cpu"), precision):
            logits = self.model(batch)
        assert batch.labels is not None
        loss, _ = weighted_loss(logits, batch.labels, batch.weights, None)
        value = float(loss.detach())
        loss.backward()
        self.optimizer.step()
        self.model.tables.update()
        self.optimizer.zero_grad(set_to_none=True)
        return value


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def _copy_linears(ours: list[nn.Linear], peer: list[nn.Linear], first_columns: Tensor | None = None) -> None:
    """Copy layers; ``first_columns[j]`` is our input column that the peer's first layer reads at ``j``."""
    for i, (mine, theirs) in enumerate(zip(ours, peer, strict=True)):
        weight = mine.weight if first_columns is None or i else mine.weight[:, first_columns]
        theirs.weight.copy_(weight)
        if mine.bias is not None and theirs.bias is not None:
            theirs.bias.copy_(mine.bias)


def _dot_columns(rows: int, dense_first: bool) -> list[int]:
    """Return our column of each product in the peers' order: row-major over the strict upper triangle.

    Our rows are the dense embedding, then the sparse ones; FuxiCTR puts the dense one last, TorchRec first.
    """
    ours = list(range(rows)) if dense_first else [*range(1, rows), 0]
    pairs = [(ours[i], ours[j]) for i in range(rows) for j in range(i + 1, rows)]
    return [max(pair) * (max(pair) - 1) // 2 + min(pair) for pair in pairs]


@torch.no_grad()
def copy_dlrm_to_fuxictr(ours: DLRM, peer: Any) -> None:
    """Copy our weights into FuxiCTR's DLRM."""
    for name, layer in peer.embedding_layer.embedding_layer.embedding_layers.items():
        layer.weight.copy_(ours.tables.table(name))
    assert ours.bottom is not None
    _copy_linears(_linears(ours.bottom), _linears(peer.bottom_mlp))
    d, rows = ours.config.embedding_dim, len(ours.features.sparse) + 1
    columns = [d + column for column in _dot_columns(rows, dense_first=False)] + list(range(d))
    _copy_linears(_linears(ours.top) + _linears(ours.heads), _linears(peer.top_mlp), torch.tensor(columns))


@torch.no_grad()
def copy_dlrm_to_torchrec(ours: DLRM, peer: TorchRecDLRM) -> None:
    """Copy our weights into TorchRec's DLRM."""
    for name in ours.features.tables:
        peer.table(name).copy_(ours.tables.table(name))
    assert ours.bottom is not None
    bottom, top = peer.linears()
    _copy_linears(_linears(ours.bottom), bottom)
    d, rows = ours.config.embedding_dim, len(ours.features.sparse) + 1
    columns = list(range(d)) + [d + column for column in _dot_columns(rows, dense_first=True)]
    _copy_linears(_linears(ours.top) + _linears(ours.heads), top, torch.tensor(columns))


@torch.no_grad()
def copy_wukong_to_fuxictr(ours: Wukong, peer: Any) -> None:
    """Copy the weights of our Wukong with ``compatibility = "fuxictr"`` into FuxiCTR's WuKong."""
    layers = peer.embedding_layer.embedding_layer.embedding_layers
    for name in ours.features.tables:
        layers[name].weight.copy_(ours.tables.table(name))
    for i, name in enumerate(ours.features.dense):
        assert ours.embed.vectors is not None
        layers[name].weight.copy_(ours.embed.vectors[i : i + 1].mT)
    for mine, theirs in zip(ours.layers, peer.wukong_stack, strict=True):
        theirs.fmb.proj_Y.copy_(mine.fmb.fm.y)
        theirs.fmb.layer_norm.load_state_dict(mine.fmb.norm.state_dict())
        _copy_linears(_linears(mine.fmb.mlp), _linears(theirs.fmb.mlp))
        theirs.lcb.linear.weight.copy_(mine.lcb.weight)
        theirs.layer_norm.load_state_dict(mine.norm.state_dict())
        if hasattr(theirs, "residual_proj"):
            theirs.residual_proj.weight.copy_(mine.residual.weight)
            theirs.residual_proj.bias.copy_(mine.residual.bias)
    _copy_linears(_linears(ours.top) + _linears(ours.heads), _linears(peer.fc))


def _must_agree(peer: str, ours: Tensor, theirs: Tensor, figures: Figures, case: str) -> None:
    difference = float((ours.flatten() - theirs.flatten()).abs().max())
    figures.notes.append(f"{case}: with our weights {peer} scores one batch alike, by {difference:.1e} at most")
    if not difference <= AGREEMENT:
        raise RuntimeError(f"{peer} does not compute what ours does: scores differ by {difference:.1e}")


def _cycle(step: Callable[..., object], batches: list[Any]) -> Callable[[], object]:
    endless: Iterator[Any] = itertools.cycle(batches)
    return lambda: step(*next(endless))


def _against_fuxictr(name: str, rows: int, rounds: int, calls: int, figures: Figures) -> None:
    config: ModelConfig = DLRM_SIZES if name == "DLRM" else WUKONG_SIZES
    case = f"{name}, {rows:,} rows"
    features = criteo_features(rows)
    batches = criteo_batches(features, 8, BATCH_SIZE)
    try:
        if isinstance(config, DLRMConfig):
            peer = fuxictr_model(
                "DLRM",
                features,
                learning_rate=1e-3,
                embedding_dim=EMBEDDING_DIM,
                bottom_mlp_units=list(config.bottom_mlp),
                top_mlp_units=list(config.top_mlp),
            )
        else:
            peer = fuxictr_model(
                "WuKong",
                features,
                learning_rate=1e-3,
                embedding_dim=EMBEDDING_DIM,
                num_wukong_layers=config.layers,
                lcb_features=config.lcb_embeddings,
                fmb_features=config.fmb_embeddings,
                fmb_mlp_units=list(config.fmb_mlp),
                fmp_rank_k=config.rank,
                mlp_hidden_units=list(config.top_mlp),
                mlp_batch_norm=False,
            )
    except PeerUnavailable as reason:
        figures.notes.append(f"{case}: FuxiCTR was left out: {reason}")
        return
    ours = OurTraining(config, features)
    (copy_dlrm_to_fuxictr if name == "DLRM" else copy_wukong_to_fuxictr)(ours.model, peer)
    theirs = [(fuxictr_batch(batch, features),) for batch in batches]
    ours.model.eval()
    peer.eval()
    with torch.no_grad():
        _must_agree("FuxiCTR", ours.model(batches[0]).sigmoid(), peer(theirs[0][0])["y_pred"], figures, case)
    ours.model.train()
    peer.train()
    peer._max_gradient_norm = 10.0  # the default of fit()
    timings = interleave(
        {
            "ours fp32": _cycle(ours.step, [(batch, "fp32") for batch in batches]),
            "ours bf16 (default)": _cycle(ours.step, [(batch, "bf16") for batch in batches]),
            "FuxiCTR": _cycle(peer.train_step, theirs),
        },
        rounds=rounds,
        calls=calls,
        warmup=2,
    )
    figures.add_rates(case, timings, BATCH_SIZE)
    targets = (1.2, 3.5) if rows < 1_000_000 else (10.0, 20.0)
    for mine, target in zip(("ours fp32", "ours bf16 (default)"), targets, strict=True):
        times = times_faster(timings[mine], timings["FuxiCTR"])
        figures.ratios.append(Ratio(mine, "FuxiCTR", case, times, target if rows >= SMALLEST_JUDGED else None))


def _against_torchrec(rows: int, rounds: int, calls: int, figures: Figures) -> None:
    case = f"DLRM, {rows:,} rows"
    features = criteo_features(rows)
    batches = criteo_batches(features, 8, BATCH_SIZE)
    try:
        peer = TorchRecDLRM(
            features,
            embedding_dim=EMBEDDING_DIM,
            bottom=[*DLRM_SIZES.bottom_mlp, EMBEDDING_DIM],
            top=[*DLRM_SIZES.top_mlp, 1],
            learning_rate=1e-3,
            table_learning_rate=TABLE_RATE,
        )
    except PeerUnavailable as reason:
        figures.notes.append(f"{case}: TorchRec was left out: {reason}")
        return
    ours = OurTraining(DLRM_SIZES, features)
    assert isinstance(ours.model, DLRM)
    copy_dlrm_to_torchrec(ours.model, peer)
    theirs = []
    for batch in batches:
        assert batch.labels is not None
        theirs.append((batch.dense, batch.sparse.to_torchrec(), batch.labels[:, 0]))
    with torch.no_grad():
        mine = ours.model(batches[0])
        _must_agree("TorchRec", mine, peer.forward(*theirs[0][:2]), figures, case)
    timings = interleave(
        {
            "ours fp32": _cycle(ours.step, [(batch, "fp32") for batch in batches]),
            "ours bf16 (default)": _cycle(ours.step, [(batch, "bf16") for batch in batches]),
            "TorchRec fp32": _cycle(peer.step, theirs),
            "TorchRec bf16": _cycle(peer.step, [(*batch, True) for batch in theirs]),
        },
        rounds=rounds,
        calls=calls,
        warmup=2,
    )
    figures.add_rates(case, timings, BATCH_SIZE)
    for mine_name, peer_name, target in (
        ("ours fp32", "TorchRec fp32", 1.0),
        ("ours bf16 (default)", "TorchRec bf16", 1.0),
        ("ours bf16 (default)", "TorchRec fp32", 2.5),
    ):
        times = times_faster(timings[mine_name], timings[peer_name])
        figures.ratios.append(Ratio(mine_name, peer_name, case, times, target if rows >= SMALLEST_JUDGED else None))


def measure_training(rows: list[int], rounds: int, calls: int) -> Figures:
    """Measure examples per second of training: forward, loss, backward, dense and table optimizer.

    FuxiCTR trains as its users do: its own ``train_step`` (binary cross-entropy, norm clipping at 10, Adam over all
    parameters, including tables). TorchRec's DLRM runs under ``DistributedModelParallel``. Batches are in memory in
    each library's own form, so no loader is timed. A value is the mean of ``calls`` steps. From 1,000,000 rows on,
    where FuxiCTR is slow, there are a third as many ``rounds``, but at least three.
    """
    figures = Figures(
        {
            "features": "13 dense, 26 one-hot tables",
            "embedding_dim": EMBEDDING_DIM,
            "ids": "Zipf 1.05",
            "batch_size": BATCH_SIZE,
            "dlrm": DLRM_SIZES.model_dump(mode="json"),
            "wukong": WUKONG_SIZES.model_dump(mode="json"),
            "rounds": rounds,
            "steps_a_round": calls,
        }
    )
    for size in rows:
        large = size >= 1_000_000
        for name in ("DLRM", "WuKong"):
            _against_fuxictr(name, size, max(3, rounds // 3) if large else rounds, 1 if large else calls, figures)
            gc.collect()
        _against_torchrec(size, rounds, calls, figures)
        gc.collect()
    return figures


# Memory


def _resident_bytes(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak); getrusage's peak would include that of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def train_for_memory(rows: int, steps: int) -> dict[str, int]:
    """Train a DLRM for some steps in a fresh process and return the memory that it took.

    The bytes are ``baseline`` (interpreter, imports and kernels warmed up on small tables), ``peak``, ``weights``,
    ``state`` and ``batch``.
    """
    torch.set_num_threads(2)
    small = criteo_features(100)
    warm = OurTraining(DLRM_SIZES, small)
    for batch in criteo_batches(small, 2, 64):
        warm.step(batch, "bf16")
    del warm, batch
    gc.collect()
    # Ids of large tables would need arrays of their size: draw them evenly instead, which touches more rows.
    features = criteo_features(rows)
    generator = torch.Generator().manual_seed(0)
    batches = criteo_batches(small, steps, BATCH_SIZE)
    batches = [
        RankingBatch(
            batch.dense,
            type(batch.sparse)(
                batch.sparse.keys,
                torch.randint(rows, (26 * BATCH_SIZE,), generator=generator),
                batch.sparse.offsets,
                one_hot=True,
            ),
            batch.labels,
        )
        for batch in batches
    ]
    baseline = _resident_bytes("VmRSS")
    ours = OurTraining(DLRM_SIZES, features)
    for batch in batches:
        ours.step(batch, "bf16")
    dense = [parameter for group in ours.optimizer.param_groups for parameter in group["params"]]
    weights = sum(t.numel() * t.element_size() for t in [*dense, ours.model.tables.weight])
    state = sum(buffer.numel() * buffer.element_size() for buffer in ours.model.tables.buffers())
    state += sum(t.numel() * t.element_size() for s in ours.optimizer.state.values() for t in s.values())
    first = batches[0]
    tensors = [first.dense, first.sparse.values, first.sparse.offsets, first.labels]
    batch_bytes = sum(t.numel() * t.element_size() for t in tensors if t is not None)
    peak = _resident_bytes("VmHWM")
    return {"baseline": baseline, "peak": peak, "weights": weights, "state": state, "batch": batch_bytes}


def measure_memory(rows: int, steps: int = 8) -> Figures:
    """Measure the peak resident memory of training 26 tables, against weights, optimizer state and one batch."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import _ranking_speed as speed; "
        "print(json.dumps(speed.train_for_memory(int(sys.argv[2]), int(sys.argv[3]))))"
    )
    arguments = [sys.executable, "-c", program, str(Path(__file__).resolve().parent), str(rows), str(steps)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"the measured process failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    needed = found["weights"] + found["state"] + found["batch"]
    found["needed"] = needed
    found["ratio"] = (found["peak"] - found["baseline"]) / needed
    found["ratio_with_interpreter"] = found["peak"] / needed
    figures = Figures({"tables": 26, "rows": rows, "embedding_dim": EMBEDDING_DIM, "batch_size": BATCH_SIZE})
    figures.values = {**found, "target_at_most": 1.3}
    figures.notes.append("baseline: interpreter, libraries and compiled kernels, subtracted from the peak")
    return figures


# Data loading


class _InMemory:
    """A loader with its batches already in memory, which shows the cost of a step without loading."""

    def __init__(self, loader: Loader, count: int) -> None:
        self.batches = list(itertools.islice(loader.epoch(), count))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[RankingBatch]:
        """Iterate over the batches in a cycle."""
        return (self.batches[i % len(self.batches)] for i in range(start, self.count))


def _trained_records(config: ModelConfig, splits: Splits, loader: Any, steps: int) -> list[dict[str, Any]]:
    """Return the trainer's records of some steps, without the first, in which kernels warm up."""
    torch.manual_seed(0)
    model = build(config, splits.features, TablesConfig())
    training = TrainingConfig(log_every=5, max_steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", "")
        device = torch.device("cpu")
        train_to_the_end(Trainer(training, model, loader, None, run, tasks=splits.features.tasks, device=device))
        return [record for record in run.metrics() if record["kind"] == "train"][1:]


def measure_loading(rows: int, steps: int = 30, rounds: int = 3) -> Figures:
    """Measure what data loading costs a training step, in ``rounds`` trainings with the loader and from memory.

    There are two measures: the share of time that the trainer waits for the loader, from its own records; and the
    slowdown relative to batches in memory, which includes the cores that the loader's thread takes. The preparation of
    the synthetic log is not timed.
    """
    figures = Figures({"rows": rows, "batch_size": BATCH_SIZE, "features": "13 dense, 26 ids, 2 lists, memory-mapped"})
    splits = prepare(DataConfig(dataset="synthetic", synthetic=SyntheticConfig(rows=rows)))
    steps = min(steps, len(splits.train) // BATCH_SIZE)
    entries = []
    for config in (DLRM_SIZES, WUKONG_SIZES):
        for shuffle in ("none", "blocks", "global"):
            loader = Loader(splits.train, BATCH_SIZE, shuffle=shuffle, drop_last=True)
            memory = _InMemory(loader, steps)
            waiting, loaded, resident = [], [], []
            for _ in range(rounds):
                records = _trained_records(config, splits, loader, steps)
                seconds = sum(record["seconds"] for record in records)
                waiting.append(sum(record["data_fraction"] * record["seconds"] for record in records) / seconds)
                loaded.append(seconds / len(records))
                records = _trained_records(config, splits, memory, steps)
                resident.append(sum(record["seconds"] for record in records) / len(records))
            fraction = Spread.of(waiting)
            slower = Spread.of([with_it / without - 1 for with_it, without in zip(loaded, resident, strict=True)])
            entries.append(
                {
                    "model": config.name,
                    "shuffle": shuffle,
                    "waiting": fraction.to_json(),
                    "slower_than_memory": slower.to_json(),
                    "examples_per_second": BATCH_SIZE * 5 / Spread.of(loaded).median,
                }
            )
    figures.values = {"rows": entries, "target_at_most": 0.1}
    return figures
