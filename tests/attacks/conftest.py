"""The process that starts the commands of all attacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.commands import Commands


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave deadlines to the commands: those that build a folder may have to compile kernels first."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Runs commands, each with the cache in its own folder."""
    found = Commands(tmp_path_factory.mktemp("commands"), {"CORDILLERA_CACHE": "cache"})
    yield found
    found.close()
