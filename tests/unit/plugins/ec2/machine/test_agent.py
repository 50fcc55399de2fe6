"""Decisions of the agent, without a machine; `tests/integration/test_node_agent.py` has one."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from etrain_jupyter.plugins.ec2.machine import base_agent, children, imds, node_agent
from etrain_jupyter.plugins.ec2.machine.base_agent import AgentError, StopRequestedError
from etrain_jupyter.plugins.ec2.machine.imds import Identity
from etrain_jupyter.plugins.ec2.machine.node_agent import NodeAgent
from etrain_jupyter.plugins.ec2.node_config import NodeConfig
from etrain_jupyter.wire.messages import INTERRUPTION, REBALANCE
from etrain_jupyter.worker.preemption_watch import Notice

ME = Identity(
    instance_id="i-1",
    type="g5.xlarge",
    region="us-east-1",
    zone="us-east-1a",
    private_ip="10.0.0.9",
    lifecycle="spot",
    age_s=600.0,
)


class Workers:
    """Children that record signals."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        self.have_ended = False

    def codes(self) -> dict[str, int]:
        return {"i-1": 0}

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)


class Watch:
    """A notice watch that finds something when polled."""

    def __init__(self) -> None:
        self.find = lambda: None

    def poll_now(self) -> None:
        self.find()


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setattr(node_agent, "POLL_S", 0.01)
    monkeypatch.setattr(base_agent, "BOOT_RETRY_S", 0.01)
    made = NodeAgent("s3://b/p", tmp_path, keys="keys/x")
    made._children.end(0.0)
    made._children = Workers()
    made._identity, made._known_at = ME, time.monotonic()
    made._config = NodeConfig(cluster_id="c", region="us-east-1", lifetime_s=4000.0, drain_s=90.0)
    made._ends_at = time.monotonic() + 1000.0
    made._notices = Watch()
    return made


# --- the end ---


def test_workers_get_a_notice_before_the_end_of_the_lifetime(agent):
    agent._is_ready = True
    agent._drain_if_due()
    assert agent._children.signals == []
    agent._ends_at = time.monotonic() + 80.0
    agent._drain_if_due()
    agent._drain_if_due()
    assert agent._children.signals == [signal.SIGUSR1]


def test_worker_that_is_not_ready_gets_no_signal(agent):
    agent._ends_at = time.monotonic() + 80.0
    agent._drain_if_due()
    assert agent._children.signals == []


def test_stuck_lease_watch_ends_the_machine(agent):
    class Stuck:
        def stuck_s(self) -> float:
            return 1.0

    assert agent._reason_to_end() == ""
    agent._lease = Stuck()
    assert agent._reason_to_end() == "the watch of the lease is stuck"


def test_machine_that_ec2_does_not_reclaim_turns_itself_off(agent, monkeypatch):
    monkeypatch.setattr(node_agent, "RECLAIM_MARGIN_S", 0.05)
    agent._on_notice(Notice(kind=INTERRUPTION, deadline=time.time() + 0.05))
    assert "EC2 has not reclaimed this machine as announced" in agent._after_workers()


def test_machine_waits_for_a_limited_time(agent, monkeypatch):
    monkeypatch.setattr(node_agent, "RECLAIM_MARGIN_S", 0.01)
    monkeypatch.setattr(node_agent, "MAX_NOTICE_S", 0.01)
    agent._on_notice(Notice(kind=INTERRUPTION, deadline=time.time() + 2000.0))
    assert "EC2 has not reclaimed this machine as announced" in agent._after_workers()


def test_notice_that_only_the_workers_have_seen_is_polled_for(agent, monkeypatch):
    monkeypatch.setattr(node_agent, "RECLAIM_MARGIN_S", 0.01)
    notice = Notice(kind=INTERRUPTION, deadline=time.time())
    agent._notices.find = lambda: agent._on_notice(notice)
    assert "EC2 has not reclaimed this machine as announced" in agent._after_workers()


@pytest.mark.parametrize("kind", [REBALANCE, ""])
def test_without_an_interruption_the_agent_does_not_wait(agent, kind):
    if kind:
        agent._on_notice(Notice(kind=kind))
    assert agent._after_workers() == "all workers have ended (i-1: exit code 0)"


@pytest.mark.parametrize(("left_s", "is_free"), [(2900.0, True), (3100.0, False)])
def test_first_hour_is_measured_at_the_end_of_the_notice(agent, left_s, is_free):
    notice = Notice(kind=INTERRUPTION, deadline=time.time() + left_s)
    assert agent._is_free(notice) is is_free


