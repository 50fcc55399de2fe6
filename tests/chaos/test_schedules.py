"""Random schedules of faults and requests on real processes must not change the results."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from etrain_jupyter.log.events import Event, FaultInjected, WeightsHashed, WorkerLost
from etrain_jupyter.testing.invariants import assert_invariants
from tests.chaos.forks import Zygote
from tests.chaos.rig import make_rig
from tests.chaos.schedule import Schedule, play
from tests.chaos.workload import STEPS_PER_EPOCH, body

pytestmark = [pytest.mark.timeout(600), pytest.mark.forked(always=True)]

EPOCHS = 2
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
NUM_SCHEDULES = int(os.environ.get("ETRAIN_CHAOS_SCHEDULES", "0"))
"""Total number of schedules, half of them reproducible; ``make endurance`` runs 500."""
BLOCK = 25
NUM_DEFAULT, NUM_REPRODUCIBLE = 6, 4
"""Schedules of each kind in the ordinary suite; each takes a few seconds."""

REPRODUCIBLE = {"reproducible": {"shards": 4}}
PATIENCE_S = 90.0


async def run(zygote: Zygote, folder: Path, schedule: Schedule, **keys: object) -> list[Event]:
    """Run a job under a schedule to its end and return the log."""
    async with make_rig(zygote, folder, slots=schedule.slots) as rig:
        job = await rig.submit(body(**keys), faults=schedule.plan.to_list())
        await play(rig, job, schedule)
        log = await job.end(PATIENCE_S)
        assert job.status == "finished", job.describe()
    assert not zygote.living
    return log


async def check(zygote: Zygote, folder: Path, seed: int, **keys: object) -> list[Event]:
    """Run the schedule of a seed and assert the invariants that hold for every schedule."""
    schedule = Schedule.random(seed, num_steps=NUM_STEPS)
    try:
        log = await run(zygote, folder / str(seed), schedule, **keys)
        assert_invariants(log)
        assert_only_culprits_were_lost(log)
    except BaseException as exc:
        exc.add_note(f"seed {seed}: {schedule}")
        raise
    return log


def assert_only_culprits_were_lost(log: list[Event]) -> None:
    """Assert that every lost worker had an injected fault."""
    suffered = Counter(e.worker for e in log if isinstance(e, FaultInjected))
    lost = Counter(e.worker for e in log if isinstance(e, WorkerLost))
    assert not lost - suffered, (
        f"lost {dict(lost)}, but faults were injected only into {dict(suffered)}"
    )


def final_digests(log: list[Event]) -> set[str]:
    return {e.digest for e in log if isinstance(e, WeightsHashed) and e.step == NUM_STEPS}


def blocks(num_in_suite: int) -> list[object]:
    """Return ranges of seeds: single seeds for the ordinary suite, then blocks marked slow."""
    start, num = num_in_suite, NUM_SCHEDULES // 2
    slow = [range(first, min(first + BLOCK, num)) for first in range(start, num, BLOCK)]
    return [
        *(pytest.param(range(seed, seed + 1), id=str(seed)) for seed in range(start)),
        *(pytest.param(r, id=f"{r.start}-{r.stop - 1}", marks=pytest.mark.slow) for r in slow),
    ]


@pytest.fixture(scope="module")
def calm() -> set[str]:
    """Cache the final digest of an undisturbed run."""
    return set()


@pytest.mark.parametrize("seeds", blocks(NUM_DEFAULT))
async def test_every_sample_is_trained_once_under_a_random_schedule(
    zygote: Zygote, folder: Path, limits: None, seeds: range
) -> None:
    for seed in seeds:
        await check(zygote, folder, seed, epochs=EPOCHS)


@pytest.mark.parametrize("seeds", blocks(NUM_REPRODUCIBLE))
async def test_reproducible_weights_are_bitwise_equal_under_a_random_schedule(
    zygote: Zygote, folder: Path, limits: None, calm: set[str], seeds: range
) -> None:
    if not calm:
        undisturbed = Schedule(slots=1)
        log = await run(zygote, folder / "calm", undisturbed, epochs=EPOCHS, **REPRODUCIBLE)
        calm |= final_digests(log)
        assert len(calm) == 1
    for seed in seeds:
        log = await check(zygote, folder, seed + 1_000, epochs=EPOCHS, **REPRODUCIBLE)
        assert final_digests(log) == calm, f"seed {seed + 1_000}"


def test_schedule_is_determined_by_its_seed_and_prints_as_code() -> None:
    from etrain_jupyter.testing import FaultPlan  # noqa: F401  (used by eval)
    from tests.chaos.schedule import Act  # noqa: F401

    for seed in range(200):
        schedule = Schedule.random(seed, num_steps=NUM_STEPS)
        assert schedule == Schedule.random(seed, num_steps=NUM_STEPS)
        assert eval(str(schedule)) == schedule
