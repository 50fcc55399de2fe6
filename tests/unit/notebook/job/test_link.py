from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from distributed.core import Server

from etrain_jupyter.errors import JobLostError, PoolError
from etrain_jupyter.notebook.job import link as link_module
from etrain_jupyter.notebook.job.link import (
    ClusterEndedError,
    ClusterLink,
    NoAnswerError,
    UnreachableError,
    wait_interruptibly,
)
from etrain_jupyter.wire.requests import (
    UNKNOWN_JOB,
    Done,
    RefusedRequestError,
    Request,
    handler_of,
)
from etrain_jupyter.wire.versions import WIRE_VERSION


@dataclass(frozen=True, kw_only=True)
class Echoed:
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Echo(Request[Echoed]):
    op: ClassVar[str] = "echo"
    reply: ClassVar[type[Any]] = Echoed

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Refuse(Request[Done]):
    op: ClassVar[str] = "refuse"


@dataclass(frozen=True, kw_only=True)
class Forget(Request[Done]):
    op: ClassVar[str] = "forget"


@dataclass(frozen=True, kw_only=True)
class Sleep(Request[Done]):
    op: ClassVar[str] = "sleep"

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Nonsense(Request[Done]):
    op: ClassVar[str] = "nonsense"


@dataclass(frozen=True, kw_only=True)
class AskOldCluster(Request[Done]):
    op: ClassVar[str] = "old"


async def echo(request: Echo) -> Echoed:
    return Echoed(values=request.values)


async def refuse(request: Refuse) -> Done:
    raise RefusedRequestError("PoolError", "no such worker w9")


async def forget(request: Forget) -> Done:
    raise RefusedRequestError(UNKNOWN_JOB, "no job j here")


async def sleep(request: Sleep) -> Done:
    await asyncio.sleep(request.seconds)
    return Done()


async def nonsense(wire_version: int) -> int:
    return 3


async def old(**arguments: Any) -> dict[str, Any]:
    """Refuse a request as a coordinator of the previous wire version does."""
    return {"error": "WireVersionError", "message": "refused", "wire_version": WIRE_VERSION - 1}


HANDLERS = {
    Echo.op: handler_of(Echo, echo),
    Refuse.op: handler_of(Refuse, refuse),
    Forget.op: handler_of(Forget, forget),
    Sleep.op: handler_of(Sleep, sleep),
    Nonsense.op: nonsense,
    AskOldCluster.op: old,
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Dask server of our own in a thread: the real wire, without a scheduler."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-server")
    thread.start()

    async def start() -> Server:
        server = Server(HANDLERS)
        await server.listen("tcp://127.0.0.1:0")
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield server.address
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def link(address: str) -> Iterator[ClusterLink]:
    link = ClusterLink(address)
    yield link
    link.release()


def test_lists_in_a_reply_stay_lists(link: ClusterLink) -> None:
    values = {"ranks": ["a", "b"], "nested": {"pids": [1, 2]}, "data": b"bytes"}

    assert link.call(Echo(values=values)) == Echoed(values=values)


def test_calls_from_many_threads_share_one_loop_thread(link: ClusterLink) -> None:
    slow = link.send(Sleep(seconds=0.2))
    fast = [link.send(Echo(values={"number": n})) for n in range(5)]

    assert [future.result(5).values["number"] for future in fast] == [0, 1, 2, 3, 4]
    assert slow.result(5) == Done()
    threads = [thread for thread in threading.enumerate() if thread.name == "etrain-link"]
    assert [thread.daemon for thread in threads] == [True]


def test_refusal_is_a_pool_error_with_the_coordinators_message(link: ClusterLink) -> None:
    with pytest.raises(PoolError, match="no such worker w9"):
        link.call(Refuse())


def test_job_unknown_to_the_scheduler_is_lost(link: ClusterLink) -> None:
    with pytest.raises(JobLostError, match="no job j here"):
        link.call(Forget())


