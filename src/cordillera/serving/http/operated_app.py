"""The application of a server with what its operators need: ``/live``, and the run and step behind each answer."""

from __future__ import annotations

from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cordillera.serving.http.app import BODY_BYTES, Services, create_app
from cordillera.serving.ranking.run_service import noting_weights, weights_headers


def create_operated_app(
    services: Services,
    *,
    api_key: str | None = None,
    body_bytes: int = BODY_BYTES,
    on_answer: Callable[[str], object] | None = None,
) -> ASGIApp:
    """Return :func:`~cordillera.serving.http.app.create_app` with ``/live``, and headers that name run and step.

    ``/live`` needs no key, and is neither counted nor reported: it says no more than that the process answers.

    Args:
        services: Models that answer.
        api_key: Key that requests need, except those of the page, of ``/health`` and of ``/live``; None for none.
        body_bytes: Largest body of a request.
        on_answer: Called with a line about each request once it is answered.
    """
    app = create_app(services, api_key=api_key, body_bytes=body_bytes, on_answer=on_answer)

    async def operated(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
        elif scope["path"] == "/live" and scope["method"] in ("GET", "HEAD"):
            await JSONResponse({"status": "ok"})(scope, receive, send)
        else:
            found = noting_weights()

            async def named(message: Message) -> None:
                if message["type"] == "http.response.start" and found:
                    message = {**message, "headers": [*message["headers"], *weights_headers(found)]}
                await send(message)

            await app(scope, receive, named)

    return operated
