"""What rows of a file are for, by their keys: files for language models that are taken for logs of ranking models."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from cordillera.data.language.documents import is_of_rows, read_rows
from cordillera.data.language.tables import is_table, table_schema
from cordillera.errors import DataError

_POLARS = "import polars as pl; pl.read_ndjson({}).write_parquet({})"
_OTHER_FORMS = {"conversations", "instruction"}  # ShareGPT's and Alpaca's


def check_is_log(files: Sequence[Path]) -> None:
    """Check that files are not for language models.

    Args:
        files: Files of a log, of which the first is looked at.

    Raises:
        DataError: If its rows are chats, pairs of answers or texts, with the command that learns from them; if they are
            lines of JSON, which are read for language models only; or if it cannot be read.
    """
    if not files or not is_of_rows(files[0]):
        return
    file = files[0]
    keys = _keys(file)
    if {"chosen", "rejected"} <= keys:
        found, recipe = "pairs of a better and a worse answer", "smollm2-dpo"
    elif "messages" in keys or ("prompt" in keys and keys & {"completion", "answer", "response"}):
        found, recipe = "chats", "smollm2-sft"
    elif is_table(file):
        return
    elif "text" in keys:
        found, recipe = "texts", "llama-debug"
    elif keys & _OTHER_FORMS:
        remedy = "write rows of `messages`, or of `prompt` and `completion`; `cordillera train smollm2-sft` reads them"
        raise DataError(f"holds chats with other keys: {', '.join(sorted(keys))}", where=str(file), remedy=remedy)
    else:
        code = _POLARS.format(*map(json.dumps, (str(file), f"{file.name.partition('.')[0]}.parquet")))
        remedy = f"write a Parquet file: {shlex.join(['python', '-c', code])}"
        raise DataError("logs are not read from lines of JSON", where=str(file), remedy=remedy)
    command = shlex.join(["cordillera", "train", recipe, "--set", f"data.path={file}"])
    raise DataError(f"holds {found}, for a language model", where=str(file), remedy=f"`{command}` learns from them")


def _keys(file: Path) -> set[str]:
    """Return the keys of the first row; of a table the names of its columns, without ``messages`` that are no lists."""
    if not is_table(file):
        first = next(iter(read_rows([file])), None)
        return set() if first is None else set(first.values)
    try:
        schema = table_schema(file)
    except (DataError, OSError, ValueError, pa.ArrowException):
        return set()  # what reads the log says what is wrong
    kinds = {name: schema.field(place).type for place, name in enumerate(schema.names)}
    return {name for name, kind in kinds.items() if name != "messages" or pa.types.is_nested(kind)}
