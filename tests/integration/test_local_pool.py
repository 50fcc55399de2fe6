"""The local pool with real processes: access, survival of processes, and clean-up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.head.keeper import MAX_DEATHS
from etrain_jupyter.pools.base import Leftovers, Node
from etrain_jupyter.pools.local import LocalPool
from etrain_jupyter.pools.rpc import ask
from etrain_jupyter.process.address import SchedulerAddress
from etrain_jupyter.process.cluster_dir import ClusterDir, ClusterRecord, cluster_dirs
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.processes import wait_until
from etrain_jupyter.process.state_root import environment_key
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from etrain_jupyter.wire.requests import DescribeCluster
from tests.capabilities import long
from tests.unit.pools import standins
from tests.unit.pools.standins import PretendJob

PATIENCE_S = 90.0
ROOT = Path(__file__).parents[2]

MakePool = Callable[..., LocalPool]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a state directory; fail if a process of it is still running at the end."""
    path = tmp_path / "state"
    monkeypatch.setenv("ETRAIN_STATE", str(path))
    yield path
    LocalPool().down(timeout_s=5.0)
    left = processes_in(path)
    for process in left:
        process.kill()
    assert left == []


@pytest.fixture
def make_pool(state: Path) -> MakePool:
    return new_pool


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Provide one cluster with a worker for all tests that do not change it."""
    path = tmp_path_factory.mktemp("shared") / "state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETRAIN_STATE", str(path))
        pool = new_pool(idle_s=3600.0)
        try:
            address = pool.up()
            pool.want(1, reason="test")
            [node] = await_running(pool, 1)
            yield Shared(state=path, address=address, node=node)
        finally:
            leftovers = pool.down()
    assert leftovers == Leftovers()
    assert processes_in(path) == []


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A cluster that several tests share, and its only worker."""

    state: Path
    address: SchedulerAddress
    node: Node


def new_pool(**changes: object) -> LocalPool:
    settings = {
        "coordinator": standins.COORDINATOR,
        "supervisor": standins.SUPERVISOR,
        "idle_s": 60.0,
    }
    return LocalPool(settings=ClusterSettings(**(settings | changes)))


def running_cluster_ids() -> list[str]:
    records = [cluster.record() for cluster in cluster_dirs()]
    return [record.cluster_id for record in records if record is not None and record.is_alive]


