"""Drafters of finished runs as files, as serving reads them."""

from __future__ import annotations

from pathlib import Path

from cordillera.errors import DataError
from cordillera.models.language.checkpoints import open_checkpoint
from cordillera.models.language.checkpoints.drafter_file import write_drafter
from cordillera.run import Run, read_recipe
from cordillera.serving.language.language_model import find_model, run_of


def export_drafter(run: str | Path, file: str | Path) -> Path:
    """Write the drafter of a run's newest checkpoint to a file, in ``bfloat16``.

    Args:
        run: Folder of a run whose objective is ``draft``, or of one of its checkpoints.
        file: File that is written, ``.safetensors``.

    Raises:
        CheckpointError: If there is no checkpoint, or it has no drafter.
        DataError: If the file has another ending.
        NumericsError: If the file cannot be written.
        RunError: If the disk is full or read-only.
    """
    path = Path(file)
    if path.suffix != ".safetensors":
        raise DataError("is no file of tensors", where=str(path), remedy="end its name in .safetensors")
    checkpoint = find_model(run)
    own = run_of(run, checkpoint)
    evaluations = [] if own is None else [one for one in own.metrics() if one["kind"] == "evaluation"]
    facts = _facts(own, evaluations)
    write_drafter(open_checkpoint(checkpoint), path, facts)
    return path


def _facts(run: Run | None, evaluations: list[dict[str, object]]) -> dict[str, object]:
    """Return facts on a run's training: its recipe, and its last evaluation."""
    if run is None:
        return {}
    recipe, _ = read_recipe(run)
    last = evaluations[-1] if evaluations else {}
    return {"recipe": recipe, "evaluation": {name: last[name] for name in ("step", "loss", "measures") if name in last}}
