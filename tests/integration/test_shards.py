"""A data set in shards on a real local pool: a kill, a leave, joins, and a resume in mid-epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.data import Shards, write_shards
from etrain_jupyter.errors import EtrainError, JobFailedError
from etrain_jupyter.log.events import (
    TERMINAL_STATUSES,
    GenerationFormed,
    JobPlanned,
    JobResumed,
    StepCompleted,
    UserErrorRaised,
    WeightsHashed,
)
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.testing.invariants import assert_invariants
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.capabilities import long
from tests.integration.conftest import until
from tests.integration.test_full_disk import UNSHARE, can_mount

pytestmark = pytest.mark.timeout(400)  # real processes on a machine that may be busy

NUM_SAMPLES, BATCH, STEPS = 1000, 16, 240  # 63 steps per epoch; the last one has 8 samples

SLOW = Path(tempfile.mkdtemp()) / "slow"
"""While this file exists, steps are slow but use no CPU time."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if SLOW.exists():
        time.sleep(0.05)
    return F.cross_entropy(output, target)


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    yield
    SLOW.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def corpus(s3_process: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Provide a set in a bucket of about 40 blocks; the cluster inherits the bucket's address."""
    s3_process.make_bucket("corpus")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_process.environment.items():
            patch.setenv(name, value)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("cache")))
        rng = np.random.default_rng(3)
        x = rng.standard_normal((NUM_SAMPLES, 8)).astype(np.float32)
        url = "s3://corpus/train"
        columns = {"x": x, "label": (x.sum(axis=1) > 0).astype(np.int64)}
        write_shards(columns, url, block_bytes=1200, progress=False)
        yield url


def body(corpus: str, **changes: Any) -> dict[str, Any]:
    shards = Shards(corpus, window=8)
    return {
        "model": Net,
        "data": {"train": shards, "eval": shards},
        "eval": "40 steps",
        "loss": slow_loss,
        "optimizer": {"name": "AdamW", "lr": 0.01},
        "batch": {"global": BATCH},
        "steps": STEPS,
        "workers": {"min": 1, "max": 2},
        "reproducible": {"shards": 4},
        "checkpoint": {"every": "10 steps"},
        **changes,
    }


def found(job: TrainingJob, kind: type) -> list[Any]:
    return [event for event in job.events() if isinstance(event, kind)]


def steps_on(job: TrainingJob, count: int = 5) -> None:
    goal = job.step + count
    until(lambda: job.step >= goal or job.status in TERMINAL_STATUSES, f"step {goal}")
    job.raise_for_status()


def full(job: TrainingJob, world_size: int) -> None:
    until(
        lambda: job.world_size == world_size and job.status == "running",
        f"world size {world_size}",
    )
    steps_on(job)


def final_digest(job: TrainingJob) -> str:
    [digest] = {event.digest for event in found(job, WeightsHashed) if event.step == STEPS}
    return str(digest)


def test_churn_and_a_resume_leave_the_weights_of_a_calm_run(
    s3_process: S3Server, corpus: str, submit: Any
) -> None:
    calm = submit(**body(corpus, workers={"min": 1, "max": 1}))
    assert calm.wait(timeout=200) == "finished", calm
    s3_process.set_faults(S3Fault(kind="truncate", every=9, match="part-"))
    SLOW.touch()
    job = submit(**body(corpus))
    full(job, 2)
    victim = next(w for w in job.workers() if w["rank"] == 0)
    os.kill(victim["trainer_pid"], signal.SIGKILL)
    until(lambda: len(found(job, GenerationFormed)) > 1, "another generation")
    full(job, 2)  # the replacement has joined
    job.scale(max=1)
    full(job, 1)
    job.stop()
    assert job.wait(timeout=200) == "stopped", job
    assert job.step % 63 > 0, "stopped in mid-epoch"

    SLOW.unlink()
    job.resume(max=2)
    assert job.wait(timeout=200) == "finished", job

    assert final_digest(job) == final_digest(calm)
    log = list(job.events())
    assert_invariants(log)
    assert [e for e in log if isinstance(e, JobResumed)]
    planned = found(job, JobPlanned)[0]
    assert planned.train_layout == Shards(corpus, window=8).layout.encode()
    assert {event.world_size for event in found(job, StepCompleted)} == {1, 2}