def processes_in(state: Path) -> list[psutil.Process]:
    """Find processes by the environment variable that all processes of a cluster inherit."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("ETRAIN_STATE") == str(state)
            if is_ours and process.pid != os.getpid() and process.status() != "zombie":
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def await_running(pool: LocalPool, count: int) -> list[Node]:
    nodes: list[Node] = []

    def are_running() -> bool:
        nodes[:] = pool.nodes()
        return [node.state for node in nodes] == ["running"] * count

    assert wait_until(are_running, timeout_s=PATIENCE_S), nodes
    return nodes


def keeper_pid(address: SchedulerAddress) -> int:
    return record_of(address).pid


def record_of(address: SchedulerAddress) -> ClusterRecord:
    record = ClusterDir(Path(address.state_dir)).record()
    assert record is not None
    return record


# --- access ---


async def try_to_enter(address: str, connection_args: dict[str, object]) -> object:
    from distributed.core import rpc

    scheduler = rpc(address, timeout=3, connection_args=connection_args)
    try:
        return await asyncio.wait_for(scheduler.identity(), 5)
    finally:
        await scheduler.close_rpc()


def test_only_clients_with_the_clusters_certificate_connect(shared: Shared, tmp_path: Path) -> None:
    address = shared.address
    write_certificates(tmp_path / "foreign", mint_certificates(address.cluster_id))
    foreign = SchedulerAddress(
        address=address.address, cluster_id="x", tls_dir=str(tmp_path / "foreign")
    )

    with pytest.raises(OSError, match=r"."):
        asyncio.run(try_to_enter(address.address.replace("tls://", "tcp://"), {}))
    with pytest.raises(OSError, match=r"."):
        asyncio.run(try_to_enter(address.address, foreign.connection_args()))
    assert ask(address, DescribeCluster()).cluster_id == address.cluster_id


def test_all_ports_are_on_loopback_and_none_serves_http(shared: Shared) -> None:
    listening = {
        pid: [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
        for pid in (record_of(shared.address).scheduler_pid, shared.node.pid)
    }

    assert {pid: len(ports) for pid, ports in listening.items()} == dict.fromkeys(listening, 1)
    assert {port.ip for ports in listening.values() for port in ports} == {"127.0.0.1"}


def test_state_directory_is_readable_by_its_owner_only(shared: Shared) -> None:
    cluster = Path(shared.address.state_dir)
    secrets = [
        path for path in cluster.rglob("*") if path.is_file() and "scratch" not in path.parts
    ]

    for folder in (shared.state, cluster, cluster / "tls", cluster / "scratch"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in secrets} >= {"ca.pem", "client.key", "head.log", "w1.log"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}


# --- survival ---


def test_cluster_outlives_the_process_that_started_it(make_pool: MakePool, state: Path) -> None:
    code = """if True:
        import json, sys, time
        from etrain_jupyter.pools.local import LocalPool
        from etrain_jupyter.process.cluster_settings import ClusterSettings
        pool = LocalPool(settings=ClusterSettings(**json.loads(sys.argv[1])))
        print(json.dumps(pool.up().to_dict()), flush=True)
        time.sleep(600)
    """
    settings = json.dumps({"coordinator": standins.COORDINATOR, "supervisor": standins.SUPERVISOR})
    with subprocess.Popen(
        [sys.executable, "-c", code, settings], stdout=subprocess.PIPE, cwd=ROOT, process_group=0
    ) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"etrain: starting the scheduler of pool local\n"
        address = SchedulerAddress.from_dict(json.loads(kernel.stdout.readline()))
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
            os.killpg(kernel.pid, number)
        kernel.wait(10)

    assert make_pool().up() == address
    assert psutil.Process(keeper_pid(address)).ppid() != os.getpid()


def test_killed_keeper_ends_the_cluster_and_the_next_up_starts_a_new_one(
    make_pool: MakePool, state: Path
) -> None:
    pool = make_pool()
    old = pool.up()
    pool.want(2, reason="test")
    await_running(pool, 2)

    os.kill(keeper_pid(old), signal.SIGKILL)

    assert wait_until(lambda: not processes_in(state), timeout_s=PATIENCE_S), processes_in(state)
    # The closed pipe ends all other processes a moment before the keeper itself has been reaped.
    assert wait_until(lambda: running_cluster_ids() == [], timeout_s=PATIENCE_S)
    new = pool.up()
    assert new.cluster_id != old.cluster_id
    assert not Path(old.state_dir).exists()


def kill_scheduler(address: SchedulerAddress) -> None:
    """Kill the scheduler and wait until another one serves."""
    before = record_of(address)
    os.kill(before.scheduler_pid, signal.SIGKILL)
    assert wait_until(
        lambda: record_of(address).num_lives > before.num_lives, timeout_s=PATIENCE_S
    ), ClusterDir(Path(address.state_dir)).log_tail()


def test_killed_scheduler_is_restarted_and_adopts_its_workers(
    make_pool: MakePool, state: Path
) -> None:
    pool = make_pool()
    address = pool.up()
    pool.want(2, reason="test")
    before = await_running(pool, 2)

    kill_scheduler(address)

    assert await_running(pool, 2) == before, "the workers are the same processes"
    assert pool.up() == address, "the address is the same"
    assert pool.down() == Leftovers()
    assert processes_in(state) == []


@long
def test_cluster_shuts_down_when_its_scheduler_keeps_dying(
    make_pool: MakePool, state: Path
) -> None:
    pool = make_pool()
    address = pool.up()
    cluster = ClusterDir(Path(address.state_dir))
    pool.want(1, reason="test")
    await_running(pool, 1)

    for _ in range(MAX_DEATHS - 1):
        kill_scheduler(address)
    os.kill(record_of(address).scheduler_pid, signal.SIGKILL)

    assert wait_until(lambda: not processes_in(state), timeout_s=PATIENCE_S), processes_in(state)
    assert "Giving up on cluster" in cluster.log_tail()
    assert wait_until(lambda: running_cluster_ids() == [], timeout_s=PATIENCE_S)


@long
def test_worker_released_by_a_restarted_scheduler_exits(make_pool: MakePool) -> None:
    pool = make_pool()
    address = pool.up()
    pool.want(1, reason="test")
    [node] = await_running(pool, 1)
    kill_scheduler(address)
    await_running(pool, 1)

    pool.release(node.id, drain_s=PATIENCE_S)

    assert wait_until(lambda: not psutil.pid_exists(node.pid), timeout_s=PATIENCE_S)


def test_killed_worker_is_replaced_under_a_new_name(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.up()
    pool.want(2, reason="test")
    first, second = await_running(pool, 2)

    os.kill(first.pid, signal.SIGKILL)
    assert wait_until(lambda: first.id not in [n.id for n in pool.nodes()], timeout_s=PATIENCE_S)
    third = await_running(pool, 2)[-1]
    pool.kill(second.id)
    assert wait_until(lambda: second.id not in [n.id for n in pool.nodes()], timeout_s=PATIENCE_S)

    assert [node.id for node in await_running(pool, 2)] == [third.id, "w4"]
    assert third.id == "w3"


@long
def test_suspended_worker_is_killed_at_its_release_deadline(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.up()
    pool.want(1, reason="test")
    [node] = await_running(pool, 1)
    os.kill(node.pid, signal.SIGSTOP)

    pool.release(node.id, drain_s=0.5)

    assert [n.state for n in pool.nodes() if n.id == node.id] == ["draining"]
    assert wait_until(lambda: not psutil.pid_exists(node.pid), timeout_s=PATIENCE_S)


@long
def test_launcher_killed_during_the_start_leaves_no_second_cluster(
    make_pool: MakePool, state: Path
) -> None:
    code = """if True:
        import sys
        from etrain_jupyter.pools.local import LocalPool
        from etrain_jupyter.process.cluster_settings import ClusterSettings
        LocalPool(settings=ClusterSettings(coordinator=sys.argv[1])).up()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code, standins.SLOW_COORDINATOR], cwd=ROOT
    ) as kernel:
        assert wait_until(lambda: len(processes_in(state)) > 1, timeout_s=PATIENCE_S)
        kernel.kill()
    assert running_cluster_ids() == [], "the launcher was killed too late for this test"

    address = make_pool().up()

    assert running_cluster_ids() == [address.cluster_id]
    assert len(processes_in(state)) == 2


