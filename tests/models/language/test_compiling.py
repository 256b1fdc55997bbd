"""Compiled blocks against those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.errors import PlanError
from cordillera.models.language.compiling import check_compiler, compile_blocks
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.stages import LlamaStage
from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens
from tests.distributed.processes import found_by, needs_gloo

MODEL = LlamaConfig(layers=3, hidden=16, heads=2, kv_heads=1, ffn=24, vocabulary=32, context=128)
LENGTHS = ([5, 20], [7], [100], [30, 0, 4, 4], [1, 2], [2])


def packed(lengths: list[int]) -> PackedTokens:
    generator = torch.Generator().manual_seed(sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return PackedTokens(torch.randint(0, 32, (int(offsets[-1]),), generator=generator), offsets)


def graphs() -> int:
    """That this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def test_an_attention_core_outside_gets_its_arguments_as_they_are() -> None:
    stage = LlamaStage(Llama(MODEL))
    called: list[tuple[Any, ...]] = []
    for block in stage.blocks:
        block.attention.core = lambda *arguments: called.append(arguments)
    compile_blocks(stage)
    for block in stage.blocks:
        block.attention.core("q", "k", "v", "offsets")
    assert called == [("q", "k", "v", "offsets")] * MODEL.layers


def work(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"graphs": []}
    for compiles in (False, True):
        mesh = ProcessMesh(ParallelConfig(recompute="selective"))
        engine = LanguageEngine(LanguageConfig(compile=compiles), MODEL, mesh)
        reports = []
        for lengths in LENGTHS:
            reports.append(engine.step([packed(lengths), packed([2])]))
            found["graphs"].append(graphs())
        found[str(compiles)] = [(report.loss, report.gradient_norm) for report in reports]
        found[f"{compiles} weights"] = [p.full_tensor().detach() for p in engine.stages[0].parameters()]  # type: ignore[attr-defined]
    return found


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_blocks_train_as_others_do_and_once_for_all_lengths(tmp_path: Path) -> None:
    found = found_by(1, tmp_path, work, 500)[0]
    for ours, theirs in zip(found["True"], found["False"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for ours, theirs in zip(found["True weights"], found["False weights"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    before, compiled = found["graphs"][: len(LENGTHS)], found["graphs"][len(LENGTHS) :]
    assert set(before) == {0}
    assert compiled[0] > 0
    assert set(compiled) == {compiled[0]}


def test_where_nothing_compiles_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils import _triton

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(PlanError, match="there is no C\\+\\+ compiler"):
        check_compiler("cpu")
    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    with pytest.raises(PlanError, match="there is no Triton for cuda"):
        check_compiler("cuda")
    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    check_compiler("cuda")
