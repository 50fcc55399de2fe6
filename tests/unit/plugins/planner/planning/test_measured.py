"""What a plan reads from the log of a job."""

from __future__ import annotations

import math
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError
from etrain_jupyter.plugins.planner.planning.measured import Hardware, read_measured
from tests.unit.plugins.planner.planning.measured_jobs import CPU, NUM_STEPS, measured_job


def test_each_number_of_workers_and_batch_is_a_point() -> None:
    measured = read_measured(measured_job(CPU, [(1, 64), (2, 64), (2, 128)]))

    [(hardware, points)] = measured.points.items()
    assert hardware == Hardware(machine="cpu", workers_per_machine=0)
    assert [(point.workers, point.batch) for point in points] == [(1, 64), (2, 32), (2, 64)]
    assert points[1].step_s == pytest.approx(CPU.predict(2, 32).step_s)
    assert points[1].exposed_s == pytest.approx(CPU.predict(2, 32).exposed_s)
    assert points[0].spread == pytest.approx(0.0, abs=1e-9)


def test_samples_left_are_those_after_the_last_step() -> None:
    job = measured_job(CPU, [(1, 64)], total_samples=10_000)

    assert read_measured(job).samples_left == 10_000 - NUM_STEPS * 64


def test_plan_of_a_finished_job_is_for_another_run_of_it() -> None:
    job = measured_job(CPU, [(1, 64)], total_samples=10_000, status="finished")

    measured = read_measured(job)

    assert (measured.is_over, measured.samples_left) == (True, 10_000)


def test_types_of_machines_are_separate_hardware() -> None:
    job = measured_job(CPU, [(1, 64), (2, 64)], machine="p3.8xlarge", lifecycle="spot",
                       usd_per_h=0.9)  # fmt: skip

    measured = read_measured(job)

    assert list(measured.points) == [Hardware(machine="p3.8xlarge", workers_per_machine=4)]
    assert measured.usd_per_h == {("p3.8xlarge", "spot"): 0.9}


def test_first_steps_of_a_generation_are_left_out() -> None:
    job = measured_job(CPU, [(1, 64)])
    columns = job.history()
    columns["samples_per_s"][:3] = [1.0, 1.0, 1.0]
    slow_start = SlowStart(job, columns)

    [[point]] = read_measured(slow_start).points.values()

    assert point.step_s == pytest.approx(CPU.predict(1, 64).step_s)
    assert point.spread == pytest.approx(0.0, abs=1e-9)


class SlowStart:
    """A job with other columns."""

    def __init__(self, job: Any, columns: dict[str, list[Any]]) -> None:
        self.id, self.name, self.status = job.id, job.name, job.status
        self.events, self._columns = job.events, columns

    def history(self) -> dict[str, list[Any]]:
        return self._columns


def test_smaller_last_steps_of_epochs_are_no_points() -> None:
    job = measured_job(CPU, [(2, 64)])
    columns = job.history()
    columns["samples"][9] = 10

    [[point]] = read_measured(SlowStart(job, columns)).points.values()

    assert point.batch == 32


def test_evaluations_are_a_share_of_the_time() -> None:
    assert read_measured(
        measured_job(CPU, [(1, 64)], evaluation_share=0.25)
    ).outside_share == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("config", "num_bytes", "passes"),
    [
        ({}, 4e7, 1),
        ({"compression": "bf16"}, 2e7, 1),
        ({"batch": {"aggregation_frequency": 4}}, 4e7, 4),
        ({"batch": {"aggregation_frequency": "many"}}, 4e7, 1),
    ],
)
def test_exchange_depends_on_the_cell(
    config: dict[str, Any], num_bytes: float, passes: int
) -> None:
    exchange = read_measured(measured_job(CPU, [(1, 64)], config=config)).exchange()

    assert (exchange.num_bytes, exchange.num_buckets) == (num_bytes, math.ceil(num_bytes / 25e6))
    assert exchange.passes == passes
    assert not exchange.is_known


def test_only_trained_parameters_are_exchanged() -> None:
    job = measured_job(CPU, [(1, 64)], num_trained=32_768)
    assert read_measured(job).exchange().num_bytes == 4 * 32_768


def test_job_without_steps_is_refused_with_what_to_do() -> None:
    job = measured_job(CPU, [], status="waiting")

    with pytest.raises(ConfigError, match=r"net-00000000 \(waiting\) has 0 completed steps") as e:
        read_measured(job)

    assert "%etrain scale 2" in "\n".join(e.value.render())
