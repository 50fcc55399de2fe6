"""Elastic churn over shards in S3 while the store throttles, fails and cuts connections.

The faults of the store, the kills, notices and joins must not change the result: the audit finds
each sample exactly once per epoch, and the weights are those of a calm run, bit for bit.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.log.events import (
    Event,
    FaultInjected,
    GenerationFormed,
    JobPlanned,
    StepCompleted,
    WeightsHashed,
)
from etrain_jupyter.testing import FaultPlan
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.capabilities import long
from tests.chaos.forks import Zygote
from tests.chaos.rig import make_rig
from tests.chaos.schedule import Act, Schedule, play
from tests.chaos.workload import NUM_SAMPLES, STEPS_PER_EPOCH, body

pytestmark = [
    pytest.mark.aws,
    pytest.mark.timeout(600),
    pytest.mark.forked(always=True),
]

EPOCHS = 2
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
BLOCK_BYTES = 800
"""Size of a block of about 20 rows. The set has a dozen, and a window a part of them."""
PATIENCE_S = 240.0

STORE_FAULTS = (
    S3Fault(kind="slow", seconds=0.02, match="GET "),
    S3Fault(kind="slow_down", every=5, match="GET "),
    S3Fault(kind="internal_error", every=7, match="GET "),
    S3Fault(kind="reset", every=9, match="GET "),
    S3Fault(kind="truncate", every=11, match="part-"),
)

CHURN = Schedule(
    slots=4,
    plan=FaultPlan()
    .kill(rank=1, step=7)
    .notice(rank=0, step=15)
    .kill(rank=0, step=29, at="eval")
    .kill_worker(rank=1, step=40),
    acts=(Act(20, "scale", (("max", 2),)), Act(33, "scale", (("max", 4),))),
)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the hang timeout: a store that fails repeatedly must not count as a hang."""
    monkeypatch.setenv("ETRAIN_HANG_S", "30")


@pytest.fixture
def corpus(s3_server: S3Server, s3_bucket: str) -> str:
    """Provide the address of a set in the bucket."""
    x = np.random.default_rng(3).standard_normal((NUM_SAMPLES, 8)).astype(np.float32)
    columns = {"x": x, "label": (x.sum(axis=1) > 0).astype(np.int64)}
    url = f"s3://{s3_bucket}/train"
    write_shards(columns, url, block_bytes=BLOCK_BYTES, progress=False)
    return url


def open_corpus(environment: dict[str, str], url: str, cache: str) -> Shards:
    """Set the server's address in the trainers: the zygote started before the server."""
    os.environ.update(environment)
    return Shards(url, window=4, cache_dir=cache)


async def run(
    zygote: Zygote,
    folder: Path,
    server: S3Server,
    corpus: str,
    schedule: Schedule,
    min_workers: int = 1,
) -> list[Event]:
    """Run a job under a schedule, with a cache of its own, and return its log."""
    data = functools.partial(open_corpus, dict(server.environment), corpus, str(folder / "cache"))
    keys: dict[str, Any] = {
        "data": {"train": data, "eval": data},
        "reproducible": {"shards": 4},
        "epochs": EPOCHS,
        "workers": {"min": min_workers, "max": 4},
    }
    async with make_rig(zygote, folder, slots=schedule.slots) as rig:
        job = await rig.submit(body(**keys), faults=schedule.plan.to_list())
        await play(rig, job, schedule)
        log = await job.end(PATIENCE_S)
        assert job.status == "finished", job.describe()
    assert_invariants(log)
    return log


def final_digest(log: list[Event]) -> str:
    [digest] = {e.digest for e in log if isinstance(e, WeightsHashed) and e.step == NUM_STEPS}
    return digest


async def assert_same_as_calm(
    zygote: Zygote,
    folder: Path,
    server: S3Server,
    corpus: str,
    schedule: Schedule,
    min_workers: int = 1,
) -> list[Event]:
    """Compare the weights after a schedule and faults of the store with those of a calm run."""
    calm = await run(zygote, folder / "calm", server, corpus, Schedule(slots=1))
    server.set_faults(*STORE_FAULTS)
    log = await run(zygote, folder / "churn", server, corpus, schedule, min_workers)
    counts = server.counts()
    for fault in STORE_FAULTS:
        assert counts[fault.kind], f"{fault.kind} never happened: {counts}"
    [planned] = [e for e in log if isinstance(e, JobPlanned)]
    assert planned.train_layout == Shards(corpus, window=4).layout.encode()
    assert final_digest(log) == final_digest(calm)
    return log


async def test_churn_over_a_faulty_store_leaves_the_weights_of_a_calm_run(
    zygote: Zygote, folder: Path, s3_server: S3Server, corpus: str, patient: None
) -> None:
    # With two workers at least, both ranks that the plan names always exist.
    log = await assert_same_as_calm(zygote, folder, s3_server, corpus, CHURN, min_workers=2)

    assert {e.fault for e in log if isinstance(e, FaultInjected)} >= {"kill", "notice"}
    # Each fault is at another step, and ends a generation; a rank may be killed after its notice.
    formed = [e for e in log if isinstance(e, GenerationFormed)]
    assert len(formed) >= len(CHURN.plan.faults)
    assert min(e.world_size for e in log if isinstance(e, StepCompleted)) >= 2


@long
@pytest.mark.parametrize("seed", range(25))
async def test_random_churn_over_a_faulty_store_leaves_the_weights_of_a_calm_run(
    zygote: Zygote, folder: Path, s3_server: S3Server, corpus: str, patient: None, seed: int
) -> None:
    schedule = Schedule.random(seed, num_steps=NUM_STEPS)
    try:
        await assert_same_as_calm(zygote, folder, s3_server, corpus, schedule)
    except BaseException as exc:
        exc.add_note(f"seed {seed}: {schedule}")
        raise
