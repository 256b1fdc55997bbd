"""vLLM beside the engine, in a process of its own environment, which ``make peers`` makes in ``.peers/vllm``."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _llama_peer import transformers_llama
from _peers import PeerUnavailable

from cordillera.serving.language.language_model import LanguageModel

ENVIRONMENT = Path(os.environ.get("CORDILLERA_VLLM") or Path(__file__).resolve().parent.parent / ".peers" / "vllm")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_ROOM = 2048  # tokens of a text


class Vllm:
    """vLLM's engine with the same weights in bfloat16, on as many threads as torch has here.

    It compiles the model, and preloads the memory allocator and the OpenMP library that its manual asks for, where they
    are. Its threads wait without spinning for long, so that it costs others nothing between its turns.

    Args:
        texts: Largest number of texts at a time.
        drafts: Whether its n-gram drafts are on.

    Raises:
        PeerUnavailable: If its environment is not there, or its process ends.
    """

    def __init__(self, ours: LanguageModel, *, texts: int, drafts: bool) -> None:
        python = ENVIRONMENT / "bin" / "python"
        if not python.exists():
            raise PeerUnavailable(f"{ENVIRONMENT} holds no vLLM; run `make peers`, or set CORDILLERA_VLLM")
        self.texts, self.stop = texts, sorted(ours.tokenizer.stop_ids)
        self._folder = tempfile.TemporaryDirectory()
        transformers_llama(ours.path, ours.config).to(torch.bfloat16).save_pretrained(self._folder.name)
        arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": _ROOM, "max_num_seqs": texts}
        if drafts:
            arguments["speculative_config"] = DRAFTS
        self._said = Path(self._folder.name) / "said"
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name("_vllm_process.py"), self._folder.name, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=_environment(),
            )
        weakref.finalize(self, self._process.kill)
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            last = (self._said.read_text(errors="replace").strip() or "nothing was said").splitlines()[-1]
            raise PeerUnavailable(f"vLLM's process ended with {status}: {last}")
        return line

    def write(
        self, prompts: Sequence[Sequence[int]], tokens: int, arrivals: Sequence[float], texts: int
    ) -> dict[str, Any]:
        """Write greedy texts, at most ``texts`` at a time; ``times`` are the seconds to each token from the start."""
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "tokens": tokens, "arrivals": arrivals, "texts": texts, "stop": self.stop}
        print(json.dumps(asked, default=list), file=self._process.stdin, flush=True)
        return dict(json.loads(self._answer()))

    def __call__(self, ids: Sequence[int], tokens: int) -> tuple[list[int], int]:
        """Return the new tokens of a prompt, and the number of passes."""
        found = self.write([ids], tokens, [0.0], 1)
        return found["texts"][0], found["steps"]


def _environment() -> dict[str, str]:
    threads = str(torch.get_num_threads())
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    openmp = ENVIRONMENT / "lib" / "libiomp5.so"
    preloaded = ([str(openmp)] if openmp.exists() else []) + ([allocator] if allocator else [])
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(preloaded),
        "OMP_NUM_THREADS": threads,
        "KMP_BLOCKTIME": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
