"""A plan for a job that ran at the published throughputs gives the published times and costs.

``test_published_tables`` of the comparison has all entries of the tables. Here are those that
predict a whole job: hours, costs and efficiencies. The list of all entries, with the two that
contradict themselves, is that of ``reference/scripts/seed_tables_check.py`` in the folder
``shared`` next to the repository.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from etrain_jupyter.insight.comparison import compare_jobs
from etrain_jupyter.insight.planning.measured import read_measured
from etrain_jupyter.insight.planning.offers import MachineOffer, Market
from etrain_jupyter.insight.planning.options import Option, estimates_of, options_of
from etrain_jupyter.log import events as t
from tests.unit.insight.logged_jobs import CONFIG, START, LoggedJob, logged_job, steps_of

SCRIPT = Path(__file__).parents[5] / "shared/reference/scripts/seed_tables_check.py"
ON_DEMAND_USD = 24.48 / 8  # one of the eight GPUs of a p3.16xlarge
SQUAD2_RECORDS = 264_396
V100 = "p3.2xlarge"


def job_with_rates(
    rates: Sequence[tuple[int, float]], *, total_samples: int, batch: int = 3072
) -> LoggedJob:
    """Return a job that ran at these numbers of workers and samples per second."""
    common = {"job_id": "net-00000000", "time": START - 60}
    most = max(workers for workers, _ in rates)
    job = LoggedJob("net-00000000", "net", status="finished")
    beginning: list[t.Event] = [
        t.JobSubmitted(**common, name="net", min_workers=1, max_workers=most, config=CONFIG),
        *(t.WorkerJoined(**common, worker=f"w{n}", device="cuda", machine=V100, lifecycle="spot",
                         usd_per_h=0.918) for n in range(most)),
        t.JobPlanned(
            **common, num_train_samples=total_samples, num_eval_samples=0, global_batch_size=batch,
            steps_per_epoch=total_samples // batch, total_steps=total_samples // batch,
            num_parameters=11_700_000, total_samples=total_samples,
        ),
    ]  # fmt: skip
    job.log.extend([event.with_seq(seq) for seq, event in enumerate(beginning, 1)])
    for generation, (workers, rate) in enumerate(rates, 1):
        formed = t.GenerationFormed(
            job_id=job.id, time=START, generation=generation, why="start", world_size=workers,
            ranks=[f"w{number}" for number in range(workers)], step=0,
        )  # fmt: skip
        job.log.extend([formed.with_seq(len(job.log) + 1)])
        phases = {"generation": generation, "compute_s": batch / rate}
        job.log.add_block(
            steps_of(
                job.id, len(job.log) + 1, num_steps=20, batch=batch, workers=workers,
                step_s=batch / rate, phases=phases, first_step=20 * generation,
            )
        )  # fmt: skip
    return job


def planned(job: LoggedJob, max_workers: int) -> dict[int, Option]:
    """Return the options on demand, by number of workers, on machines that already run."""
    measured = read_measured(job)
    offer = MachineOffer(machine=V100, on_demand_usd=ON_DEMAND_USD, boot_s=0.0)
    estimates, skipped = estimates_of(measured, Market(offers=(offer,)), cores=2)
    assert skipped == []
    return {one.workers: one for one in options_of(measured, estimates, max_workers=max_workers)}


def test_albert_on_squad_2_takes_the_published_hours_and_dollars() -> None:
    job = job_with_rates([(1, 2), (8, 15.8), (64, 92.75)], total_samples=SQUAD2_RECORDS)

    options = planned(job, 64)

    assert options[1].hours == pytest.approx(36.7, abs=0.05)
    assert options[1].usd == pytest.approx(112.21, abs=0.25)
    assert options[8].hours == pytest.approx(4.7, abs=0.06)
    assert options[8].efficiency == pytest.approx(0.9875, abs=1e-4)
    assert options[64].hours * 60 == pytest.approx(48, abs=0.6)
    assert options[64].efficiency == pytest.approx(0.7246, abs=1e-4)
    assert options[1].hours / options[64].hours == pytest.approx(46, abs=0.5)
    # 156.67 dollars are those of 48 minutes; the throughput gives 47.5.
    assert options[64].usd == pytest.approx(156.67 * 47.51 / 48, abs=0.05)
    assert all(options[workers].is_measured for workers in (1, 8, 64))


def test_bert_on_k80_scales_as_published() -> None:
    minutes = {1: 399, 2: 214, 4: 118, 8: 61, 16: 30}
    rates = [(gpus, 1e6 / (60 * time)) for gpus, time in minutes.items()]

    options = planned(job_with_rates(rates, total_samples=1_000_000, batch=1000), 16)

    for gpus, efficiency in {2: 0.93, 4: 0.85, 8: 0.82, 16: 0.83}.items():
        assert options[gpus].hours * 60 == pytest.approx(minutes[gpus], rel=1e-6)
        assert options[gpus].efficiency == pytest.approx(efficiency, abs=0.005)


@pytest.mark.parametrize(
    ("steps_per_s", "hours"), [(1.72, 20), (0.24, 144), (0.46, 75), (0.90, 38), (1.73, 20)]
)
def test_pretraining_of_albert_takes_the_published_hours(steps_per_s: float, hours: float) -> None:
    job = job_with_rates([(64, 4096 * steps_per_s)], total_samples=125_000 * 4096, batch=4096)
    assert planned(job, 64)[64].hours == pytest.approx(hours, abs=1.0)


@pytest.mark.parametrize(("steps_per_s", "hours"), [(1.01, 39), (0.51, 78)])
def test_plan_contradicts_the_two_entries_that_contradict_themselves(
    steps_per_s: float, hours: float
) -> None:
    job = job_with_rates([(64, 4096 * steps_per_s)], total_samples=125_000 * 4096, batch=4096)
    assert planned(job, 64)[64].hours < 0.9 * hours


@pytest.mark.skipif(not SCRIPT.exists(), reason=f"{SCRIPT} does not exist")
def test_contradictions_of_the_reference_are_those_that_a_comparison_notes() -> None:
    lines = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    rows = [line for line in lines if re.match(r"(ok |OFF) ", line)]
    off = [line for line in rows if line.startswith("OFF")]
    assert len(rows) - len(off) == 41

    found = {}
    for line in off:
        match = re.search(r"OFF (\S+): hours .* seed (\S+) .* model (\S+)", line)
        assert match is not None
        found[match[1]] = (float(match[2]), float(match[3]))
    for hours, steps_h in found.values():
        between_s = (hours - steps_h) * 3600 / (125_000 - 1)
        job = logged_job(
            "table", workers=64, num_steps=125_000, batch=4096,
            samples_per_s=4096 * 125_000 / (steps_h * 3600), between_s=between_s,
        )  # fmt: skip
        notes = compare_jobs([job]).notes
        assert any(f"its steps take {steps_h:.1f} h of {hours:.1f} h" in note for note in notes)
    assert list(found) == ["p3.16", "g4dn.12"]
