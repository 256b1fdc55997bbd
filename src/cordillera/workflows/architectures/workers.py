"""Processes that try candidates of a search; a candidate that kills its process has failed, and nothing else."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from cordillera import recipe as recipes
from cordillera.data.ranking.datasets import prepare
from cordillera.distributed.job.job import STOPPING
from cordillera.distributed.job.launch import counted_signals, start_tracker
from cordillera.recipe import RankingRecipe
from cordillera.workflows.architectures.trials import SearchTrial, TrialConfig, try_candidate

_GRACE_S = 10.0


def _work(pipe: Connection, content: dict[str, Any], config: TrialConfig) -> None:
    """Try candidates until the pipe ends."""
    for number in STOPPING:  # the terminal's signals are for the process that asks
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    torch.set_num_threads(1)
    recipe = recipes.validate(content, "recipe")
    assert isinstance(recipe, RankingRecipe)
    splits = prepare(recipe.data)
    while True:
        try:
            overrides = pipe.recv()
        except EOFError:
            return
        pipe.send(try_candidate(content, overrides, splits, config))


class _TrialWorker:
    def __init__(self, content: dict[str, Any], config: TrialConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_work, args=(other, content, config), daemon=True)
        start_tracker()
        with counted_signals() as stops:  # neither this process nor the other is interrupted before both are ready
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
            try:
                self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        other.close()
        self.number: int | None = None
        self.since = 0.0
        if stops():
            self.stop()
            raise KeyboardInterrupt

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(_GRACE_S)


class TrialWorkers:
    """Processes of one thread each that try candidates; a result does not depend on their number.

    Args:
        count: Number of processes.
        content: Recipe as plain values.
        config: Settings of trials.
        most_seconds: Time after which a trial is given up.
    """

    def __init__(self, count: int, content: dict[str, Any], config: TrialConfig, most_seconds: float) -> None:
        self.count, self.content, self.config, self.most_seconds = count, content, config, most_seconds
        self._workers: list[_TrialWorker] = []

    def __enter__(self) -> TrialWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def try_all(
        self, candidates: Sequence[dict[str, Any]], has_time: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[int, SearchTrial]]:
        """Yield the index and the trial of each candidate as it finishes; once ``has_time`` denies, no other begins."""
        waiting = list(reversed(range(len(candidates))))
        while waiting or any(worker.number is not None for worker in self._workers):
            if waiting and not has_time():
                waiting.clear()
                continue
            self._fill(waiting, candidates)
            busy = [worker for worker in self._workers if worker.number is not None]
            ready = wait([worker.pipe for worker in busy], timeout=0.5)
            for worker in busy:
                found = self._result(worker, worker.pipe in ready)
                if found is not None:
                    assert worker.number is not None
                    yield worker.number, found
                    worker.number = None

    def _fill(self, waiting: list[int], candidates: Sequence[dict[str, Any]]) -> None:
        self._workers = [worker for worker in self._workers if worker.process.is_alive() or worker.number is not None]
        while len(self._workers) < min(self.count, len(self._workers) + len(waiting)):
            self._workers.append(_TrialWorker(self.content, self.config))
        for worker in self._workers:
            if worker.number is None and waiting:
                number = waiting.pop()
                worker.number, worker.since = number, time.monotonic()
                try:
                    worker.pipe.send(candidates[number])
                except OSError:  # it died while idle, which the next iteration detects
                    continue

    def _result(self, worker: _TrialWorker, is_ready: bool) -> SearchTrial | None:
        seconds = time.monotonic() - worker.since
        if is_ready:
            try:
                result = worker.pipe.recv()
                assert isinstance(result, SearchTrial)
                return result
            except (EOFError, OSError):
                worker.stop()
                code = worker.process.exitcode or 0
                how = f"signal {-code}" if code < 0 else f"exit status {code}"
                return SearchTrial("process", f"its process ended with {how}", seconds=seconds)
        if seconds > self.most_seconds:
            worker.stop()
            return SearchTrial("process", f"was not finished after {self.most_seconds:g} s", seconds=seconds)
        return None
