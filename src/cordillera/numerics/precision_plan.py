"""The file that says which kernel computes which layer: written once, checked against the machine before it is used."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from cordillera.errors import NumericsError
from cordillera.numerics.candidates import CANDIDATES, Shape
from cordillera.run import describe_environment, write_atomically

SCHEMA = 2
_READ = (1, SCHEMA)  # plans of version 1 are all for scoring
Purpose = Literal["scoring", "training"]
Pass = Literal["forward", "input_gradient", "weight_gradient"]
PASSES: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class Choice:
    """The kernel of one product.

    Attributes:
        site: The layer's qualified name.
        of: Which of its products.
        rows: The most rows of the input for which it was chosen, a power of two.
        outputs: ``N`` of the layer.
        inputs: ``K``.
        kernel: The candidate's name.
        why: If it is the reference, why no other; else empty.
        expected: What was measured of it: milliseconds, times as fast as fp32, accuracy.
    """

    site: str
    of: Pass
    rows: int
    outputs: int
    inputs: int
    kernel: str
    why: str = ""
    expected: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """Of the product."""
        return Shape(self.rows, self.outputs, self.inputs)


def bucket(rows: int) -> int:
    """The least power of two that is not below.

    Args:
        rows: Of an input.
    """
    return 1 << max(0, rows - 1).bit_length()


def machine(device: torch.device | str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """What a plan depends on: the device by name, its threads, and the libraries whose kernels it names.

    Args:
        device: On which the model runs.
        threads: Of the CPU's kernels; None for the present number.
    """
    device = torch.device(device)
    known = describe_environment()
    if device.type == "cuda":
        name, threads = torch.cuda.get_device_name(device), 0
    else:
        name, threads = known["processor"], torch.get_num_threads() if threads is None else threads
    libraries = {
        key: value for key, value in known["libraries"].items() if key in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu")
    }
    return {"device": device.type, "name": name, "threads": threads, "libraries": libraries}


@dataclass(frozen=True)
class PrecisionPlan:
    """Which kernel computes which product, and under which conditions that was found.

    Attributes:
        choices: Of every layer, product and number of rows that were looked at.
        machine: Where; see :func:`machine`.
        bound: What a kernel had to keep: ``sqnr_db`` and ``median_relative``.
        seed: Of the inputs that were drawn.
        weights: Digest of the weights that it was made for; empty for any.
        purpose: ``scoring``, where weights are packed once, or ``training``, where packing is part of every product.
        statistics: Digest of the statistics that ranges are drawn from; empty for any.
    """

    choices: tuple[Choice, ...]
    machine: dict[str, Any]
    bound: dict[str, float]
    seed: int = 0
    weights: str = ""
    purpose: Purpose = "scoring"
    statistics: str = ""

    def find(self, site: str, of: Pass, rows: int) -> Choice | None:
        """The choice of the least number of rows that is not below; None where the plan has none, and fp32 is meant.

        Args:
            site: The layer's name.
            of: Which of its products.
            rows: Of an input.
        """
        fitting = [c for c in self.choices if (c.site, c.of) == (site, of) and c.rows >= rows]
        return min(fitting, key=lambda c: c.rows, default=None)

    @property
    def sites(self) -> Sequence[str]:
        """Names of the layers."""
        return list(dict.fromkeys(choice.site for choice in self.choices))

    def with_reference(self, site: str, why: str) -> PrecisionPlan:
        """The plan with fp32 at one layer.

        Args:
            site: The layer's name.
            why: What the plan's reader is told.
        """
        choices = tuple(
            replace(c, kernel="fp32", why=why, expected={}) if c.site == site and c.kernel != "fp32" else c
            for c in self.choices
        )
        return replace(self, choices=choices)

    def uniform(self, kernel: str) -> PrecisionPlan:
        """The plan that takes one kernel everywhere.

        Args:
            kernel: A candidate's name.
        """
        return replace(self, choices=tuple(replace(c, kernel=kernel, why="", expected={}) for c in self.choices))

    def save(self, path: Path) -> None:
        """Write it, with a digest of all it says.

        Args:
            path: Of a JSON file, replaced whole.
        """
        content = self._content()
        write_atomically(path, json.dumps({**content, "digest": _digest(content)}, indent=1, allow_nan=False) + "\n")

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "bound": {key: value if math.isfinite(value) else str(value) for key, value in self.bound.items()},
            "seed": self.seed,
            "weights": self.weights,
            "purpose": self.purpose,
            "statistics": self.statistics,
            "choices": [asdict(choice) for choice in self.choices],
        }

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu", allow_stale: bool = False) -> PrecisionPlan:
        """Read one that holds on this machine.

        Args:
            path: Of the file.
            device: On which it shall be used.
            allow_stale: Take one that was made on another device, with other threads or libraries.

        Raises:
            NumericsError: there is none, it is damaged or of another version, names a kernel that is not here, or was
                made elsewhere.
        """
        where = str(path)
        if not path.is_file():
            raise NumericsError("there is no such plan", where=where, remedy="cordillera probe RUN writes one")
        try:
            content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
            digest = content.pop("digest")
            if content["schema"] not in _READ:
                raise NumericsError(
                    f"is a plan of version {content['schema']}, this library reads {SCHEMA}", where=where,
                    remedy="make it anew",
                )  # fmt: skip
            if digest != _digest(content):
                raise NumericsError("does not agree with its digest", where=where, remedy="make it anew")
            choices = tuple(_checked(Choice(**choice)) for choice in content["choices"])
            bound = {key: float(value) for key, value in content["bound"].items()}
            if any(math.isnan(value) for value in bound.values()):
                raise ValueError("a bound is NaN")
            purpose: Purpose = content["purpose"] if content["schema"] > 1 else "scoring"
            if purpose not in get_args(Purpose):
                raise ValueError(f"for {purpose}")
            found = cls(
                choices, dict(content["machine"]), bound, int(content["seed"]), str(content["weights"]), purpose,
                str(content["statistics"] if content["schema"] > 1 else ""),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise NumericsError(f"is no plan: {error!r}", where=where, remedy="make it anew") from error
        except OSError as error:
            raise NumericsError(f"cannot be read: {error}", where=where) from error
        for choice in choices:
            if choice.kernel not in CANDIDATES:
                raise NumericsError(
                    f"names the kernel {choice.kernel!r}, which is not here", where=where, remedy="make it anew"
                )
        if not allow_stale:
            found.check_machine(device, where)
        return found

    def check_purpose(self, purpose: Purpose) -> None:
        """Refuse to be used for something else.

        Args:
            purpose: What it shall be used for.

        Raises:
            NumericsError: the plan is for another.
        """
        if self.purpose != purpose:
            raise NumericsError(
                f"is for {self.purpose}, not for {purpose}",
                where="plan",
                remedy="cordillera probe RUN makes plans for scoring, cordillera probe RUN --training for training",
            )

    def check_machine(self, device: torch.device | str, where: str = "plan") -> None:
        """Refuse to be used elsewhere than where it was made.

        Args:
            device: On which it shall be used.
            where: What errors call it.

        Raises:
            NumericsError: device, threads or libraries differ.
        """
        here = machine(device)
        for key, value in here.items():
            if self.machine.get(key) != value:
                raise NumericsError(
                    f"was made with {key} {self.machine.get(key)!r}, here it is {value!r}",
                    where=where,
                    remedy="make the plan anew with `cordillera probe RUN`",
                )


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _checked(choice: Choice) -> Choice:
    sizes = (choice.rows, choice.outputs, choice.inputs)
    if not all(isinstance(size, int) and size >= 1 for size in sizes) or choice.of not in PASSES:
        raise ValueError(f"{choice.of} of {' x '.join(map(str, sizes))} is no product")
    if not isinstance(choice.site, str) or not isinstance(choice.kernel, str) or not isinstance(choice.expected, dict):
        raise TypeError(f"{choice} is no choice")
    return choice


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
