"""File of the plan that assigns a kernel to each layer; it is checked against the machine before use.

The identity of a plan is a digest of everything that decides its outcome: products, kernels, bounds, seed, weights,
statistics and machine. Measurements are not part of the digest, so two measurements of the same plan have one identity.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from cordillera.errors import NumericsError
from cordillera.files import read_sealed, sealed_json
from cordillera.numerics.dispatch.candidates import CANDIDATES, Shape
from cordillera.run import describe_environment, write_atomically

SCHEMA = 3
_REMEDY = "`cordillera probe RUN` makes it anew"
_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8",
          "amx_bf16", "amx_fp16", "asimddp", "i8mm", "bf16", "sve", "sve2")  # fmt: skip
Purpose = Literal["scoring", "training"]
Pass = Literal["forward", "input_gradient", "weight_gradient"]
PASSES: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class KernelChoice:
    """Kernel of one product.

    Attributes:
        site: Qualified name of the layer.
        of: Which of the layer's products it computes.
        rows: Largest number of input rows for which the kernel was chosen, a power of two.
        outputs: Output features ``N`` of the layer.
        inputs: Input features ``K`` of the layer.
        kernel: Name of the candidate.
        why: Reason why no other kernel than the reference was chosen; empty for other kernels.
        expected: Measurements of the kernel: milliseconds, speed relative to fp32, accuracy.
        input_range: Smallest and largest input on which kernels with static ranges are calibrated; None without any.
    """

    site: str
    of: Pass
    rows: int
    outputs: int
    inputs: int
    kernel: str
    why: str = ""
    expected: dict[str, Any] = field(default_factory=dict)
    input_range: tuple[float, float] | None = None

    @property
    def calibration(self) -> torch.Tensor | None:
        """Ends of the input range as two rows, ``float32 [2, 1]``; None without a range."""
        return None if self.input_range is None else torch.tensor(self.input_range).unsqueeze(1)

    @property
    def shape(self) -> Shape:
        """Shape of the product."""
        return Shape(self.rows, self.outputs, self.inputs)


def bucket(rows: int) -> int:
    """Return the smallest power of two that is at least ``rows``, the number of rows of an input."""
    return 1 << max(0, rows - 1).bit_length()


def instruction_set() -> list[str]:
    """Return what libraries choose kernels by on this CPU: torch's level and, on Linux, the processor's flags."""
    level = str(torch.backends.cpu.get_cpu_capability())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [level]
    known = next(
        (set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )
    return [level, *(flag for flag in _FLAGS if flag in known)]


def machine(device: torch.device | str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Describe the machine that a plan depends on: device, instruction set, threads, and versions of libraries.

    Args:
        device: Device on which the model runs.
        threads: Number of threads of the CPU kernels; None for the current number.
    """
    device = torch.device(device)
    known = describe_environment()
    if device.type == "cuda":
        name, threads = torch.cuda.get_device_name(device), 0
        instructions = ["sm_{}{}".format(*torch.cuda.get_device_capability(device))]
    else:
        name, threads = known["processor"], torch.get_num_threads() if threads is None else threads
        instructions = instruction_set()
    libraries = {
        key: value
        for key, value in known["libraries"].items()
        if key in ("torch", "numba", "fbgemm-gpu-cpu", "fbgemm-gpu")
    }
    return {
        "device": device.type, "name": name, "instructions": instructions, "threads": threads, "libraries": libraries,
    }  # fmt: skip


