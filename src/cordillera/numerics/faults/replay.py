"""Joint evaluation of many faults of one layer, from the corrupted layer on.

The part of a model before the first use of the corrupted tensor is computed once for all faults, and the rest runs over
a batch of faults (``torch.vmap``). For a linear layer or a convolution, only the outputs that depend on the
corrupted row are recomputed, from that row; for an embedding table, only the row that was hit. Values, NaN and
infinities equal those of the flipped model up to the order of additions. If this order could matter, because an output
is within ``tolerance`` of changing its decision, the fault is evaluated again by flipping the bits in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cordillera.errors import NumericsError
from cordillera.numerics.faults.bit_flips import Region, corrupted, flipped
from cordillera.numerics.faults.substitution import Rows, Substitute, Trace
from cordillera.numerics.faults.vulnerability import Verdicts

_STACK_BYTES = 1 << 26  # bytes of corrupted copies made at a time
_ACTIVATIONS = 1 << 24  # approximate number of activations of a batch of faults
_CHECKED = 2  # number of faults of every region on which both methods must agree


class Decision(Protocol):
    """Rule that derives a model's answer from its outputs."""

    def decide(self, outputs: Tensor) -> Tensor:
        """Return the answers ``[..., B, a]`` to ``outputs`` ``[..., B, n]``."""
        ...

    def margin(self, outputs: Tensor) -> Tensor:
        """Return the distance of ``outputs`` from another answer, ``[..., B, a]``, at least 0."""
        ...


@dataclass(frozen=True)
class Threshold(Decision):
    """Whether each output reaches a value: by default, whether logits ``[B, tasks]`` reach 0 (probability one half)."""

    value: float = 0.0

    def decide(self, outputs: Tensor) -> Tensor:
        return outputs >= self.value

    def margin(self, outputs: Tensor) -> Tensor:
        return (outputs - self.value).abs()


@dataclass(frozen=True)
class Touched:
    """Outputs of the inputs that faults can have changed; all others are unchanged.

    Attributes:
        fault: Number of the fault, ``int64 [P]``.
        sample: Number of the input, ``int64 [P]``.
        outputs: Outputs ``[P, n]``.
    """

    fault: Tensor
    sample: Tensor
    outputs: Tensor


TouchedLookup = Callable[[Region, Tensor], Touched]
"""Function from faults ``int64 [M, k]`` of a table to the outputs of the inputs that read a corrupted row."""


