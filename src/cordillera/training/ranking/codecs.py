"""Codecs of a run's exchanged rows: the recipe's codecs, or a measured choice that is kept in the run's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cordillera.distributed.codecs.choice import CodecChoice
from cordillera.distributed.codecs.coders import Coders, MeasuredCoders, TableBounds, named_coders
from cordillera.distributed.collectives import Collectives
from cordillera.planning.ranking.placement import Placement
from cordillera.run import Run, write_atomically
from cordillera.training.ranking.config import RankingParallelConfig

CODECS_FILE = "codecs.json"
"""File in a run's folder with the codecs that were chosen by measured cost."""


def keep_given_choice(config: RankingParallelConfig, placement: Placement, run: Run) -> None:
    """Copy the choice that a recipe names into the folder of its run, unless the run has one.

    Raises:
        PlanError: If the file holds no choice, or one for other tables or another codec.
    """
    if config.codec_file is not None and not (run.folder / CODECS_FILE).is_file():
        choice = CodecChoice.read(Path(config.codec_file))
        choice.check(config.codec, placement.tables, config.codec_file)
        write_atomically(run.folder / CODECS_FILE, choice.to_text())


def coders_of(
    config: RankingParallelConfig, placement: Placement, links: Collectives, run: Run, say: Callable[[str], object]
) -> Coders | None:
    """Return the coders of a run; all ranks call it together.

    With ``auto`` and ``auto-bounded``, the choice in the run's folder is used, so that a resumed run goes on with it.
    Where there is none, ranks measure and rank 0 writes their choice into the folder before a row is sent by it.

    Args:
        config: Codec and error bounds.
        placement: Placement of the tables.
        links: The ranks.
        run: Run of the training.
        say: Function that takes a line of text for the user.

    Raises:
        PlanError: If the folder holds no valid choice for these tables.
    """
    if config.codec not in ("auto", "auto-bounded"):
        return named_coders(config.codec, placement, scale=config.bound_scale, iterations=config.bound_steps)
    path, kept = run.folder / CODECS_FILE, None
    if path.is_file():
        kept = CodecChoice.read(path)
        if kept.name == config.codec:
            kept.check(config.codec, placement.tables, str(path))
        else:  # the recipe changed before the run was resumed
            kept = None

    def keep(choice: CodecChoice) -> None:
        if links.rank == 0:
            write_atomically(path, choice.to_text())
            run.log({"kind": "codecs", "step": choice.from_step, "codecs": choice.codecs})
            say(told(choice))

    bounds = TableBounds.of(placement, config.bound_scale, config.bound_steps)
    return MeasuredCoders(config.codec, placement, links, bounds, choice=kept, on_choice=keep)


def told(choice: CodecChoice) -> str:
    """Return a line for the user that states a choice and the link that it is for."""
    link = "no rank waited for rows" if choice.bytes_per_s is None else f"{choice.bytes_per_s / 1e6:,.1f} MB/s"
    counted = Counter(choice.codecs.values())
    used = ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))
    return (
        f"codecs: from step {choice.from_step + 1}, {used} (measured: {link}, latency {1e3 * choice.latency_s:.2f} ms)"
    )
