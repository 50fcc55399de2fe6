"""Attach to runs of earlier versions: read and audit them, load their weights, and resume them.

``tests/data/old_runs/make.py`` created the archives and describes their contents. This file uses
only the public API, so that it needs no change when the package is rearranged.
"""

from __future__ import annotations

import json
import platform
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import etrain_jupyter
from etrain_jupyter import cli
from etrain_jupyter.testing.s3_server import S3Server
from tests.integration.conftest import PATIENCE_S

pytestmark = pytest.mark.slow

ARCHIVES = Path(__file__).parents[1] / "data" / "old_runs"
NEWEST = "fd24346"
"""Archive with runs of every final status; the other one has only a run in bundle format 1."""
LOCAL = [(NEWEST, "finished"), (NEWEST, "stopped"), (NEWEST, "failed"), (NEWEST, "killed")]
LOCAL += [("d5cb29f", "stopped")]
RESUMABLE = [case for case in LOCAL if case[1] != "finished"]

About = dict[str, Any]


class Net(nn.Module):
    """The model of all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(scope="module")
def old(runs: Path) -> dict[str, About]:
    """Unpack all archives as runs of this user; return their descriptions."""
    return {commit: unpack(commit, runs) for commit in (NEWEST, "d5cb29f")}


@pytest.fixture
def remote(
    old: dict[str, About],
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[About]:
    """Copy the bucket of run ``remote`` to an S3 server and use it as the run store."""
    about = old[NEWEST]
    s3_server.make_bucket(about["bucket"])
    extract(NEWEST, tmp_path)
    for path in (tmp_path / "bucket").rglob("*"):
        if path.is_file():
            key = str(path.relative_to(tmp_path / "bucket"))
            s3_server.write(about["bucket"], key, path.read_bytes())
    monkeypatch.setenv("ETRAIN_RUNS", f"s3://{about['bucket']}/runs")
    assert cli.main(["down"]) == 0, "the running cluster has no access to this S3 server"
    yield about
    assert cli.main(["down"]) == 0


def extract(commit: str, folder: Path) -> None:
    with tarfile.open(ARCHIVES / f"{commit}.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def unpack(commit: str, runs: Path) -> About:
    """Unpack an archive and replace the paths and the host of the machine that wrote it."""
    folder = runs.parent / commit
    extract(commit, folder)
    about = json.loads((folder / "about.json").read_text())
    state = runs.parent / "state"
    for root in (runs, state):
        root.mkdir(mode=0o700, exist_ok=True)
    here = {f"{about['home']}/state": str(state), about["host"]: platform.node()}
    for path in [*folder.glob("runs/*/job.json"), *folder.glob("state/*/cluster.json")]:
        text = path.read_text()
        for before, now in here.items():
            # The signature covers the notebook's folder but not the location of the cluster.
            text = text.replace(before, now)
        path.write_text(text)
    for path in folder.glob("runs/*"):
        path.chmod(0o700)
        path.rename(runs / path.name)
    for path in folder.glob("state/*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        path.replace(state / path.name)
    return about


def open_run(about: About, name: str) -> etrain_jupyter.TrainingJob:
    return etrain_jupyter.attach(about["runs"][name]["job_id"])


def check_reading(about: About, name: str) -> None:
    """Compare all readable data of a run with the values that its own version reported."""
    expected, job = about["runs"][name], open_run(about, name)

    assert job.step == expected["last_step"]
    history = job.history()
    assert history["step"] == list(range(1, expected["last_step"] + 1))
    assert all(len(column) == len(history["step"]) for column in history.values())
    assert sorted({event.kind for event in job.events()}) == expected["event_kinds"]
    assert len(job.events()) == expected["num_events"]
    report = job.audit()
    assert report.ok, report
    [newest, *_] = job.checkpoints(verify=True)
    assert (newest["step"], newest["problem"]) == (expected["saved_step"], "")
    weights = job.load_into(Net()).state_dict()
    assert {name: value.tolist() for name, value in weights.items()} == expected["weights"]
    assert isinstance(job.load_into(Net(), "best"), Net)


def without_free_bias(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the bias before BatchNorm, and the running mean that follows it.

    BatchNorm subtracts the bias again, so its gradient consists of rounding errors, which AdamW
    scales to full steps: they differ on another CPU.
    """
    free = ("layers.0.bias", "layers.1.running_mean")
    return {name: value for name, value in weights.items() if name not in free}


def check_resumed(about: About, name: str, finished: About, *, is_signed: bool) -> None:
    """Resume a run to its end; the result must equal that of an uninterrupted run."""
    if about["python"].split(".")[:2] != platform.python_version().split(".")[:2]:
        pytest.skip(f"the code of this run was pickled by Python {about['python']}")
    expected, job = about["runs"][name], open_run(about, name)
    if not is_signed:
        with pytest.raises(etrain_jupyter.EtrainError, match="--trust"):
            job.resume()

    message = job.resume(trust=not is_signed)

    assert f"step {expected['saved_step']}" in message
    assert job.wait(timeout=PATIENCE_S) == "finished", job
    assert job.history()["step"] == list(range(1, about["total_steps"] + 1))
    report = job.audit()
    assert report.ok, report
    weights = {name: torch.tensor(value) for name, value in finished["weights"].items()}
    # Bitwise equal on the machine that created the archive; other CPUs may round differently.
    torch.testing.assert_close(
        without_free_bias(job.state_dict()), without_free_bias(weights), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(("commit", "name"), LOCAL)
def test_run_of_an_earlier_version_is_readable(
    old: dict[str, About], commit: str, name: str
) -> None:
    check_reading(old[commit], name)
    status = open_run(old[commit], name).status
    # The log of the killed run ends with status running, but its cluster no longer exists.
    assert status == {"killed": "failed"}.get(name, name)


@pytest.mark.parametrize(("commit", "name"), RESUMABLE)
def test_run_of_an_earlier_version_is_resumed_to_its_end(
    old: dict[str, About], commit: str, name: str
) -> None:
    # Commit d5cb29f did not sign runs.
    finished = old[NEWEST]["runs"]["finished"]
    check_resumed(old[commit], name, finished, is_signed=commit == NEWEST)


def test_finished_run_of_an_earlier_version_is_resumed_for_more_epochs(
    old: dict[str, About],
) -> None:
    job = open_run(old[NEWEST], "finished")

    job.resume(epochs=13)

    assert job.wait(timeout=PATIENCE_S) == "finished", job
    assert job.history()["step"] == list(range(1, 79))
    assert job.audit().ok


def test_run_of_an_earlier_version_in_a_bucket_is_read_and_resumed(remote: About) -> None:
    check_reading(remote, "remote")
    check_resumed(remote, "remote", remote["runs"]["finished"], is_signed=True)
