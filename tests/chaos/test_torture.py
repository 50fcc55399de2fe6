"""Kill many ranks, workers and schedulers while they save; no checkpoint may be lost."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from etrain_jupyter.log.event_log import LogReader
from etrain_jupyter.log.events import (
    CheckpointCommitted,
    Event,
    GenerationFormed,
    JobRestored,
    JobResumed,
    WeightsHashed,
    WorkerLost,
)
from etrain_jupyter.storage.checkpoints import open_newest, open_store
from etrain_jupyter.storage.checkpoints.base import CheckpointStore
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.capabilities import long
from tests.chaos.rig import MakeRig, Rig, RigJob
from tests.chaos.workload import Net, body

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("ETRAIN_TORTURE", "10"))
EPOCHS = 3 * NUM_KILLS
PATIENCE_S = 120.0
KINDS = {"trainer": 5, "worker": 3, "everybody": 1, "scheduler": 1}
"""Relative frequency of each kind of victim."""
MOMENTS = {"saving": 7, "any": 3}
"""Relative frequency of each moment."""
SAVING_S = 10.0
"""Timeout for a save to begin, for kills while saving."""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the hang timeout: a slow store on a busy machine must not count as a hang."""
    monkeypatch.setenv("ETRAIN_HANG_S", "15")


def make_net(environment: dict[str, str]) -> Net:
    """Set the server's address in the trainers: the zygote started before the server."""
    os.environ.update(environment)
    return Net()


def paced_loss(flag: str, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sleep for the seconds in the flag file while it exists."""
    with suppress(FileNotFoundError):
        time.sleep(float(Path(flag).read_text()))
    return F.cross_entropy(output, target)


class Torture:
    """Kills random victims, each one right after the job has recovered from the previous kill.

    Args:
        make: Creates a cluster; called again for each scheduler that dies.
        keys: Keys of the job.
        store: Opens the job's checkpoint store.
        is_saving: Returns true while parts are stored or in flight without a manifest.
        seed: Random seed of victims and moments.
    """

    def __init__(
        self,
        make: Callable[[], AbstractAsyncContextManager[Rig]],
        keys: dict[str, Any],
        store: Callable[[RigJob], CheckpointStore],
        is_saving: Callable[[RigJob], bool],
        seed: int,
    ) -> None:
        self._make, self._keys = make, keys
        self._store, self._is_saving = store, is_saving
        self._random = random.Random(seed)
        self.num_killed = dict.fromkeys(KINDS, 0)
        self.num_while_saving = 0
        self._acknowledged: list[int] = []

    async def run(self, num_kills: int, before_end: Callable[[], None]) -> list[Event]:
        """Kill ``num_kills`` times, then wait for the job's end; return its log."""
        async with AsyncExitStack() as stack:
            rig = await stack.enter_async_context(self._make())
            job = await rig.submit(self._keys)
            self._log = LogReader(job.folder / "events.jsonl")
            plan = zip(self._draw(KINDS), self._draw(MOMENTS), strict=False)
            for kind, moment in itertools.islice(plan, num_kills):
                await self._await_moment(job, moment)
                await self._kill(kind, rig, job)
                self.num_killed[kind] += 1
                if kind == "scheduler":
                    await stack.aclose()
                    self._check_store(job)
                    rig = await stack.enter_async_context(self._make())
                    job = await rig.resume(job, self._keys)
            before_end()
            log = await job.end(PATIENCE_S)
            assert job.status == "finished", job.describe()
            self._check_store(job)
            return log

    def _draw(self, counts: dict[str, int]) -> Iterator[str]:
        """Yield keys in random order, each exactly with its frequency within a deck."""
        while True:
            deck = [kind for kind, count in counts.items() for _ in range(count)]
            self._random.shuffle(deck)
            yield from deck

    async def _await_moment(self, job: RigJob, moment: str) -> None:
        """Wait until the job has made progress since the last kill, and then for the moment."""
        begin = job.step
        self._has_committed()

        def has_got_on() -> bool:
            return job.step > begin and bool(job.ranks) and self._has_committed()

        await job.until(has_got_on, PATIENCE_S)
        assert not job.is_ended, "the job was too short"
        if moment == "saving":
            deadline = time.monotonic() + SAVING_S
            while not (found := self._is_saving(job)) and time.monotonic() < deadline:
                await asyncio.sleep(0.001)
            self.num_while_saving += found
        else:
            await asyncio.sleep(self._random.uniform(0, 0.2))

    def _has_committed(self) -> bool:
        """Return true if a checkpoint was acknowledged since the last call."""
        news = [event.step for event in self._log.read() if isinstance(event, CheckpointCommitted)]
        self._acknowledged += news
        return bool(news)

    async def _kill(self, kind: str, rig: Rig, job: RigJob) -> None:
        if kind == "scheduler":
            rig.crash(job)
        elif kind == "everybody":
            for worker in list(rig._workers):
                rig.kill(worker)
        elif kind == "worker":
            rig.kill(self._random.choice(list(rig._workers)))
        else:
            formed = job.found(GenerationFormed)[-1]
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(formed.trainer_pids), signal.SIGKILL)

    def _check_store(self, job: RigJob) -> None:
        """Assert that the newest checkpoint is at least the newest acknowledged one."""
        self._has_committed()
        newest = open_newest(self._store(job), job_id=job.id)
        assert newest.skipped == []
        assert newest.manifest.step >= max(self._acknowledged)


