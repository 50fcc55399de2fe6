"""The lease of a study: one scheduler at a time, also after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etrain_jupyter.errors import FencedError
from etrain_jupyter.storage.study_folder import StudyLease

HOLD = """
import sys
from pathlib import Path
from etrain_jupyter.storage.study_folder import StudyLease
lease = StudyLease(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_second_scheduler_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "digits-1a2b3c4d"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as first:  # fmt: skip
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"

        with pytest.raises(FencedError) as caught:
            StudyLease(folder)

        first.kill()
        first.wait()
        StudyLease(folder).release()

    message = str(caught.value)
    assert message.startswith("study digits-1a2b3c4d is being run by another cluster (scheduler ")
    assert f"process {first.pid} on " in message
    assert "Nothing was started." in message


def test_released_lease_can_be_taken_again_and_its_holder_is_forgotten(tmp_path: Path) -> None:
    lease = StudyLease(tmp_path)
    lease.release()
    lease.release()

    assert (tmp_path / "study.lease").read_bytes() == b""
    again = StudyLease(tmp_path)
    with pytest.raises(FencedError):
        StudyLease(tmp_path)
    again.release()


def test_text_in_the_lease_is_read_until_it_is_cleared_and_keeps_the_size_of_the_file(
    tmp_path: Path,
) -> None:
    lease = StudyLease(tmp_path)
    assert StudyLease.read_trouble(tmp_path) == ""
    size = (tmp_path / "study.lease").stat().st_size

    lease.show("optuna.journal cannot be written: No space left on device")
    assert StudyLease.read_trouble(tmp_path) == (
        "optuna.journal cannot be written: No space left on device"
    )
    assert (tmp_path / "study.lease").stat().st_size == size, "a full disk has no room for more"
    with pytest.raises(FencedError, match=r"another cluster \(scheduler process \d+ on [^\n]+\)"):
        StudyLease(tmp_path)

    lease.show("")
    assert StudyLease.read_trouble(tmp_path) == ""
    lease.release()
