"""Training with a tower on every host, on ranks that are threads, against training in one process."""

from __future__ import annotations

import functools
import math
import threading
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from _virtual_ranks import run_ranks
from torch import Tensor
from torch.nn import functional

from cordillera.data.ranking.features import FeatureSpec, RankingBatch, SparseFeature
from cordillera.distributed.collectives import Collectives
from cordillera.embeddings.sharded_tables import ShardedEmbeddingTables
from cordillera.embeddings.tables import EmbeddingTables, MadeTablesConfig, TablesConfig
from cordillera.errors import PlanError
from cordillera.jagged import JaggedBatch, JaggedTensor
from cordillera.models.ranking import MODELS, build
from cordillera.models.ranking.towers import TowersConfig
from cordillera.planning.ranking.placement import Placement, TablePart
from cordillera.planning.ranking.placer import PlacementConfig
from cordillera.planning.ranking.table_cost import TableProfile
from cordillera.training.optimizers import build_adamw, dense_parameters
from cordillera.training.ranking.config import RankingParallelConfig
from cordillera.training.ranking.rank_checkpoints import state_without_rows
from cordillera.training.ranking.ranks import ManyRanks, OneRank
from cordillera.training.ranking.towers.placing import (
    check_tower_placement,
    place_towers,
    tower_problems,
    towers_of_tables,
)
from cordillera.training.ranking.towers.ranks import TowerRanks
from cordillera.training.ranking.towers.tables import TowerTables

DIM, SAMPLES, STEPS = 8, 13, 6
FEATURES = FeatureSpec(
    dense=("a", "b"),
    sparse=(
        SparseFeature("item", "items"),
        SparseFeature("user", "users"),
        SparseFeature("history", "items", pooling="mean", is_list=True),
        SparseFeature("tags", "tags", pooling="sum", is_list=True),
        SparseFeature("place", "places", pooling="mean"),
    ),
    tables={"items": 41, "users": 7, "tags": 5, "places": 3},
    tasks=("click", "buy"),
)
GROUPS = (("history", "item", "place"), ("user", "tags"))
TOWERS = {"items": 0, "places": 0, "users": 1, "tags": 1}
RULES = ("rowwise_adagrad", "adagrad", "sgd", "adam")
_BUILDING = threading.Lock()  # threads share the random numbers from which weights are drawn


def batches(count: int = STEPS) -> Iterator[RankingBatch]:
    """Batches with weighted samples and empty bags; the last one has fewer samples than there are ranks."""
    for step in range(count):
        draw, size = torch.Generator().manual_seed(step), 2 if step == count - 1 else SAMPLES

        def bags(rows: int, longest: int, draw: torch.Generator = draw, size: int = size) -> JaggedTensor:
            counts = torch.randint(0, longest + 1, (size,), generator=draw).tolist()
            return JaggedTensor.from_lists([torch.randint(rows, (n,), generator=draw).tolist() for n in counts])

        def single(rows: int, draw: torch.Generator = draw, size: int = size) -> JaggedTensor:
            return JaggedTensor(torch.randint(rows, (size,), generator=draw), torch.arange(size + 1))

        found = {"item": single(41), "user": single(7), "history": bags(41, 5), "tags": bags(5, 2), "place": single(3)}
        labels = (torch.rand(size, 2, generator=draw) < 0.4).float()
        yield RankingBatch(torch.rand(size, 2, generator=draw), JaggedBatch.from_features(found), labels)


def placed(hosts: int, local: int) -> Placement:
    profiles = {
        name: TableProfile(rows, DIM, lookups=4.0 if name == "items" else 1.0) for name, rows in FEATURES.tables.items()
    }
    towers = TOWERS if hosts == 2 else dict.fromkeys(TOWERS, 0)
    found = place_towers(profiles, towers, hosts * local, hosts, PlacementConfig(), batch=SAMPLES).placement
    check_tower_placement(found, towers, hosts, "here")
    return Placement(found.size, found.tables, found.parts, tuple(found.tables))


