"""List of result files whose code has changed: ``cordillera bench --stale``."""

from __future__ import annotations

from pathlib import Path

from _results import make_console
from _sources import BENCHMARKS, age_of
from rich.table import Table


def main(folder: Path = BENCHMARKS / "results") -> int:
    """Print the result files whose code has changed since they were measured; return 1 if there are any."""
    console = make_console()
    ages = [age_of(file) for file in sorted(folder.glob("*.json"))]
    stale = [age for age in ages if age.stale]
    table = Table(title="figures whose code has changed since they were measured", title_justify="left")
    for heading in ("result file", "measured", "commit", "what changed", "measured again by"):
        table.add_column(heading)
    for age in stale:
        names = [name.removeprefix("cordillera.") for name in age.changed]
        what = age.problem or ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        table.add_row(age.file.name, age.measured, age.commit, what, age.command)
    if stale:
        console.print(table)
    console.print(f"{len(stale)} of {len(ages)} result files are stale", markup=False)
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
