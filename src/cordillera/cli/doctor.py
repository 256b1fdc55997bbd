"""``cordillera doctor``: which parts of this machine and which optional libraries are usable, and why others are
not.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from cordillera.cli._show import AsJson, console, print_json
from cordillera.data.files import cache_folder
from cordillera.errors import DataError
from cordillera.kernels.host_memory import keep_freed_memory
from cordillera.kernels.threads import SPINS_ALONE, quota, spins_long, usable_cores
from cordillera.numbers import counted

CheckStatus = Literal["usable", "limited", "absent", "broken"]

# FBGEMM is built against one minor version of torch; with another its operators fail to load or crash.
FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}

_AREAS = ("machine", "python", "back ends", "libraries")
_PROBE_SECONDS = 120.0
# Without the working directory, where a folder with the name of a library would shadow it.
_ISOLATED = "import sys\nsys.path[:] = [entry for entry in sys.path if entry]\n"
_QUICKLY = "import gc\ngc.disable()\n"  # a fifth of the time that torch takes to be imported is the collector's
_GIBIBYTE = 1024**3
_COLOURS: dict[CheckStatus, str] = {"usable": "green", "limited": "yellow", "absent": "dim", "broken": "red"}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        area: ``machine``, ``python``, ``back ends`` or ``libraries``.
        name: Name of the checked item.
        status: ``usable``; ``limited`` (works in part, or slowly); ``absent``; ``broken`` (installed, fails).
        detail: Finding, and the reason if the item is not usable.
        remedy: Advice; None if none is needed.
    """

    area: str
    name: str
    status: CheckStatus
    detail: str
    remedy: str | None = None


def _probe(code: str, given: str = "") -> tuple[bool, str]:
    """Run Python code in another process, which a library built for another torch may crash.

    The code finds what is ``given`` in standard input. The result is whether it succeeded, and its output (or the
    reason of the failure).
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", _ISOLATED + _QUICKLY + code],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            env=environment,
            input=given,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_PROBE_SECONDS:.0f} seconds"
    return _outcome(result.returncode, result.stdout, result.stderr)


def _outcome(status: int, out: str, err: str) -> tuple[bool, str]:
    """Return whether a process succeeded, and the last line of its output or the reason of its failure."""
    if status == -signal.SIGALRM:
        return False, f"no answer within {_PROBE_SECONDS / 2:g} seconds"
    if status < 0:
        name = signal.Signals(-status).name
        return False, f"the process died of {name}: as a rule a library built for another version of torch"
    lines = [line.strip() for line in (out if status == 0 else err).splitlines()]
    lines = [line for line in lines if line]
    return status == 0, lines[-1] if lines else ""


_FORKS = """
import json, os, signal, sys, tempfile, traceback
first, chains, seconds = json.load(sys.stdin)
exec(first, {})

def run(codes, files):
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for number, file in enumerate(files[0][:2], 1):
        os.dup2(file.fileno(), number)
    try:
        exec(codes[0], {})
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    signal.setitimer(signal.ITIMER_REAL, 0)
    if codes[1:]:
        child = os.fork()
        if not child:
            run(codes[1:], files[1:])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=files[1][2], flush=True)
    os._exit(status)

started = []
for codes in chains:
    files = [[tempfile.TemporaryFile(mode="w+", errors="replace") for _ in range(3)] for _ in codes]
    child = os.fork()
    if not child:
        run(codes, files)
    started.append((child, files))
found = []
for child, files in started:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for some in files:
        for file in some:
            file.seek(0)
        out, err, ended = (file.read() for file in some)
        found.append((int(ended or status), out, err))
