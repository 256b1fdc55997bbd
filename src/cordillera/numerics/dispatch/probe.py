"""Statistics of the inputs of a model's layers, gathered while it runs (Probe of LoKA).

Statistics are gathered only at every ``interval``-th step, from at most ``rows`` rows of a layer's input, and contain
no sample of the data. They merge over the ranks of a data-parallel job, in the order of ranks. Inputs drawn from them
let kernels be judged on realistic numbers instead of standard-normal ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from cordillera.errors import NumericsError
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.sites import sites
from cordillera.tensor_files import read_tensors, write_tensors

_KIND = "cordillera probe 1"
_REMEDY = "cordillera probe RUN writes it"


class ProbeConfig(BaseModel):
    """Frequency and scope of a probe.

    Attributes:
        interval: Number of steps from one probed step to the next.
        rows: Maximum number of rows of a layer's input in one probed step; evenly chosen if there are more.
        gradients: Whether to gather statistics of the gradients of layers' outputs, in steps that have a backward pass.
        marginals: Whether to keep quantiles of each input, for layers of up to 2048 inputs, so that drawn inputs have
            the tails, the point masses at zero and the signs of the real ones.
        only: Patterns of the names of the layers to probe; empty for all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval: int = Field(100, ge=1)
    rows: int = Field(4096, ge=2)
    gradients: bool = False
    marginals: bool = False
    only: tuple[str, ...] = ()


