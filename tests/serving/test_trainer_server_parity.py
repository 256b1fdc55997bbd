"""Log-probabilities that the server gives its tokens are, bit for bit, those of a trainer over whole packed texts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cordillera.jagged import offsets_from_lengths
from cordillera.kernels.dense.few_rows import MOST_ROWS
from cordillera.kernels.repeatable import in_order, rows_repeat
from cordillera.models.language.likelihood import token_log_probabilities
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.models.language.stages import LlamaStage
from cordillera.serving.language.engine import Engine
from cordillera.serving.language.generation import for_decoding
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import NGramDrafter, Speculation

pytestmark = pytest.mark.skipif(
    not rows_repeat(), reason="MKL computes rows of float32 products by other code on this CPU"
)

VOCABULARY, CONTEXT, COUNT = 300, 560, 10
LENGTHS = (1, 2, 17, 255, 256, 257, 530)
DRAFTED = Speculation([NGramDrafter], [1.0] * MOST_ROWS)
SHAPES = {
    "shared heads": {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "tied": True},
    "odd sizes": {"hidden": 72, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 100, "tied": False},
    "long sums": {"hidden": 288, "heads": 2, "kv_heads": 2, "head_dim": 96, "ffn": 576, "tied": False},
}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _model(shape: str, seed: int = 0) -> Llama:
    model = Llama(LlamaConfig(layers=2, vocabulary=VOCABULARY, context=CONTEXT, **SHAPES[shape]))
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def _server(model: Llama) -> Llama:
    """The same weights as the server holds them."""
    copy = Llama(model.config)
    copy.load_state_dict(model.state_dict())
    return for_decoding(copy, as_trained=True)


def _prompts(seed: int) -> list[list[int]]:
    """Prompts that repeat themselves, so that drafts are made and some are right."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.randint(VOCABULARY, (7,), generator=generator).tolist()
    return [list(itertools.islice(itertools.cycle([n, *period]), length)) for n, length in enumerate(LENGTHS)]


def _written(
    model: Llama, prompts: list[list[int]], sampling: Sampling, speculation: Speculation | None, texts: int
) -> tuple[list[list[int]], list[Tensor]]:
    """Whole texts, and the log-probabilities of their new tokens."""
    engine = Engine(model, texts=texts, speculation=speculation)
    for number, prompt in enumerate(prompts):
        own = sampling.model_copy(update={"seed": 20 + number})
        engine.add(prompt, COUNT, sampling=own, logprobs=0)
    whole, found = [list(prompt) for prompt in prompts], [list[float]() for _ in prompts]
    while engine.waiting or engine.running:
        with in_order():
            tokens = engine.step()
        for one in tokens:
            assert one.chance is not None
            whole[one.sequence].append(one.token)
            found[one.sequence].append(one.chance.logprob)
    if speculation is not None:
        assert engine.counts.drafted > 0
    if speculation is not None and sampling.temperature == 0:
        assert 0 < engine.counts.accepted < engine.counts.drafted
    return whole, [torch.tensor(one) for one in found]


def _packed(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    offsets = offsets_from_lengths(torch.tensor([len(text) for text in texts]))
    return torch.tensor([token for text in texts for token in text]), offsets


def _trained(model: Llama, texts: list[list[int]], order: list[int], with_gradients: bool = True) -> list[Tensor]:
    """Log-probabilities of the new tokens of each text, packed in an order."""
    tokens, offsets = _packed([texts[n] for n in order])
    with torch.set_grad_enabled(with_gradients):
        found = token_log_probabilities(model, tokens, offsets, rows=100)
    assert found.requires_grad == with_gradients
    parts = dict(zip(order, found.detach().split(offsets.diff().tolist()), strict=True))
    return [parts[n][-COUNT:] for n in range(len(texts))]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.cases(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("drafts", "temperature"), [(False, 0.0), (True, 0.0), (True, 1.0)])
def test_log_probabilities_of_the_server_are_those_of_the_trainer(shape: str, drafts: bool, temperature: float) -> None:
    model = _model(shape)
    sampling = Sampling(temperature=temperature, top_p=1)
    texts, served = _written(_server(model), _prompts(1), sampling, DRAFTED if drafts else None, texts=5)
    order = list(range(len(texts)))
    assert _equal(_trained(model, texts, order), served)
    assert _equal(_trained(model, texts, [3, 0, 6, 2, 5, 1, 4], with_gradients=False), served)
    for n in (0, 4):
        assert _equal(_trained(model, [texts[n]], [0]), [served[n]])


def test_a_text_alone_is_as_among_others() -> None:
    server, prompts = _server(_model("shared heads")), _prompts(2)
    sampling = Sampling(temperature=0)
    texts, together = _written(server, prompts, sampling, None, texts=16)
    for number in (0, 2, 4):
        alone, found = _written(server, [prompts[number]], sampling, None, texts=1)
        assert alone == [texts[number]]
        assert _equal(found, [together[number]])


@pytest.mark.parametrize("name", ["layers.0.attention.value.weight", "norm.weight"])
def test_a_weight_that_is_one_unit_off_is_seen(name: str) -> None:
    model = _model("shared heads")
    texts, served = _written(_server(model), _prompts(1), Sampling(temperature=0), None, texts=5)
    weight = model.get_parameter(name)
    with torch.no_grad():
        flat, place = weight.view(-1), int(weight.abs().argmax())
        flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf))
    assert not _equal(_trained(model, texts, list(range(len(texts)))), served)


def test_a_text_of_fewer_tokens_than_a_product_has_rows() -> None:
    model = _model("odd sizes")
    server = _server(model)
    for count in (2, 3):
        tokens = torch.arange(count)
        found = token_log_probabilities(model, tokens, torch.tensor([0, count]))
        longer = token_log_probabilities(model, torch.arange(9), torch.tensor([0, 9]))[:count]
        assert torch.equal(found, longer)
        with torch.inference_mode(), in_order():
            served = F.log_softmax(server(tokens, torch.tensor([0, count])), -1)
        assert torch.equal(served[:-1].gather(1, tokens[1:, None]).squeeze(1), found[1:].detach())


def test_gradients_are_those_of_the_loss() -> None:
    model, texts = _model("shared heads"), _prompts(3)
    tokens, offsets = _packed(texts)
    token_log_probabilities(model, tokens, offsets).sum().neg().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    labels = torch.cat([torch.tensor([*text[1:], -100]) for text in texts])
    LlamaStage(model)(tokens, offsets, None, labels).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-3)
