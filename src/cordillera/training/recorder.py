"""Output of training into the run's folder, except checkpoints: status, records and charts.

The points of the charts also go to the tracker that the run's recipe names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cordillera.errors import CordilleraError, RunError
from cordillera.run import Run, disk_errors
from cordillera.training.trackers import Tracking


class RunRecorder:
    """Writer of a training's records; without a run, as on all ranks but the first, it writes nothing.

    Args:
        run: Run to write into, or None.
    """

    def __init__(self, run: Run | None) -> None:
        self.run = run
        self._board: Any = None
        self._tracking: Tracking | None = None
        self._ended = "failed"

    @contextlib.contextmanager
    def recording(self, place: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Hold the run's lock and write its status and charts; an error that leaves the region is in the status.

        Args:
            place: Function that returns the steps done and their total number.

        Raises:
            RunError: If the disk is full or the run is in use.
            DependencyError: If the recipe names a tracker whose library is not installed, or which refuses the run.
        """
        if self.run is None:
            yield
            return
        from torch.utils.tensorboard import SummaryWriter

        with self.run.lock():
            self.tell(None, place())
            try:
                folder = self.run.folder / "tensorboard"
                with disk_errors(folder):
                    self._board = SummaryWriter(str(folder), purge_step=place()[0] + 1)
                self._tracking = Tracking(self.run)
                with contextlib.closing(self._board):
                    yield
            except BaseException as error:
                why = error.what if isinstance(error, CordilleraError) else type(error).__name__
                with contextlib.suppress(RunError):  # a full disk, which may be the error itself
                    self.tell("failed", place(), why)
                raise
            finally:
                if self._tracking is not None:
                    self._tracking.end(self._ended)

    def tell(self, ended: str | None, place: tuple[int, int], why: str = "") -> None:
        """Write ``status.json``: how training ``ended`` (None while it runs), steps done and in total, and why."""
        self._ended = ended or self._ended
        if self.run is not None:
            self.run.write_status(ended, *place, why)

    def log(self, record: dict[str, Any]) -> None:
        """Append a record to ``metrics.jsonl``."""
        if self.run is not None:
            self.run.log(record)

    def draw(self, values: Mapping[str, float], step: int) -> None:
        """Add points at a ``step`` to the charts, by name."""
        if self._board is not None and self.run is not None:
            with disk_errors(self.run.folder / "tensorboard"):
                for name, value in values.items():
                    self._board.add_scalar(name, value, step)
            if self._tracking is not None:
                self._tracking.draw(values, step)
