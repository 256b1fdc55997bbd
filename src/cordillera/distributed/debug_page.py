"""A page of torch's debug server (``torch.distributed.debug``) that names the rank that others wait for.

Each rank answers with its trace of that moment, and a rank that does not answer counts as unresponsive or dead.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from cordillera.distributed.tracing.blame import blame
from cordillera.distributed.tracing.cause_text import describe
from cordillera.distributed.tracing.flight_recorder import from_flight_recorder, to_flight_recorder
from cordillera.distributed.tracing.rank_trace import RankTrace
from cordillera.distributed.transport.communicator import current_trace
from cordillera.errors import CordilleraError, PlanError
from cordillera.files import parse_json

_ENDPOINT = "cordillera_trace"
_PAGE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Who others wait for{% endblock %}</h1>{% endblock %}
{% block content %}
<form action="" method="get">
  <label for="after">Seconds after which a wait is a stall (empty: as the traces suggest):</label>
  <input type="number" id="after" name="after" value="{{ after | e }}" min="0" step="any">
  <input type="submit" value="Look again">
</form>
{% for paragraph in paragraphs %}<p>{{ paragraph | e }}</p>{% endfor %}
{% endblock %}
"""


class BlameHandler:
    """The page ``/blame``, and the dump ``blame``, of torch's debug server: a ``DebugHandler`` of its.

    Attributes:
        fetch_timeout: Seconds after which a rank that has not answered counts as unresponsive; the server sets them.
    """

    fetch_timeout = 60.0

    def routes(self) -> list[Any]:
        """Return the address of the page."""
        from torch.distributed.debug._frontend import Route

        return [Route("/blame", self._page)]

    def nav_links(self) -> list[Any]:
        """Return the link to the page."""
        from torch.distributed.debug._frontend import NavLink

        return [NavLink("/blame", "Who others wait for")]

    def templates(self) -> dict[str, str]:
        """Return the template of the page."""
        return {"blame.html": _PAGE}

    def dump(self) -> str:
        """Return the text of the page, for the files that the server writes at intervals."""
        return "\n\n".join(self._paragraphs(None))

    def dump_filename(self) -> str:
        """Return the first part of the names of these files."""
        return "blame"

    def _page(self, request: Any) -> bytes:
        after = request.get_query_arg("after", "")
        try:
            paragraphs = self._paragraphs(float(after) if after else None)
        except ValueError:
            paragraphs = [f"{after} is not a number of seconds"]
        found: bytes = request.frontend.render_template("blame.html", paragraphs=paragraphs, after=after)
        return found

    def _paragraphs(self, after_s: float | None) -> list[str]:
        """Return the verdict; waits count from ``after_s`` on."""
        from torch.distributed.debug._frontend import fetch_all

        _, answers = fetch_all(_ENDPOINT, timeout=self.fetch_timeout)
        try:
            traces = [trace_of(rank, one.status_code, one.text) for rank, one in enumerate(answers)]
            return describe(blame(traces, stalled_after_s=after_s))
        except CordilleraError as error:
            return [str(error)]


def debug_handlers() -> list[Any]:
    """Return the pages of torch's debug server and the one that names the rank that others wait for.

    All ranks call this, as each then answers with its trace: that of the backend ``cordillera``, or else of torch's
    Flight Recorder, which records Gloo.

    Raises:
        PlanError: If torch has no such server, or a package is missing that it needs.
    """
    try:
        from torch._C._distributed_c10d import _register_handler
        from torch.distributed.debug._debug_handlers import default_handlers
    except ImportError as error:
        raise PlanError(
            f"torch's debug server cannot be loaded ({error})", where="debug_handlers",
            remedy="it needs torch 2.13 and the packages tabulate and aiohttp",
        ) from error  # fmt: skip
    _register_handler(_ENDPOINT, _answer)
    return [*default_handlers(), BlameHandler()]


def trace_of(rank: int, status: int, text: str) -> RankTrace:
    """Return the trace that a rank answered with.

    Args:
        rank: The rank.
        status: Status of the answer: 200, 408 if there was none in time, 503 if no process listens.
        text: The answer.

    Raises:
        DataError: If it is not a trace of this rank.
        PlanError: If the rank has no such page.
    """
    if status == 200:
        where = f"answer of rank {rank}"
        return from_flight_recorder(parse_json(text, where), rank, where)
    if status == 503:
        return RankTrace(rank, time.time_ns(), status="died")
    if status == 404:
        raise PlanError(
            f"rank {rank} does not answer with traces", where="blame", remedy="call debug_handlers there too"
        )
    return RankTrace(rank, time.time_ns(), status="unresponsive")


def _answer(request: Any, response: Any) -> None:
    """Answer with the trace of this process."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # the stubs lack it

    trace = current_trace()
    if trace is not None:
        content = to_flight_recorder(trace)
    else:
        content = json.loads(_dump_fr_trace_json())
        entries = content.get("entries") or [{}]
        own = {"rank": dist.get_rank(), "written_ns": time.time_ns()}
        content["cordillera"] = {**own, "dropped": entries[0].get("record_id", 0) > 0}
    response.set_content(json.dumps(content), "application/json")
    response.set_status(200)
