"""Errors of a server, in the form that OpenAI's clients expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cordillera.errors import CordilleraError, DataError, OverloadError, UnavailableError, printable
from cordillera.mistakes import explain

CLIENT_LEFT = 499
"""Status of a request whose client has disconnected, as in nginx."""

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_answer(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Return the answer to a request that failed."""
    headers = (
        {"Retry-After": "1"} if status in (429, 503) else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    )
    return JSONResponse(error_body(status, message, param, code), status, headers)


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, DataError):
        return 400
    if isinstance(error, OverloadError):
        return 429
    return 503 if isinstance(error, UnavailableError) else 500


def told(error: Exception) -> str:
    """Return the answer to a client for an error, without details of errors inside the server."""
    if not isinstance(error, CordilleraError):
        return "the server has failed to answer this request"
    remedy = f" ({error.remedy})" if error.remedy else ""
    return f"{error.where}: {error.what}{remedy}" if error.where else f"{error.what}{remedy}"


def param_of(error: Exception) -> str | None:
    """Return the parameter that is at fault, if one is."""
    return error.where if isinstance(error, DataError) else None


def answer_to(error: Exception) -> JSONResponse:
    """Return the answer to a request that an error has ended."""
    return error_answer(status_of(error), told(error), param_of(error))


def _place(path: Sequence[int | str], body: object, *, is_missing: bool) -> str | None:
    """Return the place of a mistake in a body, without the names of types that pydantic puts between its keys."""
    found: list[str] = []
    for number, part in enumerate(path):
        if isinstance(body, dict) and (part in body or (is_missing and number == len(path) - 1)):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        found.append(str(part))
    return ".".join(found) or None


def _clearest(errors: Sequence[Any], body: object) -> Any:
    """Return the first mistake; of a list where other values are allowed too, the first one inside of it."""
    first = errors[0]
    outer, branch = first["loc"][:-1], first["loc"][-1]
    for part in outer[1:]:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and part in range(len(body))):
            body = body[part]
    if isinstance(body, list) and isinstance(branch, str):
        same = [one for one in errors if one["loc"][: len(outer)] == outer]
        of_list = [one for one in same if len(one["loc"]) == len(first["loc"]) and not one["type"].endswith("_type")]
        return next(iter([*of_list, *(one for one in same if len(one["loc"]) > len(first["loc"]))]), first)
    return first


def handle_errors(app: FastAPI) -> None:
    """Register this form of errors with an application."""

    @app.exception_handler(CordilleraError)
    async def _own(request: Request, error: CordilleraError) -> JSONResponse:
        return answer_to(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = _clearest(error.errors(), error.body)
        if first["type"] == "json_invalid":
            why, at = first.get("ctx", {}).get("error", first["msg"]), first["loc"][-1]
            return error_answer(400, f"the body is not JSON: {why}" + f" at character {at}" * isinstance(at, int))
        place = _place(first["loc"][1:], error.body, is_missing=first["type"] == "missing")
        if first["type"] == "extra_forbidden":
            message = "is not a parameter of this request"
        else:
            message = explain([{**first, "loc": ()}], lambda place: ())[0][1]
        if place is None and not isinstance(error.body, dict):
            message = "the body is not a JSON object"
            if "json" not in (given := request.headers.get("content-type", "")):
                message += "; send it with the header content-type: application/json" + f", not {given}" * bool(given)
        return error_answer(400, printable(f"{place}: {message}" if place else message), place)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ClientDisconnect):  # while FastAPI read the body
            return Response(status_code=CLIENT_LEFT)
        what = {404: f"there is no {request.url.path}", 405: f"{request.method} is not answered here"}
        return error_answer(error.status_code, what.get(error.status_code, str(error.detail)))

    @app.exception_handler(ClientDisconnect)
    async def _left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)  # the client has disconnected

    @app.exception_handler(Exception)
    async def _other(request: Request, error: Exception) -> JSONResponse:
        return answer_to(error)
