"""Make an archive of run folders that an earlier version wrote, for a test of later versions.

============================ ======= ============================================================
archive in this folder       commit  written by version 0.1.0 on Python 3.11, with
============================ ======= ============================================================
``fd24346.tar.xz``           fd24346 bundle format 2, manifest format 1, log format of that commit
``d5cb29f.tar.xz``           d5cb29f bundle format 1, otherwise the same; only run ``stopped``
============================ ======= ============================================================

To make another one, check out the commit whose formats are to be kept, and run a copy of this file
with that code, in a folder, with a home and on a host whose names may be published, because they
are recorded in the runs::

    git worktree add ../earlier fd24346
    export PYTHONPATH=$PWD/../earlier
    sudo unshare --uts --mount sh -c '
        hostname workstation
        mount -t tmpfs none /srv && mkdir -p /srv/lab/tmp && cp make.py /srv/lab && cd /srv/lab
        HOME=/srv/lab TMPDIR=/srv/lab/tmp python make.py fd24346
        cp fd24346.tar.xz WHERE_IT_IS_KEPT'

It uses the code of that commit only through ``%%etrain`` cells and the job's public methods, apart
from the S3 server of ``etrain_jupyter.testing``. It takes about a minute. Names of runs after the
commit make only these.

Contents of the archive::

    about.json        commit, versions, and for each run its id, how it ended, and its last step
    runs/JOB_ID/      the run folders of finished, stopped, failed, killed
    state/            what the killed cluster left in the state directory, without certificates,
                      logs and Dask's scratch; and signing.key, 32 times "k"
    bucket/KEY        the objects of the bucket of run ``remote``

All runs have the same cell but for ``name`` and ``to``, and are reproducible: every one of them
ends with the same weights once it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from IPython.core.interactiveshell import InteractiveShell

import etrain_jupyter
from etrain_jupyter import cli
from etrain_jupyter.errors import JobFailedError

HOME = Path.cwd()
STATE, RUNS, OUT = HOME / "state", HOME / "etrain-runs", HOME / "out"
SLOW = HOME / "slow"
"""While this file exists, a step takes 0.2 s, which leaves time to disturb the run."""
BROKEN = HOME / "broken"
"""While this file exists, the loss function of run ``failed`` raises an error."""
BUCKET = "lab"
PATIENCE_S = 120.0
TOTAL_STEPS = 72

DEFINITIONS = """\
import os, time
import torch
import torch.nn.functional as F
from torch import nn

rows = (torch.arange(96 * 8).reshape(96, 8) * 37 % 101).float() / 50 - 1
labels = (rows[:, :4].sum(1) > rows[:, 4:].sum(1)).long()
train_set = torch.utils.data.TensorDataset(rows, labels)
eval_set = torch.utils.data.TensorDataset(rows[:32], labels[:32])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2))

    def forward(self, x):
        return self.layers(x)

def slow_loss(output, target):
    if os.path.exists("broken"):
        raise ValueError("the file 'broken' exists")
    time.sleep(0.2 if os.path.exists("slow") else 0.0)
    return F.cross_entropy(output, target)

def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()
"""

CELL = """\
model: Net()
data: {train: train_set, eval: eval_set}
loss: slow_loss
metrics: {accuracy: accuracy}
optimizer: {name: AdamW, lr: 0.01}
batch: {global: 16}
epochs: 12
eval: 1 epoch
checkpoint: {every: 10 steps, keep: 2, best: {metric: accuracy, mode: max}}
reproducible: {shards: 2}
workers: {min: 1, max: 2}
name: NAME
"""

shell = InteractiveShell.instance()


def run(name: str) -> Any:
    """Submit the cell under a name, as a notebook does, and return the job."""
    # The line is the cell's first one, so that the run records a cell like a user's.
    result = shell.run_cell(f"%%etrain distributed -o {name}\n{CELL.replace('NAME', name)}")
    result.raise_error()
    return shell.user_ns[name]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until ``condition()`` is true and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {PATIENCE_S:.0f} s")
        time.sleep(0.02)
    return found


def until_training(job: Any, step: int, world_size: int = 2) -> None:
    """Wait until ``job`` has reached ``step`` on ``world_size`` workers."""
    until(
        lambda: job.world_size == world_size and job.step >= step and job.status == "running",
        f"step {step} of {job.id} on {world_size} workers",
    )


def processes() -> list[psutil.Process]:
    """Return the processes of all clusters of this program."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("ETRAIN_STATE") == str(STATE)
            if is_ours and process.pid != os.getpid():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def kill_cluster() -> None:
    """Kill keeper, scheduler, workers and trainers at once, as a power cut does."""
    for process in processes():
        process.send_signal(signal.SIGSTOP)
    while left := processes():
        for process in left:
            process.kill()
        time.sleep(0.1)


def scheduler_pid() -> int:
    """Return the process id of the scheduler of the only cluster."""
    [record] = STATE.glob("local-*/cluster.json")
    return int(json.loads(record.read_text())["scheduler_pid"])


def has(job: Any, kind: str, count: int = 1) -> bool:
    """Whether the job has had ``count`` events of a kind."""
    return sum(event.kind == kind for event in job.events()) >= count


