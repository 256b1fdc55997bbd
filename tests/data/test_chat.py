"""Chats: what a person writes never becomes a control token, whatever the template does with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordillera.data.tokenizers.chat import ChatFormat, ChatML, Control, JinjaChat, Llama3Chat, Message, guess_format
from cordillera.data.tokenizers.load import load_tokenizer
from cordillera.errors import DataError
from tests.data import vocabularies as v

NAMES = ("<|im_start|>", "<|im_end|>", "<s>", "<ss>", "[INST]", "\n")
# A template that glues content to its own text on both sides, in every way that could complete a token.
GLUE = "{{bos_token}}{% for m in messages %}<|im_{{ m.content }}|>[{{ m.content }}<|im_end|>{% endfor %}"
TRIM = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"

_fragments = st.sampled_from(
    [*NAMES, "<", "<|", "<s", "s>", ">", "start", "|>", "INST]", "[", " ", "end", "a", "\ufdd0"]
)
_contents = st.lists(st.one_of(_fragments, st.text(max_size=3)), max_size=6).map("".join)


def _jinja(template: str) -> JinjaChat:
    return JinjaChat(template, NAMES, bos="<s>", eos="<|im_end|>", where="here")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "chat",
    [Llama3Chat(), ChatML("Be brief."), _jinja(v.CHATML), _jinja(TRIM), _jinja(GLUE)],
    ids=lambda c: type(c).__name__,
)
@given(contents=st.lists(_contents, min_size=1, max_size=4))
@settings(max_examples=60)
def test_content_gives_no_control_token_and_is_kept(chat: ChatFormat, contents: list[str]) -> None:
    messages = [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(contents)]
    harmless = [Message(message.role, "0") for message in messages]
    found, expected = chat.pieces(messages), chat.pieces(harmless)
    assert [p for p in found if isinstance(p, Control)] == [p for p in expected if isinstance(p, Control)]
    text = "".join(p for p in found if isinstance(p, str))
    for content in contents:
        assert content.strip() in text


@pytest.mark.parametrize(
    "content", ["start|> more", " start|>\n more", "more <|im_start", "start", "s", "> [INST", "<s"]
)
def test_content_completes_no_token_that_a_template_begins_or_ends(content: str) -> None:
    for template in ("<|im_{{ messages[0].content }}|>", "[{{ messages[0].content }}]", "<{{ messages[0].content }}>"):
        pieces = _jinja(template).pieces([Message("user", content)])
        assert pieces == [template.replace("{{ messages[0].content }}", content)]


def test_chatml_is_what_smollm2_s_template_gives() -> None:
    template = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
        "Be kind.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    for messages in (
        [Message("user", "Hi\n")],
        [Message("system", ""), Message("user", " a "), Message("assistant", "b"), Message("tool", "c")],
    ):
        for answer in (True, False):
            ours = ChatML("Be kind.").pieces(messages, answer=answer)
            assert ours == _jinja(template).pieces(messages, answer=answer)


def test_llama_3_writes_a_tool_as_ipython_and_ends_a_message_that_awaits_it() -> None:
    messages = [Message("assistant", "f()", awaits_tool=True), Message("tool", "7")]
    names = [piece.name if isinstance(piece, Control) else piece for piece in Llama3Chat().pieces(messages)]
    header = ["<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"]
    tool = ["<|start_header_id|>", "ipython", "<|end_header_id|>", "\n\n", "7", "<|eot_id|>"]
    assert names == ["<|begin_of_text|>", *header, "f()", "<|eom_id|>", *tool, *header]


def test_a_template_is_kept_in_its_sandbox() -> None:
    for template, message in (
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refused the chat"),
        ("{{ messages.append(1) }}", "refused the chat"),
        ("{% for i in range(10**9) %}{% endfor %}", "refused the chat"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ absent.thing }}", "refused the chat"),
    ):
        with pytest.raises(DataError, match=message):
            _jinja(template).pieces([Message("user", "x")])
    with pytest.raises(DataError, match="not valid"):
        _jinja("{% for %}")


def test_templates_may_write_json_and_break_out_of_loops() -> None:
    chat = _jinja("{% for m in messages %}{{ m.content | tojson }}{% break %}{% endfor %}")
    assert chat.pieces([Message("user", "<é'\n")]) == ['"<é\'\\n"']


def test_the_date_of_a_template_is_the_same_on_every_day() -> None:
    chats = {
        '{%- set today = strftime_now("%Y-%m-%d") %}{{ today }}': "2024-07-26",
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}its own{% endif %}": "its own",
    }
    for template, expected in chats.items():
        assert _jinja(template).pieces([Message("user", "x")]) == [expected]
    for form in ("'%Y' * 10**6", "7", "'\ud800'"):
        with pytest.raises(DataError, match="refused the chat"):
            _jinja("{{ strftime_now(" + form + ") }}").pieces([Message("user", "x")])


def test_marks_of_what_the_assistant_wrote_change_nothing() -> None:
    plain = "{% for m in messages %}{{ m.role }}:\n  {{ m.content }}\n{% endfor %}"
    marked = plain.replace("{{ m.content }}", "{%- generation -%} {{ m.content }} {%+ endgeneration %}")
    spaces = plain.replace("{{ m.content }}", "{%- if true -%} {{ m.content }} {%+ endif %}")
    messages = [Message("user", "a"), Message("assistant", "b")]
    assert _jinja(marked).pieces(messages) == _jinja(spaces).pieces(messages)


def test_bad_messages_are_refused() -> None:
    with pytest.raises(DataError, match="unknown role 'admin'"):
        Message("admin", "x")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="content must be text"):
        Message("user", None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="only an assistant"):
        Message("user", "x", awaits_tool=True)


def test_a_format_is_guessed_from_the_special_tokens(tmp_path: Path) -> None:
    assert isinstance(guess_format(v.SPECIAL), ChatML)
    assert guess_format(["<s>"]) is None
    path = v.write_json(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert isinstance(load_tokenizer(path).chat_format, ChatML)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')  # of a base model
    assert load_tokenizer(path).chat_format is None
    content = v.json_content()
    content["added_tokens"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(path).encode_chat([Message("user", "x")])


def test_a_template_that_uses_a_token_the_vocabulary_lacks_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(v.write_json(tmp_path))
    object.__setattr__(tokenizer, "chat_format", Llama3Chat())
    with pytest.raises(DataError, match=r"no <\|begin_of_text\|> token"):
        tokenizer.encode_chat([Message("user", "x")])


def test_templates_come_from_every_place_that_files_keep_them(tmp_path: Path) -> None:
    path = v.write_json(tmp_path)
    beside = tmp_path / "tokenizer_config.json"
    message = [Message("user", "the cat")]
    expected = load_tokenizer(path).encode_chat(message)
    assert load_tokenizer(v.write_gguf(tmp_path)).encode_chat(message) == expected
    entry = {"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": v.CHATML}]}
    beside.write_text(json.dumps(entry))
    assert load_tokenizer(path).encode_chat(message) == expected
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(path).encode_chat(message) == load_tokenizer(path).encode("the cat")
