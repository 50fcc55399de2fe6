"""The rig as a fixture: one zygote for the session, a cluster for each test; and spot clusters."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from etrain_jupyter.testing.fakeaws import FakeAws
from tests.chaos.forks import Zygote
from tests.chaos.rig import Rig, make_rig
from tests.chaos.spot import Spot, open_cloud, open_spot

MEMORY = Path("/dev/shm")

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
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank that hangs be found after some seconds, not after half a minute."""
    monkeypatch.setenv("ETRAIN_HANG_S", "3")


@pytest.fixture
def make() -> MakeRig:
    """Give what makes a cluster, for tests that need several, one after the other."""
    return make_rig


@pytest_asyncio.fixture
async def rig(zygote: Zygote, folder: Path, limits: None) -> AsyncIterator[Rig]:
    """Give a cluster of up to four workers."""
    async with make_rig(zygote, folder) as made:
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
