"""The fold of what the workers' time went into."""

from __future__ import annotations

import math
from typing import Any

import pytest

from etrain_jupyter.log.events import RankTimed, event_from_dict
from etrain_jupyter.notebook.job.history import phases_of
from tests.unit.log.spent import NOTHING_ELSE


def timed(worker: str, world_size: int, samples: int, elapsed_s: float, **more: Any) -> RankTimed:
    spent = {"data_s": 0.0, "compute_s": elapsed_s, "communication_s": 0.0, "optimizer_s": 0.0}
    return RankTimed(
        job_id="j",
        time=0.0,
        worker=worker,
        rank=0,
        world_size=world_size,
        step=4,
        num_steps=2,
        samples=samples,
        elapsed_s=elapsed_s,
        **{**NOTHING_ELSE, **spent, **more},
    )


def test_efficiency_is_relative_to_the_throughput_of_a_single_worker():
    events = [timed("w0", 1, 100, 1.0), timed("w0", 2, 60, 1.0), timed("w1", 2, 80, 1.0)]
    one, other = phases_of(events)
    assert (one["worker"], one["samples"], one["num_steps"]) == ("w0", 160, 4)
    assert one["samples_per_s"] == 80.0
    assert other["efficiency"] == pytest.approx(0.8)


def test_without_a_single_worker_baseline_only_communication_lowers_the_efficiency():
    [record] = phases_of([timed("w0", 4, 60, 2.0, compute_s=1.5, communication_s=0.5)])
    assert record["efficiency"] == pytest.approx(0.75)
    assert (record["compute_s"], record["communication_s"]) == (1.5, 0.5)


def test_no_events_give_no_record_and_zero_time_gives_zero_efficiency():
    assert phases_of([]) == []
    [record] = phases_of([timed("w0", 2, 0, 0.0, evaluation_s=1.0)])
    assert (record["efficiency"], record["evaluation_s"]) == (0.0, 1.0)


def test_event_survives_the_log():
    event = timed("w0", 2, 8, 1.0)
    assert event_from_dict(event.to_dict()) == event_from_dict(event.to_json_dict()) == event


def test_metrics_on_a_gpu_are_unknown():
    timed_on_gpu = timed("w0", 2, 8, 1.0, wait_s=0.25, metrics_s=None)
    [record] = phases_of([timed("w0", 2, 8, 1.0, wait_s=0.25, metrics_s=0.5), timed_on_gpu])
    assert record["wait_s"] == 0.5
    assert math.isnan(record["metrics_s"])
    [record] = phases_of([timed("w0", 2, 8, 1.0, metrics_s=0.5)] * 2)
    assert record["metrics_s"] == 1.0
