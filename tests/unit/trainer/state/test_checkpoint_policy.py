"""A checkpoint is due by schedule, by interval, or on request; asking twice changes nothing."""

from __future__ import annotations

import pytest

from etrain_jupyter.config.schema import Interval
from etrain_jupyter.trainer.state.checkpoint_policy import CheckpointPace, CheckpointPolicy
from etrain_jupyter.trainer.state.train_state import Mark, WorkPlan
from etrain_jupyter.wire.messages import PaceUpdate

PLAN = WorkPlan(num_train=70, num_eval=0, global_batch_size=10, steps_per_epoch=7, total_steps=70)


def step(number: int) -> tuple[Mark, Mark]:
    """Return the progress before and after a step."""
    return Mark(number - 1, 10 * (number - 1)), Mark(number, 10 * number)


def policy(every: str | None) -> CheckpointPolicy:
    return CheckpointPolicy(Interval.parse(every) if every else None, PLAN, now=1000.0)


def is_due(policy: CheckpointPolicy, number: int, *, now: float, is_rank_0: bool = True) -> bool:
    """Ask twice, and return the answer, which must be the same."""
    answers = {policy.is_due(*step(number), is_rank_0=is_rank_0, now=now) for _ in range(2)}
    assert len(answers) == 1, "is_due has an effect"
    return answers.pop()


def take(policy: CheckpointPolicy, number: int, *, now: float, is_rank_0: bool = True) -> bool:
    policy.take_step(*step(number), is_rank_0=is_rank_0, is_agreed=False, now=now)
    return policy.is_owed


@pytest.mark.parametrize(
    ("every", "due"), [("3 steps", [3, 6, 9]), ("1 epoch", [7]), ("20 s", [2, 4, 6, 8, 10])]
)
def test_checkpoint_is_due_at_the_first_step_that_reaches_the_interval(every, due):
    found, saving = [], policy(every)
    for number in range(1, 11):
        now = 1000.0 + 10 * number
        asked = is_due(saving, number, now=now)
        assert take(saving, number, now=now) == asked
        if asked:
            found.append(number)
            saving.take_start()
    assert found == due


def test_due_check_before_an_undone_step_changes_nothing():
    saving = policy("3 steps")
    assert is_due(saving, 3, now=1001.0)
    # Step 3 is undone, and made again by the next generation.
    assert not saving.is_owed
    assert is_due(saving, 3, now=1002.0)
    assert take(saving, 3, now=1002.0)


def test_due_check_does_not_restart_the_interval():
    saving = policy("20 s")
    assert is_due(saving, 1, now=1020.0)
    assert is_due(saving, 1, now=1021.0)
    assert take(saving, 1, now=1021.0)
    saving.take_start()
    assert not is_due(saving, 2, now=1040.9)
    assert is_due(saving, 2, now=1041.0)


def test_checkpoint_is_owed_until_one_starts():
    saving = policy("3 steps")
    take(saving, 3, now=1001.0)
    assert take(saving, 4, now=1002.0)
    assert is_due(saving, 5, now=1003.0)
    saving.take_start()
    assert not is_due(saving, 5, now=1003.0)


def test_request_is_due_at_the_next_boundary_until_a_checkpoint_starts():
    saving = policy("50 steps")
    assert not is_due(saving, 1, now=1001.0)
    saving.request()
    assert is_due(saving, 1, now=1001.0)
    assert is_due(saving, 1, now=1001.0, is_rank_0=False)
    saving.take_start()
    assert not is_due(saving, 2, now=1002.0)


def test_only_rank_0_follows_the_coordinators_interval():
    saving = policy(None)
    assert is_due(saving, 1, now=1010.0)
    assert not is_due(saving, 1, now=1010.0, is_rank_0=False)


def test_checkpoint_that_all_ranks_agreed_on_is_owed_even_if_it_is_not_due_any_more():
    saving = policy(None)
    assert is_due(saving, 1, now=1010.0)
    # Between the question and the boundary, the coordinator reports a younger checkpoint.
    saving.pace.adopt(PaceUpdate(interval_s=10.0, age_s=0.0), now=1010.0)
    saving.take_step(*step(1), is_rank_0=True, is_agreed=True, now=1010.0)
    assert saving.is_owed


def test_first_checkpoint_of_a_job_is_due_soon_because_it_measures_the_cost():
    pace = CheckpointPace(now=1000.0)
    assert not pace.is_due(1009.9)
    assert pace.is_due(1010.0)


def test_new_rank_0_saves_when_the_newest_checkpoint_of_any_rank_is_old():
    pace = CheckpointPace(now=1000.0)
    pace.adopt(PaceUpdate(interval_s=100.0, age_s=40.0), now=1500.0)
    assert not pace.is_due(1500.0)
    assert pace.is_due(1560.0)


def test_new_interval_counts_from_the_same_checkpoint():
    pace = CheckpointPace(now=1000.0)
    pace.adopt(PaceUpdate(interval_s=100.0, age_s=0.0), now=1000.0)
    pace.adopt(PaceUpdate(interval_s=50.0), now=1050.0)
    assert pace.is_due(1050.0)
    pace.restart(1050.0)
    assert not pace.is_due(1050.0)


def test_failed_checkpoint_is_retried_before_a_long_interval_is_over():
    pace = CheckpointPace(now=1000.0)
    pace.adopt(PaceUpdate(interval_s=600.0, age_s=0.0), now=1000.0)
    pace.retry_soon(1000.0)
    assert not pace.is_due(1029.0)
    assert pace.is_due(1030.0)


def test_failed_checkpoint_is_not_retried_more_often_than_the_interval():
    pace = CheckpointPace(now=1000.0)
    pace.retry_soon(1000.0)
    assert not pace.is_due(1009.0)
