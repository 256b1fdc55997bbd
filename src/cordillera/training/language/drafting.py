"""Loss of a drafter that learns beside the frozen model that it drafts for (online distillation).

The model computes features and probabilities in the same step, so that both are those of serving by construction. The
drafter is unrolled as it is used: step 0 reads the model's features, each later step what the step before computed
(training-time test). At step ``j``, the row of token ``i`` stands for token ``i + 1 + j``; it sees the rows of step 0
up to ``i`` and its own earlier steps.

Sources: Li et al. 2025 (EAGLE-3), section 3.1; Meta 2025 (arXiv 2508.08192) for distillation with the model in the
training step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cordillera.distributed.dtensors import local
from cordillera.distributed.vocabulary_loss import IGNORED
from cordillera.kernels.attention.jagged import jagged_attention
from cordillera.kernels.attention.jagged_call import JaggedMask
from cordillera.models.language.draft_model import DraftModel
from cordillera.models.language.llama import Core, LlamaConfig, document_positions
from cordillera.models.language.rope import rope_table
from cordillera.models.language.stages import LlamaStage
from cordillera.training.language.objectives import AnswersObjective, DraftingConfig

_CAUSAL = JaggedMask(causal=True)


class UnrolledAttention:
    """Attention of one layer of a drafter over the steps of its unrolling.

    A query of step ``j`` sees the keys of step 0 up to its own row, and the keys of its row at steps 1 to ``j``.
    """

    def __init__(self) -> None:
        self._first: tuple[Tensor, Tensor] | None = None
        self._later: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        """Return the output ``[T, H, D]`` of the next step; ``q [T, H, D]``, ``k`` and ``v [T, G, D]``."""
        if self._first is None:
            self._first = (k, v)
            return jagged_attention(q, k, v, offsets, mask=_CAUSAL)[0]
        self._later.append((k, v))
        out, ends = jagged_attention(q, *self._first, offsets, mask=_CAUSAL)  # [T, H, D], [T, H]
        groups = q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = [ends.to(wide)]
        values = [out.to(wide)]
        for keys, own in self._later:
            keys, own = (part.repeat_interleave(groups, 1).to(wide) for part in (keys, own))
            scores.append((q.to(wide) * keys).sum(-1) / math.sqrt(q.shape[2]))
            values.append(own)
        shares = torch.stack(scores).softmax(0)  # [1 + steps, T, H]
        return torch.einsum("sth,sthd->thd", shares, torch.stack(values)).to(q.dtype)


def soft_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int = 1024) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy between target probabilities and ``softmax(hidden weight^T)``.

    ``weight`` gets no gradient. The logits of ``rows`` rows exist at a time.

    Args:
        hidden: Inputs of the head, ``[n, H]``.
        weight: Weights of the head, ``[V, H]``.
        targets: Probabilities, ``float32 [n, V]``; a row of zeros has no loss.

    Returns:
        Sum over rows, and the likeliest id of each row, ``int64 [n]``.
    """
    total, likeliest = _SoftCrossEntropy.apply(hidden, weight, targets, rows, torch.is_grad_enabled())
    return total, likeliest


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, differentiates: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        likeliest = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        dhidden = torch.zeros_like(hidden) if differentiates else None
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            logits = (hidden[part] @ weight.T).to(wide)
            likeliest[part] = logits.argmax(1)
            logs, wanted = logits.log_softmax(1), targets[part]
            total -= torch.dot(wanted.flatten(), logs.flatten())
            if dhidden is not None:
                gradient = logs.exp_().mul_(wanted.sum(1, keepdim=True)).sub_(wanted)
                dhidden[part] = gradient.to(weight.dtype) @ weight
        if dhidden is not None:
            ctx.save_for_backward(dhidden)
        ctx.mark_non_differentiable(likeliest)
        return total, likeliest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        (dhidden,) = ctx.saved_tensors
        return (dhidden * gradient).to(dhidden.dtype), None, None, None, None


