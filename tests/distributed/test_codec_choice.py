"""Codecs by measured cost: raw on fast links, one choice on all ranks, the same choice and bits when it is repeated."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _emulated_links import EmulatedLinks

from cordillera.data.ranking.features import FeatureSpec, SparseFeature
from cordillera.distributed.codecs.choice import MARGIN, CodecChoice, LinkCost, choose_codecs
from cordillera.distributed.codecs.coders import MEASURED, WARM_UP, Coders, MeasuredCoders, TableBounds
from cordillera.distributed.codecs.selection import CodecRecord
from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.embeddings.prioritised_tables import PrioritisedEmbeddingTables
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import TablesConfig
from cordillera.errors import PlanError
from cordillera.jagged import JaggedBatch
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.run import Run
from cordillera.training.ranking.codecs import CODECS_FILE, coders_of, keep_given_choice
from cordillera.training.ranking.config import RankingParallelConfig
from tests.distributed.processes import found_by, needs_gloo

RAW, FAST = CodecRecord(1e6, 1e6, 1e-4, 1e-4), CodecRecord(1e6, 1e5, 1e-3, 1e-3)
CHOICE = CodecChoice(
    "auto-bounded", 8, {"a": "bounded", "b": "raw"}, {"a": 3.0, "b": 1.0}, {"a": 9.0, "b": 1.0}, 1e6, 0
)
DIM, ROWS, BATCH, STEPS = 32, 600, 300, WARM_UP + MEASURED + 5
TABLES = {"large": ROWS, "small": ROWS // 2}


def chosen(rate: float, latency: float = 0.0, **records: CodecRecord) -> CodecChoice:
    given = {"a": {"raw": RAW, **records}, "unsent": {"raw": CodecRecord()}}
    return choose_codecs("auto-bounded", 8, given, LinkCost(rate, latency, 6))


def test_fast_links_are_sent_raw_rows() -> None:
    slow = chosen(1e7, bounded=FAST, distinct=RAW)
    assert slow.codecs == {"a": "bounded", "unsent": "raw"}
    assert slow.speedups == {"a": pytest.approx(1e6 / (1e5 + 1e7 * 2e-3)), "unsent": 1.0}
    assert slow.ratios == {"a": 10.0, "unsent": 1.0}
    assert not slow.is_raw
    for rate in (1e9, math.inf):
        fast = chosen(rate, bounded=FAST)
        assert fast.is_raw
        assert set(fast.speedups.values()) == set(fast.ratios.values()) == {1.0}
    assert chosen(math.inf).bytes_per_s is None


def test_a_gain_within_the_error_of_measuring_is_none() -> None:
    # the codec is MARGIN times as fast where 1e6 / (1e5 + 2e-3 rate) is
    edge = (1e6 / MARGIN - 1e5) / 2e-3
    assert chosen(1.01 * edge, bounded=FAST).is_raw
    assert not chosen(0.99 * edge, bounded=FAST).is_raw


def test_the_exchange_of_lengths_counts() -> None:
    # 0.1 s raw, 0.012 s in frames, and six exchanges of lengths
    assert not chosen(1e7, latency=0.01, bounded=FAST).is_raw
    assert chosen(1e7, latency=0.015, bounded=FAST).is_raw


def test_a_choice_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "codecs.json"
    path.write_text(CHOICE.to_text())
    assert CodecChoice.read(path) == CHOICE
    CHOICE.check("auto-bounded", {"a": 1, "b": 2}, "here")
    with pytest.raises(PlanError, match="here: names other tables: b, c"):
        CHOICE.check("auto-bounded", {"a": 1, "c": 2}, "here")
    with pytest.raises(PlanError, match="is for codec 'auto-bounded'"):
        CHOICE.check("auto", {"a": 1, "b": 2}, "here")


@pytest.mark.parametrize(
    "change", [{"codecs": {"a": "int4"}}, {"name": "auto"}, {"from_step": -1}, {"codecs": None}, {"extra": 1}]
)
def test_a_damaged_choice_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "codecs.json"
    content = {key: value for key, value in json.loads(CHOICE.to_text()).items() if key != "seal"}
    path.write_text(json.dumps(content | change))
    with pytest.raises(PlanError, match=r"codecs\.json: is no choice"):
        CodecChoice.read(path)
    path.write_text(CHOICE.to_text().replace("8", "9", 1))
    with pytest.raises(PlanError, match="does not fit its checksum"):
        CodecChoice.read(path)


def test_a_choice_is_given_to_measured_codecs_only() -> None:
    with pytest.raises(ValueError, match="codec_file is for"):
        RankingParallelConfig(codec="bounded", codec_file="codecs.json")


def copied() -> Placement:
    """Tables that every rank holds, so that no row is sent."""
    parts = tuple(TablePart(table, 0, rows, 0, DIM, (0, 1)) for table, rows in TABLES.items())
    return Placement(2, {table: (rows, DIM) for table, rows in TABLES.items()}, parts)


def placement() -> Placement:
    parts = [
        TablePart(table, first, rows // 2, 0, DIM, (rank,))
        for table, rows in TABLES.items()
        for rank, first in enumerate((0, rows // 2))
    ]
    return Placement(2, {table: (rows, DIM) for table, rows in TABLES.items()}, tuple(parts))


def batch(step: int, rank: int) -> JaggedBatch:
    draw = torch.Generator().manual_seed(2 * step + rank)
    values = [torch.randint(rows, (BATCH,), generator=draw) for rows in TABLES.values()]
    return JaggedBatch(tuple(TABLES), torch.cat(values), torch.arange(2 * BATCH + 1), one_hot=True)


def trained(
    links: Collectives,
    coders: Coders | None,
    kind: type[ShardedEmbeddingTables] = ShardedEmbeddingTables,
    cut: Placement | None = None,
) -> list[torch.Tensor]:
    """The looked up rows of every step."""
    features = FeatureSpec((), tuple(SparseFeature(table, table) for table in TABLES), TABLES, ("click",))
    config = TablesConfig(name="sgd", learning_rate=0.1)
    tables = kind(features, DIM, config, cut or placement(), links, generator=torch.Generator().manual_seed(0))
    tables.coders = coders
    found = []
    for step in range(STEPS):
        output = tables(batch(step, links.rank))
        found.append(output.detach().clone())
        tables.advance()
        output.backward(torch.ones_like(output) * (1 + step))
        tables.update()
    return found


def measured(
    links: Collectives, name: Any, kept: list[CodecChoice], clock: Callable[[], float] | None = None
) -> MeasuredCoders:
    options = {} if clock is None else {"clock": clock}
    bounds = TableBounds.of(placement(), 1.0, 0)
    return MeasuredCoders(name, placement(), links, bounds, on_choice=kept.append, **options)


def together(rank: int, folder: str) -> dict[str, Any]:
    raw = trained(Collectives(None, Ledger(), 60.0), None)
    found: dict[str, Any] = {}
    kept: list[CodecChoice] = []
    ticks = itertools.count()
    dear = measured(Collectives(None, Ledger(), 60.0), "auto-bounded", kept, clock=lambda: float(next(ticks)))
    outputs = trained(dear.links, dear)
    found["dear codecs"] = {"choice": kept[0].to_text(), "equal": all(map(torch.equal, outputs, raw))}

    slow = EmulatedLinks(Ledger(), 60.0, bytes_per_s=1e6, latency_s=2e-4)
    for name in ("auto", "auto-bounded"):
        slow.ledger.clear()
        outputs = trained(slow, measured(slow, name, kept))
        equal = [torch.equal(one, other) for one, other in zip(outputs, raw, strict=True)]
        first, exact = outputs[WARM_UP + MEASURED], raw[WARM_UP + MEASURED]
        ranges = exact.amax((0, 2)) - exact.amin((0, 2))
        errors = ((first - exact).abs().amax((0, 2)) / ranges).tolist()
        found[name] = {"choice": kept[-1].to_text(), "equal": equal, "errors": errors}

    config, run = RankingParallelConfig(processes=2, codec="auto-bounded"), Run(Path(folder, "run"))
    said: list[str] = []
    slow.ledger.clear()
    first = trained(slow, coders_of(config, placement(), slow, run, said.append))
    slow.all_reduce("end", torch.ones(1))  # rank 0 has written
    again = trained(slow, coders_of(config, placement(), slow, run, said.append))
    found["kept"] = {"equal": all(map(torch.equal, again, first)), "said": said}
    slow.ledger.clear()
    outputs = trained(slow, measured(slow, "auto", kept), PrioritisedEmbeddingTables)
    found["prioritised"] = {"choice": kept[-1].to_text(), "equal": all(map(torch.equal, outputs, raw))}
    slow.ledger.clear()
    trained(
        slow,
        MeasuredCoders("auto", copied(), slow, TableBounds.of(copied(), 1.0, 0), on_choice=kept.append),
        cut=copied(),
    )
    found["nothing sent"] = {"choice": kept[-1].to_text()}
    slow.close()
    return found


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("codecs")
    Run.create(folder / "run", "")
    return {"ranks": found_by(2, folder, together, 180), "folder": folder / "run"}


@needs_gloo
@pytest.mark.slow
def test_all_ranks_make_one_choice(executed: dict[str, Any]) -> None:
    first, second = executed["ranks"].values()
    for name in ("dear codecs", "auto", "auto-bounded", "prioritised"):
        assert first[name]["choice"] == second[name]["choice"]


@needs_gloo
@pytest.mark.slow
def test_codecs_that_cost_more_than_the_link_leave_rows_raw(executed: dict[str, Any]) -> None:
    for found in executed["ranks"].values():
        choice = json.loads(found["dear codecs"]["choice"])
        assert set(choice["codecs"].values()) == {"raw"}
        assert choice["from_step"] == WARM_UP + MEASURED
        assert found["dear codecs"]["equal"]


@needs_gloo
@pytest.mark.slow
def test_tables_that_are_not_sent_have_no_codec(executed: dict[str, Any]) -> None:
    for found in executed["ranks"].values():
        choice = json.loads(found["nothing sent"]["choice"])
        assert choice["codecs"] == dict.fromkeys(TABLES, "raw")
        assert choice["bytes_per_s"] is None


@needs_gloo
@pytest.mark.slow
def test_a_slow_link_gets_codecs_within_the_bounds(executed: dict[str, Any]) -> None:
    for found in executed["ranks"].values():
        choice = json.loads(found["auto-bounded"]["choice"])
        assert set(choice["codecs"].values()) <= {"bounded", "bounded-fast"}
        assert min(choice["ratios"].values()) > 4
        assert 0.5e6 < choice["bytes_per_s"] < 1.5e6
        assert found["auto-bounded"]["equal"] == [step < choice["from_step"] for step in range(STEPS)]
        for error, bound in zip(found["auto-bounded"]["errors"], (0.01, 0.05), strict=True):  # tight and loose
            assert 0 < error <= bound * (1 + 1e-5)


@needs_gloo
@pytest.mark.slow
def test_lossless_choices_change_no_bit(executed: dict[str, Any]) -> None:
    for found in executed["ranks"].values():
        assert all(found["auto"]["equal"])
        assert found["prioritised"]["equal"]


@needs_gloo
@pytest.mark.slow
def test_a_kept_choice_is_repeated_to_the_bit(executed: dict[str, Any]) -> None:
    for rank, found in executed["ranks"].items():
        assert found["kept"]["equal"]
        assert len(found["kept"]["said"]) == (rank == 0)  # nothing is measured again
        assert all(line.startswith("codecs: from step 9, ") for line in found["kept"]["said"])
    choice = CodecChoice.read(executed["folder"] / CODECS_FILE)
    assert choice.codecs.keys() == TABLES.keys()
    record = Run(executed["folder"]).metrics()[-1]
    assert record == {"kind": "codecs", "step": choice.from_step, "codecs": choice.codecs}


def test_a_choice_of_another_run_is_copied_or_refused(tmp_path: Path) -> None:
    path, run = tmp_path / "given.json", Run.create(tmp_path / "run", "")
    config = partial(RankingParallelConfig, codec="auto-bounded", codec_file=str(path))
    path.write_text(CHOICE.to_text())
    with pytest.raises(PlanError, match=r"given\.json: names other tables"):
        keep_given_choice(config(), placement(), run)
    fitting = CodecChoice("auto-bounded", 3, dict.fromkeys(TABLES, "bounded"), {}, {}, None, 0.0)
    path.write_text(fitting.to_text())
    keep_given_choice(config(), placement(), run)
    path.unlink()
    keep_given_choice(config(), placement(), run)  # a resumed run has its own
    assert CodecChoice.read(run.folder / CODECS_FILE) == fitting
