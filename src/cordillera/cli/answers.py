"""``cordillera best-of``, ``cordillera judge`` and ``cordillera average``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, Field, Quiet, Sheet

_Reward = Annotated[Path, typer.Option("--reward", help="The run of a reward model.")]
_Prompts = Annotated[
    list[str],
    typer.Option("--prompts", help="JSON lines, Parquet or Arrow with `prompt` or `messages`, or a built-in set."),
]
_Most = Annotated[int | None, typer.Option("--most", min=1, help="Prompts to answer. Default: all.")]
_Tokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="For each answer.")]
_Dtype = Annotated[str, typer.Option(help="Of the answering model: bfloat16, float16, float32, int8 or int4.")]
_Seed = Annotated[int, typer.Option(min=0, help="The same seed draws the same answers.")]


def best_of(
    model: Annotated[str, typer.Argument(help="The model that answers: a name, a checkpoint or a run.")],
    reward: _Reward,
    prompts: _Prompts,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File of the best answers; one that exists is gone on with.")
    ],
    samples: Annotated[int, typer.Option("-n", "--samples", min=2, help="Answers to each prompt.")] = 10,
    most: _Most = None,
    max_new_tokens: _Tokens = 256,
    temperature: Annotated[float, typer.Option(help="Of the samples, above 0.")] = 1.0,
    seed: _Seed = 0,
    dtype: _Dtype = "bfloat16",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Sample answers to prompts and keep the best of each.

    The best has the highest reward (rejection sampling).
    """
    from cordillera.cli._show import answering_progress
    from cordillera.workflows.post_training import answers

    with CommandOutput(as_json) as answer:
        with answering_progress(answer.notes, quiet=quiet) as on_answer:
            found = answers.best_of(
                model,
                reward,
                prompts,
                out,
                samples=samples,
                most=most,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                dtype=dtype,
                on_answer=on_answer,
            )
        title = f"{found.prompts:,} prompts, {found.samples} answers each"
        table = Sheet(title, Field("best_of", right=True), Field("reward", form="{:.3f}"), Field("nats", form="{:.2f}"))
        for count, value in found.rewards.items():
            table.add(count, value, answers.best_of_divergence(count))
        answer.tables(rewards=table)
        answer.say("reward: expected; nats: largest divergence from the model's own answers", prompts=found.prompts)
        answer.say(f"best answers: {found.file}", file=found.file)


def judge(
    first: Annotated[str, typer.Argument(help="The model whose wins are counted: a name, a checkpoint or a run.")],
    second: Annotated[str, typer.Argument(help="The model that it is compared with.")],
    reward: _Reward,
    prompts: _Prompts,
    most: _Most = None,
    max_new_tokens: _Tokens = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely tokens.")] = 0.0,
    seed: _Seed = 0,
    dtype: _Dtype = "bfloat16",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Let a reward model compare two models' answers.

    It counts how often the first model's answer is preferred.
    """
    from cordillera.cli._show import answering_progress
    from cordillera.workflows.post_training import answers

    with CommandOutput(as_json) as answer:
        with answering_progress(answer.notes, quiet=quiet) as on_answer:
            found = answers.judge(
                first,
                second,
                reward,
                prompts,
                most=most,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                dtype=dtype,
                on_answer=on_answer,
            )
        low, high = found.interval
        answer.say(
            f"{first} wins {100 * found.rate:.1f} % of {found.prompts:,} prompts "
            f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %; "
            f"{found.ties:,} ties count half)"
        )
        answer.say(f"mean rewards: {found.rewards[0]:.3f} and {found.rewards[1]:.3f}")
        answer.keep(**asdict(found))


def average(
    models: Annotated[list[str], typer.Argument(help="Two or more names, checkpoints or runs of one architecture.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the mean, in Hugging Face's layout.")],
) -> None:
    """Average the weights of models."""
    from cordillera.cli._show import echo
    from cordillera.workflows.post_training import averaging

    echo(f"mean of {len(models)}: {averaging.average(models, out)}")
