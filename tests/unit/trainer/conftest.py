"""Rank processes, started once because importing torch takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.trainer.rank_processes import RankProcesses, rank_processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankProcesses]:
    """Yield four processes; a job uses as many of them as its history needs."""
    with rank_processes(4) as processes:
        yield processes