def config_of(model: str, kind: str, hosts: int = 2) -> Any:
    towers = {"kind": kind, "compression": 1.5, "dim": 6} | ({"groups": GROUPS} if hosts == 2 else {"count": 1})
    sizes = {"bottom_mlp": (8,), "top_mlp": (8,), "mlp": (8,), "fmb_mlp": (8,), "layers": 1, "embedding_dim": DIM}
    known = MODELS[model].Config
    return known(**{key: value for key, value in sizes.items() if key in known.model_fields}, towers=towers)


class Learner:
    """A model that is trained in one process, or on one rank of several, and all that it learned."""

    def __init__(
        self, config: Any, rule: str, links: Collectives | None, exchange: str, placement: Any, balance: Any = "none"
    ) -> None:
        tables: TablesConfig = TablesConfig(name=rule, learning_rate=0.05, eps=1e-5)
        if links is not None:
            made = TowerTables if exchange == "towers" else ShardedEmbeddingTables
            tables = MadeTablesConfig.of(tables, partial(made, placement=placement, links=links))
        with _BUILDING:
            torch.manual_seed(1)
            self.model = build(config, FEATURES, tables)
        watchdog: Any = types.SimpleNamespace(at=lambda where: None, should_stop=False)
        self.ranks = OneRank()
        if exchange == "towers" and links is not None:
            self.ranks = TowerRanks(self.model, len(self.model.towers.places), watchdog, balance)  # type: ignore[arg-type]
        elif links is not None:
            assert isinstance(self.model.tables, ShardedEmbeddingTables)
            self.ranks = ManyRanks(self.model.tables, watchdog)
        self.dense = dense_parameters(self.model)
        # A smaller constant would turn the rounding of the smallest gradients, which differs by processor, into steps.
        self.optimizer = build_adamw(self.model, learning_rate=0.01, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1)
        self.norms: list[float] = []

    def train(self, clip: float | None, bf16: bool = False) -> dict[str, Tensor]:
        for step, (batch, (own,)) in enumerate(self.ranks.shares(batches())):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16), self.ranks.computing(step, batch):
                logits = self.model(own)
            losses = functional.binary_cross_entropy_with_logits(logits.float(), own.labels, reduction="sum")
            (losses / len(batch)).backward()
            self.ranks.sum_step(self.dense.values(), [0.0], threading.Event())
            self.norms.append(self.ranks.clip(self.dense.values(), clip))
            self.optimizer.step()
            self.model.tables.update()
            self.optimizer.zero_grad(set_to_none=True)
        self.ranks.refresh(self.optimizer)
        return self.learnt()

    def learnt(self) -> dict[str, Tensor]:
        found = {name: one.detach().clone() for name, one in state_without_rows(self.model).items()}
        for name, weight in self.dense.items():
            moments = self.optimizer.state[weight]
            found |= {f"{name}.{key}": torch.as_tensor(value).clone() for key, value in moments.items()}
        found |= {f"rows of {name}": self.model.tables.table(name).clone() for name in FEATURES.tables}
        if not isinstance(self.ranks, ManyRanks):
            state = self.model.tables._state()
            return found | {f"tables.{key}": value.clone() for key, value in state.items()}
        whole: dict[str, Tensor] = {}
        self.model.tables._save_to_state_dict(whole, "tables.", False)
        return found | {key: one for key, one in whole.items() if not key.endswith(("weight", "_extra_state"))}


@functools.cache
def learn(
    hosts: int, local: int, *, model: str = "dlrm", kind: str = "linear", rule: str = "rowwise_adagrad",
    exchange: str = "towers", clip: float | None = 0.3, bf16: bool = False, balance: str = "none",
) -> list[tuple[dict[str, Tensor], list[float], dict[str, int]]]:  # fmt: skip
    """Return what every rank has learned, its norms, and the bytes that it sent by name."""
    config, placement = config_of(model, kind, hosts), placed(hosts, local)

    def work(links: Collectives) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
        learner = Learner(config, rule, links, exchange, placement, balance)
        found = learner.train(clip, bf16)
        return found, learner.norms, {name: one.bytes for name, one in links.ledger.traffic.items()}

    return run_ranks(hosts * local, work)


