"""Error of the step times that ``%etrain plan`` predicts, at workers and batches it has not seen.

Each model trains at several samples per worker, and at each of them on one worker, then two, and so
on. The model of step times is fitted to a few of these points, at most 30 s of training, and
predicts the others. The figures are relative errors of the median step.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common import ours, report
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.plugins.planner.planning.measured import MeasuredJob, read_measured
from etrain_jupyter.process.processes import num_usable_cores
from etrain_jupyter.rules.sizing.step_time import Placement, StepPoint, fit_step_times

BAR = 0.10
"""Maximum median error that passes."""
BATCHES = (8, 24, 64)
"""Samples per worker."""
PART_S = 4.0
"""Training time of each point, in seconds; four points stay below 30 s."""
MIN_STEPS = 12
TIMEOUT_S = 240.0
LINK_VARIABLE = "ETRAIN_BENCHMARK_LINK"
"""Set to the rate of the link inside the network namespace."""
FITTED: dict[str, frozenset[tuple[int, int]]] = {
    "3 points": frozenset({(1, 8), (1, 64), (2, 8)}),
    "4 points": frozenset({(1, 8), (1, 64), (2, 8), (2, 64)}),
    "2 workers": frozenset({(2, 8), (2, 64)}),
}
"""Points to fit, as workers and samples per worker."""


class SharedLink(Placement):
    """Workers of one machine that share a link: it carries the data of all of them."""

    def volume(self, workers: int) -> float:
        """Return the time of an exchange, relative to sending all gradients once."""
        return 2.0 * (workers - 1)

    def has_idle_cores(self, workers: int) -> bool:
        """Return True: a process that waits for the link needs no core."""
        return True


class Albert(nn.Module):
    """A transformer whose layers share their weights, on the rows of an image as tokens."""

    def __init__(self, width: int = 192, num_layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.head = nn.Linear(width, 10)
        self.num_layers = num_layers

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(B, 10)``."""
        hidden_BLE = self.embed(images_BCHW.squeeze(1))
        for _ in range(self.num_layers):
            hidden_BLE = self.layer(hidden_BLE)
        logits_BK: torch.Tensor = self.head(hidden_BLE.mean(dim=1))
        return logits_BK


MODELS = {
    "cnn": "benchmarks.common.workloads:build_cnn",
    "mlp": "benchmarks.common.workloads:build_mlp",
    "albert": "benchmarks.advice.plan:Albert",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--max-workers", type=int, default=4, help="largest number of workers (4)")
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="one link of this rate for all workers, for example 1gbit (Linux, root, iproute2)",
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every model, and put the largest median error at the top of the result."""
    if options.link:
        enter_namespace(options.link)
    most = 3 if options.quick else options.max_workers
    placement = (SharedLink if options.link else Placement)(cores=num_usable_cores())
    found = {name: measure_model(name, most, placement) for name in MODELS}
    medians = {fit: float(np.median(np.abs(all_errors(found, fit)))) for fit in FITTED}
    return {
        "benchmark": "plan",
        "bar": BAR,
        "link": options.link,
        "load": os.getloadavg()[0],
        "median_error": medians["4 points"],
        "median_errors": medians,
        "models": found,
    }


def all_errors(found: dict[str, Any], fit: str) -> list[float]:
    """Return the errors of all models for one choice of fitted points."""
    return [error for one in found.values() for error in one["errors"][fit].values()]


def enter_namespace(rate: str) -> None:
    """Repeat the command in a network namespace whose loopback has a limited rate.

    Raises:
        SystemExit: If the namespace cannot be created; the output of the command has the reason.
    """
    if os.environ.get(LINK_VARIABLE) == rate:
        return
    limit = f"tc qdisc add dev lo root tbf rate {shlex.quote(rate)} burst 256k latency 50ms"
    script = f'ip link set lo up && {limit} && exec "$@"'
    again = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    command = ["unshare", "--net", "sh", "-c", script, "sh", *again]
    with ours.child(command, env={**os.environ, LINK_VARIABLE: rate}) as process:
        raise SystemExit(process.wait())


def measure_model(name: str, max_workers: int, placement: Placement) -> dict[str, Any]:
    """Train a model at all points, and predict those that are not fitted."""
    measured, points = None, {}
    for batch in BATCHES:
        with ours.cluster():
            job = train(name, batch, max_workers)
            measured = read_measured(job)
        [found] = measured.points.values()
        points.update({(one.workers, round(one.batch)): one for one in found})
        shown = ", ".join(f"{one.workers}: {one.step_s * 1e3:.1f}" for one in found)
        print(f"{name}, {batch} samples per worker, ms by workers: {shown}", flush=True)
    assert measured is not None
    return {
        "points": [
            {"workers": w, "batch": m, "step_s": one.step_s, "exposed_s": one.exposed_s,
             "spread": one.spread}
            for (w, m), one in sorted(points.items())
        ],
        "fit_s": PART_S * max(map(len, FITTED.values())),
        "errors": {
            fit: errors_of(measured, points, chosen, placement)
            for fit, chosen in FITTED.items()
        },
    }  # fmt: skip


def train(name: str, batch: int, max_workers: int) -> TrainingJob:
    """Train on one worker, then two and so on, and stop the job."""
    job = ours.submit(
        name, num_steps=ours.NEVER, world_size=1, model=MODELS[name], name=f"plan-{name}",
        batch={"per_worker": batch},
    )  # fmt: skip
    for workers in range(1, max_workers + 1):
        if workers > 1:
            job.scale(max=workers)
        ours.wait_for(
            lambda workers=workers: has_enough(job, workers),  # type: ignore[misc]
            TIMEOUT_S, f"{PART_S:g} s on {workers} workers", job,
        )  # fmt: skip
    job.stop(now=True)
    job.wait()
    return job


def has_enough(job: TrainingJob, workers: int) -> bool:
    """Return True once the newest generation has the workers and has trained for long enough."""
    steps = ours.settled_steps(job, workers, MIN_STEPS)
    return bool(steps) and sum(one.samples / one.samples_per_s for one in steps) >= PART_S


def errors_of(
    measured: MeasuredJob,
    points: dict[tuple[int, int], StepPoint],
    fitted: Collection[tuple[int, int]],
    placement: Placement,
) -> dict[str, float]:
    """Return the relative errors at the points that are not fitted."""
    model = fit_step_times(
        [points[one] for one in sorted(fitted)],
        placement,
        measured.exchange(),
    )
    return {
        f"{workers} x {batch}": model.predict(workers, batch).step_s / point.step_s - 1
        for (workers, batch), point in sorted(points.items())
        if (workers, batch) not in fitted
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the errors as a Markdown table."""
    head = ("model", "fitted", "median", "90 %", "largest", "unseen points", "spread of steps")
    models = result["models"]
    rows = []
    for fit in FITTED:
        for name, found in models.items():
            rows.append((name, fit, *shares_of(found["errors"][fit].values()), spread_of(found)))
        rows.append(("all", fit, *shares_of(all_errors(models, fit)), ""))
    return report.table(head, rows)


def spread_of(found: dict[str, Any]) -> str:
    """Return half the distance between the quartiles of the steps, relative to their median."""
    return f"{np.median([point['spread'] for point in found['points']]):.1%}"


def shares_of(errors: Iterable[float]) -> tuple[str, ...]:
    """Return the median, the 90th percentile and the maximum of the absolute errors as text."""
    sizes = np.abs(np.array(list(errors)))
    cells = [float(np.quantile(sizes, q)) for q in (0.5, 0.9, 1.0)]
    return (*(f"{cell:.1%}" for cell in cells), str(len(sizes)))
