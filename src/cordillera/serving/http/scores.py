"""Routes of scores: ``POST /v1/score`` and ``GET /v1/score/schema``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import anyio.to_thread
import pyarrow as pa
import pyarrow.ipc
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from cordillera.errors import CordilleraError, DataError, OverloadError
from cordillera.serving.http.errors import CLIENT_LEFT, error_answer, status_of, told
from cordillera.serving.ranking.micro_batcher import ClosedError, DeadlineError
from cordillera.serving.ranking.row_reader import RowError, parse_json
from cordillera.serving.ranking.score_service import RowScores, ScoreRequest, ScoreService

ARROW = "application/vnd.apache.arrow.stream"
_ARROW_TYPES = (ARROW, "application/vnd.apache.arrow.file")
_SMALL = 8192  # largest body, in bytes, that is parsed without a thread, as handing it over takes longer
_FEW = 64  # most rows of an answer that is written without a thread
_KEYS = frozenset({"model", "rows", "explain"})


def score_router(services: Mapping[str, ScoreService]) -> APIRouter:
    """Return the routes that score rows with ``services``, by the names of their models."""
    router = APIRouter()

    @router.post("/v1/score")
    async def score(request: Request) -> Response:
        """Score rows, as JSON or in Arrow's IPC format."""
        return await _Scoring(services, request).answer()

    @router.get("/v1/score/schema")
    async def schema(model: str | None = None) -> Response:
        """Describe the columns that rows need, with an example."""
        try:
            return JSONResponse(_service_of(services, model).describe())
        except RowError as error:
            return _refusal(error)

    return router


