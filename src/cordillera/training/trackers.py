"""MLflow and Weights & Biases follow a run, where its recipe names one of them (``track``) and it is installed.

They get the values of the recipe, the points of the charts, how training ended, and the results on the test split.
Server, project and credentials are read by the libraries from their own environment variables. The id that the library
gave to a run is kept in the run's folder, so that a resumed run goes on there.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from cordillera.errors import CordilleraError, DependencyError
from cordillera.files import is_there
from cordillera.mistakes import flat_values
from cordillera.run import Run, read_recipe

TrackerName = Literal["mlflow", "wandb"]
"""Names of the trackers in a recipe."""

TITLES = {"mlflow": "MLflow", "wandb": "Weights & Biases"}
"""Names of the trackers for people, by their names in a recipe."""

ID_FILE = "tracked.json"
"""File in a run's folder with the ids that trackers gave to it."""

_MLFLOW_AT_ONCE = 100  # parameters that a server takes in one request
_MLFLOW_LETTERS = 500  # longest parameter that all versions accept
# Its own defaults let a run wait for minutes for a server that does not answer.
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class Tracker(Protocol):
    """A run as a tracker's library sees it."""

    id: str

    def draw(self, values: Mapping[str, float], step: int) -> None:
        """Add points at a ``step`` to the charts, by name."""

    def end(self, ended: str) -> None:
        """Say how the run ``ended``, as :class:`cordillera.run.RunStatus` names it."""


class _MLflow:
    """A run of MLflow, in the experiment that ``MLFLOW_EXPERIMENT_NAME`` names."""

    def __init__(self, run: Run, known: str | None) -> None:
        for name, value in _MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Metric, Param

        self._client, self._metric = mlflow.MlflowClient(), Metric
        if known is not None:
            self.id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self.id = self._client.create_run(experiment, run_name=run.name).info.run_id
        settings = [
            Param(_mlflow_name(key), str(value)[:_MLFLOW_LETTERS])
            for key, value in flat_values(read_recipe(run)[1]).items()
        ]
        for first in range(0, len(settings), _MLFLOW_AT_ONCE):
            self._client.log_batch(self.id, params=settings[first : first + _MLFLOW_AT_ONCE])

    def draw(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        points = [self._metric(_mlflow_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=points)

    def end(self, ended: str) -> None:
        states = {"failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self.id, states.get(ended, "FINISHED"))


class _WandB:
    """A run of Weights & Biases, in the project that ``WANDB_PROJECT`` names."""

    def __init__(self, run: Run, known: str | None) -> None:
        import wandb

        self._run = wandb.init(
            name=run.name, id=known, resume="allow", dir=str(run.folder), config=flat_values(read_recipe(run)[1]),
            project=os.environ.get("WANDB_PROJECT", "cordillera"), reinit="create_new",
            settings=wandb.Settings(silent=True),
        )  # fmt: skip
        self.id = str(self._run.id)
        status = run.status()
        # Earlier steps are dropped. A training that goes on draws those that the run has once more; results have none.
        self._first = self._run.starting_step if status is not None and status.ended is not None else 0

    def draw(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=max(step, self._first))

    def end(self, ended: str) -> None:
        self._run.finish(exit_code=int(ended in ("failed", "interrupted")))


_KINDS: dict[TrackerName, Any] = {"mlflow": _MLflow, "wandb": _WandB}


class Tracking:
    """Connection of a run to its tracker; does nothing if the recipe names no tracker.

    Only the start can fail. If the tracker cannot be reached later, a warning says so once and the run goes on without
    it.

    Args:
        run: Run whose recipe names the tracker.

    Raises:
        DependencyError: If the library is not installed, or the tracker refuses the run.
    """

    def __init__(self, run: Run) -> None:
        self._tracker: Tracker | None = None
        self.name: TrackerName | None = read_recipe(run)[1].get("track")
        if self.name not in _KINDS:  # "none"
            self.name = None
            return
        title, file = TITLES[self.name], run.folder / ID_FILE
        known = run.read_json(ID_FILE) if is_there(file) else {}
        try:
            self._tracker = tracker = _KINDS[self.name](run, known.get(self.name))
        except ImportError as error:
            remedy = f"pip install {self.name}, or go on with --resume --set track=none"
            raise DependencyError(f"{title} is not installed", where="track", remedy=remedy) from error
        except CordilleraError:
            raise
        except Exception as error:
            remedy = "see its environment variables, or go on with --resume --set track=none"
            raise DependencyError(f"{title} refuses the run: {_said(error)}", where="track", remedy=remedy) from error
        if known.get(self.name) != tracker.id:
            run.write_json(ID_FILE, {**known, self.name: tracker.id})

    def draw(self, values: Mapping[str, float], step: int) -> None:
        """Add points at a ``step`` to the charts, by name."""
        with self._without_it():
            if self._tracker is not None:
                self._tracker.draw(values, step)

    def end(self, ended: str) -> None:
        """Say how the run ``ended``, as :class:`cordillera.run.RunStatus` names it."""
        with self._without_it():
            if self._tracker is not None:
                self._tracker.end(ended)

    @contextlib.contextmanager
    def _without_it(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            title = TITLES[self.name or "mlflow"]
            warnings.warn(f"{title} is left out from here on: {_said(error)}", stacklevel=4)


def track_results(run: Run, split: str, results: Mapping[str, Mapping[str, float]], step: int) -> None:
    """Add the metrics of a finished ``run`` on a ``split``, by task and name, to what its tracker has at a ``step``.

    A tracker that refuses them now is left out with a warning: the run holds them anyway.
    """
    try:
        tracking = Tracking(run)
    except DependencyError as error:
        warnings.warn(f"{error.what}; the results are in the run's folder", stacklevel=2)
        return
    tracking.draw(
        {f"{split}/{task}/{name}": one for task, found in results.items() for name, one in found.items()}, step
    )
    tracking.end("finished")


def _mlflow_name(name: str) -> str:
    """Return a name with the letters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _said(error: Exception) -> str:
    """Return the first line of an error."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
