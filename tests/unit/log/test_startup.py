from __future__ import annotations

from typing import Any

from etrain_jupyter.log import events as t
from etrain_jupyter.log.job_record import JobRecord
from etrain_jupyter.log.startup import Startup
from tests.unit.log.spent import made


def event(kind: type[t.Event], time: float, **fields: Any) -> t.Event:
    return kind(job_id="j", time=time, **fields)


def submitted(time: float = 100.0, **fields: Any) -> t.Event:
    values: dict[str, Any] = {"name": "j", "min_workers": 2, "max_workers": 2, "pool_s": 3.0}
    return event(t.JobSubmitted, time, **{**values, **fields})


def step(time: float, number: int = 1) -> t.Event:
    return made(t.StepCompleted, job_id="j", time=time, step=number)


def warm_up(time: float, worker: str = "w1") -> list[t.Event]:
    """Return the events of a worker that takes 2, 3 and 4 s until it is warm."""
    reach = [event(t.WarmUpReached, time + 2, worker=worker, phase="build")]
    reach.append(event(t.WarmUpReached, time + 5, worker=worker, phase="trial"))
    joined = event(t.WorkerJoined, time, worker=worker)
    warmed = event(t.WorkerWarmed, time + 9, worker=worker, trainer_pid=1, warm_s=9.0)
    return [joined, *reach, warmed]


def fold(*events: t.Event) -> Startup:
    startup = Startup()
    for one in events:
        startup.apply(one)
    return startup


def table(startup: Startup) -> list[tuple[str, float | None]]:
    return [(stage.name, stage.took_s) for stage in startup.stages()]


def test_each_stage_ends_where_the_next_begins() -> None:
    startup = fold(submitted(), *warm_up(101.5), step(111.0))

    assert startup.is_over
    assert table(startup) == [
        *(("scheduler", 3.0), ("workers", 1.5), ("torch", 2.0), ("code and data", 3.0)),
        *(("trial pass", 4.0), ("first step", 0.5)),
    ]


def test_stages_that_have_not_begun_are_listed_in_advance() -> None:
    startup = fold(submitted(config={"compile": True}), event(t.WorkerJoined, 102.0, worker="w1"))

    assert not startup.is_over
    assert table(startup) == [
        *(("scheduler", 3.0), ("workers", 2.0), ("torch", None), ("code and data", None)),
        *(("trial pass", None), ("compile", None), ("first step", None)),
    ]
    assert [stage.since for stage in startup.stages()][2:4] == [102.0, None]


def test_first_worker_of_a_stage_counts_and_a_resume_starts_up_again() -> None:
    startup = fold(submitted(), *warm_up(101.0), *warm_up(103.0, "w2"), step(114.0), step(115.0, 2))
    assert table(startup)[1:] == [
        *(("workers", 1.0), ("torch", 2.0), ("code and data", 3.0), ("trial pass", 4.0)),
        ("first step", 4.0),
    ]

    resumed = {"from_status": "stopped", "step": 2, "min_workers": 1, "max_workers": 2}
    startup.apply(event(t.JobResumed, 200.0, **resumed))
    assert not startup.is_over
    assert table(startup)[:2] == [("workers", None), ("torch", None)]


def test_job_that_fails_before_its_first_step_has_started_up() -> None:
    failed = event(t.JobStatusChanged, 104.0, status="failed")

    startup = fold(submitted(), event(t.WorkerJoined, 101.0, worker="w1"), failed)

    assert startup.is_over
    assert table(startup)[2] == ("torch", 3.0)


def test_phase_is_new_until_a_trainer_has_begun_it() -> None:
    record = JobRecord().apply_all([submitted(), *(warm_up(101.0)[:2])])
    assert not record.startup.is_new("build")
    assert record.startup.is_new("trial")

    record.apply(step(111.0))
    assert not record.startup.is_new("trial"), "a worker that joins later does not start the job"
