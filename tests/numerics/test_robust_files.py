"""Files that were cut, flipped, exchanged, or written by someone else: none is taken for whole."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from cordillera import tensor_files
from cordillera.errors import CheckpointError, CordilleraError, NumericsError
from cordillera.files import sealed_json
from cordillera.numerics.dispatch.dispatch import DispatchConfig
from cordillera.numerics.dispatch.plan import KernelChoice, PrecisionPlan, machine
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig, Probed
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.inference.drift import DriftCheck, DriftReference
from cordillera.numerics.inference.selection import Change, Part, select
from cordillera.numerics.quantization.range_estimators import RunningHistogram
from cordillera.serving.ranking import quantized_model
from tests.fuzzing import flips, survives


class Kind(NamedTuple):
    """A kind of file: how it is made and read."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]


def _probe(path: Path, features: int = 8) -> None:
    model = nn.Sequential(nn.Linear(features, 4))
    with Probe(model, ProbeConfig(interval=1)) as probe:
        probe.step()
        model(torch.randn(20, features))
        probe.save(path)


def _plan() -> PrecisionPlan:
    expected = {"ms": 1.0, "times_fp32": 2.0}
    return PrecisionPlan((KernelChoice("0", "forward", 64, 4, 8, "bf16", "", expected),), machine(), {"sqnr_db": 30.0})


