"""Files that the library writes, with the commands that read them."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.commands import Commands, Outcome
from tests.attacks.damage import Damage, damages

TIMES = re.compile(rb'"(?:seconds|search_seconds|seal)": [^,\n]*')
"""What differs from call to call in JSON: times, and the checksum that follows from them."""


@dataclass(frozen=True)
class Reader:
    """A command that reads files, and what counts as its result.

    Attributes:
        arguments: Arguments of the command.
        results: Files that it writes; those of another run may hold times.
        prints: Whether what it prints is a result; without, it is times.
        code: Exit status without an attack.
    """

    arguments: Sequence[str]
    results: Sequence[str] = ()
    prints: bool = True
    code: int = 0

    @property
    def name(self) -> str:
        """Name for messages."""
        return " ".join(self.arguments)


@dataclass(frozen=True)
class End:
    """End of a reader: what it did, and the digest of its result."""

    outcome: Outcome
    result: str


def run(commands: Commands, reader: Reader, folder: Path) -> End:
    """Let a reader read a folder."""
    outcome = commands(*reader.arguments, folder=folder)
    digest = hashlib.sha256(TIMES.sub(b"", outcome.out.encode()) if reader.prints else b"")
    for name in reader.results:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b"absent"
        digest.update(TIMES.sub(b"", content) if path.suffix == ".json" else content)
    return End(outcome, digest.hexdigest())


@dataclass
class Written:
    """A folder of files that commands have written, and copies of it to be damaged.

    Attributes:
        folder: Folder, which stays as it is.
        scratch: Path of the copies; each has the same path, so that what commands print is comparable.
        commands: Runs commands.
    """

    folder: Path
    scratch: Path
    commands: Commands

    def __post_init__(self) -> None:
        self._ends: dict[str, End] = {}

    def copy(self) -> Path:
        """Make a fresh copy."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        return shutil.copytree(self.folder, self.scratch, symlinks=True)

    def undamaged(self, reader: Reader) -> End:
        """End of a reader without an attack: a result, and the same twice."""
        if reader.name not in self._ends:
            first, second = (run(self.commands, reader, self.copy()) for _ in range(2))
            assert first.outcome.code == reader.code, first.outcome.text
            assert first.result == second.result, f"{reader.name} gives another result each time"
            self._ends[reader.name] = first
        return self._ends[reader.name]

    def attack(
        self,
        name: str,
        readers: Sequence[Reader],
        count: int,
        may_differ: Callable[[str], bool] = lambda damage: False,
        others: Sequence[str] = (),
        share: int = 1,
    ) -> list[str]:
        """Damage a file in every way, each in a fresh copy, and let each reader read it; return what was wrong.

        Args:
            name: Path of the file in the folder.
            readers: Readers of the file.
            count: Number of random flips and of random truncations.
            may_differ: Whether another result is acceptable after a damage of this name.
            others: Files in the folder that it is exchanged with.
            share: One of so many damages is made, others for each file and each reader.
        """
        rng = random.Random(zlib.crc32(name.encode()))
        path = self.scratch / name
        self.copy()
        found = []
        every = list(damages(path, [self.scratch / other for other in others], rng, count))
        for reader in readers:
            for damage, do in every[zlib.crc32(f"{name} {reader.name}".encode()) % share :: share]:
                found += self._judged(name, damage, do, reader, may_differ(damage))
        return found

    def _judged(self, name: str, damage: str, do: Damage, reader: Reader, may_differ: bool) -> list[str]:
        good = self.undamaged(reader)
        self.copy()
        do(self.scratch / name)
        end = run(self.commands, reader, self.scratch)
        outcome = end.outcome
        wrong = outcome.defects()
        if outcome.code == reader.code and end.result != good.result and not may_differ:
            wrong.append("gave another result without a word")
        if outcome.code != reader.code and not wrong:
            wrong += misleading(outcome, [name])
        return [f"{name}, {damage}: {one}\n{outcome.text}" for one in wrong]


def misleading(outcome: Outcome, names: Sequence[str], lines: int = 14) -> list[str]:
    """What is wrong with a refusal: it must be short, and name a file or the folder that is the damaged file's own.

    Args:
        outcome: A command that has not ended well.
        names: Paths of the damaged files.
        lines: Largest number of its lines.
    """
    wrong = []
    said = outcome.err[outcome.err.rfind("error:") :]
    if "error:" not in outcome.err:
        wrong.append("failed without an error")
    if len(said) > 200 * lines or said.count("\n") > lines:
        wrong.append("gave a long error")
    near = {part for name in names for part in (Path(name).name, Path(name).parent.name) if part}
    if not any(part in said for part in near):
        wrong.append("gave an error that names no file")
    return wrong
