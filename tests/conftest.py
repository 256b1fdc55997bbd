"""Benchmarks are programs beside the package: their folder is put on the path while their tests run.

Tests may be shared out among processes (``make test`` takes three). What a test of one file makes, the others of the
file use, so files stay whole; and all files that start whole commands of several processes, kill some of them and wait
for the others to end within a deadline stay in one process and thus run one after another, from the beginning on. So do
files that load or make the same things, where no long tests run.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from cordillera.kernels.threads import usable_cores

# Tests compare results bit for bit: the number of threads must not follow what else the machine does.
os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
OWN = (("tests/benchmarks/", "--benchmarks"), ("tests/attacks/", "--attacks"))
ALL_LONG = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)
collect_ignore = ["test_house.py", "test_docstrings.py"]  # `make check` runs them; they read the whole package
FEW_INPUTS = 20
COMMANDS = "commands of several processes"
COMMAND_FILES = ("tests/cli/", "tests/distributed/test_launch.py", "tests/distributed/test_watch.py")
# What takes seconds in each process that meets such a file: loading what ranks are forked from, loading transformers,
# training the model of the fixture `begun`.
TOGETHER = {
    "forked ranks": (
        "distributed/test_few_meshes", "distributed/test_pipeline_decoding", "distributed/test_tensor_parallel",
        "distributed/test_towers", "distributed/test_transport_processes", "distributed/test_windows",
        "numerics/test_probe", "training/test_language", "training/test_ranks", "training/test_slices",
    ),
    "transformers": (
        "data/test_piece_tokenizers", "data/test_tokenizer", "models/language/test_adapters",
        "models/language/test_conversion", "models/language/test_families", "models/language/test_llama",
        "models/language/test_moe", "models/language/test_piece_conversion", "serving/test_language_files",
        "serving/test_sampler",
    ),
    "a model that can answer": (
        "training/test_best_answers", "training/test_groups", "training/test_own_chats", "training/test_post_training",
    ),
}  # fmt: skip
SHARED = {f"tests/{file}.py": name for name, files in TOGETHER.items() for file in files}
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Fuzzers take a few inputs in each run of the tests, and as many as wanted when asked; so do long tests."""
    parser.addoption("--all", action="store_true", help="run the long tests too (`make test-all`)")
    parser.addoption("--benchmarks", action="store_true", help="run those of benchmarks (`make test-benchmarks`)")
    parser.addoption("--attacks", action="store_true", help="run all attacks (`make test-attacks`)")
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="inputs of each fuzzer (default: its own number)")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch: for tensors so small that others only wait, and sums whose order threads would change."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends the machine, and waiting for its disk takes most of a commit's time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def fuzz_inputs(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Number of inputs of a fuzzer: its own number, or that of ``--fuzz N``."""
    return lambda default: request.config.getoption("--fuzz") or default


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process.

    Tests of properties take the same inputs in each run, other ones with ``--fuzz``, and may be slow. Tests send
    themselves Ctrl-C and hang up, which a shell that runs something in the background, or ``nohup``, has told it to
    ignore.
    """
    patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("other inputs", **patient)
    hypothesis.settings.register_profile("same inputs", derandomize=True, **patient)
    hypothesis.settings.load_profile("other inputs" if config.getoption("--fuzz") else "same inputs")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _are_marks_or_tests_named(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr")) or any("::" in str(argument) for argument in config.args)


def _are_long_ones_asked(config: pytest.Config, nodeid: str) -> bool:
    """Whether the long tests of a file run where no test is named."""
    long = config.getoption("--all") or config.getoption("--fuzz")
    return bool(next((config.getoption(option) for folder, option in OWN if nodeid.startswith(folder)), long))


def _are_all_short(config: pytest.Config) -> bool:
    options = ("--all", "--fuzz", *(option for _, option in OWN))
    return not (_are_marks_or_tests_named(config) or any(config.getoption(option) for option in options))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose tests are all long is not even imported, in each process, unless they run or it is named."""
    if not (collection_path.match("test_*.py") and collection_path.is_relative_to(ROOT)):
        return None
    file = collection_path.relative_to(ROOT).as_posix()
    if _are_marks_or_tests_named(config) or _are_long_ones_asked(config, file):
        return None
    return True if ALL_LONG.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests run when asked: by ``--all`` or ``--fuzz``, those of :data:`OWN` folders by an option, each by name.

    What takes long begins first, so that no process waits long for the last; one process keeps the files' order.
    """
    if not _are_marks_or_tests_named(config):

        def is_asked(item: pytest.Item) -> bool:
            return not item.get_closest_marker("slow") or _are_long_ones_asked(config, item.nodeid)

        config.hook.pytest_deselected(items=[item for item in items if not is_asked(item)])
        items[:] = [item for item in items if is_asked(item)]
        if not (config.getoption("--all") or config.getoption("--fuzz")):
            items[:] = _few_cases(config, items)
            for item in items:
                _take_few_inputs(getattr(item, "obj", None))
    if not hasattr(config, "workerinput"):
        return
    turns, all_short = dict[str, int](), _are_all_short(config)
    scopes = {item: scope_of(item.nodeid, all_short) for item in items}
    for item, scope in scopes.items():
        turn = 0 if scope == COMMANDS or scope in TOGETHER else 1 if item.get_closest_marker("slow") else 2
        turns[scope] = min(turn, turns.get(scope, turn))
    items.sort(key=lambda item: turns[scopes[item]])


def pytest_collection_finish(session: pytest.Session) -> None:
    """The rate of the processor, which each training of a language model measures, is measured once."""
    flops = sys.modules.get("cordillera.models.language.flops")
    if flops is not None:
        flops._rate_of_thread = functools.cache(flops._rate_of_thread)


def _few_cases(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items without some cases of those that are marked so."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cases"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for found in cases.values():
        few = next(found[0].iter_markers("cases")).args[0]
        if len(found) > few:
            left_out |= {*found} - {found[at * (len(found) - 1) // max(1, few - 1)] for at in range(few)}
    config.hook.pytest_deselected(items=list(left_out))
    return [item for item in items if item not in left_out]


def _take_few_inputs(test: Any) -> None:
    """Let a test of a property take at most :data:`FEW_INPUTS` inputs; long runs take its own number."""
    name = "_hypothesis_internal_use_settings"  # there is no public way to change those of a decorated test
    own = getattr(test, name, None)
    if own is not None and own.max_examples > FEW_INPUTS:
        test = getattr(test, "__func__", test)
        setattr(test, name, hypothesis.settings(own, max_examples=FEW_INPUTS))


@functools.cache
def scope_of(nodeid: str, all_short: bool) -> str:
    """What runs in one process: a file, a page of the documentation, or all files of :data:`COMMAND_FILES`.

    Where all tests are short, also those of a name in :data:`TOGETHER`: with the long ones of all of its files, one
    process would be busy when the others have nothing left to do.
    """
    file, _, name = nodeid.partition("::")
    page = name.partition("[")[2].removesuffix("]")
    if page.endswith(".md") and (ROOT / page).is_file():
        return page
    deadlines = file.startswith(COMMAND_FILES) and "needs_gloo" in (ROOT / file).read_text(encoding="utf-8")
    return COMMANDS if deadlines else SHARED.get(file, file) if all_short else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``, scopes are ours."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scopes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid, _are_all_short(self.config))

    return Scopes(config, log)


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that made a default process group, as TorchRec's peer does, leaves none to the next."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
