"""``cordillera train`` with codecs that are chosen by measured cost, over two processes, interrupted and resumed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cordillera.distributed.codecs.choice import CodecChoice
from cordillera.training.ranking.codecs import CODECS_FILE
from tests.cli.conftest import write_log
from tests.cli.test_ranking_processes import RECIPE, ends, ne, needs_processes, same_bits, signalled, trained
from tests.distributed.processes import needs_gloo

PARALLEL = '\n[parallel]\ncodec = "auto-bounded"\ncopies = 1\ncopied_rows = 0\n'
TABLES = ("user", "device", "seen")


@needs_gloo
@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_processes
def test_a_resumed_run_keeps_the_codecs_it_began_with(tmp_path: Path) -> None:
    write_log(tmp_path / "log.csv")
    (tmp_path / "small.toml").write_text(RECIPE.format(folder=tmp_path) + PARALLEL)
    said = trained(tmp_path, "small.toml", "--run", "measured", "--nproc", 2)
    assert "codecs: from step 9, " in said
    measured = CodecChoice.read(tmp_path / "measured" / CODECS_FILE)
    assert measured.codecs.keys() == set(TABLES)

    given = CodecChoice("auto-bounded", 3, dict.fromkeys(TABLES, "bounded"), {}, {}, None, 0.0)
    (tmp_path / "given.json").write_text(given.to_text())
    more = ("--nproc", 2, "--set", "parallel.codec_file='given.json'")
    said = trained(tmp_path, "small.toml", "--run", "whole", *more)
    assert "codecs: " not in said  # nothing is measured
    assert ne(tmp_path / "whole") != ne(tmp_path / "measured")
    ends(signalled(tmp_path, signal.SIGINT, 8, "small.toml", "--run", "stopped", *more), 130)
    (tmp_path / "given.json").unlink()
    trained(tmp_path, "stopped", "--resume")
    same_bits(tmp_path / "stopped", tmp_path / "whole")
