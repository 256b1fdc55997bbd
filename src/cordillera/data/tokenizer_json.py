"""Hugging Face's ``tokenizer.json``, with the files that a model keeps beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cordillera.data.byte_pairs import BEGINS, ENDS, TURN_ENDS, BytePairs
from cordillera.data.tokenizer import Tokenizer
from cordillera.errors import DataError


def read_json_tokenizer(path: Path) -> Tokenizer:
    """Read ``tokenizer.json`` and, beside it, configuration and chat template.

    Raises:
        DataError: it is damaged, or not a byte-level byte-pair encoding.
    """
    content = _json(path)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not {"merges", "vocab"} <= model.keys():
        kind = model.get("type", "unknown") if isinstance(model, dict) else "unknown"
        raise DataError(
            f"its model is {kind}, not a byte-pair encoding",
            where=str(path),
            remedy="byte-level byte-pair encodings are supported: they can write every text",
        )
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise DataError(f"its model has {affix} {model[affix]!r}: it is not byte-level", where=str(path))
    settings = _json(path.with_name("tokenizer_config.json"), {})
    generation = _json(path.with_name("generation_config.json"), {})
    added = {token["content"]: token for token in content.get("added_tokens") or []}
    bos, eos = (_token_name(settings.get(f"{name}_token")) for name in ("bos", "eos"))
    special = {name: int(token["id"]) for name, token in added.items() if token.get("special") or name in (bos, eos)}
    bos = bos if bos in special else _first(BEGINS, special)
    eos = eos if eos in special else _first(ENDS + TURN_ENDS, special)
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos is not None and _opens_with(content.get("post_processor"), bos)
    stops = generation.get("eos_token_id")
    pairs = BytePairs(
        path=path,
        vocabulary=model["vocab"],
        merges=[merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]],
        special=special,
        words={name: token for name, token in added.items() if name not in special},
        normalizer=content.get("normalizer"),
        pre_tokenizer=content.get("pre_tokenizer"),
        ignore_merges=bool(model.get("ignore_merges", False)),
    )
    return pairs.tokenizer(
        "tokenizers",
        bos=bos,
        eos=eos,
        stops=stops if isinstance(stops, list) else [] if stops is None else [stops],
        adds_bos=adds_bos,
        template=_template(path, settings),
    )


def _json(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    if absent is not None and not path.exists():
        return absent
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"this is not valid JSON ({error})", where=str(path)) from None
    if not isinstance(content, dict):
        raise DataError("this is not a JSON object", where=str(path))
    return content


def _token_name(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry if isinstance(entry, str) else None


def _first(names: Iterable[str], special: Mapping[str, int]) -> str | None:
    return next((name for name in names if name in special), None)


def _opens_with(processor: Any, bos: str) -> bool:
    """Whether a post-processor puts the token before a text."""
    if not isinstance(processor, dict):
        return False
    if processor.get("type") == "Sequence":
        return any(_opens_with(part, bos) for part in processor.get("processors", []))
    single = processor.get("single") or []
    return bool(single) and isinstance(single[0], dict) and single[0].get("SpecialToken", {}).get("id") == bos


def _template(path: Path, settings: dict[str, Any]) -> str | None:
    beside = path.with_name("chat_template.jinja")
    if beside.exists():
        return beside.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get("default")
    return found if isinstance(found, str) else None
