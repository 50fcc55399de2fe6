"""Speed and gradient noise of a job, from its log, for its size by goodput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from etrain_jupyter.log import events as t
from etrain_jupyter.rules.sizing.speed_evidence import SizingView, SpeedEvidence
from etrain_jupyter.rules.sizing.step_time import Placement
from tests.unit.log.spent import NOTHING_ELSE, PLAIN_STEP

VIEW = SizingView(min_workers=1, max_workers=4, placement=Placement(workers_per_machine=1))
COMMON = {"job_id": "j", "time": 1.0}
PLAN = t.JobPlanned(
    **COMMON, num_train_samples=1000, num_eval_samples=0, global_batch_size=24, steps_per_epoch=42,
    total_steps=420, num_parameters=1000, total_samples=10_000, num_trained_parameters=1000,
)  # fmt: skip


def steps(workers: int, step_s: float, count: int, *, samples: int = 24) -> Iterator[t.Event]:
    yield t.GenerationFormed(
        **COMMON,
        why="start",
        world_size=workers,
        ranks=[],
        trainer_pids=[],
        behind=[],
        step=0,
        backend="gloo",
    )
    for number in range(count):
        # The first steps of a generation are slow.
        seconds = step_s * 5 if number < 3 else step_s
        yield t.StepCompleted(
            **COMMON, step=number, epoch=0, first=0, samples=samples, sample_checksum=0, loss=1.0,
            lr=0.1, world_size=workers, samples_per_s=samples / seconds, **PLAIN_STEP,
        )  # fmt: skip


def folded(*parts: Iterator[t.Event], plan: t.JobPlanned = PLAN) -> SpeedEvidence:
    evidence = SpeedEvidence()
    evidence.fold(plan)
    for part in parts:
        for event in part:
            evidence.fold(event)
    return evidence


def test_number_of_workers_is_measured_after_five_seconds_and_five_steps():
    assert not folded(steps(1, 0.5, 12)).terms(VIEW).measured
    assert folded(steps(1, 0.5, 13)).terms(VIEW).measured == {1}
    assert not folded(steps(1, 3.0, 7)).terms(VIEW).measured


def test_measured_rates_are_kept_and_the_others_predicted():
    terms = folded(steps(1, 1.0, 20), steps(2, 0.6, 20)).terms(VIEW)
    assert terms.rates[1:3] == pytest.approx((24.0, 40.0))
    assert terms.measured == {1, 2}
    assert terms.is_exchange_known
    assert 40.0 < terms.rates[3] < terms.rates[4] < 96.0


def test_frozen_parameters_are_not_exchanged():
    adapters = replace(PLAN, num_parameters=200_000_000, num_trained_parameters=1000)
    assert adapters.model_size == "1,000 of 200,000,000 parameters trained"
    rates = [folded(steps(1, 1.0, 20), plan=one).terms(VIEW).rates for one in (PLAN, adapters)]
    assert rates[0] == rates[1]


def test_new_measurements_replace_old_ones():
    terms = folded(steps(1, 1.0, 300), steps(1, 2.0, 203)).terms(VIEW)
    assert terms.rates[1] == pytest.approx(12.0)


def test_progress_follows_the_noise_if_the_batch_grows():
    growing = replace(PLAN, per_worker_batch_size=24)
    noise = t.RankTimed(
        **COMMON, worker="w1", rank=0, world_size=2, step=1, num_steps=1, samples=1, elapsed_s=1.0,
        data_s=0.0, compute_s=0.0, communication_s=0.0, optimizer_s=0.0, noise_variance=3.0,
        noise_square_norm=1.0, **NOTHING_ELSE,
    )  # fmt: skip
    evidence = folded(steps(1, 1.0, 20), plan=growing)
    assert evidence.terms(VIEW).progress is None
    evidence.fold(noise)
    # gain(2) = (3 + 1) / (3 / 2 + 1) = 1.6
    assert evidence.terms(VIEW).progress == pytest.approx((0.0, 1.0, 0.8, 4 / 6, 4 / 7))
    assert folded(steps(1, 1.0, 20)).terms(VIEW).progress == (1.0,) * 5


def test_deadline_requires_the_rate_for_the_samples_that_are_left():
    view = replace(VIEW, remaining_s=100.0)
    assert folded(steps(1, 1.0, 20)).terms(view).needed_rate == pytest.approx((10_000 - 24) / 100)
