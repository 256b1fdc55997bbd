"""Tables that grow with their ids: updates as exact as those of static tables, states and deltas bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cordillera.data.ranking.features import ANY_ID, FeatureSpec, SparseFeature
from cordillera.embeddings.dynamic_ids import DynamicRowsConfig
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.embeddings.tables import EmbeddingTables, TablesConfig
from cordillera.errors import CheckpointError, DataError, DependencyError, TrainingError
from cordillera.jagged import JaggedBatch, JaggedTensor
from tests.embeddings.popular import DIM, OPTIMIZERS, popular, spec

pytest.importorskip("numba")

SPEC = spec(50, 30)
EVICTING = DynamicRowsConfig(min_count=2, max_age=3, evict_every=4)


def dynamic(
    optimizer: str = "rowwise_adagrad", rows: DynamicRowsConfig | None = None, seed: int = 5, small: bool = True
) -> DynamicTables:
    spec = replace(SPEC, tables={"items": 1, "users": 1}) if small else SPEC
    values = {"name": optimizer, "learning_rate": 0.1, "initial_accumulator": 0.01, "dynamic": rows}
    config = TablesConfig.model_validate(values)
    return DynamicTables(spec, DIM, config, init=0.1, generator=torch.Generator().manual_seed(seed))


def batch(seed: int, size: int = 12, scale: int = 1, among: tuple[int, int] = (50, 30)) -> JaggedBatch:
    return popular(seed, size, *among, 2, scale)


def step(tables: EmbeddingTables, seed: int, scale: int = 1) -> Tensor:
    output = tables(batch(seed, scale=scale))
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(seed + 1000)))
    tables.update()
    return output.detach()


def train(tables: DynamicTables, seeds: range) -> DynamicTables:
    for seed in seeds:
        step(tables, seed)
    return tables


def same(a: DynamicTables, b: DynamicTables) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_gives_the_bits_of_static_tables(optimizer: str) -> None:
    grown = dynamic(optimizer)
    config = TablesConfig.model_validate({"name": optimizer, "learning_rate": 0.1, "initial_accumulator": 0.01})
    static = EmbeddingTables(SPEC, DIM, config)
    scale, everything = 2**50 + 1, dynamic(optimizer, small=False)
    for name, rows in SPEC.tables.items():  # initial rows do not depend on the order of arrival
        keys = torch.arange(rows) * scale
        number = list(SPEC.tables).index(name)
        everything._begin_rows(everything.ids.find_or_insert(keys, torch.tensor([0, rows]), torch.tensor([number])).new)
        static.table(name)[:] = everything.table(name)
    for seed in range(25):
        assert torch.equal(step(grown, seed, scale), step(static, seed))
    for name in SPEC.tables:
        assert torch.equal(grown.table(name), static.table(name)[grown.ids_of(name) // scale])
    for name, tensor in grown._state().items():
        place = torch.tensor([0, static._starts["users"]])[grown.ids._row_tables[2 : grown.ids.used]]
        assert torch.equal(tensor[2 : grown.ids.used], static._state()[name][place + rows_of(grown, scale)])


def rows_of(tables: DynamicTables, scale: int) -> Tensor:
    return torch.from_numpy(tables.ids._row_ids[2 : tables.ids.used]) // scale


def test_a_single_feature_of_lists_is_the_sum_of_its_ids() -> None:
    spec = FeatureSpec((), (SparseFeature("tags", "tags", is_list=True),), {"tags": 1}, ("click",))
    tables = DynamicTables(spec, DIM, TablesConfig(), init=0.1, generator=torch.Generator().manual_seed(1))
    lists = [[7, 9], [], [7], [1 << 40, 7, 3, 3]]
    found = tables(JaggedBatch.from_features({"tags": JaggedTensor.from_lists(lists)}))
    tables.eval()
    ids = sorted({one for row in lists for one in row})
    alone = tables(JaggedBatch.from_features({"tags": JaggedTensor.from_lists([[one] for one in ids])}))
    rows = dict(zip(ids, alone[:, 0], strict=True))
    expected = torch.stack([sum((rows[one] for one in row), torch.zeros(DIM)) for row in lists])
    torch.testing.assert_close(found[:, 0], expected)
    assert len({tuple(row.tolist()) for row in rows.values()}) == len(ids)


def test_evaluation_reads_the_shared_row_and_changes_nothing() -> None:
    tables = train(dynamic(rows=EVICTING), range(6))
    before = copy.deepcopy(tables.state_dict())
    tables.eval()
    output = tables(batch(3, scale=-7))
    assert torch.equal(output[:, 1][batch(3).values[12:24] != 0][0], tables.weight.detach()[1])
    for name, tensor in tables.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_evicted_id_begins_anew_with_the_same_numbers() -> None:
    tables = dynamic("adagrad", DynamicRowsConfig(max_age=1, evict_every=1))
    first = JaggedBatch.from_features({name: JaggedTensor.from_lists([[9]]) for name in ("item", "user", "history")})
    initial = tables(first).detach()
    tables(first).sum().backward()
    tables.update()
    assert not torch.equal(tables(first).detach(), initial)
    for _ in range(4):
        other = replace(first, values=first.values + 1)
        tables(other).sum().backward()
        tables.update()
    assert 9 not in tables.ids_of("items").tolist()
    assert torch.equal(tables(first).detach(), initial)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_dict_resumes_bit_for_bit(optimizer: str) -> None:
    straight = train(dynamic(optimizer, EVICTING), range(12))
    first = train(dynamic(optimizer, EVICTING), range(7))
    resumed = dynamic(optimizer, EVICTING, seed=99)
    resumed.load_state_dict(first.state_dict())
    same(straight, train(resumed, range(7, 12)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_deltas_lead_a_copy_to_the_same_bits(optimizer: str) -> None:
    source, replica = train(dynamic(optimizer, EVICTING), range(5)), dynamic(optimizer, EVICTING, seed=0)
    replica.load_state_dict(source.state_dict())
    base = source.step
    for upto in (6, 7, 9, 14, 20):
        train(source, range(source.step, upto))
        if upto == 9:
            source.evict()
        replica.apply_delta(source.delta(base))
        same(source, replica)
        base = source.step
    same(train(source, range(30, 36)), train(replica, range(30, 36)))


def test_a_delta_names_evicted_ids_and_is_smaller_than_the_tables() -> None:
    tables = dynamic(rows=DynamicRowsConfig(max_age=2, evict_every=1))
    train(tables, range(3))
    base, before = tables.step, set(tables.ids_of("items").tolist())
    train(tables, range(20, 26))
    delta = tables.delta(base)
    gone = {
        key
        for key, table in zip(
            delta.tensors["removed_ids"].tolist(), delta.tensors["removed_tables"].tolist(), strict=True
        )
        if table == 0
    }
    assert before - set(tables.ids_of("items").tolist()) <= gone
    assert tables.delta(tables.step).tensors["rows"].numel() == 0


def test_a_lookup_before_an_older_update_is_in_the_delta() -> None:
    tables = train(dynamic(), range(3))
    replica = copy.deepcopy(tables)
    early, late = tables(batch(50)), tables(batch(51))
    late.sum().backward()
    tables.update()
    replica.apply_delta(tables.delta(3))
    early.sum().backward()
    tables.update()
    replica.apply_delta(tables.delta(4))
    same(tables, replica)


def test_wrong_deltas_are_refused() -> None:
    source = train(dynamic(rows=EVICTING), range(5))
    replica = copy.deepcopy(source)
    train(source, range(5, 9))
    delta = source.delta(5)
    before = copy.deepcopy(replica.state_dict())
    wrong = {
        "the tables are at update 5": replace(delta, base=6),
        "changes are of tables": replace(delta, identity={**delta.identity, "seed": 1}),
        "weight of the changed rows": replace(delta, tensors={**delta.tensors, "weight": torch.zeros(1, 1)}),
        "outside the table": replace(delta, tensors={**delta.tensors, "used": torch.tensor([2])}),
        "a tensor is missing": replace(delta, tensors={k: v for k, v in delta.tensors.items() if k != "removed_ids"}),
    }
    for message, bad in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            replica.apply_delta(bad)
        for name, tensor in replica.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    forgetful = train(dynamic(rows=DynamicRowsConfig(keep_removed=2)), range(5))
    with pytest.raises(CheckpointError, match="kept for 2 updates"):
        forgetful.delta(1)


def test_tables_of_any_ids_are_dynamic_and_know_no_number_of_ids() -> None:
    spec = replace(SPEC, tables=dict.fromkeys(SPEC.tables, ANY_ID))
    with pytest.raises(DataError, match=r"any numbers of 63 bits[\s\S]*tables\.dynamic"):
        EmbeddingTables(spec, DIM, TablesConfig())
    with pytest.raises(DataError, match="uniform_by_rows"):
        DynamicTables(spec, DIM, TablesConfig())
    drawn = DynamicTables(spec, DIM, TablesConfig(), init=0.1)
    assert drawn.weight.shape[0] < 2**22  # memory is reserved for a million ids of each table
    few = dynamic(rows=DynamicRowsConfig())
    state = train(few, range(3)).state_dict()
    other = DynamicTables(spec, DIM, few.config, init=0.1, generator=torch.Generator().manual_seed(5))
    other.load_state_dict(state)
    same(train(few, range(3, 6)), train(other, range(3, 6)))


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(DependencyError, match="float32"):
        DynamicTables(SPEC, DIM, TablesConfig(rows="int8"))
    tables = train(dynamic(), range(2))
    with pytest.raises(DependencyError, match="on a CPU"):
        tables.to(torch.float64)
    output = tables(batch(1))
    output.sum().backward()
    for act in (tables.evict, lambda: tables.delta(1)):
        with pytest.raises(TrainingError, match="wait for an update"):
            act()
    state = tables.state_dict()
    state["weight"] = state["weight"][:3]
    with pytest.raises(CheckpointError, match="weight must be"):
        dynamic().load_state_dict(state)