class Probe:
    """Statistics of a model's linear layers.

    Call :meth:`step` before every forward. Hooks are registered only during a probed step; otherwise the model runs as
    without a probe.

    Attributes:
        inputs: Statistics of each layer's inputs.
        gradients: Statistics of the gradients of each layer's outputs; empty if they are not gathered.
        looks: Number of probed steps.

    Args:
        model: Model whose layers are probed.
        config: Frequency and scope; None for the defaults.
    """

    def __init__(self, model: nn.Module, config: ProbeConfig | None = None) -> None:
        self.config = config or ProbeConfig()
        self._modules = sites(model, self.config.only)
        if not self._modules:
            raise NumericsError("the model has no linear layer", where="Probe")
        self.inputs = {
            name: RowStatistics(module.in_features, marginals=self.config.marginals)
            for name, module in self._modules.items()
        }
        self.gradients: dict[str, RowStatistics] = {}
        if self.config.gradients:
            self.gradients = {name: RowStatistics(module.out_features) for name, module in self._modules.items()}
        self.looks = self._steps = 0
        self._hooks: list[Any] = []
        self._writer: threading.Thread | None = None
        self._failed: BaseException | None = None

    def step(self) -> bool:
        """Begin a step, and return whether it is probed."""
        self._stop_listening()
        looking = self._steps % self.config.interval == 0
        self._steps += 1
        if looking:
            self.looks += 1
            for name, module in self._modules.items():
                self._hooks.append(
                    module.register_forward_pre_hook(
                        lambda _, given, name=name: self._take(self.inputs[name], given[0])
                    )
                )
                if self.gradients:
                    self._hooks.append(
                        module.register_forward_hook(lambda _, given, made, name=name: self._await(name, made))
                    )
        return looking

    def _await(self, name: str, made: Tensor) -> None:
        if made.requires_grad:
            made.register_hook(lambda gradient: self._take(self.gradients[name], gradient))

    def _take(self, statistics: RowStatistics, given: Tensor) -> None:
        rows = given.detach().reshape(-1, given.shape[-1])
        if len(rows) > self.config.rows:
            rows = rows[:: -(-len(rows) // self.config.rows)]
        if len(rows):
            statistics.update(rows)

    def _stop_listening(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def close(self) -> None:
        """Remove all hooks, and wait until the file is written.

        Raises:
            NumericsError: If writing failed.
        """
        self._stop_listening()
        self._wait()

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def merge(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge the statistics of inputs and gradients of all ranks, in their order.

        Args:
            group: Group of ranks that see different samples; None for all.
        """
        states: list[Any] = [None] * dist.get_world_size(group)
        followed = (self.inputs, self.gradients)
        dist.all_gather_object(states, [{name: s.state_dict() for name, s in one.items()} for one in followed], group)
        for kind, statistics in enumerate(followed):
            for name, own in statistics.items():
                merged = RowStatistics(own.features, own.tier)
                for state in states:
                    merged.merge(RowStatistics.from_state_dict(state[kind][name]))
                statistics[name] = merged

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, to continue after an interruption."""
        return {
            "steps": self._steps,
            "looks": self.looks,
            "inputs": {name: one.state_dict() for name, one in self.inputs.items()},
            "gradients": {name: one.state_dict() for name, one in self.gradients.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict` of a probe of the same layers with the same scope.

        Raises:
            NumericsError: If the layers or the gathered statistics differ.
        """
        if set(state["inputs"]) != set(self.inputs) or set(state.get("gradients", {})) != set(self.gradients):
            raise NumericsError(
                f"statistics of {sorted(state['inputs'])}, not of {sorted(self.inputs)}", where="Probe.load_state_dict"
            )
        inputs = {name: RowStatistics.from_state_dict(one) for name, one in state["inputs"].items()}
        for name, own in self.inputs.items():
            if inputs[name].features != own.features:
                raise NumericsError(
                    f"statistics of {inputs[name].features} inputs of {name}, which has {own.features}",
                    where="Probe.load_state_dict",
                )
        self._steps, self.looks = int(state["steps"]), int(state["looks"])
        self.inputs = inputs
        self.gradients = {name: RowStatistics.from_state_dict(one) for name, one in state.get("gradients", {}).items()}

    def save(self, path: Path, background: bool = False) -> None:
        """Write the statistics to a file; they are copied first, so that gathering may continue.

        Args:
            path: Path of a safetensors file, which is replaced as a whole.
            background: Whether to write in a thread; :meth:`close` or the next save waits for it.

        Raises:
            NumericsError: If this file, or an earlier one in the background, could not be written.
        """
        self._wait()
        tensors, facts = _flattened(self.state_dict())
        if not background:
            write_tensors(path, _KIND, tensors, facts)
            return

        def write() -> None:
            try:
                write_tensors(path, _KIND, tensors, facts)
            except BaseException as error:
                self._failed = error

        self._writer = threading.Thread(target=write, name="probe", daemon=True)
        self._writer.start()

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise NumericsError(f"statistics could not be written: {failed}", where="Probe.save") from failed


class Probed:
    """Statistics that a probe wrote to a file: the attributes of :class:`Probe`.

    Args:
        path: Path of the file.

    Raises:
        NumericsError: If the file is missing, damaged, or was not written by a probe.
    """

    def __init__(self, path: Path) -> None:
        try:
            state = _read(path)
            self.looks = int(state["looks"])
            self.inputs = {name: RowStatistics.from_state_dict(one) for name, one in state["inputs"].items()}
            self.gradients = {
                name: RowStatistics.from_state_dict(one) for name, one in state.get("gradients", {}).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise NumericsError(f"holds no statistics: {error!r}", where=str(path), remedy=_REMEDY) from error

    @property
    def layers(self) -> Sequence[str]:
        """Names of the layers."""
        return list(self.inputs)


def _flattened(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors by numbered names, and the state with these names in their places."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = f"t{len(tensors)}"
            tensors[name] = value.detach().cpu().contiguous().clone()
            return {"tensor": name}
        if isinstance(value, dict):
            return {key: walk(one) for key, one in value.items()}
        return [walk(one) for one in value] if isinstance(value, list) else value

    return tensors, walk(state)


def _read(path: Path) -> dict[str, Any]:
    tensors, facts = read_tensors(path, _KIND, _REMEDY)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return tensors[value["tensor"]] if set(value) == {"tensor"} else {k: walk(v) for k, v in value.items()}
        return [walk(one) for one in value] if isinstance(value, list) else value

    return dict(walk(facts))
