"""llama.cpp with a GGUF file, one text at a time; it rounds activations to eight bits."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F


class LlamaCpp:
    """A model of llama.cpp, on as many threads as torch has.

    Args:
        path: GGUF file.
        context: Longest text, in tokens.
        scores: Whether the logits of all tokens are kept, for :meth:`loss`.

    Raises:
        ImportError: If ``llama-cpp-python`` is not installed.
    """

    def __init__(self, path: Path, context: int, *, scores: bool = False) -> None:
        import llama_cpp

        threads = torch.get_num_threads()
        self._model = llama_cpp.Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, logits_all=scores, verbose=False
        )

    def write(self, ids: list[int], tokens: int, stop: Collection[int] = ()) -> list[int]:
        """Return at most so many greedy tokens after a prompt, the last of which may be one of ``stop``."""
        self._model.reset()
        found: list[int] = []
        for token in self._model.generate(ids, temp=0.0):
            found.append(token)
            if token in stop or len(found) == tokens:
                break
        return found

    def loss(self, texts: list[list[int]]) -> float:
        """Return the mean negative log-likelihood of the tokens after the first of each text."""
        losses = []
        for ids in texts:
            self._model.reset()
            self._model.eval(ids)
            scores = torch.from_numpy(np.array(self._model.scores[: len(ids) - 1])).double()
            losses.append(F.cross_entropy(scores, torch.tensor(ids[1:])).item())
        return float(np.mean(losses))
