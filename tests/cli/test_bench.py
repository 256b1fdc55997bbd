"""``cordillera bench``: what its own options refuse."""

from __future__ import annotations

from typing import Any


def test_stale_takes_no_system_and_a_system_is_needed_without_it(cli: Any) -> None:
    done = cli("bench", "--stale", "ranking")
    assert done.code == 2
    assert "--stale: takes no SYSTEM" in done.err
    done = cli("bench")
    assert done.code == 2
    assert "SYSTEM: is missing" in done.err
    assert "ranking" in done.err


def test_a_benchmark_that_is_misspelt_is_guessed(cli: Any) -> None:
    assert "there is no benchmark 'rankng'\n  -> did you mean ranking?" in cli("bench", "rankng").err
    assert "there is no benchmark 'xyz'\n  -> one of bfloat16," in cli("bench", "xyz").err
