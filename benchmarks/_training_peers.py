"""One trainer of a Llama in its own process, which takes steps on request.

Run it with the interpreter that has the trainer's libraries: ``_training_peers.py NAME CASE``, where ``CASE`` is JSON.
It takes some steps to warm up, and then as many as each line of its input says; after each of these it writes how long
they took. Only the requested trainer is imported, because each has its own environment.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import string
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARMUP = 3
BATCHES = 4
LOG_EVERY = 5  # steps between the records of every loop; rounds are as short
TEXT_ROWS = 256  # of the text that our loop reads


@dataclass(frozen=True)
class Case:
    """Sizes of a model and of a batch, and settings of the computation.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        ffn: Width of the feed-forward net.
        vocabulary: Number of tokens.
        tied: Whether the head is the embedding.
        rows: Number of sequences of a batch.
        length: Number of tokens of a sequence.
        dtype: Data type of products; weights and moments are in float32.
        threads: Number of threads of the process.
        documents: Lengths of the documents in each row; empty for one.
        variant: Alternative settings of the trainer; empty for its usual ones.
        loop: Whether the training loop is that of a user: with records of the loss and progress on the terminal, and
            ours from text on disk. Otherwise ours takes bare steps, and the peers' loops record nothing.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tied: bool
    rows: int
    length: int
    dtype: str = "float32"
    threads: int = 1
    documents: tuple[int, ...] = ()
    variant: str = ""
    loop: bool = False

    def batches(self) -> list[Tensor]:
        """Return the tokens of a few batches, ``int64 [rows, length]`` each, the same for every trainer."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.length)
        return [torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(BATCHES)]


class Meter:
    """Waits for requests between steps, and answers with the seconds that they took.

    Args:
        facts: Facts about the trainer, for its first answer.
    """

    def __init__(self, **facts: Any) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output of libraries must not mix with the answers
        self._facts = facts
        self._left, self._taken = WARMUP, WARMUP
        self._began, self._busy = time.perf_counter(), time.process_time()

    def step_ended(self) -> None:
        """Record a step; wait if no further step is requested, and end the process at the end of the input."""
        self._left -= 1
        if self._left:
            return
        seconds, busy = time.perf_counter() - self._began, time.process_time() - self._busy
        answer = {"steps": self._taken, "seconds": seconds, "processor_seconds": busy, **self._facts}
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()
        order = sys.stdin.readline()
        if not order.strip():
            os._exit(0)
        self._left = self._taken = int(order)
        self._began, self._busy = time.perf_counter(), time.process_time()


def train_ours(case: Case) -> None:
    """Train with Cordillera: its engine in a mesh of one process, or the function behind ``cordillera train``."""
    if case.loop:
        return _train_recipe(case)
    from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
    from cordillera.kernels.host_memory import keep_freed_memory
    from cordillera.models.language.llama import LlamaConfig
    from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens

    model = LlamaConfig(
        layers=case.layers, hidden=case.hidden, heads=case.heads, kv_heads=case.kv_heads, ffn=case.ffn,
        vocabulary=case.vocabulary, tied=case.tied, context=case.length,
    )  # fmt: skip
    keep_freed_memory()  # as the trainer does
    training = LanguageConfig(precision="bf16" if case.dtype == "bfloat16" else "fp32")
    engine = LanguageEngine(training, model, ProcessMesh(ParallelConfig()))
    lengths = (case.documents or (case.length,)) * case.rows
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batches = [PackedTokens(batch.flatten(), offsets) for batch in case.batches()]
    parameters = sum(parameter.numel() for stage in engine.stages.values() for parameter in stage.parameters())
    meter = Meter(parameters=parameters, version="")
    for step in range(sys.maxsize):
        engine.step([batches[step % BATCHES]])
        meter.step_ended()


def _text(case: Case, path: Path) -> None:
    """Write documents of the case's lengths, in the tokens of a byte tokenizer with a token at the end of each."""
    draw = random.Random(0)
    with path.open("w") as file:
        for length in (case.documents or (case.length,)) * TEXT_ROWS:
            file.write(json.dumps({"text": "".join(draw.choices(string.ascii_letters, k=length - 1))}) + "\n")


