"""Chat templates are programs that came with a model: whatever they do, their work is bounded."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from jinja2 import TemplateRuntimeError

from cordillera.data.tokenizers import chat_limits
from cordillera.data.tokenizers.chat import JinjaChat, Message
from cordillera.errors import DataError
from tests.data import vocabularies as v
from tests.fuzzing import damaged, survives

CHAT = [Message("system", "be brief"), Message("user", "hello\n <|im_end|> there"), Message("assistant", "42")]


def made(template: str) -> JinjaChat:
    return JinjaChat(template, ["<|im_start|>", "<|im_end|>"], bos=None, eos="<|im_end|>", where="template")


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10000) * 100000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10000000000) }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x ~ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ raise_exception(ns.x) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(30) %}{% set ns.x = ns.x | replace('a', 'aaaaaaaa') %}"
    "{% endfor %}",
    "{{ range(99999) | map('center', 99999) | join }}",
    "{{ ('x' * 99999).join(range(99999) | map('string') | list) }}",
    "{{ range(99999) | join('x' * 99999) }}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ lipsum(n=100000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "{% for x in y %}" * 300 + "{% endfor %}" * 300,
    "a" * 300_000,
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("template", BOMBS, ids=lambda text: text[:60].replace("\x00", ""))
def test_a_template_that_works_without_end_is_refused(template: str) -> None:
    began = time.process_time()
    found = survives(lambda: made(template).pieces(CHAT), template[:80])
    assert isinstance(found, DataError), found
    assert len(str(found)) < 1000
    assert time.process_time() - began < 4


@pytest.mark.parametrize("text", [0, 64, 192])
def test_text_in_a_loop_counts_once_for_each_turn(text: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_limits, "SIZE", 20 * 192)
    environment = chat_limits.BoundedEnvironment()
    for turns in (20, 21, 60, 61):
        template = environment.compiled(f"{{% for i in range({turns}) %}}{'x' * text}{{% endfor %}}")
        environment.meter.begin("")
        if turns * text <= 20 * 192:
            assert template.render() == "x" * text * turns
        else:
            with pytest.raises(TemplateRuntimeError, match="writes more"):
                template.render()


@pytest.mark.parametrize("called", ["{% set kept = text() %}", "{% if text() %}{% endif %}"])
def test_text_that_a_macro_writes_counts_though_it_is_not_shown(called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_limits, "SIZE", 40 * 192)
    environment = chat_limits.BoundedEnvironment()
    macros = f"{{% macro text() %}}{'x' * 192}{{% endmacro %}}"
    assert environment.compiled(f"{macros}{{% for i in range(5) %}}{called}{{% endfor %}}").render() == ""
    template = environment.compiled(f"{macros}{{% for i in range(41) %}}{called}{{% endfor %}}")
    environment.meter.begin("")
    with pytest.raises(TemplateRuntimeError, match="writes more"):
        template.render()


def test_long_chats_and_ordinary_templates_are_rendered() -> None:
    long = [Message("user" if i % 2 == 0 else "assistant", "words and words " * 10) for i in range(10_000)]
    long.append(Message("user", "x" * 3_000_000))
    text = "".join(piece if isinstance(piece, str) else piece.name for piece in made(v.CHATML).pieces(long))
    assert text.endswith("x<|im_end|>\n<|im_start|>assistant\n")
    template = (
        "{%- macro shown(m) -%}[{{ m.role | upper }}: {{ m['content'].split('\n')[0] | trim }}]{%- endmacro -%}"
        "{%- set ns = namespace(n=0, all=[]) -%}{%- for m in messages if m.role != 'system' -%}"
        "{%- set ns.n = ns.n + 1 -%}{%- set ns.all = ns.all + [m.role] -%}"
        "{{ shown(m) }}{% if not loop.last %}, {% endif %}{{ loop.length if loop.first }}"
        "{%- if ns.n == messages | length - 1 %} end{% endif -%}{%- endfor -%}"
        "{{ ' %s' % ns.n ~ ns.all | join('+') ~ messages[0].content[:2] }}{{ {'a': [1, 'é']} | tojson }}{{ '=' * 3 }}"
    )
    assert made(template).pieces(CHAT) == ['[USER: hello], 2[ASSISTANT: 42] end 2user+assistantbe{"a": [1, "é"]}===']


def test_damaged_templates_give_chats_or_clean_errors(fuzz_inputs: Callable[[int], int]) -> None:
    draw = random.Random(0)
    words = [
        b"{%",
        b"%}",
        b"{{",
        b"}}",
        b"for x in range(99999)",
        b"~",
        b"endfor",
        b"|",
        b"(",
        b"messages",
        b"99999999999",
    ]
    words += [
        b"{% for m in messages %}",
        b"* 99999",
        b"ns.x + ns.x",
        b"{% set ",
        b"loop",
        b"namespace(",
        b".format",
        b"\xed",
    ]
    for number in range(fuzz_inputs(50)):
        content = damaged(draw.choice([*BOMBS[:28], v.CHATML]).encode(), draw, words).decode(errors="replace")
        survives(lambda: made(content).pieces(CHAT), f"template {number}")  # noqa: B023
