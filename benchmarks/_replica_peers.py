"""Training of one small model by torchft's replicas, and by a job that is restarted from checkpoints, for comparison.

All stacks train the same model on the same numbers, write the same log of commits, and have the same launcher.
``make peers`` puts torchft into ``.peers/torchft``.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _peers import PeerUnavailable
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from cordillera.distributed.dtensors import local
from cordillera.distributed.fault_tolerance.events import FOLDER, EventLog
from cordillera.distributed.job.job import join_job
from cordillera.distributed.job.launch import LaunchConfig, launch
from cordillera.workflows.processes import LOADED

REPLICAS, SHARDS = 2, 2
WIDTH, HIDDEN, BLOCKS = 256, 1024, 4
ROWS, MICROBATCHES = 32, 1  # of a rank and step
CHECKPOINT_EVERY = 10  # steps
PHASES = ("waiting", "forward", "backward", "reduce", "vote", "update")
LAUNCH = LaunchConfig(threads=1, deadline_s=60.0, loaded=LOADED)  # ranks of all stacks find the same modules loaded
TORCHFT = Path(os.environ.get("CORDILLERA_TORCHFT") or Path(__file__).resolve().parent.parent / ".peers" / "torchft")

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LOOK_S = 0.004  # between two looks at the gate
_AGAIN_S = 0.2  # before a job is started anew, as our launcher waits


class Cells:
    """Numbers in memory that the benchmark and all ranks see: a gate before each step, and where each rank is.

    Attributes:
        steps: Number of steps that may be trained; the gate.
        stop: Whether the job is to end.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder, "cells")
        if not path.exists():
            path.write_bytes(bytes(8 * (2 + REPLICAS * SHARDS)))
        self._numbers = np.memmap(path, dtype=np.int64, mode="r+")

    def allow(self, steps: int) -> None:
        """Let ranks train up to a number of steps."""
        self._numbers[0] = steps

    def stop(self) -> None:
        """Ask ranks to end."""
        self._numbers[1] = 1

    @property
    def is_stopping(self) -> bool:
        """Whether ranks are asked to end."""
        return bool(self._numbers[1])

    def wait(self, step: int) -> None:
        """Wait until a step may be trained."""
        while self._numbers[0] < step and not self._numbers[1]:
            time.sleep(_LOOK_S)

    def enter(self, place: int, phase: str) -> None:
        """Say in which phase the rank at a place is."""
        self._numbers[2 + place] = PHASES.index(phase)

    def phase(self, place: int) -> str:
        """Return the phase in which a rank is."""
        return PHASES[self._numbers[2 + place]]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output."""
        return x + self.down(torch.relu(self.up(x)))


class Training:
    """The model of one rank, sharded over a mesh, and what it learns.

    Args:
        mesh: Mesh over which weights are sharded, and replicated around it.
        place: Number of the rank within its replica.
        enter: Function that is told the phase that begins.
    """

    def __init__(self, mesh: DeviceMesh, place: int, enter: Callable[[str], None]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.parameters = dict(self.model.named_parameters())  # the sharded ones, before any are gathered
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-3)
        for parameter in self.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros(()),
                **{key: torch.zeros_like(parameter) for key in _MOMENTS},
            }
        self._place, self._enter = place, enter

    def backward(self, iteration: int) -> None:
        """Compute the gradients of an iteration, and average them over the mesh."""
        source = torch.Generator().manual_seed(iteration * SHARDS + self._place)
        for number in range(MICROBATCHES):
            self.model.set_requires_gradient_sync(number + 1 == MICROBATCHES)  # type: ignore[operator]
            self._enter("forward")
            x = torch.randn(ROWS, WIDTH, generator=source)
            loss = nn.functional.mse_loss(self.model(x), x.roll(1, -1).sin()) / MICROBATCHES
            self._enter("backward")
            loss.backward()

    def gradients(self) -> list[Tensor]:
        """Return this rank's parts of the gradients; zeros where there are none."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [local(parameter.grad) for parameter in self.parameters.values()]  # type: ignore[arg-type]

    def update(self) -> None:
        """Apply the gradients and forget them."""
        self._enter("update")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Return the live state by name."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            found[name] = parameter.data
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of the live state by name."""
        return {name: local(value) for name, value in self.state().items()}

    def copied(self) -> dict[str, Tensor]:
        """Return a copy of this rank's part of the state."""
        return {name: value.clone() for name, value in self.tensors().items()}

    @torch.no_grad()
    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the state of the same rank of another replica."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
        self.optimizer.zero_grad()


