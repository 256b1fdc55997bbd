"""The process that starts the commands of all attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.commands import Commands


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Runs commands, each with the cache in its own folder."""
    found = Commands(tmp_path_factory.mktemp("commands"), {"CORDILLERA_CACHE": "cache"})
    yield found
    found.close()
