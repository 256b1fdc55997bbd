"""Means of models that were trained from one beginning.

Source: Grattafiori et al. 2024, section 4.1.5; Wortsman et al. 2022 (model soups).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from cordillera.errors import DataError
from cordillera.models.language.checkpoints import open_checkpoint, read_model, save_hugging_face
from cordillera.models.language.checkpoints.source import check_architecture
from cordillera.serving.language.language_model import find_model, find_tokenizer


def average(models: Sequence[str | Path], folder: Path | str) -> Path:
    """Write the mean of the weights of models, in float32, as a checkpoint in Hugging Face's layout.

    The folder also holds the tokenizer of the first model, if that has one. Adapters are merged and drafters left out
    first. Sums are in float64.

    Args:
        models: Two or more names, checkpoints or runs of the same architecture.
        folder: Folder that is made.

    Raises:
        DataError: If there are fewer than two models, or one is a reward model.
        CheckpointError: If a checkpoint is missing or damaged, or of another architecture, or the folder exists.
    """
    if len(models) < 2:
        raise DataError("needs two models or more", where="average", remedy="write one model with `cordillera convert`")
    sources = [open_checkpoint(find_model(name)) for name in models]
    plain = [source.config.model_copy(update={"adapter": None, "draft": None}) for source in sources]
    for name, source, config in zip(models, sources, plain, strict=True):
        if config.scores:
            raise DataError(
                "is a reward model, which Hugging Face's layout of a Llama has no place for", where=str(name)
            )
        check_architecture(plain[0], config, source.path)
    mean = read_model(sources[0])
    sums = {name: weight.detach().double() for name, weight in mean.named_parameters()}
    for source in sources[1:]:
        for name, weight in read_model(source).named_parameters():
            sums[name] += weight.detach()
    with torch.no_grad():
        for name, weight in mean.named_parameters():
            weight.copy_(sums[name] / len(sources))
    tokenizer = None
    with contextlib.suppress(DataError):
        tokenizer = find_tokenizer(models[0], sources[0].path, plain[0].vocabulary)
    save_hugging_face(mean, folder, tokenizer=tokenizer)
    return Path(folder)
