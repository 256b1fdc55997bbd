"""Figures of architecture search in the documentation."""

from __future__ import annotations

import statistics
from typing import Any

from _figures import Figures, results, table


def _nes() -> list[float]:
    return [statistics.fmean(ne) for _, _, ne, _, _ in results("rankitect-table")["rows"] if ne]


def spread() -> str:
    """Return what NE the architectures of the table have."""
    found = sorted(_nes())
    names = {"best": 0.0, "best percent": 0.01, "a quarter": 0.25, "half": 0.5, "three quarters": 0.75, "worst": 1.0}
    rows = [[name, f"{found[min(len(found) - 1, int(share * len(found)))]:.4f}"] for name, share in names.items()]
    return table(["of the architectures", "NE up to"], rows)


def searchers() -> str:
    """Return after how many evaluations every searcher met the best percent."""
    found = results("rankitect-searchers")["results"]
    names = {"tpe": "TPE (optuna)", "nsga2": "NSGA-II (optuna)"}
    base = next(one["mean"] for one in found if one["searcher"] == "random")
    rows = []
    for one in found:
        deciles = statistics.quantiles(one["evaluations"], n=10)
        rows.append(
            [
                names.get(one["searcher"], one["searcher"]),
                f"{one['mean']:.1f}",
                f"{deciles[0]:.0f} to {deciles[-1]:.0f}",
                f"{one['mean'] / base:.2f}",
                f"{one['regret']['32']:.4f}",
            ]
        )
    heads = ["searcher", "evaluations, mean", "of four fifths", "beside random", "regret after 32"]
    return table(heads, rows)


def shared() -> str:
    """Return rank correlations of NE by shared weights with the table."""
    rows = [
        [
            "as they are" if one["steps"] == 0 else f"{one['steps']} steps of training",
            str(one["architectures"]),
            f"{one['tau']:.2f}",
        ]
        for one in results("rankitect-shared")["results"]
    ]
    return table(["shared weights", "architectures", "Kendall's tau"], rows)


def _shared() -> dict[str, Any]:
    return results("rankitect-shared")


FIGURES: Figures = {
    "rankitect-count": lambda: f"{len(_nes()):,}",
    "rankitect-spread": spread,
    "rankitect-searchers": searchers,
    "rankitect-shared": shared,
    "rankitect-noise": lambda: f"{_shared()['of_two_seeds']:.2f}",
    "rankitect-equal": lambda: f"{_shared()['equal']['equal']} of {_shared()['equal']['compared']}",
    "rankitect-supernet": lambda: f"{_shared()['epochs']}",
}
