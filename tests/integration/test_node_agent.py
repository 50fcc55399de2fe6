"""The agent of a node with real workers: normal operation, and each reason to turn off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server
from tests.capabilities import LONG, long
from tests.integration.node_machine import NOBODY, Machine, RemoteScheduler

Launch = Callable[..., Machine]

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
ROLE = {
    "Code": "Success",
    "Type": "AWS-HMAC",
    "AccessKeyId": "ASIAIOSFODNN7EXAMPLE",
    "SecretAccessKey": SECRET,
    "Token": f"token{SECRET}",
    "Expiration": "2099-01-01T00:00:00Z",
}


@pytest.fixture
def launch(
    tmp_path: Path, s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launch]:
    """Provide a function that launches machines; remove all of them at the end."""
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    machines: list[Machine] = []

    def make(**identity: Any) -> Machine:
        machines.append(Machine(tmp_path, s3_server, s3_bucket, **identity))
        return machines[-1]

    yield make
    s3_server.set_faults()
    for machine in machines:
        machine.close()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Callable[[], RemoteScheduler]]:
    """Provide a function that starts schedulers of the machine's cluster."""
    started: list[RemoteScheduler] = []

    def start() -> RemoteScheduler:
        started.append(RemoteScheduler(tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def test_node_follows_a_restarted_scheduler_and_turns_off_after_its_workers_exited(
    launch: Launch, scheduler: Callable[[], RemoteScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    machine = launch(launched_at=time.time() - 600)
    machine.imds.set_role("etrain-node", lambda: json.dumps(ROLE))
    first = scheduler()
    machine.renew_lease(first.address)
    machine.configure(workers_per_node=2, lifetime_s=3600.0)
    machine.start()

    machine.until(lambda: first.workers() == ["i-1:0", "i-1:1"])
    machine.until(lambda: machine.report().get("state") == "ready")
    assert machine.shutdowns() == ["-c", "-h +50"]
    report = machine.report()
    assert (report["zone"], report["lifecycle"]) == ("us-east-1a", "spot")
    assert report["fingerprint"] == machine.config.fingerprint
    assert (machine.folder / "node").stat().st_mode & 0o777 == 0o700

    # Neither expired tokens nor the death of the head stop the workers.
    machine.imds.expire_tokens()
    workers = sorted(process.pid for process in machine.processes())
    first.kill()
    second = scheduler()
    machine.renew_lease(second.address, num_lives=2)
    machine.until(lambda: second.workers() == ["i-1:0", "i-1:1"])
    assert sorted(process.pid for process in machine.processes()) == workers

    second.dismiss("i-1:0")
    machine.until(lambda: "worker i-1:0 has ended with exit code 0" in machine.console())
    assert not machine.is_off
    second.dismiss("i-1:1")
    console = machine.until_off()
    assert "turning off: all workers have ended (i-1:0: exit code 0, i-1:1: exit code 0)" in console
    machine.until(lambda: machine.report()["state"] == "ended")
    assert "all workers have ended" in machine.report()["error"]
    assert not (machine.folder / "node").exists()
    for secret in (SECRET, "ASIAIOSFODNN7EXAMPLE", "PRIVATE KEY"):
        assert secret not in console


def test_node_turns_off_when_its_lease_is_not_renewed(launch: Launch) -> None:
    machine = launch()
    machine.configure(lease_ttl_s=3.0)
    machine.start()
    assert "s old; it is valid for 3 s" in machine.until_off()
    # The agent itself turned the machine off, not the boot timer, which was not rearmed.
    assert machine.shutdowns() == ["-h now"]


def test_node_turns_off_without_a_lease_although_its_scheduler_is_alive(
    launch: Launch, scheduler: Callable[[], RemoteScheduler]
) -> None:
    machine = launch()
    there = scheduler()
    machine.configure(lease_ttl_s=4.0)

    def serves() -> bool:
        machine.renew_lease(there.address)
        return there.workers() == ["i-1"] and machine.report().get("state") == "ready"

    machine.renew_lease(there.address)
    machine.start()
    machine.until(serves)
    assert "s old; it is valid for 4 s" in machine.until_off()
    machine.until(lambda: there.workers() == [])


@long
def test_node_turns_off_when_its_lease_is_removed(launch: Launch) -> None:
    machine = launch()
    machine.start()
    machine.until(machine.processes)
    machine.remove("lease.json")
    assert "there is no lease" in machine.until_off()


@pytest.mark.parametrize("kind", ["reset", pytest.param("deny", marks=LONG)])
@long
def test_node_turns_off_when_it_cannot_reach_s3(
    launch: Launch, s3_server: S3Server, kind: Any
) -> None:
    machine = launch()
    machine.configure(lease_ttl_s=8.0)
    machine.renew_lease(NOBODY)
    machine.start()
    machine.until(machine.processes)
    machine.renew_lease(NOBODY)
    s3_server.set_faults(S3Fault(kind=kind))
    assert "turning off: the lease could not be read for" in machine.until_off()


@long
def test_expired_credentials_are_fetched_again(launch: Launch, s3_server: S3Server) -> None:
    machine = launch()
    s3_server.set_faults(S3Fault(kind="expire", every=2))
    machine.configure(lease_check_s=0.05)
    machine.start()
    machine.until(lambda: s3_server.counts().get("expire", 0) >= 8)
    assert not machine.is_off
    assert machine.processes()


def test_node_with_an_incompatible_environment_refuses_and_turns_off(launch: Launch) -> None:
    machine = launch()
    kernel = {**machine.config.fingerprint, "python": "3.1.0", "torch": "1.2.0+cu130"}
    machine.configure(fingerprint=kernel)
    machine.start()
    console = machine.until_off()
    report = machine.report()
    assert report["state"] == "refused"
    assert "on i-1, 3.1.0 in the notebook" in report["error"]
    assert "on i-1, 1.2.0+cu130 in the notebook" in report["error"]
    assert "Install Python 3.1 and torch==1.2.0 in the image" in report["error"]
    assert report["error"] in console
    assert "started as process" not in console


@long
def test_hanging_metadata_service_only_delays_the_start(launch: Launch) -> None:
    machine = launch()
    machine.imds.break_("hang")
    machine.start()
    machine.until(lambda: "the metadata service cannot be read yet" in machine.console())
    machine.imds.break_("")
    machine.until(machine.processes)
    assert not machine.is_off


@long
def test_node_turns_off_at_the_end_of_its_lifetime(launch: Launch) -> None:
    machine = launch(launched_at=time.time() - 1000)
    machine.configure(lifetime_s=1008.0)
    machine.start()
    assert "turning off: its lifetime of 1008 s is over" in machine.until_off()


def test_node_turns_off_when_its_worker_crashes(launch: Launch) -> None:
    machine = launch()
    machine.configure(supervisor="no_such_module:Supervisor")
    machine.start()
    assert "all workers have ended (i-1: exit code 1)" in machine.until_off()
    machine.until(lambda: machine.report()["state"] == "ended")


def test_noticed_spot_machine_in_its_first_hour_waits_for_ec2(
    launch: Launch, scheduler: Callable[[], RemoteScheduler]
) -> None:
    machine = launch(launched_at=time.time() - 60)
    there = scheduler()
    machine.renew_lease(there.address)
    machine.start()
    machine.until(lambda: there.workers() == ["i-1"])
    machine.imds.interrupt(time.time() + 100)
    machine.until(lambda: "notice for this machine: interruption" in machine.console())
    there.dismiss("i-1")
    machine.until(lambda: "EC2 reclaims this machine in" in machine.console())
    assert not machine.is_off
    machine.terminate()
    assert "and EC2 has not reclaimed this machine as announced" in machine.until_off()


@pytest.mark.parametrize(
    ("identity", "first_hour"),
    [
        ({"launched_at": time.time() - 7200}, "wait-for-ec2"),
        pytest.param({"lifecycle": "on-demand"}, "wait-for-ec2", marks=LONG),
        pytest.param({}, "power-off", marks=LONG),
    ],
    ids=["old", "on-demand", "by choice"],
)
def test_noticed_machine_that_is_charged_anyway_turns_off_immediately(
    launch: Launch,
    scheduler: Callable[[], RemoteScheduler],
    identity: dict[str, Any],
    first_hour: str,
) -> None:
    machine = launch(**identity)
    there = scheduler()
    machine.renew_lease(there.address)
    machine.configure(first_hour=first_hour)
    machine.start()
    machine.until(lambda: there.workers() == ["i-1"])
    machine.imds.interrupt(time.time() + 100)
    machine.until(lambda: "notice for this machine: interruption" in machine.console())
    there.dismiss("i-1")
    assert "turning off: all workers have ended (i-1: exit code 0)\n" in machine.until_off()


def test_agent_stops_its_workers_before_it_turns_off_on_sigterm(
    launch: Launch, scheduler: Callable[[], RemoteScheduler]
) -> None:
    machine = launch()
    there = scheduler()
    machine.renew_lease(there.address)
    machine.start()
    machine.until(lambda: there.workers() == ["i-1"])
    machine.terminate()
    console = machine.until_off()
    ended = console.index("worker i-1 has ended with exit code 0")
    assert ended < console.index("turning off: the agent received a request to stop")


def test_workers_exit_with_a_killed_agent(launch: Launch) -> None:
    machine = launch()
    machine.start()
    machine.until(machine.processes)
    assert machine.process is not None
    machine.process.kill()
    machine.process.wait()
    machine.until(lambda: not machine.processes())
    # The operating system's timer then turns the machine off.
    assert machine.shutdowns() == []


def test_node_with_an_unknown_role_turns_off(launch: Launch) -> None:
    machine = launch()
    machine.start(ETRAIN_ROLE="librarian")
    assert "ETRAIN_ROLE=librarian is unknown to this version" in machine.until_off()
