"""The architecture: published sizes, parity with transformers, and the properties that packing and caching rest on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.attention.documents import document_attention
from cordillera.models.language.checkpoints import load, save_hugging_face
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import PRESETS, Llama, LlamaConfig, document_positions, ffn_width, parameter_count
from cordillera.models.language.rope import RopeScaling, rope_frequencies, rope_table, rotate
from cordillera.models.language.stages import cut_layers

from .conftest import MakeLlama

STRETCHED = RopeScaling(original_context=64)
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "stretched": {"rope_scaling": STRETCHED},
    "tied": {"tied": True, "kv_heads": 4},
    "wide heads": {"head_dim": 16, "kv_heads": 1, "rope_theta": 10_000.0},
}


def _tokens(lengths: list[int], vocabulary: int = 61, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (sum(lengths),), generator=generator)
    return tokens, offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [  # Grattafiori et al. 2024, table 3, and the published files
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_published_sizes_have_their_published_parameters(preset: str, parameters: int) -> None:
    assert parameter_count(PRESETS[preset]) == parameters


@pytest.mark.parametrize("config", [*PRESETS.values(), LlamaConfig(hidden=24, heads=3, kv_heads=1, head_dim=10)])
def test_the_formula_counts_what_the_module_has(config: LlamaConfig) -> None:
    with torch.device("meta"):
        model = Llama(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config)


@pytest.mark.parametrize(
    ("hidden", "multiplier", "multiple_of", "width"),
    [
        (4096, 1.3, 1024, 14336),
        (8192, 1.3, 4096, 28672),
        (16384, 1.2, 4096, 53248),
        (2048, 1.5, 256, 8192),
        (3072, 1.0, 256, 8192),
        (4096, None, 256, 11008),  # Llama 2 7B
    ],
)
def test_the_rule_gives_the_published_widths(
    hidden: int, multiplier: float | None, multiple_of: int, width: int
) -> None:
    assert ffn_width(hidden, multiplier, multiple_of) == width


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden": 100, "heads": 3, "kv_heads": 3}, r"heads \(3\) must divide hidden \(100\)"),
        ({"heads": 32, "kv_heads": 5}, r"kv_heads \(5\) must divide heads \(32\)"),
        ({"hidden": 96, "heads": 32, "kv_heads": 32}, r"width of a head \(3\) must be even"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "llama3"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "belong to longrope, which needs them"),
        ({"rope_scaling": {"short_factor": [1.0], "long_factor": [1.0]}}, "belong to longrope"),
        ({"rotary_dim": 130}, "at most 128"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_slow": 40}}, "below beta_fast"),
        ({"rope_scaling": {"low_freq_factor": 4}}, "below high_freq_factor"),
        ({"norm_eps": math.nan}, "norm_eps"),
        ({"width": 3}, "width"),
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LlamaConfig(**wrong)


@pytest.mark.parametrize("scaling", [None, RopeScaling(), RopeScaling(factor=32.0), STRETCHED])
def test_rotary_frequencies_follow_the_published_formula(scaling: RopeScaling | None) -> None:
    """In double precision and in words: short waves are kept, long ones slowed, those between are blended."""
    config = LlamaConfig(rope_scaling=scaling)
    expected = []
    for pair in range(64):
        frequency = 500_000.0 ** (-2 * pair / 128)
        if scaling is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > scaling.original_context / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength > scaling.original_context / scaling.high_freq_factor:
                smooth = (scaling.original_context / wavelength - 1) / 3
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        expected.append(frequency)
    torch.testing.assert_close(rope_frequencies(config), torch.tensor(expected), rtol=2e-6, atol=0)


@settings(max_examples=40)
@given(a=st.integers(0, 2000), b=st.integers(0, 2000), shift=st.integers(0, 2000), stretched=st.booleans())
def test_scores_depend_on_the_distance_of_positions_only(a: int, b: int, shift: int, stretched: bool) -> None:
    config = LlamaConfig(rope_scaling=RopeScaling() if stretched else None)
    q, k = torch.randn(2, 1, 1, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(a + b)).unbind()

    def score(first: int, second: int) -> Tensor:
        turned = (rotate(x, rope_table(config, torch.tensor([at]))) for x, at in ((q, first), (k, second)))
        return torch.mul(*turned).sum()

    # Angles are float32: at position 4000 they are known to 4000 * 2^-24.
    torch.testing.assert_close(score(a, b), score(a + shift, b + shift), rtol=0, atol=2e-2)
    torch.testing.assert_close(score(a, a), (q * k).sum(), rtol=1e-5, atol=1e-5)


def test_heads_of_16_bits_are_turned_in_32() -> None:
    """Cosines of 16 bits would be wrong in the third digit, at far positions as well as near ones."""
    table = rope_table(LlamaConfig(), torch.tensor([0, 1, 777, 100_000]))
    x = torch.randn(4, 2, 128).bfloat16()
    assert torch.equal(rotate(x, table), rotate(x.float(), table).bfloat16())


@pytest.mark.cases(2)
@pytest.mark.peer
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_logits_equal_those_of_transformers(
    make_llama: MakeLlama, tmp_path: Path, shape: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_llama(dtype, **shape)
    save_hugging_face(model, tmp_path / "ours")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype)
    tokens, offsets = _tokens([40])
    expected = theirs(tokens[None]).logits[0]
    found = model(tokens, offsets)
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    for logits in (expected, found):
        F.cross_entropy(logits[:-1], tokens[1:]).backward()
    gradients = (theirs.model.layers[0].self_attn.k_proj.weight.grad, model.layers[0].attention.key.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=tolerance)

    # And the other way round, from a folder that transformers wrote.
    theirs.save_pretrained(tmp_path / "theirs")
    config, back = load(tmp_path / "theirs", dtype)
    assert config == model.config
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))


_LENGTHS = st.lists(st.sampled_from([0, 1, 2, 2, 5, 9]), min_size=1, max_size=5).filter(lambda ls: sum(ls) > 0)


@settings(max_examples=25)
@given(lengths=_LENGTHS, seed=st.integers(0, 9))
def test_a_document_does_not_feel_its_neighbours(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    model = Llama(PRESETS["llama-debug"].model_copy(update={"layers": 2, "vocabulary": 61})).double()
    tokens, offsets = _tokens(lengths, seed=seed)
    with torch.no_grad():
        packed = model(tokens, offsets)
        alone = [model(part, torch.tensor([0, len(part)])) for part in tokens.split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-10)


def test_other_documents_cannot_be_seen_at_all(make_llama: MakeLlama) -> None:
    """Other tokens before and behind a document leave every bit of its logits as it was."""
    model = make_llama()
    tokens, offsets = _tokens([7, 11, 6])
    other = tokens.clone()
    other[:7] = (other[:7] + 1) % 61
    other[18:] = (other[18:] + 5) % 61
    assert torch.equal(model(tokens, offsets)[7:18], model(other, offsets)[7:18])
    assert not torch.equal(model(tokens, offsets)[:7], model(other, offsets)[:7])


def test_the_loss_of_packed_documents_is_that_of_one_after_the_other(make_llama: MakeLlama) -> None:
    """Weighted by tokens, with gradients; the head runs over the hidden states in chunks."""
    model = make_llama()
    lengths = [9, 1, 0, 14, 14, 5]
    tokens, offsets = _tokens(lengths)
    last = torch.zeros(len(tokens), dtype=torch.bool)
    last[offsets[1:][offsets[1:] > offsets[:-1]] - 1] = True  # nothing follows the last token of a document
    inputs, targets = (~last).nonzero().squeeze(-1), tokens[1:][~last[:-1]]

    hidden = model.hidden(tokens, offsets)[inputs]
    chunks = zip(hidden.split(10), targets.split(10), strict=True)
    packed = sum(F.cross_entropy(model.logits(h), t, reduction="sum") for h, t in chunks) / len(targets)
    packed_gradients = torch.autograd.grad(packed, list(model.parameters()))

    single = torch.zeros(())
    for document in tokens.split(lengths):
        if len(document) > 1:
            logits = model(document, torch.tensor([0, len(document)]))
            single = single + F.cross_entropy(logits[:-1], document[1:], reduction="sum") / len(targets)
    single_gradients = torch.autograd.grad(single, list(model.parameters()))
    torch.testing.assert_close(packed, single, rtol=0, atol=1e-6)
    for a, b in zip(packed_gradients, single_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_grouped_queries_equal_heads_whose_keys_and_values_are_repeated(make_llama: MakeLlama) -> None:
    grouped, full = make_llama(torch.float64, kv_heads=2), make_llama(torch.float64, kv_heads=4)
    weights = dict(grouped.named_parameters())
    with torch.no_grad():
        for name, parameter in full.named_parameters():
            source = weights[name]
            if source.shape != parameter.shape:
                source = source.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
            parameter.copy_(source)
    tokens, offsets = _tokens([12, 3])
    torch.testing.assert_close(grouped(tokens, offsets), full(tokens, offsets), rtol=0, atol=1e-12)


def test_the_core_of_attention_can_be_replaced_from_outside(make_llama: MakeLlama) -> None:
    model = make_llama()
    tokens, offsets = _tokens([5, 4])
    expected = model(tokens, offsets)
    seen = []

    def spy(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), offsets.tolist()))
        return document_attention(q, k, v, offsets)

    for layer in model.layers:
        layer.attention.core = spy
    assert torch.equal(model(tokens, offsets), expected)
    assert seen == [((9, 4, 8), (9, 2, 8), (9, 2, 8), [0, 5, 9])] * 2


def test_positions_restart_in_every_document_and_can_be_given(make_llama: MakeLlama) -> None:
    tokens, offsets = _tokens([3, 0, 4])
    positions = document_positions(offsets)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    model = make_llama()
    assert torch.equal(model(tokens, offsets, positions), model(tokens, offsets))
    stretched = positions * 3  # distances differ, and so must the logits
    assert not torch.allclose(model(tokens, offsets, stretched), model(tokens, offsets), atol=1e-3)


def test_weights_are_drawn_from_the_seed_after_the_meta_device() -> None:
    def made(seed: int) -> Llama:
        with torch.device("meta"):
            model = Llama(PRESETS["llama-debug"])
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.detach().fill_(math.nan)
        model.init_weights(seed)
        return model

    first, again, other = made(1), made(1), made(2)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert not list(first.buffers())  # what to_empty would leave undefined
    tokens, offsets = _tokens([50], vocabulary=2048)
    loss = F.cross_entropy(first(tokens, offsets)[:-1], tokens[1:])
    assert abs(loss.item() - math.log(2048)) < 0.1  # it knows nothing yet
    assert abs(first.layers[0].attention.output.weight.std().item() - 0.02 / math.sqrt(8)) < 5e-4


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_sharded_parameters_are_drawn_as_whole_ones_are() -> None:
    """DTensor's own random numbers would depend on the mesh."""
    whole = Llama(PRESETS["llama-debug"])
    whole.init_weights(1)
    with torch.device("meta"):
        sharded = Llama(PRESETS["llama-debug"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        sharded.to_empty(device="cpu")
        sharded.init_weights(1)
        for a, b in zip(sharded.parameters(), whole.parameters(), strict=True):
            assert isinstance(a, DTensor)
            assert torch.equal(a.full_tensor(), b)
    finally:
        dist.destroy_process_group()


@settings(max_examples=30)
@given(
    calls=st.lists(st.lists(st.sampled_from([0, 1, 1, 2, 5]), min_size=3, max_size=3), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    stretched=st.booleans(),
)
def test_any_pieces_through_the_cache_equal_one_forward(
    calls: list[list[int]], dtype: torch.dtype, stretched: bool
) -> None:
    """Prompts of unequal length, then one token or several or none at a time, in one call for all sequences."""
    torch.manual_seed(0)
    config = PRESETS["llama-debug"].model_copy(
        update={"layers": 2, "vocabulary": 61, "rope_scaling": STRETCHED if stretched else None}
    )
    model = Llama(config).to(dtype)
    totals = [sum(lengths) for lengths in zip(*calls, strict=True)]
    tokens, offsets = _tokens(totals)
    documents = tokens.split(totals)
    with torch.no_grad():
        expected = model(tokens, offsets).split(totals)
        cache = KVCache(config, 3, max(*totals, 1), dtype)
        found: list[list[Tensor]] = [[], [], []]
        done = [0, 0, 0]
        for lengths in calls:
            row = torch.cat([d[a : a + n] for d, a, n in zip(documents, done, lengths, strict=True)])
            logits = model(row, offsets_from_lengths(torch.tensor(lengths)), cache=cache)
            for sequence, part in enumerate(logits.split(lengths)):
                found[sequence].append(part)
            done = [a + n for a, n in zip(done, lengths, strict=True)]
    assert cache.lengths == totals
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for parts, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=tolerance)


def test_a_cut_sequence_goes_on_as_if_the_rest_had_never_been(make_llama: MakeLlama) -> None:
    model = make_llama(torch.float64)
    tokens, _ = _tokens([20])
    with torch.no_grad():
        cache = KVCache(model.config, 1, 20, torch.float64)
        model(tokens[:15], torch.tensor([0, 15]), cache=cache)
        cache.keep([9])
        found = model(tokens[12:16], torch.tensor([0, 4]), cache=cache)
        whole = torch.cat([tokens[:9], tokens[12:16]])
        expected = model(whole, torch.tensor([0, 13]))[9:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    with pytest.raises(DataError, match="cannot cut"):
        cache.keep([14])


def test_a_cache_that_would_overflow_is_left_as_it_was(make_llama: MakeLlama) -> None:
    model = make_llama()
    cache = KVCache(model.config, 2, 6)
    tokens, offsets = _tokens([4, 2])
    model(tokens, offsets, cache=cache)
    with pytest.raises(DataError, match="sequence 0 would hold 7 tokens, there is room for 6"):
        model(tokens[:3], torch.tensor([0, 3, 3]), cache=cache)
    with pytest.raises(DataError, match="1 documents for 2 cached sequences"):
        model(tokens[:3], torch.tensor([0, 3]), cache=cache)
    assert cache.lengths == [4, 2]


@given(stages=st.integers(1, 9), more=st.integers(0, 40))
def test_layers_are_cut_in_order_and_stages_near_the_middle_get_more(stages: int, more: int) -> None:
    layers = stages + more
    cut = cut_layers(layers, stages)
    assert [layer for stage in cut for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in cut]
    assert max(sizes) - min(sizes) <= 1
    distances = {size: [abs(i - (stages - 1) / 2) for i in range(stages) if sizes[i] == size] for size in sizes}
    if len(distances) == 2:
        assert max(distances[max(sizes)]) <= min(distances[min(sizes)])
    assert sizes[-1] <= sizes[0]  # the last also has the head
    assert all(sizes[i] >= sizes[-1 - i] for i in range(stages // 2))
