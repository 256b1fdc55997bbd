"""Folders that commands have written from nothing, for others to read: one for each kind of file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.attacks.commands import Commands
from tests.attacks.written import Written
from tests.cli import test_augment as streams
from tests.cli.conftest import RECIPE as RANKING
from tests.cli.conftest import write_log
from tests.cli.test_language_commands import RECIPE as LANGUAGE
from tests.cli.test_language_commands import write_text
from tests.cli.test_search import RECIPE as SEARCHED
from tests.cli.test_search import SPACE
from tests.cli.test_tiers import IDS

INPUTS = ("log.csv", "small.toml", "tiny.toml", "space.toml", "streams.toml", "text.jsonl", "cluster.toml", "job.toml",
          "north-*.parquet", "south-*.parquet")  # fmt: skip
"""Files that are written by hand."""


def _done(commands: Commands, folder: Path, *words: object) -> None:
    outcome = commands(*words, folder=folder, seconds=600.0)  # the first may have to compile kernels
    assert outcome.code == 0, outcome.text


def trained(commands: Commands, folder: Path, *settings: str) -> None:
    """A run."""
    write_log(folder / "log.csv", rows=600)
    text = RANKING.format(path="log.csv").replace("epochs = 6", 'epochs = 2\ncheckpoint_every = 5\nprecision = "fp32"')
    (folder / "small.toml").write_text(text)
    _done(commands, folder, "train", "small.toml", "--run", "run", *settings)


def ranking(commands: Commands, folder: Path) -> None:
    """A run with all that commands add to it."""
    trained(commands, folder, "--set", "training.probe_every=3")
    _done(commands, folder, "quantize", "run", "--budget", "5")
    _done(commands, folder, "probe", "run")
    _done(commands, folder, "inject", "run", "-n", "32", "--samples", "32")
    _done(commands, folder, "towers", "run", "--towers", "2")
    _done(commands, folder, "evaluate", "run", "--importance")
    _done(commands, folder, "report", "run")


def language(commands: Commands, folder: Path) -> None:
    """A run of a language model, its checkpoint in Hugging Face's layout, and a drafter."""
    write_text(folder / "text.jsonl")
    (folder / "small.toml").write_text(LANGUAGE.replace("warmup_steps = 2", 'decay = "none"'))
    _done(commands, folder, "train", "small.toml", "--run", "run")
    _done(commands, folder, "convert", "run", "model")


def replicated(commands: Commands, folder: Path) -> None:
    """A run of two replicas."""
    write_text(folder / "text.jsonl")
    (folder / "small.toml").write_text(LANGUAGE.replace("warmup_steps = 2", 'decay = "none"'))
    _done(commands, folder, "train", "small.toml", "--run", "run", "--replicas", "2")


def drafted(commands: Commands, folder: Path) -> None:
    """A published model, and a file of a drafter for it."""
    import torch

    from cordillera.models.language.checkpoints import open_checkpoint, read_model
    from cordillera.models.language.checkpoints.drafter_file import write_drafter
    from cordillera.models.language.draft_model import DRAFT, DraftConfig
    from cordillera.models.language.llama import Llama
    from tests.serving.small_models import write_model

    source = open_checkpoint(write_model(folder / "model", head_dim=32, tied=False))
    draft = DraftConfig(kind="head", layers=1, length=3, vocabulary=source.config.vocabulary - 4)
    held = Llama(source.config.model_copy(update={"draft": draft}))
    held.init_weights(7)
    own = dict(held.named_parameters()) | dict(read_model(source).named_parameters())

    class Held:
        config, path = held.config, folder

        def read(self, name: str, out: torch.Tensor) -> None:
            out.copy_(own[name].detach())

    assert any(name.startswith(DRAFT) for name in own)
    write_drafter(Held(), folder / "drafter.safetensors", {})  # type: ignore[arg-type]


def divided(commands: Commands, folder: Path) -> None:
    """A run whose tables two processes wrote, each its part."""
    trained(commands, folder, "--set", "parallel.processes=2", "--set", "training.max_steps=10")


def filed(commands: Commands, folder: Path) -> None:
    """A run whose tables lie in a file."""
    trained(commands, folder, "--set", "tables.storage=file", "--set", "tables.cache=0.5")


def searched(commands: Commands, folder: Path) -> None:
    """A search for an architecture."""
    (folder / "tiny.toml").write_text(SEARCHED)
    (folder / "space.toml").write_text(SPACE)
    _done(commands, folder, *SEARCH)


SEARCH = ("search", "tiny.toml", "--space", "space.toml", "--run", "found", "--searcher", "random", "--trials", "3",
          "--sample", "1", "--workers", "1", "--quiet")  # fmt: skip


def streamed(commands: Commands, folder: Path) -> None:
    """Streams that were joined and scored half of the way."""
    streams.write_logs(folder, rows=400)
    path = Path(streams.write_settings(folder))
    path.write_text(path.read_text().replace(f"{folder}/", ""))
    _done(commands, folder, "augment", "streams.toml")
    streams.write_logs(folder, rows=200, first=400, begin=1_060_000)


def delta(commands: Commands, folder: Path) -> None:
    """A run with dynamic tables, and what changed between two of its checkpoints."""
    write_log(folder / "log.csv", rows=600)
    text = IDS.format(path="log.csv").replace("epochs = 6", "epochs = 2\ncheckpoint_every = 5")
    (folder / "small.toml").write_text(text + 'precision = "fp32"\n[tables.dynamic]\nmin_count = 2\n')
    _done(commands, folder, "train", "small.toml", "--run", "run", "--set", "training.max_steps=5")
    shutil.copytree(folder / "run", folder / "copy")
    _done(commands, folder, "train", "run", "--resume", "--set", "training.max_steps=10")
    _done(commands, folder, "delta", "make", "run", "--from", "5", "--out", "changes.delta")


def planned(commands: Commands, folder: Path) -> None:
    """A plan, its workload and cluster as files, and measured step times."""
    from importlib import resources

    package = resources.files("cordillera")
    (folder / "cluster.toml").write_text((package / "clusters" / "a100-node.toml").read_text())
    (folder / "job.toml").write_text((package / "workloads" / "llama3-8b.toml").read_text())
    _done(commands, folder, *PLAN)


PLAN = ("plan", "job.toml", "cluster.toml", "--devices", "8", "--out", "plan", "--json")


def traced(commands: Commands, folder: Path) -> None:
    """Traces of the ranks of a job that hangs."""
    from _blame_incidents import JobShape, incident

    from cordillera.distributed.tracing.flight_recorder import write_trace

    for form in ("pickle", "json"):
        (folder / form).mkdir()
        for trace in incident(JobShape(2, 2, 2), ("dead",), 3).traces:
            write_trace(trace, folder / form, form=form)


def make(build: Callable[[Commands, Path], None], place: Path, commands: Commands) -> Written:
    """Build a folder where its copies will be, and put it aside."""
    scratch, kept = place / "work", place / build.__name__
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    build(commands, scratch)
    scratch.rename(kept)
    return Written(kept, scratch, commands)


def cupboard(commands: Commands, place: Path) -> Callable[..., Written]:
    """Return a function that gives the folder of a builder, which is built once."""
    found: dict[str, Written] = {}

    def folder(build: Callable[[Commands, Path], None]) -> Written:
        if build.__name__ not in found:
            found[build.__name__] = make(build, place, commands)
        return found[build.__name__]

    return folder
