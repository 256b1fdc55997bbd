"""One workload in its own process, which takes steps on request: ``_thread_worker.py WORKLOAD THREADS``.

``THREADS`` is a number, ``default`` for Cordillera's choice, or ``library`` for the defaults of torch and OpenMP. Each
line of the input is a number of seconds; the answer is the number of steps taken in them, their seconds, and the number
of threads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

WARMUP = 3


def _ranking(name: str, quick: bool) -> Callable[[int], object]:
    from _ranking_batches import criteo_batches, criteo_features
    from _ranking_speed import DLRM_SIZES, WUKONG_SIZES, OurTraining

    features = criteo_features(100 if quick else 100_000)
    batches = criteo_batches(features, 4, 256 if quick else 2048)
    ours = OurTraining(DLRM_SIZES if name == "dlrm" else WUKONG_SIZES, features)
    return lambda step: ours.step(batches[step % len(batches)], "fp32")


def _llama(quick: bool) -> Callable[[int], object]:
    import torch

    from cordillera.distributed.mesh import ParallelConfig, ProcessMesh
    from cordillera.kernels.host_memory import keep_freed_memory
    from cordillera.models.language.llama import PRESETS
    from cordillera.training.language.engine import LanguageConfig, LanguageEngine, PackedTokens

    keep_freed_memory()  # as the trainer does
    config, tokens = PRESETS["llama-debug"], 128 if quick else 2048
    engine = LanguageEngine(LanguageConfig(precision="fp32"), config, ProcessMesh(ParallelConfig()))
    offsets = torch.arange(0, tokens + 1, tokens // 4)
    batches = [PackedTokens(torch.randint(0, config.vocabulary, (tokens,)), offsets) for _ in range(4)]
    return lambda step: engine.step([batches[step % len(batches)]])


def _int8(quick: bool) -> Callable[[int], object]:
    import torch
    from _quantized_mlp import quantize_mlp
    from torch import nn

    sizes, rows = (512, 1024, 1024, 512, 1), 64 if quick else 256
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    batches = [torch.randn(rows, sizes[0]) for _ in range(4)]
    model = quantize_mlp(nn.Sequential(*layers[:-1]), batches)

    def score(step: int) -> object:
        with torch.inference_mode():
            return model(batches[step % len(batches)])

    return score


WORKLOADS: dict[str, Callable[[bool], Callable[[int], object]]] = {
    "dlrm": lambda quick: _ranking("dlrm", quick),
    "wukong": lambda quick: _ranking("wukong", quick),
    "llama": _llama,
    "int8": _int8,
}


def main(workload: str, threads: str, quick: str) -> None:
    """Take steps until the input ends.

    Args:
        workload: A key of :data:`WORKLOADS`.
        threads: A number, ``default`` or ``library``.
        quick: ``quick`` for small sizes.
    """
    if threads != "library":
        import cordillera  # noqa: F401  # which settles how threads wait, before torch is imported
    import torch

    torch.manual_seed(0)
    chosen = ""
    if threads == "default":
        from cordillera.kernels.threads import choose_threads

        choice = choose_threads()
        torch.set_num_threads(choice.count)
        chosen = choice.why
    elif threads != "library":
        torch.set_num_threads(int(threads))
    take = WORKLOADS[workload](quick == "quick")
    for step in range(WARMUP):
        take(step)
    print(json.dumps({"threads": torch.get_num_threads(), "chosen": chosen}), flush=True)
    for line in sys.stdin:
        wanted, began, busy, steps = float(line), time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < wanted or not steps:
            take(steps)
            steps += 1
        answer: dict[str, Any] = {"steps": steps, "seconds": time.perf_counter() - began}
        answer |= {"processor_seconds": time.process_time() - busy, "threads": torch.get_num_threads()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