def _train_recipe(case: Case) -> None:
    """Train a recipe as ``cordillera train`` does, without checkpoints; documents of one length are shuffled."""
    from rich.console import Console

    from cordillera import recipe as recipes
    from cordillera import workflows
    from cordillera.cli._show import training_progress
    from cordillera.models.language.llama import parameter_count

    _text(case, Path("text.jsonl"))
    tokens = case.rows * case.length
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
    recipe = recipes.load(
        "llama-debug",
        [
            *(f"model.{name}={getattr(case, name)}" for name in sizes), f"model.tied={str(case.tied).lower()}",
            f"model.context={case.length}", "data.path=text.jsonl", "data.cache_dir=cache", "data.bos=false",
            "data.held_out=0", f"data.max_length={case.length}", f"data.shuffle={str(not case.documents).lower()}",
            "packing.method=greedy", "packing.microbatches=1", f"packing.tokens={tokens}", f"packing.bound={tokens}",
            f"packing.context={case.length}",
            f"threads={case.threads}", f"training.precision={'bf16' if case.dtype == 'bfloat16' else 'fp32'}",
            "training.steps=1_000_000", "training.learning_rate=3e-4", "training.warmup_steps=0", "training.decay=none",
            "training.evaluate_every=none", "training.checkpoint_every=none", f"training.log_every={LOG_EVERY}",
        ],
    )  # fmt: skip
    meter = Meter(parameters=parameter_count(recipe.model), version="")
    with training_progress(Console(file=sys.stderr, force_terminal=True)) as (draw, say):

        def on_step(record: dict[str, Any], progress: Any, total: int) -> None:
            if progress.tokens != progress.step * tokens:
                raise RuntimeError(f"{progress.step} steps took {progress.tokens:,} tokens, not {tokens:,} each")
            draw(record, progress, total)
            meter.step_ended()

        workflows.train(recipe, "run", on_step=on_step, say=say)


class _Rows(torch.utils.data.Dataset[Any]):
    """Rows of the batches in a cycle; a row of many documents is a list of them."""

    def __init__(self, case: Case) -> None:
        self._rows, self._documents = torch.cat(case.batches()), list(case.documents)

    def __len__(self) -> int:
        return 64 * len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index % len(self._rows)]
        if not self._documents:
            return {"input_ids": row, "labels": row}
        return [{"input_ids": one, "labels": one} for one in row.split(self._documents)]


