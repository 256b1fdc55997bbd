"""Figures of sharded tables, prioritised exchange and codecs in the documentation."""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any

from _figures import Figures, judged, percent, results, span, table


def _exposed() -> Any:
    return results("freescale-exposed")


def freescale_rows() -> str:
    """Return exposed time and steps of all exchanges, by share of collisions."""
    rows = [
        [
            percent(row["collisions"], ".0f"),
            *(f"{1e3 * row[f'{kind}_exposed']:.1f} ms" for kind in ("synchronous", "prioritised", "window")),
            f"{row['fallen']:.1f}",
            f"{row['window_fallen']:.1f}",
            f"{row['faster']:.2f}",
            f"{row['window_faster']:.2f}",
        ]
        for row in _exposed()["rows"]
    ]
    headings = ["collisions", "exposed, plain", "exposed, prioritised", "exposed, window"]
    kinds = ("prioritised", "window")
    more = [f"{what}, {kind}" for what in ("times less exposed", "step, times faster") for kind in kinds]
    return table([*headings, *more], rows)


def freescale_window() -> str:
    """Return the fall of exposed time by the frozen window at 50 % collisions beside the target."""
    found = _exposed()
    (row,) = (one for one in found["rows"] if one["share"] == 0.5)
    asked = found["asked"]["window_fallen"]
    missed = "" if row["window_fallen"] >= asked else ", not reached"
    return f"{row['window_fallen']:.1f} times (target {asked:g}{missed}; prioritised {row['fallen']:.1f})"


def freescale_slices() -> str:
    """Return the number of slices of a step with a frozen window."""
    return str(_exposed()["conditions"]["slices"])


def freescale_conditions() -> str:
    """Return the emulated link and the computation beside it."""
    given = _exposed()["conditions"]
    forward, backward = given["computation_s"]
    return (
        f"{given['ranks']} processes, {given['rows_of_batch']:,} distinct rows of {given['dim']} numbers a batch, "
        f"links of {given['bytes_per_s'] / 1e6:.0f} MB/s and {1e3 * given['latency_s']:g} ms, "
        f"{1e3 * (forward + backward):.0f} ms of computation a step"
    )


def freescale_fit() -> str:
    """Return R squared of a line through exposed times."""
    return f"{_exposed()['fit']:.3f}"


def freescale_target() -> str:
    """Return the fall of exposed time at 5 % collisions beside the target."""
    found = _exposed()
    (row,) = (one for one in found["rows"] if one["share"] == 0.05)
    asked = found["asked"]["fallen"]
    return f"{row['fallen']:.1f} times (target {asked:g}{'' if row['fallen'] >= asked else ', not reached'})"


def freescale_all() -> str:
    """Return the ratio of steps where all rows collide."""
    return f"{_exposed()['rows'][-1]['faster']:.2f}"


def freescale_equal() -> str:
    """Return whether both exchanges gave equal weights."""
    equal = [row["equal"] for row in _exposed()["rows"]]
    return "all" if all(equal) else f"{sum(equal)} of {len(equal)}"


def balance_counted() -> str:
    """Return shares of waiting without and with balance, and how many times less it is."""
    rows = []
    for row in results("freescale-balance")["counted"]:
        for balance, fewer in row["fewer"].items():
            shares = [percent(row["shares"][kind], ".2f") for kind in ("none", balance)]
            rows.append([row["work"], balance, *shares, f"{fewer:.1f}" if fewer < 1000 else "over 1,000"])
    return table(["work", "balance", "waiting without", "with", "times less"], rows)


def balance_steps() -> str:
    """Return steps of two processes with each division of samples."""
    rows = []
    for row in results("freescale-balance")["steps"]:
        times = row["times_faster"]
        spread = f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})"
        milliseconds = f"{1e3 * row['seconds']['seconds']['median']:,.0f}"
        planning = percent(row["planning"]["median"], ".2f")
        rows.append([row["balance"], milliseconds, spread, planning, f"{row['loss_difference']:.1e}"])
    return table(["balance", "ms", "times faster (quartiles)", "planning", "largest difference of losses"], rows)


