"""Loss, rewards and gradients of preferences beside those of TRL's ``DPOTrainer``, on the same weights and pairs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers import PeerUnavailable
from rich.console import Console

from cordillera.data.language.chats.batches import ChatMicrobatches, held_out_chats
from cordillera.data.language.chats.tokens import ANSWER, PROMPT, TokenisedChat
from cordillera.models.language.checkpoints import save_hugging_face
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.stages import LlamaStage
from cordillera.training.language.objectives import PreferencesConfig, PreferencesObjective, document_sums

MODEL = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61, context=64)
PAIRS, SEEDS = 6, 5

_HF_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "feed_forward_norm": "post_attention_layernorm",
}

Pair = tuple[list[int], list[int], list[int]]
"""Tokens of a prompt, of the chosen and of the rejected answer."""


def compare(seed: int, beta: float = 0.3, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """Return the largest differences between ours and TRL's, in nats; of gradients, in units of the largest one.

    Keys are ``loss``, ``rewards`` (means of chosen and of rejected answers), ``margins`` and ``gradients`` of all
    parameters, without the likelihood of the chosen answer; and ``loss_with_nll`` and ``gradients_with_nll`` of single
    pairs, over whose tokens TRL takes the mean of that likelihood as we do (of several pairs, it takes one mean over
    the tokens of all). TRL computes log-probabilities in 32 bits whatever the weights' ``dtype``.

    Raises:
        PeerUnavailable: If TRL is not installed.
    """
    pairs = _pairs(seed)
    model, reference = _model(seed).to(dtype), _model(seed + 1_000).to(dtype)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = _Peer(model, reference, Path(folder), beta)
        ours, theirs = _ours(model, reference, pairs, beta, 0.0), peer(pairs, 0.0)
        for name in ("loss", "rewards", "margins", "gradients"):
            found[name] = _difference(ours[name], theirs[name])
        singles = [(_ours(model, reference, [pair], beta, 0.2), peer([pair], 0.2)) for pair in pairs]
        for name in ("loss", "gradients"):
            found[f"{name}_with_nll"] = max(_difference(one[name], other[name]) for one, other in singles)
    return found


def trl(console: Console, quick: bool) -> dict[str, Any]:
    """Compare some seeds, and print the largest differences."""
    found = [compare(seed) for seed in range(1 if quick else SEEDS)]
    largest = {name: max(one[name] for one in found) for name in found[0]}
    for name, value in largest.items():
        console.print(f"{name.replace('_', ' ')}: differs by at most {value:.1e}")
    return {"evidence": "measured", "seeds": len(found), "pairs": PAIRS, "largest": largest}


def _pairs(seed: int) -> list[Pair]:
    random = np.random.default_rng(seed)

    def tokens(most: int) -> list[int]:
        return random.integers(1, MODEL.vocabulary, random.integers(1, most + 1)).tolist()

    return [(tokens(9), tokens(20), tokens(20)) for _ in range(PAIRS)]


def _model(seed: int) -> Llama:
    model = Llama(MODEL)
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)  # so that answers differ
    return model


def _packed(pairs: list[Pair], values: dict[str, torch.Tensor] | None = None) -> ChatMicrobatches:
    items = [
        tuple(
            TokenisedChat(
                np.array(prompt + answer, np.int32), np.array([PROMPT] * len(prompt) + [ANSWER] * len(answer), np.int8)
            )
            for answer in answers
        )
        for prompt, *answers in pairs
    ]
    found = held_out_chats(items, most=128)
    return ChatMicrobatches(items, found.parts, (ANSWER,), values)


def _sums(model: Llama, pairs: list[Pair]) -> torch.Tensor:
    """Return the log-probabilities of both answers of each pair, ``[pairs, 2]``."""
    stage, found = LlamaStage(model), []

    def keep(stage: LlamaStage, hidden: Any, offsets: Any, labels: Any, documents: Any) -> torch.Tensor:
        found.append(document_sums(stage.log_probabilities(hidden, labels), offsets))
        return hidden.new_zeros(())

    stage.objective = keep
    with torch.no_grad():
        for one in _packed(pairs):
            stage(one.tokens, one.offsets, None, one.labels)
    return torch.cat(found).view(-1, 2)


def _ours(model: Llama, reference: Llama, pairs: list[Pair], beta: float, nll: float) -> dict[str, Any]:
    were = _sums(reference, pairs)
    stage = LlamaStage(model)
    stage.objective = PreferencesObjective(PreferencesConfig(beta=beta, nll=nll))
    model.zero_grad()
    loss = torch.zeros(())
    for one in _packed(pairs, {"reference": were}):
        loss = loss + stage(one.tokens, one.offsets, None, one.labels, None, one.documents) / len(pairs)
    loss.backward()
    rewards = beta * (_sums(model, pairs) - were)
    return {
        "loss": loss.detach(),
        "rewards": rewards.mean(0),
        "margins": torch.tensor(stage.objective.take()["margin"] / len(pairs)),
        "gradients": {_hf_name(name): parameter.grad.clone() for name, parameter in model.named_parameters()},
    }


def _hf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if not module.startswith("layers."):
        return f"{_HF_NAMES[module]}.weight"
    _, number, rest = module.split(".", 2)
    return f"model.layers.{number}.{_HF_NAMES[rest]}.weight"


class _Peer:
    """TRL's trainer of the same weights, which computes losses and gradients of batches and takes no step."""

    def __init__(self, model: Llama, reference: Llama, folder: Path, beta: float) -> None:
        try:
            from datasets import Dataset
            from tokenizers import Tokenizer, models
            from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
            from trl import DPOConfig, DPOTrainer
            from trl.trainer.dpo_trainer import DataCollatorForPreference
        except ImportError as error:
            raise PeerUnavailable(str(error)) from error
        loaded = []
        for name, one in (("model", model), ("reference", reference)):
            save_hugging_face(one, folder / name)
            opened = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
            loaded.append(opened.to(model.embedding.weight.dtype))
        words = {"a": 0, "b": 1, "<e>": 2}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), eos_token="<e>", pad_token="<e>"
        )
        config = DPOConfig(
            output_dir=str(folder / "out"),
            beta=beta,
            max_length=None,
            loss_type=["sigmoid", "sft"],
            loss_weights=[1.0, 0.0],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        )
        collate = DataCollatorForPreference(pad_token_id=0)
        self.trainer = DPOTrainer(
            loaded[0],
            loaded[1],
            config,
            collate,
            Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "a"}]),  # never taken
            processing_class=tokenizer,
        )
        self.collate = collate

    def __call__(self, pairs: list[Pair], nll: float) -> dict[str, Any]:
        trainer = self.trainer
        batch = self.collate([{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs])
        trainer.loss_weights = [1.0, nll]
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        measured = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        return {
            "loss": loss.detach(),
            "rewards": torch.tensor([measured["rewards/chosen"], measured["rewards/rejected"]]),
            "margins": torch.tensor(measured["rewards/margins"]),
            "gradients": {name: one.grad.clone() for name, one in trainer.model.named_parameters()},
        }


def _difference(ours: Any, theirs: Any) -> float:
    """Largest difference; of gradients, in units of the largest one."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        largest = max(float(one.abs().max()) for one in theirs.values())
        return max(float((ours[name] - theirs[name]).abs().max()) for name in ours) / largest
    return float((ours - theirs).abs().max())