def test_pool_works_in_a_kernel_with_a_running_event_loop(make_pool: MakePool) -> None:
    async def cell() -> SchedulerAddress:
        return make_pool().up()

    assert asyncio.run(cell()) == make_pool().up()


def test_cluster_without_a_record_shuts_down(make_pool: MakePool, state: Path) -> None:
    address = make_pool().up()

    (Path(address.state_dir) / "cluster.json").unlink()

    assert wait_until(lambda: not processes_in(state), timeout_s=PATIENCE_S)


# --- shutdown ---


def test_idle_cluster_shuts_down_and_leaves_nothing(make_pool: MakePool, state: Path) -> None:
    address = make_pool(idle_s=1.0).up()
    ask(address, PretendJob(num_workers=1))
    assert not wait_until(lambda: not running_cluster_ids(), timeout_s=1.5), (
        "the cluster shut down during a job"
    )

    ask(address, PretendJob(num_workers=0))

    assert wait_until(lambda: not processes_in(state), timeout_s=PATIENCE_S)
    assert list(state.iterdir()) == []


@long
def test_unused_workers_exit_after_the_linger_time(make_pool: MakePool) -> None:
    pool = make_pool(linger_s=0.2)
    address = pool.up()
    ask(address, PretendJob(num_workers=1))
    await_running(pool, 1)

    ask(address, PretendJob(num_workers=0))

    assert wait_until(lambda: pool.nodes() == [], timeout_s=PATIENCE_S)