# --- bad input, from the cell to its error ---


def write_parquet(folder: Path, *, seed: int) -> None:
    """Write files of the same sizes for every seed."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for number in range(4):
        x = rng.standard_normal((250, 8)).astype(np.float32)
        columns = {"x": pa.FixedShapeTensorArray.from_numpy_ndarray(x), "label": [0, 1] * 125}
        options: Any = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        path = folder / f"part-{number}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=25, **options)


def failed(job: TrainingJob) -> str:
    with pytest.raises(JobFailedError):
        job.wait(timeout=200)
    return str(found(job, UserErrorRaised)[0].error)


# With ``corpus``, so that the cluster, which all tests share, has the address of the bucket.
@pytest.mark.usefixtures("corpus")
def test_shard_that_is_replaced_before_its_first_read_ends_the_job(
    tmp_path: Path, submit: Any
) -> None:
    table = pa.table({"x": pa.array([[float(i)] * 8 for i in range(1000)]), "label": [0] * 1000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    shards = Shards(tmp_path)
    len(shards)  # indexed here, in the notebook
    other = table.set_column(1, "label", pa.array([1] * 1000))
    pq.write_table(other, tmp_path / "a.parquet", row_group_size=25)

    error = failed(submit(**body(str(tmp_path), data={"train": shards})))

    assert f"shard a.parquet in {tmp_path} is not the one that was indexed" in error
    assert "%etrain resume JOB" in error


def test_objects_that_cannot_be_read_end_the_job_with_their_reason(
    s3_process: S3Server, corpus: str, submit: Any, tmp_path: Path
) -> None:
    prefix = tmp_path.name  # another one if the test is repeated
    url = f"s3://corpus/{prefix}"
    write_shards(Shards(corpus), url, block_bytes=1200, progress=False)
    keys = body(url)
    len(keys["data"]["train"])  # indexed here
    name = f"{prefix}/part-00000.arrow"
    data = s3_process.read("corpus", name)

    s3_process.set_faults(S3Fault(kind="deny", match="part-"))
    denied = failed(submit(**keys))
    s3_process.set_faults()
    s3_process.write("corpus", name, data[: len(data) // 2])
    truncated = failed(submit(**keys))

    assert f"part-00000.arrow in {url} is not the one that was indexed" in truncated
    assert f"cannot be read in {url}" in denied
    assert "denied" in denied


def test_set_without_rows_or_with_two_schemas_is_refused_before_the_job(
    tmp_path: Path, submit: Any
) -> None:
    empty, mixed = tmp_path / "empty", tmp_path / "mixed"
    write_parquet(mixed, seed=1)
    pq.write_table(pa.table({"x": ["a"], "label": [0]}), mixed / "part-9.parquet")
    empty.mkdir()
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), empty / "a.parquet")

    with pytest.raises(EtrainError, match="has no rows"):
        submit(**body(str(empty)))
    with pytest.raises(EtrainError, match=r"schema of part-9\.parquet .* column 'x' is string"):
        submit(**body(str(mixed)))


CACHE_THAT_FILLS = """\
import json, sys
from etrain_jupyter.data import Shards
warnings = []
shards = Shards(sys.argv[1], cache_dir=sys.argv[2])
reader = shards.open(warn=warnings.append)
tables = [reader.read_block(block) for block in range(len(shards.index.blocks))]
print(json.dumps([sum(map(len, tables)), warnings]))
"""


@pytest.mark.skipif(not can_mount(), reason="no file system can be mounted in a name space here")
@long
def test_cache_disk_that_fills_up_is_bypassed(corpus: str, tmp_path: Path) -> None:
    # A mount namespace, which ends with its last process.
    script = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$4" "$1/cache"'
    names = [str(tmp_path), sys.executable, CACHE_THAT_FILLS, corpus]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", script, "sh", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_rows, [warning] = json.loads(done.stdout)

    assert num_rows == NUM_SAMPLES
    assert "is full; blocks that do not fit are read from their source" in warning
