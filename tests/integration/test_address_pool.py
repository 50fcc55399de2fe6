"""Training on an external Dask cluster of plain `dask scheduler` and `dask worker` processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from etrain_jupyter import launch
from etrain_jupyter.errors import PoolError
from etrain_jupyter.log.events import LogLine, WorkerLost
from etrain_jupyter.notebook.job.open_jobs import attach
from etrain_jupyter.pools.address import pool as address_module
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.base import Leftovers
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from etrain_jupyter.testing.invariants import assert_invariants
from tests.capabilities import long
from tests.integration.dask_cluster import ROOT, DaskCluster
from tests.integration.slow_jobs import BODY, NAMES, PATIENCE_S, await_steps, submit, until

pytestmark = [
    pytest.mark.timeout(300),
    # Dask does not close the plain socket of a failed TLS handshake.
    pytest.mark.filterwarnings(
        "ignore:unclosed <socket:ResourceWarning",
        "ignore:Exception ignored.*<socket:pytest.PytestUnraisableExceptionWarning",
    ),
]


@pytest.fixture(autouse=True)
def forgotten_sockets() -> Iterator[None]:
    """Raise the warning about leaked sockets in the test that caused it."""
    yield
    gc.collect()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(address_module, "_notified", set())
    return tmp_path / "runs"


@contextlib.contextmanager
def running(cluster: DaskCluster) -> Iterator[DaskCluster]:
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(tmp_path: Path, runs: Path) -> Iterator[DaskCluster]:
    with running(DaskCluster(tmp_path / "dask")) as cluster:
        yield cluster


def test_job_survives_a_lost_worker_and_a_second_kernel_attaches_to_it(
    cluster: DaskCluster, runs: Path
) -> None:
    first, second = cluster.start_worker(), cluster.start_worker("--nanny", "--nthreads", "2")
    job = submit(cluster.address)
    await_steps(job, world_size=2)

    # A second kernel that has only the run store, and then opens the pool itself.
    code = (
        "import etrain_jupyter\n"
        "from etrain_jupyter.pools.address.pool import AddressPool\n"
        f"job = etrain_jupyter.attach({job.id!r})\n"
        f"up = AddressPool({cluster.address!r}).up()\n"
        "print(job.status, up.cluster_id == job.record.cluster['cluster_id'],\n"
        "      sorted(w['worker'] for w in job.workers()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert other.stdout.split(" ", 1) == ["running", f"True ['{first}', '{second}']\n"], other

    cluster.kill(first)
    await_steps(job, world_size=1)
    lost = [event.worker for event in job.events() if isinstance(event, WorkerLost)]
    assert lost == [first]
    third = cluster.start_worker()
    await_steps(job, world_size=2)

    # The scheduler remains usable by others: a Dask task runs during the training.
    with Client(cluster.address, set_as_default=False) as client:
        assert client.submit(sum, [1, 2]).result(timeout=PATIENCE_S) == 3

    pool = AddressPool(cluster.address)
    assert pool.down(timeout_s=60.0) == Leftovers()
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    saved = sorted((job.record.folder / "manifests").glob("*.json"))[-1]
    assert saved.stem == f"step_{job.step:08d}", "the job was stopped with a checkpoint"
    assert_invariants(job.events())
    assert job.audit().ok
    assert cluster.trainers() == []
    assert all(cluster.is_alive(name) for name in ("scheduler", second, third))
    with Client(cluster.address, set_as_default=False) as client:
        plugins = client.run_on_scheduler(_names_of_ours)
        assert plugins == []
        assert set(client.run(_plugins_of_ours).values()) == {()}
        assert client.submit(sum, [1, 2]).result(timeout=PATIENCE_S) == 3
    with pytest.raises(PoolError, match="runs no etrain coordinator"):
        pool.nodes()
    assert pool.down(timeout_s=5.0) == Leftovers(), "a second down succeeds"


def _names_of_ours(dask_scheduler: Any) -> list[str]:
    names = [*dask_scheduler.plugins, *dask_scheduler.handlers, *dask_scheduler.worker_plugins]
    return [str(name) for name in names if "etrain" in str(name)]


def _plugins_of_ours(dask_worker: Any) -> tuple[str, ...]:
    return tuple(name for name in dask_worker.plugins if "etrain" in name)


@long
def test_job_lost_by_a_restarted_scheduler_is_resumed_there(
    cluster: DaskCluster, runs: Path
) -> None:
    cluster.start_worker()
    job = submit(cluster.address)
    await_steps(job, world_size=1)
    until(lambda: list((job.record.folder / "manifests").glob("*.json")), "a checkpoint")

    cluster.kill("scheduler")
    until(lambda: cluster.trainers() == [], "the end of the trainers")
    cluster.start_scheduler()
    cluster.end_workers()
    cluster.start_worker()
    until(lambda: job.lost, "the detection that the job is lost")
    assert "runs no etrain coordinator" in job.lost

    said = job.resume()
    assert " on cluster Scheduler-" in said
    assert "from the checkpoint at step" in said
    await_steps(job, world_size=1)
    assert AddressPool(cluster.address).down(timeout_s=60.0) == Leftovers()
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    assert job.audit().ok


@long
def test_no_process_or_task_of_ours_runs_before_and_after_a_job(
    cluster: DaskCluster, runs: Path
) -> None:
    cluster.start_worker()
    AddressPool(cluster.address).up()
    with Client(cluster.address, set_as_default=False) as client:
        (before,) = client.run(_tasks_of_ours).values()
        assert (before, cluster.trainers()) == ((), []), "no heartbeat task and no spare trainer"
    job = submit(cluster.address)
    await_steps(job, world_size=1)
    assert cluster.trainers() != []
    job.stop(now=True)
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    until(lambda: cluster.trainers() == [], "the end of trainers and spares")
    with Client(cluster.address, set_as_default=False) as client:
        until(
            lambda: set(client.run(_tasks_of_ours).values()) == {()},
            "the end of the heartbeat tasks",
        )
    assert AddressPool(cluster.address).down(timeout_s=10.0) == Leftovers()


def _tasks_of_ours(dask_worker: Any) -> tuple[str, ...]:
    import asyncio

    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return tuple(name for name in names if "Supervisor._beat" in name)


# --- packages installed on the cluster ---


def without(package: str, folder: Path) -> dict[str, str]:
    """Return an environment in which a package cannot be imported."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    return {"PYTHONPATH": str(folder)}