def _dmt() -> Any:
    return results("dmt-exchange")


def dmt_exchange() -> str:
    """Return steps of each model with the flat exchange and with towers."""
    rows = [
        [
            one["model"],
            row["step"],
            f"{1e3 * row['seconds']:.0f}",
            f"{row['faster']:.2f}",
            f"{1e3 * row['exposed']:.0f}",
            f"{row['bytes_between'] / 1e6:.3f}",
            str(row["messages_between"]),
        ]
        for one in _dmt()["models"]
        for row in one["rows"]
    ]
    headings = [
        "model",
        "step",
        "ms",
        "times faster",
        "exchange, ms",
        "MB of a rank to other hosts",
        "messages to them",
    ]
    return table(headings, rows)


def dmt_gains(model: str) -> str:
    """Return the factors of the gain of a model's towers."""
    (gains,) = (one["gains"] for one in _dmt()["models"] if one["model"] == model)
    asked = _dmt()["asked"]
    missed = "" if gains["all"] >= asked else ", not reached"
    return (
        f"{gains['all']:.2f} times faster (target {asked:g}{missed}) = way of messages {gains['way']:.2f} x bytes "
        f"{gains['bytes']:.2f} x computation {gains['computation']:.2f}"
    )


def dmt_share(model: str) -> str:
    """Return the share of the exchange in the flat step of a model."""
    return percent(next(one["exchange_share"] for one in _dmt()["models"] if one["model"] == model), ".0f")


def dmt_partition() -> str:
    """Return how well planted groups of features are found again, by where the embeddings are from."""
    found = results("dmt-partition")
    rows = [
        [f"made, noise {one['noise']:g}", f"{one['recovered']} of {one['seeds']}", percent(one["purity"], ".1f")]
        for one in found["made"]
    ]
    for name in dict.fromkeys(one["probe"] for one in found["trained"]):
        places = [one["purity"] for one in found["trained"] if one["probe"] == name]
        whole = f"{sum(place == 1 for place in places)} of {len(places)}"
        rows.append([f"of a trained {name}", whole, percent(mean(places), ".1f")])
    rows.append(["towers at random", "", percent(found["at_random"], ".1f")])
    return table(["embeddings", "groups found whole", "features in place"], rows)


def dmt_quality() -> str:
    """Return the AUC without towers, and its change by learned and by random ones with an interval."""
    rows = []
    for row in results("dmt-quality")["rows"]:
        cells = [row["data"], row["model"], f"{mean(run['none'] for run in row['runs']):.4f}"]
        for kind in ("learned", "random"):
            one = row[kind]
            cells.append(f"{one['mean']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})")
        rows.append(cells)
    return table(["data", "model", "AUC without", "learned towers (95 %)", "random towers (95 %)"], rows)


_CODERS = ("bounded", "bounded-fast", "zstd-19 of codes", "max(vector-LZ, Huffman)", "distinct", "int8", "fp16")


def _codecs() -> Any:
    return results("compression-codecs")["results"]


_SOURCES = {
    "Kaggle, drawn": "Criteo Kaggle's tables, simulated rows",
    "Terabyte, drawn": "Criteo Terabyte's tables, simulated rows",
    "made log, trained": "synthetic log, trained rows",
}


def compression_ratios() -> str:
    """Return the ratio of every coder, by source of the rows."""
    rows = [[name, *(f"{one['harmonic_mean_ratio'][name]:.2f}" for one in _codecs())] for name in _CODERS]
    return table(["coder", *(_SOURCES.get(one["source"], one["source"]) for one in _codecs())], rows)


def compression_over(key: str) -> str:
    """Return how many times smaller the best codec is than a baseline, over all sources."""
    return span([one[key] for one in _codecs()], ".2f")


