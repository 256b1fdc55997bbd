"""``cordillera serve``."""

from __future__ import annotations

import math
import os
import signal
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cordillera.errors import DataError, printable
from cordillera.files import read_text


# Its options are most of its lines.
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Models, each a name (`smollm2`), the folder of a run or a checkpoint, or a GGUF file; NAME=MODEL for "
            "another name.",
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is reachable from outside.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key that requests need. Default: CORDILLERA_API_KEY, if it is set."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of language models' weights: auto, bfloat16, float16, float32, int8 or int4.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="Of language models: auto, cpu or cuda. Ranking runs compute where their recipe says.")
    ] = "auto",
    drafter: Annotated[
        str, typer.Option(help="For speculative decoding: auto, ngram, a drafter's file, ngram+FILE, or none.")
    ] = "auto",
    quantized: Annotated[
        bool, typer.Option("--quantized", help="Serve the `cordillera quantize` version of ranking runs.")
    ] = False,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Feed-forward nets in FP8; emulated where the device has none.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(help="A language model's longest text with its prompt, in tokens. Default: its context."),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, max=32, help="Texts that a model writes at a time.")] = 16,
    queue: Annotated[int, typer.Option(min=1, help="Texts accepted at a time; more are answered with 429.")] = 256,
    cache: Annotated[float, typer.Option(min=0, help="GiB for keys and values of each language model.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds after which a request is ended.")] = 600.0,
    drain: Annotated[float, typer.Option(min=1, help="Seconds for accepted requests when the server stops.")] = 60.0,
    leave: Annotated[
        float,
        typer.Option(min=0, help="Seconds to keep serving after a stop signal, with /health at 503, before it drains."),
    ] = 0.0,
    max_body: Annotated[float, typer.Option(min=0.001, help="MiB of the largest request.")] = 4.0,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Print a line for each request that is answered.")
    ] = False,
) -> None:
    """Serve texts and scores over HTTP.

    OpenAI's clients get text, other requests scores of ranking runs. Ctrl-C finishes what has begun. SIGUSR1 reads
    ranking runs again, without a pause.
    """
    if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # before the models are read, and once the server has stopped
    from cordillera import workflows
    from cordillera.cli._show import console
    from cordillera.workflows.serving.server import is_loopback

    key = read_text(api_key_file).strip() if api_key_file else os.environ.get("CORDILLERA_API_KEY", "").strip()
    if api_key_file and not key:
        raise DataError("holds no key", where=str(api_key_file), remedy="write one into it")
    for option, value in {
        "--cache": cache,
        "--timeout": timeout,
        "--drain": drain,
        "--leave": leave,
        "--max-body": max_body,
    }.items():
        if not math.isfinite(value):
            raise DataError(f"must be a finite number, got {value}", where=option)
    out = console(stderr=True)
    if not is_loopback(host) and not key:
        out.print(f"warning: whoever reaches {host} can use this server; --api-key-file asks for a key")
    config = workflows.ServerConfig(
        host=host,
        port=port,
        api_key=key or None,
        dtype=dtype,
        device=device,
        drafter=drafter,
        quantized=quantized,
        fp8=fp8,
        context=context,
        texts=texts,
        queue=queue,
        cache_bytes=int(cache * 2**30),
        seconds=timeout,
        drain_seconds=drain,
        leave_seconds=leave,
        body_bytes=int(max_body * 2**20),
    )

    def ready(address: str) -> None:
        out.print(f"serving at {address} (OpenAI's clients: {address}/v1). Ctrl-C stops.")

    def answered(line: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        typer.echo(printable(f"{now} {line}"), err=True)

    workflows.serve(models, config, out.print, ready, answered if access_log else None)
    out.print("stopped")
