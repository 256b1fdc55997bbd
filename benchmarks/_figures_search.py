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
    heads = ["searcher", "evaluations, mean", "10th to 90th percentile", "beside random", "regret after 32"]
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


NAMES = {"movielens": "MovieLens-100K", "synthetic": "synthetic"}
MODELS = {"lr": "LR", "fm": "FM", "dnn": "DNN", "dlrm": "DLRM", "dcn": "DCN-V2", "dhen": "DHEN", "wukong": "Wukong"}


def volumes() -> str:
    """Return hypervolumes of found architectures beside hand-made ones."""
    rows = []
    for one in results("rankitect-fronts")["results"]:
        for volume in one["hypervolume"]:
            both, found = volume["both"], volume["found"]
            rows.append(
                [
                    NAMES[one["data"]],
                    "constant (1)" if volume["ne"] == 1 else f"LR ({volume['ne']:.4f})",
                    f"{both['ratio']:.3f} ({both['low']:.3f} to {both['high']:.3f})",
                    f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})",
                ]
            )
    return table(["data", "up to the NE of", "hand-made and found", "found alone"], rows)


def _searched(data: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in results("rankitect-fronts")["results"] if one["data"] == data)
    return found


def fronts(data: str) -> str:
    """Return the fronts of hand-made and of found architectures, chosen on the validation split, on the test split."""
    rows = []
    for side in ("hand_made", "found"):
        for entry in (entry for entry in _searched(data)[side] if entry["chosen"]):
            changed = entry["overrides"]
            dim = changed.get("model.embedding_dim", changed["model"].get("embedding_dim"))
            test = entry["test"]
            rows.append(
                [
                    MODELS.get(entry["model"], f"found `{entry['name']}`") + (f", d = {dim}" if dim else ""),
                    f"{entry['flops']:,}",
                    f"{statistics.fmean(entry['validation']):.4f}",
                    f"{statistics.fmean(test):.4f}",
                    f"{min(test):.4f} to {max(test):.4f}",
                ]
            )
    return table(["architecture", "FLOPs", "NE (validation)", "NE (test)", "of five seeds"], rows)


def effort(data: str) -> str:
    """Return how many architectures were tried, and the hours of one thread that this took."""
    one = _searched(data)["searches"]["found"]
    return f"{one['trials']} architectures, {one['thread_seconds'] / 3600:.1f} hours of one thread"


def _shared() -> dict[str, Any]:
    return results("rankitect-shared")


FIGURES: Figures = {
    "rankitect-count": lambda: f"{len(_nes()):,}",
    "rankitect-spread": spread,
    "rankitect-searchers": searchers,
    "rankitect-shared": shared,
    "rankitect-noise": lambda: f"{_shared()['of_two_seeds']:.2f}",
    "rankitect-equal": lambda: f"{_shared()['equal']['equal']} of {_shared()['equal']['compared']}",
    "rankitect-volumes": volumes,
    "rankitect-front-synthetic": lambda: fronts("synthetic"),
    "rankitect-front-movielens": lambda: fronts("movielens"),
    "rankitect-effort-synthetic": lambda: effort("synthetic"),
    "rankitect-effort-movielens": lambda: effort("movielens"),
    "rankitect-supernet": lambda: f"{_shared()['epochs']}",
}
