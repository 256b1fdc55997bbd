"""Jinja environment for chat templates with bounded work.

A chat template is a program that comes with a model from elsewhere. Jinja's sandbox denies it access to the machine,
but does not limit its time and memory. The environment of this module counts every turn of a loop, call, filter and
operator, and measures the size of their results, in most cases before they are computed.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import Template, TemplateRuntimeError, nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS = 1 << 19
"""Largest number of loop turns, calls and operations of one rendering, plus one for each character of the chat."""

SIZE = 1 << 22
"""Largest number of characters of a text, plus 16 for each character of the chat."""

ENTRIES = 1 << 18
"""Largest number of entries of nested lists, plus one for each character of the chat."""

SECONDS = 1.0
"""Largest processor time of one rendering in seconds, plus 2 microseconds for each character of the chat."""

_MOST_NUMBER = 100_000
_PRODUCT = 1 << 28
_WIDTH = re.compile(r"\d{5}|\*")
# Filters that take a list as a list; all others use its text.
_OF_LISTS = {
    "length",
    "count",
    "first",
    "last",
    "list",
    "map",
    "select",
    "selectattr",
    "reject",
    "rejectattr",
    "reverse",
}
_OF_LISTS |= {"sort", "unique", "batch", "slice", "items", "dictsort", "groupby", "sum", "min", "max", "default", "d"}


class _Meter(threading.local):
    """Steps and characters that the rendering in this thread has left."""

    def __init__(self) -> None:
        self.begin("")

    def begin(self, chat: str) -> None:
        """Set the limits of a rendering from the length of its chat."""
        self.steps, self.size, self.entries = STEPS + len(chat), SIZE + 16 * len(chat), ENTRIES + len(chat)
        self.look, self.written, self.end = self.steps, 0, time.thread_time() + SECONDS + 2e-6 * len(chat)

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            _stop(f"takes more than {STEPS:,} steps")
        if self.steps < self.look:
            self.look -= 64
            if time.thread_time() > self.end:
                _stop(f"takes longer than {SECONDS:g} s")

    def write(self, count: int) -> None:
        """Count characters that are written to the chat or to a variable."""
        self.written += count
        if self.written > self.size:
            _stop(f"writes more than {SIZE:,} characters")

    def weigh(self, *values: Any) -> int:
        """Number of characters and entries of values, including nested ones, each occurrence counted."""
        size, entries, waiting = 0, 0, list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, dict):
                waiting += [*value, *value.values()]
            elif isinstance(value, list | tuple | set | frozenset):
                waiting += value
            entries += 1
            if size > self.size or entries + len(waiting) > self.entries:
                _stop(f"makes a text of more than {SIZE:,} characters or a list of more than {ENTRIES:,} entries")
        return size + entries

    def check(self, subject: Any, arguments: Iterable[Any]) -> None:
        """Refuse an operation whose result could be far larger than its arguments."""
        self.step()
        size = len(subject) if isinstance(subject, str | list | tuple) else 1
        for value in arguments:
            if isinstance(value, int) and abs(value) > _MOST_NUMBER:
                _stop(f"uses the number {str(value)[:20]} as a size")
            factor = abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 1
            if size * factor > _PRODUCT:
                _stop("makes a text that is too long")

    def between(self, separator: Any, entries: Any) -> None:
        """Refuse a join of too many entries by a separator."""
        if isinstance(separator, str) and hasattr(entries, "__len__") and len(separator) * len(entries) > self.size:
            _stop(f"makes a text of more than {SIZE:,} characters")

    def made(self, result: Any) -> Any:
        """Return a result, or refuse it if it is too large."""
        if isinstance(result, str | list | tuple):
            if len(result) > self.size:
                _stop(f"makes a text or list longer than {SIZE:,}")
            self.step(len(result) >> 8)
        return result


def _stop(what: str) -> NoReturn:
    raise TemplateRuntimeError(f"the template {what}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on the work of one rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.meter = _Meter()
        self.finalize = self._finalized
        del self.globals["lipsum"]
        self.filters = {name: self._bounded(name, work) for name, work in self.filters.items()}
        self.filters |= {"-turns": self._turns, "-joined": self._joined, "-weighed": self._weighed}

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        """Define a filter, subject to the limits, from a function of a value and further arguments."""
        self.filters[name] = self._bounded(name, work)

    def compiled(self, source: str) -> Template:
        """Compile a template whose loops are counted; a wrong one or a recursive loop raises ``TemplateError``."""
        self.meter.begin("")
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            if loop.recursive:
                _stop("has a recursive loop, which is not supported")
            cost = 1 + sum(len(text.data) for text in loop.find_all(nodes.TemplateData)) // 64
            loop.iter = _filtered(loop.iter, "-turns", nodes.Const(cost))
        macros: list[nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
        for macro in macros:
            written = sum(len(text.data) for text in macro.find_all(nodes.TemplateData))
            macro.body.insert(0, nodes.Output([_filtered(nodes.Const(""), "-turns", nodes.Const(1 + written // 64))]))
        for compared in tree.find_all(nodes.Compare):
            compared.expr = _filtered(compared.expr, "-weighed")
        return Template.from_code(self, self.compile(_Joins().visit(tree)), self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute one of ``intercepted_binops``, whose result may be larger than its operands."""
        if operator == "%" and isinstance(left, str):
            self._format(left)
            self.meter.weigh(right)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if bits > 4096:
                _stop("computes a number of more than 4,096 bits")
            self.meter.step()
        elif operator in ("*", "**"):
            self.meter.check(left, [right])
            self.meter.check(right, [left])
        else:
            self.meter.step()
        return self.meter.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, called: Any, /, *args: Any, **options: Any) -> Any:
        """Call a function, a macro or a method, within the limits."""
        subject = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(called, Macro | type):
            self.meter.step()
        else:
            if isinstance(subject, str):
                if getattr(called, "__name__", "") in ("format", "format_map"):
                    self._format(subject)
                if getattr(called, "__name__", "") == "join" and args:
                    args = (_listed(args[0]),)
                    self.meter.between(subject, args[0])
            self.meter.weigh(*args, *options.values())
            self.meter.check(subject, [*args, *options.values()])
        return self.meter.made(super().call(context, called, *args, **options))

    def _bounded(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def bounded(*args: Any, **options: Any) -> Any:
            given = args[1:] if hasattr(work, "jinja_pass_arg") else args
            if given:
                if name == "format":
                    self._format(str(given[0]))
                if name not in _OF_LISTS and not isinstance(given[0], str):
                    given = (_listed(given[0]), *given[1:])
                    args = (*args[: len(args) - len(given)], *given)
                    self.meter.weigh(*given, *options.values())
                if name == "join":
                    self.meter.between(given[1] if len(given) > 1 else options.get("d", ""), given[0])
                self.meter.check(given[0], [*given[1:], *options.values()])
            return self.meter.made(work(*args, **options))

        return bounded

    def _format(self, pattern: str) -> None:
        if _WIDTH.search(pattern):
            _stop("formats a text to a width of five digits or more")

    @pass_context  # keeps Jinja from evaluating constants of macros at compile time
    def _turns(self, context: Context, entries: Any, cost: int) -> Any:
        """Entries of a loop, counted as they are taken; the empty text is returned unchanged."""
        if entries == "":
            self.meter.step(cost)
            self.meter.write(64 * (cost - 1))
            return entries
        return self._counted(entries, cost)

    def _counted(self, entries: Iterable[Any], cost: int) -> Iterator[Any]:
        for entry in entries:
            self.meter.step(cost)
            self.meter.write(64 * (cost - 1))
            yield entry

    def _joined(self, parts: list[Any]) -> str:
        self.meter.step()
        self.meter.weigh(*parts)
        return "".join(map(str, parts))

    def _weighed(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict):
            self.meter.step(self.meter.weigh(value) >> 8)
        return value

    @pass_context
    def _finalized(self, context: Context, value: Any) -> Any:
        if not isinstance(value, str):
            self.meter.weigh(value)
            value = str(value)
        self.meter.step()
        self.meter.write(len(value))
        return value


def _listed(value: Any) -> Any:
    """Convert an iterator, which can be read only once, to a list."""
    return list(value) if isinstance(value, Iterator) else value


def _filtered(value: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None)


class _Joins(NodeTransformer):
    """Makes templates measure texts that are joined by ``~``."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "-joined")
