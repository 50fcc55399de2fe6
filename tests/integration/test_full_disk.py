"""A run store that fills up during a run, with real processes and a real file system.

Regression: all trainers exited, workers were restarted endlessly, and more than 1,000 steps were
repeated when there was space again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.capabilities import long
from tests.integration.conftest import processes_of

pytestmark = pytest.mark.slow

FULL_S = 5.0
UNSHARE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
"""Run in a separate mount namespace, so that no mount is left after a failure."""


def can_mount() -> bool:
    if sys.platform != "linux" or not shutil.which("unshare"):
        return False
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/tmp"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


@pytest.mark.timeout(300)
@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted in a name space here")
@long
def test_job_survives_a_temporarily_full_disk_without_losing_a_worker(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.integration.full_disk_job", str(tmp_path), str(FULL_S)]
    try:
        done = subprocess.run([*UNSHARE, *command], check=False, capture_output=True, text=True)
        assert processes_of(tmp_path) == []
    finally:
        for process in processes_of(tmp_path):  # after a timeout of the test
            process.kill()
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["status"] == "finished", found
    assert found["is_audit_ok"], found["audit"]
    assert found["num_steps"] == found["num_planned"]
    again = ("num_repeated", "num_undone", "num_lost", "num_restored")
    assert {name: found[name] for name in again} == dict.fromkeys(again, 0)
    assert found["num_generations"] == 1
    assert found["pids_before"] == found["pids_after"]
    assert found["bytes_free_meanwhile"] < 20_000
    meanwhile = found["meanwhile"]
    assert meanwhile["status"] == "running"
    assert "the log cannot be written: No space left on device" in meanwhile["reason"]
    assert "kept in memory" in meanwhile["shown"]
    assert len(found["recovered"]) == 1