def alone(hosts: int, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    config = config_of(options.get("model", "dlrm"), options.get("kind", "linear"), hosts)
    learner = Learner(config, options.get("rule", "rowwise_adagrad"), None, "plain", None)
    return learner.train(options.get("clip", 0.3)), learner.norms


def compare(hosts: int, local: int, **options: Any) -> None:
    expected, norms = alone(hosts, **options)
    for found, own_norms, _ in learn(hosts, local, **options):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            largest = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
            torch.testing.assert_close(
                found[key], tensor, rtol=0, atol=1e-6 * largest, msg=lambda said, k=key: k + said
            )
        assert own_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("rule", RULES)
def test_weights_moments_and_norms_are_those_of_one_process_with_every_rule(rule: str) -> None:
    compare(2, 2, rule=rule)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("hosts", "local"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_they_are_with_other_numbers_of_hosts_and_ranks(hosts: int, local: int) -> None:
    """Two hosts of three ranks have two tables each, so that a rank of each has none."""
    compare(hosts, local, clip=None)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("model", "kind"), [("dcn", "cross"), ("wukong", "linear"), ("dcn", "identity")])
def test_they_are_with_other_models_and_towers(model: str, kind: str) -> None:
    compare(2, 2, model=model, kind=kind)


def test_they_are_with_any_numbers_of_samples_on_the_ranks() -> None:
    compare(2, 2, balance="variable")


@pytest.mark.cases(1)
@pytest.mark.parametrize("bf16", [False, True])
def test_without_modules_both_exchanges_of_one_placement_train_to_the_same_bits(bf16: bool) -> None:
    both = [learn(2, 2, kind="identity", exchange=exchange, bf16=bf16) for exchange in ("towers", "plain")]
    for (ours, norms, _), (theirs, other_norms, _) in zip(*both, strict=True):
        assert norms == other_norms
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


def test_all_ranks_and_two_runs_end_at_the_same_bits() -> None:
    runs = [learn(2, 2, rule="rowwise_adagrad"), learn.__wrapped__(2, 2)]
    for found, norms, _ in (*runs[0], *runs[1]):
        assert norms == runs[0][0][1]
        assert all(torch.equal(tensor, found[key]) for key, tensor in runs[0][0][0].items())


def test_compression_divides_the_bytes_between_hosts_and_gradients_of_towers_stay_within_them() -> None:
    plain = learn(2, 2, kind="identity", exchange="towers", bf16=False)
    towers = learn(2, 2, rule="rowwise_adagrad")
    config, numbers = config_of("dlrm", "linear"), [3 * DIM, 2 * DIM]  # that enter the towers
    leaving = [round(count / (1.5 * 6)) * 6 for count in numbers]
    for rank, ((_, _, of_plain), (_, _, of_towers)) in enumerate(zip(plain, towers, strict=True)):
        name, host = "outputs of towers between hosts", rank // 2
        assert of_towers[name] * numbers[host] == of_plain[name] * leaving[host]
        assert not any("embeddings" in key and "between" in key for key in of_towers)
        assert of_towers["tower gradients within hosts"] > 0
        assert "tower gradients between hosts" not in of_towers
    assert config.towers.compression == 1.5


def test_a_not_finite_tower_gradient_reaches_the_norm_of_every_rank() -> None:
    def work(links: Collectives) -> float:
        learner = Learner(config_of("dlrm", "linear"), "sgd", links, "towers", placed(2, 2))
        for weight in learner.dense.values():
            weight.grad = torch.zeros_like(weight) if weight not in set(learner.model.towers.parameters()) else None
        for weight in learner.ranks.exchange.parameters():  # type: ignore[attr-defined]
            weight.grad = torch.full_like(weight, math.nan if links.rank >= 2 else 0.0)
        return learner.ranks.clip(learner.dense.values())

    assert all(map(math.isnan, run_ranks(4, work)))


# Placements and mistakes


def test_tables_of_a_tower_are_on_its_host_and_its_ranks_share_them() -> None:
    profiles = {f"t{i}": TableProfile(100 + i, DIM, lookups=1.0 + i) for i in range(8)}
    towers = {f"t{i}": i % 2 for i in range(8)}
    given = [place_towers(dict(order), towers, 4, 2, PlacementConfig(), batch=64)
             for order in (profiles.items(), reversed(profiles.items()))]  # fmt: skip
    assert {part.table: part.ranks for part in given[0].placement.parts} == {
        part.table: part.ranks for part in given[1].placement.parts
    }
    check_tower_placement(given[0].placement, towers, 2, "here")
    assert all(len(given[0].placement.parts_on(rank)) == 2 for rank in range(4))
    assert given[0].loads.lookup_imbalance < 1.2
    text = given[0].explain()
    assert "t0: whole on rank" in text
    assert "it is of tower 1, which host 1 computes" in text
    with pytest.raises(PlanError, match=r"the tables of tower 0 take .* GB and do not fit"):
        place_towers(profiles, towers, 4, 2, PlacementConfig(memory_gb=1e-6), batch=64)


def test_a_table_of_two_towers_is_refused_in_words() -> None:
    with pytest.raises(PlanError, match="table 'items' is of features in towers 0 and 1"):
        towers_of_tables([[0, 1], [2, 3, 4]], FEATURES)
    assert towers_of_tables([[0, 2, 4], [1, 3]], FEATURES) == TOWERS


def test_a_placement_that_does_not_keep_towers_on_their_hosts_is_refused() -> None:
    good = placed(2, 2)
    moved = {"items": 2} | {part.table: part.ranks[0] for part in good.parts if part.table != "items"}
    parts = tuple(part._replace(ranks=(moved[part.table],)) for part in good.parts)
    with pytest.raises(PlanError, match="table 'items' is on rank 2 of host 1, its tower on host 0"):
        check_tower_placement(Placement(4, good.tables, parts), TOWERS, 2, "p.json")
    halves = [TablePart("items", first, rows, 0, DIM, (0,)) for first, rows in ((0, 20), (20, 21))]
    parts = (*halves, *(part for part in good.parts if part.table != "items"))
    with pytest.raises(PlanError, match="table 'items' is cut or copied"):
        check_tower_placement(Placement(4, good.tables, parts), TOWERS, 2, "p.json")

    def work(links: Collectives) -> None:
        for wrong in (Placement(4, good.tables, parts, tuple(good.tables)), Placement(4, good.tables, good.parts)):
            spare = torch.Generator().manual_seed(0)
            with pytest.raises(PlanError, match="towers need whole tables, each on one rank that sums its bags"):
                TowerTables(FEATURES, DIM, TablesConfig(), wrong, links, generator=spare)

    run_ranks(4, work)


def test_settings_that_contradict_the_exchange_by_towers_are_named() -> None:
    given = RankingParallelConfig(exchange="towers", hosts=2, codec="int8", dense="full", copies=2, pool="rows")
    keys = ["parallel.codec", "parallel.dense", "parallel.copies", "parallel.pool"]
    assert [key for key, _ in tower_problems(given, TowersConfig(groups=GROUPS))] == keys
    assert [key for key, _ in tower_problems(given, None)] == ["model.towers", *keys]
    plain = given.model_copy(update={"exchange": "plain"})
    assert tower_problems(plain, None) == []
    alone = RankingParallelConfig(exchange="towers", hosts=2)
    ((key, why),) = tower_problems(alone, TowersConfig(count=3))
    assert (key, why) == ("parallel.hosts", "each host computes one tower: there are 3 towers, and hosts = 2")


def test_tables_of_one_process_are_not_changed_by_an_exchange_that_is_not_set() -> None:
    """The model of one process computes all towers, tower by tower."""
    learner = Learner(config_of("dlrm", "linear"), "sgd", None, "plain", None)
    assert isinstance(learner.model.tables, EmbeddingTables)
    x = torch.randn(3, 5, DIM)
    modules = learner.model.towers
    found = modules(x)  # type: ignore[operator]
    assert found.shape == (3, modules.outputs, 6)
    modules.exchange = lambda given: given  # type: ignore[assignment]
    assert modules(x) is x  # type: ignore[operator]