def test_reply_of_a_scheduler_without_a_coordinator_is_refused(link: ClusterLink) -> None:
    with pytest.raises(PoolError, match="runs no etrain coordinator") as caught:
        link.call(Nonsense())
    assert isinstance(caught.value, JobLostError), "it holds no job, whichever that is"


def test_cluster_of_an_older_wire_version_is_refused_with_a_remedy(link: ClusterLink) -> None:
    with pytest.raises(PoolError) as caught:
        link.call(AskOldCluster())

    text = str(caught.value)
    assert text.startswith(
        f"the cluster uses wire version {WIRE_VERSION - 1}, and this kernel version {WIRE_VERSION}"
    )
    assert "Nothing was done, and its jobs keep training" in text
    assert "%etrain down" in text


def test_call_to_a_silent_scheduler_times_out_and_the_next_one_works(
    link: ClusterLink,
) -> None:
    with pytest.raises(
        NoAnswerError, match=r"not respond to sleep within 0\.1 s.* may still carry out"
    ):
        link.call(Sleep(seconds=5), timeout=0.1)

    assert link.call(Echo(values={"again": 1})) == Echoed(values={"again": 1})


def test_released_link_can_be_used_again(link: ClusterLink) -> None:
    link.call(Echo(values={"first": 1}))
    link.release()

    assert link.call(Echo(values={"second": 2})) == Echoed(values={"second": 2})


def test_missing_scheduler_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_S", 0.3)

    with pytest.raises(UnreachableError, match="cannot be reached"):
        ClusterLink("tcp://127.0.0.1:9").call(Echo())


def test_ended_cluster_raises_a_cluster_ended_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_S", 0.3)

    with pytest.raises(ClusterEndedError, match="its cluster has ended"):
        ClusterLink("tcp://127.0.0.1:9", has_ended=lambda: True).call(Echo())


def test_link_follows_a_scheduler_restarted_at_another_address(address: str) -> None:
    found = iter(["", "", address])
    line = ClusterLink("tcp://127.0.0.1:9", locate=lambda: next(found, address))

    assert line.call(Echo(values={"word": "here"})) == Echoed(values={"word": "here"})
    assert line.address == address


def test_error_for_a_restarting_scheduler_suggests_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "RESTART_S", 0.0)
    line = ClusterLink("tcp://127.0.0.1:9", locate=lambda: "")

    with pytest.raises(UnreachableError, match=r"being restarted.*Retry in a few seconds"):
        line.call(Echo())


def test_missing_certificates_are_a_lost_job() -> None:
    def read() -> dict[str, Any]:
        raise FileNotFoundError("client.pem does not exist: the cluster has ended")

    with pytest.raises(JobLostError, match="cannot be reached") as caught:
        ClusterLink("tls://127.0.0.1:9", read).call(Echo())

    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_wait_ends_with_its_timeout() -> None:
    with pytest.raises(TimeoutError):
        wait_interruptibly(Future(), 0.05)


def test_process_with_an_open_call_does_not_wait_for_the_answer(address: str) -> None:
    code = (
        "from etrain_jupyter.notebook.job.link import ClusterLink\n"
        "from tests.unit.notebook.job.test_link import Echo, Sleep\n"
        f"link = ClusterLink({address!r})\n"
        "link.call(Echo())\n"
        "link.send(Sleep(seconds=3600), timeout=3600)\n"
        "print('done', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert process.wait(60) == 0, "it ended while its call was open"
    finally:
        process.kill()
        process.communicate()


def test_text_that_utf8_cannot_encode_is_refused_by_name(link: ClusterLink) -> None:
    with pytest.raises(PoolError, match=r"caf.udce9.* cannot be sent .* Nothing was sent"):
        link.call(Echo(values={"run_dir": "/data/caf\udce9/etrain-runs/job"}))
    assert link.call(Echo(values={"number": 1})) == Echoed(values={"number": 1})
