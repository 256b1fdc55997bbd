"""Two processes train for two steps as one does: over each dimension of a mesh alone, and where they share a head.

``test_language_meshes`` and ``test_shared_heads`` train over all meshes, which takes long.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.processes import found_by, needs_gloo
from tests.distributed.test_language_meshes import MESHES, TRAINING, check_training, counts, mesh, model_of, trained
from tests.distributed.test_shared_heads import ODD, check

pytestmark = [needs_gloo, pytest.mark.usefixtures("one_thread")]

FEW = ("shard 2", "replicate 2", "context 2, ring", "tied, pipeline 2, zero bubble", "biases and norms, tensor 2")


def run_few(rank: int, folder: str) -> dict[str, Any]:
    found = {name: trained(MESHES[2][name], model_of(name), TRAINING, counts(2)) for name in FEW}
    return {**found, "a head": trained(mesh(tensor=2), ODD, TRAINING, counts(2))}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found, which are started once, as this takes most of the time."""
    return list(found_by(2, tmp_path_factory.mktemp("few"), run_few, 120).values())


@pytest.mark.parametrize("name", FEW)
def test_two_processes_train_as_one_does(executed: list[dict[str, Any]], name: str) -> None:
    check_training(name, [found[name] for found in executed], 2)


def test_two_ranks_that_share_a_head_train_as_one_process_does(executed: list[dict[str, Any]]) -> None:
    check([found["a head"] for found in executed], ODD, 2)
