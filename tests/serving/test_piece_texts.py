"""Texts of models whose vocabulary puts a space before words: in one piece with the prompt, or of their own."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from cordillera.data.tokenizers.chat import Message
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.models.language.checkpoints import save_hugging_face
from cordillera.models.language.llama import Llama, LlamaConfig
from cordillera.serving.language.guided import Guides, choice_form, json_form, regex_form
from cordillera.serving.language.language_model import LanguageModel
from cordillera.serving.language.sampler import Sampling
from cordillera.serving.language.speculation import NOTHING
from cordillera.serving.language.text_service import TextRequest, TextService
from tests.data import piece_vocabularies as p
from tests.serving.servers import ask

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A model that writes one word again and again."""
    folder = tmp_path_factory.mktemp("models") / "small"
    (folder.parent / "vocabulary").mkdir()
    tokenizer = load_tokenizer(p.write_json(folder.parent / "vocabulary"))
    (word,) = tokenizer.encode("the")
    shapes = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "context": 96, "tied": False}
    made = Llama(LlamaConfig(**shapes, vocabulary=tokenizer.vocab_size))
    made.init_weights(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        assert made.head is not None
        made.embedding.weight.fill_(1)
        made.head.weight[word] = 1
    save_hugging_face(made, folder, tokenizer=tokenizer)
    return LanguageModel(folder, dtype="float32", drafter="none")


def test_an_answer_is_a_text_and_a_continuation_keeps_its_space(model: LanguageModel) -> None:
    (answer,) = model.generate([[Message("user", "cat")]], max_new_tokens=3, sampling=GREEDY)
    assert answer.text == "the the the"
    (going_on,) = model.generate("cat", chat=False, max_new_tokens=3, sampling=GREEDY)
    assert going_on.text == " the the the"


def test_a_form_holds_to_the_letter(model: LanguageModel) -> None:
    for chat in (True, False):
        for text in (" the cat", "the é漢\n 12", "  x"):
            (found,) = model.generate("cat", chat=chat, max_new_tokens=60, sampling=GREEDY, form=choice_form([text]))
            assert found.text == text


@pytest.mark.parametrize("prefix", [True, False])
def test_what_a_guide_allows_is_of_its_form(tmp_path: Path, prefix: bool) -> None:
    """Tokens drawn at random from those allowed, also bytes inside of characters; and forced ones have no space."""
    tokenizer = load_tokenizer(p.write_model(tmp_path, prefix=prefix))
    guides, draw = Guides(tokenizer), random.Random(0)
    for form, pattern in (
        (regex_form("the (cat|漢字|é){1,9}\n"), "the (cat|漢字|é){1,9}\n"),
        (json_form({"enum": ["the cat", 12]}), '"the cat"|12'),
    ):
        for _ in range(20):
            guide, ids = guides.start(form), list[int]()
            while True:
                (allowed,) = guide.allowed(NOTHING)
                token = draw.choice(allowed.nonzero().flatten().tolist())
                if token == guides.end:
                    break
                ids.append(token)
                guide.add([token])
            assert re.fullmatch(pattern, tokenizer.decode_bytes(ids).decode())
    forced = tokenizer.decode_bytes(guides.start(choice_form(["the cat sat"])).forced(50))
    assert forced
    assert b"the cat sat".startswith(forced)


def test_served_answers_are_texts_and_served_continuations_keep_their_space(model: LanguageModel) -> None:
    service = TextService(model, texts=2)
    try:
        ids = model.encode(["cat"])[0]
        for answers, form, text in (
            (True, None, "the the"),
            (False, None, " the the"),
            (True, choice_form([" the the"]), " the the"),
        ):
            request = TextRequest(ids, 2 if form is None else None, GREEDY, form=form, answers=answers)
            assert ask(service, request).wait().text() == text
    finally:
        service.close()
