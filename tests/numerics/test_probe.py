"""A probe sees what layers are given, at the steps at which it looks, and writes it whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cordillera.errors import NumericsError
from cordillera.models.ranking.interactions import MLP
from cordillera.numerics.dispatch.probe import Probe, ProbeConfig, Probed
from cordillera.numerics.dispatch.row_statistics import RowStatistics
from cordillera.numerics.sites import Recorder, replaced, sites
from tests.distributed.processes import needs_gloo, run_processes


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int, rows: int = 64, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [3 + torch.randn(rows, 6, generator=generator) for _ in range(count)]


def test_a_probe_gathers_the_inputs_of_the_steps_at_which_it_looks() -> None:
    net, given = model(), batches(10)
    with Probe(net, ProbeConfig(interval=4)) as probe:
        for batch in given:
            probe.step()
            net(batch)
    expected, hidden = RowStatistics(6), RowStatistics(8)
    for batch in given[::4]:
        expected.update(batch)
        hidden.update(net[1](net[0](batch)))
    assert probe.looks == 3
    assert torch.equal(probe.inputs["0"].covariance(), expected.covariance())
    torch.testing.assert_close(probe.inputs["2"].covariance(), hidden.covariance())
    assert not net[0]._forward_pre_hooks


def test_probing_changes_no_output_and_hears_fused_layers() -> None:
    torch.manual_seed(0)
    net = MLP(6, [16, 8], 1)
    given = batches(3)
    expected = [net(batch) for batch in given]
    with Probe(net, ProbeConfig(interval=1)) as probe:
        for batch, out in zip(given, expected, strict=True):
            probe.step()
            torch.testing.assert_close(net(batch), out)
    assert [one.count for one in probe.inputs.values()] == [192] * 3


def test_many_rows_are_thinned_evenly() -> None:
    net = model()
    probe = Probe(net, ProbeConfig(rows=10))
    probe.step()
    net(batches(1, rows=95)[0])
    assert probe.inputs["0"].count == 10  # every tenth


def test_a_batch_with_nan_is_counted_and_left_out() -> None:
    net, (good, bad) = model(), batches(2)
    bad[3, 3] = float("nan")
    with Probe(net, ProbeConfig(interval=1)) as probe:
        for batch in (good, bad):
            probe.step()
            net(batch)
    assert (probe.inputs["0"].count, probe.inputs["0"].skipped) == (64, 1)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_written_is_read_again(background: bool, tmp_path: Path) -> None:
    net, path = model(), tmp_path / "probe.safetensors"
    with Probe(net, ProbeConfig(interval=1)) as probe:
        for batch in batches(4):
            probe.step()
            net(batch)
        probe.save(path, background)
    found = Probed(path)
    assert found.layers == ["0", "2"]
    for name, one in probe.inputs.items():
        assert torch.equal(found.inputs[name].covariance(), one.covariance())
    assert [path.name for path in tmp_path.iterdir()] == ["probe.safetensors"]


def test_a_stop_and_a_resumption_change_nothing() -> None:
    given = batches(9)

    def gathered(stop: int | None) -> Probe:
        net = model()
        probe = Probe(net, ProbeConfig(interval=2))
        for number, batch in enumerate(given):
            if number == stop:
                state = probe.state_dict()
                probe.close()
                probe = Probe(net, ProbeConfig(interval=2))
                probe.load_state_dict(state)
            probe.step()
            net(batch)
        probe.close()
        return probe

    whole, resumed = gathered(None), gathered(5)
    assert torch.equal(whole.inputs["2"].covariance(), resumed.inputs["2"].covariance())


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="no such file"):
        Probed(tmp_path / "none")
    path = tmp_path / "probe.safetensors"
    with Probe(model()) as probe:
        probe.save(path)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(NumericsError, match="is damaged"):
        Probed(path)
    with pytest.raises(NumericsError, match="could not be written"), Probe(model()) as probe:
        probe.save(tmp_path / "missing" / "probe.safetensors", background=True)


def test_layers_are_chosen_by_patterns() -> None:
    net = model()
    assert list(sites(net)) == ["0", "2"]
    assert list(sites(net, only=["2"])) == ["2"]
    assert list(sites(net, without=["0"])) == ["2"]
    with pytest.raises(NumericsError, match="no linear layer is called 'top'"):
        sites(net, only=["top"])
    tied = nn.Sequential(net[0], net[0])
    assert list(sites(tied)) == ["0"]
    with pytest.raises(NumericsError, match="no linear layer"):
        Probe(nn.ReLU())


def test_modules_return_to_their_places_after_an_error() -> None:
    net = model()
    before = net[0]
    with pytest.raises(TypeError), replaced(net, {"0": nn.Identity()}):  # noqa: PT012
        assert isinstance(net[0], nn.Identity)
        net(None)
    assert net[0] is before


def test_a_recorder_keeps_the_first_rows() -> None:
    net, given = model(), batches(3)
    with Recorder(net, ["2"], most_rows=100) as recorder:
        for batch in given:
            net(batch)
    kept = torch.cat(recorder.inputs["2"])
    assert torch.equal(kept, net[1](net[0](torch.cat(given)))[:100].detach())
    assert not net[2]._forward_pre_hooks


def _gather(rank: int, folder: str) -> dict[str, Any]:
    net = model()
    with Probe(net, ProbeConfig(interval=1)) as probe:
        for batch in batches(4)[rank::2]:
            probe.step()
            net(batch)
        probe.merge()
    return {"covariance": probe.inputs["2"].covariance(), "count": torch.tensor(probe.inputs["2"].count)}


@needs_gloo
def test_ranks_end_with_the_statistics_of_all_samples(tmp_path: Path) -> None:
    ended = run_processes(2, tmp_path, partial(_gather), 120)
    assert len(ended.found) == 2, ended.said
    net = model()
    whole = RowStatistics(8)
    for batch in batches(4):
        whole.update(net[1](net[0](batch)))
    assert torch.equal(ended.found[0]["covariance"], ended.found[1]["covariance"])
    torch.testing.assert_close(ended.found[0]["covariance"], whole.covariance())
    assert int(ended.found[0]["count"]) == whole.count
