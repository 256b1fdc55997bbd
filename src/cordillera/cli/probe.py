"""``cordillera probe``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cordillera.cli._show import AsJson, CommandOutput, Field, Sheet, check_result, refuse, to_type
from cordillera.errors import Interrupted, NumericsError

if TYPE_CHECKING:
    from cordillera.numerics.dispatch.dispatch import Profile


def probe(
    run: Annotated[Path, typer.Argument(help="A trained ranking run's folder.")],
    rows: Annotated[
        list[int] | None, typer.Option("--rows", min=1, help="Batch size to plan for; repeat it. Default: 256.")
    ] = None,
    decibels: Annotated[
        float, typer.Option("--db", help="Least signal-to-noise ratio of a kernel on what its layer sees.")
    ] = 30.0,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, help="Largest relative rise of NE, in per cent, on the validation split. Default: 0.02."),
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="Plan the three products of a training step instead, without a budget.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Gather statistics anew, though training has (training.probe_every).")
    ] = False,
    marginals: Annotated[
        bool, typer.Option("--marginals", help="Draw inputs with each feature's own tails and zeros (Gaussian copula).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan the fastest accurate kernels for a model's layers.

    What the layers see is gathered first.
    """
    if not math.isfinite(decibels):
        raise NumericsError(f"must be a number of decibels, got {decibels}", where="--db", remedy="for instance 30")
    from cordillera.numerics.dispatch.dispatch import DispatchConfig
    from cordillera.numerics.dispatch.plan import bucket
    from cordillera.workflows.probing import probe as work
    from cordillera.workflows.probing import probe_training

    if training:
        options = {"--anew": anew, "--marginals": marginals, "--budget": budget}
        refuse(options, "--training, which always gathers anew, no quantiles, and scores nothing")
    check_result(run, "precision-plan.json")
    config = DispatchConfig(rows=tuple(sorted({bucket(one) for one in rows or [256]})), sqnr_db=decibels)
    with CommandOutput(as_json) as answer:
        say = answer.notes.print
        try:
            if training:
                _of_training(answer, *probe_training(run, config, say=say))
                return
            found = work(
                run, config, (0.02 if budget is None else budget) / 100, anew=anew, marginals=marginals, say=say
            )
        except KeyboardInterrupt:
            raise Interrupted(
                "no plan was written; an earlier one is as it was", where=str(run), remedy="give the same command again"
            ) from None
        answer.tables(choices=_table(found.profile))
        lines = [f"back to fp32: {name}, which cost more NE than the budget" for name in found.returned]
        faster = found.profile.geometric_mean()
        lines.append(
            f"NE {100 * found.change.mean:+.4f} % ({100 * found.change.low:+.4f} to {100 * found.change.high:+.4f}); "
            f"linear layers {faster:.2f} times as fast as fp32 in geometric mean"
        )
        answer.say("\n".join(lines), returned=found.returned, ne_change=found.change, times_fp32=faster)
        answer.say(
            f"plan: {found.plan_file}; {to_type('predict', run, 'FILE', '--plan')} uses it",
            plan=found.plan_file,
        )


def _of_training(answer: CommandOutput, file: Path, profile: Profile) -> None:
    """Print the plan of the products of a training step."""
    answer.tables(choices=_table(profile))
    lowered, faster = sum(choice.kernel != "fp32" for choice in profile.plan.choices), profile.geometric_mean()
    answer.say(
        f"{lowered} of {len(profile.plan.choices)} products in lower precision; the linear layers' "
        f"share of a step {faster:.2f} times as fast in geometric mean",
        lowered=lowered,
        times_fp32=faster,
    )
    answer.say(f"plan: {file}; the recipe key training.plan uses it", plan=file)


def _table(profile: Profile) -> Sheet:
    """Return the kernel of each layer and size of a profile's plan."""
    training = profile.plan.purpose == "training"
    table = Sheet(
        "the fastest kernel that is accurate enough",
        Field("layer"),
        *((Field("product", form=lambda name: name.replace("_", " "), right=False),) if training else ()),
        Field("rows"),
        Field("outputs_inputs", "outputs x inputs", "{0[0]} x {0[1]}", right=False),
        Field("kernel"),
        Field("ms", form="{:.3f}", right=False),
        Field("times_fp32", form="{:.2f}", right=False),
        Field("sqnr_db", "dB", "{:.1f}", right=False),
        Field("why", ""),
    )
    for choice in profile.plan.choices:
        expected = choice.expected
        table.add(
            choice.site,
            *((choice.of,) if training else ()),
            choice.rows,
            (choice.outputs, choice.inputs),
            choice.kernel,
            expected.get("ms"),
            expected.get("times_fp32"),
            float(expected["accuracy"]["sqnr_db"]) if expected and choice.kernel != "fp32" else None,
            choice.why,
        )
    return table
