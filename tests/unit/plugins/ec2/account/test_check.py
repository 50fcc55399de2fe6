"""``pools check``: the boot of one node, and what a killed check has left."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.errors import JobFailedError, PoolError
from etrain_jupyter.log.events import Event, GenerationReady, StepCompleted, WorkerJoined
from etrain_jupyter.plugins.ec2.account import check
from etrain_jupyter.plugins.ec2.account.check import CheckRecord, open_record, remove_killed
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.wire.requests import JobList
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
    monkeypatch.setattr(check, "get_pool", lambda name: made)
    monkeypatch.setattr(check, "time", SimpleNamespace(time=lambda: next(times)))
    monkeypatch.setattr(check, "running_clusters", lambda *_: [])
    monkeypatch.setattr(check, "first_boot", lambda *_: (NOW + 10, "g5.xlarge", ()))
    monkeypatch.setattr(check, "num_gpus", lambda *_: 1)

    def forget(spec: AwsSpotSpec, *, job_id: str, cluster_id: str) -> str:
        made.forgotten += [job_id, cluster_id]
        return ""

    monkeypatch.setattr(check, "forget_probe", forget)
    return made


def test_report_has_seconds_and_cents_of_each_phase(rig: Rig) -> None:
    rig.device = "cuda:0"
    text = check.boot_node(rig, "spot", SPEC, rig.record)
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
        check.boot_node(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 1


@pytest.mark.parametrize("error", [None, JobFailedError("it failed", job_id="check", traceback="")])
def test_job_that_trains_nothing_is_an_error_with_its_status(
    rig: Rig, error: BaseException | None
) -> None:
    rig.status, rig.error = "waiting", error
    rig.reason = "EC2 has no capacity for g5.xlarge."
    with pytest.raises(PoolError, match=r"check-spot-1a2b3c4d is waiting .EC2 has no capacity"):
        check.boot_node(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 1


def test_interrupt_terminates_the_node(rig: Rig) -> None:
    rig.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        check.boot_node(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 1


def test_pool_in_use_is_not_shut_down(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "running_clusters", lambda *_: ["aws-1-2"])
    with pytest.raises(PoolError, match="in use by aws-1-2"):
        check.boot_node(rig, "spot", SPEC, rig.record)
    assert rig.num_down == 0


CLUSTER = "aws-0a0a0a-0b0b0b"


class World:
    """What a killed check may have left, and what was removed of it."""

    def __init__(self) -> None:
        self.running: list[str] = [CLUSTER]
        self.jobs: list[dict[str, Any]] = [{"name": "check-spot", "job_id": "check-spot-1"}]
        self.left = Leftovers()
        self.removed: list[str] = []

    def answer(self, *_: Any) -> JobList:
        return JobList(jobs=tuple(self.jobs))

    def down(self, **_: Any) -> Leftovers:
        self.removed.append("cluster")
        return self.left

    def forget_probe(self, spec: Any, *, job_id: str, cluster_id: str) -> str:
        self.removed.append(f"{job_id} of {cluster_id}")
        return ""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    one = World()
    replaced: dict[str, Any] = {
        "Clients": lambda spec: None,
        "running_clusters": lambda *_: one.running,
        "find_cluster_dir": lambda cluster_id: cluster_id,
        "address_of": lambda cluster: cluster,
        "ask": one.answer,
        "get_pool": lambda name: SimpleNamespace(down=one.down),
        "forget_probe": one.forget_probe,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(check, name, value)
    return one


def killed(spec: AwsSpotSpec, **facts: Any) -> CheckRecord:
    """Return the record that the next check finds."""
    with open_record("spot", spec) as record:
        record.note(**facts)
    with open_record("spot", spec) as record:
        return record


def test_completed_check_leaves_nothing_to_remove(world: World, spec: AwsSpotSpec) -> None:
    with open_record("spot", spec) as record:
        record.note(boots=True)
        record.forget()

    with open_record("spot", spec) as record:
        assert not record


def test_cluster_of_a_killed_check_is_removed_with_its_job(world: World, spec: AwsSpotSpec) -> None:
    # Killed after the submission, and before the job's id was known.
    remove_killed("spot", spec, killed(spec, boots=True))

    assert world.removed == ["cluster", f"check-spot-1 of {CLUSTER}"]


def test_cluster_with_another_job_is_kept(world: World, spec: AwsSpotSpec) -> None:
    world.jobs.append({"name": "digits", "job_id": "digits-1"})

    remove_killed("spot", spec, killed(spec, boots=True))

    assert world.removed == []


def test_job_is_deleted_after_its_cluster_has_ended(world: World, spec: AwsSpotSpec) -> None:
    world.running = []

    remove_killed("spot", spec, killed(spec, boots=True, cluster_id=CLUSTER, job_id="check-spot-1"))

    assert world.removed == [f"check-spot-1 of {CLUSTER}"]


def test_record_is_kept_until_everything_is_removed(world: World, spec: AwsSpotSpec) -> None:
    world.left = Leftovers(processes=("i-1",))
    record = killed(spec, boots=True)

    assert remove_killed("spot", spec, record)

    assert record


def test_second_check_on_the_same_machine_is_refused(world: World, spec: AwsSpotSpec) -> None:
    with (
        open_record("spot", spec),
        pytest.raises(PoolError, match="another check of pool spot runs on this machine"),
        open_record("spot", spec),
    ):
        pass