def unroll(
    draft: DraftModel, config: LlamaConfig, embedding: nn.Module, tokens: Tensor, features: Tensor, offsets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Unroll a drafter as in generation, but with the text's own tokens in place of drafted ones.

    Args:
        draft: The drafter.
        config: Configuration of its model.
        embedding: Embedding of its model.
        tokens: Tokens of documents, ``int64 [T]``.
        features: Outputs of the tapped blocks, side by side, ``[T, taps x hidden]``.
        offsets: Offsets at which documents begin, followed by ``T``, ``int64 [B + 1]``.

    Returns:
        For each step, the drafter's features ``[T, hidden]``, and the place of the token that each row read, ``int64
        [T]``, whose successor it predicts; -1 after the end of a document.
    """
    device, count = tokens.device, len(tokens)
    ends = offsets[1:].to(device).repeat_interleave(offsets.diff().to(device))  # end of each token's document
    positions = document_positions(offsets, device)
    cores: list[Core] = [UnrolledAttention() for _ in draft.layers]
    x = first = draft.fused(features)
    for step in range(draft.config.length):
        places = torch.arange(1 + step, 1 + step + count, device=device)
        within = places < ends
        if draft.mask is not None and step:
            embedded, x = draft.mask.expand(count, -1), first
        else:
            embedded = embedding(tokens[torch.where(within, places, 0)])
        x = draft(embedded, x, offsets, rope_table(config, positions + step), cores)
        yield x, torch.where(within, places, -1)


class DraftObjective(AnswersObjective):
    """Loss of a drafter; see :class:`~cordillera.training.language.objectives.DraftingConfig`. Units are labels.

    ``accuracy`` is the share of first drafts that are the model's likeliest token, ``accepted`` the mean number of
    drafts in a row that are.
    """

    def __init__(self, config: DraftingConfig) -> None:
        super().__init__()
        self.config = config

    def __call__(
        self, stage: LlamaStage, hidden: Tensor, offsets: Tensor, labels: Tensor, documents: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss; see :class:`~cordillera.models.language.stages.Objective`."""
        draft, device = stage.draft, hidden.device
        assert draft is not None
        tapped = torch.cat([stage.tapped.pop(number) for number in draft.taps], 1)
        tokens, stage.tokens = stage.tokens, stage.tokens[:0]
        head, vocabulary = local(stage.head_weight), draft.config.vocabulary
        learnt = (labels != IGNORED).nonzero().squeeze(1)
        row_of = torch.full((len(tokens) + 1,), -1, device=device)  # the last is for places that there are not
        row_of[learnt] = torch.arange(len(learnt), device=device)
        wanted, top = _probabilities(hidden[learnt].detach(), head, vocabulary, stage.loss_rows)
        total = hidden.new_zeros((), dtype=wanted.dtype)
        in_a_row, first = list[Tensor](), learnt[:0]
        steps = unroll(draft, stage.config, stage.embedding, tokens, tapped, offsets)
        for step, (x, places) in enumerate(steps):
            anchors = (row_of[places] >= 0).nonzero().squeeze(1)
            rows = row_of[places[anchors]]
            loss, drafted = soft_cross_entropy(draft.norm(x[anchors]), head[:vocabulary], wanted[rows], stage.loss_rows)
            # every weight has a gradient, also without a label
            total = total + self.config.decay**step * loss + 0.0 * x.sum()
            is_right = torch.zeros(len(tokens), device=device)
            is_right[anchors] = (drafted == top[rows]).float()
            in_a_row.append(is_right * in_a_row[-1] if step else is_right)
            if not step:
                first = anchors
        if len(first):
            self._measure(accuracy=in_a_row[0][first], accepted=torch.stack(in_a_row).sum(0)[first])
        return total


@torch.no_grad()
def _probabilities(hidden: Tensor, head: Tensor, vocabulary: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the model's probabilities among the first ids, ``float32 [n, vocabulary]``, and its likeliest ids.

    Where the likeliest id is none of the first, probabilities are zero: nothing is learnt.
    """
    targets = hidden.new_empty(len(hidden), vocabulary, dtype=torch.promote_types(hidden.dtype, torch.float32))
    top = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for first in range(0, len(hidden), rows):
        logits = F.linear(hidden[first : first + rows], head)
        top[first : first + rows] = logits.argmax(1)
        targets[first : first + rows] = logits[:, :vocabulary].to(targets.dtype).softmax(1)
    targets[top >= vocabulary] = 0.0
    return targets, top
