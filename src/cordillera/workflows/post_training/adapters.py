"""Adapters of finished runs as folders that Hugging Face's ``peft`` reads."""

from __future__ import annotations

from pathlib import Path

from cordillera.errors import DataError
from cordillera.models.language.checkpoints import open_checkpoint
from cordillera.models.language.checkpoints.peft_adapter import save_peft
from cordillera.recipe import load
from cordillera.serving.language.language_model import find_model, find_tokenizer, run_of


def export_adapter(run: str | Path, folder: str | Path, base: str | None = None) -> str:
    """Write the adapters of a run's newest checkpoint, with its tokenizer, in the layout of ``peft``.

    Args:
        run: Folder of a run whose recipe has ``[model.adapter]``, or of one of its checkpoints.
        folder: Folder that is absent or empty.
        base: Name or path under which ``peft`` finds the model without adapters. Default: the recipe's
            ``training.start``.

    Returns:
        The base that was written.

    Raises:
        CheckpointError: If there is no checkpoint, it has no adapters, or the folder cannot be written.
        DataError: If the base is not known, or the tokenizer is missing.
    """
    checkpoint = find_model(run)
    opened, own = open_checkpoint(checkpoint), run_of(run, checkpoint)
    start = None if own is None else getattr(getattr(load(own.recipe_file), "training", None), "start", None)
    base = start if base is None else base
    if base is None:
        raise DataError("is not known", where="base", remedy="name the model that the adapters were trained on")
    save_peft(opened, Path(folder), base, find_tokenizer(run, checkpoint, opened.config.vocabulary), start)
    return base