KINDS = {
    "statistics": Kind(_probe, Probed),
    "plan": Kind(lambda path: _plan().save(path), PrecisionPlan.load),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_that_is_changed_and_a_file_that_is_cut_are_refused_by_name(
    kind: str, tmp_path: Path, fuzz_inputs: Callable[[int], int]
) -> None:
    path, rng = tmp_path / "file", random.Random(kind)
    KINDS[kind].write(path)
    KINDS[kind].read(path)
    content = path.read_bytes()
    for number in range(fuzz_inputs(250)):
        cut = number % 5 == 4
        path.write_bytes(content[: rng.randrange(len(content))] if cut else flips(content, rng))
        error = survives(lambda: KINDS[kind].read(path), f"{kind} {number}")
        assert isinstance(error, NumericsError), f"{kind} {number} was read"
        assert str(path) in str(error)
    path.write_bytes(content.replace(b"}", b" }", 1))
    with pytest.raises(NumericsError):
        KINDS[kind].read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_is_missing_or_is_another_one_is_refused_with_what_to_do(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    KINDS[kind].write(path)
    content = path.read_bytes()
    for size in (0, 1, 8, 9, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:size])
        with pytest.raises(NumericsError, match="->"):
            KINDS[kind].read(path)
    path.unlink()
    with pytest.raises(NumericsError, match="->"):
        KINDS[kind].read(path)
    for other in KINDS:
        if other != kind:
            KINDS[other].write(path)
            with pytest.raises(NumericsError, match="->"):
                KINDS[kind].read(path)
    with pytest.raises(NumericsError, match="->"):
        KINDS[kind].read(tmp_path)


def test_layers_keep_their_order_in_a_file(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(12)])
    with Probe(model, ProbeConfig(interval=1)) as probe:
        probe.save(tmp_path / "file")
    assert Probed(tmp_path / "file").layers == [str(i) for i in range(12)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(
    kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "file"
    KINDS[kind].write(path)
    before = path.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        KINDS[kind].write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_into_no_folder_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(CordilleraError, match="none"):
        _probe(tmp_path / "none" / "file")


NONSENSE = (None, [], {}, "x", "NaN", -1, 0, 1e300, [1], {"a": 1}, [None], [[]], True)


def _spoilt(content: Any, value: Any) -> list[Any]:
    """The content with one of its parts, or parts of parts, exchanged or taken away."""
    found: list[Any] = [value]
    keys: list[Any] = list(content) if isinstance(content, dict) else list(range(len(content)))
    for key in keys:
        if isinstance(content[key], dict | list) and content[key]:
            parts = _spoilt(content[key], value)
        else:
            parts = [value]
        for part in parts:
            copy = dict(content) if isinstance(content, dict) else list(content)
            copy[key] = part
            found.append(copy)
    if isinstance(content, dict):
        found += [{k: v for k, v in content.items() if k != key} for key in keys]
    return found


def test_plans_of_any_json_are_refused_or_hold_what_a_plan_may(tmp_path: Path) -> None:
    """Digests agree: someone wrote them so."""
    path = tmp_path / "plan"
    plan = _plan()
    content = plan._content()
    refused = 0
    for value in NONSENSE:
        for spoilt in _spoilt(content, value):
            if isinstance(spoilt, dict):
                path.write_text(sealed_json(spoilt))
            else:
                path.write_text(json.dumps(spoilt))
            try:
                found = PrecisionPlan.load(path)
            except NumericsError:
                refused += 1
                continue
            assert all(choice.rows >= 1 and isinstance(choice.kernel, str) for choice in found.choices)
            assert not any(math.isnan(bound) for bound in found.bound.values())
            found.find("0", "forward", 3)
    assert refused > 100
    path.write_text(json.dumps(content).replace("30.0", "NaN"))
    with pytest.raises(NumericsError, match="NaN is not a number"):
        PrecisionPlan.load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(NumericsError, match="nested too deeply"):
        PrecisionPlan.load(path)


def test_files_of_any_content_under_a_right_digest_are_refused(tmp_path: Path) -> None:
    path, kind = tmp_path / "file", "cordillera probe 1"
    _probe(path)
    tensors, content = tensor_files.read_tensors(path, kind, "")
    Probed(path)
    count = 0
    for value in NONSENSE[::3]:
        for spoilt in _spoilt(content, value):
            if spoilt == content:
                continue
            tensor_files.write_tensors(path, kind, tensors, spoilt)
            try:
                Probed(path)
            except NumericsError:
                count += 1
    assert count > 40
    for name in tensors:
        others = {key: tensor for key, tensor in tensors.items() if key != name}
        for tensor in (None, tensors[name].reshape(-1)[:0], torch.full((3,), math.nan)):
            tensor_files.write_tensors(path, kind, others if tensor is None else {**others, name: tensor}, content)
            with pytest.raises(NumericsError):
                Probed(path)


def _reference() -> DriftReference:
    true = torch.rand(90, 1) < 0.3
    return DriftReference.of(["a", "b"], torch.randn(90, 2), ["c"], true, torch.arange(90) // 3)


def _record(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "schema": quantized_model.SCHEMA, "made_of": {"checkpoint": "00"}, "tables": {"user": "int8"},
        "layers": {"top.0": "bf16"}, "tensors": "00", "precision": "fp32", "seen": _reference().to_json(), "facts": {},
        **changes,
    }  # fmt: skip
    return record


def test_a_record_of_a_quantised_model_is_believed_only_as_it_was_written(tmp_path: Path) -> None:
    """Two tables of one size whose formats change places would otherwise be decoded into other numbers."""
    path = tmp_path / "quantized.json"
    record = _record()
    path.write_text(sealed_json(record))
    assert quantized_model.read_record(tmp_path) == record
    for key, value in (("tables", {"user": "int4"}), ("layers", {}), ("precision", "bf16"), ("tensors", "01")):
        path.write_text(json.dumps({**json.loads(sealed_json(record)), key: value}, indent=2) + "\n")
        with pytest.raises(CheckpointError, match="does not fit its checksum"):
            quantized_model.read_record(tmp_path)
    path.write_text(sealed_json(_record(schema=2)))
    with pytest.raises(CheckpointError, match=r"version 2, this library reads 3\n  -> cordillera quantize"):
        quantized_model.read_record(tmp_path)
    for value in NONSENSE:
        for key in ("made_of", "tables", "layers", "seen", "tensors", "precision"):
            path.write_text(sealed_json(_record(**{key: value})))
            expected = str if key in ("tensors", "precision") else dict
            if not isinstance(value, expected):
                with pytest.raises(CheckpointError, match="is damaged"):
                    quantized_model.read_record(tmp_path)
        path.write_text(json.dumps(value))
        with pytest.raises(CheckpointError, match="->"):
            quantized_model.read_record(tmp_path)


def test_references_of_anything_else_are_refused() -> None:
    found = _reference()
    content = found.to_json()
    assert DriftReference.from_json(json.loads(json.dumps(content))) == found
    refused = 0
    for value in NONSENSE:
        for spoilt in _spoilt(content, value):
            try:
                read = DriftReference.from_json(spoilt)
            except NumericsError:
                refused += 1
                continue
            check = DriftCheck(read)
            check.update(torch.randn(9, len(read.names)), torch.zeros(9, len(read.shares)).bool())
            assert all(0 <= alarm.probability <= 1 for alarm in check.alarms())
    assert refused > 500


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_states_that_are_not_finite_or_of_another_shape_are_refused(bad: float) -> None:
    rows = RowStatistics(3)
    rows.update(torch.randn(9, 3))
    state = rows.state_dict()
    for part in (torch.full_like(state["mean"], bad), state["mean"].reshape(-1)[:1]):
        with pytest.raises(NumericsError, match="finite numbers"):
            RowStatistics.from_state_dict({**state, "mean": part})
    histogram = RunningHistogram()
    histogram.update(torch.randn(9))
    state = histogram.state_dict()
    for spoilt in ({**state, "update": 3}, {"bins": 9}, {**state, "counts": -state["counts"]}):
        with pytest.raises(NumericsError, match="no state of a histogram"):
            RunningHistogram().load_state_dict(spoilt)


def test_a_probe_goes_on_with_statistics_of_its_own_layers_only() -> None:
    def probe(width: int) -> Probe:
        return Probe(nn.Sequential(nn.Linear(width, 4)), ProbeConfig(interval=1))

    with pytest.raises(NumericsError, match="8 inputs of 0, which has 9"):
        probe(9).load_state_dict(probe(8).state_dict())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bounds_that_bound_nothing_are_refused(bad: float) -> None:
    """Every comparison with NaN is false, so that a NaN would take everything, or never ring."""
    with pytest.raises(NumericsError, match="budget"):
        select([Part("a", ("fp32",), (1.0,))], lambda options: Change(0, 0, 0), bad)
    with pytest.raises(NumericsError, match="false_alarms"):
        DriftCheck(_reference()).alarms(bad)
    if bad != -1:
        with pytest.raises(ValidationError):
            DispatchConfig(sqnr_db=bad)
    with pytest.raises(ValidationError):
        DispatchConfig(median_relative=math.nan)
    for rows in ((), (0,), (-3, 5)):
        with pytest.raises(ValidationError):
            DispatchConfig(rows=rows)
