"""Generation against a loop without a cache, one prompt after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.errors import DataError
from cordillera.kernels.dense.few_rows import FewRowsLinear
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.serving.language.engine import Generated
from cordillera.serving.language.generation import for_decoding, generate
from cordillera.serving.language.sampler import Sampling, draw_noise, sample

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = Sampling(temperature=0)
CONTEXT = 24


def _model() -> Llama:
    """In double precision, so that sums in another order cannot change a token."""
    model = Llama(LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=29, context=CONTEXT))
    model.double().init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
    return model


MODEL = _model()


def _continue(prompt: Sequence[int], count: int, stop: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
    """One token at a time, everything computed anew."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + count, CONTEXT):
        with torch.no_grad():
            logits = MODEL(torch.tensor(tokens), torch.tensor([0, len(tokens)]))[-1:]
        noise = draw_noise(seed, len(tokens), logits.shape[1])
        tokens.append(int(sample(logits, sampling, noise[None])))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


_PROMPTS = st.lists(st.lists(st.integers(0, 28), min_size=1, max_size=CONTEXT - 1), min_size=1, max_size=4)


@settings(max_examples=40)
@given(
    prompts=_PROMPTS,
    count=st.sampled_from([1, 2, 6, 30]),
    stop=st.lists(st.integers(0, 28), max_size=6),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_a_batch_is_what_each_prompt_alone_would_become(
    prompts: list[list[int]], count: int, stop: list[int], temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, seed=5)
    found: list[list[int]] = [[] for _ in prompts]
    ends: list[str | None] = [None] * len(prompts)
    for sequence, token, finish, *_ in generate(MODEL, prompts, count, stop, sampling):
        assert ends[sequence] is None
        found[sequence].append(token)
        ends[sequence] = finish
    expected = [_continue(prompt, count, stop, sampling, 5 + i) for i, prompt in enumerate(prompts)]
    assert found == expected
    assert ends == ["stop" if tokens[-1] in stop else "length" for tokens in expected]


def test_greedy_is_the_same_each_time_and_varies_with_the_prompt() -> None:
    runs = [list(generate(MODEL, [[1, 2, 3], [4]], 10, sampling=GREEDY)) for _ in range(2)]
    assert runs[0] == runs[1]
    tokens = [[g.token for g in runs[0] if g.sequence == i] for i in range(2)]
    assert tokens[0] != tokens[1]
    assert len(set(tokens[0])) > 2


def test_draws_change_with_the_seed_and_repeat_with_it() -> None:
    def drawn(seed: int) -> list[Generated]:
        return list(generate(MODEL, [[1, 2, 3]], 12, sampling=Sampling(temperature=1.5, top_p=1, seed=seed)))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_tokens_come_in_rounds_one_a_sequence_before_all_are_done() -> None:
    stream = generate(MODEL, [[1], [2, 3]], 5, sampling=GREEDY)
    assert [next(stream).sequence for _ in range(5)] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("prompts", "count", "said"),
    [
        ([[1], []], 3, "prompt 2: holds no token"),
        ([[1] * CONTEXT], 3, f"prompt: has {CONTEXT} tokens"),
        ([[1, 29]], 3, "prompt: token 1 is 29, not an id from 0 to 28"),
        ([[-1]], 3, "prompt: token 0 is -1"),
        ([[1]], 0, "max_new_tokens: 0 is not a number"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_at_the_call(
    prompts: list[list[int]], count: int, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        generate(MODEL, prompts, count)


def test_no_prompts_give_no_tokens() -> None:
    assert list(generate(MODEL, [], 3)) == []


def test_a_model_that_makes_nan_is_stopped() -> None:
    broken = _model()
    with torch.no_grad():
        broken.norm.weight[0] = math.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        list(generate(broken, [[1]], 3, sampling=GREEDY))


@pytest.mark.parametrize("tied", [False, True])
def test_layers_for_decoding_change_no_token_and_no_weight(tied: bool) -> None:
    """Against the same bfloat16 weights computed in double precision: tokens agree where the best one is clear."""
    config = MODEL.config.model_copy(update={"tied": tied})
    model, reference = Llama(config), Llama(config)
    model.init_weights(1)
    model.bfloat16()
    reference.load_state_dict(model.state_dict())
    reference.double()
    names = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert for_decoding(model) is model
    layers = [module for module in model.modules() if isinstance(module, FewRowsLinear)]
    assert len(layers) == 7 * config.layers + 1
    assert {parameter.data_ptr() for _, parameter in model.named_parameters()} == set(names.values())
    tokens, offsets = torch.tensor([3, 1, 4]), torch.tensor([0, 3])
    with torch.inference_mode():
        torch.testing.assert_close(
            model(tokens, offsets).double(), reference(tokens, offsets), rtol=0.05, atol=0.02, check_dtype=False
        )


def test_other_models_are_left_as_they_are() -> None:
    assert not any(isinstance(module, FewRowsLinear) for module in for_decoding(MODEL).modules())


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=5.0, seed=1)])
def test_ids_without_a_token_are_never_drawn(sampling: Sampling) -> None:
    prompts = [[1, 2], [3]]
    assert max(one.token for one in generate(MODEL, prompts, 20, sampling=sampling)) >= 7
    assert all(one.token < 7 for one in generate(MODEL, prompts, 20, sampling=sampling, tokens=7))
