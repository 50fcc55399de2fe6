"""The benchmark of predicted step times, on points made from a model."""

from __future__ import annotations

import dataclasses

from benchmarks.advice import plan
from etrain_jupyter.plugins.planner.planning.measured import read_measured
from etrain_jupyter.process.processes import num_usable_cores
from etrain_jupyter.rules.sizing.step_time import Placement, StepPoint
from tests.unit.plugins.planner.planning.measured_jobs import measured_job, model_of


def test_errors_are_those_of_the_points_that_are_not_fitted() -> None:
    cores = Placement(cores=num_usable_cores())
    true = model_of(cores, fixed_s=0.002, sample_s=0.001, s_per_byte=1 / 1.4e9)
    points = {}
    for workers in (1, 2, 3, 4):
        for batch in plan.BATCHES:
            found = true.predict(workers, batch)
            points[workers, batch] = StepPoint(
                workers=workers, batch=batch, step_s=found.step_s, exposed_s=found.exposed_s
            )
    # One unseen point takes twice as long as the model says.
    slow = points[3, 8]
    points[3, 8] = dataclasses.replace(slow, step_s=2 * slow.step_s)
    measured = read_measured(measured_job(true, [(1, 8)], per_worker=True))

    errors = plan.errors_of(measured, points, plan.FITTED["4 points"], cores)

    assert set(errors) == {"1 x 24", "2 x 24", *(f"{w} x {m}" for w in (3, 4) for m in (8, 24, 64))}
    assert -0.55 < errors.pop("3 x 8") < -0.45
    assert max(map(abs, errors.values())) < 0.08


def test_table_has_each_model_and_all_of_them() -> None:
    errors = {fit: {"3 x 8": -0.2, "4 x 8": 0.1} for fit in plan.FITTED}
    found = {"points": [{"spread": 0.05}], "errors": errors}

    table = plan.table_of({"models": {"cnn": found, "mlp": found}})

    _, _, *lines = table.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 9
    assert rows[0] == ["cnn", "3 points", "15.0%", "19.0%", "20.0%", "2", "5.0%"]
    assert rows[2] == ["all", "3 points", "15.0%", "20.0%", "20.0%", "4", ""]
