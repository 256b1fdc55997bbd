"""The exchange by towers against the rows that it copies and against models of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _dmt_exchange
import pytest
import torch
from _dmt_exchange import counted, flat_exchange, formulas, is_exact, same_bits, uneven
from _virtual_ranks import run_ranks
from torch import Tensor, nn

from cordillera.distributed.collectives import Collectives
from cordillera.distributed.ledger import Ledger
from cordillera.distributed.towers import TowerExchange, TowerLayout
from cordillera.errors import PlanError
from tests.distributed.processes import found_by, needs_gloo

DIM, WIDTH, OUTPUTS = 4, 3, 2


class Tower(nn.Module):
    """A nonlinear module, ``[B, F, D] -> [B, outputs, WIDTH]``, equal on all ranks for one seed."""

    def __init__(self, features: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features * DIM, outputs * WIDTH)
        draw = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            weight.data.normal_(generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)).tanh().unflatten(1, (-1, WIDTH))


class Case:
    """A layout with its samples, embeddings of all of them, towers, and a layer above."""

    def __init__(self, hosts: int, local: int, seed: int = 0) -> None:
        self.layout, self.samples = uneven(hosts, local, seed)
        self.outputs = [OUTPUTS + host % 2 for host in range(hosts)]
        draw = torch.Generator().manual_seed(seed)
        features = sum(map(len, self.layout.features))
        self.whole = torch.randn(sum(self.samples), features, DIM, generator=draw)
        self.above = torch.randn(sum(self.outputs) * WIDTH, generator=draw)

    def tower(self, host: int) -> Tower:
        return Tower(len(self.layout.tower(host)), self.outputs[host], host)

    def mine(self, rank: int) -> slice:
        start = sum(self.samples[:rank])
        return slice(start, start + self.samples[rank])

    def alone(self) -> tuple[Tensor, Tensor, Tensor, dict[int, list[Tensor]]]:
        """Output, gradients of embeddings and of the layer above, and of each tower's weights, in one process."""
        whole, above = self.whole.clone().requires_grad_(), self.above.clone().requires_grad_()
        towers = [self.tower(host) for host in range(self.layout.hosts)]
        output = torch.cat([tower(whole[:, self.layout.tower(i)]) for i, tower in enumerate(towers)], 1)
        (output.flatten(1) @ above).square().sum().backward()
        gradients = {host: [weight.grad for weight in tower.parameters()] for host, tower in enumerate(towers)}
        return output.detach(), whole.grad, above.grad, gradients  # type: ignore[return-value]

    def step(self, links: Collectives) -> dict[str, Any]:
        """What :meth:`alone` returns, as one rank sees it, and its traffic."""
        own, host = list(self.layout.features[links.rank]), links.rank // self.layout.ranks_per_host
        exchange = TowerExchange(self.layout, links, self.tower(host), self.outputs, WIDTH)
        pooled, above = self.whole[:, own].requires_grad_(), self.above.clone().requires_grad_()
        output = exchange(pooled, self.samples)
        (output.flatten(1) @ above).square().sum().backward()
        traffic = counted(links.ledger)
        exchange.sum_gradients()
        assert above.grad is not None
        links.all_reduce("dense gradients", above.grad)
        return {
            "output": output.detach(),
            "embeddings": pooled.grad,
            "above": above.grad,
            "weights": [weight.grad for weight in exchange.parameters()],
            "traffic": traffic,
        }

    def check(self, found: dict[int, dict[str, Any]]) -> None:
        output, embeddings, above, weights = self.alone()
        for rank, one in found.items():
            host, own = rank // self.layout.ranks_per_host, list(self.layout.features[rank])
            torch.testing.assert_close(one["output"], output[self.mine(rank)], rtol=1e-6, atol=1e-6)
            pairs = [(one["embeddings"], embeddings[:, own]), (one["above"], above)]
            for got, expected in (*pairs, *zip(one["weights"], weights[host], strict=True)):
                largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * largest)
            # copies of a tower and of the layer above stay equal
            first = found[self.layout.host_ranks(host)[0]]
            assert all(map(same_bits, one["weights"], first["weights"]))
            assert same_bits(one["above"], found[0]["above"])
            expected = formulas(self.layout, rank, self.samples, DIM, self.outputs, WIDTH)["towers"]
            assert one["traffic"] == expected


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("hosts", "local"), _dmt_exchange.SHAPES)
def test_without_modules_both_exchanges_copy_bits_and_traffic_is_that_of_formulas(
    hosts: int, local: int, seed: int
) -> None:
    found = is_exact(hosts, local, seed)
    assert len(found) == 6
    assert all(found.values()), found


