"""Fixtures of the chaos tests: a rig per test, and two forking processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from etrain_jupyter import plugin
from etrain_jupyter.process.fork_server import ForkServerProcess
from tests.chaos.forks import THREADS, Zygote
from tests.chaos.rig import MakeRig, Rig, make_rig
from tests.chaos.trainers import Served, Spawned, Trainers

if plugin.installed():
    from tests.chaos.spot_fixtures import *  # noqa: F403

MEMORY = Path("/dev/shm")
LOCAL_WORKER = {
    **dict.fromkeys(THREADS, "1"),
    "CUDA_VISIBLE_DEVICES": os.environ.get("ETRAIN_CHAOS_GPU", ""),
}
"""Environment that a local pool sets for a worker: without a GPU, or with ``ETRAIN_CHAOS_GPU``."""


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Provide the process that forks trainers."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerProcess]:
    """Provide the product's fork server."""
    read, write = os.pipe()
    process = ForkServerProcess(
        parent_pipe=read,
        log=tmp_path_factory.mktemp("fork_server") / "log.txt",
        environment=LOCAL_WORKER,
    )
    yield process
    process.close()
    os.close(read)
    os.close(write)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Provide a folder for runs, in memory if possible: these tests do not measure the disk."""
    made = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def make() -> MakeRig:
    """Provide the factory of rigs, for tests that need several, one after the other."""
    return make_rig


@pytest.fixture
def trainers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trainers:
    """Start trainers as the product does, or fork them if the test is marked ``forked``.

    With ``ETRAIN_SPAWN``, each worker has its own fork server, as on pools other than ``local``.
    """
    marker = request.node.get_closest_marker("forked")
    if marker and (marker.kwargs.get("always") or "ETRAIN_SPAWN" not in os.environ):
        found: Trainers = request.getfixturevalue("zygote")
    else:
        is_spawned = "ETRAIN_SPAWN" in os.environ or sys.platform != "linux"
        found = Spawned() if is_spawned else Served(request.getfixturevalue("fork_server"))
    environment = LOCAL_WORKER | ({"CUDA_VISIBLE_DEVICES": ""} if isinstance(found, Zygote) else {})
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def limits(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Detect a hung rank after a few seconds instead of 30."""
    monkeypatch.setenv("ETRAIN_HANG_S", str(trainers.limits.hang_s))


@pytest_asyncio.fixture
async def rig(trainers: Trainers, folder: Path, limits: None) -> AsyncIterator[Rig]:
    """Provide a cluster of up to four workers."""
    async with make_rig(trainers, folder) as made:
        yield made
