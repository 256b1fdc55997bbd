"""Tokenizers written for other programs: Hugging Face's files, metadata of GGUF, Llama 3's ``tokenizer.model``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from cordillera.data.tokenizers.chat import JinjaChat
from cordillera.data.tokenizers.gguf import RULES, STOPS, filler
from cordillera.data.tokenizers.load import pairs_of
from cordillera.data.tokenizers.pairs.byte_pairs import ENDS, TURN_ENDS, BytePairs
from cordillera.data.tokenizers.pairs.sentencepiece import (
    BYTE,
    BYTE_NAMES,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    has_prefix_field,
    scores_of,
)
from cordillera.data.tokenizers.pairs.splitters import split_name
from cordillera.data.tokenizers.tiktoken_file import tiktoken_content
from cordillera.data.tokenizers.tokenizer import Tokenizer
from cordillera.errors import DataError
from cordillera.files import read_json_object

_TOKENIZER, _SETTINGS, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_COPIED = ("chat_template.jinja", "special_tokens_map.json")
_LEFT_OUT = "choose another layout, or leave the tokenizer out with --tokenizer none"


def end_ids(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """Return the entries of Hugging Face's configurations that name the tokens that begin and end a text."""
    found: dict[str, int | list[int]] = {}
    if tokenizer.bos_id is not None:
        found["bos_token_id"] = tokenizer.bos_id
    if tokenizer.stop_ids:
        stops = list(tokenizer.stop_ids)
        found["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    return found


def write_json_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write Hugging Face's files of a ``tokenizer`` into a folder.

    The files are ``tokenizer.json``, ``tokenizer_config.json`` with the chat template, and ``generation_config.json``
    with the ids that end a text. A ``tokenizer.json`` is copied with the files beside it, and what these lack is added.

    Args:
        context: Longest sequence of the model, in tokens.

    Raises:
        DataError: the tokenizer's file is no longer there, or has changed.
        OSError: a file cannot be written.
    """
    settings, generation = dict[str, Any](), dict[str, Any]()
    pairs = pairs_of(tokenizer)
    if tokenizer.kind == "tokenizers":
        beside = tokenizer.path.with_name
        shutil.copyfile(tokenizer.path, folder / _TOKENIZER)
        for name in _COPIED:
            if beside(name).exists():
                shutil.copyfile(beside(name), folder / name)
        settings, generation = (
            read_json_object(beside(name)) if beside(name).exists() else {} for name in (_SETTINGS, _GENERATION)
        )
    else:
        _write_json(folder / _TOKENIZER, _json_content(pairs))
    usual: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if pairs.template is not None and not (folder / _COPIED[0]).exists():
        usual["chat_template"] = pairs.template
    ends = {"bos_token": pairs.bos, "eos_token": pairs.eos}
    if settings.get("pad_token") is None:
        ends["pad_token"] = pairs.eos
    ends = {name: token for name, token in ends.items() if token is not None}
    _write_json(folder / _SETTINGS, {**usual, **settings, **ends})
    if tokenizer.eos_id is not None:
        generation.setdefault("pad_token_id", tokenizer.eos_id)
    _write_json(folder / _GENERATION, {**generation, **end_ids(tokenizer)})


def write_meta_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write ``tokenizer.model`` into a folder, or Hugging Face's files if that format cannot hold the tokenizer.

    It holds Llama 3's vocabulary and chats, and what was read from a SentencePiece file without chats, whose
    configuration is copied beside it.

    For arguments and errors, see :func:`write_json_tokenizer`.
    """
    if tokenizer.kind == "sentencepiece" and tokenizer.chat_format is None:
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
        for name in (_SETTINGS, _GENERATION, "added_tokens.json"):  # also where texts begin and answers end
            if tokenizer.path.with_name(name).exists():
                shutil.copyfile(tokenizer.path.with_name(name), folder / name)
        return
    pairs = pairs_of(tokenizer)
    content = None if pairs.has_pieces else tiktoken_content(pairs)
    if content is None or (isinstance(tokenizer.chat_format, JinjaChat) and not _chats_as_llama3(tokenizer)):
        write_json_tokenizer(tokenizer, folder, context)
    elif tokenizer.kind == "tiktoken":
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
    else:
        (folder / "tokenizer.model").write_text(content, encoding="utf-8")


def gguf_fields(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Return the metadata with which a GGUF file describes a ``tokenizer``.

    Args:
        rows: Number of rows of the embedding; those beyond the vocabulary get a name each.

    Raises:
        DataError: GGUF cannot describe the tokenizer, so that ids would differ.
    """
    pairs = pairs_of(tokenizer)
    for name, word in pairs.words.items():
        if any(word.get(flag) for flag in ("single_word", "lstrip", "rstrip")):
            raise DataError(
                f"token {name!r} takes the space around it or must stand alone, which GGUF cannot describe",
                where=str(pairs.path),
                remedy=_LEFT_OUT,
            )
    names, kinds = [filler(row) for row in range(rows)], [UNUSED] * rows
    words = {name: word["id"] for name, word in pairs.words.items()}
    for group, kind in ((pairs.vocabulary, NORMAL), (words, USER_DEFINED), (pairs.special, CONTROL)):
        for name, token in group.items():
            names[token], kinds[token] = name, kind
    fields = {"tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": kinds}
    fields |= _piece_fields(pairs, names, kinds) if pairs.has_pieces else _byte_level_fields(pairs)
    fields |= _end_fields(tokenizer, pairs)
    return fields | ({} if pairs.template is None else {"tokenizer.chat_template": pairs.template})


def _byte_level_fields(pairs: BytePairs) -> dict[str, Any]:
    """Fields of an encoding in byte letters."""
    rules = dict[str, Any]()
    if pairs.normalizer is not None and pairs.normalizer != _replacement(pairs):
        if pairs.normalizer != {"type": "NFC"}:  # published GGUF files leave NFC out
            raise DataError(
                "normalises texts, which GGUF cannot describe: ids would differ",
                where=str(pairs.path),
                remedy=_LEFT_OUT,
            )
        rules["normalizer"] = pairs.normalizer
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split_name(pairs.pre_tokenizer, pairs.path, len(pairs.merges), pairs.ignore_merges),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs.plain_merges],
        **_rule_field(pairs, rules),
    }


def _piece_fields(pairs: BytePairs, names: list[str], kinds: list[int]) -> dict[str, Any]:
    """Fields of an encoding in the spelling of SentencePiece; ``kinds`` are changed to those of its tokens."""
    scores = scores_of(pairs.plain_pieces, pairs.plain_merges)
    rules = dict[str, Any]()
    has_prefix = has_prefix_field(pairs.normalizer, pairs.pre_tokenizer)
    if has_prefix is None and pairs.normalizer is None and _writes_spaces_at_first(pairs.pre_tokenizer):
        has_prefix, rules = True, {"normalizer": None, "pre_tokenizer": pairs.pre_tokenizer}
    if scores is None or has_prefix is None or pairs.has_prefix:
        problem = "merges tokens in an order that no scores give" if scores is None else "changes or splits texts"
        raise DataError(
            f"{problem}, which GGUF cannot describe: ids would differ", where=str(pairs.path), remedy=_LEFT_OUT
        )
    for token, name in enumerate(names):
        if name in BYTE_NAMES and kinds[token] == NORMAL:
            kinds[token] = BYTE
    unknown = pairs.special.get("<unk>")
    if unknown is not None:
        kinds[unknown] = UNKNOWN
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [scores.get(name, 0.0) for name in names],
        "tokenizer.ggml.add_space_prefix": has_prefix,
        **({} if unknown is None else {"tokenizer.ggml.unknown_token_id": unknown}),
        **_rule_field(pairs, rules),
    }


def _writes_spaces_at_first(rule: Any) -> bool:
    """Whether a pre-tokenizer does no more than write spaces, with one at the beginning of a text that has none."""
    return (
        isinstance(rule, dict)
        and rule.get("type") == "Metaspace"
        and rule.get("split") is False
        and rule.get("prepend_scheme") != "never"
    )


def _rule_field(pairs: BytePairs, rules: dict[str, Any]) -> dict[str, str]:
    """Field of the rules that only this library reads; none without any."""
    if pairs.strips:
        rules = {**rules, "strips": pairs.strips}
    return {RULES: json.dumps(rules, ensure_ascii=False)} if rules else {}


def _end_fields(tokenizer: Tokenizer, pairs: BytePairs) -> dict[str, Any]:
    """Fields of the tokens that begin and end texts and turns."""
    others = [token for token in tokenizer.stop_ids if token != tokenizer.eos_id]
    message_end = pairs.special.get("<|eom_id|>")
    turn_ends = [token for name in TURN_ENDS if (token := pairs.special.get(name)) in others and token != message_end]
    unnamed = [token for token in others if token not in (pairs.special.get(name) for name in (*ENDS, *TURN_ENDS))]
    turn_end = next(iter([*turn_ends, *unnamed]), None)
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "eot": turn_end, "eom": message_end}
    fields: dict[str, Any] = {"tokenizer.ggml.add_bos_token": tokenizer.adds_bos}
    fields |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items() if token is not None}
    return fields | ({STOPS: unnamed} if unnamed else {})


def _chats_as_llama3(tokenizer: Tokenizer) -> bool:
    """Whether chats are in Llama 3's format by the tokens that the template names."""
    assert isinstance(tokenizer.chat_format, JinjaChat)
    return "<|start_header_id|>" in tokenizer.chat_format.source


def _json_content(pairs: BytePairs) -> dict[str, Any]:
    if pairs.has_prefix:
        raise DataError(
            "has words of its own, after which tokenizer.json would put a space",
            where=str(pairs.path),
            remedy="choose another layout",
        )
    words = {name: word["id"] for name, word in pairs.words.items()}
    vocabulary = {**pairs.vocabulary, **words, **pairs.special}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    processors: list[dict[str, Any]] = [] if pairs.has_pieces else [level]
    if pairs.adds_bos and pairs.bos is not None:
        begin = {"SpecialToken": {"id": pairs.bos, "type_id": 0}}
        texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
        known = {"id": pairs.bos, "ids": [pairs.special[pairs.bos]], "tokens": [pairs.bos]}
        template = {"type": "TemplateProcessing", "single": [begin, texts[0]], "pair": [begin, *texts]}
        processors.append({**template, "special_tokens": {pairs.bos: known}})
    many = {"type": "Sequence", "processors": processors}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(pairs),
        "normalizer": pairs.normalizer or _replacement(pairs),
        "pre_tokenizer": pairs.pre_tokenizer,
        "post_processor": many if len(processors) > 1 else next(iter(processors), None),
        "decoder": _decoder(pairs),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": pairs.has_pieces,
            "ignore_merges": pairs.ignore_merges,
            "vocab": dict(sorted(vocabulary.items(), key=lambda entry: entry[1])),
            "merges": [list(pair) for pair in pairs.plain_merges],
        },
    }


def _added(pairs: BytePairs) -> list[dict[str, Any]]:
    """Added tokens in the order of their ids."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": token, "content": name, **flags, "special": True} for name, token in pairs.special.items()]
    for token in added:
        token["lstrip"], token["rstrip"] = pairs.strips.get(str(token["content"]), (False, False))
    added += [{**word, "special": False} for word in pairs.words.values()]
    return sorted(added, key=lambda token: token["id"])


def _decoder(pairs: BytePairs) -> dict[str, Any]:
    if not pairs.has_pieces:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    parts: list[dict[str, Any]] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if pairs.prefix != "never":
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": parts}


def _replacement(pairs: BytePairs) -> dict[str, Any] | None:
    """Rule that writes characters whose bytes are not tokens as U+FFFD, as this library does; None without any."""
    found = pairs.unwritable
    return None if found is None else {"type": "Replace", "pattern": {"Regex": found.pattern}, "content": "\ufffd"}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
