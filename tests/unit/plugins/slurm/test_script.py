"""The job script of a worker, as dask-jobqueue writes it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.slurm.head.script import job_class, job_script
from etrain_jupyter.plugins.slurm.machine.job_worker import parse_arguments
from etrain_jupyter.plugins.slurm.spec import SlurmSpec
from tests.capabilities import needs_module

pytestmark = needs_module("dask_jobqueue")


@pytest.fixture
def make_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(**keys: Any) -> str:
        spec = SlurmSpec.parse({"cores": 4, "memory": "16 GiB"} | keys)
        return job_script(
            spec,
            worker="w1",
            job_name="slurm-a-b.w1",
            scheduler="tls://10.0.0.1:8786",
            supervisor="m:S",
            site=tmp_path / "my folder",
        )

    return make


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)", script, flags=re.MULTILINE)


def test_script_requests_what_the_spec_says(make_script: Any) -> None:
    script = make_script(queue="gpu", account="my-project", gpus=1, walltime="30 h", notice="90 s")

    found = directives(script)
    for directive in (
        *("-J slurm-a-b.w1", "-p gpu", "-A my-project", "-n 1", "--cpus-per-task=4", "--mem=16G"),
        *("-t 1-06:00:00", "--gres=gpu:1", "--signal=B:USR1@90", "--no-requeue"),
    ):
        assert directive in found


def test_last_command_becomes_the_worker(make_script: Any, tmp_path: Path) -> None:
    *_, command = make_script(local_directory="/scratch").strip().splitlines()

    words = shlex.split(command)
    module = words.index("etrain_jupyter.plugins.slurm.machine.job_worker")
    assert words[:3] == ["exec", sys.executable, "-m"]
    arguments = parse_arguments(words[module + 1 :])
    assert (arguments.name, arguments.device, arguments.supervisor) == ("w1", "cpu", "m:S")
    assert arguments.folder == tmp_path / "my folder"
    assert arguments.local_directory == Path("/scratch")
    assert (arguments.away_s, arguments.kill_wait_s) == (300.0, 30.0)


def test_prologue_runs_before_the_worker_and_values_are_quoted(
    make_script: Any, tmp_path: Path
) -> None:
    script = make_script(
        environment={"WORDS": "a $(touch ran)"},
        prologue=["echo $WORDS $ETRAIN_NOTICE_S > said"],
        python="/bin/true",
    )

    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)

    assert (tmp_path / "said").read_text() == "a $(touch ran) 120\n"
    assert not (tmp_path / "ran").exists()


def test_notice_does_not_end_a_job_whose_worker_is_starting(
    make_script: Any, tmp_path: Path
) -> None:
    script = make_script(prologue=["kill -USR1 $$", "touch survived"], python="/bin/true")

    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)

    assert (tmp_path / "survived").exists()


def test_missing_sizes_are_refused_with_the_keys_to_write(make_script: Any) -> None:
    with pytest.raises(PoolError, match="cores: 8 and memory: 32 GiB"):
        make_script(cores=None, memory=None)


def test_import_of_dask_jobqueue_keeps_the_signal_handlers() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    job_class()

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
