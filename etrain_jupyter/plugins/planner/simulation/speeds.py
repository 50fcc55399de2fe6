"""Speeds that a simulated job measures, folded as the head folds them from a job's log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from etrain_jupyter.log import events as t
from etrain_jupyter.plugins.planner.simulation.job import SimulatedJob
from etrain_jupyter.rules.sizing.goodput import GoodputTerms, Rates
from etrain_jupyter.rules.sizing.speed_evidence import (
    LEAST_S,
    LEAST_STEPS,
    WARM_UP_STEPS,
    SizingView,
    SpeedEvidence,
)
from etrain_jupyter.rules.sizing.step_time import Placement, StepTimeModel, exchange_of

STEP_S = 1.0
"""Duration of a step of one worker, in seconds."""
BATCH = 1024
"""Samples per step; the job's batch does not depend on the number of workers."""
NUM_PARAMETERS = 10_000_000
PLACEMENT = Placement(workers_per_machine=1)
"""One worker per machine, as in a pool on EC2."""


def ring_rates(workers: int, efficiency: float) -> Rates:
    """Return the throughput by number of workers of a job that exchanges gradients in a ring.

    ``rates_of_efficiency`` charges a cost per worker. Here, the backward pass hides a part of the
    exchange, as in a real job: a few workers scale almost linearly, and more of them worse.

    Args:
        workers: Number of workers at which the efficiency is known.
        efficiency: Throughput by ``workers`` times that of one worker.

    >>> [round(rate, 2) for rate in ring_rates(8, 0.6)]
    [0.0, 1.0, 1.93, 2.8, 3.61, 4.04, 4.34, 4.59, 4.8]
    """
    low, high = -40.0, 40.0  # logarithms of the seconds per byte
    for _ in range(60):
        middle = (low + high) / 2
        is_slow = _true_step_s(workers, middle) > STEP_S / (workers * efficiency)
        low, high = (low, middle) if is_slow else (middle, high)
    return (0.0, *(STEP_S / _true_step_s(one, low) for one in range(1, workers + 1)))


def _true_step_s(workers: int, log_s_per_byte: float) -> float:
    exchange = exchange_of(num_parameters=NUM_PARAMETERS, compression="none", passes=1)
    values = np.array([-40.0, math.log(STEP_S / BATCH), -40.0, log_s_per_byte, 0.0])
    model = StepTimeModel(
        placement=PLACEMENT, exchange=exchange, values=values, covariance=np.zeros((5, 5))
    )
    return model.predict(workers, BATCH / workers).step_s


class VirtualSpeeds:
    """The speed of a job by its number of workers, as far as it has trained on them.

    A step of ``w`` workers takes the time that the job's rates give; what exceeds linear scaling is
    communication. The steps are folded by ``SpeedEvidence``, so that predictions
    for other numbers of workers are those of the head.

    Args:
        job: The job.
    """

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        # The evidence depends only on these numbers, because simulated steps do not vary.
        self._known: dict[frozenset[int], GoodputTerms] = {}

    def terms(
        self, measured: Iterable[int], *, min_workers: int, needed_rate: float = 0.0
    ) -> GoodputTerms:
        """Return the inputs of the decision about the job's size.

        Args:
            measured: Numbers of workers on which the job has trained.
            min_workers: ``workers.min``.
            needed_rate: Work per second that the deadline requires; 0 without a deadline.
        """
        key = frozenset(measured)
        if key not in self._known:
            self._known[key] = self._fold(key)
        return replace(
            self._known[key], min_workers=min_workers, needed_rate=needed_rate * BATCH / STEP_S
        )

    def _fold(self, measured: frozenset[int]) -> GoodputTerms:
        evidence = SpeedEvidence()
        for event in self._events(sorted(measured)):
            evidence.fold(event)
        view = SizingView(min_workers=1, max_workers=self._job.workers, placement=PLACEMENT)
        return evidence.terms(view)

    def _events(self, measured: Iterable[int]) -> Iterator[t.Event]:
        common: dict[str, Any] = {"job_id": "simulated", "time": 0.0}
        total = math.ceil(self._job.work / STEP_S)
        yield t.JobPlanned(
            **common, num_train_samples=total * BATCH, num_eval_samples=0, steps_per_epoch=total,
            global_batch_size=BATCH, total_steps=total, num_parameters=NUM_PARAMETERS,
            total_samples=total * BATCH, num_trained_parameters=NUM_PARAMETERS,
        )  # fmt: skip
        step = 0
        for workers in measured:
            yield t.GenerationFormed(
                **common, generation=workers, why="simulated", world_size=workers, step=step,
                ranks=[f"w{number}" for number in range(workers)], backend="gloo",
            )  # fmt: skip
            duration_s = STEP_S / self._job.rates[workers]
            enough = max(LEAST_STEPS, math.ceil(LEAST_S / duration_s))
            for _ in range(WARM_UP_STEPS + enough):
                step += 1
                yield t.StepCompleted(
                    **common, generation=workers, step=step, epoch=0, first=step * BATCH,
                    samples=BATCH, sample_checksum=0, loss=0.0, lr=0.0, world_size=workers,
                    samples_per_s=BATCH / duration_s,
                    communication_s=max(0.0, duration_s - STEP_S / workers), data_s=0.0,
                    compute_s=STEP_S / workers, optimizer_s=0.0, ranks_agree=True, skipped=False,
                )  # fmt: skip