def test_down_kills_a_suspended_head(make_pool: MakePool, state: Path) -> None:
    pool = make_pool()
    address = pool.up()
    pool.want(1, reason="test")
    await_running(pool, 1)
    os.kill(record_of(address).scheduler_pid, signal.SIGSTOP)

    assert LocalPool(cluster_id=address.cluster_id).down(timeout_s=1.0) == Leftovers()

    assert processes_in(state) == []
    assert not Path(address.state_dir).exists()


def test_down_leaves_no_file_and_no_process(make_pool: MakePool, state: Path) -> None:
    pool = make_pool()
    pool.up()
    pool.want(1, reason="test")

    assert pool.down() == Leftovers()

    assert list(state.iterdir()) == []
    assert processes_in(state) == []


def test_sigterm_shuts_the_cluster_down_cleanly(make_pool: MakePool, state: Path) -> None:
    pool = make_pool()
    address = pool.up()
    pool.want(1, reason="test")
    await_running(pool, 1)

    os.kill(keeper_pid(address), signal.SIGTERM)

    assert wait_until(lambda: not processes_in(state), timeout_s=PATIENCE_S)
    assert list(state.iterdir()) == []


# --- errors ---


def test_failing_head_reports_its_error_and_leaves_nothing(
    make_pool: MakePool, state: Path
) -> None:
    with pytest.raises(PoolError, match="the coordinator has a bad day"):
        make_pool(coordinator=standins.FAILING_COORDINATOR).up()

    assert [path.name for path in state.iterdir()] == [f"start-{environment_key()}.lock"]


def test_worker_that_cannot_start_is_retried_with_back_off(make_pool: MakePool) -> None:
    pool = make_pool(supervisor=standins.FAILING_SUPERVISOR)
    cluster = ClusterDir(Path(pool.up().state_dir))
    pool.want(1, reason="test")

    def has_failed_twice() -> bool:
        return cluster.log_tail().count("died after") >= 2

    assert wait_until(has_failed_twice, timeout_s=PATIENCE_S)
    assert "the next worker may start in 0.5 s" in cluster.log_tail()
    assert "the supervisor has a bad day" in cluster.log_tail("w1", num_lines=50)


@long
def test_suspended_head_is_an_error_with_advice_and_no_second_cluster(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = make_pool().up()
    monkeypatch.setattr("etrain_jupyter.pools.detached.ANSWER_S", 0.5)
    os.kill(record_of(address).scheduler_pid, signal.SIGSTOP)

    with pytest.raises(PoolError, match=r"did not answer etrain_pool_touch.*%etrain down"):
        make_pool().up()

    assert running_cluster_ids() == [address.cluster_id]


def test_pool_of_an_ended_cluster_raises_an_error(state: Path) -> None:
    with pytest.raises(PoolError, match="local-dead-1 has ended"):
        LocalPool(cluster_id="local-dead-1").up()


# --- with the real coordinator and supervisor ---


def test_trainers_exit_with_the_keeper(state: Path) -> None:
    pool = LocalPool(settings=ClusterSettings(idle_s=60))
    address = pool.up()
    pool.want(1, reason="test")
    await_running(pool, 1)

    def has_spare_trainer() -> bool:
        return any("etrain_jupyter.trainer.main" in p.cmdline() for p in processes_in(state))

    assert wait_until(has_spare_trainer, timeout_s=PATIENCE_S)
    assert not maps_torch(record_of(address).scheduler_pid)

    os.kill(keeper_pid(address), signal.SIGKILL)

    assert wait_until(lambda: not processes_in(state), timeout_s=PATIENCE_S), processes_in(state)


def maps_torch(pid: int) -> bool:
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and "libtorch" in maps.read_text()
