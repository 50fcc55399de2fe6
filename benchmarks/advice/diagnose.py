"""Verdicts and predicted gains of ``%etrain diagnose`` on jobs with a known cause.

Each job trains, is diagnosed while it runs, and trains again with its own remedy, in turns. With
``--traceml PYTHON``, TraceML observes a plain DDP script of the same job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.advice.diagnosed_jobs import JOBS, MARKER, SlowJob
from benchmarks.common import ours, report

MIN_RIGHT = 11
"""Number of right verdicts of twelve that passes."""
BAR = 0.15
"""Maximum relative error of the predicted throughput."""
TIMEOUT_S = 240.0
"""Time limit of one job, in seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--traceml", metavar="PYTHON", help="Python with torch and traceml-ai")
    parser.add_argument("--peer-only", action="store_true", help="run only TraceML")
    parser.add_argument("--only", action="append", help="run only this job; repeatable")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every job in a process of its own."""
    jobs: dict[str, dict[str, Any]] = {}
    for name in options.only or JOBS:
        window_s = 3.0 if options.quick else 4.0
        jobs[name] = {} if options.peer_only else run_ours(name, window_s=window_s, rounds=2)
        if options.traceml:
            jobs[name]["traceml"] = run_traceml(name, options.traceml)
        print(row_of(name, jobs[name]), flush=True)
    errors = [abs(error) for one in jobs.values() if (error := error_of(one)) is not None]
    return {
        "benchmark": "diagnose",
        "bar": BAR,
        "num_right": sum(one.get("verdict") == JOBS[name].cause for name, one in jobs.items()),
        "num_jobs": len(jobs),
        "num_predicted": len(errors),
        "num_within_bar": sum(error <= BAR for error in errors),
        "num_right_traceml": sum(
            bool(one.get("traceml", {}).get("is_right")) for one in jobs.values()
        ),
        "jobs": jobs,
    }


def run_ours(name: str, *, window_s: float, rounds: int) -> dict[str, Any]:
    """Run a job with etrain-jupyter, and return its result or the error."""
    slow = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "benchmarks.advice.diagnosed_run", name, str(path), str(window_s),
            str(rounds),
        ]  # fmt: skip
        done = run(limited(slow, command), os.environ | {"TMPDIR": folder})
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        return {"error": done[-2000:]}


def limited(slow: SlowJob, command: list[str]) -> list[str]:
    """Return the command in a network namespace with a slow link, if the job has one."""
    if not slow.rate:
        return command
    limit = f"tbf rate {slow.rate} burst 512k latency 200ms"
    script = f'ip link set lo up && tc qdisc add dev lo root {limit} && exec "$@"'
    return ["unshare", "--net", "sh", "-c", script, "sh", *command]


def run_traceml(name: str, python: str) -> dict[str, Any]:
    """Run the plain script under TraceML, and return its verdict."""
    slow = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "DIAGNOSED_JOB": name, "DIAGNOSED_FOLDER": folder, MARKER: f"{folder}/slow",
            "PYTHONPATH": str(ours.ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            str(Path(python).with_name("traceml")), "run",
            str(ours.ROOT / "benchmarks/peers/traceml_train.py"),
            "--nproc-per-node", str(slow.workers), "--logs-dir", folder, "--run-name", "run",
        ]  # fmt: skip
        output = run(limited(slow, command), environment)
        text = Path(folder) / "run" / "final_summary.txt"
        shown = text.read_text(encoding="utf-8") if text.exists() else output
    line = next((one for one in shown.splitlines() if "Verdict:" in one), "")
    verdict = line.partition("Verdict:")[2].strip(" |")
    return {
        "verdict": verdict,
        "is_right": any(word in verdict.upper() for word in slow.peer),
        "text": shown[-4000:],
    }


def run(command: list[str], environment: dict[str, str]) -> str:
    """Run a command, and return its output; at the time limit, let it shut its cluster down."""
    with ours.child(
        command, env=environment, cwd=ours.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            return process.communicate(timeout=TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            return f"timeout after {TIMEOUT_S:g} s\n{process.communicate()[0]}"


def error_of(found: dict[str, Any]) -> float | None:
    """Return the relative error of the predicted throughput; None without a prediction."""
    if found.get("real_gain") is None:
        return None
    return float((1 + found["gain"]) / (1 + found["real_gain"]) - 1)


def row_of(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one job."""
    if "error" in found:
        return (name, JOBS[name].cause, "failed", "", "", "", "")
    peer = found.get("traceml", {}).get("verdict", "not run")
    if "verdict" not in found:
        return (name, JOBS[name].cause, "not run", "", "", "", peer)
    error = error_of(found)
    return (
        name,
        JOBS[name].cause,
        found["verdict"] or "none",
        "" if found["gain"] is None else f"{found['gain']:+.0%}",
        "" if error is None else f"{found['real_gain']:+.0%}",
        "" if error is None else f"{error:+.0%}",
        peer,
    )


def table_of(result: dict[str, Any]) -> str:
    """Format the jobs as a Markdown table."""
    head = ("job", "cause", "verdict", "predicted", "real", "error", "TraceML")
    rows = [row_of(name, found) for name, found in result["jobs"].items()]
    total = (
        f"{result['num_right']} of {result['num_jobs']} causes right; predicted throughput within "
        f"{BAR:.0%} in {result['num_within_bar']} of {result['num_predicted']}; causes that "
        f"TraceML names: {result['num_right_traceml']}"
    )
    return f"{report.table(head, rows)}\n\n{total}"
