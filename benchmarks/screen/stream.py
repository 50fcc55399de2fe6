"""Latency from rank to screen: from the commit of a step until JupyterLab has painted it.

The benchmark runs a real job on a real cluster, a real JupyterLab and headless Chromium on one
machine, so all timestamps come from the same clock. It measures every step, including those that
were painted together with later steps. The kernel that follows the job is idle or runs a cell:
a Python loop, or matrix products in numpy.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from benchmarks.common import browsing, ours, report
from etrain_jupyter.log.events import Event, StepCompleted

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.lab import Notebook

BAR_P95_MS = 250.0
SETTLE_MS = 2000
BUSY = {
    "idle": "",
    "python": "while time.time() < end: sum(i * i for i in range(1000))",
    "numpy": "a = np.random.rand(600, 600)\nwhile time.time() < end: a @ a",
}
# The view sets the attribute data-step while it prepares a frame. A message posted during that
# frame is delivered after the frame has been painted.
WATCH = """
() => {
    window.painted = [];
    const job = document.querySelector('.etrain-job');
    new MutationObserver(() => {
        const step = Number(job.dataset.step);
        const channel = new MessageChannel();
        channel.port1.onmessage = () => window.painted.push([step, Date.now() / 1000]);
        requestAnimationFrame(() => channel.port2.postMessage(0));
    }).observe(job, { attributes: true, attributeFilter: ['data-step'] });
}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--seconds", type=int, help="seconds per condition (default 30; quick: 10)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one job in one notebook, under one condition after another."""
    if lacking := browsing.missing():
        return {"benchmark": "stream", "missing": lacking}
    from tests.browser.lab import Notebook

    seconds = options.seconds or (10 if options.quick else 30)
    cells = [
        "%load_ext etrain_jupyter\nimport time, numpy as np",
        "%etrain attach stream",
        *(f"end = time.time() + {seconds}\n{code}" for code in BUSY.values()),
    ]
    with ours.cluster(), browsing.open_lab() as lab, browsing.open_page() as page:
        job = ours.submit(
            "small",
            num_steps=ours.NEVER,
            world_size=1,
            name="stream",
            loss="benchmarks.common.workloads:patient_loss",
        )
        lab.write_notebook("stream.ipynb", *cells)
        notebook = Notebook(lab, page, "stream.ipynb").open()
        notebook.run(0)
        notebook.run(1)
        page.wait_for_selector(".etrain-job[data-phase=live]", timeout=60_000)
        ours.wait_for_step(job, 20, 120)
        arrived: dict[int, float] = {}
        job.subscribe(lambda events: note(events, arrived))
        page.evaluate(WATCH)
        loads, painted = {}, {}
        for number, name in enumerate(BUSY):
            painted[name] = watch(page, notebook, number + 2, seconds, is_idle=name == "idle")
            loads[name] = os.getloadavg()[0]
        steps = {step.step: step.time for step in ours.steps_of(job)}
        job.stop(now=True)
        job.wait()
    conditions = {name: delays(steps, painted[name]) | {"load": loads[name]} for name in BUSY}
    return {
        "benchmark": "stream",
        "p50_ms": conditions["idle"]["p50_ms"],
        "p95_ms": max(found["p95_ms"] for found in conditions.values()),
        "bar_p95_ms": BAR_P95_MS,
        "step_ms": 1e3 * statistics.median(b - a for a, b in itertools.pairwise(steps.values())),
        "conditions": conditions,
        "to_a_kernel": to_a_kernel(steps, arrived),
    }


def note(events: Iterable[Event], arrived: dict[int, float]) -> None:
    """Record when steps arrived in this process, which follows the job like a kernel."""
    now = time.time()
    arrived.update({e.step: now for e in events if isinstance(e, StepCompleted)})


def to_a_kernel(committed: dict[int, float], arrived: dict[int, float]) -> dict[str, float]:
    """Return the delays from the commit of a step to its arrival in a kernel."""
    # The first batch contains past steps.
    first = min(arrived.values())
    known = {step: at for step, at in arrived.items() if at > first and step in committed}
    found = [1e3 * (at - committed[step]) for step, at in known.items()]
    return {"p50_ms": statistics.median(found), "p95_ms": report.percentile(found, 0.95)}


def watch(
    page: Page, notebook: Notebook, cell: int, seconds: int, *, is_idle: bool
) -> list[tuple[int, float]]:
    """Return (step, time) of each paint while a cell runs."""
    if not is_idle:
        notebook.run(cell, wait=False)
    page.wait_for_timeout(SETTLE_MS)
    page.evaluate("() => window.painted.length = 0")
    page.wait_for_timeout(1000 * seconds - 2 * SETTLE_MS)
    painted = page.evaluate("() => window.painted")
    if not is_idle:
        page.evaluate("() => window.etrainRun")
    return [(step, at) for step, at in painted]


def delays(committed: dict[int, float], painted: list[tuple[int, float]]) -> dict[str, float]:
    """Summarize the delay of each step that was painted after the first paint.

    Args:
        committed: Commit time of each step.
        painted: Step and time of each paint; a paint also shows all steps before it.

    >>> delays({1: 1.0, 2: 1.1, 3: 1.2}, [(1, 1.2), (3, 1.35)])["p95_ms"]
    250.0
    """
    found = []
    for (before, _), (step, at) in itertools.pairwise(painted):
        found += [1e3 * (at - committed[n]) for n in range(before + 1, step + 1) if n in committed]
    return {
        "p50_ms": round(statistics.median(found), 1),
        "p95_ms": round(report.percentile(found, 0.95), 1),
        "steps": len(found),
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    if "missing" in result:
        return f"not measured: {result['missing']}"
    rows: list[tuple[str, ...]] = [
        (name, f"{f['p50_ms']:.0f}", f"{f['p95_ms']:.0f}", str(f["steps"]), f"{f['load']:.1f}")
        for name, f in result["conditions"].items()
    ]
    to_kernel = result["to_a_kernel"]
    parts = [f"{to_kernel[name]:.0f}" for name in ("p50_ms", "p95_ms")]
    rows.append(("(of this, rank to kernel)", *parts, "", ""))
    return report.table(("kernel", "p50, ms", "p95, ms", "steps", "load"), rows)
