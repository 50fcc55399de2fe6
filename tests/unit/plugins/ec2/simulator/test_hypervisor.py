"""The end of simulated machines."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etrain_jupyter.plugins.ec2.simulator import hypervisor
from etrain_jupyter.plugins.ec2.simulator.bill import Usage
from etrain_jupyter.plugins.ec2.simulator.market import CapacityPool
from etrain_jupyter.plugins.ec2.simulator.process import end_heads_at
from etrain_jupyter.process.processes import MARKER


class SlowDisk:
    """A machine whose disk is deleted only when the test allows it."""

    def __init__(self) -> None:
        self.address = "10.0.0.2"
        self.facts = SimpleNamespace(region="us-east-1", instance_id="i-1")
        self.may_erase = threading.Event()
        self.is_erased = threading.Event()

    def power_off(self) -> None:
        pass

    def erase_disk(self) -> None:
        self.may_erase.wait(60)
        self.is_erased.set()


@pytest.fixture
def machine() -> Iterator[SlowDisk]:
    one = SlowDisk()
    yield one
    one.may_erase.set()


def open_hypervisor(folder: Path, machine: Any, *, is_imaged: bool) -> hypervisor.Hypervisor:
    backend: Any = SimpleNamespace(lock=threading.RLock(), is_image_source=lambda *_: is_imaged)
    network: Any = SimpleNamespace(release=lambda address: None)
    one = hypervisor.Hypervisor(
        backend=backend, network=network, folder=folder, minute_s=1.0, boot_s=0.0
    )
    usage = Usage(
        instance_id="i-1",
        pool=CapacityPool("m5.large", "us-east-1a"),
        lifecycle="spot",
        launched_at=0.0,
        disk_gb=8,
    )
    one._guests["i-1"] = hypervisor._Guest(machine=machine, usage=usage)
    return one


def test_reset_does_not_wait_for_the_deletion_of_a_disk(tmp_path: Path, machine: SlowDisk) -> None:
    cloud = open_hypervisor(tmp_path, machine, is_imaged=False)

    cloud.forget()

    assert not machine.is_erased.is_set()
    machine.may_erase.set()
    assert machine.is_erased.wait(60)


def test_disk_of_an_image_is_kept(tmp_path: Path, machine: SlowDisk) -> None:
    cloud = open_hypervisor(tmp_path, machine, is_imaged=True)
    machine.may_erase.set()

    cloud.forget()

    assert not machine.is_erased.wait(0.2)


def test_cloud_that_ends_kills_its_heads_but_no_local_cluster() -> None:
    endpoint = "http://127.0.0.1:5001"
    heads = [
        subprocess.Popen(
            ["sleep", "60"], env={MARKER: cluster_id, "AWS_ENDPOINT_URL": endpoint, "PATH": "/bin"}
        )
        for cluster_id in ("aws-1-1", "local-1-1")
    ]
    try:
        end_heads_at(endpoint)
        assert heads[0].wait(10) == -signal.SIGKILL
        assert heads[1].poll() is None
    finally:
        heads[1].kill()
        heads[1].wait(10)
