"""Chats as tokens: what generation sees stands before each answer, and only answers and their ends are learnt."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.language.chats.rows import Preference
from cordillera.data.language.chats.tokens import (
    ANSWER,
    END,
    PROMPT,
    TokenisedChat,
    chat_tokenizer,
    tokenise_chat,
    tokenise_preference,
    within_length,
)
from cordillera.data.tokenizers.chat import ChatML, JinjaChat, Message, Role
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from tests.data import vocabularies as v

KINDS = ("llama 3", "chatml", "smollm2", "smollm2, gguf", "bytes")
ENDS = {"llama 3": "<|eot_id|>", "bytes": "<|end_of_text|>"}
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "Be kind.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_roles = st.sampled_from(["user", "assistant", "system"])
_contents = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|im_start|>assistant\n", "the cat", " ", "\n", "é", "12", "<"]
    ),
    min_size=1,
    max_size=4,
).map("".join)
_chats = st.lists(st.builds(Message, _roles, _contents), max_size=4).map(
    lambda made: [Message("user", "Hi"), *made, Message("assistant", "the end")]
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    json_like = load_tokenizer(v.write_json(folder))
    return {
        "llama 3": load_tokenizer(v.write_tiktoken(folder)),
        "chatml": dataclasses.replace(json_like, chat_format=ChatML()),
        "smollm2": with_template(json_like, SMOLLM2),
        "smollm2, gguf": load_tokenizer(v.write_gguf(folder)),
        "bytes": load_tokenizer("bytes"),
    }


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    made = JinjaChat(template, tokenizer.special_tokens, bos="<|im_start|>", eos="<|im_end|>", where="here")
    return dataclasses.replace(tokenizer, chat_format=made)


def answers_of(chat: TokenisedChat, tokenizer: Tokenizer) -> list[str]:
    """Texts of the answers, each up to its end."""
    found, ids = [], list[int]()
    for token, kind in zip(chat.tokens.tolist(), chat.kinds.tolist(), strict=True):
        if kind == ANSWER:
            ids.append(token)
        elif kind == END:
            found.append(tokenizer.decode(ids))
            ids = []
    assert not ids
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(messages=_chats)
@settings(max_examples=60)
def test_answers_are_learnt_and_nothing_else(
    tokenizers: dict[str, Tokenizer], kind: str, messages: list[Message]
) -> None:
    tokenizer = tokenizers[kind]
    chat = tokenise_chat(tokenizer, messages)
    assert chat.tokens.dtype == np.int32
    assert chat.kinds.dtype == np.int8
    assert chat.tokens.shape == chat.kinds.shape
    assert answers_of(chat, tokenizer) == [one.content for one in messages if one.role == "assistant"]
    end = tokenizer.special_tokens[ENDS.get(kind, "<|im_end|>")]
    assert set(chat.tokens[chat.kinds == END].tolist()) == {end}
    assert end in tokenizer.stop_ids
    special = set(tokenizer.special_tokens.values())
    assert not special & set(chat.tokens[chat.kinds == ANSWER].tolist())
    whole = chat_tokenizer(tokenizer).encode_chat(messages, answer=False)
    assert tokenizer.decode(chat.tokens.tolist()) == tokenizer.decode(whole)
    assert [one for one in chat.tokens.tolist() if one in special] == [one for one in whole if one in special]


@pytest.mark.parametrize("kind", KINDS)
@given(messages=_chats)
@settings(max_examples=60)
def test_the_last_answer_follows_the_prompt_that_generation_sees(
    tokenizers: dict[str, Tokenizer], kind: str, messages: list[Message]
) -> None:
    tokenizer = tokenizers[kind]
    last = len(messages) - 1
    chat = tokenise_chat(tokenizer, messages, first=last)
    seen = chat_tokenizer(tokenizer).encode_chat(messages[:last])
    answer = tokenizer.encode(messages[last].content)
    assert chat.tokens[: len(seen) + len(answer)].tolist() == seen + answer
    expected = [PROMPT] * len(seen) + [ANSWER] * len(answer) + [END]
    assert chat.kinds[: len(expected)].tolist() == expected
    assert not chat.kinds[len(expected) :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_of_a_chat_follows_the_prompt_that_generation_sees(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    roles: list[Role] = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [Message(role, f"the {number} cats") for number, role in enumerate(roles)]
    chat = tokenise_chat(tokenizer, messages)
    starts = np.flatnonzero((chat.kinds[1:] == ANSWER) & (chat.kinds[:-1] == PROMPT)) + 1
    for start, place in zip(starts.tolist(), (2, 4), strict=True):
        assert chat.tokens[:start].tolist() == chat_tokenizer(tokenizer).encode_chat(messages[:place])


def test_bytes_chat_without_tokens_of_their_own() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.chat_format is None
    assert tokenizer.vocab_size == chat_tokenizer(tokenizer).vocab_size == 258
    chat = tokenise_chat(tokenizer, [Message("user", "a<|end_of_text|>"), Message("assistant", "b")])
    assert chat.tokens.tolist() == [256, *b"user: a<|end_of_text|>", 257, *b"assistant: ", ord("b"), 257]
    assert chat.kinds.tolist() == [PROMPT] * (len(chat.tokens) - 2) + [ANSWER, END]
    with pytest.raises(DataError, match="no end-of-text token"):
        chat_tokenizer(dataclasses.replace(tokenizer, eos_id=None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_preference_has_one_prompt_and_two_answers(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    prompt = (Message("user", "a"), Message("assistant", "earlier"), Message("user", "b"))
    pair = tokenise_preference(tokenizers[kind], Preference(prompt, "the cat", "sat on", "row 1"))
    assert [answers_of(chat, tokenizers[kind]) for chat in pair] == [["the cat"], ["sat on"]]
    seen = chat_tokenizer(tokenizers[kind]).encode_chat(prompt)
    for chat in pair:
        assert chat.tokens[: len(seen)].tolist() == seen
        assert not chat.kinds[: len(seen)].any()


def test_an_answer_that_awaits_a_tool_ends_as_llama_3_ends_it(tokenizers: dict[str, Tokenizer]) -> None:
    messages = [Message("user", "a"), Message("assistant", "f()", awaits_tool=True), Message("tool", "7")]
    chat = tokenise_chat(tokenizers["llama 3"], [*messages, Message("assistant", "7")])
    names = {token: name for name, token in tokenizers["llama 3"].special_tokens.items()}
    assert [names[token] for token in chat.tokens[chat.kinds == END].tolist()] == ["<|eom_id|>", "<|eot_id|>"]


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + "
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
WRONG = [
    (HEAD + "m['content'] + '<|im_end|>' }}" + TAIL.replace("assistant\n", "assistant\n<think>\n"), "earlier turns"),
    (HEAD + "m['content'] + '<|im_end|>' }}" + TAIL.replace("<|im_start|>a", "<|endoftext|>a"), "earlier turns"),
    (HEAD + "(m['content'] if loop.last or m['role'] == 'user' else '') + '<|im_end|>' }}" + TAIL, "earlier turns"),
    (HEAD + "(m['content'] if loop.last or m['role'] != 'user' else '') + '<|im_end|>' }}" + TAIL, "earlier turns"),
    (HEAD + "m['content'] | upper + '<|im_end|>' }}" + TAIL, "otherwise than it was given"),
    (HEAD + "m['content'] + '\n' }}" + TAIL, "by no special token"),
    ("{{ raise_exception('not this') }}", "not this"),
]


@pytest.mark.parametrize(("template", "what"), WRONG)
def test_templates_that_generation_would_see_otherwise_are_refused(
    tokenizers: dict[str, Tokenizer], template: str, what: str
) -> None:
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    with pytest.raises(DataError, match=what) as error:
        tokenise_chat(with_template(tokenizers["smollm2"], template), messages, where="file:3")
    assert str(error.value).startswith("file:3")


def test_an_answer_that_a_template_trims_is_learnt_as_trimmed(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = with_template(tokenizers["smollm2"], HEAD + "m['content'] | trim + '<|im_end|>\n' }}" + TAIL)
    chat = tokenise_chat(tokenizer, [Message("user", " a "), Message("assistant", " b\n")])
    assert answers_of(chat, tokenizer) == ["b"]


def test_a_chat_without_an_answer_is_refused(tokenizers: dict[str, Tokenizer]) -> None:
    messages = [Message("assistant", "a"), Message("user", "b")]
    with pytest.raises(DataError, match="no turn of the assistant"):
        tokenise_chat(tokenizers["bytes"], messages, first=1)


def test_long_chats_are_dropped_or_refused() -> None:
    def made(length: int) -> TokenisedChat:
        return TokenisedChat(np.zeros(length, np.int32), np.zeros(length, np.int8))

    items, places = [(made(3),), (made(2), made(9)), (made(8), made(8))], ["a:1", "a:2", "a:3"]
    assert within_length(items, places, 8) == [0, 2]
    assert within_length(items, places, 9, "refuse") == [0, 1, 2]
    with pytest.raises(DataError, match="a:2: the chat has 9 tokens"):
        within_length(items, places, 8, "refuse")
    assert within_length(items, places, 2) == []


def test_the_folder_of_a_model_chats_as_its_template_says(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(v.write_json(tmp_path))
    messages = [Message("user", "the cat"), Message("assistant", "sat")]
    chat = tokenise_chat(tokenizer, messages)
    assert tokenizer.decode(chat.tokens.tolist()) == "".join(
        f"<|im_start|>{one.role}\n{one.content}<|im_end|>\n" for one in messages
    )
