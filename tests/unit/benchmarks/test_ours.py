"""Processes of benchmarks that have clusters of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import ours

CHILD = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    # More than a pipe holds, so the parent must read it.
    print("x" * 1_000_000)
    Path(sys.argv[1]).touch()
"""


def interrupt(command: list[str]) -> None:
    """Run a child, and interrupt the benchmark once the child is ready."""
    with ours.child(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        signal.raise_signal(signal.SIGINT)


def test_child_cleans_up_if_the_benchmark_is_interrupted(tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"

    with pytest.raises(KeyboardInterrupt):
        interrupt([sys.executable, "-c", CHILD, str(cleaned)])

    assert cleaned.exists()


def test_second_signal_does_not_interrupt_the_cleanup() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with ours.signals_ignored():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) is before
