"""Every file that the library writes is damaged in every way, and every command that reads it detects it or is right.

A result may differ in silence only where a damage leaves a valid file of a format without a checksum; each of these
places is named in :data:`UNSEALED` with its reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.attacks import made
from tests.attacks.commands import Commands
from tests.attacks.written import Reader, Written

pytestmark = pytest.mark.slow

PREDICT = Reader(("predict", "run", "log.csv", "--out", "s.csv"), ("s.csv",), prints=False)
QUANTIZED = Reader((*PREDICT.arguments, "--quantized"), ("s.csv",), prints=False)
PLANNED = Reader((*PREDICT.arguments, "--plan"), ("s.csv",), prints=False)
WATCH = Reader(("watch", "run", "log.csv", "--json"))
EVALUATE = Reader(("evaluate", "run", "--json"), ("run/evaluation.json",))
REPORT = Reader(("report", "run"), ("run/report.html",), prints=False)
REPLICAS = Reader(("report", "run"), ("run/replicas.html",), prints=False)
COMPARE = Reader(("compare", "run", "--json"))
TOWERS = Reader(("towers", "run", "--towers", "2", "--json"), ("run/towers.json",))
FURTHER = "run/checkpoints/step-000000015/tensors.safetensors"
RESUME = Reader(("train", "run", "--resume", "--set", "training.epochs=3", "--quiet"), (FURTHER,), prints=False)
FOLLOWED = Reader(("train", "small.toml", "--run", "other", "--set", "model.towers.file=run/towers.json",
                   "--set", "training.max_steps=2"), ("other/checkpoints/step-000000002/tensors.safetensors",),
                  prints=False)  # fmt: skip

ALONE = Reader((*RESUME.arguments[:3], "--set", "training.max_steps=12", "--set", "parallel.processes=1", "--quiet"),
               ("run/checkpoints/step-000000012/tensors.safetensors",), prints=False)  # fmt: skip

GENERATE = Reader(("generate", "run", "the river", "--max-new-tokens", "8", "--temperature", "0", "--quiet"))
PUBLISHED = Reader(("generate", "model", *GENERATE.arguments[2:]))
DRAFTED = Reader((*PUBLISHED.arguments, "--drafter", "drafter.safetensors"))
AVERAGE = Reader(("average", "run", "model", "--out", "mean"), ("mean/model.safetensors",), prints=False)
SAID = Reader(("evaluate", "run", "--json"), ("run/evaluation.json",), prints=False)
GO_ON = Reader(("train", "run", "--resume", "--set", "training.steps=14", "--quiet"),
               ("run/checkpoints/step-000000014/weights-00000.safetensors",), prints=False)  # fmt: skip

SEARCH = Reader(made.SEARCH, ("found/search.json",))
PAGE = Reader(("report", "found"), ("found/report.html",), prints=False)
AUGMENT = Reader(("augment", "streams.toml", "--finish", "--json"))
APPLY = Reader(("delta", "apply", "copy", "changes.delta"),
               ("copy/checkpoints/step-000000010/tensors.safetensors",), prints=False)  # fmt: skip
MAKE = Reader(("delta", "make", "run", "--from", "5", "--out", "other.delta"), ("other.delta",), prints=False)
SIMULATE = Reader(("simulate-faults", "--plan", "plan/plan.json", "--days", "1", "--runs", "2", "--json"))
PLAN = Reader(("plan", *made.PLAN[1:5], "--only", "placement", "--out", "other", "--json"))
BLAME = Reader(("blame", "pickle", "--json"), code=3)
BLAME_JSON = Reader(("blame", "json", "--json"), code=3)


@dataclass(frozen=True)
class Case:
    """Files of a folder and the commands that read them.

    Attributes:
        build: Builder of the folder.
        pattern: Pattern of the files.
        readers: Commands.
        others: Files that each of them is exchanged with.
    """

    build: Callable[[Commands, Path], None]
    pattern: str
    readers: tuple[Reader, ...]
    others: tuple[str, ...] = ()


CASES = (
    Case(made.ranking, "run/checkpoints/*/*", (PREDICT, RESUME), ("run/quantized/model.safetensors",)),
    Case(made.ranking, "run/encoder/*", (PREDICT, RESUME)),
    Case(made.ranking, "run/recipe.toml", (PREDICT, EVALUATE, REPORT, RESUME)),
    Case(made.ranking, "run/metrics.jsonl", (REPORT, COMPARE, RESUME)),
    Case(made.ranking, "run/status.json", (REPORT, COMPARE, RESUME)),
    Case(made.ranking, "run/model.json", (REPORT, COMPARE, RESUME)),
    Case(made.ranking, "run/evaluation.json", (REPORT, COMPARE)),
    Case(made.ranking, "run/importance.json", (REPORT,)),
    Case(made.ranking, "run/environment.json", (REPORT,)),
    Case(made.ranking, "run/threads.json", (RESUME,)),
    Case(made.ranking, "run/quantized/*.[js]*", (QUANTIZED, WATCH), ("run/probe.safetensors",)),
    Case(made.ranking, "run/precision-plan.json", (PLANNED,)),
    Case(made.ranking, "run/probe.safetensors", (PLANNED,)),
    Case(made.ranking, "run/towers.json", (FOLLOWED,)),
    Case(made.ranking, "cache/prepared/*/*", (EVALUATE, TOWERS)),
    Case(made.divided, "run/checkpoints/*10/*", (PREDICT, ALONE)),
    Case(made.filed, "run/checkpoints/*10/*", (PREDICT,)),
    Case(made.filed, "run/checkpoints/*10/rows/*", (PREDICT, RESUME)),
    Case(made.drafted, "drafter.safetensors", (DRAFTED,)),
    Case(made.language, "run/checkpoints/*12/*", (GENERATE, GO_ON), ("model/model.safetensors",)),
    Case(made.language, "run/checkpoints/*12/[mw]*", (AVERAGE,)),
    Case(made.language, "run/recipe.toml", (GENERATE, SAID, REPORT)),
    Case(made.language, "run/*.json", (REPORT, COMPARE)),
    Case(made.language, "run/metrics.jsonl", (REPORT, COMPARE, GO_ON)),
    Case(made.language, "model/*", (PUBLISHED,)),
    Case(made.language, "cache/text/*/*", (SAID, GO_ON)),
    Case(made.replicated, "run/replicas/*.jsonl", (REPLICAS,)),
    Case(made.searched, "found/*.json*", (SEARCH, PAGE)),
    Case(made.searched, "found/recipe.toml", (SEARCH, PAGE)),
    Case(made.streamed, "out/state/*/*", (AUGMENT,)),
    Case(made.streamed, "out/versions/*/*", (AUGMENT,)),
    Case(made.streamed, "out/[ns]*/*", (AUGMENT,)),
    Case(made.delta, "changes.delta", (APPLY,)),
    Case(made.delta, "copy/checkpoints/*/*", (APPLY,)),
    Case(made.delta, "run/checkpoints/*/*", (MAKE,)),
    Case(made.planned, "plan/plan.json", (SIMULATE,)),
    Case(made.traced, "pickle/trace_[03]", (BLAME,)),
    Case(made.traced, "json/trace_[03]*", (BLAME_JSON,)),
)

UNREAD = ("*.html", "*.svg", "*.md", "run/placement.txt", "*/.lock", "*/tensorboard/*", "plan/trace.json",
          "run/injection.json", "run/replicas/coordinator.log")  # fmt: skip
"""What no command reads; of the last, a coordinator that is started again during a job reads what it wrote."""

SAME = ("pickle/trace_*", "json/trace_*", "run/training-probe.safetensors",
        "found/front/*.toml", "copy/*")  # fmt: skip
"""Files of which others of the same kind are attacked."""

ABSENT = "missing"
EDITED = ("bit", "cut", "16 bytes", "a line break", "twice")
UNSEALED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("run/recipe.toml", "report"): (EDITED, "people may edit it, and the page shows it as it is"),
    ("run/evaluation.json", "report"): ((ABSENT,), "the page says that nothing was evaluated"),
    ("run/evaluation.json", "compare"): ((ABSENT,), "the table has no figures then"),
    ("run/importance.json", "report"): ((ABSENT,), "it is written when asked for"),
    ("run/environment.json", "report"): ((ABSENT,), "it is for readers, and the page has a blank there"),
    ("run/model.json", "report"): ((ABSENT,), "the page says that it is missing"),
    ("run/model.json", "compare"): ((ABSENT,), "the table has blanks in its place"),
    ("found/status.json", "report"): ((ABSENT,), "the page says that the search has not ended"),
    **{
        (f"{kind}/trace_{rank}{end}", "blame"): (
            (ABSENT, *EDITED),
            "torch writes no checksum; who wrote none is blamed",
        )
        for kind, end in (("pickle", ""), ("json", ".json"))
        for rank in (0, 3)
    },
    **{
        (f"run/replicas/{writer}.jsonl", "report"): (
            ("cut", *(() if writer in ("r0", "r1") else (ABSENT,))),
            "a file that ends with a line is that of a moment before, and replicas may be started by others; the page "
            "says which steps and epochs are missing",
        )
        for writer in ("coordinator", "launcher", "r0", "r1")
    },
    ("found/search.json", "report"): ((ABSENT,), "the folder is then that of a run, whose page lists what is missing"),
}
"""Damages, by the beginnings of their names, after which another result is no defect, by file and command, and why."""


@pytest.fixture(scope="module")
def folders(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    """Folders by their builders; each is built once."""
    return made.cupboard(commands, tmp_path_factory.mktemp("made"))


def files(written: Written, pattern: str) -> list[str]:
    """Paths of the files of a pattern, relative to the folder."""
    paths = (path for path in written.folder.rglob("*") if path.is_file() and path.stat().st_size)
    names = sorted(path.relative_to(written.folder).as_posix() for path in paths)
    return [name for name in names if fnmatch.fnmatch(name, pattern)]


def attack(written: Written, case: Case, reader: Reader, count: int, share: int = 1) -> list[str]:
    """Damage each file of a case and let a command read it; return what was wrong.

    Args:
        written: Folder of the case.
        case: Case.
        reader: One of its commands.
        count: Number of random flips, and of random truncations, of each file.
        share: One of so many damages is made.
    """
    found = files(written, case.pattern)
    assert found, f"{case.build.__name__} makes no {case.pattern}"
    wrong = []
    for name in found:
        spared, _ = UNSEALED.get((name, reader.arguments[0]), ((), ""))
        others = [other for other in case.others if Path(other).suffix == Path(name).suffix]
        wrong += written.attack(name, [reader], count, lambda damage: damage.startswith(spared), others, share)  # noqa: B023
    return wrong


SHARE = 6
"""Damages of a file and a reader of which one is made in each run of the attacks; ``--fuzz`` makes all."""

PAIRS = [(case, reader) for case in CASES for reader in case.readers]


@pytest.mark.parametrize(
    ("case", "reader"),
    PAIRS,
    ids=[f"{case.build.__name__} {case.pattern} {reader.name[:24]}" for case, reader in PAIRS],
)
def test_damage_is_detected_or_harmless(
    folders: Callable[..., Written], case: Case, reader: Reader, fuzz_inputs: Callable[[int], int]
) -> None:
    count = fuzz_inputs(0)  # without --fuzz, files and readers share the damages
    wrong = attack(folders(case.build), case, reader, count or 1, 1 if count else SHARE)
    assert not wrong, f"{len(wrong)} damages:\n" + "\n".join(wrong[:20])


QUICK = [
    pair for pair in PAIRS if pair[0].build is made.traced or (pair[0].pattern, pair[1]) == ("changes.delta", APPLY)
]


@pytest.mark.parametrize(("case", "reader"), QUICK[:1], ids=["traces"])
def test_some_damage_is_detected_or_harmless(folders: Callable[..., Written], case: Case, reader: Reader) -> None:
    """The first few attacks, for each run of the tests."""
    assert not attack(folders(case.build), case, reader, 0, 4)


@pytest.mark.parametrize("build", {case.build: None for case in CASES}, ids=lambda build: build.__name__)
def test_every_file_that_is_written_is_attacked(
    folders: Callable[..., Written], build: Callable[[Commands, Path], None]
) -> None:
    """A new file of a command needs a case, or a place in :data:`UNREAD`."""
    known = [*UNREAD, *SAME, *made.INPUTS, *(case.pattern for case in CASES)]
    found = files(folders(build), "*")
    assert not [name for name in found if not any(fnmatch.fnmatch(name, pattern) for pattern in known)]


def test_an_undetected_damage_is_found(folders: Callable[..., Written]) -> None:
    """The judgement itself: a file of plain text has no checksum, and a command that prints it shows each damage."""
    written = folders(made.planned)
    shown = Reader(
        ("plan", "job.toml", "cluster.toml", "--devices", "8", "--only", "placement", "--out", "o", "--json")
    )
    found = written.attack("job.toml", [shown], 8)
    assert [one for one in found if "without a word" in one]
