"""Workloads of language and recommendation models, by shipped name or from files."""

from __future__ import annotations

from pathlib import Path

from cordillera.errors import PlanError
from cordillera.planning.language.workload import Workload
from cordillera.planning.ranking.workload import Recommender
from cordillera.topology import parse, shipped, validate


def load(source: str | Path) -> Workload | Recommender:
    """Read the workload of a transformer or a recommendation model by its shipped name or the path of a TOML file.

    Raises:
        PlanError: If there is no such file, or its values are wrong; the message lists every mistake.
    """
    content = parse(source, "cordillera.workloads", "workload")
    if ("model" in content) == ("tables" in content):
        raise PlanError(
            "has both [model] and [[tables]]" if "model" in content else "has neither [model] nor [[tables]]",
            where=str(source),
            remedy="a transformer has [model], a recommendation model [[tables]]; a recipe is no workload",
        )
    if "tables" in content:
        return validate(Recommender, content, str(source))
    return validate(Workload, content, str(source))


def names() -> dict[str, str]:
    """Return the names of the shipped workloads with their descriptions."""
    return shipped("cordillera.workloads")
