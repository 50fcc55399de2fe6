"""The fold over a job's events: every reader of a log gets the same record."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest

from etrain_jupyter.log import events as t
from etrain_jupyter.log.blocks import Events, pack
from etrain_jupyter.log.job_record import NOT_BEGUN, JobRecord, TypeWork
from etrain_jupyter.notebook.job.history import LatestValues
from tests.unit.log.spent import NOTHING_ELSE, made
from tests.unit.rules.simulated.job import Job
from tests.unit.rules.simulated.schedule import Schedule

SEEDS = range(40)


@functools.cache
def simulated_jobs(seed: int) -> list[Job]:
    """Return the jobs of a random schedule of faults and requests, with their whole logs."""
    return Schedule(seed).play().jobs


def test_duration_continues_if_the_clock_is_set_back() -> None:
    record, common = JobRecord(), {"job_id": "j", "generation": 1}
    record.apply(t.JobSubmitted(**common, time=1000.0, name="n", min_workers=1, max_workers=1))
    for number, time in enumerate((1010.0, 1020.0, 1019.0, -2580.0, -2570.0), start=1):
        record.apply(made(t.StepCompleted, **common, time=time, step=number))
        # The clock of the scheduler's machine differs by more than a minute.
        record.apply(t.LogLine(**common, time=time + 500, level="info", worker="", text=""))

    assert record.last_step is not None
    assert record.last_step.time - record.started_at == 29.0
    assert record.attempt_at == record.started_at


def rough_log(job: Job, dice: random.Random) -> list[t.Event]:
    """Return the log of a simulated job with events in between that the simulation leaves out."""
    log: list[t.Event] = []
    step = 0
    for event in job.log:
        step = event.step if isinstance(event, t.StepCompleted) else step
        log.append(event)
        if dice.random() < 0.3:
            log.append(any_event(dice, step=step, time=event.time, generation=event.generation))
    return [event.with_seq(seq) for seq, event in enumerate(log, start=1)]


def any_event(dice: random.Random, *, step: int, **common: Any) -> t.Event:
    """Return a random event of a job that is at ``step``."""
    common["job_id"] = "j0"
    worker = f"w{dice.randint(1, 4)}"
    return dice.choice(
        [
            t.CheckpointCommitted(
                **common,
                step=max(0, step - dice.randint(0, 3)),
                manifest="m",
                size_bytes=1,
                stall_s=dice.random(),
                duration_s=0.1,
            ),
            t.BestReached(**common, step=step, metric="loss", value=dice.random()),
            t.EvalScored(
                **common, step=step, samples=8, duration_s=0.1, scores={"f1": dice.random()}
            ),
            t.CostUpdated(**common, spent_usd=dice.random(), on_demand_usd=1.0),
            t.PreemptionNoticed(**common, worker=worker, deadline=5.0),
            t.RebalanceRecommended(**common, worker=worker),
            t.WorkerJoined(**common, worker=worker, machine=dice.choice(("", "g5.xlarge"))),
            timed(worker, samples=dice.randint(1, 9), elapsed_s=2.0, waits_s=0.5, **common),
            t.EarlyStopped(
                **common,
                step=step,
                metric="loss",
                best=None,
                best_step=0,
                num_evals=1,
                reason="enough",
            ),
            t.JobResumed(
                **common,
                from_status="stopped",
                step=step,
                min_workers=1,
                max_workers=dice.randint(1, 5),
            ),
            t.JobRestored(**common, step=max(0, step - dice.randint(0, 4)), num_undone=1),
            t.JobStatusChanged(**common, status=dice.choice(("paused", "running", "waiting"))),
            t.WorkersScaled(**common, min_workers=1, max_workers=dice.randint(1, 9)),
            t.UnknownEvent(**common, name="FromTheFuture"),
        ]
    )


def timed(
    worker: str, *, samples: int, elapsed_s: float, waits_s: float, **common: Any
) -> t.RankTimed:
    return t.RankTimed(
        **common, worker=worker, rank=0, world_size=1, step=1, num_steps=1, samples=samples,
        elapsed_s=elapsed_s, communication_s=waits_s, data_s=0.0, compute_s=0.0, optimizer_s=0.0,
        **NOTHING_ELSE,
    )  # fmt: skip


def test_work_is_added_up_by_machine_type_without_waiting_for_others() -> None:
    common: dict[str, Any] = {"job_id": "j", "time": 1.0, "generation": 1}
    record = JobRecord().apply_all(
        [
            t.WorkerJoined(**common, worker="w1", machine="g5.xlarge"),
            t.WorkerJoined(**common, worker="w2", machine="g6.xlarge"),
            timed("w1", samples=30, elapsed_s=4.0, waits_s=1.0, **common),
            timed("w1", samples=10, elapsed_s=2.0, waits_s=1.0, **common),
            timed("w2", samples=5, elapsed_s=4.0, waits_s=0.0, **common),
        ]
    )
    assert record.work == {
        "g5.xlarge": TypeWork(samples=40, busy_s=4.0),
        "g6.xlarge": TypeWork(samples=5, busy_s=4.0),
    }


def picture(record: JobRecord) -> str:
    return repr([getattr(record, f.name) for f in dataclasses.fields(JobRecord)])


@pytest.mark.parametrize("seed", SEEDS)
def test_prefix_and_rest_give_the_record_of_the_whole_log(seed: int) -> None:
    dice = random.Random(seed)
    for job in simulated_jobs(seed):
        log = rough_log(job, dice)
        cut = dice.randint(0, len(log))

        whole, parts = JobRecord().apply_all(log), JobRecord().apply_all(log[:cut])

        assert picture(parts.apply_all(log[cut:])) == picture(whole)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_steps_give_the_record_of_their_single_events(seed: int) -> None:
    dice = random.Random(seed)
    for job in simulated_jobs(seed):
        log = rough_log(job, dice)
        blocks = Events()
        blocks.add_block(pack(log))

        single, packed = LatestValues(), LatestValues()
        for event in log:
            single.add([event])
        packed.add(blocks)

        assert picture(packed) == picture(single)
        assert repr(packed.columns()) == repr(single.columns())


@pytest.mark.parametrize("seed", SEEDS)
def test_log_gives_the_record_that_the_coordinator_had(seed: int) -> None:
    """The coordinator also knows the start of a generation before the log shows it."""
    for job in simulated_jobs(seed):
        read = JobRecord().apply_all(job.log)

        pairs = zip(read.starts, job.record.starts, strict=True)
        assert all(start in (known, NOT_BEGUN) for start, known in pairs)
        fields = {f.name for f in dataclasses.fields(JobRecord)} - {"_starts"}
        for name in fields:
            assert repr_without_seq(read, name) == repr_without_seq(job.record, name), name
        assert (read.status, read.generation) == (job.state.status, job.state.generation)


def repr_without_seq(record: JobRecord, name: str) -> str:
    value = getattr(record, name)
    return repr(value.with_seq(0) if isinstance(value, t.Event) else value)


def event(kind: type[t.Event], **values: Any) -> t.Event:
    return kind(**({"job_id": "j", "time": 1.0} | values))


def formed(generation: int, step: int) -> t.Event:
    return made(t.GenerationFormed, job_id="j", generation=generation, ranks=["w1"], step=step)


def committed(step: int, generation: int = 1) -> t.Event:
    values = {"samples": 4, "samples_per_s": 8.0}
    return made(t.StepCompleted, job_id="j", generation=generation, step=step, **values)


def test_restore_undoes_everything_after_its_step() -> None:
    record = JobRecord().apply_all(
        [
            formed(1, 0),
            committed(1),
            committed(2),
            event(t.BestReached, step=1, metric="loss", value=0.5),
            event(t.BestReached, step=2, metric="loss", value=0.4),
            event(t.EvalScored, step=2, samples=8, duration_s=0.1, scores={"f1": 0.5}),
            event(t.JobRestored, generation=1, step=1, num_undone=1),
        ]
    )

    assert (record.step, record.logged_step, record.starts) == (1, 1, [0])
    assert [best.step for best in record.best] == [1]
    assert (record.scored_steps, record.metrics["eval_f1"]) == (set(), 0.5)
    assert record.best_reported is None, "rank 0 reports again which evaluation is the best"


def test_checkpoint_ahead_of_the_log_advances_the_step_but_not_the_logged_step() -> None:
    record = JobRecord().apply_all(
        [formed(1, 0), committed(1), event(t.JobRestored, generation=1, step=3, num_undone=0)]
    )

    assert (record.step, record.logged_step) == (3, 1)


def test_huge_generation_number_uses_no_extra_memory() -> None:
    record = JobRecord().apply(formed(10**15, 0))

    assert record.generation == 10**15


def test_resume_begins_another_attempt_at_its_own_time_and_step() -> None:
    common = {"job_id": "j", "min_workers": 1, "max_workers": 2}
    submitted = t.JobSubmitted(**common, time=5.0, name="digits")  # type: ignore[arg-type]
    resumed = t.JobResumed(**common, time=90.0, from_status="stopped", step=40)  # type: ignore[arg-type]

    record = JobRecord().apply(submitted.with_seq(1))
    assert (record.attempt_at, record.attempt_step) == (5.0, 0)
    record.apply(resumed.with_seq(2))

    assert (record.started_at, record.attempt_at, record.attempt_step) == (5.0, 90.0, 40)
