"""The fake cloud leaves nothing on this machine, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.plugins.ec2.simulator import FakeAws, networks
from etrain_jupyter.plugins.ec2.simulator.fixtures import point_boto_at
from tests.capabilities import needs
from tests.contract.fleets import launch, links_of, wait_for_text

needs_namespaces = needs("namespaces")

# The fork inherits all pipes, like a process pool in a notebook.
HOLDER = """
import os, sys, time
from etrain_jupyter.plugins.ec2.simulator import FakeAws
cloud = FakeAws(sys.argv[1])
fork = os.fork()
if fork:
    print(cloud.pid, fork, cloud.folder, cloud.url, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("mode", ["loopback", pytest.param("namespaces", marks=needs_namespaces)])
@pytest.mark.parametrize("victim", ["harness", "holder"])
def test_killed_fake_cloud_leaves_nothing(
    mode: str, victim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mode], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    words = holder.stdout.readline().split()
    pid, fork, folder, url = int(words[0]), int(words[1]), Path(words[2]), words[3]
    try:
        beside = FakeAws("loopback")
        with beside:
            marks = _start_instance_at(url, beside, monkeypatch, tmp_path)
            assert marks

            os.kill(pid if victim == "harness" else holder.pid, signal.SIGKILL)

            _wait(lambda: (not folder.exists() and not psutil.pid_exists(pid)) or _is_zombie(pid))
            _wait(lambda: not any(psutil.pid_exists(one) for one in marks))
            _wait(lambda: not links_of(pid))
            _wait(lambda: not folder.exists())
            # The other cloud is unaffected.
            assert beside.instances() == []
    finally:
        os.kill(fork, signal.SIGKILL)
        holder.kill()
        holder.wait()
        holder.stdout.close()


def _start_instance_at(
    url: str, face: FakeAws, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[int]:
    """Start an instance with children in another process's cloud; return its process ids."""
    monkeypatch.setattr(face, "url", url)
    point_boto_at(face, monkeypatch, tmp_path)
    instance_id = launch(face, "#!/bin/bash\nsetsid sleep 1005 &\necho hello\nsleep 1006\n")
    wait_for_text(face, instance_id, "hello")
    (record,) = face.instances()
    monkeypatch.undo()
    assert record.pid is not None
    first = psutil.Process(record.pid)
    return [first.pid, *(one.pid for one in first.children(recursive=True))]


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _wait(is_true: object) -> None:
    assert callable(is_true)
    ends_at = time.monotonic() + 90
    while not is_true():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@needs_namespaces
def test_stale_bridge_of_a_dead_harness_is_removed() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    bridge = f"{networks.PREFIX}{done.pid}"
    assert not links_of(done.pid)
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)

    removed = networks.remove_dead_links()

    assert bridge in removed
    assert not Path(f"/sys/class/net/{bridge}").exists()


def test_missing_namespaces_are_an_error_or_a_fallback_to_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(networks, "why_no_namespaces", lambda: "needs a wizard")

    with pytest.raises(RuntimeError, match=r"needs a wizard\. Use mode='loopback'"):
        networks.make_network("namespaces")
    assert networks.make_network("auto").mode == "loopback"


def test_heads_are_killed_with_the_process_group_of_their_kernel() -> None:
    """Jupyter interrupts and kills the process group of its kernels."""
    kernel = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "loopback"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert kernel.stdout is not None
    pid, _, folder, url = kernel.stdout.readline().split()
    marks = {"ETRAIN_CLUSTER_ID": "aws-1-a", "AWS_ENDPOINT_URL": url}
    head = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"],
        env=os.environ | marks,
        start_new_session=True,
    )
    try:
        os.killpg(kernel.pid, signal.SIGINT)
        os.killpg(kernel.pid, signal.SIGKILL)

        assert head.wait(20) == -signal.SIGKILL
        _wait(lambda: not Path(folder).exists())
        _wait(lambda: not psutil.pid_exists(int(pid)) or _is_zombie(int(pid)))
    finally:
        kernel.stdout.close()
        kernel.wait()
        head.kill()
        head.wait()


def test_heads_of_a_cloud_are_killed_with_it_and_others_are_not() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with FakeAws("loopback") as cloud:
        marks = {"ETRAIN_CLUSTER_ID": "aws-1-a", "AWS_ENDPOINT_URL": cloud.url}
        others = [
            os.environ | {**marks, "AWS_ENDPOINT_URL": cloud.url + "1"},
            os.environ | {"AWS_ENDPOINT_URL": cloud.url},  # a notebook
        ]
        head = subprocess.Popen(sleeper, env=os.environ | marks)
        beside = [subprocess.Popen(sleeper, env=environment) for environment in others]
    try:
        assert head.wait(20) == -signal.SIGKILL
        assert [process.poll() for process in beside] == [None, None]
    finally:
        for process in (head, *beside):
            process.kill()
            process.wait()
