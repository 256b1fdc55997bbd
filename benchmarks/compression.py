"""Codecs of exchanged embedding rows beside other coders of the same codes: ``cordillera bench compression``.

The part ``codecs`` measures sizes and single-threaded rates of every codec on rows that are drawn, trained, or dumped
by the paper's authors (set ``CORDILLERA_DLRM_DUMPS`` to the folder ``paper_script`` of their artefact). The part
``step`` times steps over emulated links and over this machine's; the part ``training`` compares NE after training.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from _compression_baselines import huffman_bytes, hybrid_bytes, vector_lz_bytes, zstandard_bytes
from _compression_step import FAST as FAST_LINK
from _compression_step import measure_step
from _compression_tables import DUMPS_VARIABLE, KAGGLE, TERABYTE, SentRows, drawn, published, trained
from _compression_training import measure_training
from _program import Program
from _tables import print_notes, print_rows
from _timing import Spread, interleave
from rich.console import Console

from cordillera.distributed.codecs.codecs import Bounded, Codec, Distinct, Half, IntegerRows, Raw, decode
from cordillera.distributed.codecs.distinct_rows import distinct_rows
from cordillera.distributed.codecs.quantizer import quantize
from cordillera.distributed.codecs.range_coder import encode_indices

TARGET_RATIO = 1.15  # of the best codec, over the paper's hybrid and over Zstandard at level 19
TARGET_BYTES_PER_S = 500e6  # of the fast codec, encoding and decoding
OURS, FAST, HYBRID, ZSTANDARD = "bounded", "bounded-fast", "max(vector-LZ, Huffman)", "zstd-19 of codes"

CODECS: dict[str, Callable[[float], Codec]] = {
    "raw": lambda bound: Raw(),
    "fp16": lambda bound: Half(torch.float16),
    "int8": lambda bound: IntegerRows(8),
    "int4": lambda bound: IntegerRows(4),
    "distinct": lambda bound: Distinct(),
    FAST: lambda bound: Bounded(bound, fast=True),
    OURS: Bounded,
}


def _distinct_bytes(codes: Any) -> int:
    """Return the size of codes after de-duplication alone: what replaces vector-LZ here."""
    first, inverse = distinct_rows(codes)
    return int(codes[first].nbytes + encode_indices(inverse).size)


BASELINES: dict[str, Callable[[Any], int]] = {
    "vector-LZ": vector_lz_bytes,
    "distinct rows of codes": _distinct_bytes,
    "Huffman": huffman_bytes,
    HYBRID: hybrid_bytes,
    "zstd-1 of codes": partial(zstandard_bytes, level=1),
    ZSTANDARD: partial(zstandard_bytes, level=19),
}


class Part(str, enum.Enum):
    """Parts of the benchmark."""

    codecs = "codecs"
    step = "step"
    training = "training"


def _checked(rows: torch.Tensor, frame: torch.Tensor, bound: float) -> None:
    """Raise an error if an element of a bounded frame is further than the bound and half a unit in the last place."""
    exact = rows.double()
    most = bound * float(exact.max() - exact.min()) * (1 + 2.0**-20) + exact.abs() * 2.0**-24
    if not bool(((decode(frame).double() - exact).abs() <= most).all()):
        raise RuntimeError("an element is beyond its bound")


def _sizes(sent: SentRows) -> dict[str, int]:
    """Return the bytes of a table's rows under every codec, in whole frames, and under every baseline."""
    frames = {name: make(sent.bound).encode(sent.rows) for name, make in CODECS.items()}
    for name in (OURS, FAST):
        _checked(sent.rows, frames[name], sent.bound)
    codes = quantize(sent.rows.numpy(), sent.bound, relative=True)
    if codes is None:
        raise RuntimeError(f"table {sent.table} has no codes at {sent.bound}")
    sizes = {name: frame.numel() for name, frame in frames.items()}
    return {**sizes, **{name: count(codes.values) for name, count in BASELINES.items()}}


