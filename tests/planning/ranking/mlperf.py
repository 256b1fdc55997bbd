"""Tables of the MLPerf benchmark DLRM-v2: Criteo's terabyte log with 40 million rows at most, 128 columns."""

from __future__ import annotations

from cordillera.planning.ranking.table_cost import TableProfile

ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids of a sample in every table, in the benchmark's multi-hot data."""


def mlperf_tables(hot: bool) -> dict[str, TableProfile]:
    """Return the tables with one lookup each, or with those of the multi-hot data."""
    return {
        f"table {i}": TableProfile(rows, 128, float(lookups if hot else 1))
        for i, (rows, lookups) in enumerate(zip(ROWS, LOOKUPS, strict=True))
    }


def mean_gigabytes(tables: dict[str, TableProfile], size: int) -> float:
    """Return the GB of all tables with the state of row-wise Adagrad, divided by the number of ranks."""
    return sum(one.rows * (4 * one.columns + 4) for one in tables.values()) / size / 1e9
