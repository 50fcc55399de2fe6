"""The state directory: where it is, who is alive, what is stale."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.clusters import describe_load
from etrain_jupyter.process import state_root as state_root_module
from etrain_jupyter.process.cluster_dir import ClusterDir, remove_stale
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.processes import (
    MARKER,
    kill_processes_of,
    processes_of,
    stamp_of,
    wait_until,
)
from etrain_jupyter.process.start_lock import remove_start_lock, start_lock
from etrain_jupyter.process.state_root import open_state_root, state_root
from etrain_jupyter.wire.requests import ClusterFacts


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "deep" / "state"))
    return open_state_root()


def change_record(cluster: ClusterDir, **changes: object) -> None:
    path = cluster.path / "cluster.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_state_directory_is_accessible_by_its_owner_only(root: Path) -> None:
    assert root.stat().st_mode & 0o777 == 0o700


def test_state_directory_is_in_xdg_runtime_dir_or_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ETRAIN_STATE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert state_root() == tmp_path / "etrain"

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    assert state_root() == tmp_path / ".local/state/etrain"


def test_a_directory_that_others_can_write_is_refused_with_advice(root: Path) -> None:
    root.chmod(0o770)

    with pytest.raises(PoolError, match=rf"mode 770.*chmod 700 {root}"):
        open_state_root()


def test_record_published_by_this_process_is_alive(root: Path) -> None:
    cluster = ClusterDir.create(root, ClusterSettings(idle_s=5))
    assert cluster.record() is None

    cluster.publish("tls://127.0.0.1:1")

    record = cluster.record()
    assert record is not None
    assert record.is_alive
    assert record.address == "tls://127.0.0.1:1"
    assert cluster.settings() == ClusterSettings(idle_s=5)
    assert (cluster.path / "cluster.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "changes", [{"stamp": "another boot:1"}, {"pid": 2**22 + 1}, {"host": "another machine"}]
)
def test_a_record_of_another_process_is_not_alive(root: Path, changes: dict[str, object]) -> None:
    cluster = ClusterDir.create(root, ClusterSettings())
    cluster.publish("tls://127.0.0.1:1")

    change_record(cluster, **changes)

    record = cluster.record()
    assert record is not None
    assert not record.is_alive


def test_only_directories_of_dead_clusters_are_removed(root: Path) -> None:
    alive, dead, half, elsewhere = (ClusterDir.create(root, ClusterSettings()) for _ in range(4))
    for cluster in (alive, dead, elsewhere):
        cluster.publish("tls://127.0.0.1:1")
    change_record(dead, stamp="gone")
    change_record(elsewhere, host="another machine", stamp="gone")
    other_environment = root / "local-000000-abcdef"
    other_environment.mkdir()

    remove_stale(root)

    left = {path.name for path in root.iterdir()}
    assert left == {alive.cluster_id, elsewhere.cluster_id, other_environment.name}
    assert not half.path.exists()


def test_start_lock_is_exclusive_and_held_by_an_inherited_descriptor(root: Path) -> None:
    with start_lock(root, "abc", timeout_s=0) as fd:
        heir = os.dup(fd)
        with pytest.raises(TimeoutError), start_lock(root, "abc", timeout_s=0.05):
            pass
    with pytest.raises(TimeoutError), start_lock(root, "abc", timeout_s=0):
        pass
    os.close(heir)

    with start_lock(root, "abc", timeout_s=0):
        remove_start_lock(root, "abc")
    assert list(root.iterdir()) == []


def test_dead_or_zombie_process_has_no_stamp() -> None:
    child = subprocess.Popen(["sleep", "60"])
    stamp = stamp_of(child.pid)
    assert stamp is not None
    assert stamp == stamp_of(child.pid) != stamp_of(os.getpid())

    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert stamp_of(child.pid) is None
    child.wait()
    assert stamp_of(child.pid) is None


def test_processes_are_found_by_their_mark_in_any_session() -> None:
    mark = f"test-{os.getpid()}"
    child = subprocess.Popen(
        ["sleep", "60"], env=os.environ | {MARKER: mark}, start_new_session=True
    )

    # Until it has become the other program, it has this one's environment.
    wait_until(lambda: bool(processes_of(mark)), timeout_s=10)
    assert [process.pid for process in processes_of(mark)] == [child.pid]
    assert kill_processes_of(mark) == []
    assert child.wait(5) == -9


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_idle_time_that_is_not_a_positive_number_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETRAIN_IDLE_S", text)

    with pytest.raises(PoolError, match=f"ETRAIN_IDLE_S='{text}'"):
        ClusterSettings.from_environment()


def test_the_idle_time_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETRAIN_IDLE_S", "inf")
    assert ClusterSettings.from_environment() == dataclasses.replace(
        ClusterSettings(), idle_s=float("inf")
    )


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5", ""])
def test_a_number_of_workers_per_gpu_below_one_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETRAIN_WORKERS_PER_GPU", text)

    with pytest.raises(PoolError, match=f"ETRAIN_WORKERS_PER_GPU='{text}'"):
        ClusterSettings.from_environment()


def test_the_number_of_workers_per_gpu_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ETRAIN_WORKERS_PER_GPU", "4")
    assert ClusterSettings.from_environment() == ClusterSettings(workers_per_gpu=4)


def test_other_python_or_package_version_has_separate_clusters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = state_root_module.environment_key()
    monkeypatch.setattr(state_root_module, "package_version", lambda: "99")
    other_version = state_root_module.environment_key()
    monkeypatch.setattr("sys.executable", "/elsewhere/bin/python")

    assert len({own, other_version, state_root_module.environment_key()}) == 3
    assert platform.node() not in own


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"workers": 1, "jobs": 1, "idle_s": 0.0}, "1 worker, 1 job"),
        ({"workers": 3, "jobs": 2, "idle_s": 0.0}, "3 workers, 2 jobs"),
        ({"workers": 2, "jobs": 0, "idle_s": 7.4}, "2 workers, no job, idle for 7 s"),
    ],
)
def test_only_a_cluster_without_jobs_is_idle(facts: dict[str, Any], expected: str) -> None:
    assert describe_load(ClusterFacts(cluster_id="c", pid=1, **facts)) == expected
