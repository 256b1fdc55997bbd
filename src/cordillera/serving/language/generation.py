"""Generation for any number of prompts of unequal length: one token a pass of the model, or more with drafts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from cordillera.errors import DataError
from cordillera.kernels.dense.few_rows import FewRowsLinear, use_few_rows
from cordillera.models.language.kv_cache import KVCache
from cordillera.models.language.llama import Llama, LlamaConfig, few_rows_of
from cordillera.numerics.quantization.fp8_rows import BOUND, Fp8Linear
from cordillera.numerics.sites import replace, sites
from cordillera.serving.language.engine import TOGETHER, Engine, Generated, check_prompt
from cordillera.serving.language.guided import Guide
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import Speculation


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] = (),
    sampling: Sampling | None = None,
    tokens: int | None = None,
    speculation: Speculation | None = None,
    guide: Callable[[], Guide] | None = None,
    over: Collection[int] = (),
    logprobs: int | None = None,
) -> Iterator[Generated]:
    """Continue prompts, up to 16 at a time, until a stop token, ``max_new_tokens`` or the end of the context.

    The result of a sequence depends neither on the other sequences nor on drafts. For a dense bfloat16 model on a CPU,
    after :func:`for_decoding`, that holds to the last bit of the logits, as for a float32 one ``as_trained`` where
    :func:`~cordillera.kernels.repeatable.rows_repeat`; otherwise, products of other shapes may round differently, which
    can decide between two tokens that are equally likely.

    Args:
        prompts: Token ids, one list per prompt.
        max_new_tokens: Largest number of new tokens of each prompt.
        stop: Ids of tokens that end a sequence, such as end of text and end of turn.
        sampling: Settings of sampling; None for the defaults of :class:`~cordillera.serving.language.sampler.Sampling`.
        tokens: Number of drawable ids, which are 0 to ``tokens - 1``, for vocabularies larger than their tokenizer.
            None for all.
        speculation: How tokens are drafted; None for one token a pass. A drafter that fails is not asked again, which
            is said in a warning.
        guide: Makes the guide of a text's form, whose end is one of ``stop``; None for any text.
        over: Numbers of prompts that are not to go on; the caller may add some after any token.
        logprobs: Number of most likely tokens whose log probabilities each new token holds, beside its own; None for
            no log probabilities.

    Returns:
        Tokens as they are generated: in each pass at least one for every sequence that is being continued. Errors of
        the prompts are raised at the call, before the first token is requested.

    Raises:
        DataError: If a prompt is empty, as long as the context or longer, or holds an id that is not a token;
            ``max_new_tokens`` is below 1; or, during generation, the model's logits are not finite.
    """
    check_prompts(model.config, prompts, max_new_tokens)
    return _generate(
        model, prompts, max_new_tokens, stop, sampling or Sampling(), tokens, speculation, guide, over, logprobs
    )


class StopStrings:
    """Finds the first of several strings to be complete in text that arrives in pieces.

    Where several are complete at once, the longest counts. What is found does not depend on how the text is cut.
    """

    def __init__(self, strings: Collection[str]) -> None:
        self._strings = [one for one in strings if one]
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> tuple[str, bool]:
        """Return the text that is sure to come before any of the strings, and whether one of them was found.

        Args:
            text: More text.
            last: Whether no more text comes.
        """
        text, self._held = self._held + text, ""
        places = [(place + len(one), place) for one in self._strings if (place := text.find(one)) >= 0]
        if places:
            return text[: min(places)[1]], True
        if last:
            return text, False
        longest = max((len(one) - 1 for one in self._strings), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(one.startswith(text[-size:]) for one in self._strings):
                self._held = text[-size:]
                return text[:-size], False
        return text, False


def for_decoding(model: Llama, *, as_trained: bool = False) -> Llama:
    """Replace the linear layers of a model by ones for few rows, in place, and return the model.

    Weights stay where they are. A tied head becomes a layer over the embedding's weights. Only models on a CPU are
    changed: bfloat16 ones, for speed, and float32 ones if ``as_trained``. One token is read, so that kernels are
    compiled now and not at the first token.

    Args:
        as_trained: Whether tokens of a float32 model have the log-probabilities, to the bit, of
            :func:`~cordillera.models.language.likelihood.token_log_probabilities`. A pass over one to three tokens then
            takes up to twice as long, one over more as long as before.
    """
    weight = model.embedding.weight
    if weight.device.type != "cpu":
        return model
    if weight.dtype == torch.bfloat16 or (as_trained and weight.dtype == torch.float32):
        use_few_rows(model)
        if model.head is None:
            model.head = FewRowsLinear(weight)
        model.few = few_rows_of(model.layers)
    with torch.inference_mode():
        model(torch.tensor([0]), torch.tensor([0, 1]), cache=KVCache(model.config, 1, 1, weight.dtype))
    return model


def fp8_feed_forward(model: Llama, bound: float | None = BOUND) -> Llama:
    """Put the feed-forward nets of a model into FP8, in place, except those of the first and the last block; return it.

    Source: Grattafiori et al. 2024, section 6.2.

    Args:
        bound: Largest magnitude of an activation that sets the scale of its row; larger ones are cut to it. None for no
            bound, for models whose activations are larger than the published bound in every text.

    Raises:
        DataError: If the model has experts or fewer than three blocks.
        NumericsError: If a weight is not finite.
    """
    if model.config.experts is not None:
        raise DataError("experts are not computed in FP8", where="fp8", remedy="leave it out")
    if model.config.layers < 3:
        raise DataError("is never used in the first and the last block, and there is no other", where="fp8")
    ends = ("layers.0.", f"layers.{model.config.layers - 1}.")
    for name, layer in sites(model, only=["layers.*.feed_forward.*"]).items():
        if not name.startswith(ends):
            replace(model, name, Fp8Linear(layer.weight, bound))
    return model


def check_prompts(config: LlamaConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Check that :func:`generate` can continue ``prompts`` by ``max_new_tokens`` with a model of ``config``.

    Raises:
        DataError: If a prompt is empty, too long or holds an id that is not a token, or ``max_new_tokens`` is below 1.
    """
    for number, prompt in enumerate(prompts, 1):
        check_prompt(config, prompt, max_new_tokens, "prompt" if len(prompts) == 1 else f"prompt {number}")


def _generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling,
    tokens: int | None,
    speculation: Speculation | None,
    guide: Callable[[], Guide] | None,
    over: Collection[int],
    logprobs: int | None,
) -> Iterator[Generated]:
    if not prompts:
        return
    capacity = max(len(prompt) for prompt in prompts) + max_new_tokens
    texts = min(len(prompts), TOGETHER)
    engine = Engine(model, texts=texts, capacity=capacity, speculation=speculation, vocabulary=tokens)
    for number, prompt in enumerate(prompts):
        own = sampling.model_copy(update={"seed": sampling.seed + number})
        engine.add(prompt, max_new_tokens, stop, own, None if guide is None else guide(), logprobs)
    while engine.waiting or engine.running:
        for token in engine.step():
            if token.error is not None:
                raise token.error
            if token.sequence not in over:
                yield token
                if token.sequence in over:
                    engine.cancel(token.sequence)
