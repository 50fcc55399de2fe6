"""Jobs with a run store in a bucket: another machine follows one live and resumes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from etrain_jupyter.testing.s3_server import S3Server
from tests.integration.conftest import processes_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """\
import json, platform, sys
platform.node = lambda: {host!r}
import etrain_jupyter
from etrain_jupyter import cli
from etrain_jupyter.notebook.job import store_link
store_link.SILENT_S = 12.0
store_link.HEARTBEAT_CHECK_S = store_link.POLL_S = 0.5
"""

JOB = """\
import os, time, torch, torch.nn.functional as F
from torch import nn
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()
train_set = torch.utils.data.TensorDataset(x, y)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(4, 2)
    def forward(self, x):
        return self.layers(x)
def slow_loss(output, target):
    # Slow while the first machine exists.
    time.sleep(0.4 if os.path.exists("FOLDER") else 0.0)
    return F.cross_entropy(output, target)
job = etrain_jupyter.distributed(
    model="Net()", data={"train": "train_set"}, loss="slow_loss", name="far",
    batch={"global": 16}, epochs=EPOCHS, workers={"min": 1, "max": 2},
    checkpoint={"every": "10 steps"})
print(job.id, flush=True)
"""


class Machine:
    """Processes with a separate home folder, state directory and host name."""

    def __init__(self, folder: Path, host: str, root: str) -> None:
        self.folder, self.host = folder, host
        folder.mkdir()
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "ETRAIN_STATE": str(folder / "state"),
            "ETRAIN_RUNS": root,
            "CUDA_VISIBLE_DEVICES": "",
        }

    def begin(self, code: str, **options: Any) -> subprocess.Popen[str]:
        (self.folder / "program.py").write_text(PROGRAM.format(host=self.host) + code)
        return subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )

    def run(self, code: str) -> str:
        process = self.begin(textwrap.dedent(code))
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
        return text

    def etrain(self, *words: str) -> str:
        return self.run(f"raise SystemExit(cli.main({list(words)!r}))")

    def vanish(self) -> None:
        """Kill all its processes at once and delete its disk."""
        for process in processes_of(self.folder):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        until(lambda: processes_of(self.folder) == [], "the end of all processes")
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def machines(tmp_path: Path, s3_server: S3Server, s3_bucket: str) -> Iterator[tuple[Machine, ...]]:
    made = [Machine(tmp_path / n, n, f"s3://{s3_bucket}/runs") for n in ("first", "second")]
    yield tuple(made)
    for machine in made:
        machine.vanish()


def test_job_is_followed_and_resumed_on_another_machine(
    machines: tuple[Machine, ...], s3_server: S3Server, s3_bucket: str
) -> None:
    first, second = machines
    code = JOB.replace("EPOCHS", "60").replace("FOLDER", str(first.folder))
    job_id = first.run(code).strip().splitlines()[-1]
    follower = second.begin(f"raise SystemExit(cli.main(['logs', '-f', {job_id!r}]))")
    assert follower.stdout is not None
    lines: list[str] = []
    while not any("job: step" in line for line in lines):
        lines.append(follower.stdout.readline())
        assert lines[-1], lines
    known = f"import sys; job = etrain_jupyter.attach({job_id!r})\n"
    live = second.run(known + "print(json.dumps([job.status, job.step, job.is_reachable]))")
    status, step, is_reachable = json.loads(live)
    assert (status, is_reachable) == ("running", True)
    assert step > 0
    assert f"{job_id}  running" in second.etrain("ls")
    until(
        lambda: s3_server.list_keys(s3_bucket, f"runs/{job_id}/manifests"),
        "a checkpoint in the bucket",
    )
    first.vanish()

    said = second.run(
        known
        + "from contextlib import suppress\n"
        + "from etrain_jupyter.errors import JobLostError\n"
        + "with suppress(JobLostError): job.wait()\n"
        + "print(job.reason); print(job.resume(trust=True))"
    )

    assert "has sent no heartbeat for" in said
    assert " on cluster local-" in said
    ended = second.run(
        known
        + "status = job.wait()\n"
        + "print(json.dumps([status, job.history()['step'], job.audit().ok]))"
    )
    status, steps, is_ok = json.loads(ended.splitlines()[-1])
    assert (status, steps, is_ok) == ("finished", list(range(1, 241)), True)
    text, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0, text
    assert "Waiting for etrain resume" in text
    assert text.rstrip().endswith("job: finished")
