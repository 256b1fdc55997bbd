"""SmolLM2 after pre-training on text that ships with Python: fine-tuning, rewards, preferences, the best of several."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from cordillera import recipe as recipes
from cordillera import workflows
from cordillera.data.language.chats.batches import held_out_chats
from cordillera.data.language.chats.corpora import prepare_chats
from cordillera.data.language.chats.rows import ChatDataConfig, read_chats, split_held_out
from cordillera.distributed.vocabulary_loss import IGNORED
from cordillera.models.language.checkpoints import open_checkpoint, read_model
from cordillera.serving.language.language_model import find_model
from cordillera.training.language.objectives import document_sums
from cordillera.workflows.post_training.answers import best_of, judge

CHATS = 96  # held-out chats whose answers are predicted
NEW_TOKENS, SAMPLES = 48, 8
PAIRED, BEST_OF = 160, 24  # questions whose answers DPO learns from, held-out ones whose samples are compared


def train_recipe(name: str, folder: Path, overrides: Sequence[str], console: Console) -> dict[str, Any]:
    """Train a shipped recipe, unless its run is finished; return its evaluations before and after."""
    run = folder / name
    resume = run.exists()
    recipe = recipes.load(name, overrides)
    console.print(f"{'going on with' if resume else 'training'} {name}")
    outcome = workflows.train(recipe, run, resume=resume, say=console.print)
    found = [one for one in outcome.run.metrics() if one["kind"] == "evaluation"]
    steps = [one for one in outcome.run.metrics() if one["kind"] == "train"]
    return {
        "steps": outcome.report.progress.step,
        "tokens": outcome.report.progress.tokens,
        "seconds": sum(one["seconds"] for one in steps),
        "evaluations": [
            {"step": one["step"], "loss": one["loss"], "units": one["targets"], **one["measures"]} for one in found
        ],
    }


@torch.no_grad()
def _likelihoods(name: str, chats: int) -> list[float]:
    """Return the mean negative log-likelihood of the answer's tokens of held-out chats, in nats."""
    model = read_model(open_checkpoint(find_model(name))).eval()
    data = ChatDataConfig(path="python-docstrings", tokenizer="smollm2", held_out=0.02, max_length=256)
    items = prepare_chats(data, "chats").held_out[:chats]
    found: list[float] = []
    for one in held_out_chats(items, most=1024).neighbours(0, len(items)):
        assert one.labels is not None
        rows = model(one.tokens, one.offsets).float().log_softmax(-1)
        losses = -rows.gather(1, one.labels.clamp(min=0)[:, None]).squeeze(1)
        has_target = one.labels != IGNORED
        sums = document_sums(losses * has_target, one.offsets) / document_sums(has_target.float(), one.offsets)
        found += sums.tolist()
    return found


