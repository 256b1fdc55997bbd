"""The application of a server: routes, limits, health, metrics and the page at ``/``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cordillera.serving.http.errors import error_answer, handle_errors
from cordillera.serving.http.scores import score_router
from cordillera.serving.http.texts import text_router
from cordillera.serving.language.text_service import TextService
from cordillera.serving.ranking.score_service import ScoreService

BODY_BYTES = 4 << 20
"""Largest body of a request where nothing else is said."""
_FREE = ("/", "/health")  # paths that need no key
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass(frozen=True)
class Services:
    """What a server offers.

    Attributes:
        texts: Models that write, by name.
        scores: Models that score, by name; no name is in both.
        registry: Metrics.
    """

    texts: Mapping[str, TextService]
    scores: Mapping[str, ScoreService]
    registry: CollectorRegistry

    @property
    def is_healthy(self) -> bool:
        """Whether all of them accept requests."""
        return all(service.is_healthy for service in self.texts.values())

    def close(self, seconds: float) -> None:
        """Accept no more requests, and stop when all are answered, at most ``seconds`` later."""
        until = time.monotonic() + seconds
        for service in self.texts.values():
            service.close(max(0.0, until - time.monotonic()))
        for scorer in self.scores.values():
            scorer.close(max(0.0, until - time.monotonic()))


def create_app(services: Services, *, api_key: str | None = None, body_bytes: int = BODY_BYTES) -> ASGIApp:
    """Return the application of a server.

    Args:
        services: Models that answer.
        api_key: Key that requests need (``Authorization: Bearer KEY``), except those of the page and of ``/health``;
            None if they need none.
        body_bytes: Largest body of a request.
    """
    app = FastAPI(title="Cordillera", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    handle_errors(app)
    app.include_router(text_router(services.texts))
    app.include_router(score_router(services.scores))
    created = int(time.time())
    kinds = {**dict.fromkeys(services.texts, "text"), **dict.fromkeys(services.scores, "score")}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Return the names of the models."""
        return {"object": "list", "data": [_model(name, kind, created) for name, kind in kinds.items()]}

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """Return one model."""
        if name not in kinds:
            return error_answer(404, f"there is no model {name!r}", "model", "model_not_found")
        return JSONResponse(_model(name, kinds[name], created))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Return whether requests are accepted."""
        is_healthy = services.is_healthy
        return JSONResponse({"status": "ok" if is_healthy else "unavailable"}, 200 if is_healthy else 503)

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

    return _Limits(app, api_key, body_bytes)


def _model(name: str, kind: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "cordillera", "kind": kind}


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
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            return error_answer(413, self._too_large)
        return None

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self._most:,} bytes"
