"""Generation for a batch of prompts of unequal length: one token a pass of the model, or more with drafts."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from cordillera.errors import DataError
from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.dense.few_rows import FewRowsLinear
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Cache, Llama, LlamaConfig
from cordillera.serving.language.sampler import Sampling, draw_noise, sample
from cordillera.serving.language.speculation import (
    MOST_ROWS,
    NOTHING,
    Drafter,
    DraftTree,
    Speculation,
    checked,
    choose,
)


class Generated(NamedTuple):
    """One new token.

    Attributes:
        sequence: Number of the prompt that the token continues.
        token: Id of the token.
        finish: Reason why the sequence ends here: ``stop`` (a stop token) or ``length``; None while it continues.
        forward: Number of the model's pass that decided on the token, from 0.
    """

    sequence: int
    token: int
    finish: Literal["stop", "length"] | None
    forward: int


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] = (),
    sampling: Sampling | None = None,
    tokens: int | None = None,
    speculation: Speculation | None = None,
) -> Iterator[Generated]:
    """Continue prompts, all together, until a stop token, ``max_new_tokens`` or the end of the context.

    The result of a sequence depends neither on the other sequences nor on drafts. With up to 16 tokens a pass, that
    holds to the last bit of the logits for a dense bfloat16 model on a CPU, after :func:`for_decoding`; otherwise,
    products of other shapes may round differently, which can decide between two tokens that are equally likely.

    Args:
        prompts: Token ids, one list per prompt.
        max_new_tokens: Largest number of new tokens of each prompt.
        stop: Ids of tokens that end a sequence, such as end of text and end of turn.
        sampling: Settings of sampling; None for the defaults of :class:`~cordillera.serving.language.sampler.Sampling`.
        tokens: Number of drawable ids, which are 0 to ``tokens - 1``, for vocabularies larger than their tokenizer.
            None for all.
        speculation: How tokens are drafted; None for one token a pass. A drafter that fails is not asked again, which
            is said in a warning.

    Returns:
        Tokens as they are generated: in each pass at least one for every unfinished sequence, in the order of prompts.
        Errors of the prompts are raised at the call, before the first token is requested.

    Raises:
        DataError: If a prompt is empty, as long as the context or longer, or holds an id that is not a token;
            ``max_new_tokens`` is below 1; or, during generation, the model's logits are not finite.
    """
    check_prompts(model.config, prompts, max_new_tokens)
    return _generate(model, prompts, max_new_tokens, frozenset(stop), sampling or Sampling(), tokens, speculation)


def for_decoding(model: Llama) -> Llama:
    """Replace the linear layers of a model by ones that are fast on few rows, in place, and return the model.

    Weights stay where they are. A tied head becomes a layer over the embedding's weights. Only bfloat16 models on a CPU
    are changed. One token is read, so that kernels are compiled now and not at the first token.
    """
    weight = model.embedding.weight
    if weight.device.type != "cpu":
        return model
    if weight.dtype == torch.bfloat16:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, FewRowsLinear(child.weight))
        if model.head is None:
            model.head = FewRowsLinear(weight)
    with torch.inference_mode():
        model(torch.tensor([0]), torch.tensor([0, 1]), cache=KVCache(model.config, 1, 1, weight.dtype))
    return model


def check_prompts(config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that :func:`generate` can continue ``prompts`` by ``max_new_tokens`` with a model of ``config``.

    Raises:
        DataError: If a prompt is empty, too long or holds an id that is not a token, or ``max_new_tokens`` is below 1.
    """
    if max_new_tokens < 1:
        raise DataError(f"{max_new_tokens} is not a number of tokens", where="max_new_tokens", remedy="ask for some")
    for number, prompt in enumerate(prompts):
        where = f"prompt {number}"
        if not prompt:
            raise DataError("holds no token", where=where, remedy="begin it with the begin-of-text token")
        if len(prompt) >= config.context:
            raise DataError(
                f"has {len(prompt)} tokens; with at least one more it does not fit the context of {config.context}",
                where=where,
                remedy="shorten it, or use a model with a longer context",
            )
        for place, token in enumerate(prompt):
            if not 0 <= token < config.vocabulary:
                raise DataError(
                    f"token {place} is {token}, not an id from 0 to {config.vocabulary - 1}",
                    where=where,
                    remedy="use the tokenizer that belongs to the model",
                )


def _generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: frozenset[int],
    sampling: Sampling,
    tokens: int | None,
    speculation: Speculation | None,
) -> Iterator[Generated]:
    if not prompts:
        return
    weight = model.embedding.weight
    limits = [min(max_new_tokens, model.config.context - len(prompt)) for prompt in prompts]
    # The last token of a sequence is never read and needs no room; drafts need some.
    room = MOST_ROWS if speculation is not None else 0
    capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) - 1 + room
    cache = KVCache(model.config, len(prompts), capacity, weight.dtype, weight.device)
    drafts = None if speculation is None else _Drafts(speculation, prompts, tokens or model.config.vocabulary)
    rows = [list(prompt) for prompt in prompts]  # tokens not yet read; empty once a sequence has ended
    counts = [0] * len(prompts)
    for forward in count():
        going = [sequence for sequence, row in enumerate(rows) if row]
        if not going:
            return
        trees = [NOTHING] * len(prompts)
        if drafts is not None and forward:  # prompts are read alone: passes of many rows round differently
            left = [limit - done for limit, done in zip(limits, counts, strict=True)]
            trees = drafts.propose(going, left)
        for sequence, found in _step(model, cache, rows, trees, sampling, tokens):
            rows[sequence] = []
            for number, token in enumerate(found, 1):
                counts[sequence] += 1
                finish: Literal["stop", "length"] | None = "length" if counts[sequence] == limits[sequence] else None
                if token in stop:
                    finish = "stop"
                if number == len(found) and not finish:
                    rows[sequence] = [token]
                yield Generated(sequence, token, finish, forward)
                if finish:
                    break
            if drafts is not None and not finish:
                drafts.add(sequence, found)


