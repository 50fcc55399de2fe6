"""Out-of-memory recovery, ``micro: auto`` and ``compile: true`` on real processes."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    JobRestored,
    LogLine,
    StepCompleted,
    StepUndone,
    WorkerLost,
    WorkerWarmed,
)
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long, needs
from tests.chaos.rig import Rig
from tests.chaos.workload import Net, body

BATCH = 32
STEPS_PER_EPOCH = 8  # the last one has 6 samples
AUTO = {"batch": {"global": BATCH, "micro": "auto"}, "workers": {"min": 2, "max": 2}}


class SmallMemory(Net):
    """A model with a simulated memory limit, in samples per pass, for each trainer."""

    def __init__(self, folder: str, *, limits: tuple[int, ...], after: int = 0) -> None:
        super().__init__()
        self.limit = limits[number_of_process(folder)]
        self.after = after
        """Number of large passes before the limit applies."""
        self.num_passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_passes += self.training and len(x) >= self.limit
        if len(x) > self.limit and self.num_passes > self.after:
            raise torch.OutOfMemoryError(f"no memory for {len(x)} samples")
        return super().forward(x)


def number_of_process(folder: str) -> int:
    """Return the rank of this process in the order of the first call: 0, 1, ..."""
    for number in range(100):
        try:
            with open(f"{folder}/process-{number}", "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            if Path(f"{folder}/process-{number}").read_text() == str(os.getpid()):
                return number
        else:
            return number
    raise AssertionError("more than 100 processes")


@pytest.mark.forked
async def test_workers_with_different_memory_use_different_micro_batches(
    rig: Rig, folder: Path
) -> None:
    model = functools.partial(SmallMemory, str(folder), limits=(3, 10))
    job = await rig.submit(body(model=model, **AUTO))
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert found(log, StepUndone) == []
    assert sorted(re.findall(r"auto: (\d+) of 32 samples", log_text(log))) == ["10", "3"]


@long
async def test_later_out_of_memory_error_costs_one_step_and_halves_the_micro_batch(
    rig: Rig, folder: Path
) -> None:
    # Only the first process runs out of memory, in the middle of the second epoch.
    model = functools.partial(SmallMemory, str(folder), limits=(9, 1000), after=12)
    job = await rig.submit(body(model=model, **AUTO))
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert re.findall(r"auto: (\d+) of 32 samples", log_text(log)) == ["32", "32"]
    assert re.findall(r"are reduced to (\d+)", log_text(log)) == ["16", "8"]
    assert len(found(log, StepUndone)) == 2
    assert_no_worker_was_lost(log)
    assert len(found(log, StepCompleted)) == 3 * STEPS_PER_EPOCH


class ShortInStep(torch.optim.SGD):
    """Runs out of memory in the middle of its ``at``-th update, once per process."""

    def __init__(self, folder: str, count: int, at: int, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        number = number_of_process(folder)
        self.mark = Path(f"{folder}/short-{number}")
        self.at = at if number < count else -1
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == self.at and not self.mark.exists():
            self.mark.touch()
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(os.getpid())  # different on each rank
            raise torch.OutOfMemoryError("no memory for the state")
        super().step()


@pytest.mark.forked
@pytest.mark.parametrize(("num_workers", "num_short", "at"), [(1, 1, 12), (2, 1, 12), (2, 2, 1)])
async def test_out_of_memory_error_in_an_update_leaves_no_half_updated_weights(
    rig: Rig, folder: Path, num_workers: int, num_short: int, at: int
) -> None:
    keys = {**AUTO, "workers": {"min": num_workers, "max": num_workers}}
    keys["checkpoint"] = {"every": "1 epoch"}
    optimizer = functools.partial(ShortInStep, str(folder), num_short, at)
    job = await rig.submit(body(optimizer=optimizer, **keys))
    log = await job.end()

    assert job.status == "finished", job.describe()
    assert_invariants(log)
    assert log_text(log).count("are reduced to 16") == num_short
    if (num_workers, at) == (1, 12):
        # No other rank has the state, so the job restores the checkpoint of the first epoch.
        assert len(found(log, WorkerLost)) == 1
        assert [(e.step, e.num_undone) for e in found(log, JobRestored)] == [(STEPS_PER_EPOCH, 3)]
    else:
        assert found(log, WorkerLost) == []
        assert sum(e.num_undone for e in found(log, JobRestored)) == 0


@pytest.mark.forked
async def test_out_of_memory_error_without_auto_fails_the_job_and_suggests_auto(
    rig: Rig, folder: Path
) -> None:
    model = functools.partial(SmallMemory, str(folder), limits=(9, 9), after=12)
    job = await rig.submit(body(model=model, **{**AUTO, "batch": {"global": BATCH}}))
    await job.end()

    assert job.status == "failed"
    assert "OutOfMemoryError: no memory for" in job.hosted.state.reason
    assert "write batch: {micro: auto}" in job.hosted.state.reason


@pytest.mark.forked
async def test_model_with_no_memory_for_one_sample_fails_before_training(
    rig: Rig, folder: Path
) -> None:
    model = functools.partial(SmallMemory, str(folder), limits=(0, 0))
    job = await rig.submit(body(model=model, **AUTO))
    log = await job.end()

    assert job.status == "failed"
    assert re.search(r"not even one sample fits .* GiB free", job.hosted.state.reason)
    assert found(log, StepCompleted) == []


# --- compile: true ---


class CountsEagerCalls(Net):
    """Records each call that is not compiled."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            note(f"{self.folder}/eager", len(x))
        return super().forward(x)


def note(path: str, count: int) -> None:
    with open(path, "a") as file:
        file.write(f"{os.getpid()} {count}\n")


@pytest.mark.forked
@needs("compiler")
@long
async def test_compiled_job_replaces_a_lost_rank_while_the_survivor_trains(
    rig: Rig, folder: Path
) -> None:
    keys = {"batch": {"global": BATCH}, "workers": {"min": 1, "max": 2}, "epochs": 10_000}
    model = functools.partial(CountsEagerCalls, str(folder))
    faults = FaultPlan().kill(rank=1, step=12)
    job = await rig.submit(body(model=model, compile=True, **keys), faults=faults.to_list())
    await job.until(lambda: len(job.ranks) == 2 and len(job.found(WorkerLost)) == 1, 120)
    at = job.step
    await job.until(lambda: job.step > at + 2 * STEPS_PER_EPOCH)
    await job.request("stop", now=False)
    log = await job.end()

    assert job.status == "stopped", job.describe()
    assert_invariants(log)
    assert len(re.findall("the model was compiled", log_text(log))) == 3, log_text(log)
    # Each trainer runs only its first pass, in the warm-up, eagerly. All others are compiled: alone
    # and with DDP, full and smaller steps, training and evaluation.
    calls = [line.split() for line in (folder / "eager").read_text().splitlines()]
    assert len(calls) == 3, calls
    assert set(Counter(pid for pid, _ in calls).values()) == {1}
    # The survivor trained while the new rank compiled.
    lost_at, warm_at = found(log, WorkerLost)[0].time, found(log, WorkerWarmed)[-1].time
    assert [e for e in found(log, StepCompleted) if lost_at < e.time < warm_at]


def log_text(log: list[Event]) -> str:
    return "\n".join(e.text for e in found(log, LogLine))


def found(log: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in log if isinstance(event, kind)]


def assert_no_worker_was_lost(log: list[Event]) -> None:
    assert found(log, WorkerLost) == []
    assert found(log, JobRestored) == []
    assert len({frozenset(e.trainer_pids) for e in found(log, GenerationFormed)}) == 1
