"""Rungs, shares of workers, a trial's evaluations, and the end of a study."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.log import events as e
from etrain_jupyter.plugins.search.rules import (
    MAX_RUNGS,
    StudyProgress,
    StudyShare,
    judge_study,
    num_to_start,
    place_rungs,
    rung_of,
    share_studies,
)
from etrain_jupyter.plugins.search.schema import Budget
from etrain_jupyter.plugins.search.trial import TrialProgress
from etrain_jupyter.rules.sizing.allocation import Claim, allocate
from tests.unit.log.spent import PLAIN_STEP

COMMON: dict[str, Any] = {"job_id": "t-000", "seq": 0, "time": 0.0, "generation": 1}


@given(st.integers(1, 10**9), st.integers(2, 10), st.integers(0, 10**9))
def test_rungs_are_spaced_by_the_divisor_and_below_the_end(
    num_samples: int, divisor: int, min_samples: int
) -> None:
    rungs = place_rungs(num_samples=num_samples, divisor=divisor, min_samples=min_samples)

    assert all(high == low * divisor for low, high in itertools.pairwise(rungs))
    assert len(rungs) <= MAX_RUNGS
    assert all(max(1, min_samples) <= rung <= num_samples / divisor for rung in rungs)
    assert rung_of(num_samples, rungs) == len(rungs)


def test_search_whose_first_evaluation_comes_late_has_no_rungs() -> None:
    assert place_rungs(num_samples=1000, divisor=4, min_samples=500) == ()


def claims(*maxima: int, minimum: int = 1) -> list[Claim]:
    return [
        Claim(job_id=f"t{i}", min_workers=minimum, max_workers=most)
        for i, most in enumerate(maxima)
    ]


def counts(found: list[Claim], num_workers: int) -> list[int]:
    shared = allocate(found, [f"w{i}" for i in range(num_workers)])
    return [len(shared[claim.job_id]) for claim in found]


def share(found: list[Claim], num_workers: int, *studies: StudyShare) -> list[int]:
    workers = [f"w{i}" for i in range(num_workers)]
    return counts(share_studies(found, workers, studies), num_workers)


def test_trials_share_fairly_where_ordinary_jobs_would_queue() -> None:
    trials = claims(4, 4, 4)
    fair = StudyShare(sharing="fair", ranking=("t2", "t0", "t1"))

    assert counts(trials, 6) == [4, 1, 1]
    assert share(trials, 6, fair) == [2, 2, 2]


def test_promising_trials_get_the_workers_left_over() -> None:
    promising = StudyShare(sharing="promising", ranking=("t2", "t0", "t1"))

    assert share(claims(4, 4, 4), 6, promising) == [1, 1, 4]


def test_workers_of_a_pruned_trial_go_to_the_others() -> None:
    fair = StudyShare(sharing="fair", ranking=("t0", "t1"))

    assert share(claims(4, 4), 6, fair) == [3, 3]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(0, 12),
    st.sampled_from(["fair", "promising"]),
    st.data(),
)
def test_sharing_within_a_study_takes_nothing_from_other_jobs(
    sizes: list[tuple[int, int]], num_workers: int, sharing: Any, data: st.DataObject
) -> None:
    found = [
        Claim(job_id=f"t{i}", min_workers=low, max_workers=low + more)
        for i, (low, more) in enumerate(sizes)
    ]
    members = data.draw(st.permutations([c.job_id for c in found]))
    members = members[: data.draw(st.integers(0, len(members)))]
    workers = [f"w{i}" for i in range(num_workers)]

    before = {job: len(names) for job, names in allocate(found, workers).items()}
    limited = share_studies(found, workers, [StudyShare(sharing=sharing, ranking=tuple(members))])
    after = {job: len(names) for job, names in allocate(limited, workers).items()}

    assert sum(after.values()) == sum(before.values())
    for claim in found:
        if claim.job_id not in members:
            assert after[claim.job_id] == before[claim.job_id]
        elif before[claim.job_id] >= claim.min_workers:
            assert claim.min_workers <= after[claim.job_id] <= claim.max_workers


def planned(length: int = 100) -> e.JobPlanned:
    return e.JobPlanned(
        **COMMON, num_train_samples=length, num_eval_samples=10, global_batch_size=10,
        steps_per_epoch=length // 10, total_steps=40, total_samples=4 * length,
        num_parameters=10, num_trained_parameters=10,
    )  # fmt: skip


def stepped(step: int, *, epoch: int = 0, first: int = 0) -> e.StepCompleted:
    return e.StepCompleted(
        **COMMON, step=step, epoch=epoch, first=first, samples=10, sample_checksum=0, loss=1.0,
        lr=0.1, world_size=1, samples_per_s=1.0, **PLAIN_STEP,
    )  # fmt: skip


def test_evaluations_are_placed_by_samples_also_when_a_score_arrives_late() -> None:
    progress = TrialProgress()

    found = progress.apply_all(
        [
            planned(),
            stepped(10, first=90),
            e.EvalCompleted(**COMMON, step=10, epoch=0, samples=10, loss=0.5, duration_s=0.1),
            stepped(11, epoch=1),
            e.EvalScored(**COMMON, step=10, samples=10, duration_s=1.0, scores={"f1": 0.7}),
        ]
    )

    assert [(x.samples, x.values) for x in found] == [(100, {"loss": 0.5}), (100, {"f1": 0.7})]
    assert progress.samples == 110


def test_undone_steps_do_not_count() -> None:
    progress = TrialProgress()

    progress.apply_all([planned(), stepped(8, first=70)])
    progress.apply(e.JobRestored(**COMMON, step=4, num_undone=4))

    assert progress.samples == 40


def study(*states: Any, num_trials: int = 8, **more: Any) -> StudyProgress:
    return StudyProgress(states=states, num_trials=num_trials, **more)


@pytest.mark.parametrize(
    ("progress", "status", "reason"),
    [
        (study("FAIL", "FAIL", "FAIL", last_failure="boom"), "failed", "all 3 trials failed"),
        (study("FAIL", num_trials=1, last_failure="boom"), "failed", "with: boom"),
        (study("COMPLETE", "PRUNED", num_trials=2), "finished", ""),
        (study("RUNNING", samples=1000), "finished", "1,000 of 900 samples"),
        (study("RUNNING", elapsed_s=61.0), "finished", "61 of 60 s"),
        (study("RUNNING", usd=2.5), "finished", "2.50 of 2.00 USD"),
    ],
)
def test_study_ends(progress: StudyProgress, status: str, reason: str) -> None:
    verdict = judge_study(progress, Budget(samples=900, time_s=60.0, usd=2.0))

    assert verdict is not None
    assert verdict.status == status
    assert reason in verdict.reason


@pytest.mark.parametrize(
    "progress",
    [
        study("FAIL", "FAIL", "RUNNING"),  # the third may succeed
        study("FAIL", "FAIL", "FAIL", "COMPLETE"),
        study("COMPLETE", "RUNNING", num_trials=2),
    ],
)
def test_study_continues(progress: StudyProgress) -> None:
    assert judge_study(progress, Budget()) is None


def test_no_more_trials_start_than_the_study_has() -> None:
    assert num_to_start(["COMPLETE"] * 7 + ["RUNNING"], num_trials=9, concurrent=4) == 1
