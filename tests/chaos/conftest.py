"""The rig as a fixture: a cluster for each test, one zygote for the session; and spot clusters."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from etrain_jupyter.testing.fakeaws import FakeAws
from tests.chaos.forks import THREADS, Zygote
from tests.chaos.rig import Rig, make_rig
from tests.chaos.spot import Spot, open_cloud, open_spot
from tests.chaos.trainers import Spawned, Trainers

MEMORY = Path("/dev/shm")
LOCAL_WORKER = {**dict.fromkeys(THREADS, "1"), "CUDA_VISIBLE_DEVICES": ""}
"""What a local pool sets for a worker without a GPU."""

MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Give the process that forks trainers."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder for run folders, in memory where there is one: the disk is not the subject."""
    made = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def make() -> MakeRig:
    """Give what makes a cluster, for tests that need several, one after the other."""
    return make_rig


@pytest.fixture
def trainers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Trainers:
    """Give what starts a test's trainers: as the product does, unless it is marked ``forked``."""
    marker = request.node.get_closest_marker("forked")
    if marker and (marker.kwargs.get("always") or "ETRAIN_SPAWN" not in os.environ):
        found: Trainers = request.getfixturevalue("zygote")
    else:
        found = Spawned()
        for name, value in LOCAL_WORKER.items():
            monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def limits(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank that hangs be found after some seconds, not after half a minute."""
    monkeypatch.setenv("ETRAIN_HANG_S", str(trainers.limits.hang_s))


@pytest_asyncio.fixture
async def rig(trainers: Trainers, folder: Path, limits: None) -> AsyncIterator[Rig]:
    """Give a cluster of up to four workers."""
    async with make_rig(trainers, folder) as made:
        yield made


@pytest.fixture(scope="module")
def spot_cloud() -> Iterator[FakeAws]:
    """Give one cloud for a file, where machines have networks of their own if that can be had."""
    with open_cloud() as cloud:
        yield cloud


@pytest.fixture
def spot(
    spot_cloud: FakeAws,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Spot]:
    """Give a user's folder in that cloud, as new; nothing may be left afterwards."""
    yield from open_spot(spot_cloud, monkeypatch, tmp_path, request.node.name)
