"""Mistral, Qwen2, Qwen3, Phi and scaled positions: logits of transformers and llama.cpp, and back bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import CheckpointError
from cordillera.models.language.checkpoints import (
    load,
    open_checkpoint,
    read_model,
    save_consolidated,
    save_gguf,
    save_hugging_face,
)
from cordillera.models.language.checkpoints.gguf_file import GGUFFile
from cordillera.models.language.llama import Llama, LlamaConfig, parameter_count
from cordillera.models.language.rope import RopeScaling, rope_frequencies, rope_table
from cordillera.serving.language.generation import for_decoding, generate
from cordillera.serving.language.sampler import Sampling
from cordillera.workflows import convert
from tests.data import vocabularies as v

SHAPES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 24, "rope_theta": 1e4,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.25, 1.3], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.5, 6.0],
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 32}),
    "mistral-wide": ("Mistral", {"head_dim": 24, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 0}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 8, "attention_factor": 1.3}}),
    "qwen3-experts": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 48}),
    "phi3-long": (
        "Phi3",
        {"rope_parameters": {**LONG, "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 24},
    ),
    "phi3-part": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "beta_slow": 2.0}}),
}
CONTEXTS = {"mistral": 32, "qwen2-window": 40, "phi3": 48}


def theirs(family: str, seed: int = 0) -> Any:
    """A model of transformers whose weights, biases and norms are drawn."""
    transformers = pytest.importorskip("transformers")
    name, settings = FAMILIES[family]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SHAPES, **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if "norm" in family else 0.0, 0.2)
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.add_(1.0)
    return model.to(dtype_of(family)).eval()


def dtype_of(family: str) -> torch.dtype:
    """Of experts, transformers multiplies no float64."""
    return torch.float32 if "experts" in family else torch.float64


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        if isinstance(model, Llama):
            return model(tokens, torch.tensor([0, len(tokens)]))
        found: Tensor = model(tokens[None]).logits[0]
        return found


def tokens_of(count: int) -> Tensor:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.cases(5)
@pytest.mark.peer
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_and_the_folder_comes_back(tmp_path: Path, family: str) -> None:
    transformers, dtype = pytest.importorskip("transformers"), dtype_of(family)
    model = theirs(family)
    model.save_pretrained(tmp_path / "theirs")
    config, ours = load(tmp_path / "theirs", dtype)
    assert config.context == CONTEXTS.get(family, 64)
    biases = 0 if config.experts is None else config.layers * config.experts.count  # of routers, here
    assert parameter_count(config) == biases + sum(parameter.numel() for parameter in model.parameters())
    tokens = tokens_of(config.context)
    expected = logits(model, tokens)
    assert expected.std() > 0.3
    error = (1e-10 if dtype == torch.float64 else 3e-5) * float(expected.abs().max())
    torch.testing.assert_close(logits(ours, tokens), expected, rtol=0, atol=error)

    save_hugging_face(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype).eval()
    torch.testing.assert_close(logits(again, tokens), expected, rtol=0, atol=error)
    back, second = load(tmp_path / "ours", dtype)
    assert back == config
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), second.parameters(), strict=True))


def config_of(**more: Any) -> LlamaConfig:
    shapes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "context": 64, "vocabulary": 1000}
    return LlamaConfig.model_validate({**shapes, **more})


def drawn(config: LlamaConfig) -> Llama:
    model = Llama(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("router.bias"):
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True, "tied": True},
    "qwen3": {"head_norms": True, "head_dim": 32},
    "mixtral": {"experts": {"count": 6, "chosen": 2}},
    "qwen3-experts": {"experts": {"count": 5, "chosen": 3}, "head_norms": True},
    "linear": {"rope_scaling": RopeScaling(rope_type="linear", factor=3.0)},
    "yarn": {"attention_bias": True, "rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, original_context=16)},
    "amplified": {"rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, original_context=16, attention_factor=1.5)},
    "phi3-part": {"rotary_dim": 10, "tied": True},
    "phi3-long": {
        "rotary_dim": 12,
        "rope_scaling": RopeScaling(
            rope_type="longrope",
            factor=2.0,
            original_context=32,
            short_factor=(1.0, 1.05, 1.1, 1.2, 1.25, 1.3),
            long_factor=(1.0, 1.5, 2.0, 3.0, 4.5, 6.0),
        ),
    },
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", [None, "q8_0", "q4_1"])
def test_gguf_holds_every_style(tmp_path: Path, style: str, kind: str | None) -> None:
    config = config_of(**STYLES[style])
    model = drawn(config)
    save_gguf(model, tmp_path / "one.gguf", kind)
    back, ours = load(tmp_path / "one.gguf")
    expected = config
    if (scaling := config.rope_scaling) is not None:
        unused = {"original_context": 8192} if scaling.rope_type == "linear" else {}
        kept = scaling.model_copy(update={"attention_factor": back.rope_scaling.attention_factor, **unused})  # type: ignore[union-attr]
        assert kept.amplitude == pytest.approx(scaling.amplitude, rel=1e-6)
        expected = config.model_copy(update={"rope_scaling": kept})
    assert back == expected
    for a, b in zip(ours.parameters(), model.parameters(), strict=True):
        assert (a - b).abs().max() <= {None: 0, "q8_0": 0.02, "q4_1": 0.2}[kind] * b.abs().max()


@pytest.mark.peer
@pytest.mark.parametrize("style", STYLES)
def test_llama_cpp_computes_the_same(tmp_path: Path, style: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = load_tokenizer(v.write_json(tmp_path))
    model = drawn(config_of(**STYLES[style], vocabulary=tokenizer.vocab_size))
    save_gguf(model, tmp_path / "one.gguf", tokenizer=tokenizer)
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    settings = {"n_ctx": 64, "verbose": False, "logits_all": True, "n_threads": 1, "flash_attn": False}
    peer = llama_cpp.Llama(str(tmp_path / "one.gguf"), **settings, **exact)
    tokens = torch.randint(3, tokenizer.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    peer.eval(tokens.tolist())
    found = torch.tensor(np.array(peer.scores[: len(tokens)]))
    expected = logits(model, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_gguf_of_phi3_is_read_by_rows_of_its_matrices(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = drawn(config_of(ffn=64))
    for kind in ("F32", "Q8_0"):
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", "phi3")
        config = model.config
        writer.add_block_count(config.layers)
        writer.add_context_length(config.context)
        writer.add_embedding_length(config.hidden)
        writer.add_feed_forward_length(config.ffn)
        writer.add_head_count(config.heads)
        writer.add_head_count_kv(config.kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_uint32("phi3.attention.sliding_window", 24)
        tensors = {"token_embd": model.embedding.weight, "output_norm": model.norm.weight, "output": model.head.weight}
        for i, block in enumerate(model.layers):
            own, ffn = block.attention, block.feed_forward
            tensors |= {
                f"blk.{i}.attn_norm": block.attention_norm.weight,
                f"blk.{i}.attn_qkv": torch.cat([own.query.weight, own.key.weight, own.value.weight]),
                f"blk.{i}.attn_output": own.output.weight,
                f"blk.{i}.ffn_norm": block.feed_forward_norm.weight,
                f"blk.{i}.ffn_up": torch.cat([ffn.gate.weight, ffn.up.weight]),
                f"blk.{i}.ffn_down": ffn.down.weight,
            }
        for name, tensor in tensors.items():
            values = tensor.detach().numpy()
            if kind != "F32" and values.ndim == 2:
                codes = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
                writer.add_tensor(f"{name}.weight", codes, raw_dtype=gguf.GGMLQuantizationType[kind])
            else:
                writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found, back = load(tmp_path / "F32.gguf")
    assert found == config.model_copy(update={"context": 24})
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    source = GGUFFile(tmp_path / "Q8_0.gguf")
    plain = load(tmp_path / "Q8_0.gguf")[1]
    for name in ("attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
        weight = plain.layers[1].get_submodule(name).weight
        packed = source.packed(f"layers.1.{name}.weight", tuple(weight.shape), 8)
        values = packed.codes.float() * packed.scales.float()
        assert torch.equal(values.view(weight.shape), weight)


@pytest.mark.peer
def test_short_texts_of_longrope_are_those_of_transformers_with_its_original_context(tmp_path: Path) -> None:
    model = theirs("phi3-long")
    model.save_pretrained(tmp_path / "theirs")
    tokens = tokens_of(24)
    expected = logits(model, tokens)
    source = open_checkpoint(tmp_path / "theirs")
    far = logits(read_model(source, torch.float64), tokens)
    source.config = source.config.model_copy(update={"context": 24})
    near = logits(read_model(source, torch.float64), tokens)
    torch.testing.assert_close(near, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
    assert (far - expected).abs().max() > 1e-3  # the factors for long texts, as the context allows these


@pytest.mark.parametrize("style", ["qwen2", "qwen3", "yarn", "phi3-part", "phi3-long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_are_generated_as_without_a_cache(style: str, dtype: torch.dtype) -> None:
    model = drawn(config_of(**STYLES[style])).to(dtype).requires_grad_(False).eval()
    prompt = tokens_of(20).tolist()
    (plain,) = [[one.token for one in generate(for_decoding(model), [prompt], 12, sampling=Sampling(temperature=0))]]
    text = list(prompt)
    model.few = None
    for token in plain:
        found = logits(model, torch.tensor(text))[-1].float()
        assert found.max() - found[token] <= (1e-4 if dtype == torch.float32 else 0.05) * found.abs().max()
        text.append(token)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gemma"},
            "model_type is 'gemma', not one of llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, phi3",
        ),
        ({"attention_bias": True}, "attention_bias is True, a model of type qwen3 has False here"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic' is not known"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**LONG, "long_factor": [1.0]}}, "6 of short_factor, and 1 of long_factor"),
        ({"rope_scaling": {**LONG, "short_factor": "x"}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {**LONG, "short_factor": [0.0] * 6}}, "rope_scaling.short_factor"),
        ({"rope_scaling": LONG}, "6 factors for 8 pairs of numbers"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": "two"}}, "rope_scaling.factor: "),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is False"),
        ({"rope_scaling": {"full_attention": {"rope_type": "yarn"}}}, "not an object with keys"),
        ({"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, a model"),
        (
            {"rope_scaling": {**LONG, "original_max_position_embeddings": 1}, "max_position_embeddings": 10**400},
            "not numbers of tokens",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, a model of type qwen3 has 1.0 here"),
        ({"model_type": "phi3", "partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        ({"model_type": "phi3", "partial_rotary_factor": 2.0}, "rotary_dim (32) must be even, and at most 16"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.1}, "rotary_dim (1) must be even"),
        ({"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0, not a number of tokens"),
    ],
)
def test_what_is_not_computed_here_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    save_hugging_face(drawn(config_of(head_norms=True)), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (tmp_path / "hf" / "checksums.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "hf")
    assert said in str(caught.value)


def test_yarn_lengthens_the_context_in_gguf_as_in_hugging_face_s_layout(tmp_path: Path) -> None:
    model = drawn(config_of(**STYLES["yarn"], context=24))
    save_hugging_face(model, tmp_path / "hf")
    save_gguf(model, tmp_path / "one.gguf")
    assert [load(path)[0].context for path in (tmp_path / "hf", tmp_path / "one.gguf")] == [64, 64]


def test_a_scaling_that_is_not_finite_is_refused_in_gguf(tmp_path: Path) -> None:
    config = config_of(**STYLES["yarn"])
    for changes in ({"factor": math.inf, "attention_factor": 1.0}, {"attention_factor": math.inf}):
        scaling = config.rope_scaling.model_copy(update=changes)  # type: ignore[union-attr]
        save_gguf(drawn(config.model_copy(update={"rope_scaling": scaling})), tmp_path / "one.gguf", overwrite=True)
        with pytest.raises(CheckpointError, match="rope_scaling"):
            load(tmp_path / "one.gguf")


def test_factors_of_longrope_come_in_pairs_in_gguf(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    save_gguf(drawn(config_of(**STYLES["phi3-long"])), path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"rope_factors_short", b"rope_factors_other"))
    with pytest.raises(CheckpointError, match="rope_factors_short"):
        load(path)


def test_a_share_of_a_head_beside_the_factors_is_read(tmp_path: Path) -> None:
    config = config_of(**STYLES["phi3-long"])
    save_hugging_face(drawn(config), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    content = json.loads(path.read_text())
    content["rope_scaling"]["partial_rotary_factor"] = content.pop("partial_rotary_factor")
    path.write_text(json.dumps(content))
    (tmp_path / "hf" / "checksums.json").unlink(missing_ok=True)
    assert load(tmp_path / "hf")[0] == config


def test_layouts_say_what_they_cannot_hold(tmp_path: Path) -> None:
    for settings, said in (
        ({**STYLES["phi3-long"], "head_dim": 24}, "heads of width 24, not hidden / heads"),
        ({**STYLES["linear"], "rotary_dim": 8}, "positions of Phi-3 and another scaling of positions together"),
    ):
        with pytest.raises(CheckpointError, match=said):
            save_hugging_face(drawn(config_of(**settings)), tmp_path / "hf")
    both = drawn(config_of(head_norms=True, attention_bias=True))
    for save in (save_hugging_face, save_gguf):
        with pytest.raises(CheckpointError, match="together"):
            save(both, tmp_path / "one.gguf")
    turned = drawn(config_of(head_norms=True, rotary_dim=8))
    for save in (save_hugging_face, save_gguf):
        with pytest.raises(CheckpointError, match="norms of heads and positions of Phi-3 together"):
            save(turned, tmp_path / "one.gguf")
    refused = {"qwen2": "biases", "qwen3": "norms of heads", "yarn": "biases", "linear": "linear"}
    for style, said in (refused | {"phi3-part": "a part of each head", "phi3-long": "longrope"}).items():
        with pytest.raises(CheckpointError, match=f"this layout cannot hold .*{said}"):
            save_consolidated(drawn(config_of(**STYLES[style])), tmp_path / "meta")
    assert not list(tmp_path.iterdir())


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    """By its definition in turns of the original context, of which the ramp is the rounding outwards."""
    scaling = RopeScaling(rope_type="yarn", factor=8.0, original_context=4096)
    config = config_of(hidden=256, heads=2, rope_scaling=scaling)
    plain = rope_frequencies(config.model_copy(update={"rope_scaling": None}))
    ratio, turns = rope_frequencies(config) / plain, 4096 * plain / (2 * torch.pi)
    assert (ratio[turns > 1.3 * 32] == 1).all()
    assert (ratio[turns < 1 / 1.3] - 1 / 8).abs().max() < 1e-6
    assert (ratio.diff() <= 0).all()
    cos, sin = rope_table(config, torch.arange(9))
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, 0.1 * np.log(8.0) + 1))


@pytest.mark.cases(3)
@pytest.mark.parametrize("style", ["qwen2", "qwen3", "mixtral", "qwen3-experts", "yarn", "phi3-part", "phi3-long"])
def test_a_conversion_to_gguf_and_back_changes_no_bit_and_no_id(tmp_path: Path, style: str) -> None:
    (tmp_path / "vocabulary").mkdir()
    tokenizer = load_tokenizer(v.write_json(tmp_path / "vocabulary"))
    model = drawn(config_of(**STYLES[style], vocabulary=tokenizer.vocab_size))
    save_hugging_face(model, tmp_path / "hf", tokenizer=tokenizer)
    there = convert(tmp_path / "hf", tmp_path / "one.gguf")
    back = convert(tmp_path / "one.gguf", tmp_path / "again")
    assert (there.error, back.error, back.same_chats) == (0.0, 0.0, True)
    config, found = load(tmp_path / "again")
    assert config.model_copy(update={"rope_scaling": None}) == model.config.model_copy(update={"rope_scaling": None})
    for (name, a), b in zip(found.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b), name
    text = "the cat sat on the mat 12"
    assert load_tokenizer(tmp_path / "again").encode(text) == tokenizer.encode(text)