def _rates(tables: list[SentRows], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the bytes of float32 that each codec encodes and decodes in a second, over all tables in turn."""
    raw = sum(sent.rows.numel() * 4 for sent in tables)
    codecs = {name: [make(sent.bound) for sent in tables] for name, make in CODECS.items()}
    frames = {
        name: [one.encode(sent.rows) for one, sent in zip(own, tables, strict=True)] for name, own in codecs.items()
    }

    def encode(name: str) -> None:
        for one, sent in zip(codecs[name], tables, strict=True):
            one.encode(sent.rows)

    def read(name: str) -> None:
        for frame in frames[name]:
            decode(frame)

    found: dict[str, dict[str, Any]] = {name: {} for name in CODECS}
    for kind, call in (("encode", encode), ("decode", read)):
        for name, timing in interleave({name: partial(call, name) for name in CODECS}, rounds=rounds).items():
            found[name][kind] = Spread.of([raw / seconds for seconds in timing.seconds]).to_json()
    return found


def _measured(source: str, tables: list[SentRows], rounds: int) -> dict[str, Any]:
    """Measure all coders on the tables of one source."""
    sizes = {sent.table: _sizes(sent) for sent in tables}
    ratios = {
        table: {name: tables[i].rows.numel() * 4 / size for name, size in own.items()}
        for i, (table, own) in enumerate(sizes.items())
    }
    names = list(next(iter(ratios.values())))
    harmonic = {name: len(ratios) / sum(1 / own[name] for own in ratios.values()) for name in names}
    return {
        "source": source,
        "tables": len(tables),
        "rows": list(tables[0].rows.shape),
        "harmonic_mean_ratio": harmonic,
        "ratios": ratios,
        "times_hybrid": harmonic[OURS] / harmonic[HYBRID],
        "times_zstandard": harmonic[OURS] / harmonic[ZSTANDARD],
        "target_at_least": TARGET_RATIO,
        "bytes_per_s": _rates(tables, rounds),
    }


def _verdict(value: float, target: float) -> str:
    return f"{value:.2f} x {'reached' if value >= target else '[bold red]missed[/]'}"


def _show(console: Console, entry: dict[str, Any]) -> None:
    rows = []
    for name, ratio in entry["harmonic_mean_ratio"].items():
        rates = entry["bytes_per_s"].get(name)
        cells = [f"{rates[kind]['median'] / 1e6:,.0f}" for kind in ("encode", "decode")] if rates else ["", ""]
        best = entry["harmonic_mean_ratio"][OURS]
        target = _verdict(best / ratio, TARGET_RATIO) if name in (HYBRID, ZSTANDARD) else f"{best / ratio:.2f} x"
        fast = [rates[kind]["median"] >= TARGET_BYTES_PER_S for kind in ("encode", "decode")] if name == FAST else []
        cells.append("" if not fast else "reached" if all(fast) else "[bold red]missed[/]")
        rows.append([name, f"{ratio:.2f}", target, *cells])
    shape = " x ".join(map(str, entry["rows"]))
    title = f"{entry['source']}: {entry['tables']} tables, the first {shape}"
    headings = ["coder", "ratio", f"{OURS} is smaller by", "encode MB/s", "decode MB/s", "at least 500"]
    print_rows(console, title, headings, rows)


def _codecs(console: Console, quick: bool, folder: Path) -> dict[str, Any]:
    rounds = 3 if quick else 15
    sources: dict[str, Callable[[], list[SentRows]]] = {
        "Kaggle, drawn": lambda: list(drawn("Kaggle", KAGGLE, 0)),
        "Terabyte, drawn": lambda: list(drawn("Terabyte", TERABYTE, 0)),
        "made log, trained": lambda: list(trained(folder, 20_000 if quick else 400_000, 0)),
        "dumps of the paper": lambda: list(published()),
    }
    results = []
    for source, make in sources.items():
        if tables := make():
            results.append(_measured(source, tables, rounds))
            _show(console, results[-1])
    notes = [
        "ratio: harmonic mean over tables of float32 bytes over bytes; ours are whole frames, baselines payloads alone",
        "distinct rows of codes: de-duplication without entropy coding, beside vector-LZ, which also codes whole rows",
        "distinct: lossless de-duplication of float32 rows, what any lossy codec must be judged beside",
        "rates: float32 bytes of all tables over the time for all, one frame a table, of one thread where threads is 1",
        "baselines code the same codes at the same bounds: tight 0.01, base 0.03, loose 0.05 of the range",
    ]
    if len(results) < len(sources):
        notes.append(f"the paper's dumps are left out: {DUMPS_VARIABLE} names no folder")
    print_notes(console, notes)
    return {"evidence": "measured", "results": results, "notes": notes}


def _step(console: Console, quick: bool) -> dict[str, Any]:
    found = measure_step(quick)
    asked = found["asked"]
    for link, share in found["share_of_exchange"].items():
        rows, evidence = [], ""
        for row in found["rows"]:
            if row["link"] == link:
                times, evidence = row["times_faster"], row["evidence"]
                cells = [f"{1e3 * row['seconds']['seconds']['median']:.1f}", f"{times['median']:.3f}"]
                cells += [f"{times['low']:.3f} to {times['high']:.3f}", f"{row['ratio']:.2f}"]
                used = ", ".join(f"{count} {name}" for name, count in row["codecs"].items())
                rows.append([row["codec"], used, *cells])
        least = 1 - asked["lost"] if link == FAST_LINK else asked["times_faster"]
        title = f"steps over {link}, rows' exchange {share:.1%} of a raw one; at least {least:.2f} times asked"
        print_rows(console, title, ["codec", "chosen", "ms", "times faster", "quartiles", "ratio"], rows, evidence)
    print_notes(console, found["notes"])
    return found


def _training(console: Console, quick: bool) -> dict[str, Any]:
    found = measure_training(quick)
    rows = []
    for row in found["rows"]:
        cells = []
        for split in ("test", "train"):
            error = row[split]["standard_error"]
            spread = "" if error is None else f" ± {error:.3%}"
            cells += [f"{row[split]['mean']:.5f}", f"{row[split]['change']:+.3%}{spread}"]
        rows.append([row["recipe"], row["codec"], *cells, f"{row['ratio']:.2f}"])
    title = f"NE after training, {len(found['seeds'])} seeds; at most {found['asked']['change']:.2%} asked for bounded"
    print_rows(console, title, ["recipe", "rows", "NE test", "change", "NE training", "change", "ratio"], rows)
    print_notes(console, found["notes"])
    return found


main = Program(
    "compression",
    {Part.codecs: _codecs, Part.step: _step, Part.training: _training},
    "Measure codecs of exchanged embedding rows beside Zstandard and the paper's hybrid on this machine.",
    quick_help="A short training and few rounds: shows that it works, its figures mean nothing.",
    threads=1,
).command()


if __name__ == "__main__":
    typer.run(main)
