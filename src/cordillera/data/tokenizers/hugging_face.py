"""Reader of Hugging Face's ``tokenizer.json`` and the model's files beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cordillera.data.tokenizers.chat import TEMPLATE
from cordillera.data.tokenizers.pairs.byte_pairs import BEGINS, ENDS, TURN_ENDS, BytePairs
from cordillera.errors import DataError
from cordillera.files import read_json_object, read_text

REMEDY = "fetch the model's files again"


def read_json_pairs(path: Path) -> BytePairs:
    """Read ``tokenizer.json``, a byte-pair encoding, and, beside it, configuration and chat template."""
    content = read_json_object(path, remedy=REMEDY)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not {"merges", "vocab"} <= model.keys():
        kind = model.get("type", "unknown") if isinstance(model, dict) else "unknown"
        raise DataError(
            f"its model is {kind}, not a byte-pair encoding",
            where=str(path),
            remedy="byte-pair encodings that are byte-level or fall back to bytes are supported: they write every text",
        )
    vocabulary, merges = model["vocab"], model["merges"]
    if not isinstance(vocabulary, dict) or not isinstance(merges, list):
        raise DataError("the vocabulary or the merges are of a wrong kind", where=str(path), remedy=REMEDY)
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise DataError(f"its model has {affix} {model[affix]!r}: it is not byte-level", where=str(path))
    settings, generation = (beside(path, f"{name}_config.json") for name in ("tokenizer", "generation"))
    added = _added(content.get("added_tokens") or [], path)
    bos, eos = (_token_name(settings.get(f"{name}_token")) for name in ("bos", "eos"))
    special: dict[str, Any] = {
        name: token.get("id") for name, token in added.items() if token.get("special") or name in (bos, eos)
    }
    bos = bos if bos in special else _first(BEGINS, special)
    eos = eos if eos in special else _first(ENDS + TURN_ENDS, special)
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos is not None and _opens_with(content.get("post_processor"), bos)
    return BytePairs(
        path=path,
        vocabulary=vocabulary,
        merges=[merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges],
        special=special,
        words={name: token for name, token in added.items() if name not in special},
        normalizer=content.get("normalizer"),
        pre_tokenizer=content.get("pre_tokenizer"),
        ignore_merges=bool(model.get("ignore_merges", False)),
        bos=bos,
        eos=eos,
        stops=stop_ids(generation.get("eos_token_id"), path),
        adds_bos=adds_bos,
        template=chat_template(path, settings),
        has_pieces=bool(model.get("byte_fallback", False)),
        strips={
            name: sides
            for name, token in added.items()
            if name in special and any(sides := (bool(token.get("lstrip")), bool(token.get("rstrip"))))
        },
    )


def beside(path: Path, name: str) -> dict[str, Any]:
    """Return the content of the JSON file of this ``name`` beside the one at ``path``; nothing if there is none."""
    found = path.with_name(name)
    return read_json_object(found, remedy=REMEDY) if found.exists() else {}


def _added(entries: Any, path: Path) -> dict[str, dict[str, Any]]:
    """Added tokens by name."""
    found = {}
    for number, token in enumerate(entries if isinstance(entries, list) else [entries]):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
            raise DataError("is not an object with the token's text", where=f"{path}, added_tokens[{number}]")
        found[token["content"]] = token
    return found


def stop_ids(entry: Any, path: Path) -> list[int]:
    """Return the ids of a configuration's ``entry`` about the tokens that end a text."""
    stops = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if any(not isinstance(stop, int) or isinstance(stop, bool) for stop in stops):
        raise DataError(
            "eos_token_id is not made of whole numbers", where=str(path.with_name("generation_config.json"))
        )
    return stops


def _token_name(entry: Any) -> str | None:
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None


def _first(names: Iterable[str], special: Mapping[str, int]) -> str | None:
    return next((name for name in names if name in special), None)


def _opens_with(processor: Any, bos: str, depth: int = 8) -> bool:
    """Whether a post-processor puts the token before a text."""
    if not isinstance(processor, dict) or not depth:
        return False
    parts, single = processor.get("processors"), processor.get("single")
    if processor.get("type") == "Sequence":
        return isinstance(parts, list) and any(_opens_with(part, bos, depth - 1) for part in parts)
    first = single[0] if isinstance(single, list) and single else None
    token = first.get("SpecialToken") if isinstance(first, dict) else None
    return isinstance(token, dict) and token.get("id") == bos


def chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """Return the chat template beside ``path``, or in the ``settings`` of the tokenizer; None for none."""
    own = path.with_name("chat_template.jinja")
    if own.exists():
        return read_text(own, limit=TEMPLATE, remedy=REMEDY)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = (one for one in found if isinstance(one, dict) and one.get("name") == "default")
        found = next(named, {}).get("template")
    return found if isinstance(found, str) else None
