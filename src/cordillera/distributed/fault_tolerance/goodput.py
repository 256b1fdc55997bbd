"""Account of a job of replicas: what share of its time was useful, where the rest went, and what each failure cost.

All of it follows from the events of :mod:`~cordillera.distributed.fault_tolerance.events`. A step is useful if it is on
the winning lineage: the commits that lead to the newest one. Steps of other lineages were rolled back.

The time of each replica, from the job's first event to its last, is divided into :data:`TIME_PARTS`:

- ``useful``: computation of useful steps (forward, backward, the sum of gradients itself, the update). That of a
  discarded step is useful if the next attempt of the same process used its gradients again.
- ``redone``: the same of steps that were discarded or rolled back, and of the step that a process was killed in.
- ``stalled``: waiting for others (asking, connecting, catching up, votes, sums longer than normal), and all of a step in
  which the replica contributed nothing.
- ``paused``: between steps and after the last one: evaluations, checkpoints, records.
- ``absent``: from the end of a process to the return of its replica, and from the epoch that began without a replica
  to the end of its attempt.
- ``starting``: from the start of the job to the replica's first connection.

A sum of gradients is normal up to the median, over useful steps of several replicas, of its shortest time in the step.
From the last record of a process that failed, as much as the median time of a step is redone, the rest absent.

Source: effective training time as in Llama 3 (arXiv 2407.21783), section 3.3.4; parts and rules are ours.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from cordillera.distributed.fault_tolerance._histories import (
    JobHistory,
    StepAttempt,
    read_history,
)
from cordillera.distributed.fault_tolerance._stragglers import Straggler, find_stragglers

TimePart: TypeAlias = Literal["useful", "redone", "stalled", "paused", "absent", "starting"]
