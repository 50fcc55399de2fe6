"""Booting one node for ``pools check``, with a pool and a job that need no machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.errors import JobFailedError, PoolError
from etrain_jupyter.log.events import Event, GenerationReady, StepCompleted, WorkerJoined
from etrain_jupyter.plugins.ec2 import account_commands
from etrain_jupyter.plugins.ec2.account import boot
from etrain_jupyter.plugins.ec2.account.check_record import CheckRecord
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from tests.unit.log.spent import PLAIN_STEP

SPEC = AwsSpotSpec.parse({"region": "us-east-1", "bucket": "my-bucket"})
NOW = 1_000.0


def events(device: str = "cpu") -> list[Event]:
    common = {"job_id": "check-spot-1a2b3c4d"}
    return [
        WorkerJoined(time=NOW + 70, worker="i-1", device=device, usd_per_h=0.36, **common),
        GenerationReady(
            time=NOW + 80, world_size=1, connect_s=0.0, sync_s=0.0, wrap_s=0.0, **common
        ),
        StepCompleted(
            time=NOW + 81, step=1, epoch=0, first=0, samples=8, sample_checksum=0, loss=1.0,
            lr=0.1, world_size=1, samples_per_s=8.0, **common, **PLAIN_STEP,
        ),
    ]  # fmt: skip


@dataclasses.dataclass
class Rig:
    """A surface, a pool and a job in one, which count what is left running."""

    record: CheckRecord
    status: str = "finished"
    device: str = "cpu"
    error: BaseException | None = None
    num_down: int = 0
    forgotten: list[str] = dataclasses.field(default_factory=list)
    id: str = "check-spot-1a2b3c4d"
    reason: str = ""

    def say(self, line: str) -> None:
        """Ignore progress."""

    def submit(self, body: Any) -> Any:
        assert (body["pool"], body["steps"], body["workers"]["max"]) == ("spot", 1, 1)
        return self

    def up(self) -> Any:
        return SimpleNamespace(cluster_id="aws-1-1")

    def wait(self, timeout_s: float) -> str:
        if self.error is not None:
            raise self.error
        return self.status

    def events(self) -> list[Event]:
        assert self.num_down == 0, "the log is read before it is deleted"
        return events(self.device) if self.status == "finished" else []

    def down(self, *, timeout_s: float) -> Leftovers:
        self.num_down += 1
        return Leftovers()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    made = Rig(record=CheckRecord(tmp_path / "check.json"))
    times = iter([NOW, NOW + 90, NOW + 100])
    monkeypatch.setattr(account_commands, "get_pool", lambda name: made)
    monkeypatch.setattr(account_commands, "time", SimpleNamespace(time=lambda: next(times)))
    monkeypatch.setattr(boot, "running_clusters", lambda *_: [])
    monkeypatch.setattr(boot, "launch_of", lambda *_: (NOW + 10, "g5.xlarge"))
    monkeypatch.setattr(boot, "num_gpus", lambda *_: 1)

    def forget(spec: AwsSpotSpec, *, job_id: str, cluster_id: str) -> str:
        made.forgotten += [job_id, cluster_id]
        return ""

    monkeypatch.setattr(boot, "forget_probe", forget)
    return made


def test_report_has_seconds_and_cents_of_each_phase(rig: Rig) -> None:
    rig.device = "cuda:0"
    text = account_commands._boot(rig, "spot", SPEC, rig.record)
    rows = [line.split() for line in text.splitlines()[1:]]
    assert [(row[0], row[-4], row[-2]) for row in rows] == [
        ("start", "10.0", "0.000"),
        ("boot,", "60.0", "0.600"),
        ("load,", "10.0", "0.100"),
        ("first", "1.0", "0.010"),
        ("save,", "9.0", "0.090"),
        ("terminate", "10.0", "0.100"),
        ("total", "100.0", "0.900"),
    ]
    assert "trained one step on g5.xlarge (cuda:0), $0.36 per hour" in text
    assert (rig.num_down, rig.forgotten) == (1, [rig.id, "aws-1-1"])
    assert not rig.record, "nothing is left for the next check to remove"


def test_gpu_that_torch_does_not_see_is_an_error(rig: Rig) -> None:
    with pytest.raises(PoolError, match=r"g5\.xlarge has a GPU, but torch on the node sees none"):
        account_commands._boot(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 1


@pytest.mark.parametrize("error", [None, JobFailedError("it failed", job_id="check", traceback="")])
def test_job_that_trains_nothing_is_an_error_with_its_status(
    rig: Rig, error: BaseException | None
) -> None:
    rig.status, rig.error = "waiting", error
    rig.reason = "EC2 has no capacity for g5.xlarge."
    with pytest.raises(PoolError, match=r"check-spot-1a2b3c4d is waiting .EC2 has no capacity"):
        account_commands._boot(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 1


def test_interrupt_terminates_the_node(rig: Rig) -> None:
    rig.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        account_commands._boot(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 1


def test_pool_in_use_is_not_shut_down(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "running_clusters", lambda *_: ["aws-1-2"])
    with pytest.raises(PoolError, match="in use by aws-1-2"):
        account_commands._boot(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 0