@dataclass(frozen=True)
class PrecisionPlan:
    """Assignment of kernels to products, with the conditions under which it was found.

    Attributes:
        choices: Choices for every layer, product and number of rows that were examined.
        machine: Machine of the measurements; see :func:`machine`.
        bound: Accuracy that a kernel had to reach: ``sqnr_db`` and ``median_relative``.
        seed: Seed of the drawn inputs.
        weights: Digest of the weights that the plan was made for; see :func:`weights_digest`. A plan for scoring is
            valid for these weights only, a plan for training for any weights of the model.
        purpose: ``scoring``, where weights are packed once, or ``training``, where packing is part of every product.
        statistics: Digest of the file of statistics from which inputs were drawn; empty without such a file.
        kernels: Names of the candidates that were considered.
    """

    choices: tuple[KernelChoice, ...]
    machine: dict[str, Any]
    bound: dict[str, float]
    seed: int = 0
    weights: str = ""
    purpose: Purpose = "scoring"
    statistics: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """SHA-256 of the plan without its measurements."""
        content = self._content()
        measured = ("why", "expected")
        content["choices"] = [{k: v for k, v in one.items() if k not in measured} for one in content["choices"]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def find(self, site: str, of: Pass, rows: int) -> KernelChoice | None:
        """Return the choice for the smallest planned number of rows that is at least ``rows``; None means fp32.

        Args:
            site: Name of the layer.
            of: Which of its products.
            rows: Number of rows of an input.
        """
        fitting = [c for c in self.choices if (c.site, c.of) == (site, of) and c.rows >= rows]
        return min(fitting, key=lambda c: c.rows, default=None)

    @property
    def sites(self) -> Sequence[str]:
        """Names of the layers."""
        return list(dict.fromkeys(choice.site for choice in self.choices))

    def with_reference(self, site: str, why: str) -> PrecisionPlan:
        """Return the plan with fp32 at the layer ``site``, and ``why`` as the reason."""
        choices = tuple(
            replace(c, kernel="fp32", why=why, expected={}) if c.site == site and c.kernel != "fp32" else c
            for c in self.choices
        )
        return replace(self, choices=choices)

    def uniform(self, kernel: str) -> PrecisionPlan:
        """Return the plan with one kernel, by its candidate's name, everywhere."""
        return replace(self, choices=tuple(replace(c, kernel=kernel, why="", expected={}) for c in self.choices))

    def save(self, path: Path) -> None:
        """Write the plan, its identity and a checksum of the whole to a JSON file, which is replaced atomically."""
        write_atomically(path, sealed_json({**self._content(), "identity": self.identity}))

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "bound": {key: value if math.isfinite(value) else str(value) for key, value in self.bound.items()},
            "seed": self.seed,
            "weights": self.weights,
            "purpose": self.purpose,
            "statistics": self.statistics,
            "kernels": list(self.kernels),
            "choices": [asdict(choice) for choice in self.choices],
        }

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> PrecisionPlan:
        """Read a plan that is valid on this machine.

        Args:
            path: Path of the file.
            device: Device on which the plan is to be used.

        Raises:
            NumericsError: If the file is missing, damaged or of another version, names an unknown kernel, or was made
                on another machine.
        """
        where = str(path)
        if not path.is_file():
            raise NumericsError("there is no such plan", where=where, remedy="cordillera probe RUN writes one")
        content = read_sealed(path, required=True, schema=SCHEMA, error=NumericsError, remedy=_REMEDY)
        try:
            choices = tuple(_checked(KernelChoice(**choice)) for choice in content["choices"])
            bound = {key: float(value) for key, value in content["bound"].items()}
            if any(math.isnan(value) for value in bound.values()):
                raise ValueError("a bound is NaN")
            purpose: Purpose = content["purpose"]
            if purpose not in get_args(Purpose):
                raise ValueError(f"for {purpose}")
            found = cls(
                choices, dict(content["machine"]), bound, int(content["seed"]), str(content["weights"]), purpose,
                str(content["statistics"]), tuple(map(str, content["kernels"])),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise NumericsError(f"is no plan: {error!r}", where=where, remedy=_REMEDY) from error
        for choice in choices:
            if choice.kernel not in CANDIDATES:
                raise NumericsError(
                    f"names the kernel {choice.kernel!r}, which is not here", where=where, remedy=_REMEDY
                )
        found.check_machine(device, where)
        return found

    def check_purpose(self, purpose: Purpose) -> None:
        """Check that the plan was made for a purpose.

        Raises:
            NumericsError: If the plan is for another purpose.
        """
        if self.purpose != purpose:
            raise NumericsError(
                f"is for {self.purpose}, not for {purpose}",
                where="plan",
                remedy="cordillera probe RUN makes plans for scoring, cordillera probe RUN --training for training",
            )

    def check_machine(self, device: torch.device | str, where: str = "plan") -> None:
        """Check that the plan was made on this machine.

        Args:
            device: Device on which the plan is to be used.
            where: Name for the error message.

        Raises:
            NumericsError: If the device, the threads or the libraries differ.
        """
        here = machine(device)
        for key, value in here.items():
            if self.machine.get(key) != value:
                raise NumericsError(
                    f"was made with {key} {self.machine.get(key)!r}, here it is {value!r}",
                    where=where,
                    remedy="make the plan anew with `cordillera probe RUN`",
                )


def weights_digest(layers: Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]) -> str:
    """Return the SHA-256 of the weights of layers, to which a plan is bound.

    Args:
        layers: Weight ``[N, K]`` and bias ``[N]`` (or None) of each layer, by name; converted to float32.
    """
    digest = hashlib.sha256()
    for name, parts in layers.items():
        for part in parts:
            digest.update(f"{name} {None if part is None else list(part.shape)}".encode())
            if part is not None:
                digest.update(part.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _checked(choice: KernelChoice) -> KernelChoice:
    sizes = (choice.rows, choice.outputs, choice.inputs)
    if not all(isinstance(size, int) and size >= 1 for size in sizes) or choice.of not in PASSES:
        raise ValueError(f"{choice.of} of {' x '.join(map(str, sizes))} is no product")
    texts = (choice.site, choice.kernel, choice.why)
    if not all(isinstance(text, str) for text in texts) or not isinstance(choice.expected, dict):
        raise TypeError(f"{choice} is no choice")
    if choice.input_range is None:
        return choice
    low, high = (float(end) for end in choice.input_range)
    if not -math.inf < low <= high < math.inf:
        raise ValueError(f"{low} to {high} is no range")
    return replace(choice, input_range=(low, high))