def make_finished() -> Any:
    """Finish a run that lost a worker, its scheduler and, after a notice, another worker."""
    SLOW.touch()
    job = run("finished")
    until_training(job, 8)
    job.kill()
    until(lambda: has(job, "WorkerLost"), "the loss of a worker")
    until_training(job, job.step + 4)
    job.preempt(notice_s=5)
    until(lambda: has(job, "WorkerLeft"), "the departure of a worker")
    until_training(job, job.step + 2)
    os.kill(scheduler_pid(), signal.SIGKILL)
    until(lambda: has(job, "SchedulerRestarted"), "the restart of the scheduler")
    job.pause()
    until(lambda: job.status == "paused", "the pause")
    job.resume()
    SLOW.unlink()
    return finish(job, "finished")


def make_stopped(name: str) -> Any:
    """Stop a run, which saves a checkpoint first."""
    SLOW.touch()
    job = run(name)
    until_training(job, 25)
    job.stop()
    return finish(job, "stopped")


def make_failed() -> Any:
    """Let the user's own code raise an error after a checkpoint."""
    SLOW.touch()
    job = run("failed")
    until_training(job, 5)
    until(lambda: has(job, "CheckpointCommitted"), "a checkpoint")
    until_training(job, job.step + 3)
    BROKEN.touch()
    finish(job, "failed")
    BROKEN.unlink()
    return job


def make_killed() -> Any:
    """Kill the whole cluster of a run."""
    SLOW.touch()
    job = run("killed")
    until_training(job, 8)
    until(lambda: has(job, "CheckpointCommitted"), "a checkpoint")
    until_training(job, job.step + 3)
    kill_cluster()
    return job


def finish(job: Any, status: str) -> Any:
    """Wait for the end and check that it is the expected one."""
    with contextlib.suppress(JobFailedError):
        job.wait(timeout=PATIENCE_S)
    if job.status != status:
        raise RuntimeError(f"{job!r} should be {status}: {job.reason}")
    return job


def down() -> None:
    """Shut the cluster down."""
    if status := cli.main(["down"]):
        raise RuntimeError(f"etrain down returned {status}")
    until(lambda: not processes(), "the end of all processes")


def describe(job: Any, status: str) -> dict[str, Any]:
    """Return what the test compares."""
    kinds = sorted({event.kind for event in job.events()})
    steps = job.history()["step"]
    saved = job.checkpoints()[0]["step"]
    weights = {name: value.tolist() for name, value in job.state_dict().items()}
    return {
        "job_id": job.id,
        "status": status,
        "last_step": steps[-1],
        "saved_step": saved,
        "event_kinds": kinds,
        "num_events": len(job.events()),
        "weights": weights,
    }


def pack(archive: Path, about: dict[str, Any], killed_state: dict[str, bytes]) -> None:
    """Write the archive, with fixed owners and times."""
    (OUT / "about.json").write_text(json.dumps(about, indent=1))
    shutil.copytree(RUNS, OUT / "runs")
    for name, data in killed_state.items():
        path = OUT / "state" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 1_700_000_000
        return member

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(OUT.iterdir()):
            tar.add(path, path.name, filter=anonymous)


def state_left() -> dict[str, bytes]:
    """Return the files in the state directory, without secrets and traces of this machine."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found = {}
    for path in sorted(STATE.rglob("*")):
        name = str(path.relative_to(STATE))
        if path.is_file() and not {"tls", "logs", "scratch"} & set(path.parts):
            data = path.read_bytes().replace(sys.executable.encode(), b"/usr/bin/python3")
            found[name] = data.replace(boot_id.encode(), b"0" * len(boot_id))
    return found


def make_remote() -> Any:
    """Stop a run whose run store is a bucket, and copy the bucket."""
    from etrain_jupyter.testing.s3_server import S3Server

    with S3Server() as server:
        server.make_bucket(BUCKET)
        os.environ |= {**server.environment, "ETRAIN_RUNS": f"s3://{BUCKET}/runs"}
        remote = describe(make_stopped("remote"), "stopped")
        down()
        for key in server.list_keys(BUCKET):
            path = OUT / "bucket" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(server.read(BUCKET, key))
    return remote


def main() -> None:
    """Make the runs and pack them."""
    commit, *names = sys.argv[1:]
    names = names or ["finished", "stopped", "failed", "killed", "remote"]
    os.environ |= {"ETRAIN_STATE": str(STATE), "CUDA_VISIBLE_DEVICES": ""}
    STATE.mkdir(mode=0o700)
    OUT.mkdir()
    (STATE / "signing.key").write_bytes(b"k" * 32)
    (STATE / "signing.key").chmod(0o600)
    for cell in ("%load_ext etrain_jupyter", DEFINITIONS):
        shell.run_cell(cell, store_history=True).raise_error()

    runs, left = {}, {}
    if "finished" in names:
        runs["finished"] = describe(make_finished(), "finished")
    if "stopped" in names:
        runs["stopped"] = describe(make_stopped("stopped"), "stopped")
    if "failed" in names:
        runs["failed"] = describe(make_failed(), "failed")
    down()
    if "killed" in names:
        runs["killed"] = describe(make_killed(), "running")
        left = state_left()
        down()
    if "remote" in names:
        runs["remote"] = make_remote()

    about = {
        "commit": commit,
        "version": etrain_jupyter.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "total_steps": TOTAL_STEPS,
        "home": str(HOME),
        "host": platform.node(),
        "bucket": BUCKET,
        "runs": runs,
    }
    archive = HOME / f"{commit}.tar.xz"
    pack(archive, about, left)
    print(archive.stat().st_size, "bytes")


if __name__ == "__main__":
    try:
        main()
    finally:
        kill_cluster()