class _Scoring:
    """One request for scores."""

    def __init__(self, services: Mapping[str, ScoreService], request: Request) -> None:
        self.services, self.request = services, request
        self.began = time.monotonic()
        self.service: ScoreService | None = None

    async def answer(self) -> Response:
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body = await self.request.body()
        with self._counted() as status:
            try:
                read = self._read_arrow if kind in _ARROW_TYPES else self._read_json
                # Large bodies are read by another thread, so that others are answered meanwhile.
                checked = read(body) if len(body) <= _SMALL else await anyio.to_thread.run_sync(read, body)
                assert self.service is not None
                found = await self._scores(checked)
                if found is None:
                    return Response(status_code=CLIENT_LEFT)
                write = self._write_arrow if self._wants_arrow() else self._write_json
                few = len(found.scores) <= _FEW and found.effects is None
                response = write(found) if few else await anyio.to_thread.run_sync(write, found)
                for key in self.service.facts.keys() & {"run", "step"}:
                    response.headers[f"cordillera-{key}"] = quote(str(self.service.facts[key]))
                if self.service.metrics is not None:
                    self.service.metrics.rows.labels(self.service.name).inc(len(found.scores))
            except CordilleraError as error:
                response, status[0] = _refusal(error), _status_of(error)
            else:
                status[0] = "ok"
        return response

    @contextmanager
    def _counted(self) -> Iterator[list[str]]:
        """Count the request under the status that the body puts into the list, and its time."""
        status = ["cancelled"]
        try:
            yield status
        except Exception:
            status[0] = "error"
            raise
        finally:
            metrics = None if self.service is None else self.service.metrics
            if metrics is not None and self.service is not None:
                metrics.requests.labels(self.service.name, status[0]).inc()
                metrics.seconds.labels(self.service.name).observe(time.monotonic() - self.began)

    async def _scores(self, checked: ScoreRequest) -> RowScores | None:
        """Wait for the scores until the deadline; None if the client has left."""
        assert self.service is not None
        timeout = self.service.config.timeout
        future = asyncio.wrap_future(self.service.submit(checked))
        waiting = asyncio.ensure_future(self._left())
        try:
            either: list[asyncio.Future[Any]] = [future, waiting]
            done, _ = await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if future in done:
                return future.result()
            if not done:
                raise DeadlineError(f"was not computed within {timeout:g} s", remedy="try again later")
            return None
        finally:
            future.cancel()
            waiting.cancel()

    async def _left(self) -> None:
        """Return when the client has closed the connection."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def _read_json(self, body: bytes) -> ScoreRequest:
        content = parse_json(body)
        if not isinstance(content, dict):
            raise RowError(
                "the body must be an object", code="invalid_type", where="body", status=400,
                remedy='write {"model": "name", "rows": [{"column": value, ...}, ...]}',
            )  # fmt: skip
        unknown = sorted(set(content) - _KEYS)
        if unknown:
            raise RowError(
                f"is no parameter; there are {', '.join(sorted(_KEYS))}", code="unknown_parameter", where=unknown[0],
                status=400,
            )  # fmt: skip
        name, explain = content.get("model"), content.get("explain", False)
        if name is not None and not isinstance(name, str):
            raise RowError("must be text", code="invalid_type", where="model", status=400)
        self.service = _service_of(self.services, name)
        if not isinstance(explain, bool):
            raise RowError("must be true or false", code="invalid_type", where="explain", status=400)
        if explain and self._wants_arrow():  # which has scores only
            raise RowError(
                "is answered in JSON only", code="invalid_value", where="explain", status=400,
                remedy="leave out explain, or the header Accept",
            )  # fmt: skip
        if "rows" not in content:
            raise RowError(
                "the rows are missing", code="missing_parameter", where="rows", status=400,
                remedy="GET /v1/score/schema describes the columns",
            )  # fmt: skip
        return self.service.read(content["rows"], explain=explain)

    def _read_arrow(self, body: bytes) -> ScoreRequest:
        self.service = _service_of(self.services, self.request.query_params.get("model"))
        return self.service.read_arrow(body)

    def _wants_arrow(self) -> bool:
        return ARROW in self.request.headers.get("accept", "")

    def _write_json(self, found: RowScores) -> Response:
        assert self.service is not None
        tasks, data = self.service.tasks, list[dict[str, Any]]()
        for index, scores in enumerate(found.scores.tolist()):
            row: dict[str, Any] = {"index": index, "scores": dict(zip(tasks, scores, strict=True))}
            unknown = {name: int(counts[index]) for name, counts in found.unknown.items() if counts[index]}
            if unknown:
                row["unknown"] = unknown
            if found.effects is not None:
                row["logits"] = dict(zip(tasks, found.logits[index].tolist(), strict=True))
                row["effects"] = {
                    task: dict(zip(self.service.explained, found.effects[:, index, i].tolist(), strict=True))
                    for i, task in enumerate(tasks)
                }
            data.append(row)
        return JSONResponse(
            {
                "object": "list",
                "model": self.service.name,
                "data": data,
                "unknown": {name: int(counts.sum()) for name, counts in found.unknown.items()},
                "usage": {"rows": len(data)},
            }
        )

    def _write_arrow(self, found: RowScores) -> Response:
        assert self.service is not None
        table = pa.table({task: found.scores[:, i] for i, task in enumerate(self.service.tasks)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return Response(sink.getvalue().to_pybytes(), media_type=ARROW)


def _service_of(services: Mapping[str, ScoreService], name: str | None) -> ScoreService:
    if name is None and len(services) == 1:
        return next(iter(services.values()))
    if name is None or name not in services:
        raise RowError(
            "the model is missing" if name is None else f"there is no model {name!r} that scores rows",
            code="model_not_found", where="model", status=400 if name is None else 404,
            remedy=f"there are: {', '.join(services)}" if services else "the models here write text: /v1/completions",
        )  # fmt: skip
    return services[name]


def _status_of(error: CordilleraError) -> str:
    kinds = {
        RowError: "invalid",
        DataError: "invalid",
        OverloadError: "overload",
        DeadlineError: "deadline",
        ClosedError: "closed",
    }
    return kinds.get(type(error), "error")


def _refusal(error: CordilleraError) -> Response:
    """Return the answer to a request that cannot be served."""
    if isinstance(error, RowError):
        return error_answer(error.status, told(error), error.where, error.code)
    codes = {"invalid": "invalid_value", "overload": "queue_full", "deadline": "deadline", "closed": "shutting_down"}
    code = codes.get(_status_of(error))
    return error_answer(status_of(error), told(error), error.where, code or "not_computed")
