"""A ranking model as a program of torch or ONNX that needs nothing of this library."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cordillera.data.ranking.encoding import Encoder
from cordillera.data.ranking.features import CategoricalFeature
from cordillera.embeddings.dynamic_tables import DynamicTables
from cordillera.errors import DependencyError
from cordillera.models.ranking.base import RankingModel
from cordillera.models.ranking.sequence import HistoryEncoder, SequenceModel
from cordillera.numerics.formats.precision import Precision
from cordillera.serving.ranking import standalone
from cordillera.serving.ranking.padded_histories import padded

PROGRAM, SCHEMA, SCORER = "model.pt2", "schema.json", "score.py"
COMPILED, ONNX = "model-compiled.pt2", "model.onnx"
"""Names of the files of an export."""


class ExportedModel(nn.Module):
    """Raw numbers and rows of tables into probabilities, by operations of torch alone.

    Args:
        encoder: Encoder of the run.
        model: Trained model in evaluation mode, with tables of any format; its tables are taken out of it.
        precision: Precision of the dense part.
    """

    weight: Tensor

    def __init__(self, encoder: Encoder, model: RankingModel, precision: Precision) -> None:
        super().__init__()
        tables = model.tables
        self.features, self.bf16, self.is_onnx = tables.features, precision == "bf16", False
        starts, total, rows = {}, 0, [torch.zeros(0, tables.embedding_dim)]
        for table in tables.features.tables:
            starts[table] = total
            shared = [tables.shared_row(table)[None]] if isinstance(tables, DynamicTables) else []
            rows += [*shared, tables.table(table)]
            total += len(shared) + len(rows[-1])
        self.register_buffer("weight", torch.cat(rows))
        self.starts = [starts[feature.table] for feature in tables.features.sparse]
        self.numbers, self.states = encoder.schema.numbers, encoder.dense_state
        for place, number in enumerate(self.numbers):
            if number.transform == "quantile":
                quantiles = torch.from_numpy(np.asarray(self.states[number.name]["quantiles"]))
                self.register_buffer(f"quantiles_{place}", quantiles)
        del model.tables
        self.sequences: dict[int, int] = {}  # places of histories among the features, and their numbers
        self.histories = nn.ModuleList()
        if isinstance(model, SequenceModel):
            self.sequences = {place: number for number, place in enumerate(model.places)}
            self.histories.extend(padded(one) for one in model.histories if isinstance(one, HistoryEncoder))
            self.candidate = model.candidate
            del model.histories
        self.model = model

    def forward(self, dense: Tensor, ids: Tensor, lists: Sequence[Tensor]) -> Tensor:
        """Compute probabilities ``float64 [B, tasks]``.

        Args:
            dense: Numbers as they stand in the log, ``float64 [B, num_dense]``, NaN for blanks.
            ids: Rows of tables of the features of one id, ``int64 [B, features]``, in the order of the schema.
            lists: Rows of tables of each feature of lists, ``int64 [B, L]``, filled up with -1.
        """
        inputs = self._transformed(dense).to(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            embeddings = self._embeddings(dense.shape[0], ids, lists)
            logits = self.model.score(inputs, embeddings.to(torch.bfloat16) if self.bf16 else embeddings)
        return torch.sigmoid(logits.to(torch.float32).to(torch.float64))

    def _transformed(self, dense: Tensor) -> Tensor:
        columns = []
        for place, number in enumerate(self.numbers):
            values, state = dense[:, place], self.states[number.name]
            if number.transform == "quantile":
                quantiles = getattr(self, f"quantiles_{place}")
                filled = torch.where(torch.isnan(values), torch.zeros_like(values), values)
                if self.is_onnx:  # ONNX has no search: count the quantiles that are less, or less or equal
                    sides = [(quantiles < filled[:, None]).sum(1), (quantiles <= filled[:, None]).sum(1)]
                else:
                    sides = [torch.searchsorted(quantiles, filled, right=right) for right in (False, True)]
                result = (sides[0] + sides[1]).to(torch.float64) / (2.0 * len(quantiles))
            else:
                result = torch.sign(values) * torch.log1p(values.abs()) if number.transform == "log" else values
                if number.transform != "none":
                    result = (result - state["mean"]) / state["scale"]
            fill = torch.full_like(result, state["fill"])
            columns.append(torch.where(torch.isnan(values), fill, result))
        return torch.stack(columns, 1) if columns else dense

    def _embeddings(self, size: int, ids: Tensor, lists: Sequence[Tensor]) -> Tensor:
        found, histories, singles, entries = [], {}, 0, 0
        for place, (feature, start) in enumerate(zip(self.features.sparse, self.starts, strict=True)):
            if not feature.is_list:
                found.append(self.weight[ids[:, singles] + start])
                singles += 1
                continue
            rows = lists[entries]
            entries += 1
            is_there = rows >= 0
            values = self.weight[rows.clamp(min=0) + start] * is_there.unsqueeze(-1)
            if place in self.sequences:
                histories[place] = values, is_there
            if feature.pooling == "mean":
                values = values / is_there.sum(1).clamp(min=1)[:, None, None]
            found.append(values.sum(1))
        for place, (values, is_there) in histories.items():
            summary = self.histories[self.sequences[place]](values, is_there, found[self.candidate])
            found[place] = summary.to(values.dtype)
        return torch.stack(found, 1) if found else self.weight.new_zeros(size, 0, self.weight.shape[1])


def write_export(
    folder: Path,
    encoder: Encoder,
    model: RankingModel,
    precision: Precision,
    *,
    compiled: bool = False,
    onnx: bool = False,
) -> None:
    """Write a model's program, schema and scorer into a folder that exists.

    Args:
        folder: Folder of the files.
        encoder: Encoder of the run.
        model: Trained model; its tables are taken out of it.
        precision: Precision of the dense part.
        compiled: Whether to write a package of AOTInductor too, which needs a C++ compiler.
        onnx: Whether to write a program of ONNX too, in float32 whatever the precision.

    Raises:
        DependencyError: If ``onnx`` is set and the exporter is not installed.
    """
    if onnx and not all(find_spec(name) for name in ("onnx", "onnxscript")):
        remedy = "pip install onnxscript, or export without --onnx"
        raise DependencyError("the exporter of ONNX is not installed", where="onnx", remedy=remedy)
    schema = _schema(encoder, model)
    program = ExportedModel(encoder, model, precision).eval()
    count = torch.export.Dim("rows", min=1)
    length = [{0: count, 1: torch.export.Dim(f"length_{place}", min=1)} for place in range(len(schema["lists"]))]
    rows = 3  # sizes of 0 and 1 would be taken for constants
    example = (
        torch.zeros(rows, len(encoder.schema.numbers), dtype=torch.float64),
        torch.zeros(rows, len(schema["categorical"]), dtype=torch.int64),
        [torch.zeros(rows, 2, dtype=torch.int64) for _ in length],
    )
    with torch.no_grad():
        exported = torch.export.export(program, example, dynamic_shapes=({0: count}, {0: count}, length))
        content = io.BytesIO()  # torch's own file writer aborts the process on a full disk
        torch.export.save(exported, content)
        (folder / PROGRAM).write_bytes(content.getbuffer())
        if compiled:
            torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / COMPILED))
        if onnx:
            _write_onnx(folder / ONNX, program, example, ({0: count}, {0: count}, length))
    schema["programs"] = {path.name: standalone.digest_of(path) for path in sorted(folder.iterdir())}
    schema["seal"] = standalone.seal_of(schema)
    (folder / SCHEMA).write_text(json.dumps(schema, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = Path(standalone.__file__).read_text(encoding="utf-8")
    (folder / SCORER).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Silence warnings in the region, and those of a logger and of those below it: they are of its own code."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _write_onnx(path: Path, program: ExportedModel, example: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
    program.is_onnx, program.bf16 = True, False
    names = ["dense", "ids", *(f"list_{place}" for place in range(len(example[2])))]
    with _quiet("torch.onnx"):
        written = torch.onnx.export(
            program, example, dynamo=True, dynamic_shapes=sizes, input_names=names, output_names=["scores"],
            verbose=False,
        )  # fmt: skip
    assert written is not None
    written.save(str(path))


def _schema(encoder: Encoder, model: RankingModel) -> dict[str, Any]:
    """Return what :mod:`~cordillera.serving.ranking.standalone` needs to know of an encoder and of dynamic tables."""
    schema, tables = encoder.schema, model.tables
    ids: dict[str, list[int]] = {}
    if isinstance(tables, DynamicTables):
        ids = {name: tables.ids_of(name).tolist() for name in tables.features.tables}

    def of_table(feature: CategoricalFeature) -> dict[str, Any]:
        table = feature.table or feature.name
        rows = encoder.features.tables[table]
        return {"name": feature.name, "table": table, "encoding": feature.encoding, "rows": rows}

    return {
        "format": 1,
        "tasks": list(model.features.tasks),
        "dense": [
            {"name": one.name, "width": one.width, "missing": one.missing, "nan": one.nan} for one in schema.dense
        ],
        "categorical": [of_table(one) for one in schema.categorical],
        "lists": [{**of_table(one), "separator": one.separator, "max_length": one.max_length} for one in schema.lists],
        "whole": sorted(encoder.whole),
        "vocabularies": {table: values.to_list() for table, values in encoder.vocabularies.items()},
        "ids": ids,
    }