def test_workers_without_the_package_are_named_and_remain_usable_for_dask(
    cluster: DaskCluster, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = without("etrain_jupyter", tmp_path / "bare")
    lacking = cluster.start_worker(environment=bare)
    pool = AddressPool(cluster.address)
    with pytest.raises(PoolError) as caught:
        pool.up()
    text = str(caught.value)
    assert text.startswith(f"1 of 1 workers of {cluster.address} cannot train: etrain-jupyter")
    assert "No module named 'etrain_jupyter'" in text
    assert "pip install 'etrain-jupyter==" in text

    fit = cluster.start_worker()
    pool.up()
    pool.up()
    said = capsys.readouterr().out
    assert said.count("1 of 2 workers of") == 1, "the warning is shown once"
    until(
        lambda: [n.id for n in pool.nodes() if n.state == "running"] == [fit],
        "the worker with the package",
    )
    job = submit(cluster.address)
    await_steps(job, world_size=1)
    # A worker that joins later must start nevertheless, and the job's log mentions it.
    late = cluster.start_worker(environment=bare)
    lines = until(
        lambda: [e.text for e in job.events() if isinstance(e, LogLine) and e.worker == late],
        "the log line of the late worker",
    )
    assert "cannot train: ModuleNotFoundError" in lines[0]
    with Client(cluster.address, set_as_default=False) as client:
        done = client.submit(sum, [1, 2], workers=[lacking, late], pure=False)
        assert done.result(timeout=PATIENCE_S) == 3
    job.stop(now=True)
    assert job.wait(timeout=PATIENCE_S) == "stopped"
    assert pool.down(timeout_s=10.0) == Leftovers()


def test_scheduler_without_the_package_is_refused_with_the_install_command(
    tmp_path: Path, runs: Path
) -> None:
    bare = without("etrain_jupyter", tmp_path / "bare")
    with running(DaskCluster(tmp_path / "dask", environment=bare)) as cluster:
        with pytest.raises(PoolError, match=r"cannot import etrain-jupyter .*pip install"):
            AddressPool(cluster.address).up()
        assert AddressPool(cluster.address).down(timeout_s=5.0) == Leftovers()


def test_cluster_with_another_version_is_refused(
    cluster: DaskCluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start_worker()
    pool = AddressPool(cluster.address)
    pool.up()
    monkeypatch.setattr("etrain_jupyter.pools.address.pool.__version__", "9.9.9")
    monkeypatch.setattr("etrain_jupyter.pools.address.messages.__version__", "9.9.9")
    with pytest.raises(
        PoolError, match=r"has etrain-jupyter 0\.\S+ and runs a coordinator .* 9\.9\.9"
    ):
        pool.up()


# --- TLS ---


def make_certificates(folder: Path) -> Path:
    """Create the certificates of a separate authority, as an administrator would."""
    write_certificates(folder, mint_certificates(folder.name))
    return folder


def files_of(folder: Path, role: str = "client") -> dict[str, str]:
    return {
        "ca": str(folder / "ca.pem"),
        "cert": str(folder / f"{role}.pem"),
        "key": str(folder / f"{role}.key"),
    }


def test_cluster_with_its_own_certificates_trains_and_rejects_all_others(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = make_certificates(tmp_path / "theirs")
    make_certificates(tmp_path / "strangers")
    options = {
        "ca-file": str(certificates / "ca.pem"),
        # Dask workers use one certificate both as servers and as clients.
        "cert": str(certificates / "worker.pem"),
        "key": str(certificates / "worker.key"),
    }
    with running(DaskCluster(tmp_path / "dask", tls=options)) as cluster:
        cluster.start_worker("--protocol", "tls")
        pool = AddressPool(cluster.address, tls=files_of(certificates), min_version="1.3")
        address = pool.up()
        assert (address.state_dir, address.tls_dir) == ("", "")
        assert address.tls_key == str(certificates / "client.key")

        monkeypatch.setattr("etrain_jupyter.pools.address.pool.CONNECT_S", 3.0)
        mixed = files_of(tmp_path / "strangers") | {"ca": str(certificates / "ca.pem")}
        wrong: list[tuple[AddressPool, str]] = [
            (AddressPool(cluster.address, tls=files_of(tmp_path / "strangers")), "not signed by"),
            (AddressPool(cluster.address, tls=mixed), "may reject the certificate"),
            (AddressPool(cluster.address.replace("tls", "tcp")), "may require TLS"),
            (AddressPool(cluster.address), "needs certificates"),
        ]
        for stranger, words in wrong:
            with pytest.raises(PoolError, match=words):
                stranger.up()

        plan = launch.plan_cell(BODY, NAMES, {}, "%%etrain distributed")
        job = launch.submit(dataclasses.replace(plan, pool=pool))
        await_steps(job, world_size=1)
        assert attach(job.id).workers()[0]["address"].startswith("tls://")
        assert pool.down(timeout_s=60.0) == Leftovers()
        assert job.wait(timeout=PATIENCE_S) == "stopped"


# --- unreachable schedulers ---


def test_unreachable_addresses_are_distinguished_and_need_no_clean_up(
    cluster: DaskCluster,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    AddressPool(cluster.address).up()
    assert capsys.readouterr().out.splitlines() == [
        f"etrain: {cluster.address} has no workers yet. Jobs wait until you start some, for "
        "example with `dask worker`."
    ]
    monkeypatch.setattr("etrain_jupyter.pools.address.pool.CONNECT_S", 1.0)
    tls = AddressPool(
        cluster.address.replace("tcp", "tls"),
        tls=files_of(make_certificates(runs.parent / "ours")),
    )
    with pytest.raises(PoolError, match=r"does not use TLS.*Write tcp://"):
        tls.up()

    cluster.kill("scheduler")
    pool = AddressPool(cluster.address)
    with pytest.raises(
        PoolError, match=r"no scheduler is listening at tcp://.*Start the scheduler there"
    ):
        pool.up()
    assert pool.down(timeout_s=5.0) == Leftovers()
    with pytest.raises(PoolError, match="cannot be reached from this machine"):
        AddressPool("tcp://no-such-host.invalid:8786").up()
    assert AddressPool("tcp://no-such-host.invalid:8786").down(timeout_s=5.0).processes