@pytest.mark.parametrize(("hosts", "local"), [(1, 1), (1, 3), (3, 1), (2, 2), (3, 4)])
def test_towers_learn_what_they_learn_in_one_process(hosts: int, local: int) -> None:
    case = Case(hosts, local)
    case.check(dict(enumerate(run_ranks(hosts * local, case.step))))


def test_messages_to_other_hosts_are_fewer_and_bytes_shrink_by_the_compression() -> None:
    layout = TowerLayout.of([range(host * 8, host * 8 + 8) for host in range(8)], 8)
    samples = [4] * 64
    plain = formulas(layout, 9, samples, DIM, [8] * 8, DIM)
    flat, towers = plain["flat"]["embeddings between hosts"], plain["towers"]["outputs of towers between hosts"]
    assert (flat[1], towers[1]) == (56, 7)
    assert flat[0] == towers[0] == 56 * 4 * DIM * 4
    coded = formulas(layout, 9, samples, DIM, [2] * 8, DIM)["towers"]["outputs of towers between hosts"]
    assert 4 * coded[0] == towers[0]


def _real(rank: int, folder: str) -> dict[str, Any]:
    links = Collectives(None, Ledger(), 30.0)
    case = Case(2, 2)
    found = case.step(links)
    own, samples = list(case.layout.features[rank]), case.samples
    for name, exchange in (
        ("flat", lambda pooled: flat_exchange(case.layout, links, pooled, samples)),
        ("towers", lambda pooled: TowerExchange(case.layout, links)(pooled, samples)),
    ):
        links.ledger.clear()
        pooled = case.whole[:, own].requires_grad_()
        output = exchange(pooled)
        output.backward(case.whole[case.mine(rank)].flip(2))
        found[name] = {"output": output.detach(), "gradient": pooled.grad, "traffic": counted(links.ledger)}
    return found


@needs_gloo
def test_two_hosts_of_two_processes_do_as_virtual_ranks(tmp_path: Path) -> None:
    by_rank = found_by(4, tmp_path, _real, 120)
    case = Case(2, 2)
    case.check(by_rank)
    outputs = [len(case.layout.tower(host)) for host in range(2)]
    for rank, found in by_rank.items():
        expected = formulas(case.layout, rank, case.samples, DIM, outputs, DIM)
        for name in ("flat", "towers"):
            assert same_bits(found[name]["output"], case.whole[case.mine(rank)])
            gradient = case.whole.flip(2)[:, list(case.layout.features[rank])]
            assert same_bits(found[name]["gradient"], gradient)
            assert found[name]["traffic"] == expected[name]


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="no feature is in the tower of host 1"):
        TowerLayout.of([[0, 1], []], 2)
    with pytest.raises(PlanError, match="3 ranks cannot be divided over 2 hosts"):
        TowerLayout(2, ((0,), (1,), (2,)))
    for wrong in (((0,), (0,)), ((0,), (2,))):
        with pytest.raises(PlanError, match="features are not on one rank each"):
            TowerLayout(2, wrong)
    with pytest.raises(PlanError, match="0 ranks on a host"):
        TowerLayout.of([[0]], 0)
    assert TowerLayout.of([[2, 0], [1]], 2).features == ((0,), (2,), (), (1,))


def test_an_exchange_that_does_not_fit_its_layout_is_refused() -> None:
    layout = TowerLayout.of([[0, 1]], 1)

    def work(links: Collectives) -> None:
        with pytest.raises(PlanError, match="the layout is of 2 ranks, the job has 1"):
            TowerExchange(TowerLayout.of([[0, 1]], 2), links)
        with pytest.raises(PlanError, match="has to know the outputs of all towers"):
            TowerExchange(layout, links, nn.Identity())
        for wrong in (torch.zeros(3, 1, DIM), torch.zeros(2, 2, DIM)):
            with pytest.raises(PlanError, match=r"expected \[3, 2, D\]"):
                flat_exchange(layout, links, wrong, [3])
        with pytest.raises(PlanError, match=r"tower 0 returned \[3, 2, 4\], expected \[3, 1, 4\]"):
            TowerExchange(layout, links, nn.Identity(), [1], DIM)(torch.zeros(3, 2, DIM), [3])

    run_ranks(1, work)
