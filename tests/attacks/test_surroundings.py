"""Full disks, read-only folders, two processes in one folder, few open files, clocks that jump."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attacks import made
from tests.attacks.commands import Commands, Outcome
from tests.attacks.written import Written

pytestmark = pytest.mark.slow

TRAIN = ("train", "small.toml", "--run", "new", "--quiet")
RESUME = ("train", "new", "--resume", "--quiet")
WRITERS: dict[str, tuple[Callable[[Commands, Path], None], Sequence[str]]] = {
    "train": (made.ranking, TRAIN),
    "predict": (made.ranking, ("predict", "run", "log.csv", "--out", "new.csv")),
    "predict to Parquet": (made.ranking, ("predict", "run", "log.csv", "--out", "new.parquet")),
    "report": (made.ranking, ("report", "run")),
    "evaluate": (made.ranking, ("evaluate", "run")),
    "quantize": (made.ranking, ("quantize", "run", "--budget", "5")),
    "probe": (made.ranking, ("probe", "run")),
    "inject": (made.ranking, ("inject", "run", "-n", "32", "--samples", "32")),
    "towers": (made.ranking, ("towers", "run", "--towers", "2")),
    "export": (made.ranking, ("export", "run", "--out", "new")),
    "compare": (made.ranking, ("compare", "run", "--out", "new.html")),
    "recipe new": (made.ranking, ("recipe", "new", "log.csv", "--label", "click", "--out", "new.toml")),
    "train a language model": (made.language, TRAIN),
    "average": (made.language, ("average", "run", "model", "--out", "new")),
    "convert to Meta's layout": (made.language, ("convert", "model", "new", "--to", "meta")),
    "convert to Hugging Face's layout": (made.language, ("convert", "model", "new")),
    "convert to GGUF": (made.language, ("convert", "model", "new.gguf")),
    "search": (made.searched, (*made.SEARCH[:4], "--run", "new", *made.SEARCH[6:])),
    "sweep": (made.searched, ("sweep", "tiny.toml", "--size", "model.mlp=[4]", "--size", "model.mlp=[8]", "--size",
                              "model.mlp=[16]", "--run", "new", "--set", "training.max_steps=2")),
    "augment": (made.streamed, ("augment", "streams.toml", "--finish", "--quiet")),
    "delta make": (made.delta, ("delta", "make", "run", "--from", "5", "--out", "new")),
    "delta apply": (made.delta, ("delta", "apply", "copy", "changes.delta")),
    "plan": (made.planned, (*made.PLAN[:5], "--out", "new")),
    "plot": (made.traced, ("blame", "json", "--plot", "new.svg")),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    """Folders by their builders; each is built once."""
    return made.cupboard(commands, tmp_path_factory.mktemp("made"))


def refused(outcome: Outcome, because: str) -> list[str]:
    """What is wrong with an error of the surroundings; nothing if the command has worked."""
    wrong = outcome.defects()
    if outcome.code not in (0, 3) and "error:" not in outcome.err:
        wrong.append("failed without an error")
    return [f"{because}: {one}\n{outcome.text}" for one in wrong]


def leftovers(folder: Path) -> list[str]:
    """Temporary files that a command that has failed should have removed."""
    return [str(path) for path in folder.rglob("*") if path.name.endswith((".tmp", ".unfinished"))]


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_fills_up(commands: Commands, folders: Callable[..., Written], name: str) -> None:
    """Each file may only be so long, as on a disk that is full from there on; a second try without the limit works."""
    build, words = WRITERS[name]
    written, wrong = folders(build), list[str]()
    for size in (0, 10, 300, 4_000, 30_000):
        folder = written.copy()
        outcome = commands(*words, folder=folder, limits={"size": size})
        wrong += refused(outcome, f"files of {size:,} bytes")
        wrong += [f"files of {size:,} bytes: left {path}" for path in leftovers(folder)]
        if outcome.code in (1, 2):
            again = words if name not in ("train", "train a language model") else RESUME
            second = commands(*again, folder=folder)
            if second.code == 2 and again is RESUME:  # nothing had begun
                second = commands(*words, folder=folder)
            is_told = "in another --run folder" in second.said  # a search whose candidates all died of it
            if second.code not in (0, 3) and not is_told:
                wrong.append(f"after files of {size:,} bytes: cannot be repeated\n{outcome.text}\n{second.text}")
    assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only: by its mode, or for root, whom modes do not stop, by a mount."""
    if os.geteuid():
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o222)
        yield
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        return
    for options in (["--bind", str(folder), str(folder)], ["-o", "remount,ro,bind", str(folder)]):
        done = subprocess.run(["mount", *options], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_is_read_only(commands: Commands, folders: Callable[..., Written], name: str) -> None:
    build, words = WRITERS[name]
    folder = folders(build).copy()
    with read_only(folder):
        outcome = commands(*words, folder=folder, environment={"CORDILLERA_CACHE": str(folder / "cache")})
    wrong = refused(outcome, "read-only")
    if outcome.code in (0, 3):
        wrong.append(f"wrote to a folder that is read-only?\n{outcome.text}")
    elif "ead-only" not in outcome.err and "ermission denied" not in outcome.err:
        wrong.append(f"does not say why\n{outcome.text}")
    assert not wrong, "\n".join(wrong)


READERS: dict[str, tuple[Callable[[Commands, Path], None], Sequence[str]]] = {
    "predict": (made.ranking, ("predict", "run", "log.csv", "--out", "{out}/s.csv")),
    "watch": (made.ranking, ("watch", "run", "log.csv")),
    "evaluate on a file": (made.ranking, ("evaluate", "run", "--file", "log.csv")),
    "compare": (made.ranking, ("compare", "run")),
    "generate": (made.language, ("generate", "run", "the river", "--max-new-tokens", "4")),
    "generate from a published folder": (made.language, ("generate", "model", "the river", "--max-new-tokens", "4")),
    "recipe show": (made.ranking, ("recipe", "show", "run")),
    "simulate-faults": (made.planned, ("simulate-faults", "--plan", "plan/plan.json", "--days", "1", "--runs", "2")),
    "blame": (made.traced, ("blame", "json")),
}


@pytest.mark.parametrize("name", READERS)
def test_what_only_reads_works_in_a_read_only_folder(
    commands: Commands, folders: Callable[..., Written], tmp_path: Path, name: str
) -> None:
    build, words = READERS[name]
    folder = folders(build).copy()
    with read_only(folder):
        outcome = commands(*(word.replace("{out}", str(tmp_path)) for word in words), folder=folder,
                           environment={"CORDILLERA_CACHE": str(folder / "cache")})  # fmt: skip
    assert outcome.code in (0, 3), outcome.text
    assert not outcome.defects(), outcome.text


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands that run beside those of the first."""
    found = Commands(tmp_path_factory.mktemp("others"), {"CORDILLERA_CACHE": "cache"})
    yield found
    found.close()


PAIRS = ("train", "predict", "report", "evaluate", "quantize", "probe", "inject", "towers", "export",
         "train a language model", "average", "search", "sweep", "augment", "delta make", "delta apply",
         "plan")  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_two_processes_in_one_folder(
    commands: Commands, other: Commands, folders: Callable[..., Written], name: str
) -> None:
    """Of two at once, one works; the other works too, or says what is in its way. What is left is whole."""
    build, words = WRITERS[name]
    written = folders(build)
    wrong = list[str]()
    for fresh in (True, False):  # with prepared data, and without: both prepare it
        folder = written.copy()
        if fresh:
            shutil.rmtree(folder / "cache", ignore_errors=True)
        with ThreadPoolExecutor(2) as pool:
            begun = [pool.submit(run, *words, folder=folder) for run in (commands, other)]
            both = [one.result() for one in begun]
        for outcome in both:
            wrong += refused(outcome, "beside another")
        if not any(outcome.code in (0, 3) for outcome in both):
            wrong.append("none of two has worked\n" + "\n".join(outcome.text for outcome in both))
        wrong += [f"left {path}" for path in leftovers(folder)]
        if name == "train":
            for arguments in (("evaluate", "new"), ("report", "new"), ("compare", "new")):
                wrong += refused(commands(*arguments, folder=folder), "after two")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [*WRITERS, *READERS])
def test_few_descriptors(commands: Commands, folders: Callable[..., Written], tmp_path: Path, name: str) -> None:
    """A process that may have few files open says so at once; a low limit of its own, it raises."""
    build, words = WRITERS[name] if name in WRITERS else READERS[name]
    folder = folders(build).copy()
    here = [word.replace("{out}", str(tmp_path)) for word in words]
    for count in (16, 255):
        outcome = commands(*here, folder=folder, limits={"files": count})
        assert not refused(outcome, f"{count} files"), outcome.text
        assert f"only {count} files open" in outcome.said, outcome.text
    for limits in ({"files": 256}, {"own files": 16}):
        outcome = commands(*here, folder=folders(build).copy(), limits=limits)
        assert outcome.code in (0, 3), outcome.text
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("jump", [3600.0, 1e7, 1e9])
@pytest.mark.parametrize("name", [*WRITERS, *READERS])
def test_clocks_that_jump(
    commands: Commands, folders: Callable[..., Written], tmp_path: Path, name: str, jump: float
) -> None:
    """A wall clock that is set again and again changes no result, and makes no duration negative or huge."""
    build, words = WRITERS[name] if name in WRITERS else READERS[name]
    folder = folders(build).copy()
    here = [word.replace("{out}", str(tmp_path)) for word in words]
    outcome = commands(*here, folder=folder, clock=jump)
    assert not outcome.defects(), outcome.text
    assert outcome.code in (0, 3), outcome.text
    for path in folder.rglob("new/metrics.jsonl"):
        for line in path.read_text().splitlines():
            for key, value in json.loads(line).items():
                if "seconds" in key and value is not None:
                    assert 0 <= value < 1000, (path, key, value)
