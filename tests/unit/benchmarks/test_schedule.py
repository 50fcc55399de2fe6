"""Test the kill schedule of ``churn``."""

from __future__ import annotations

import pytest

from benchmarks.common.schedule import kill_schedule


def test_kills_are_spread_over_the_run_and_over_the_checkpoint_interval() -> None:
    kills = kill_schedule(num_steps=1000, checkpoint_every=50, world_size=4)

    assert [kill.step for kill in kills] == [210, 420, 630, 840]
    assert sum(kill.step % 50 for kill in kills) / len(kills) == 25


def test_schedule_is_deterministic() -> None:
    schedules = [kill_schedule(num_steps=500, checkpoint_every=50, world_size=4) for _ in range(2)]

    assert schedules[0] == schedules[1]
    assert {kill.rank for kill in schedules[0]} <= {0, 1, 2, 3}


@pytest.mark.parametrize(("num_steps", "every"), [(100, 20), (250, 50), (1600, 400)])
def test_every_kill_is_within_the_run(num_steps: int, every: int) -> None:
    kills = kill_schedule(num_steps=num_steps, checkpoint_every=every, world_size=2)

    assert all(0 < kill.step < num_steps for kill in kills)
    assert [kill.step for kill in kills] == sorted({kill.step for kill in kills})
