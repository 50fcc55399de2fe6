"""What a peer of a cluster may send: plain values, and only the requests of its role."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler, Worker
from distributed.comm import CommClosedError
from distributed.core import Server, rpc
from distributed.protocol import ToPickle, to_serialize
from distributed.protocol.pickle import dumps

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.job.link import ClusterLink
from etrain_jupyter.process import peers
from etrain_jupyter.process.peers import (
    WORKER_REQUESTS,
    Opaque,
    RefusedMessageError,
    decode_plain,
    pinned_to_scheduler,
    plain_values_only,
    restricted,
)
from etrain_jupyter.process.tls import (
    mint_certificates,
    read_security,
    without_http,
    write_certificates,
)
from etrain_jupyter.wire.requests import ListJobs


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    write_certificates(tmp_path / "tls", mint_certificates("local-abc-def"))
    return tmp_path / "tls"


@pytest.fixture(autouse=True)
def whole_process_is_not_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """``restricted`` is for processes of their own; here other tests use Dask as it is."""
    monkeypatch.setattr(peers, "_is_process_plain", False)


@pytest.fixture
async def scheduler(tls: Path) -> AsyncIterator[Any]:
    server = restricted(without_http(Scheduler), worker_may=WORKER_REQUESTS)(
        host="127.0.0.1",
        protocol="tls",
        security=read_security(tls, "scheduler"),
        dashboard=False,
        port=0,
    )
    server.handlers["etrain_jobs"] = _list_jobs
    async with server:
        yield server


async def _list_jobs() -> dict[str, Any]:
    return {"jobs": ["digits"]}


def connect(address: str, tls: Path, role: str) -> Any:
    return rpc(address, connection_args=read_security(tls, role).get_connection_args(role))


async def test_a_worker_cannot_run_a_function_on_the_scheduler(
    scheduler: Any, tls: Path, tmp_path: Path
) -> None:
    line = connect(scheduler.address, tls, "worker")
    with pytest.raises(CommClosedError):
        await line.run_function(function=dumps(lambda: os.mkdir(tmp_path / "ran")), wait=True)
    await line.close_rpc()

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "operation",
    ["etrain_jobs", "broadcast", "terminate", "restart", "retire_workers", "unregister"],
)
async def test_worker_cannot_send_requests_of_the_kernel(
    operation: str, scheduler: Any, tls: Path
) -> None:
    line = connect(scheduler.address, tls, "worker")
    with pytest.raises(CommClosedError):
        await getattr(line, operation)()
    await line.close_rpc()


async def test_request_of_a_kernel_is_answered(scheduler: Any, tls: Path) -> None:
    line = connect(scheduler.address, tls, "client")
    assert await line.etrain_jobs() == {"jobs": ("digits",)}
    await line.close_rpc()


@pytest.mark.parametrize("wrap", [ToPickle, to_serialize])
@pytest.mark.parametrize("role", ["worker", "client"])
async def test_the_scheduler_unpickles_nothing_that_a_peer_sends(
    role: str, wrap: Any, scheduler: Any, tls: Path, tmp_path: Path
) -> None:
    line = connect(scheduler.address, tls, role)
    with contextlib.suppress(Exception):  # refused, or taken as something that cannot be read
        await line.heartbeat_worker(address="tls://127.0.0.1:1", metrics=wrap(Trap(tmp_path / "x")))
    await line.close_rpc()

    assert not (tmp_path / "x").exists()


async def test_worker_registers_and_stays_connected(
    scheduler: Any, tls: Path, tmp_path: Path
) -> None:
    async with restricted(without_http(Worker))(
        scheduler.address,
        name="w1",
        host="127.0.0.1",
        protocol="tls",
        security=read_security(tls, "worker"),
        nthreads=1,
        memory_limit=0,
        local_directory=str(tmp_path),
    ) as worker:
        heard: list[Any] = []
        scheduler.stream_handlers["etrain_report"] = lambda **message: heard.append(message)
        worker.batched_stream.send({"op": "etrain_report", "message": {"beat": 1}})
        await worker.heartbeat()

        while not heard:
            await asyncio.sleep(0.01)
        assert heard[0]["message"] == {"beat": 1}
        assert [w.name for w in scheduler.workers.values()] == ["w1"]

        # Another worker machine cannot run code there.
        line = connect(worker.address, tls, "worker")
        with pytest.raises(CommClosedError):
            await line.run(function=dumps(lambda: os.mkdir(tmp_path / "ran")))
        await line.close_rpc()

        # It cannot report in the name of another worker; the attempt ends it.
        forged = {"op": "etrain_report", "message": {"beat": 2}, "worker": "tls://another"}
        worker.batched_stream.send(forged)
        async with asyncio.timeout(10):
            while scheduler.workers:
                await asyncio.sleep(0.01)
        assert [report["message"] for report in heard] == [{"beat": 1}]
    assert not (tmp_path / "ran").exists()


async def hostile(role: str, tls: Path, answer: Any) -> Any:
    """Return a server with some certificate of the cluster that answers what it likes."""

    async def etrain_jobs(wire_version: int) -> Any:
        return {**answer, "wire_version": wire_version}

    server = Server({"etrain_jobs": etrain_jobs})
    security = read_security(tls, role)
    await server.listen("tls://127.0.0.1:0", **security.get_listen_args(role))
    return server


def link_to(address: str, tls: Path) -> ClusterLink:
    def arguments() -> dict[str, Any]:
        return pinned_to_scheduler(read_security(tls, "client").get_connection_args("client"))

    return ClusterLink(address, arguments)


@pytest.mark.parametrize("wrap", [ToPickle, to_serialize])
async def test_the_kernel_unpickles_nothing_that_a_scheduler_answers(
    wrap: Any, tls: Path, tmp_path: Path
) -> None:
    server = await hostile("scheduler", tls, {"jobs": wrap(Trap(tmp_path / "x"))})
    link = link_to(server.address, tls)
    with contextlib.suppress(EtrainError):  # refused, or taken as something that cannot be read
        await ask_jobs(link)
    link.release()
    await server.close()

    assert not (tmp_path / "x").exists()


async def test_worker_cannot_impersonate_the_scheduler(tls: Path) -> None:
    server = await hostile("worker", tls, {"jobs": []})
    link = link_to(server.address, tls)
    with pytest.raises(EtrainError, match="cannot be reached"):
        await ask_jobs(link)
    await server.close()


async def ask_jobs(link: ClusterLink) -> Any:
    return await asyncio.wrap_future(link.send(ListJobs(), timeout=5.0))


def test_other_uses_of_dask_in_the_kernel_are_not_restricted() -> None:
    from distributed import protocol

    frames = protocol.dumps({"value": ToPickle({1, 2})})
    assert protocol.loads(frames)["value"] == {1, 2}
    with plain_values_only(), pytest.raises(RefusedMessageError):
        protocol.loads(frames)
    assert protocol.loads(frames)["value"] == {1, 2}


def test_plain_values_arrive_unchanged() -> None:
    from distributed.core import Status
    from distributed.protocol import dumps as encode

    message = {"op": "x", "n": 1, "data": b"\0", "s": {1}, "status": Status.running, "l": (1, None)}
    assert decode_plain(encode(message)) == message
    assert isinstance(decode_plain(encode({"v": to_serialize([1])}))["v"], Opaque)