def _padded(rows: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return a row for each document, padded to the longest."""
    tokens = [document["input_ids"] for row in rows for document in row]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(tokens, batch_first=True, padding_value=-100)
    return {"input_ids": pad(tokens, batch_first=True), "labels": labels, "attention_mask": (labels >= 0).long()}


def _packed(rows: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return all documents in one row, with positions that restart in each, from which the model makes its mask."""
    import transformers

    documents = [{"input_ids": one["input_ids"].tolist()} for row in rows for one in row]
    found: dict[str, Tensor] = transformers.DataCollatorWithFlattening(return_tensors="pt")(documents)
    return found


def train_transformers(case: Case) -> None:
    """Train with transformers' Trainer: float32 weights, autocast, fused AdamW, no checkpoints."""
    import transformers

    settings = transformers.LlamaConfig(
        hidden_size=case.hidden, intermediate_size=case.ffn, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.kv_heads, vocab_size=case.vocabulary,
        max_position_embeddings=case.length, tie_word_embeddings=case.tied, use_cache=False, rope_theta=500_000.0,
    )  # fmt: skip
    settings._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(settings)
    meter = Meter(parameters=model.num_parameters(), version=transformers.__version__)

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            meter.step_ended()

    arguments = transformers.TrainingArguments(
        output_dir="transformers", per_device_train_batch_size=case.rows, max_steps=10**6, optim="adamw_torch_fused",
        learning_rate=3e-4, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="constant",
        use_cpu=True, bf16=case.dtype == "bfloat16", disable_tqdm=not case.loop, report_to="none", save_strategy="no",
        logging_strategy="steps" if case.loop else "no", logging_steps=LOG_EVERY, dataloader_pin_memory=False,
        remove_unused_columns=False,
    )  # fmt: skip
    collate = {"padded": _padded, "packed": _packed}.get(case.variant)
    transformers.Trainer(
        model, arguments, train_dataset=_Rows(case), data_collator=collate, callbacks=[Steps()]
    ).train()


def train_torchtitan(case: Case) -> None:
    """Train with torchtitan's Trainer, its ``train_step`` or its whole ``train``, in one process over Gloo.

    Its Llama uses flex or varlen attention, neither of which trains on CPUs; they are replaced by its own module around
    torch's fused attention, which other models of it use. As in our trainer, nothing is recomputed in the backward.
    """
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]  # it assumes CUDA
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import _EMBEDDING_SKIP_INIT, _build_llama3_layers
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.trainer import Trainer

    if case.documents:
        raise SystemExit("torchtitan's model computes one document a row on CPUs")

    class Memory:
        """The part of its monitor that the Trainer calls; a CPU has none of its counters."""

        device_name = "CPU"
        get_peak_stats = staticmethod(lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0))
        reset_peak_stats = staticmethod(lambda: None)

    class Batches(BaseDataLoader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **others: Any) -> None:
            pass

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for batch in itertools.cycle(case.batches()):
                labels = torch.full_like(batch, -100)
                labels[:, :-1] = batch[:, 1:]
                yield {"input": batch}, labels

        state_dict = dict
        load_state_dict = __init__

    class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **others: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    metrics.build_device_memory_monitor = Memory
    config = llama3_debugmodel()
    model = config.model_spec.model
    rope = replace(model.layers[0].attention.rope, dim=case.hidden // case.heads)
    model.dim, model.vocab_size, model.enable_weight_tying = case.hidden, case.vocabulary, case.tied
    model.tok_embeddings = replace(
        model.tok_embeddings, num_embeddings=case.vocabulary, embedding_dim=case.hidden,
        param_init=_EMBEDDING_SKIP_INIT if case.tied else model.tok_embeddings.param_init,
    )  # fmt: skip
    model.norm = replace(model.norm, normalized_shape=case.hidden)
    model.lm_head = replace(model.lm_head, in_features=case.hidden, out_features=case.vocabulary)
    model.layers = _build_llama3_layers(
        n_layers=case.layers, dim=case.hidden, n_heads=case.heads, n_kv_heads=case.kv_heads, hidden_dim=case.ffn,
        rope=rope, attn_backend="varlen",
    )  # fmt: skip
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader, config.tokenizer = Batches.Config(), NoTokenizer.Config()
    config.training.local_batch_size, config.training.seq_len = case.rows, case.length
    config.training.steps, config.training.mixed_precision_param = 10**6, case.dtype
    config.training.disable_cuda_graphs = True
    config.metrics.log_freq = LOG_EVERY if case.loop else 10**6
    config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint = None
    if case.variant == "whole":  # all logits at once instead of in eight parts
        config.loss = CrossEntropyLoss.Config(global_vocab_size=case.vocabulary)
    trainer = Trainer(config)
    (part,) = trainer.model_parts
    meter = Meter(
        parameters=sum(weight.numel() for weight in part.parameters()), version=metadata.version("torchtitan")
    )
    if case.loop:
        utils.set_pg_timeouts = lambda **settings: None  # after the first step; its barrier assumes CUDA
        step = trainer.train_step

        def counted(batches: Iterator[Any]) -> None:
            step(batches)
            meter.step_ended()

        trainer.train_step = counted
        trainer.train()
    batches = trainer.batch_generator(trainer.dataloader)
    while True:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        meter.step_ended()


TRAINERS: dict[str, Callable[[Case], None]] = {
    "ours": train_ours,
    "transformers": train_transformers,
    "torchtitan": train_torchtitan,
}


def main(name: str, case: str) -> None:
    """Train until the input ends.

    Args:
        name: A key of :data:`TRAINERS`.
        case: A :class:`Case` as JSON.
    """
    settings = json.loads(case)
    given = Case(**{**settings, "documents": tuple(settings.get("documents", ()))})
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    TRAINERS[name](given)


if __name__ == "__main__":
    main(*sys.argv[1:])
