"""Soak test: threads, file descriptors and memory do not grow over many generations."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.head.jobs import job_log
from etrain_jupyter.log.events import GenerationFormed, WorkerLost
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long, only_in_endurance
from tests.chaos.forks import Zygote
from tests.chaos.rig import RigJob, make_rig
from tests.chaos.workload import body

COLLECTIVE_TIMEOUT_S = 20.0
"""For these trainers; 30 min in the product. Until then gloo keeps a thread for some sends."""
SETTLE_S = COLLECTIVE_TIMEOUT_S + 10
"""Timeout until the background threads of a generation must have exited."""
LAZY_THREADS = 1
"""Threads that a trainer starts when first needed: the one that writes its checkpoints."""
KEEP_RECORDS = 500
"""Records that these ranks keep, so that the buffer is full early; 10,000 in the product."""

GROWTH_BYTES = 8 << 20
"""Allowed growth after the first fifth of the run: allocators and caches fill during the first
thousand steps, about 6 MB in a trainer."""
GROWTH_BYTES_PER_FORM = 4 << 10
"""Additional growth per generation; a group that is not freed takes a hundred times as much."""


@dataclass(frozen=True)
class Size:
    """Resources of one process."""

    threads: int
    descriptors: int
    memory: int


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Provide a zygote whose trainers reach their bounds early."""
    made = Zygote(keep_records=KEEP_RECORDS, collective_timeout_s=COLLECTIVE_TIMEOUT_S)
    yield made
    made.close()


@pytest.mark.timeout(600)  # its own zygote imports torch first
@long
async def test_sixty_generations_leak_no_resources(
    zygote: Zygote, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await soak(zygote, folder, monkeypatch, num_forms=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@only_in_endurance("ETRAIN_SOAK")
async def test_a_thousand_generations_leak_no_resources(
    zygote: Zygote, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await soak(zygote, folder, monkeypatch, num_forms=1000)


async def soak(zygote: Zygote, folder: Path, patch: pytest.MonkeyPatch, *, num_forms: int) -> None:
    """Form ``num_forms`` generations; compare each process with its size early in the run."""
    # The coordinator keeps this many events in memory by design; fill that buffer early.
    patch.setattr(job_log, "RECENT_EVENTS", 100)
    async with make_rig(zygote, folder, slots=3) as rig:
        job = await rig.submit(body(epochs=100_000, workers={"min": 1, "max": 3}))
        await job.until(lambda: len(job.ranks) == 3)
        pids = job.found(GenerationFormed)[-1].trainer_pids
        await form_often(job, num_forms // 5)
        before = await measure(job, [*pids[:2], os.getpid()])
        await form_often(job, num_forms)
        after = await measure(job, [*pids[:2], os.getpid()], like=before)
        await job.request("stop")
        log = await job.end()
    assert job.status == "stopped"
    assert_invariants(log)
    assert sum(isinstance(e, GenerationFormed) for e in log) >= num_forms
    allowed = GROWTH_BYTES + num_forms * GROWTH_BYTES_PER_FORM
    for pid, size in after.items():
        who = "the coordinator's process" if pid == os.getpid() else f"trainer {pid}"
        assert size.threads <= before[pid].threads + LAZY_THREADS, f"{who}: {before[pid]} -> {size}"
        assert size.descriptors <= before[pid].descriptors, f"{who}: {before[pid]} -> {size}"
        assert size.memory - before[pid].memory <= allowed, f"{who}: {before[pid]} -> {size}"


async def form_often(job: RigJob, num_forms: int) -> None:
    """Alternate planned and aborted generations until the given number is reached."""
    changes = (pause_and_resume, disconnect, scale_down, disconnect, scale_up)
    while job.hosted.state.generation < num_forms:
        for change in changes:
            await change(job)


async def pause_and_resume(job: RigJob) -> None:
    await job.request("pause")
    await job.until(lambda: job.status == "paused")
    await job.request("resume")
    await stepping(job, len(job.hosted.state.assigned))


async def disconnect(job: RigJob) -> None:
    """Break a rank's connections: the generation is aborted, but no worker is lost."""
    before = job.hosted.state
    victim = job.ranks[before.generation % len(job.ranks)]
    await job.request("fault", worker=victim, kind="disconnect")
    await job.until(lambda: job.hosted.state.generation > before.generation)
    await stepping(job, len(before.assigned))


async def scale_down(job: RigJob) -> None:
    await job.request("scale", max=2)
    await stepping(job, 2)


async def scale_up(job: RigJob) -> None:
    await job.request("scale", max=3)
    await stepping(job, 3)


async def stepping(job: RigJob, world_size: int) -> None:
    """Wait until a generation of that size has completed a step."""
    await job.until(lambda: len(job.ranks) == world_size)
    goal = job.step + 1
    await job.until(lambda: job.step >= goal)


async def measure(
    job: RigJob, pids: list[int], *, like: dict[int, Size] | None = None
) -> dict[int, Size]:
    """Return the sizes of these processes while the job is paused and idle."""
    await job.request("pause")
    await job.until(lambda: job.status == "paused")
    assert job.found(WorkerLost) == [], job.describe()
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        sizes = {pid: size_of(pid) for pid in pids}
        if like and all(not is_more(sizes[pid], like[pid]) for pid in pids):
            break
    await job.request("resume")
    await job.until(lambda: job.status == "running")
    return sizes


def is_more(size: Size, before: Size) -> bool:
    return size.threads > before.threads + LAZY_THREADS or size.descriptors > before.descriptors


def size_of(pid: int) -> Size:
    gc.collect()
    process = psutil.Process(pid)
    memory = process.memory_full_info().uss
    return Size(process.num_threads(), process.num_fds(), memory)
