"""Log-probabilities of the tokens of texts, equal to the bit in training and in generation.

In float32 on a CPU, all that is computed for a token is summed in an order that depends on its own text alone: products
of rows by MKL's repeatable mode, attention from the first key to the last. A server that reads a prompt in parts, and
writes the rest a token or a few drafted ones at a time, beside whichever texts, therefore gives tokens the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cordillera.kernels.repeatable import LEAST_ROWS, in_order
from cordillera.models.language.llama import Llama


def token_log_probabilities(
    model: Llama, tokens: Tensor, offsets: Tensor, vocabulary: int | None = None, rows: int = 1024
) -> Tensor:
    """Compute the logarithm of the probability of each token after those before it in its document, with gradients.

    For a dense float32 model on a CPU whose heads' width is a multiple of 32, these are the bits that
    :class:`~cordillera.serving.language.engine.Engine` reports for the same weights after
    :func:`~cordillera.serving.language.generation.for_decoding` with ``as_trained``, in any packing, if it runs
    :func:`~cordillera.kernels.repeatable.in_order` and :func:`~cordillera.kernels.repeatable.rows_repeat`.

    Args:
        model: The model.
        tokens: Tokens of documents, one after another, ``int64 [T]``.
        offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.
        vocabulary: Number of ids that can follow, as in the engine; None for all.
        rows: Number of rows whose logits exist at a time, at least 8.

    Returns:
        ``[T]``, in 32 bits or those of a 64-bit model; 0 for the first token of each document.
    """
    given = len(tokens)
    if lacking := max(0, LEAST_ROWS - given):  # a document of its own
        tokens = torch.cat([tokens, tokens.new_zeros(lacking)])
        offsets = torch.cat([offsets, offsets[-1:] + lacking])
    with in_order():
        hidden = model.hidden(tokens, offsets)
    following = tokens.roll(-1)
    parts = [
        checkpoint(_of_rows, model, part, ids, vocabulary, use_reentrant=False)
        for part, ids in zip(_split(hidden, rows), _split(following, rows), strict=True)
    ]
    found = torch.cat(parts).roll(1)
    is_first = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    is_first[offsets[:-1][offsets[1:] > offsets[:-1]].to(tokens.device)] = True
    return found.masked_fill(is_first, 0.0)[:given]


def _split(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Split into nearly equal parts of at most ``rows`` rows, so that no part has only one or two."""
    return x.tensor_split(-(-len(x) // rows))


def _of_rows(model: Llama, hidden: Tensor, following: Tensor, vocabulary: int | None) -> Tensor:
    logits = model.logits(hidden)[:, :vocabulary]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.log_softmax(wide, -1).gather(1, following[:, None]).squeeze(1)