# --- the start ---


def test_reading_is_retried_until_it_succeeds(agent):
    answers = [OSError("not yet"), ValueError("half of it"), "here"]

    def read() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert agent._wait_for("config.json", read) == "here"


def test_unreadable_configuration_ends_the_machine(agent, monkeypatch):
    monkeypatch.setattr(base_agent, "BOOT_S", 0.05)

    def read() -> None:
        raise OSError("AccessDenied")

    with pytest.raises(AgentError, match=r"config.json could not be read for 0 s: .*AccessDenied"):
        agent._wait_for("config.json", read)


def test_agent_can_be_stopped_while_it_waits(agent):
    def read() -> None:
        raise OSError("no")

    agent.request_stop()
    with pytest.raises(StopRequestedError):
        agent._wait_for("config.json", read)


def test_any_failure_turns_the_machine_off(agent, monkeypatch):
    def boot() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(agent, "_boot", boot)
    assert agent.run() == "the agent failed: MemoryError: no room"


def test_config_ignores_unknown_keys_and_names_missing_ones():
    told = {"cluster_id": "c", "region": "r", "lease_ttl_s": 9.0, "from_the_future": 1}
    assert NodeConfig.from_json(json.dumps(told).encode()).lease_ttl_s == 9.0
    with pytest.raises(ValueError, match="region"):
        NodeConfig.from_json(b'{"cluster_id": "c"}')
    with pytest.raises(ValueError, match="not a mapping"):
        NodeConfig.from_json(b"[]")


# --- workers of a machine ---


@pytest.mark.parametrize(
    ("gpus", "count", "expected"),
    [
        ([], 0, [("cpu", "")]),
        ([], 2, [("cpu", ""), ("cpu", "")]),
        ([("GPU-a", "A"), ("GPU-b", "A")], 0, [("cuda:0", "GPU-a"), ("cuda:0", "GPU-b")]),
        ([("GPU-a", "A"), ("GPU-b", "A")], 1, [("cuda:0", "GPU-a")]),
        ([("GPU-a", "A")], 2, [("cuda:0", "GPU-a"), ("cuda:0", "GPU-a")]),
    ],
)
def test_one_worker_per_gpu_or_the_configured_number(gpus, count, expected, monkeypatch):
    monkeypatch.setattr(children, "start_gpu_query", lambda: None)
    monkeypatch.setattr(children, "finish_gpu_query", lambda query, timeout_s: gpus)
    slots = children.slots_of_machine(count)
    assert [(s.device, s.environment["CUDA_VISIBLE_DEVICES"]) for s in slots] == expected


def test_workers_without_gpus_share_the_cores(monkeypatch):
    monkeypatch.setattr(children, "start_gpu_query", lambda: None)
    monkeypatch.setattr(children.os, "cpu_count", lambda: 8)
    assert children.slots_of_machine(0)[0].environment["OMP_NUM_THREADS"] == "8"
    assert children.slots_of_machine(2)[1].environment["OMP_NUM_THREADS"] == "4"


# --- power ---


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Replace commands: each fails unless it is in ``works``."""
    ran: list[list[str]] = []
    works: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        if command[0] == "missing":
            raise FileNotFoundError
        return subprocess.CompletedProcess(command, int(command not in works), b"", b"no")

    monkeypatch.setattr(base_agent.subprocess, "run", run)
    monkeypatch.setattr(base_agent, "RETRY_S", 0.0)
    monkeypatch.setattr(imds, "VENDOR_FILE", tmp_path / "vendor")
    return ran, works


def test_successful_shutdown_is_not_repeated(commands):
    ran, works = commands
    works.append(["shutdown", "-h", "now"])
    assert base_agent.power_off()
    assert ran == [["shutdown", "-h", "now"]]


def test_failed_shutdown_is_retried_and_force_is_used_on_ec2_only(commands):
    ran, works = commands
    works.append(["poweroff", "-f"])
    assert not base_agent.power_off(num_tries=3)
    assert ran == [["shutdown", "-h", "now"]] * 3
    Path(imds.VENDOR_FILE).write_text("Amazon EC2\n")
    assert base_agent.power_off()
    assert ran[-1] == ["poweroff", "-f"]


def test_timer_is_armed_in_whole_minutes_and_at_least_one(commands):
    ran, _ = commands
    base_agent.arm_timer(61.0)
    base_agent.arm_timer(-5.0)
    words = [" ".join(command) for command in ran]
    assert words == ["shutdown -c", "shutdown -h +2", "shutdown -c", "shutdown -h +1"]
