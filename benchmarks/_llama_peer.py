"""transformers' Llama with weights loaded by its publisher's definition of the file instead of our loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers import PeerUnavailable

from cordillera.models.language.llama import LlamaConfig

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def transformers_llama(path: Path, config: LlamaConfig) -> Any:
    """Return a ``LlamaForCausalLM`` in float32 from a GGUF file and its shapes.

    Raises:
        PeerUnavailable: If a library is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise PeerUnavailable(str(error)) from error
    settings = transformers.LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        vocab_size=config.vocabulary,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)  # its frequencies are not weights
    weights = dict(_weights(path, config))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.tie_weights()
    return model.eval()


def _weights(path: Path, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        import gguf
    except ImportError as error:
        raise PeerUnavailable(str(error)) from error
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        parts = tensor.name.split(".")
        if parts[0] == "token_embd":
            name = "model.embed_tokens.weight"
        elif parts[0] == "output_norm":
            name = "model.norm.weight"
        else:
            name = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):  # rows 0, 2, 4 ... of a head, then 1, 3, 5 ...
                heads = values.reshape(-1, config.head_width, config.hidden)
                values = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(values.shape)
        yield name, torch.from_numpy(values)
