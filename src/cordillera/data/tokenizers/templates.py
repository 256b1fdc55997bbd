"""Formats of chats as Jinja templates, for programs that know no other."""

from __future__ import annotations

import json

from cordillera.data.tokenizers.chat import ChatFormat, ChatML, JinjaChat, Llama3Chat, PlainChat

_LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|start_header_id|>' "
    "+ ('ipython' if message['role'] == 'tool' else message['role']) + '<|end_header_id|>\\n\\n' "
    "+ message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CHATML_SYSTEM = (
    "{% if messages and messages[0]['role'] != 'system' %}"
    "{% set messages = [{'role': 'system', 'content': SYSTEM}] + messages %}{% endif %}"
)
_PLAIN = (
    "{{ BEGIN }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + END }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def template_of(chat_format: ChatFormat) -> str:
    """Return the Jinja source of a format of chats.

    Its text is the format's. Pieces that the format has tokenised apart may become one: a message in Llama 3's format
    that begins with a line break, or one in :class:`PlainChat` with a vocabulary that joins spaces to words, can get
    other ids.
    """
    if isinstance(chat_format, JinjaChat):
        return chat_format.source
    if isinstance(chat_format, Llama3Chat):
        return _LLAMA3
    if isinstance(chat_format, ChatML):
        system = chat_format.system
        return _CHATML if system is None else _CHATML_SYSTEM.replace("SYSTEM", json.dumps(system)) + _CHATML
    assert isinstance(chat_format, PlainChat)
    names = (json.dumps(name or "") for name in (chat_format.begin, chat_format.end))
    begin, end = names
    return _PLAIN.replace("BEGIN", begin).replace("END", end)
