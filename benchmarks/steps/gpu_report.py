"""Run everything that needs a GPU, and write one report: ``make gpu``.

``python -m benchmarks.steps.gpu_report --output FOLDER``

Each check is a separate process with a timeout, so a check that hangs or ends the CUDA context does
not affect the others. The report, ``FOLDER/report.md``, has a row for each check: passed, failed
with the last lines of its output, or not run with the reason. With ``--stand-in``, the checks that
can run on a CPU run there; this tests the commands, and the report says so. The exit status is 0 if
no check failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.common import report

PYTHON = sys.executable
SHARED = {"ETRAIN_WORKERS_PER_GPU": "4"}
"""Environment for ranks that share a GPU, with gloo."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One part of the report."""

    name: str
    command: tuple[str, ...]
    """Arguments; ``{out}`` is replaced by a folder for results."""
    environment: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 1
    has_stand_in: bool = True
    """Whether the command also tests something on a CPU."""
    timeout_s: float = 420.0


def benchmark(name: str, *options: str) -> tuple[str, ...]:
    """Return the command of a benchmark that writes its figures to the folder for results."""
    words = "-".join([name, *(option.strip("-") for option in options)])
    return (PYTHON, "-m", "benchmarks", name, "--json", f"{{out}}/{words}.json", *options)


PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
CHECKS = (
    Check(name="tests marked gpu", command=(*PYTEST, "tests", "-m", "gpu"), has_stand_in=False),
    Check(
        name="quickstart notebook, workers share a GPU",
        command=(PYTHON, "notebooks/run.py", "notebooks/01_quickstart.ipynb", "--output", "{out}"),
        environment=SHARED,
    ),
    Check(name="job options, one rank on NCCL", command=benchmark("gpu")),
    Check(
        name="job options, two ranks share a GPU",
        command=benchmark("gpu", "--world-size=2"),
        environment=SHARED,
    ),
    Check(
        name="job options, two GPUs with NCCL",
        command=benchmark("gpu", "--world-size=2"),
        num_gpus=2,
        has_stand_in=False,
    ),
    Check(
        name="chaos table, ranks share a GPU",
        command=(*PYTEST, "tests/chaos/test_faults.py", "tests/chaos/test_endings.py"),
        environment={"ETRAIN_CHAOS_GPU": "0", "ETRAIN_SPAWN": "1"},
        timeout_s=900.0,
    ),
    Check(
        name="recovery, four ranks share a GPU",
        command=benchmark("recovery", "--world-size=4", "--kills=6", "--no-peers"),
        environment=SHARED,
    ),
    Check(
        name="throughput next to torchrun DDP, one rank",
        command=benchmark("paired", "--world-size=1", "--pairs=30"),
    ),
    Check(
        name="throughput next to torchrun DDP, two GPUs",
        command=benchmark("paired", "--world-size=2", "--pairs=30"),
        num_gpus=2,
        has_stand_in=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a check."""

    check: Check
    outcome: str
    """``passed``, ``failed`` or ``not run``."""
    detail: str
    """The end of the output, or the reason why it was not run."""
    seconds: float = 0.0


def main() -> int:
    """Run the checks and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the report")
    parser.add_argument("--only", action="append", default=[], help="part of a check's name")
    parser.add_argument(
        "--stand-in", action="store_true", help="on a machine without GPUs: use CPU"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    checks = [
        check
        for check in CHECKS
        if not options.only or any(word in check.name for word in options.only)
    ]
    results = []
    for check in checks:
        print(f"gpu: {check.name} ...", flush=True)
        why_not = why_not_run(check, torch.cuda.device_count(), stand_in=options.stand_in)
        result = (
            Result(check=check, outcome="not run", detail=why_not)
            if why_not
            else run(check, options.output.resolve())
        )
        print(f"gpu: {check.name}: {result.outcome}, {result.seconds:.0f} s", flush=True)
        results.append(result)
        # After each check: a machine that is taken away keeps what has been found.
        (options.output / "report.md").write_text(text_of(results), encoding="utf-8")
    print(f"\n{text_of(results)}\nReport: {options.output / 'report.md'}")
    return 1 if any(result.outcome == "failed" for result in results) else 0


def why_not_run(check: Check, num_gpus: int, *, stand_in: bool) -> str:
    """Return why a check is not run with ``num_gpus`` CUDA devices; empty if it is run."""
    if num_gpus >= check.num_gpus or (stand_in and num_gpus == 0 and check.has_stand_in):
        return ""
    return f"needs {check.num_gpus} CUDA device(s), there are {num_gpus}"


def run(check: Check, output: Path) -> Result:
    """Run a check in its own process group, and end the group at the timeout."""
    log = output / f"{'-'.join(check.name.replace(',', '').split())}.log"
    command = [word.format(out=output) for word in check.command]
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            env={**os.environ, **check.environment},
        )  # fmt: skip
        try:
            code: int | str = process.wait(check.timeout_s)
        except subprocess.TimeoutExpired:
            # Benchmarks and notebooks shut down their clusters on SIGTERM.
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = f"timed out after {check.timeout_s:.0f} s"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return Result(
        check=check,
        outcome="passed" if code == 0 else "failed",
        detail="\n".join([*([] if code == 0 else [f"exit code: {code}"]), *lines[-60:]]),
        seconds=time.monotonic() - began,
    )


def text_of(results: Sequence[Result]) -> str:
    """Return the report as Markdown."""
    machine = report.machine()
    devices = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
    rows = [
        (
            result.check.name,
            result.outcome,
            f"{result.seconds:.0f} s" if result.seconds else result.detail,
        )
        for result in results
    ]
    parts = [
        "# GPU report",
        f"{machine['measured']}, torch {machine['torch']}, Python {machine['python']}, "
        f"{machine['cores']} cores, devices: {', '.join(devices) or 'none'}",
        *(["**No GPU: checks that passed ran on the CPU as a stand-in.**"] if not devices else []),
        report.table(("check", "outcome", "time, or reason"), rows),
    ]
    for result in results:
        if result.outcome != "not run":
            parts += [f"## {result.check.name}: {result.outcome}", f"```\n{result.detail}\n```"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
