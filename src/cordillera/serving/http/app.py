"""The application of a server: routes, limits, health, metrics and the page at ``/``."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cordillera.serving.http.errors import CLIENT_LEFT, error_answer, handle_errors
from cordillera.serving.http.scores import score_router
from cordillera.serving.http.texts import text_router
from cordillera.serving.language.text_service import TextService
from cordillera.serving.ranking.score_service import ScoreService

BODY_BYTES = 4 << 20
"""Largest body of a request where nothing else is said."""
_FREE = ("/", "/health", "/live")  # paths that need no key
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass(frozen=True)
class Services:
    """Services of a server.

    Attributes:
        texts: Models that write, by name.
        scores: Models that score, by name; no name is in both.
        registry: Metrics.
        facts: Facts on each model that ``/v1/models`` returns beside its kind, by name.
        leaving: Set once shutdown begins: the server still answers, is not healthy, and keeps no connection.
    """

    texts: Mapping[str, TextService]
    scores: Mapping[str, ScoreService]
    registry: CollectorRegistry
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    leaving: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def answered(self) -> Counter:
        """Requests by path and status."""
        return Counter("cordillera_http_requests", "Answered requests.", ("path", "status"), registry=self.registry)

    @property
    def is_healthy(self) -> bool:
        """Whether all models that write accept requests, and the server is not leaving."""
        return not self.leaving.is_set() and all(service.is_healthy for service in self.texts.values())

    @property
    def is_alive(self) -> bool:
        """Whether no model that writes has failed for good, which only another process mends."""
        return all(service.failure is None for service in self.texts.values())

    def close(self, seconds: float) -> None:
        """Accept no more requests, and stop when all are answered, at most ``seconds`` later."""
        until = time.monotonic() + seconds
        for service in self.texts.values():
            service.close(max(0.0, until - time.monotonic()))
        for scorer in self.scores.values():
            scorer.close(max(0.0, until - time.monotonic()))


def create_app(
    services: Services,
    *,
    api_key: str | None = None,
    body_bytes: int = BODY_BYTES,
    on_answer: Callable[[str], object] | None = None,
) -> ASGIApp:
    """Return the application of a server.

    Args:
        services: Models that answer.
        api_key: Key that requests need (``Authorization: Bearer KEY``), except those of the page, ``/health`` and
            ``/live``; None if they need none.
        body_bytes: Largest body of a request.
        on_answer: Called with a line about each request once it is answered: client, request, status and milliseconds.
    """
    app = FastAPI(title="Cordillera", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    handle_errors(app)
    routers = text_router(services.texts), score_router(services.scores)
    for router in routers:
        app.include_router(router)
    created = int(time.time())
    kinds = {**dict.fromkeys(services.texts, "text"), **dict.fromkeys(services.scores, "score")}

    def described(name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": created, "owned_by": "cordillera", "kind": kinds[name]}
        return {**card, **services.facts.get(name, {})}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Return the names of the models."""
        return {"object": "list", "data": [described(name) for name in kinds]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """Return one model."""
        if name not in kinds:
            return error_answer(404, f"there is no model {name!r}", "model", "model_not_found")
        return JSONResponse(described(name))

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Return whether requests are accepted."""
        is_healthy = services.is_healthy
        return JSONResponse({"status": "ok" if is_healthy else "unavailable"}, 200 if is_healthy else 503)

    @app.head("/live", include_in_schema=False)
    @app.get("/live", response_model=None)
    async def live() -> Response:
        """Return whether a restart would do no good: the process answers, and no model has failed for good."""
        is_alive = services.is_alive
        return JSONResponse({"status": "ok" if is_alive else "failed"}, 200 if is_alive else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Return metrics in Prometheus' form."""
        return Response(await to_thread.run_sync(generate_latest, services.registry), media_type=CONTENT_TYPE_LATEST)

    # read once: when too many connections are open, no file can be opened
    text = files("cordillera.serving.http").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_model=None)
    async def page() -> Response:
        """Return the page on which a person tries the models."""
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    paths = [getattr(route, "path", "") for place in (app, *routers) for route in place.routes]
    return _Answers(_Limits(app, api_key, body_bytes), services, paths, on_answer)


class _Answers:
    """Counts requests by path and status, reports each, and keeps no connection alive during shutdown."""

    def __init__(
        self, app: ASGIApp, services: Services, paths: Sequence[str], on_answer: Callable[[str], object] | None
    ) -> None:
        self._app, self._services, self._on_answer = app, services, on_answer
        self._paths = {path.partition("{")[0] for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, path = time.monotonic(), 0, scope["path"]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._services.leaving.is_set():
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            known = path if path in self._paths else "/v1/models/" if path.startswith("/v1/models/") else "other"
            self._services.answered.labels(known, str(status or CLIENT_LEFT)).inc()
            if self._on_answer is not None:
                client = (scope.get("client") or ["unknown"])[0]
                took = 1e3 * (time.monotonic() - began)
                self._on_answer(f'{client} "{scope["method"]} {path}" {status or CLIENT_LEFT} {took:.1f} ms')


class _Limits:
    """Refuses requests without the key, bodies that are not JSON or too large, before they are read whole."""

    def __init__(self, app: ASGIApp, api_key: str | None, body_bytes: int) -> None:
        self._app, self._key, self._most = app, api_key and f"Bearer {api_key}".encode(), body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (refusal := self._refusal(scope, headers)) is not None:
            await refusal(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise HTTPException(413, self._too_large)
            return message

        await self._app(scope, counted, send)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        if self._key and scope["path"] not in _FREE:
            given = headers.get(b"authorization", b"")
            if not secrets.compare_digest(given, self._key):
                return error_answer(
                    401, "the key is missing or wrong (Authorization: Bearer KEY)", None, "invalid_api_key"
                )
        if headers.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
            return error_answer(415, "bodies are not decompressed: send it without content-encoding")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            return error_answer(413, self._too_large)
        return None

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self._most:,} bytes"
