"""Operations of training against a count of every product that a model makes, and against published figures."""

from __future__ import annotations

import inspect
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cordillera.models.language import flops
from cordillera.models.language.flops import flops_per_token, peak_flops, training_flops
from cordillera.models.language.llama import PRESETS, Llama, LlamaConfig

GROUPED = LlamaConfig(layers=2, hidden=12, heads=4, kv_heads=2, head_dim=6, ffn=10, vocabulary=14, context=32)
TIED = LlamaConfig(layers=1, hidden=8, heads=2, kv_heads=2, ffn=12, vocabulary=11, context=32, tied=True)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Attention of each token to those it may see and no others, without a mask: no product is made in vain."""
    group, out = q.shape[1] // k.shape[1], []
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for token in range(first, last):
            keys, values = (x[first : token + 1].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
            scores = torch.bmm(q[token][:, None], keys.transpose(1, 2))  # [H, 1, seen]
            out.append(torch.bmm(scores.softmax(-1), values)[:, 0])
    return torch.stack(out)


def counted(config: LlamaConfig, lengths: list[int]) -> int:
    """By torch, of every product of a forward and a backward."""
    model = Llama(config)
    for layer in model.layers:
        layer.attention.core = one_by_one  # type: ignore[union-attr]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(sum(lengths), dtype=torch.int64), offsets).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [GROUPED, TIED], ids=["grouped", "tied"])
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=3).filter(any))
@settings(max_examples=10)
def test_every_product_is_counted(config: LlamaConfig, lengths: list[int]) -> None:
    assert training_flops(config, lengths) == counted(config, lengths)


def test_a_packed_document_costs_what_it_costs_alone() -> None:
    config = PRESETS["llama3-8b"]
    assert training_flops(config, [4096, 4096]) == 2 * training_flops(config, [4096])
    assert training_flops(config, [4096, 4096]) < training_flops(config, [8192])
    assert training_flops(config, []) == 0


def test_llama_405b_takes_the_published_operations() -> None:
    # Grattafiori et al. 2024, section 1: 15.6T tokens, 3.8 x 10^25 operations
    assert 3.75e25 < flops_per_token(PRESETS["llama3.1-405b"]) * 15.6e12 < 3.85e25


@pytest.mark.parametrize(("teraflops", "percent"), [(430, 43), (400, 41), (380, 38)])
def test_utilisation_is_the_published_one(monkeypatch: pytest.MonkeyPatch, teraflops: int, percent: int) -> None:
    # Grattafiori et al. 2024, table 4; operations a second are rounded to tens
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    peak = peak_flops("cuda")
    assert peak is not None
    assert peak.source == "published"
    least, most = (100 * (teraflops + error) * 1e12 / peak.flops_per_s for error in (-5, 5))
    assert least < percent + 0.5
    assert most > percent - 0.5


def test_every_known_accelerator_is_in_a_shipped_cluster() -> None:
    for name in flops._CALLED:
        assert flops._published(name, torch.float16) is not None


def test_a_peak_that_is_not_known_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    assert peak_flops("cuda") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops("cuda") is not None
    assert peak_flops("cuda", torch.float32) is None
    assert peak_flops("meta") is None


@pytest.fixture
def _measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_rate_of_thread", inspect.unwrap(flops._rate_of_thread))


@pytest.mark.usefixtures("_measured_anew")
def test_a_processor_is_measured() -> None:
    peak = peak_flops("cpu", torch.float32)
    assert peak is not None
    assert peak.source == "measured"
    assert 1e8 < peak.flops_per_s < 1e15


@pytest.mark.usefixtures("_measured_anew")
def test_waiting_for_a_busy_processor_does_not_lower_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, product = peak_flops("cpu", torch.float32), torch.mm
    assert quiet is not None

    def late(*factors: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return product(*factors)

    monkeypatch.setattr(torch, "mm", late)
    busy = peak_flops("cpu", torch.float32)
    assert busy is not None
    assert busy.flops_per_s > quiet.flops_per_s / 3  # half of it, where a neighbour takes the core's other thread
