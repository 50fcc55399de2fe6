"""Loading weights reads the files of the weights, not the optimizer's state."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from safetensors.torch import save

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.log.event_log import EventLog
from etrain_jupyter.log.events import JobStatusChanged
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.notebook.job.weights import find_saved
from etrain_jupyter.storage.checkpoints import LocalStore, Manifest, Part, open_store
from etrain_jupyter.storage.objects.s3_bucket import Bucket

SIZE = 4096
"""Elements of the model. Its file has 16 kB, and that of Adam's state 32 kB."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that are read from checkpoints, by the part's name."""
    counted: Counter[str] = Counter()
    get_part, download = LocalStore.get_part, Bucket.download

    def count_part(self: LocalStore, part: Part) -> Path:
        counted[PurePosixPath(part.key).name] += part.size
        return get_part(self, part)

    def count_download(self: Bucket, key: str, size: int, *rest: Any) -> None:
        counted[PurePosixPath(key).name] += size
        download(self, key, size, *rest)

    monkeypatch.setattr(LocalStore, "get_part", count_part)
    monkeypatch.setattr(Bucket, "download", count_download)
    return counted


@pytest.fixture(params=["folder", "bucket"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> TrainingJob:
    """A finished job without checkpoints, which it writes to a folder or to a bucket."""
    to = str(tmp_path / "kept")
    if request.param == "bucket":
        to = f"s3://{request.getfixturevalue('s3_bucket')}/kept"
    best = {"metric": "loss", "mode": "min"}
    record = RunStore(tmp_path / "runs").create(
        {"name": "net", "created": 1.0, "config": {"checkpoint": {"to": to, "best": best}}},
        job_id="net-1",
    )
    log = EventLog(record.log_path, fsync_every_s=None)
    log.append([JobStatusChanged(job_id="net-1", time=1.0, status="finished")])
    log.close()
    return TrainingJob(record, None)


def commit(job: TrainingJob, step: int, *, average: bool = False) -> dict[str, Part]:
    """Save a checkpoint as a trainer with Adam does, optionally with averaged weights."""
    store = open_store(job.record.checkpoints)
    folder = store.begin(step)
    model = {"w": torch.full((SIZE,), float(step))}
    moments = {f"optimizer.0.{name}": torch.zeros(SIZE) for name in ("exp_avg", "exp_avg_sq")}
    packed = {"num_updates": 1, "average": {"w": {"$tensor": "extra.ema.average.w"}}}
    extras = {"evaluations": {"best": [[10, 0.1]]}, **({"ema": packed} if average else {})}
    contents = {
        "model.safetensors": save(model),
        "optimizer-00001-of-00002.safetensors": save(moments),
        "optimizer-00002-of-00002.safetensors": save(moments),
        "extra.safetensors": save({"extra.ema.average.w": torch.full((SIZE,), -1.0)}),
        "state.json": json.dumps({"extras": extras}).encode(),
        "config.json": b"{}",
    }
    parts = {name: store.put_part(folder, name, data) for name, data in contents.items()}
    facts: dict[str, Any] = {"job_id": job.id, "generation": 1, "config_digest": "", "created": 1.0}
    assert store.commit(Manifest(step=step, parts=parts, **facts))
    return parts


def first_weight(job: TrainingJob, which: str | int = "last", weights: str = "auto") -> float:
    return float(job.state_dict(which, weights=weights)["w"][0])


def test_weights_are_read_without_the_optimizer(job: TrainingJob, read: Counter[str]) -> None:
    parts = commit(job, 20)
    total = sum(part.size for part in parts.values())

    assert first_weight(job) == 20

    assert read["model.safetensors"] == parts["model.safetensors"].size
    assert set(read) == {"model.safetensors", "state.json", "config.json"}
    assert read.total() < total / 5  # the model, two files of moments, and the extra part


@pytest.mark.parametrize(("weights", "value"), [("auto", -1), ("averaged", -1), ("raw", 20)])
def test_averaged_weights_are_read_only_if_they_are_used(
    job: TrainingJob, read: Counter[str], weights: str, value: float
) -> None:
    commit(job, 20, average=True)

    assert first_weight(job, weights=weights) == value

    assert ("extra.safetensors" in read) is (weights != "raw")
    assert not any(name.startswith("optimizer") for name in read)


def test_best_weights_need_only_the_state_of_the_newest_checkpoint(
    job: TrainingJob, read: Counter[str]
) -> None:
    best, newest = commit(job, 10), commit(job, 20)

    assert first_weight(job, "best") == 10

    assert read["model.safetensors"] == best["model.safetensors"].size
    states = best["state.json"].size + newest["state.json"].size
    assert states <= read["state.json"] <= 2 * states
    assert set(read) == {"model.safetensors", "state.json", "config.json"}


def test_weights_at_a_step_and_exports_leave_the_optimizer_out(
    job: TrainingJob, read: Counter[str], tmp_path: Path
) -> None:
    commit(job, 20)

    assert first_weight(job, 20) == 20
    job.export(tmp_path / "net.safetensors")

    assert set(read) == {"model.safetensors", "state.json", "config.json"}


def test_damaged_optimizer_does_not_prevent_loading_the_weights(tmp_path: Path) -> None:
    job = local_job(tmp_path)
    commit(job, 10)
    parts = commit(job, 20)
    (Path(job.record.checkpoints) / parts["optimizer-00001-of-00002.safetensors"].key).unlink()

    assert first_weight(job) == 20
    assert first_weight(job, 20) == 20


def test_damaged_weights_fall_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    job = local_job(tmp_path)
    commit(job, 10)
    parts = commit(job, 20, average=True)
    (Path(job.record.checkpoints) / parts["extra.safetensors"].key).write_bytes(b"short")

    assert first_weight(job) == 10
    assert first_weight(job, weights="raw") == 20
    with pytest.raises(CheckpointError, match=r"step 20 of job net-1 cannot be used: .*extra"):
        find_saved(job.record, 20, {})


def local_job(tmp_path: Path) -> TrainingJob:
    record = RunStore(tmp_path / "runs").create({"name": "net", "created": 1.0}, job_id="net-1")
    log = EventLog(record.log_path, fsync_every_s=None)
    log.append([JobStatusChanged(job_id="net-1", time=1.0, status="finished")])
    log.close()
    return TrainingJob(record, None)
