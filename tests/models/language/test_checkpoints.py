"""Checkpoints: round trips bit for bit, the layouts' reorderings, and everything that files can have wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from cordillera.errors import CheckpointError, CordilleraError
from cordillera.models.language import checkpoints
from cordillera.models.language.checkpoints import load, open_checkpoint
from cordillera.models.language.checkpoints.source import halves_to_interleaved, interleaved_to_halves
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.rope import RopeScaling, rope_frequencies, rope_table, rotate

from .conftest import MakeLlama


def save_hugging_face(model: Llama, folder: Path, *sizes: int) -> None:
    """As others publish: without checksums."""
    checkpoints.save_hugging_face(model, folder, *sizes)
    (folder / "checksums.json").unlink()


def save_consolidated(model: Llama, folder: Path, *ranks: int) -> None:
    """As others publish: without checksums."""
    checkpoints.save_consolidated(model, folder, *ranks)
    (folder / "checksums.json").unlink()


SHARDED = 20_000  # bytes of a shard; the models here have some 70,000
CUT = {"vocabulary": 64}  # divides by all numbers of ranks used here


def _same(a: Llama, b: Llama) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return a.config == b.config and all(n == m and p.dtype == q.dtype and torch.equal(p, q) for (n, p), (m, q) in pairs)


def _logits(model: Llama) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20), torch.tensor([0, 20]))


@settings(max_examples=20)
@given(heads=st.integers(1, 4), pairs=st.integers(1, 5), hidden=st.integers(1, 4))
def test_the_orders_of_numbers_in_heads_are_each_others_inverse(heads: int, pairs: int, hidden: int) -> None:
    weight = torch.randn(heads, 2 * pairs, hidden)
    back = torch.empty_like(weight)
    interleaved_to_halves(halves_to_interleaved(weight), back)
    assert torch.equal(back, weight)
    # Pair j of a head is numbers 2j and 2j + 1 in one order, j and j + D/2 in the other.
    for j in range(pairs):
        assert torch.equal(halves_to_interleaved(weight)[:, 2 * j], weight[:, j])
        assert torch.equal(halves_to_interleaved(weight)[:, 2 * j + 1], weight[:, pairs + j])


def test_rotation_of_neighbouring_pairs_is_the_reference_codes(make_llama: MakeLlama) -> None:
    """Queries of the stored order, turned as complex numbers, give the scores of ours."""
    config = make_llama().config
    q, k = torch.randn(2, 6, 4, config.head_width, dtype=torch.float64)
    table = rope_table(config, torch.arange(6))
    ours = torch.einsum("thd,shd->hts", rotate(q, table), rotate(k, table))

    turn = torch.polar(torch.ones(6, 4), torch.arange(6.0)[:, None] * rope_frequencies(config))[:, None]
    stored = [halves_to_interleaved(x.permute(1, 2, 0)).permute(2, 0, 1).contiguous() for x in (q, k)]
    turned = [torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2) for x in stored]
    torch.testing.assert_close(torch.einsum("thd,shd->hts", *turned), ours, rtol=0, atol=1e-5)


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tied": True, "rope_scaling": RopeScaling(factor=32.0), "context": 131072},
        {"kv_heads": 4, "ffn": 256, "rope_theta": 10_000.0, "norm_eps": 1e-6},
    ],
    ids=["plain", "tied", "full"],
)
def test_hugging_face_to_consolidated_and_back_keeps_every_bit(
    make_llama: MakeLlama, tmp_path: Path, settings: dict[str, Any], ranks: int, dtype: torch.dtype
) -> None:
    model = make_llama(dtype, **CUT, **settings)
    save_hugging_face(model, tmp_path / "hf", SHARDED)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    config, first = load(tmp_path / "hf", dtype)
    assert config == model.config
    save_consolidated(first, tmp_path / "meta", ranks)
    assert len(list((tmp_path / "meta").glob("*.pth"))) == ranks
    _, second = load(tmp_path / "meta", dtype, threads=1)
    save_hugging_face(second, tmp_path / "again", SHARDED)
    assert _same(first, model)
    assert _same(second, model)
    for name in os.listdir(tmp_path / "hf"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_ranks_hold_the_parts_that_the_reference_code_reads(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama(**CUT)
    save_consolidated(model, tmp_path / "meta", 2)
    ranks = [torch.load(tmp_path / "meta" / f"consolidated.0{i}.pth", weights_only=True) for i in range(2)]
    block = model.layers[1]
    for dim, theirs, ours in (
        (0, "tok_embeddings.weight", model.embedding),
        (0, "output.weight", model.head),
        (0, "layers.1.attention.wv.weight", block.attention.value),
        (1, "layers.1.attention.wo.weight", block.attention.output),
        (0, "layers.1.feed_forward.w1.weight", block.feed_forward.gate),
        (1, "layers.1.feed_forward.w2.weight", block.feed_forward.down),
        (0, "layers.1.feed_forward.w3.weight", block.feed_forward.up),
    ):
        assert ours is not None
        assert torch.equal(torch.cat([rank[theirs] for rank in ranks], dim), ours.weight)
    assert torch.equal(ranks[1]["layers.1.ffn_norm.weight"], block.feed_forward_norm.weight)
    wq = torch.cat([rank["layers.1.attention.wq.weight"] for rank in ranks])
    query = block.attention.query.weight
    assert torch.equal(wq[8:16:2], query[8:12])  # head 1: first numbers of pairs
    assert torch.equal(wq[9:16:2], query[12:16])
    assert (tmp_path / "meta" / "consolidated.00.pth").stat().st_size < 0.7 * sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_llama_2_has_4096_tokens_and_embeddings_that_are_cut_by_width(
    make_llama: MakeLlama, tmp_path: Path, ranks: int
) -> None:
    """Its params.json has no rope_theta, and fairscale's ParallelEmbedding divides the width."""
    model, folder = make_llama(**CUT, rope_theta=10_000.0), tmp_path / "meta"
    save_consolidated(model, folder, ranks)
    params = json.loads((folder / "params.json").read_text())
    absent = ("rope_theta", "context_length")
    content = {**{key: value for key, value in params.items() if key not in absent}, "vocab_size": -1}
    (folder / "params.json").write_text(json.dumps(content))
    for number in range(ranks):
        file = folder / f"consolidated.0{number}.pth"
        rank = torch.load(file, weights_only=True)
        rank["tok_embeddings.weight"] = model.embedding.weight.detach().chunk(ranks, 1)[number].contiguous()
        file.unlink()
        torch.save(rank, file)
    config, back = load(folder)
    assert (config.context, config.vocabulary) == (4096, model.config.vocabulary)
    assert all(torch.equal(one, back.state_dict()[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("counted", ["copies", "heads"])
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 2, 8), (8, 2, 4), (6, 2, 6), (4, 1, 2)])
def test_more_ranks_than_heads_of_keys_hold_copies(
    make_llama: MakeLlama, tmp_path: Path, heads: int, kv_heads: int, ranks: int, counted: str
) -> None:
    """As 405B for 16 ranks, whose params.json counts the copies; other writers count the heads."""
    model = make_llama(vocabulary=96, hidden=8 * heads, heads=heads, kv_heads=kv_heads)
    save_consolidated(model, tmp_path / "meta", ranks)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert params["n_kv_heads"] == ranks
    if counted == "heads":
        (tmp_path / "meta" / "params.json").write_text(json.dumps({**params, "n_kv_heads": kv_heads}))
    _, back = load(tmp_path / "meta")
    assert _same(back, model)