print(json.dumps(found))
"""


def _probe_with_torch(chains: Sequence[Sequence[str]]) -> list[tuple[bool, str]]:
    """Run codes as :func:`_probe` does; on systems with forks, in forks of one process that has imported torch.

    A code of a chain is run in a fork of the process of the code before it, which has imported more.
    """
    codes = [code for chain in chains for code in chain]
    if not hasattr(os, "fork"):
        return [_probe(code) for code in codes]
    worked, text = _probe(_FORKS, json.dumps(["import torch", list(chains), _PROBE_SECONDS / 2]))
    return [_outcome(*one) for one in json.loads(text)] if worked else [(False, text)] * len(codes)


def _version(*distributions: str) -> tuple[str, str] | None:
    for distribution in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return distribution, metadata.version(distribution)
    return None


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _cpu() -> Finding:
    model, flags = platform.processor() or platform.machine(), set[str]()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    wanted = {
        "AVX2": "avx2",
        "AVX-512": "avx512f",
        "AVX-512 bf16": "avx512_bf16",
        "AMX bf16": "amx_bf16",
        "AMX int8": "amx_int8",
        "SVE": "sve",
        "bf16": "bf16",
    }
    has = [name for name, flag in wanted.items() if flag in flags]
    native = {"avx512_bf16", "amx_bf16", "bf16"} & flags
    cores, share = usable_cores(), quota()
    text = f"{model}, {platform.machine()}, {counted(cores, 'usable core')}"
    if share is not None and share < cores:
        text += f" (the container may use {share:g} of them)"
    if has:
        text += "; " + ", ".join(has)
    if native or not flags:
        return Finding("machine", "CPU", "usable", text)
    if "avx512f" not in flags:
        text += "; no AVX-512, so bf16 is emulated and takes several times as long as fp32"
        return Finding("machine", "CPU", "limited", text, "train in fp32, the default of ranking models here")
    text += "; no bf16 instructions, so bf16 is emulated and saves memory traffic but not arithmetic"
    remedy = "if bf16 is not faster here, train with --set training.precision=fp32"
    return Finding("machine", "CPU", "limited", text, remedy)


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return Finding("machine", "memory", "limited", "the system does not say how much there is")
    text = f"{total / _GIBIBYTE:.1f} GiB"
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        if limit < total:
            text += f", of which the container may use {limit / _GIBIBYTE:.1f} GiB"
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                text += f"; {int(line.split()[1]) * 1024 / _GIBIBYTE:.1f} GiB available now"
    obstacle = keep_freed_memory()
    if obstacle is None:
        text += "; a training process keeps the memory that a step frees, for the next step"
    else:
        text += f"; what a step of training frees goes back to the system, which makes steps slower: {obstacle}"
    return Finding("machine", "memory", "usable", text)


def _with_torch() -> list[Finding]:
    """Return what needs torch: the GPU, torch, the back ends of the sparse update and FBGEMM."""
    torch = (
        "import json, torch\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "kernels = torch.backends.cpu.get_cpu_capability()\n"
        "runtime = torch.version.cuda or torch.version.hip\n"
        "print(json.dumps([torch.__version__, kernels, torch.get_num_threads(), runtime, names]))"
    )
    backends = (
        "import json\n"
        "from cordillera.kernels.embeddings.update import available_backends\n"
        "print(json.dumps(available_backends()))"
    )
    fbgemm = (
        "import torch, fbgemm_gpu\n"
        "from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen\n"
        "print(torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([2, 3])).tolist())"
    )
    of_torch, of_backends, of_fbgemm = _probe_with_torch([[torch], [backends, fbgemm]])
    return [*_torch_and_gpu(*of_torch), _update_backends(*of_backends), _fbgemm(*of_fbgemm)]


def _torch_and_gpu(worked: bool, text: str) -> list[Finding]:
    remedy = "pip install -c constraints.txt -e '.[cpu]'"
    if not worked:
        return [Finding("python", "torch", "broken", text, remedy)]
    version, kernels, threads, runtime, names = json.loads(text)
    detail = f"{version}, {kernels} kernels, {counted(threads, 'thread')}"
    spinning = spins_long(SPINS_ALONE)
    if threads > 1 and spinning:
        detail += f", slow beside other processes: {spinning}"
    gpu = _gpu(runtime, names)
    if _minor(version) in FBGEMM_OF_TORCH:
        return [gpu, Finding("python", "torch", "usable", detail)]
    detail += f"; tested versions are {', '.join(FBGEMM_OF_TORCH)}"
    return [gpu, Finding("python", "torch", "limited", detail, remedy)]


def _gpu(runtime: str | None, names: list[str]) -> Finding:
    if names:
        return Finding("machine", "GPU", "usable", f"{', '.join(names)}; torch with CUDA {runtime}")
    if shutil.which("nvidia-smi") is None:
        return Finding("machine", "GPU", "absent", "none found; everything runs on the CPU")
    if runtime is None:
        text = "there is an NVIDIA driver, but this torch is built for the CPU"
        return Finding("machine", "GPU", "limited", text, "install the CUDA build of the same torch version")
    text = f"there is an NVIDIA driver, but torch (CUDA {runtime}) finds no device"
    remedy = "see whether `nvidia-smi` works and whether CUDA_VISIBLE_DEVICES hides it"
    return Finding("machine", "GPU", "broken", text, remedy)


def _disk(name: str, folder: Path, remedy: str) -> Finding:
    existing = folder.absolute()
    try:
        while not existing.exists():
            if existing.is_symlink():
                text = f"{folder}: {existing} is a link that leads nowhere"
                return Finding("machine", name, "broken", text, remedy)
            existing = existing.parent
        free = shutil.disk_usage(existing).free / _GIBIBYTE
    except OSError as error:
        return Finding("machine", name, "broken", f"{folder}: {error.strerror}", remedy)
    text = f"{folder}: {free:.1f} GiB free"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("machine", name, "broken", f"{folder}: cannot be written", remedy)
    if free < 1:
        return Finding("machine", name, "limited", text, remedy)
    return Finding("machine", name, "usable", text)


def _cache() -> Finding:
    name = "disk, cache"
    try:
        folder = cache_folder()
    except DataError as error:
        return Finding("machine", name, "broken", f"{error.where}: {error.what}", error.remedy)
    return _disk(name, folder, "point CORDILLERA_CACHE to a folder with space")


def _pip() -> Finding:
    worked, text = _probe("import pip\nprint(pip.__version__)")
    use = "`cordillera data get` fetches through it"
    if worked:
        return Finding("python", "pip", "usable", f"{text}; {use}")
    return Finding("python", "pip", "absent", f"{use}: {text}", f"{sys.executable} -m ensurepip")


def _fbgemm(worked: bool, text: str) -> Finding:
    found, torch = _version("fbgemm-gpu-cpu", "fbgemm-gpu"), _version("torch")
    fitting = FBGEMM_OF_TORCH.get(_minor(torch[1])) if torch else None
    remedy = f"pip install fbgemm-gpu-cpu=={fitting}.0" if fitting else "install a torch version that FBGEMM serves"
    if found is None:
        has_wheels = sys.platform.startswith("linux")
        why = "not installed" if has_wheels else f"there are no wheels for {sys.platform}"
        detail = f"{why}; the fused update uses another back end"
        return Finding("libraries", "FBGEMM", "absent", detail, remedy if has_wheels else None)
    name, version = found
    if torch and fitting and _minor(version) != fitting:
        detail = f"{name} {version} is not built for torch {torch[1]}; it needs {fitting}"
        return Finding("libraries", "FBGEMM", "broken", detail, remedy)
    if not worked or text != "[0, 2, 5]":
        return Finding("libraries", "FBGEMM", "broken", f"{name} {version} does not load: {text}", remedy)
    return Finding("libraries", "FBGEMM", "usable", f"{name} {version} fits torch {torch[1] if torch else '?'}")


def _library(name: str, distribution: str, code: str, use: str, remedy: str) -> Finding:
    found = _version(distribution)
    if found is None:
        return Finding("libraries", name, "absent", f"not installed; {use}", remedy)
    worked, text = _probe(code)
    if not worked:
        return Finding("libraries", name, "broken", f"{found[1]} does not load: {text}", remedy)
    return Finding("libraries", name, "usable", f"{found[1]}; {use}")


def _numba() -> Finding:
    code = "import numba\nprint(numba.njit(lambda x: x + 1)(1))"
    return _library("Numba", "numba", code, "compiles the fused update on CPUs", "pip install -c constraints.txt numba")


def _triton() -> Finding:
    use = "the fused update on GPUs; without one it runs in its interpreter, for tests"
    return _library("Triton", "triton", "import triton", use, "on a machine with a GPU: pip install triton")


def _installed(name: str, distribution: str | tuple[str, ...], use: str, remedy: str = "make peers") -> Finding:
    """Look for a library without loading it, which takes seconds."""
    found = _version(*([distribution] if isinstance(distribution, str) else distribution))
    if found is None:
        return Finding("libraries", name, "absent", f"not installed; {use}", remedy)
    return Finding("libraries", name, "usable", f"{found[1]} is installed; {use}")


def _optional() -> list[Finding]:
    """Return the libraries of extras and trackers."""
    return [
        _installed("OR-tools", "ortools", "proves pipeline schedules of `plan` optimal", "pip install -e '.[plan]'"),
        _installed("optuna", "optuna", "the searchers tpe and nsga2 of `search`", "pip install -e '.[search]'"),
        _installed("onnxscript", "onnxscript", "writes programs of `export --onnx`", "pip install onnxscript"),
        _installed("ONNX Runtime", "onnxruntime", "runs programs of `export --onnx`", "pip install onnxruntime"),
        _installed("TorchRec", "torchrec", "a peer of `cordillera bench` and an oracle of the tests"),
        _installed(
            "MLflow", ("mlflow", "mlflow-skinny"), 'follows runs with track = "mlflow"', "pip install mlflow-skinny"
        ),
        _installed("Weights & Biases", "wandb", 'follows runs with track = "wandb"', "pip install wandb"),
    ]


def _fuxictr() -> Finding:
    finding = _installed("FuxiCTR", "fuxictr", "a peer of `cordillera bench`")
    if finding.status == "usable" and not Path(".peers/FuxiCTR/model_zoo").is_dir():
        detail = f"{finding.detail}; its model zoo is not in .peers/FuxiCTR of this folder"
        return Finding("libraries", "FuxiCTR", "limited", detail, "make peers, in the folder of the repository")
    return finding


def _tensorboard() -> Finding:
    code = "from tensorboard.summary.writer.event_file_writer import EventFileWriter"
    return _library(
        "TensorBoard", "tensorboard", code, "shows runs while they train", "pip install -c constraints.txt tensorboard"
    )


def _compiler() -> Finding:
    remedy = (
        "install a C++ compiler with OpenMP and Python's headers; without --set training.compile=true none is needed"
    )
    name, use = "C++ compiler", "torch.compile on the CPU"
    compiler = next(
        (path for path in (os.environ.get("CXX"), "g++", "clang++", "c++") if path and shutil.which(path)), ""
    )
    if not compiler:
        return Finding("libraries", name, "absent", f"none found; needed by {use} only", remedy)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return Finding("libraries", name, "limited", f"{compiler} is there, but not {header}; {use} fails", remedy)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n", encoding="utf-8")
        try:
            result = subprocess.run(
                [compiler, "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(Path(folder) / "probe.so")],
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Finding("libraries", name, "broken", f"{compiler} does not answer", remedy)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        return Finding("libraries", name, "broken", f"{compiler} cannot build for OpenMP: {lines[0]}", remedy)
    return Finding("libraries", name, "usable", f"{shutil.which(compiler)}; {use}")


def _update_backends(worked: bool, text: str) -> Finding:
    name = "sparse update"
    if not worked:
        return Finding("back ends", name, "broken", text, "pip install -c constraints.txt -e '.[cpu]'")
    reasons: dict[str, str | None] = json.loads(text)
    usable = [backend for backend, reason in reasons.items() if reason is None]
    others = [f"{backend}: {reason}" for backend, reason in reasons.items() if reason is not None]
    return Finding("back ends", name, "usable", "; ".join([", ".join(usable), *others]))


def examine() -> list[Finding]:
    """Check the machine, Python and every optional library, and return the findings in the order of display.

    Libraries are imported in other processes: a crash is a finding, not an error.
    """
    looks: list[Callable[[], Finding | list[Finding]]] = [
        _with_torch,
        _cpu,
        _memory,
        _cache,
        lambda: _disk("disk, runs", Path("runs"), "start `cordillera` in a folder with space"),
        lambda: Finding("python", "Python", "usable", f"{platform.python_version()} at {sys.executable}"),
        _pip,
        _numba,
        _triton,
        _compiler,
        _tensorboard,
        _optional,
        _fuxictr,
    ]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        results = [future.result() for future in [pool.submit(look) for look in looks]]
    findings = [f for result in results for f in (result if isinstance(result, list) else [result])]
    return sorted(findings, key=lambda finding: _AREAS.index(finding.area))


def doctor(
    as_json: AsJson = False,
) -> None:
    """Say what of this machine and its libraries is usable.

    What is not usable has a reason. With --json, findings are a list of objects (`area`, `name`, `status`, `detail`,
    `remedy`).
    """
    try:
        findings = examine()
    except KeyboardInterrupt:
        os._exit(130)  # exit without waiting for the running checks
    if as_json:
        print_json(findings)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "", "state", "found"):
        table.add_column(column, overflow="fold")
    area = ""
    for finding in findings:
        colour = _COLOURS[finding.status]
        text = finding.detail + (f"\n-> {finding.remedy}" if finding.remedy else "")
        shown = finding.area if finding.area != area else ""
        area = finding.area
        table.add_row(shown, finding.name, Text(finding.status, colour), text)
    console().print(table)
