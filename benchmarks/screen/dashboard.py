"""Costs of the dashboard: drawing, memory, bytes in a notebook, import time.

``redraw`` adds a batch of steps to a view that already shows many steps, and waits until the frame
is painted. ``long`` opens the generated log of a job of 200,000 steps with ``%etrain show`` in
JupyterLab. ``load`` measures the import time that the package adds to a running IPython shell.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import browsing, report
from benchmarks.storage import log

BARS = {"redraw_ms": 50.0, "notebook_kb": 100.0, "load_s": 0.3}
SIZES = (10_000, 100_000, 1_000_000)
LONG = 200_000
CHUNK = 4_000
UPDATES = 40
STEPS_PER_UPDATE = 10
# Time from the arrival of the message to the end of the frame that paints it.
TIME_UPDATES = """
() => {
    window.costs = [];
    const bring = window.bring;
    const frame = window.requestAnimationFrame.bind(window);
    let took = 0;
    window.bring = (content, buffers) => {
        const began = performance.now();
        bring(content, buffers);
        took += performance.now() - began;
    };
    const job = document.querySelector('.etrain-job');
    window.requestAnimationFrame = draw => frame(now => {
        const began = performance.now();
        const step = job.dataset.step;
        draw(now);
        if (job.dataset.step === step) {
            return;
        }
        const channel = new MessageChannel();
        channel.port1.onmessage = () => {
            window.costs.push(took + performance.now() - began);
            took = 0;
        };
        channel.port2.postMessage(0);
    });
}
"""
LOAD = """
import json, sys, time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began, used = time.perf_counter(), time.process_time()
import etrain_jupyter
imported = time.perf_counter()
shell.run_line_magic("load_ext", "etrain_jupyter")
loaded = time.perf_counter()
cpu_s = time.process_time() - used
print(json.dumps({"import_s": imported - began, "load_s": loaded - began, "load_cpu_s": cpu_s}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--only", choices=("redraw", "long", "load"), help="run one part")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the three parts, or the selected one."""
    if lacking := browsing.missing():
        return {"benchmark": "dashboard", "missing": lacking}
    sizes = SIZES[:2] if options.quick else SIZES
    parts: dict[str, Any] = {
        "redraw": lambda: {str(size): redraw(size) for size in sizes},
        "long": lambda: long_job(LONG),
        "load": lambda: load(5 if options.quick else 15),
    }
    wanted = [options.only] if options.only else list(parts)
    found = {name: parts[name]() | {"load_1min": os.getloadavg()[0]} for name in wanted}
    return {"benchmark": "dashboard", "bars": BARS, **found}


def redraw(num_steps: int) -> dict[str, float]:
    """Measure updates, in milliseconds, of a view that already shows ``num_steps`` steps."""
    from tests.browser.view import View
    from tests.unit.notebook.dashboard.scripted_job import Script

    with browsing.open_page() as page:
        view, script = View(page), Script(num_steps=num_steps + 10**6)
        view.add([*script.begin(), *script.form(["w0", "w1"], "start")])
        for first in range(1, num_steps + 1, CHUNK):
            last = min(num_steps, first + CHUNK - 1)
            view.job.add([e for step in range(first, last + 1) for e in script.complete(step)])
            view.feed.flush(view.job)
        view.settle()
        page.evaluate(TIME_UPDATES)
        for number in range(UPDATES):
            first = num_steps + 1 + number * STEPS_PER_UPDATE
            steps = range(first, first + STEPS_PER_UPDATE)
            view.add([event for step in steps for event in script.complete(step)])
        costs = page.evaluate("() => window.costs")
        assert view.root.get_attribute("data-step") == str(steps[-1])
        return {
            "median_ms": statistics.median(costs),
            "p95_ms": report.percentile(costs, 0.95),
            "page_mb": browsing.heap_mb(page),
        }


def long_job(num_steps: int) -> dict[str, float]:
    """Measure time, memory and bytes to show a job of ``num_steps`` steps in JupyterLab."""
    from etrain_jupyter.notebook.job.runs import open_runs
    from tests.browser.lab import Notebook

    record = open_runs().create({"name": "long", "created": time.time(), "config": {}})
    log.write(record.log_path, num_steps, job_id=record.job_id)
    with browsing.open_lab() as lab, browsing.open_page() as page:
        lab.write_notebook("long.ipynb", "%load_ext etrain_jupyter", "%etrain show long")
        notebook = Notebook(lab, page, "long.ipynb").open()
        notebook.run(0)
        before_mb, before_bytes = browsing.heap_mb(page), size_of(notebook)
        began = time.monotonic()
        notebook.run(1, wait=False)
        page.wait_for_selector(f".etrain-job[data-step='{num_steps}'] canvas", timeout=120_000)
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        shown_s = time.monotonic() - began
        page.wait_for_selector(".etrain-job[data-phase=live]", timeout=60_000)
        return {
            "steps": num_steps,
            "shown_s": shown_s,
            "page_mb": browsing.heap_mb(page) - before_mb,
            "notebook_kb": (size_of(notebook) - before_bytes) / 1e3,
        }


def size_of(notebook: Any) -> int:
    """Save a notebook and return the size of its file in bytes."""
    notebook.save()
    path: Path = notebook.lab.root / notebook.name
    return path.stat().st_size


def load(rounds: int) -> dict[str, float]:
    """Return the median seconds of ``import etrain_jupyter``, alone and with ``%load_ext``.

    The first round compiles the modules and is discarded, because the modules of an installed
    package are already compiled.
    """
    found = []
    with tempfile.TemporaryDirectory() as compiled:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", LOAD]
        for _ in range(rounds + 1):
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=environment
            )
            found.append(json.loads(done.stdout))
    return {key: statistics.median(one[key] for one in found[1:]) for key in found[0]}


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    if "missing" in result:
        return f"not measured: {result['missing']}"
    rows = []
    for size, found in result.get("redraw", {}).items():
        if size.isdigit():
            drawn = f"{found['median_ms']:.0f} ms, p95 {found['p95_ms']:.0f} ms"
            rows.append((f"redraw of {int(size):,} steps", drawn, f"{BARS['redraw_ms']:.0f} ms"))
            rows.append(("- memory of the page", f"{found['page_mb']:.0f} MB", ""))
    if found := result.get("long"):
        rows += [
            (f"{found['steps']:,} steps on the screen after", f"{found['shown_s']:.1f} s", ""),
            ("- additional memory of the page", f"{found['page_mb']:.0f} MB", ""),
            ("- in the saved notebook", f"{found['notebook_kb']:.0f} kB", "100 kB"),
        ]
    if found := result.get("load"):
        rows.append(("import etrain_jupyter", f"{found['import_s']:.3f} s", ""))
        rows.append(("- and %load_ext", f"{found['load_s']:.3f} s", "0.3 s"))
        rows.append(("- CPU time of both", f"{found['load_cpu_s']:.3f} s", ""))
    return report.table(("", "measured", "bar"), rows)