class Replay:
    """Judge of a model's faults on fixed inputs.

    Every region's first faults are judged by both methods. If their outputs differ, or the rest of the model cannot run
    over a batch of faults, the region's faults are judged one by one, for the reasons in ``one_by_one``.

    Args:
        forward: Function that runs the model on the inputs and returns outputs ``[B, n]``, without gradients, in
            evaluation mode, and the same at every call; anything else is an error, as are outputs of which none is
            finite.
        suffix: Function that computes the same outputs from stored activations, for regions that are not used before
            them; None for ``forward``.
        lookups: Functions by region name that judge its faults on the inputs that they touch.
        tolerance: Distance of an output from another answer, relative to the largest output, below which the fault is
            judged again by the flipped model. None for 1e-5, or four roundings of the outputs' dtype if that is more; a
            model that computes with fewer bits than its outputs have needs more.

    Attributes:
        inputs: Number of inputs whose output in the intact model is finite; the other ``skipped`` ones are not judged.
        judged: Number of faults so far, of which ``repeated`` were judged again by the flipped model.
    """

    def __init__(
        self,
        forward: Callable[[], Tensor],
        decision: Decision,
        *,
        suffix: Callable[[], Tensor] | None = None,
        lookups: Mapping[str, TouchedLookup] | None = None,
        tolerance: float | None = None,
    ) -> None:
        self._forward, self._decision = forward, decision
        self._suffix, self._lookups = suffix or forward, dict(lookups or {})
        with torch.no_grad():
            self.golden, again = forward(), forward()
        if self.golden.ndim != 2:
            raise NumericsError(f"must be [inputs, n], got {tuple(self.golden.shape)}", where="outputs")
        if not torch.equal(self.golden.nan_to_num(), again.nan_to_num()):
            raise NumericsError(
                "the intact model gives other outputs at every call: wrong ones could not be told",
                where="outputs",
                remedy="put the model into evaluation mode",
            )
        if tolerance is None:
            tolerance = max(1e-5, 4 * torch.finfo(self.golden.dtype).eps)
        self._tolerance = tolerance
        self._finite = self.golden.isfinite().all(-1)
        self.inputs = int(self._finite.sum())
        self.skipped = len(self.golden) - self.inputs
        if not self.inputs:
            raise NumericsError(
                "the intact model's output is NaN or infinite on every input, or there is none: "
                "nothing can become wrong",
                where="outputs",
                remedy="look for the weight that is not finite, or give other inputs",
            )
        self._answers = decision.decide(self.golden)
        self._trace: Trace | None = None
        self._checked: set[int] = set()
        self.one_by_one: dict[str, str] = {}
        self.judged = self.repeated = 0

    def __call__(self, region: Region, bits: Tensor) -> Verdicts:
        """Judge faults ``bits``, ``int64 [M, k]`` addresses in a region."""
        self.judged += len(bits)
        if not len(bits):
            return self.flip_each(region, bits)
        if id(region) not in self._checked:
            self._checked.add(id(region))
            self._check(region, bits)
        if region.name in self.one_by_one:
            return self.flip_each(region, bits)
        if region.name in self._lookups:
            return self._of_touched(region, bits, self._lookups[region.name](region, bits))
        parts = [self._of_outputs(region, part, self.outputs(region, part)) for part in bits.split(self._size(region))]
        silent, detected = (torch.cat([getattr(part, name) for part in parts]) for name in ("silent", "detected"))
        return Verdicts(silent, detected, self.inputs)

    def flip_each(self, region: Region, bits: Tensor) -> Verdicts:
        """Judge faults ``bits``, ``int64 [M, k]``, by flipping them in the model one by one; reference of replay."""
        silent, detected = torch.zeros(2, len(bits), dtype=torch.int64)
        for fault, addresses in enumerate(bits.tolist()):
            finite, wrong = self._tell(self._run_flipped(region, addresses))
            silent[fault], detected[fault] = (finite & wrong).sum(), (~finite & self._finite).sum()
        return Verdicts(silent, detected, self.inputs)

    def outputs(self, region: Region, bits: Tensor) -> Tensor:
        """Return the outputs ``[M, B, n]`` of faults ``bits``, ``int64 [M, k]``, by replay."""
        if region.name in self._lookups:
            touched = self._lookups[region.name](region, bits)
            outputs = self.golden.expand(len(bits), *self.golden.shape).clone()
            outputs[touched.fault, touched.sample] = touched.outputs
            return outputs
        with torch.no_grad():
            places, masks = region.locate(bits.to(region.owner.device))
            if self._trace_of().has_rows(region):
                return self._by_rows(region, places, masks)
            return self._by_copies(region, places, masks)

    def _run_flipped(self, region: Region, bits: list[int]) -> Tensor:
        with torch.no_grad(), flipped(region, bits):
            return self._forward()

    def _tell(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return which outputs ``[..., B, n]`` are finite, and which are wrong where the golden ones are finite."""
        wrong = (self._decision.decide(outputs) != self._answers).any(-1)
        return outputs.isfinite().all(-1), wrong & self._finite

    def _doubtful(self, outputs: Tensor) -> Tensor:
        """Return the faults whose verdict could depend on the order of additions: ``[M, B, n] -> [M]``."""
        finite = outputs.isfinite().all(-1)
        largest = torch.where(outputs.isfinite(), outputs.abs(), 0).amax(-1)
        scale = torch.where(finite, largest, 0).amax(-1, keepdim=True)
        close = self._decision.margin(outputs).amin(-1) <= self._tolerance * (1 + scale)
        # an overflow also depends on the order
        return ((close | (largest > 1e-2 * torch.finfo(outputs.dtype).max)) & finite & self._finite).any(-1)

    def _of_outputs(self, region: Region, bits: Tensor, outputs: Tensor) -> Verdicts:
        finite, wrong = self._tell(outputs)
        silent, detected = (finite & wrong).sum(-1).cpu(), (~finite & self._finite).sum(-1).cpu()
        return self._judge_again(region, bits, Verdicts(silent, detected, self.inputs), self._doubtful(outputs))

    def _of_touched(self, region: Region, bits: Tensor, touched: Touched) -> Verdicts:
        fault, sample, outputs = touched.fault, touched.sample, touched.outputs
        here = self._finite[sample]
        finite = outputs.isfinite().all(-1)
        wrong = (self._decision.decide(outputs) != self._answers[sample]).any(-1)
        silent, detected, doubts = torch.zeros(3, len(bits), dtype=torch.int64)
        silent.index_add_(0, fault, (finite & wrong & here).long())
        detected.index_add_(0, fault, (~finite & here).long())
        largest = outputs.abs().amax(-1)
        close = self._decision.margin(outputs).amin(-1) <= self._tolerance * (1 + largest)
        close |= largest > 1e-2 * torch.finfo(outputs.dtype).max
        doubts.index_add_(0, fault, (close & finite & here).long())
        return self._judge_again(region, bits, Verdicts(silent, detected, self.inputs), doubts > 0)

    def _judge_again(self, region: Region, bits: Tensor, found: Verdicts, doubtful: Tensor) -> Verdicts:
        again = doubtful.nonzero().flatten().cpu()
        if len(again):
            self.repeated += len(again)
            exact = self.flip_each(region, bits[again])
            found.silent[again], found.detected[again] = exact.silent, exact.detected
        return found

    def _check(self, region: Region, bits: Tensor) -> None:
        """Compare both methods on the faults of the highest bits, and stop replaying the region if they differ."""
        chosen = bits[(bits[:, 0] % region.layout.width).argsort(descending=True, stable=True)[:_CHECKED]]
        if region.name not in self._lookups:
            if not region.is_whole and region.aliases:
                self.one_by_one[region.name] = f"{', '.join(region.aliases)} read the same memory"
                return
            if region.owner.ndim and region.stored.shape[:-1] != region.owner.shape[:-1]:
                self.one_by_one[region.name] = "it is an expanded tensor"
                return
        try:
            if region.name not in self._lookups and not self._trace_of().reads(region):
                self.one_by_one[region.name] = "no operator of torch reads it"
                return
            replayed = self.outputs(region, chosen)
        except (RuntimeError, NotImplementedError) as error:
            self.one_by_one[region.name] = f"cannot run over a batch of faults: {str(error).splitlines()[0]}"
            return
        for addresses, found in zip(chosen.tolist(), replayed, strict=True):
            real = self._run_flipped(region, addresses)
            scale = torch.where(real.isfinite(), real.abs(), 0).amax()
            near = torch.isclose(real, found, rtol=1e-2, atol=1e-3 * (1 + float(scale)), equal_nan=True)
            if not (near | (~real.isfinite() & ~found.isfinite())).all():
                self.one_by_one[region.name] = "the replayed outputs are not those of the flipped model"
                return

    def _trace_of(self) -> Trace:
        if self._trace is None:
            trace = Trace()

            def run(fault: Tensor) -> Tensor:
                with trace:
                    return self._suffix()

            with torch.no_grad():
                torch.vmap(run)(torch.zeros(1))  # vmap, so that the same operators are chosen as for a batch of faults
            self._trace = trace
        return self._trace

    def _size(self, region: Region) -> int:
        """Return the number of faults to judge at a time."""
        trace = self._trace_of()
        most = max(1, min(512, _ACTIVATIONS // max(1, trace.numbers)))
        if trace.has_rows(region):
            return most
        return max(1, min(most, _STACK_BYTES // max(1, region.owner.numel() * region.owner.dtype.itemsize)))

    def _by_copies(self, region: Region, places: Tensor, masks: Tensor) -> Tensor:
        owner = region.owner.detach()
        if owner.ndim and region.stored.shape[-1] != owner.shape[-1]:
            width = region.stored.shape[-1]
            places = places // width * owner.shape[-1] + places % width + region.first_column
        copies = corrupted(owner.expand(len(places), *owner.shape).contiguous().clone(), places, masks)

        def run(copy: Tensor) -> Tensor:
            with Substitute(region.owner, copy):
                return self._suffix()

        return torch.vmap(run)(copies)

    def _by_rows(self, region: Region, places: Tensor, masks: Tensor) -> Tensor:
        owner = region.owner.detach()
        length = owner[0].numel()
        row = places[:, 0] // length
        rows = corrupted(owner[row].contiguous(), places % length, masks)

        def run(fault: Tensor) -> Tensor:
            with Rows(region.owner, row, rows, fault):
                return self._suffix()

        return torch.vmap(run)(torch.arange(len(places), device=row.device))
