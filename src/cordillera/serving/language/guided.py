"""Text in a given form: JSON of a schema, a regular expression, or one of several choices.

The form says after each token which tokens may follow (``llguidance``); others are never drawn. Every token of a
drafted tree has its own state. Text that the form forces, such as the names of a schema's fields, is drafted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from cordillera.serving.language.speculation import DraftTree, part_of, paths


@dataclass(frozen=True)
class Form:
    """Form of a text, made by :func:`json_form`, :func:`regex_form` or :func:`choice_form`.

    Attributes:
        grammar: The form in the language of ``llguidance``.
        where: Name of the form in errors.
    """

    grammar: str
    where: str


def json_form(schema: Mapping[str, Any] | str | None = None, where: str = "JSON schema") -> Form:
    """Return the form of JSON documents.

    Args:
        schema: JSON schema, as a dictionary or as text; None for any object.
        where: Origin that errors name.

    Raises:
        DataError: If the text is not JSON, or the schema is not an object.
    """
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise DataError(f"is not JSON: {error}", where=where) from error
    schema = {"type": "object"} if schema is None else schema
    if not isinstance(schema, Mapping):
        raise DataError(f"is a {type(schema).__name__}, not an object", where=where)
    return Form(LLMatcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_flexible": False}), where)


def regex_form(pattern: str) -> Form:
    """Return the form of texts that match a regular expression as a whole, in the syntax of Rust's ``regex``."""
    from llguidance import LLMatcher

    return Form(LLMatcher.grammar_from_regex(pattern), "regular expression")


def choice_form(texts: Sequence[str]) -> Form:
    """Return the form of texts that are one of ``texts``.

    Raises:
        DataError: If there is no text, or one is empty.
    """
    from llguidance import LLMatcher

    if not texts or not all(texts):
        raise DataError("needs texts that are not empty", where="choice", remedy="give at least one")
    return Form(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in texts)), "choice")


class Guides:
    """Starts guides for the texts of one tokenizer.

    Raises:
        DataError: If the tokenizer has no token that ends a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not tokenizer.stop_ids:
            raise DataError(
                "has no token that ends a text, which a text in a given form needs",
                where="tokenizer",
                remedy="use a model with such a token, or leave out the form",
            )
        self.end = tokenizer.eos_id if tokenizer.eos_id in tokenizer.stop_ids else tokenizer.stop_ids[0]
        self.vocabulary = tokenizer.vocab_size
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, self.end)))

    def start(self, form: Form) -> Guide:
        """Return the guide of a text of the form.

        Raises:
            DataError: If the form is invalid, or too large.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, form.grammar, log_level=0)
        if matcher.is_error():
            first, *rest = matcher.get_error().strip().splitlines()
            # a parser shows the place in lines of its own, before the cause
            cause = next((line.removeprefix("error:") for line in rest if line.startswith("error:")), "")
            raise DataError(re.sub(r"^at \d+\(\d+\): ", "", first) + cause, where=form.where)
        return Guide(matcher, self.vocabulary)


class _Vocabulary:
    """A tokenizer as ``llguidance`` takes it."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        special = {id: name for name, id in tokenizer.special_tokens.items()}
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self.tokens = [
            special[id].encode() if id in special else part or b"<unused %d>" % id
            for id, part in enumerate(tokenizer.token_bytes)
        ]
        self.special_token_ids = [id for id, part in enumerate(tokenizer.token_bytes) if id in special or not part]
        self._encode = tokenizer.encode_inside or tokenizer.encode_plain  # the text goes on after the prompt

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode([text if isinstance(text, str) else text.decode("utf-8", "replace")])[0]


class Guide:
    """The state of a form after the tokens of a text."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def copy(self) -> Guide:
        """Return another guide in this state."""
        return Guide(self._matcher.deep_copy(), self._vocabulary)

    def add(self, tokens: Sequence[int]) -> None:
        """Go on by tokens of the text.

        Raises:
            DataError: If the form does not allow them.
        """
        if not self._matcher.consume_tokens(list(tokens)):
            raise DataError(f"does not allow the tokens {list(tokens)}", where="form")

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Return whether the form allows the text to go on by these tokens."""
        return bool(self._matcher.validate_tokens(list(tokens)) == len(tokens))

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens of the text that the form forces."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())[:most]

    def prune(self, tree: DraftTree) -> DraftTree:
        """Return the tokens of a tree that the form allows."""
        return part_of(tree, [place for place, path in enumerate(paths(tree)) if self.accepts(path)])

    def allowed(self, tree: DraftTree) -> Tensor:
        """Return which tokens may follow the text, and each token of a tree that the form allows: ``bool [1 + n, V]``.

        Raises:
            DataError: If the form does not allow a token of the tree.
        """
        rows = [self._mask()]
        for path in paths(tree):
            self.add(path)
            rows.append(self._mask())
            self._matcher.rollback(len(path))
        return torch.from_numpy(np.stack(rows))

    def _mask(self) -> Any:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(np.bool_)
