"""Comparison of a written plan with a training job: the model, its steps, its mesh and the processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cordillera.data.language.batches import BatchConfig
from cordillera.distributed.job.environment import place_in_job
from cordillera.distributed.planned_mesh import PlannedParallelConfig
from cordillera.errors import PlanError
from cordillera.kernels.threads import usable_cores
from cordillera.models.language.llama import LlamaConfig
from cordillera.planning.language.plan_file import WrittenPlan

_UNPLANNED = ("sharding", "experts", "transport", "backend", "deadline_s")  # keys of the mesh that no plan determines
_MOST_SHOWN = 60  # characters of a value in a message


def differences(
    plan: WrittenPlan,
    mesh: PlannedParallelConfig,
    model: LlamaConfig,
    packing: BatchConfig,
    parallel: PlannedParallelConfig,
) -> list[tuple[str, str]]:
    """Return the keys of a recipe that a plan with this ``mesh`` contradicts, each with a sentence for its author.

    ``model``, ``packing`` and ``parallel`` are sections of the recipe; keys of ``parallel`` that it does not state
    contradict nothing.
    """
    return [*_other_model(plan, model), *_other_steps(plan, packing), *_stated_otherwise(plan, mesh, parallel)]


def check_processes(plan: WrittenPlan, processes: int | None) -> None:
    """Check that there will be as many processes as the plan has devices.

    Args:
        plan: The plan.
        processes: Number of processes to start on this machine, if no launcher has started any; None for the number of
            devices, which must then not be larger than the number of processors.

    Raises:
        PlanError: If the numbers differ.
    """
    place, devices = place_in_job(), plan.layout.devices
    started = processes if place is None else place.size
    if started == devices or (started is None and devices <= usable_cores()):
        return
    found = f"this launch has {started}" if started is not None else f"this machine has {usable_cores()} processors"
    remedy = f"torchrun --nproc-per-node {devices} -m -- cordillera train ... (--nnodes for several machines)"
    if place is None:
        remedy = f"--nproc {devices} starts them on this machine, torchrun on several"
    raise PlanError(
        f"the plan is for {devices} {'device' if devices == 1 else 'devices'}; {found}",
        where=plan.file,
        remedy=f"{remedy}; or plan again with --devices",
    )


def _other_model(plan: WrittenPlan, model: LlamaConfig) -> Iterator[tuple[str, str]]:
    """Iterate over the sizes of the model that differ from the planned model's."""
    planned = plan.workload.model
    sizes = {
        "layers": (planned.layers, model.layers),
        "hidden": (planned.hidden, model.hidden),
        "heads": (planned.heads, model.heads),
        "kv_heads": (planned.kv_heads or planned.heads, model.kv_heads),
        "head_dim": (planned.head, model.head_width),
        "ffn": (planned.ffn or 4 * planned.hidden, model.ffn),
        "vocabulary": (planned.vocabulary, model.vocabulary),
        "tied": (planned.tied, model.tied),
        "gated": (planned.gated, True),
        "fused_attention": (planned.fused_attention, True),
        "experts": (planned.experts and planned.experts.count, model.experts and model.experts.count),
    }
    for name, (theirs, own) in sizes.items():
        if theirs != own:
            yield (
                f"model.{name}",
                f"{plan.file} says {_shown(theirs)}, the recipe's model has {_shown(own)}: plan again for this model",
            )


def _other_steps(plan: WrittenPlan, packing: BatchConfig) -> Iterator[tuple[str, str]]:
    """Iterate over the keys of ``packing`` that differ from the planned steps."""
    batch, sequence = plan.workload.batch, plan.workload.sequence
    steps = {
        "tokens": (batch * sequence, f"batch {batch} x sequence {sequence} = {batch * sequence} tokens"),
        "context": (sequence, f"sequence {sequence}"),
    }
    for name, (planned, words) in steps.items():
        if (own := getattr(packing, name)) != planned:
            remedy = f"set packing.{name}={planned}, or plan again"
            yield f"packing.{name}", f"{plan.file} says {words}, the recipe says {own}: {remedy}"
    if packing.microbatches not in (None, plan.microbatches):
        yield "packing.microbatches", _conflict(plan, "packing.microbatches", plan.microbatches, packing.microbatches)


def _stated_otherwise(
    plan: WrittenPlan, mesh: PlannedParallelConfig, parallel: PlannedParallelConfig
) -> Iterator[tuple[str, str]]:
    """Iterate over the keys of ``parallel`` that the recipe states and the plan determines otherwise."""
    for name in PlannedParallelConfig.model_fields:
        stated, planned = getattr(parallel, name), getattr(mesh, name)
        if name in _UNPLANNED or name not in parallel.model_fields_set or stated == planned:
            continue
        if name == "schedule":
            planned = plan.schedule.name
        yield f"parallel.{name}", _conflict(plan, f"parallel.{name}", planned, stated)


def _conflict(plan: WrittenPlan, key: str, planned: object, stated: object) -> str:
    name = key.rpartition(".")[2]
    return (
        f"{plan.file} says {name} {_shown(planned)}, the recipe says {_shown(stated)}: "
        f"remove {key} from the recipe or plan again"
    )


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else ", ".join(value) if isinstance(value, tuple) else json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
