"""Workers that outlive the scheduler that has started them, with small real processes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from etrain_jupyter.head.local_workers import LocalNodes
from etrain_jupyter.head.slots import Slot
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.processes import wait_until
from etrain_jupyter.process.survivors import AdoptedProcess, WorkerRecords


class Cluster:
    """A cluster's folder, and the workers that its first scheduler has started."""

    def __init__(self, folder: Path) -> None:
        self.dir = ClusterDir.create(folder, ClusterSettings())
        self.records = WorkerRecords(self.dir)
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, name: str, slot: Slot) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "60"], process_group=0)
        self.processes.append(process)
        self.dir.log(name).touch()
        self.records.add(name, slot=slot.index, pid=process.pid)
        return process

    def nodes(self) -> LocalNodes:
        """Return those of the next scheduler."""
        nodes = LocalNodes(
            [Slot(index=index) for index in range(3)],
            self.spawn,
            is_connected=lambda name: True,
            is_busy=lambda name: False,
            on_end=self.records.remove,
        )
        nodes.adopt(
            self.records.survivors(),
            num_named=self.records.num_named(),
            num_held=self.records.num_held(),
        )
        return nodes


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for process in cluster.processes:
        process.kill()
        process.wait()


def test_next_scheduler_adopts_surviving_workers_and_starts_no_others(cluster: Cluster) -> None:
    cluster.nodes().want(2, reason="test")
    before = [process.pid for process in cluster.processes]

    nodes = cluster.nodes()
    nodes.want(2, reason="test")

    assert [(node["worker"], node["pid"]) for node in nodes.nodes()] == [
        ("w1", before[0]),
        ("w2", before[1]),
    ]
    assert len(cluster.processes) == 2


def test_worker_that_died_meanwhile_is_replaced_under_a_new_name(cluster: Cluster) -> None:
    cluster.nodes().want(2, reason="test")
    cluster.processes[1].kill()
    cluster.processes[1].wait()

    nodes = cluster.nodes()
    nodes.want(2, reason="test")

    assert [(node["worker"], node["slot"]) for node in nodes.nodes()] == [("w1", 0), ("w3", 1)]


def test_death_of_an_adopted_worker_is_detected(cluster: Cluster) -> None:
    cluster.nodes().want(1, reason="test")
    nodes = cluster.nodes()
    nodes.want(1, reason="test")

    nodes.kill("w1")
    cluster.processes[0].wait()
    nodes.reap()

    assert [node["worker"] for node in nodes.nodes()] == ["w2"]
    assert [survivor.name for survivor in cluster.records.survivors()] == ["w2"]


def test_next_scheduler_keeps_the_number_of_held_workers(cluster: Cluster) -> None:
    cluster.records.note_held(2)

    nodes = cluster.nodes()
    nodes.want(0, reason="test")

    assert len(nodes.nodes()) == 2


def test_no_signal_reaches_another_process_with_the_same_pid(cluster: Cluster) -> None:
    [slot] = [Slot(index=0)]
    process = cluster.spawn("w1", slot)
    stranger = AdoptedProcess(process.pid, "another start")

    stranger.send_signal(signal.SIGKILL)

    assert stranger.poll() == -1
    assert not wait_until(lambda: process.poll() is not None, timeout_s=0.0)
