"""What the layers of a model see and hold, gathered while it runs: LoKA's Probe.

Statistics are gathered at every ``interval``-th step only, from at most ``rows`` rows of a layer's input, and hold no
sample of the data. They merge over the ranks of a data-parallel job, in the order of ranks. Synthetic inputs are drawn
from them, so that kernels can be judged on what a layer sees instead of on standard-normal numbers.
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
from cordillera.numerics.dispatch.weight_statistics import WeightStatistics
from cordillera.numerics.sites import sites
from cordillera.tensor_files import read_tensors, write_tensors

_KIND = "cordillera probe 1"
_REMEDY = "cordillera probe RUN writes it"


class ProbeConfig(BaseModel):
    """How often and how much a probe looks.

    Attributes:
        interval: Steps from one look to the next.
        rows: Of a layer's input that are taken in at one look, at most; evenly chosen where there are more.
        weights: Whether weights are followed too.
        momentum: Of the averages over weights.
        gradients: Whether the gradients of layers' outputs are followed too, in steps that have a backward pass.
        marginals: Whether quantiles of each input are kept too, so that what is drawn has the tails, the point masses
            at zero and the signs of what was seen; of layers of up to 2048 inputs.
        only: Patterns of the layers' names to follow; none for all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval: int = Field(100, ge=1)
    rows: int = Field(4096, ge=2)
    weights: bool = True
    momentum: float = Field(0.99, ge=0, lt=1)
    gradients: bool = False
    marginals: bool = False
    only: tuple[str, ...] = ()


class Probe:
    """Statistics of a model's linear layers.

    Call :meth:`step` before every forward; layers are listened to in that step alone. Between looks a model runs as if
    there were no probe.

    Attributes:
        inputs: Of each layer.
        weights: Likewise; empty where weights are not followed.
        gradients: Of each layer's output; empty where gradients are not followed.
        looks: Steps at which it looked.

    Args:
        model: Whose layers.
        config: How often and how much.
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
        self.weights: dict[str, WeightStatistics] = {}
        if self.config.weights:
            m = self.config.momentum
            for name, module in self._modules.items():
                self.weights[name] = WeightStatistics(module.out_features, module.in_features, m, m)
        self.gradients: dict[str, RowStatistics] = {}
        if self.config.gradients:
            self.gradients = {name: RowStatistics(module.out_features) for name, module in self._modules.items()}
        self.looks = self._steps = 0
        self._hooks: list[Any] = []
        self._writer: threading.Thread | None = None
        self._failed: BaseException | None = None

    def step(self) -> bool:
        """Begin a step; whether the probe looks at it."""
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
                if self.weights:
                    self.weights[name].update(module.weight)
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
        """Stop listening, and wait for what is being written.

        Raises:
            NumericsError: it could not be written.
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
        """Take in the inputs' statistics of all ranks of a job; weights are the same on all of them.

        Every rank ends with the same statistics, merged in the order of ranks.

        Args:
            group: Of ranks that see different samples; None for all.
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
        """All of it, to go on with after a stop."""
        return {
            "steps": self._steps,
            "looks": self.looks,
            "inputs": {name: one.state_dict() for name, one in self.inputs.items()},
            "weights": {name: one.state_dict() for name, one in self.weights.items()},
            "gradients": {name: one.state_dict() for name, one in self.gradients.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Args:
            state: Of a probe of the same layers.

        Raises:
            NumericsError: the layers or what is followed of them are others.
        """
        if set(state["inputs"]) != set(self.inputs) or set(state.get("gradients", {})) != set(self.gradients):
            raise NumericsError(
                f"statistics of {sorted(state['inputs'])}, not of {sorted(self.inputs)}", where="Probe.load_state_dict"
            )
        inputs = {name: RowStatistics.from_state_dict(one) for name, one in state["inputs"].items()}
        weights = {name: WeightStatistics.from_state_dict(one) for name, one in state["weights"].items()}
        for name, own in self.inputs.items():
            if inputs[name].features != own.features:
                raise NumericsError(
                    f"statistics of {inputs[name].features} inputs of {name}, which has {own.features}",
                    where="Probe.load_state_dict",
                )
        if set(weights) != set(self.weights):
            raise NumericsError(
                f"statistics of weights of {sorted(weights)}, not of {sorted(self.weights)}",
                where="Probe.load_state_dict", remedy="go on with the ProbeConfig that it began with",
            )  # fmt: skip
        self._steps, self.looks = int(state["steps"]), int(state["looks"])
        self.inputs, self.weights = inputs, weights
        self.gradients = {name: RowStatistics.from_state_dict(one) for name, one in state.get("gradients", {}).items()}

    def save(self, path: Path, background: bool = False) -> None:
        """Write statistics to a file; they are copied at once, so that gathering may go on.

        Args:
            path: Of a safetensors file, replaced whole.
            background: Write in a thread; :meth:`close` or the next save waits for it.

        Raises:
            NumericsError: this one, or an earlier one in the background, could not be written.
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
    """Statistics that a probe wrote.

    Attributes:
        inputs: By layer.
        weights: Likewise; may be empty.
        gradients: Of outputs, likewise; may be empty.
        looks: Steps at which the probe looked.

    Args:
        path: Of the file.

    Raises:
        NumericsError: there is none, or it is not one of a probe, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            state = _read(path)
            self.looks = int(state["looks"])
            self.inputs = {name: RowStatistics.from_state_dict(one) for name, one in state["inputs"].items()}
            self.weights = {name: WeightStatistics.from_state_dict(one) for name, one in state["weights"].items()}
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
    """Tensors by numbered names, and the state with these names in their places."""
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