def _paired(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Return the mean difference with its 95 % bootstrap interval over chats."""
    gain = np.array(before) - np.array(after)
    random = np.random.default_rng(0)
    means = [random.choice(gain, len(gain)).mean() for _ in range(4000)]
    low, high = np.percentile(means, [2.5, 97.5])
    return {
        "before": float(np.mean(before)),
        "after": float(np.mean(after)),
        "gain": float(gain.mean()),
        "low": float(low),
        "high": float(high),
        "chats": len(gain),
    }


def answers(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Fine-tune SmolLM2 on docstrings and measure how likely held-out answers became."""
    steps = ["training.steps=2"] if quick else []
    training = train_recipe("smollm2-sft", folder, steps, console)
    chats = 8 if quick else CHATS
    found = _paired(_likelihoods("smollm2", chats), _likelihoods(str(folder / "smollm2-sft"), chats))
    console.print(
        f"nats a token of held-out answers: {found['before']:.3f} before, {found['after']:.3f} after; "
        f"gain {found['gain']:.3f} ({found['low']:.3f} to {found['high']:.3f}, 95 % over {found['chats']} chats)"
    )
    return {"evidence": "measured", "training": training, "likelihood": found}


def preferences(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    """Train a reward model and DPO, count wins, and compare the best of several samples with the formula."""
    if not (folder / "smollm2-sft").exists():
        train_recipe("smollm2-sft", folder, ["training.steps=2"] if quick else [], console)
    steps = ["training.steps=2", "training.evaluation_tokens=500"] if quick else []
    start = f"training.start={folder / 'smollm2-sft'}"
    reward = train_recipe("smollm2-reward", folder, steps, console)
    dpo = train_recipe("smollm2-dpo", folder, [*steps, start], console)
    learnt, held_out = _questions(folder)
    tokens = 8 if quick else NEW_TOKENS
    runs = {name: str(folder / name) for name in ("smollm2-sft", "smollm2-reward", "smollm2-dpo")}
    own = _own_pairs(runs, learnt, folder, quick, console)
    runs["own"] = str(folder / "own" / "smollm2-dpo")
    again = train_recipe("smollm2-dpo", folder / "own", [*steps, start, f"data.path={own}"], console)
    wins = {}
    for name, (first, second) in {
        "dpo over sft": (runs["smollm2-dpo"], runs["smollm2-sft"]),
        "dpo on own answers over sft": (runs["own"], runs["smollm2-sft"]),
        "sft over base": (runs["smollm2-sft"], "smollm2"),
    }.items():
        found = judge(
            first, second, runs["smollm2-reward"], str(held_out), most=4 if quick else None, max_new_tokens=tokens
        )
        wins[name] = {
            "rate": found.rate,
            "interval": list(found.interval),
            "prompts": found.prompts,
            "ties": found.ties,
            "rewards": list(found.rewards),
        }
        low, high = found.interval
        console.print(f"{name}: {found.rate:.1%} of {found.prompts} ({low:.1%} to {high:.1%}), {found.ties} ties")
    return {
        "evidence": "measured",
        "reward": reward,
        "dpo": dpo,
        "dpo_on_own_answers": again,
        "wins": wins,
        "best_of": _best_of(runs, held_out, quick, console),
    }


def _questions(folder: Path) -> tuple[Path, Path]:
    """Write some of the questions that training saw, evenly spread, and those that it did not."""
    paths = folder / "learnt.jsonl", folder / "held-out.jsonl"
    learnt, held_out = split_held_out(read_chats("python-docstrings"), 0.02)
    for path, chats in zip(paths, (learnt[:: len(learnt) // PAIRED][:PAIRED], held_out), strict=True):
        rows = [{"prompt": [{"role": one.role, "content": one.content} for one in chat.prompt]} for chat in chats]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def _own_pairs(runs: dict[str, str], questions: Path, folder: Path, quick: bool, console: Console) -> Path:
    """Sample answers of the fine-tuned model, and write the best and the worst to each question."""
    file = folder / "own.jsonl"
    found = best_of(
        runs["smollm2-sft"],
        runs["smollm2-reward"],
        str(questions),
        file,
        samples=2 if quick else SAMPLES,
        most=12 if quick else PAIRED,
        max_new_tokens=8 if quick else NEW_TOKENS,
    )
    console.print(f"{found.prompts} questions with the best and the worst of {SAMPLES} answers")
    return file


def _best_of(runs: dict[str, str], questions: Path, quick: bool, console: Console) -> dict[str, Any]:
    """Compare the mean reward of the best of disjoint groups of samples with the expected one of all samples."""
    file = questions.with_name("best.jsonl")
    samples = 2 if quick else SAMPLES
    most, tokens = (2, 8) if quick else (BEST_OF, 32)
    found = best_of(
        runs["smollm2-sft"],
        runs["smollm2-reward"],
        str(questions),
        file,
        samples=samples,
        most=most,
        max_new_tokens=tokens,
    )
    rows = [json.loads(line)["rewards"] for line in file.read_text(encoding="utf-8").splitlines()]
    drawn = {}
    for count in found.rewards:
        groups = [max(row[first : first + count]) for row in rows for first in range(0, samples - count + 1, count)]
        drawn[count] = math.fsum(groups) / len(groups)
    for count, expected in found.rewards.items():
        console.print(f"best of {count}: expected {expected:.3f}, of disjoint groups {drawn[count]:.3f}")
    return {
        "prompts": found.prompts,
        "samples": samples,
        "expected": {str(count): value for count, value in found.rewards.items()},
        "drawn": {str(count): value for count, value in drawn.items()},
    }