def digest(log: list[Event]) -> tuple[int, str]:
    """Return the last step whose weights were hashed, and their digest."""
    hashed = [e for e in log if isinstance(e, WeightsHashed)]
    last = max(e.step for e in hashed)
    [found] = {e.digest for e in hashed if e.step == last}
    return last, found


def assert_never_behind_the_newest_manifest(log: list[Event]) -> None:
    acknowledged = 0
    for event in log:
        if isinstance(event, CheckpointCommitted):
            acknowledged = max(acknowledged, event.step)
        elif isinstance(event, JobRestored):
            assert event.step >= acknowledged


def keys_of(flag: Path, environment: dict[str, str], **checkpoint: Any) -> dict[str, Any]:
    return body(
        model=functools.partial(make_net, environment),
        loss=functools.partial(paced_loss, str(flag)),
        checkpoint=checkpoint,
        epochs=EPOCHS,
        reproducible={"shards": 4},
        workers={"min": 1, "max": 3},
    )


async def assert_survives(
    torture: Torture, flag: Path, pace_s: float, undisturbed: dict[str, Any], other_rig: Any
) -> None:
    """Compare with an undisturbed job; passes take ``pace_s`` while processes are killed."""
    async with other_rig() as rig:
        job = await rig.submit(undisturbed)
        expected = digest(await job.end(PATIENCE_S))
    flag.write_text(str(pace_s))

    log = await torture.run(NUM_KILLS, flag.unlink)

    print(f"killed {torture.num_killed}, {torture.num_while_saving} while saving")
    assert len([e for e in log if isinstance(e, JobResumed)]) == torture.num_killed["scheduler"]
    assert [e for e in log if isinstance(e, WorkerLost)]
    assert_never_behind_the_newest_manifest(log)
    assert_invariants(log)
    assert digest(log) == expected
    assert torture.num_while_saving >= NUM_KILLS // 3


@long
async def test_local_checkpoints_survive_random_kills(
    zygote: Any, folder: Path, limits: None, make: MakeRig, tmp_path: Path
) -> None:
    new_rig, other_rig = (functools.partial(make, zygote, folder / name) for name in "ab")
    flag = tmp_path / "slow"
    keys = keys_of(flag, {}, every="2 steps", keep=3)

    def is_saving(job: RigJob) -> bool:
        begun = {path.name for path in (job.folder / "checkpoints").glob("*")}
        done = {path.stem for path in (job.folder / "manifests").glob("step_*.json")}
        return any(name[:13] not in done for name in begun)

    torture = Torture(new_rig, keys, lambda job: open_store(str(job.folder)), is_saving, seed=1)
    await assert_survives(torture, flag, 0.005, keys, other_rig)


@long
async def test_checkpoints_in_a_faulty_s3_survive_random_kills(
    zygote: Any,
    folder: Path,
    limits: None,
    make: MakeRig,
    tmp_path: Path,
    s3_server: S3Server,
    s3_bucket: str,
) -> None:
    new_rig, other_rig = (functools.partial(make, zygote, folder / name) for name in "ab")
    flag = tmp_path / "slow"
    to = {"to": f"s3://{s3_bucket}/runs", "every": "4 steps", "keep": 3}
    keys = keys_of(flag, dict(s3_server.environment), **to)
    quiet = keys | {"checkpoint": {"every": "1000 steps"}}
    s3_server.set_faults(
        S3Fault(kind="slow", seconds=0.01),
        S3Fault(kind="slow_down", every=17),
        S3Fault(kind="lose_answer", every=23),
        S3Fault(kind="spoil_upload", every=29, match="PUT "),
        S3Fault(kind="truncate", every=31, match="GET "),
    )

    def is_saving(job: RigJob) -> bool:
        before = s3_server.counts()["PUT"]
        time.sleep(0.03)
        return s3_server.counts()["PUT"] > before

    def store(job: RigJob) -> CheckpointStore:
        return open_store(f"s3://{s3_bucket}/runs/{job.id}")

    torture = Torture(new_rig, keys, store, is_saving, seed=2)
    await assert_survives(torture, flag, 0.04, quiet, other_rig)
