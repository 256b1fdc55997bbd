"""Lines about the replicas of a training while it runs: which ended and why, and which train."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_POLL_S = 1.0


@contextlib.contextmanager
def replicas_told(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Say what launcher and coordinator of a run's replicas write into its ``folder`` in the region.

    Args:
        folder: Folder of the run.
        say: Function that is called with each line, in a thread of its own.
    """
    from cordillera.distributed.fault_tolerance.events import FOLDER

    files = [folder / FOLDER / f"{writer}.jsonl" for writer in ("launcher", "coordinator")]
    places = {file: file.stat().st_size if file.exists() else 0 for file in files}
    members: list[str] = []
    is_over = threading.Event()

    def tell() -> None:
        for file in files:
            for event in _new_events(file, places):
                if line := _line(event, members):
                    say(line)

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            tell()

    thread = threading.Thread(target=watch, name="replicas", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        tell()


def _new_events(file: Path, places: dict[Path, int]) -> Iterator[dict[str, Any]]:
    """Yield the events of whole lines after a place of the file, and move that; the final page names damaged ones."""
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        stream.seek(places[file])
        content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        places[file] += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event


def _line(event: dict[str, Any], members: list[str]) -> str | None:
    """Return an event in a line, or None where all is well; ``members`` holds a text with those that train."""
    kind, replica = event.get("kind"), event.get("replica")
    if kind == "ended":
        return f"{replica} ended: {event.get('why')}"
    if kind == "given up":
        return f"{replica} is not started again: {event.get('why')}"
    if kind == "started" and event.get("attempt", 1) > 1:
        return f"{replica} is started again"
    if kind == "coordinator ended":
        return "the coordinator ended and is started again"
    now, step = event.get("members"), event.get("step")
    if kind != "epoch" or not isinstance(now, list) or not isinstance(step, int):
        return None
    now = [", ".join(map(str, now)) or "no replica"]
    before, members[:] = list(members), now
    return None if not before or before == now else f"step {step:,}: training goes on with {now[0]}"