class _Drafts:
    """The drafters of a batch; one that fails is dropped."""

    def __init__(self, speculation: Speculation, prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
        self._costs, self._vocabulary = speculation.costs, vocabulary
        self._drafters: dict[int, Drafter] = {}
        for sequence, prompt in enumerate(prompts):
            with self._dropping(sequence):
                self._drafters[sequence] = speculation.drafter()
                self._drafters[sequence].add(prompt)

    @contextmanager
    def _dropping(self, sequence: int) -> Iterator[None]:
        """Drop a drafter that fails, whatever it raises: the text does not need it."""
        try:
            yield
        except Exception as error:
            self._drafters.pop(sequence, None)
            warnings.warn(f"prompt {sequence} goes on without drafts, as its drafter failed: {error}", stacklevel=3)

    def add(self, sequence: int, tokens: list[int]) -> None:
        """Tell the drafter of a sequence how it went on."""
        if (drafter := self._drafters.get(sequence)) is not None:
            with self._dropping(sequence):
                drafter.add(tokens)

    def propose(self, going: list[int], left: list[int]) -> list[DraftTree]:
        """Return one tree for each of all sequences, of which ``left`` tokens are missing."""
        trees = [NOTHING] * len(left)
        most = min(MOST_ROWS, len(self._costs)) - len(going)
        for sequence in going:
            if most > 0 and left[sequence] > 1 and (drafter := self._drafters.get(sequence)) is not None:
                with self._dropping(sequence):
                    deepest = left[sequence] - 1  # the pass itself gives one more
                    trees[sequence] = checked(drafter.propose(most, deepest), self._vocabulary, most, deepest)
        if any(tree.tokens for tree in trees):
            chosen = choose([trees[sequence] for sequence in going], self._costs)
            for sequence, tree in zip(going, chosen, strict=True):
                trees[sequence] = tree
        return trees


@torch.inference_mode()
def _step(
    model: Llama,
    cache: KVCache,
    rows: list[list[int]],
    trees: list[DraftTree],
    sampling: Sampling,
    vocabulary: int | None,
) -> list[tuple[int, list[int]]]:
    """Return the next tokens of each unfinished sequence, after the model has read ``rows`` and ``trees`` after them.

    The cache then holds the rows and the drafted tokens that were right, and not the last of the new tokens.
    """
    device = model.embedding.weight.device
    before, sizes = list(cache.lengths), [len(row) for row in rows]
    read = [row + tree.tokens for row, tree in zip(rows, trees, strict=True)]
    offsets = offsets_from_lengths(torch.tensor([len(one) for one in read]))
    view: Cache = cache
    if any(tree.tokens for tree in trees):
        view = cache.branching([_parents(size, tree) for size, tree in zip(sizes, trees, strict=True)])
    hidden = model.hidden(torch.tensor([token for one in read for token in one], device=device), offsets, cache=view)
    going = [sequence for sequence, row in enumerate(rows) if row]
    starts = offsets.tolist()
    asked = [  # rows of the last token of each sequence and of its drafts
        row for s in going for row in range(starts[s] + sizes[s] - 1, starts[s + 1])
    ]
    logits = model.logits(hidden[torch.tensor(asked, device=device)])[:, :vocabulary]
    noise = None
    if sampling.temperature > 0:
        levels = [  # position of the token that follows each of the rows
            before[s] + sizes[s] + level for s in going for level in (0, *_levels(trees[s]))
        ]
        own = [s for s in going for _ in range(1 + len(trees[s].tokens))]
        drawn: dict[tuple[int, int], Tensor] = {}
        for key in zip(own, levels, strict=True):
            if key not in drawn:
                drawn[key] = draw_noise(sampling.seed + key[0], key[1], logits.shape[1], device)
        noise = torch.stack([drawn[key] for key in zip(own, levels, strict=True)])
    following = iter(sample(logits, sampling, noise).tolist())
    found, kept = [], [list(range(size)) for size in sizes]
    for sequence in going:
        tree = trees[sequence]
        after = [next(following) for _ in range(1 + len(tree.tokens))]  # what follows the last token and each draft
        children = {
            (parent, token): place for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
        }
        place, tokens = -1, [after[0]]
        while (place := children.get((place, tokens[-1]), -2)) >= 0:
            kept[sequence].append(sizes[sequence] + place)
            tokens.append(after[1 + place])
        found.append((sequence, tokens))
    if view is not cache:
        cache.keep(before, kept)
    return found


def _parents(size: int, tree: DraftTree) -> list[int]:
    """Parents of a row of ``size`` tokens and of the tree after it, as a cache takes them."""
    return [*range(-1, size - 1), *(size + parent if parent >= 0 else size - 1 for parent in tree.parents)]


def _levels(tree: DraftTree) -> list[int]:
    """Level of each token of a tree, from 1."""
    found: list[int] = []
    for parent in tree.parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found
