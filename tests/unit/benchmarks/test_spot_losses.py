"""Test the attribution of lost goodput to causes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cloud.spot_losses import (
    CAUSES,
    DayMachine,
    DayRecord,
    Interruption,
    Moment,
    full_rate,
    moments_of,
    quantized_rates,
    split_losses,
)
from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    GenerationReady,
    StepCompleted,
    WorkerJoined,
    WorkerWarmed,
)
from tests.unit.log.spent import PLAIN_STEP

RATES = quantized_rates(16, 2)
LINEAR = (0.0, 1.0, 2.0, 3.0, 4.0)


@given(
    moments=st.lists(
        st.builds(
            Moment,
            seconds=st.floats(0.1, 10.0),
            allowed=st.integers(0, 4),
            training=st.integers(0, 4),
            waiting=st.dictionaries(st.sampled_from([*CAUSES]), st.integers(0, 3)),
            otherwise=st.sampled_from(("back_off", "request")),
        ),
        min_size=1,
        max_size=8,
    ),
    goodput=st.floats(0.0, 1.0),
)
def test_causes_add_up_to_the_difference(moments: list[Moment], goodput: float) -> None:
    losses = split_losses(moments, rates=LINEAR, goodput=goodput)

    assert sum(losses.by_cause.values()) == pytest.approx(losses.allowed - goodput, abs=1e-9)
    slow = losses.by_cause["slow_steps"]
    assert losses.trained_by_allowed * losses.allowed == pytest.approx(
        (goodput + slow) if losses.allowed else 0.0, abs=1e-9
    )
    negative = {cause for cause, share in losses.by_cause.items() if share < -1e-12}
    assert negative <= {"beyond", "slow_steps"}


def test_missing_workers_without_a_machine_are_attributed_to_the_back_off() -> None:
    moment = Moment(seconds=1.0, allowed=4, training=1, waiting={"boot": 1}, otherwise="back_off")
    losses = split_losses([moment], rates=LINEAR, goodput=0.25)

    assert losses.by_cause["boot"] == 0.25
    assert losses.by_cause["back_off"] == 0.5
    assert losses.by_allowed == 0.25


# --- a day of two machines, one of which is replaced ---


def joined(worker: str, at: float) -> WorkerJoined:
    return WorkerJoined(job_id="j", time=at, worker=worker)


def warmed(worker: str, at: float) -> WorkerWarmed:
    return WorkerWarmed(job_id="j", time=at, worker=worker, trainer_pid=1, warm_s=1.0)


def generation(number: int, formed_at: float, ranks: list[str], *steps: float) -> list[Event]:
    """Return a generation that connects in 0.25 s and transfers the state in 0.25 s."""
    world = len(ranks)
    values: dict[str, Any] = dict(epoch=0, first=0, samples=1, sample_checksum=0, loss=0.0, lr=0.1)
    return [
        GenerationFormed(
            job_id="j", time=formed_at, generation=number, why="x", world_size=world, ranks=ranks,
            backend="gloo",
        ),
        GenerationReady(
            job_id="j", time=formed_at + 0.5, generation=number, world_size=world,
            connect_s=0.25, sync_s=0.25, wrap_s=0.0,
        ),
        *(
            StepCompleted(
                job_id="j", time=at, generation=number, step=int(10 * at), world_size=world,
                samples_per_s=1.0, **values, **PLAIN_STEP,
            )
            for at in steps
        ),
    ]  # fmt: skip


def lost_of(record: DayRecord, goodput: float = 0.0) -> dict[str, float]:
    """Return the seconds of one worker by cause; the workers together make 2 per second."""
    losses = split_losses(moments_of(record), rates=RATES, goodput=goodput)
    factor = 2 * (record.end - record.begin)
    found = {cause: share * factor for cause, share in losses.by_cause.items()}
    return {cause: pytest.approx(s) for cause, s in found.items() if abs(s) > 1e-9}


EVENTS = [
    *(joined(name, 0.0) for name in ("a", "b")),
    *(warmed(name, 0.0) for name in ("a", "b")),
    *generation(1, 0.0, ["a", "b"], 1.0, 12.0),
    *generation(2, 12.5, ["a"], 14.0, 26.0),
    joined("c", 22.0),
    warmed("c", 24.0),
    *generation(3, 26.5, ["a", "c"], 28.0, 40.0),
]


def test_every_phase_of_a_replacement_is_found() -> None:
    # b is noticed at 10, leaves at 12 and is reclaimed at 18; c is requested at 16.
    record = DayRecord(
        begin=10.0,
        end=40.0,
        max_workers=2,
        capacities=[(0.0, "z", 2), (10.0, "z", 1), (15.0, "z", 2)],
        machines=[
            DayMachine(id="a", zone="z", launched_at=-9.0),
            DayMachine(id="b", zone="z", launched_at=-9.0, ended_at=18.0),
            DayMachine(id="c", zone="z", launched_at=19.0),
        ],
        interruptions=[Interruption(id="b", at=10.0, notice_at=10.0, ends_at=18.0)],
        events=EVENTS,
        back_offs=[(0.0, frozenset()), (18.0, frozenset({"z"})), (18.5, frozenset())],
    )
    found = lost_of(record)
    found.pop("slow_steps")
    assert found == {
        "boundary": 1.0,  # a: 12 to 12.5, and 26 to 26.5
        "connect": 0.5,
        "transfer": 0.5,
        "draining": 6.0,  # b: 12 to 18
        "back_off": 0.5,  # 18 to 18.5
        "request": 0.5,  # 18.5 to 19
        "boot": 3.0,
        "warm_up": 2.0,
        "admission": 3.0,  # 24 to 27
    }


def test_time_without_capacity_is_not_lost() -> None:
    record = DayRecord(
        begin=0.5,
        end=40.0,
        max_workers=2,
        capacities=[(0.0, "z", 2), (12.0, "z", 1), (27.0, "z", 2)],
        machines=[
            DayMachine(id="a", zone="z", launched_at=-9.0),
            DayMachine(id="b", zone="z", launched_at=-9.0, ended_at=12.0),
            DayMachine(id="c", zone="z", launched_at=19.0),
        ],
        interruptions=[Interruption(id="b", at=12.0, notice_at=12.0, ends_at=12.0)],
        events=EVENTS,
    )
    found = lost_of(record)
    found.pop("slow_steps")
    assert found == {"boundary": 1.0, "connect": 0.5, "transfer": 0.5}


def test_undisturbed_rate_is_the_median_at_full_size() -> None:
    events = [
        *generation(1, 0.0, ["a", "b"], 1.0, 1.5, 2.0, 2.5, 9.5),
        *generation(2, 10.0, ["a"], 11.0, 12.0, 13.0),
    ]
    assert full_rate(events, world_size=2, begin=0.0, end=20.0) == 2.0
    assert full_rate(events, world_size=1, begin=0.0, end=20.0) == 1.0
    assert full_rate(events, world_size=1, begin=0.0, end=9.9) == 0.0


def test_ranks_train_nothing_while_a_lost_machine_is_not_detected() -> None:
    record = DayRecord(
        begin=1.0,
        end=12.0,
        max_workers=2,
        capacities=[(0.0, "z", 2)],
        machines=[
            DayMachine(id="a", zone="z", launched_at=-9.0),
            DayMachine(id="b", zone="z", launched_at=-9.0, ended_at=11.0),
        ],
        interruptions=[Interruption(id="b", at=11.0, notice_at=11.0, ends_at=11.0)],
        events=EVENTS,
    )
    found = lost_of(record)
    found.pop("slow_steps")
    assert found == {"boundary": 1.0, "request": 1.0}
