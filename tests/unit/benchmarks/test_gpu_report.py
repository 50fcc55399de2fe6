from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.steps.gpu_report import CHECKS, Check, Result, run, text_of, why_not_run

CHECK = Check(name="two GPUs", command=(sys.executable, "-c", "print('trained')"), num_gpus=2)


def test_check_without_its_gpus_says_what_it_needs() -> None:
    assert why_not_run(CHECK, 1, stand_in=False) == "needs 2 CUDA device(s), there are 1"
    assert why_not_run(CHECK, 2, stand_in=False) == ""


def test_stand_in_runs_on_a_machine_without_gpus_only() -> None:
    assert why_not_run(CHECK, 0, stand_in=True) == ""
    assert why_not_run(CHECK, 1, stand_in=True) != ""


def test_report_has_the_end_of_a_failed_checks_output(tmp_path: Path) -> None:
    program = "import sys; print('NCCL error: no route'); sys.exit(3)"
    failing = Check(name="NCCL, one rank", command=(sys.executable, "-c", program))

    result = run(failing, tmp_path)
    text = text_of([result, Result(check=CHECK, outcome="not run", detail="needs 2")])

    assert result.outcome == "failed"
    assert "exit code: 3\nNCCL error: no route" in text
    assert "## two GPUs" not in text
    assert "needs 2" in text


def test_check_that_hangs_is_ended(tmp_path: Path) -> None:
    program = "import time; time.sleep(60)"
    hanging = Check(name="hangs", command=(sys.executable, "-c", program), timeout_s=0.5)

    assert "timed out after 0 s" in run(hanging, tmp_path).detail


def test_every_check_has_its_own_files() -> None:
    commands = [(check.command, tuple(check.environment)) for check in CHECKS if check.num_gpus < 2]

    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert len(set(commands)) == len(commands)