def test_one_head_a_rank_is_no_copy_when_heads_differ(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama(**CUT, kv_heads=4)
    save_consolidated(model, tmp_path / "meta", 4)
    assert load(tmp_path / "meta")[0].kv_heads == 4


def test_a_tied_head_may_be_left_out_or_stand_there_again(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama(**CUT, tied=True)
    save_consolidated(model, tmp_path / "meta")
    path = tmp_path / "meta" / "consolidated.00.pth"
    tensors = torch.load(path, weights_only=True)
    assert torch.equal(tensors.pop("output.weight"), model.embedding.weight)
    torch.save(tensors, path)
    assert _same(load(tmp_path / "meta")[1], model)

    save_hugging_face(model, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": model.embedding.weight.detach().clone()}, path)
    assert _same(load(tmp_path / "hf")[1], model)
    save_file({**tensors, "lm_head.weight": model.embedding.weight.detach() + 1}, path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding"):
        load(tmp_path / "hf")


def test_published_params_without_their_defaults_are_understood(make_llama: MakeLlama, tmp_path: Path) -> None:
    """``vocab_size`` -1 as in Llama 2, scaled positions without a factor as in 3.1 and (tied) 3.2."""
    for tied, factor in ((False, 8.0), (True, 32.0)):
        model = make_llama(**CUT, tied=tied, rope_scaling=RopeScaling(factor=factor), context=131072)
        folder = tmp_path / f"{tied}"
        save_consolidated(model, folder)
        params = json.loads((folder / "params.json").read_text())
        kept = {
            key: value for key, value in params.items() if not key.startswith("rope_sc") and key != "context_length"
        }
        (folder / "params.json").write_text(json.dumps({**kept, "vocab_size": -1}))
        assert _same(load(folder)[1], model)


def test_weights_are_cast(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama()
    save_hugging_face(model, tmp_path / "hf")
    _, half = load(str(tmp_path / "hf"), torch.bfloat16)
    for a, b in zip(half.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())


def test_a_checkpoint_is_whole_or_not_there(
    make_llama: MakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama(**CUT)
    written: list[Path] = []

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        if written:
            raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file")
        written.append(path)
        path.write_bytes(b"something")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_consolidated(model, tmp_path / "meta", 2)
    assert written
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    save_consolidated(model, tmp_path / "meta", 2)
    for save in (save_consolidated, save_hugging_face):
        with pytest.raises(CheckpointError, match="is not empty"):
            save(model, tmp_path / "meta")
    with pytest.raises(CheckpointError, match=r"3 ranks do not divide heads \(4\)"):
        save_consolidated(model, tmp_path / "other", 3)
    with pytest.raises(CheckpointError, match="cannot hold heads of width 16"):
        save_consolidated(make_llama(head_dim=16), tmp_path / "other")


# What files can have wrong. Each case damages a good folder; the error must name the file, and the tensor if it is one.

Damage = Callable[[Path], object]


def _edit_json(name: str, **changes: Any) -> Damage:
    """Set keys of a JSON file; a value of ``...`` takes the key away."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        content = {key: value for key, value in {**content, **changes}.items() if value is not ...}
        (folder / name).write_text(json.dumps(content))

    return damage


def _edit_tensors(name: str, change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        if path.suffix == ".pth":
            tensors = torch.load(path, weights_only=True)
            change(tensors)
            path.unlink()
            torch.save(tensors, path)
        else:
            tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
            change(tensors)
            path.unlink()
            save_file(tensors, path)

    return damage


def _put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name]).contiguous()

    return change


def _truncate(name: str) -> Damage:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size - 1000)

    return damage


def _remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def _rope(**rope: Any) -> Damage:
    return _edit_json("config.json", rope_scaling=rope)


def _index_names_absent(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00005.safetensors"
    path.write_text(json.dumps(index))


def _index_points_outside(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    path.write_text(json.dumps(index))


def _only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _cut_heads(folder: Path) -> None:
    """Four ranks for two heads of keys, without copies."""
    ranks = [torch.load(folder / f"consolidated.0{i}.pth", weights_only=True) for i in range(2)]
    for i in range(4):
        cut = {
            name: tensor
            if tensor.dim() == 1
            else tensor.chunk(2, int(name.endswith(("wo.weight", "w2.weight"))))[i % 2]
            for name, tensor in ranks[i // 2].items()
        }
        (folder / f"consolidated.0{i}.pth").unlink(missing_ok=True)
        torch.save(cut, folder / f"consolidated.0{i}.pth")


K_PROJ, NORM = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight"
SHARD, INDEX = "model-00002-of-00005.safetensors", "model.safetensors.index.json"

SINGLE_CASES: dict[str, tuple[Damage, str]] = {
    "file missing": (_remove("model.safetensors"), "hf: there is no .safetensors file"),
    "only pickled": (_only_pickled, "pytorch_model.bin may hold code"),
    "truncated": (_truncate("model.safetensors"), "model.safetensors: is truncated or damaged"),
    "config missing": (_remove("config.json"), "holds no config.json"),
    "config no json": (lambda f: (f / "config.json").write_text("{"), "config.json: is not JSON"),
    "config too deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json: .* nested too deeply"),
    "config no object": (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
    "config key missing": (
        _edit_json("config.json", hidden_size=...),
        r"(?s)config.json: hidden_size is missing.*damaged: download",
    ),
    "other model": (_edit_json("config.json", model_type="gemma"), "model_type is 'gemma'"),
    "absurd layers": (_edit_json("config.json", num_hidden_layers=10**9), "config.json: layers: .* 1000000000"),
    "quantised": (_edit_json("config.json", quantization_config={"bits": 4}), r"(?s)quantization_config.*GGUF format"),
    "biases": (_edit_json("config.json", attention_bias=True), "attention_bias is True"),
    "kv heads": (_edit_json("config.json", num_key_value_heads=3), r"kv_heads \(3\) must divide heads \(4\)"),
    "heads": (_edit_json("config.json", num_attention_heads=3, head_dim=..., num_key_value_heads=3), r"heads \(3\)"),
    "unknown rope": (_rope(rope_type="ntk", factor=2.0), "config.json: rope_type 'ntk' is not known"),
    "unknown old rope": (_rope(type="dynamic", factor=2.0), "rope_type 'dynamic' is not known"),
    "rope key missing": (_rope(rope_type="llama3", factor=8.0), "config.json: low_freq_factor is missing"),
    "tied head absent": (
        _edit_tensors("model.safetensors", lambda t: t.pop("lm_head.weight")),
        "tensor lm_head.weight is not there\n  -> set tie_word_embeddings",
    ),
    "tensor absent": (_edit_tensors("model.safetensors", lambda t: t.pop(K_PROJ)), f"tensor {K_PROJ} is not there"),
    "wrong shape": (
        _edit_tensors("model.safetensors", _put(K_PROJ, lambda t: t[:8])),
        rf"model.safetensors: tensor {K_PROJ} has shape \(8, 32\), the configuration makes it \(16, 32\)",
    ),
    "dtype mix": (
        _edit_tensors("model.safetensors", _put(K_PROJ, Tensor.bfloat16)),
        f"tensor {K_PROJ} is torch.bfloat16 among torch.float32",
    ),
    "eight bits": (
        _edit_tensors("model.safetensors", _put(K_PROJ, lambda t: t.to(torch.float8_e4m3fn))),
        f"tensor {K_PROJ} is F8_E4M3",
    ),
    "stranger": (
        _edit_tensors("model.safetensors", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[NORM] + 0})),
        "tensor model.layers.0.self_attn.q_proj.bias .* has no place",
    ),
    "nan": (
        _edit_tensors("model.safetensors", _put(NORM, lambda t: t * float("nan"))),
        f"tensor {NORM} holds NaN or infinity",
    ),
}

SHARDED_CASES: dict[str, tuple[Damage, str]] = {
    "shard missing": (_remove(SHARD), f"{SHARD}: is missing; {INDEX} says that it holds"),
    "shard truncated": (_truncate(SHARD), f"{SHARD}: is truncated"),
    "index missing": (_remove(INDEX), f"{INDEX} is missing beside 5 files"),
    "index empty": (_edit_json(INDEX, weight_map=...), "weight_map does not give a file"),
    "index names absent tensor": (
        _index_names_absent,
        "model-00001-of-00005.safetensors: tensor model.norm.weight is not there",
    ),
    "index points outside": (_index_points_outside, "outside of the folder"),
}

FIRST, SECOND, WK = "consolidated.00.pth", "consolidated.01.pth", "layers.1.attention.wk.weight"

CONSOLIDATED_CASES: dict[str, tuple[Damage, str]] = {
    "rank missing": (_remove(FIRST), f"{FIRST}: is missing"),
    "last rank missing": (
        _remove(SECOND),
        r"consolidated.00.pth: tensor tok_embeddings.weight has shape \(32, 32\).*\n.*files are missing",
    ),
    "truncated": (_truncate(SECOND), f"{SECOND}: is truncated or damaged"),
    "code": (lambda f: torch.save({"a": os.path.join}, f / SECOND), f"{SECOND}: holds more than tensors, perhaps code"),
    "no dictionary": (lambda f: torch.save(torch.ones(3), f / SECOND), f"{SECOND}: does not hold tensors by name"),
    "params missing": (_remove("params.json"), "holds no config.json"),
    "params key missing": (_edit_json("params.json", n_heads=...), "params.json: n_heads is missing"),
    "heads": (_edit_json("params.json", n_heads=5), r"params.json: n_heads \(5\) does not divide dim \(32\)"),
    "kv heads": (_edit_json("params.json", n_kv_heads=3), r"kv_heads \(3\) must divide heads \(4\)"),
    "no multiplier": (
        _edit_json("params.json", ffn_dim_multiplier=...),
        r"tensor layers.0.feed_forward.w1.weight has shape \(24, 32\).*\n.*no ffn_dim_multiplier",
    ),
    "heads cut in two": (_cut_heads, r"tensor layers.0.attention.wk.weight of shape \(16, 32\) cannot .* for 4 ranks"),
    "not a number": (_edit_json("params.json", dim="wide"), "params.json: invalid literal"),
    "tensor absent": (_edit_tensors(SECOND, lambda t: t.pop(WK)), f"{SECOND}: tensor {WK} is not there"),
    "wrong shape": (_edit_tensors(SECOND, _put(WK, lambda t: t[:4])), f"{SECOND}: tensor {WK} has shape"),
    "dtype mix": (
        _edit_tensors(SECOND, _put(WK, Tensor.half)),
        f"{SECOND}: tensor {WK} is torch.float16 among torch.float32",
    ),
    "rank of another dtype": (
        _edit_tensors(SECOND, lambda t: t.update({k: v.bfloat16() for k, v in t.items()})),
        f"{SECOND}: tensor .* differs from that of {FIRST}",
    ),
    "rank of another model": (
        _edit_tensors(SECOND, _put("layers.0.ffn_norm.weight", lambda t: t + 1)),
        f"{SECOND}: tensor layers.0.ffn_norm.weight differs from that of {FIRST}",
    ),
    "integers": (
        _edit_tensors(SECOND, _put(WK, Tensor.char)),
        f"{SECOND}: tensor {WK} is torch.int8, which needs scales",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in three layouts."""
    root = tmp_path_factory.mktemp("good")
    model = Llama(LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=64))
    save_hugging_face(model, root / "single")
    save_hugging_face(model, root / "sharded", SHARDED)
    save_consolidated(model, root / "consolidated", 2)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    ("layout", "damage", "said"),
    [
        pytest.param(layout, *case, id=f"{layout}: {name}")
        for layout, cases in (
            ("single", SINGLE_CASES),
            ("sharded", SHARDED_CASES),
            ("consolidated", CONSOLIDATED_CASES),
        )
        for name, case in cases.items()
    ],
)
def test_what_is_wrong_is_said_before_work_starts(
    good: dict[str, Path], tmp_path: Path, layout: str, damage: Damage, said: str
) -> None:
    shutil.copytree(good[layout], tmp_path / "hf")
    damage(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "hf")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("layout", ["sharded", "consolidated"])
def test_damaged_bytes_never_end_in_another_error(good: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """Flipped bytes are refused, or change nothing but values."""
    draw = random.Random(layout)
    refused = 0
    for number in range(60):
        folder = shutil.copytree(good[layout], tmp_path / str(number))
        file = draw.choice(sorted(folder.iterdir()))
        content = bytearray(file.read_bytes())
        for _ in range(3):  # most of what is not values lies at the beginning, or at the end
            place = draw.randrange(min(len(content), 800))
            content[draw.choice([place, -1 - place])] = draw.choice(b"09-{\x00\xff")
        file.write_bytes(content)
        try:
            load(folder)
        except CordilleraError:
            refused += 1
    assert refused > 20


def test_copies_that_differ_are_refused(make_llama: MakeLlama, tmp_path: Path) -> None:
    save_consolidated(make_llama(**CUT), tmp_path / "meta", 4)
    _edit_tensors("consolidated.03.pth", _put(WK, lambda t: t + 1))(tmp_path / "meta")
    with pytest.raises(CheckpointError, match=rf"copies of head 1 of tensor {WK} differ"):
        load(tmp_path / "meta")


@pytest.mark.cases(6)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kinds", [("wk",), ("wv",), ("wk", "wv")])
@pytest.mark.parametrize(("kv_heads", "rank"), [(2, 3), (2, 1), (1, 2)])
def test_copies_that_differ_are_never_taken_for_heads_of_their_own(
    make_llama: MakeLlama, tmp_path: Path, layer: int, kinds: tuple[str, ...], kv_heads: int, rank: int
) -> None:
    """Files that count copies as heads do not say which heads are copies: the others do."""
    save_consolidated(make_llama(**CUT, kv_heads=kv_heads), tmp_path / "meta", 4)
    for kind in kinds:
        name = f"layers.{layer}.attention.{kind}.weight"
        _edit_tensors(f"consolidated.0{rank}.pth", _put(name, lambda t: t + 1))(tmp_path / "meta")
    with pytest.raises(CheckpointError, match=r"are copies, others|copies of head . of tensor .* differ"):
        load(tmp_path / "meta")


def test_weights_that_overflow_in_the_wanted_dtype_are_refused(make_llama: MakeLlama, tmp_path: Path) -> None:
    model = make_llama()
    with torch.no_grad():
        model.layers[0].feed_forward.up.weight[0, 0] = 1e5
    save_hugging_face(model, tmp_path / "hf")
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN or infinity as torch.float16"
    ):
        load(tmp_path / "hf", torch.float16)


def test_mistrals_own_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text('{"dim": 8, "n_layers": 1, "head_dim": 4, "hidden_dim": 8, "n_heads": 2}')
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)Mistral's own layout.*in Hugging Face's layout"):
        open_checkpoint(tmp_path)


def test_a_path_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for path, said in (
        (tmp_path / "absent", "there is nothing here"),
        (tmp_path, "holds no config.json, params.json or .gguf file"),
        (tmp_path / "weights.bin", "is not a GGUF file"),
    ):
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(path)


# GGUF: files written by the library that llama.cpp publishes, from the definition of its layout.


def write_gguf(model: Llama, path: Path, **changes: Any) -> Path:
    gguf = pytest.importorskip("gguf")
    config, kind = model.config, changes.pop("kind", "F32")
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(changes.pop("kv_heads", config.kv_heads))
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if "split" in changes:
        writer.add_uint16("split.count", changes.pop("split"))
    if "scaling" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType(changes.pop("scaling")))
    for key, value in changes.pop("fields", {}).items():
        writer.add_float32(f"llama.{key}", value)
    tensors: dict[str, Tensor] = {"token_embd": model.embedding.weight, "output_norm": model.norm.weight}
    if model.head is not None:
        tensors["output"] = model.head.weight
    for i, block in enumerate(model.layers):
        attention, ffn = block.attention, block.feed_forward
        tensors |= {
            f"blk.{i}.attn_norm": block.attention_norm.weight,
            f"blk.{i}.attn_q": halves_to_interleaved(attention.query.weight.unflatten(0, (-1, 8))).flatten(0, 1),
            f"blk.{i}.attn_k": halves_to_interleaved(attention.key.weight.unflatten(0, (-1, 8))).flatten(0, 1),
            f"blk.{i}.attn_v": attention.value.weight,
            f"blk.{i}.attn_output": attention.output.weight,
            f"blk.{i}.ffn_norm": block.feed_forward_norm.weight,
            f"blk.{i}.ffn_gate": ffn.gate.weight,
            f"blk.{i}.ffn_up": ffn.up.weight,
            f"blk.{i}.ffn_down": ffn.down.weight,
        }
    if config.rope_scaling is not None:
        plain = rope_frequencies(config.model_copy(update={"rope_scaling": None}))
        tensors["rope_freqs"] = plain / rope_frequencies(config) * changes.pop("stretch", 1.0)
    tensors |= changes.pop("tensors", {})
    assert not changes
    for name, tensor in tensors.items():
        values = tensor.detach().float().numpy()
        if kind != "F32" and values.ndim == 2:
            chosen = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("settings", [{}, {"tied": True, "rope_scaling": RopeScaling(factor=32.0)}], ids=["3", "3.2"])
def test_gguf_holds_the_same_model(make_llama: MakeLlama, tmp_path: Path, settings: dict[str, Any]) -> None:
    model = make_llama(**settings)
    _, back = load(write_gguf(model, tmp_path / "model.gguf"))
    assert _same(back, model)
    assert _same(load(tmp_path)[1], model)  # the only one in a folder


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_of_positions_without_a_type_is_linear(make_llama: MakeLlama, tmp_path: Path, key: str) -> None:
    for factor, expected in ((4.0, RopeScaling(rope_type="linear", factor=4.0)), (1.0, None)):
        path = write_gguf(make_llama(), tmp_path / "model.gguf", fields={key: factor})
        assert load(path)[0].rope_scaling == expected


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 1e-2), ("Q4_0", 0.15)])
def test_quantised_gguf_is_dequantised(make_llama: MakeLlama, tmp_path: Path, kind: str, error: float) -> None:
    model = make_llama(ffn=64)
    _, back = load(write_gguf(model, tmp_path / "model.gguf", kind=kind), torch.float32)
    for a, b in zip(back.parameters(), model.parameters(), strict=True):
        assert (a - b).abs().max() <= error * b.abs().max()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "gemma"}, "the architecture is 'gemma'"),
        ({"kv_heads": [2, 2]}, "field llama.attention.head_count_kv is damaged"),
        ({"split": 3}, "is one of 3 files of a split model"),
        ({"scaling": "longrope"}, "rope_type 'longrope' is not known"),
        ({"kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ({"stretch": 1.5}, "rope_freqs.weight stretches"),
        ({"tensors": {"blk.0.attn_k": torch.ones(8, 32)}}, r"tensor blk.0.attn_k.weight has shape \(8, 32\)"),
        ({"tensors": {"blk.0.attn_q_norm": torch.ones(8)}}, "tensor blk.0.attn_q_norm.weight .* has no place"),
    ],
)
def test_what_is_wrong_in_gguf_is_said(
    make_llama: MakeLlama, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    model = make_llama(rope_scaling=RopeScaling())
    with pytest.raises(CheckpointError, match=said):
        load(write_gguf(model, tmp_path / "model.gguf", **changes))


def test_a_kind_of_tensor_that_the_library_does_not_know_is_no_damage(make_llama: MakeLlama, tmp_path: Path) -> None:
    path = write_gguf(make_llama(), tmp_path / "model.gguf")
    content = path.read_bytes()
    place = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8  # after two dimensions
    path.write_bytes(content[:place] + b"\x1f\0\0\0" + content[place + 4 :])
    with pytest.raises(
        CheckpointError, match=r"(?s)attn_q.weight is of kind 31, which is not known.*update the library"
    ):
        load(path)


def test_gguf_cut_anywhere_is_refused(make_llama: MakeLlama, tmp_path: Path) -> None:
    path = write_gguf(make_llama(), tmp_path / "model.gguf")
    whole = path.read_bytes()
    for size in (0, 3, 20, 100, 700, 1500, len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(CordilleraError, match=r"model\.gguf: is truncated, damaged or not GGUF"):
            load(path)


@pytest.mark.slow
def test_loading_a_checkpoint_imports_no_compiler(make_llama: MakeLlama, tmp_path: Path) -> None:
    save_hugging_face(make_llama(), tmp_path / "model")
    program = """
import sys, torch
from cordillera.models.language.checkpoints import load
config, model = load(sys.argv[1], torch.bfloat16)
assert all(parameter.dtype == torch.bfloat16 and parameter.requires_grad for parameter in model.parameters())
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
