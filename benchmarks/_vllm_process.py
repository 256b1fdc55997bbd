"""vLLM's engine in a process of its own environment, asked and answering by lines of JSON; see ``_vllm_peer``.

Arguments are the folder of the model's weights, and those of the engine as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _engine(folder: str, arguments: dict[str, Any]) -> Any:
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(model=folder, skip_tokenizer_init=True, enable_prefix_caching=False, **arguments)
    )


def _write(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Write ``texts`` of the prompts at a time, each after it has arrived; times are seconds from the start."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=asked["tokens"],
        stop_token_ids=asked["stop"],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    prompts, arrivals = asked["prompts"], asked["arrivals"]
    written: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    given = running = steps = 0
    began = time.perf_counter()
    while given < len(prompts) or running:
        while given < len(prompts) and running < asked["texts"] and arrivals[given] <= time.perf_counter() - began:
            engine.add_request(str(given), {"prompt_token_ids": prompts[given]}, sampling)
            given, running = given + 1, running + 1
        if not running:
            time.sleep(max(0.0, arrivals[given] - (time.perf_counter() - began)))
            continue
        outputs, now = engine.step(), time.perf_counter() - began
        steps += 1
        for one in outputs:
            number, new = int(one.request_id.split("-")[0]), list(one.outputs[0].token_ids)
            written[number] += new
            times[number] += [now] * len(new)
            running -= one.finished
    return {"texts": written, "times": times, "seconds": time.perf_counter() - began, "steps": steps}


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    engine = _engine(sys.argv[1], json.loads(sys.argv[2]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_write(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
