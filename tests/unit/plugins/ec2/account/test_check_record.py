"""What the next check removes after one was killed, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account import check_record
from etrain_jupyter.plugins.ec2.account.check_record import CheckRecord, open_record, remove_killed
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.wire.requests import JobList

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
        monkeypatch.setattr(check_record, name, value)
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
