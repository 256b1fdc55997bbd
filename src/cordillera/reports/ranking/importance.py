"""Section of the report of a ranking run about the importance of its features."""

from __future__ import annotations

from typing import Any

from cordillera.errors import DataError
from cordillera.files import is_there
from cordillera.numbers import fixed
from cordillera.reports.charts import interval_strip, padded
from cordillera.reports.ranking.material import interval_text
from cordillera.run import Run
from cordillera.training.ranking.evaluation import number

IMPORTANCE_FILE = "importance.json"
"""File in a run's folder with the importance of its features."""


def importance(run: Run, evaluated: int | None = None) -> dict[str, Any]:
    """Return the rows of each task, the most important feature first; nothing if it was not measured.

    Args:
        run: The run.
        evaluated: Step of the weights whose figures stand above; None if unknown.

    Raises:
        DataError: If the file is damaged.
    """
    if not is_there(run.folder / IMPORTANCE_FILE):
        return {}
    content = run.read_json(IMPORTANCE_FILE)
    try:
        features = [
            (one["feature"], one["task"], *(number(one[key]) for key in ("ne", "low", "high")))
            for one in content["features"]
        ]
        text = (
            f"Rise of the NE of {content['rows']:,} samples of the {content['split']} split when the values of a "
            f"feature change places among them, {content['repeats']} times."
        )
        if (step := content.get("step")) is not None:  # not known of earlier versions
            text += f" Weights of step {step:,}"
            if evaluated is not None and evaluated != step:
                text += f"; the results above are of step {evaluated:,}: "
                text += "`cordillera evaluate --importance` makes both anew"
            text += "."
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"is not an importance of features: {error!r}", where=str(run.folder / IMPORTANCE_FILE),
            remedy="write it again with `cordillera evaluate --importance`",
        ) from error  # fmt: skip
    tasks: dict[str, list[dict[str, Any]]] = {}
    for task in dict.fromkeys(one[1] for one in features):
        chosen = [one for one in features if one[1] == task]
        limits = padded([0.0, *(end for one in chosen for end in one[2:])], 0.08)
        tasks[task] = [
            {
                "feature": name,
                "ne": fixed(ne),
                "interval": interval_text((low, high)),
                "strip": interval_strip(ne, (low, high), 0.0, limits),
            }
            for name, _, ne, low, high in chosen
        ]
    return {"text": text, "tasks": tasks}
