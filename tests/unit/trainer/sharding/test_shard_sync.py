"""Plans for bringing all ranks to the newest step, from what each of them has."""

from __future__ import annotations

import json

from etrain_jupyter.rules.optimizer_shards import shards_of
from etrain_jupyter.trainer.sharding.shard_sync import NO_STEP, RankReport, plan_sync

SIZE = 640


def report(rank: int, step: int, *, of: int = 4, **values: bool | int) -> RankReport:
    """Return the report of a rank that had this place among ``of`` ranks."""
    return RankReport(step=step, spans=shards_of(rank, of, [0, SIZE]), **values)


NEW = RankReport(step=NO_STEP, spans=((0, SIZE),))
"""A new rank: its empty state does not count."""


def test_report_is_the_same_after_it_was_sent():
    sent = report(2, 7, is_prepared=True, num_evals=3)
    assert RankReport.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_ranks_that_have_the_gradients_of_the_newest_step_make_its_update():
    reports = [report(0, 8, is_stale=True), report(1, 7, is_prepared=True), report(3, 8)]
    plan = plan_sync(reports, SIZE)
    assert plan.completing == (1,)
    assert set(plan.held) == {0, 1, 2}
    assert plan.lost == ()
    assert plan.behind == ()


def test_ranks_that_updated_only_their_own_shards_receive_the_other_weights():
    reports = [report(0, 8, is_stale=True), report(1, 7, is_prepared=True), report(3, 8)]
    assert plan_sync(reports, SIZE).stale == (0, 1)


def test_step_that_no_rank_has_committed_is_not_made_up_for():
    plan = plan_sync([report(rank, 7, is_prepared=True) for rank in (0, 1, 3)], SIZE)
    assert plan.completing == ()
    assert plan.stale == ()
    assert plan.lost == ()


def test_new_rank_receives_everything_from_rank_0():
    plan = plan_sync([report(0, 8, of=2), report(1, 8, of=2), NEW], SIZE)
    assert plan.behind == (2,)
    assert set(plan.held) == {0, 1}


def test_rank_that_has_not_seen_an_evaluation_keeps_its_shards():
    reports = [report(0, 8, of=2, num_evals=2), report(1, 8, of=2, num_evals=1)]
    plan = plan_sync(reports, SIZE)
    assert plan.behind == (1,)
    assert set(plan.held) == {0, 1}


def test_state_of_rank_0_applies_at_the_start():
    plan = plan_sync([NEW, NEW], SIZE)
    assert set(plan.held) == {0}
    assert plan.behind == (1,)
    assert plan.lost == ()


def test_all_ranks_have_shards_after_a_restore_and_receive_the_rest_from_rank_0():
    plan = plan_sync([report(0, 50), *(report(n, 40) for n in (1, 2, 3))], SIZE, is_restored=True)
    assert set(plan.held) == {0, 1, 2, 3}
    assert plan.behind == (1, 2, 3)
    assert plan.lost == ()


def test_initial_state_of_rank_0_applies_if_there_was_no_checkpoint():
    dropped = RankReport(step=NO_STEP)
    plan = plan_sync([RankReport(step=0, spans=((0, SIZE),)), dropped], SIZE, is_restored=True)
    assert set(plan.held) == {0}
    assert plan.behind == (1,)


def test_state_is_lost_with_two_neighbors():
    [lost] = plan_sync([report(0, 8), report(3, 8)], SIZE).lost
    assert lost == shards_of(2, 4, [0, SIZE])[0]


def test_state_of_a_rank_with_an_older_step_does_not_count():
    plan = plan_sync([report(0, 8), report(2, 8), report(1, 5)], SIZE)
    assert set(plan.held) == {0, 1}
    assert plan.behind == (2,)