def commit_log(folder: str, name: str, rank: int) -> EventLog:
    """Return the log of commits of a replica, which its first rank writes."""
    return EventLog(Path(folder, FOLDER, f"{name}.jsonl") if rank == 0 else None)


def processes_of_job() -> list[int]:
    """Return the processes of a job or of a replica, by rank, on all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


class PeerJob:
    """Jobs of processes that are started by our launcher, and again when they fail.

    Args:
        work: What each rank does: ``work(rank, name, *arguments)``.
        size: Number of processes of each job.
        names: Names of the jobs.
    """

    def __init__(self, work: Callable[..., Any], size: int, names: Sequence[str], arguments: Sequence[Any]) -> None:
        self._work, self._size, self._arguments, self._stop = work, size, tuple(arguments), 0
        self._threads = [threading.Thread(target=self._keep, args=(name,)) for name in names]
        for thread in self._threads:
            thread.start()

    def _keep(self, name: str) -> None:
        while not self._stop:
            with contextlib.suppress(Exception, KeyboardInterrupt):
                launch(self._work, self._size, (name, *self._arguments), config=LAUNCH, asked=lambda: self._stop)
            time.sleep(0 if self._stop else _AGAIN_S)

    def end(self) -> None:
        """End all processes."""
        self._stop = 2
        for thread in self._threads:
            thread.join()


# A job that is restarted from checkpoints, and one without checkpoints


def train_hybrid(rank: int, name: str, folder: str, is_saving: bool) -> None:
    """Train with torch's hybrid sharding: as one job, which fails with any rank."""
    cells, log = Cells(folder), commit_log(folder, name, rank)
    with join_job():
        mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
        training = Training(mesh, rank % SHARDS, lambda phase: cells.enter(rank, phase))
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))  # of its own, as saves go on beside
        step = _restored(training, Path(folder))
        log.write("joined", step=step, processes=processes_of_job())
        saving: Any = None
        while True:
            cells.enter(rank, "waiting")
            cells.wait(step + 1)
            if cells.is_stopping:
                time.sleep(60)  # until the launcher ends it
            training.backward(step * REPLICAS + rank // SHARDS)
            training.update()
            step += 1
            log.write("step", outcome="committed", step=step, participants=REPLICAS)
            if is_saving and step % CHECKPOINT_EVERY == 0:
                if saving is not None:
                    saving.result()
                saving = dcp.async_save(
                    training.state(), checkpoint_id=Path(folder, f"step-{step}"), process_group=group
                )


def _restored(training: Training, folder: Path) -> int:
    """Read the newest checkpoint that is complete; return its step."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/.metadata")]
    if not steps:
        return 0
    dcp.load(training.state(), checkpoint_id=folder / f"step-{max(steps)}")
    return max(steps)


# torchft


@dataclass(frozen=True)
class TorchftSettings:
    """Deadlines of torchft.

    Attributes:
        lighthouse: Arguments of its lighthouse.
        group_s: Deadline of the sums over replicas, in seconds.
        manager_s: Deadline of a manager, in seconds; None for its default.
    """

    lighthouse: Mapping[str, int]
    group_s: float
    manager_s: float | None


DEFAULT = TorchftSettings({}, 5.0, None)  # the group's deadline is that of its example, as it has no default
TUNED = TorchftSettings({"heartbeat_timeout_ms": 1000, "join_timeout_ms": 1000, "quorum_tick_ms": 20}, 1.0, 5.0)


def _site_packages() -> list[str]:
    return list(map(str, TORCHFT.glob("lib/python*/site-packages")))


def check_torchft() -> None:
    """Check that torchft can be imported, in a process of its own.

    Raises:
        PeerUnavailable: If not.
    """
    paths = os.pathsep.join(_site_packages())
    tried = subprocess.run(
        [sys.executable, "-c", "import torchft"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        why = (tried.stderr.strip() or "nothing was said").splitlines()[-1]
        raise PeerUnavailable(f"torchft cannot be imported from {TORCHFT} ({why}); run `make peers`")


def _import_torchft() -> ModuleType:
    """Return torchft in this process, which it would fill the terminal of."""
    with open(os.devnull, "w") as nothing:
        for output in (1, 2):
            os.dup2(nothing.fileno(), output)
    sys.path += _site_packages()
    logging.disable(logging.CRITICAL)
    return importlib.import_module("torchft")


class TorchftJob:
    """A lighthouse, and replicas that ask it.

    Raises:
        PeerUnavailable: If its lighthouse does not start.
    """

    def __init__(self, folder: Path, settings: TorchftSettings) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = {"bind": f"127.0.0.1:{port}", "min_replicas": 1, **settings.lighthouse}
        self._lighthouse = subprocess.Popen(
            [sys.executable, TORCHFT / "bin" / "torchft_lighthouse"]
            + [word for name, value in options.items() for word in (f"--{name}", str(value))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_site_packages())},
        )
        weakref.finalize(self, self._lighthouse.kill)
        while self._lighthouse.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            time.sleep(0.05)
        else:
            raise PeerUnavailable(f"the lighthouse of torchft ended with {self._lighthouse.returncode}")
        names = [f"r{number}" for number in range(REPLICAS)]
        arguments = (str(folder), f"http://127.0.0.1:{port}", settings)
        self._job = PeerJob(train_torchft, SHARDS, names, arguments)

    def end(self) -> None:
        """End all processes."""
        self._job.end()
        self._lighthouse.kill()
        self._lighthouse.wait()


def train_torchft(rank: int, name: str, folder: str, lighthouse: str, settings: TorchftSettings) -> None:
    """Train as one rank of a replica; an error ends it at once, as others wait for it."""
    try:
        with join_job():
            _train_torchft(rank, name, folder, lighthouse, settings)
    except BaseException:
        Path(folder, f"{name}-{rank}-{os.getpid()}.txt").write_text(traceback.format_exc())
        os._exit(1)


def _train_torchft(rank: int, name: str, folder: str, lighthouse: str, settings: TorchftSettings) -> None:
    torchft = _import_torchft()
    number, cells, log = int(name[1:]), Cells(folder), commit_log(folder, name, rank)
    place = number * SHARDS + rank
    mesh = init_device_mesh("cpu", (SHARDS,), mesh_dim_names=("shard",))
    training = Training(mesh, rank, lambda phase: cells.enter(place, phase))
    training.backward(0)  # the first one takes longer
    training.optimizer.zero_grad()
    deadline = {} if settings.manager_s is None else {"timeout": timedelta(seconds=settings.manager_s)}
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=settings.group_s)),
        load_state_dict=training.install,
        state_dict=training.copied,  # of tensors that were found once: `state_dict()` would shard live weights anew
        min_replica_size=1,
        replica_id=f"replica_{number}",
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
        **deadline,
    )

    def reduce(gradient: Tensor) -> None:
        cells.enter(place, "reduce")
        manager.allreduce(gradient).wait()

    for module in training.model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(reduce)
    log.write("joined", step=0, processes=processes_of_job())
    while True:
        cells.enter(place, "waiting")
        cells.wait(manager.current_step() + 1)
        manager.start_quorum()
        training.optimizer.zero_grad()
        training.backward(manager.current_step() * REPLICAS + number)
        cells.enter(place, "vote")
        is_well = manager.should_commit()
        if is_well:
            training.update()
        outcome = "committed" if is_well else "discarded"
        log.write("step", outcome=outcome, step=manager.current_step(), participants=manager.num_participants())
