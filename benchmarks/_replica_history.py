"""What replicas trained, trained again by one process: the steps of a log of commits, or of a schedule of absence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cordillera.data.language.batches import PackedTokens
from cordillera.data.language.prefetch import IterationsAhead
from cordillera.distributed.dtensors import local
from cordillera.distributed.fault_tolerance.events import read_events
from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
from cordillera.models.language.checkpoints.sharded import WEIGHTS, ShardedFolder
from cordillera.recipe import LanguageRecipe
from cordillera.run import Run
from cordillera.training.checkpoints import folder_of, steps
from cordillera.training.language.engine import LanguageEngine, StepReport
from cordillera.workflows.language import batches_of, prepare


def committed(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of the history that ends with the newest commit of a job, each once."""
    found = [e for e in read_events(folder) if e["kind"] == "step" and e["outcome"] == "committed"]
    by_lineage = {event["lineage"]: event for event in found}
    last, history = max(found, key=lambda event: (event["epoch"], event["step"]))["lineage"], []
    while last in by_lineage:
        history.append(by_lineage[last])
        last = by_lineage[last]["parent"]
    return history[::-1]


def check_history(history: Sequence[dict[str, Any]], last: int) -> None:
    """Check that every step is there once, and every iteration of the text is in one of them.

    Raises:
        AssertionError: If not.
    """
    assert [event["step"] for event in history] == list(range(1, last + 1))
    first = 0
    for event in history:
        assert event["first"] == first
        first += event["iterations"]


def weights_of(run: Run) -> dict[str, Tensor]:
    """Return the weights of the newest checkpoint of a run."""
    folder = ShardedFolder(folder_of(run.checkpoints, steps(run.checkpoints)[-1]))
    parts, found = folder.parts(WEIGHTS), {}
    for name, shape in parts.shapes.items():
        found[name] = torch.empty(shape)
        parts.read(name, (0,) * len(shape), found[name])
    return found


class Replay:
    """Training of what replicas train by this process alone, one part after the other, with sums in their order.

    Args:
        recipe: Recipe of the replicas.
    """

    def __init__(self, recipe: LanguageRecipe) -> None:
        alone = recipe.model_copy(update={"parallel": ParallelConfig()})
        self.corpora = prepare(recipe)
        self.engine = LanguageEngine(recipe.training, recipe.model, ProcessMesh(alone.parallel), recipe.seed)
        self._iterations = IterationsAhead(batches_of(recipe, self.corpora))

    def step(self, iterations: int, participants: int, rate: float, first: int | None = None) -> StepReport:
        """Train one step.

        Args:
            iterations: Iterations of the text that it takes.
            participants: Replicas among which they are shared out in turn.
            rate: Factor of the learning rate.
            first: Number of the first of these iterations, if known.
        """
        own = self._iterations.look(iterations)
        assert first is None or own[0].number == first
        parts, total, loss = [], 0, 0.0
        for place in range(participants):
            microbatches = [one for iteration in own[place::participants] for one in iteration.microbatches]
            part, targets = self.engine.backward(microbatches)
            factor = float(targets) if participants > 1 else 1.0
            parts.append([one * factor for one in self.engine.gradients()])
            total, loss = total + targets, loss + part * targets
            self.engine.discard()
        for place, gradient in enumerate(self.engine.gradients()):
            summed = parts[0][place]
            for other in parts[1:]:
                summed = summed + other[place]
            gradient.copy_(summed / float(total) if participants > 1 else summed)
        report = self.engine.update(loss / total, total, rate)
        self._iterations.take(iterations)
        return report

    def follow(self, history: Sequence[dict[str, Any]]) -> None:
        """Train the steps of a log of commits."""
        for event in history:
            self.step(event["iterations"], len(event["participants"]), event["rate"], event["first"])

    def weights(self) -> dict[str, Tensor]:
        """Return the present weights by name."""
        (stage,) = self.engine.stages.values()
        return {name: local(one).clone() for name, one in stage.named_parameters()}

    def evaluate(self, microbatches: Sequence[PackedTokens]) -> float:
        """Return the mean loss of the present weights."""
        loss, targets = self.engine.evaluate(microbatches)
        return loss / targets
