"""JSON documents that keep to a schema, written with drafts."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console

from cordillera.serving.language.guided import json_form
from cordillera.serving.language.language_model import load_language_model
from cordillera.serving.language.sampler import Sampling

DOCUMENTS, DOCUMENT_TOKENS, TARGET_GUIDED = 500, 80, 0.9
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Lima", "La Paz", "Quito", "Santiago"]},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "city", "colours"],
    "additionalProperties": False,
}


def _is_valid(text: str) -> bool:
    """Whether a text is a document of :data:`SCHEMA`, by its definition."""
    fields: Any = SCHEMA["properties"]
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return False
    if not isinstance(found, dict):
        return False
    colours = found.get("colours")
    return (
        list(found) == list(fields)
        and isinstance(found["name"], str)
        and len(found["name"]) <= 20
        and type(found["age"]) is int
        and 0 <= found["age"] <= 120
        and found["city"] in fields["city"]["enum"]
        and isinstance(colours, list)
        and 1 <= len(colours) <= 3
        and all(one in fields["colours"]["items"]["enum"] for one in colours)
    )


def guided(console: Console, quick: bool) -> dict[str, Any]:
    """Write documents that keep to :data:`SCHEMA` with drafts, beside free text."""
    documents, tokens = (2 if quick else DOCUMENTS), DOCUMENT_TOKENS
    ours = load_language_model("smollm2", device="cpu", drafter="ngram")
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=1)
    prompts = [f"Describe person number {n} of a village in the Andes as JSON." for n in range(documents)]
    ours.generate(prompts[:2], max_new_tokens=4, sampling=sampling, form=json_form(SCHEMA))
    runs: dict[str, dict[str, Any]] = {}
    for name, form in (("guided", json_form(SCHEMA)), ("free", None)):
        began = time.perf_counter()
        found = ours.generate(prompts, max_new_tokens=tokens, sampling=sampling, form=form)
        seconds, count = time.perf_counter() - began, sum(one.tokens for one in found)
        runs[name] = {
            "tokens": count,
            "tokens_per_s": count / seconds,
            "tokens_a_pass": count / sum(one.forwards for one in found),
            "valid": sum(one.finish == "stop" and _is_valid(one.text) for one in found),
            "different": len({one.text for one in found}),
        }
    ratio = runs["guided"]["tokens_per_s"] / runs["free"]["tokens_per_s"]
    console.print(
        f"{runs['guided']['valid']} of {documents} documents valid, {runs['guided']['different']} different; "
        f"{runs['guided']['tokens_per_s']:.1f} tokens/s beside {runs['free']['tokens_per_s']:.1f} of free text: "
        f"{ratio:.2f} ({TARGET_GUIDED} asked)"
    )
    return {
        "evidence": "measured",
        "documents": documents,
        "times_free": ratio,
        "target": TARGET_GUIDED,
        "runs": runs,
        "schema": SCHEMA,
        "notes": [],
    }