def compression_rate(kind: str) -> str:
    """Return the rates of the fast codec over all sources, in MB/s."""
    return span([one["bytes_per_s"]["bounded-fast"][kind]["median"] / 1e6 for one in _codecs()], ",.0f")


def compression_rates() -> str:
    """Return whether the fast codec encodes and decodes every source at 500 MB/s."""
    rates = [one["bytes_per_s"]["bounded-fast"] for one in _codecs()]
    return judged([rate[kind]["median"] for rate in rates for kind in ("encode", "decode")], 500e6)


def compression_target(codec: str, links: str, least: float) -> str:
    """Return whether steps with a ``codec`` are so many times as fast on ``links`` (those with a rate, or others)."""
    rows = [row for row in results("compression-step")["rows"] if row["codec"] == codec]
    return judged([row["times_faster"]["median"] for row in rows if ("b/s" in row["link"]) == (links == "slow")], least)


def compression_steps() -> str:
    """Return how many times faster a step is with each codec, by link, beside one with raw rows."""
    rows = results("compression-step")["rows"]
    links = list(dict.fromkeys(row["link"] for row in rows))
    found = {(row["codec"], row["link"]): f"{row['times_faster']['median']:.2f}" for row in rows}
    codecs = list(dict.fromkeys(row["codec"] for row in rows if row["codec"] != "raw"))
    return table(["codec", *links], [[codec, *(found.get((codec, link), "") for link in links)] for codec in codecs])


def compression_shares() -> str:
    """Return the share of the exchange of rows in a step with raw rows, by link."""
    shares = results("compression-step")["share_of_exchange"]
    return ", ".join(f"{link} {percent(share, '.0f')}" for link, share in shares.items())


def compression_quality() -> str:
    """Return NE of both splits with raw rows and within bounds, with its change from raw rows."""
    rows = []
    for row in results("compression-training")["rows"]:
        cells = [row["recipe"], row["codec"], f"{row['ratio']:.2f}"]
        for split in ("test", "train"):
            found = row[split]
            cells.append(f"{found['mean']:.5f}")
            change = f"{100 * found['change']:+.3f} ± {100 * found['standard_error']:.3f} %"
            cells.append("" if row["codec"] == "raw" else change)
        rows.append(cells)
    return table(["recipe", "rows", "bytes, times fewer", "NE, test", "change", "NE, training", "change"], rows)


FIGURES: Figures = {
    "freescale-rows": freescale_rows,
    "freescale-conditions": freescale_conditions,
    "freescale-fit": freescale_fit,
    "freescale-equal": freescale_equal,
    "freescale-target": freescale_target,
    "freescale-all": freescale_all,
    "freescale-window": freescale_window,
    "freescale-slices": freescale_slices,
    "freescale-balance-counted": balance_counted,
    "freescale-balance-steps": balance_steps,
    "dmt-exchange": dmt_exchange,
    "dmt-partition": dmt_partition,
    "dmt-quality": dmt_quality,
    "dmt-gains-dlrm": partial(dmt_gains, "DLRM"),
    "dmt-gains-dcn": partial(dmt_gains, "DCN-V2"),
    "dmt-share-dlrm": partial(dmt_share, "DLRM"),
    "dmt-share-dcn": partial(dmt_share, "DCN-V2"),
    "compression-ratios": compression_ratios,
    "compression-zstandard": partial(compression_over, "times_zstandard"),
    "compression-hybrid": partial(compression_over, "times_hybrid"),
    "compression-encode": partial(compression_rate, "encode"),
    "compression-decode": partial(compression_rate, "decode"),
    "compression-rates": compression_rates,
    "compression-steps": compression_steps,
    "compression-slow": partial(compression_target, "auto-bounded", "slow", 1.38),
    "compression-fast": partial(compression_target, "auto", "fast", 0.97),
    "compression-shares": compression_shares,
    "compression-quality": compression_quality,
}
