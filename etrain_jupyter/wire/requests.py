"""Every request to a scheduler, with its reply: from a kernel, and one from supervisors.

A request is a call of a Dask RPC handler. The handler's name says what a peer with a given
certificate may call (``process.peers``); the arguments are the fields of the request and the wire
version. Each reply has the version too, so that both ends notice a peer of another version::

    kernel 3 ── etrain_describe(wire_version=3) ──▶ cluster 3     the reply has wire_version=3
    kernel 2 ── etrain_describe() ────────────────▶ cluster 3     refused, with what to do
    kernel 3 ── etrain_describe(wire_version=3) ──▶ cluster 2     unknown argument: nothing is done,
             ◀── an error without wire_version ──                  and the kernel says why
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from etrain_jupyter import __version__
from etrain_jupyter.wire.codec import (
    VERSION,
    MalformedMessageError,
    WireVersionError,
    check_version,
    decode_fields,
    encode_fields,
)
from etrain_jupyter.wire.versions import WIRE_VERSION

logger = logging.getLogger("etrain.coordinator")

R = TypeVar("R")


class RefusedRequestError(Exception):
    """A scheduler refused a request.

    Attributes:
        kind: Which kind of refusal it is; see ``UNKNOWN_JOB``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NotOursError(Exception):
    """A scheduler replied that runs no coordinator of ours."""


UNKNOWN_JOB = "JobNotFoundError"
"""Kind of refusal: the scheduler does not have the job."""

OTHER_VERSION = "WireVersionError"
"""Kind of refusal: kernel and cluster speak different versions of the wire."""


# --- replies ---


@dataclass(frozen=True, kw_only=True)
class Done:
    """The request was carried out."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The job was submitted, unless the bundle must come first."""

    job_id: str = ""
    wants_bundle: bool = False
    """Whether the scheduler does not see the bundle: send it with ``PutBundle``, then try again."""


@dataclass(frozen=True, kw_only=True)
class BundlePiece:
    """Some bytes of a bundle."""

    data: bytes
    """Empty at its end."""


@dataclass(frozen=True, kw_only=True)
class JobList:
    """The jobs of a cluster."""

    jobs: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class EventBatch:
    """New events of a job."""

    events: tuple[dict[str, Any], ...]
    """In their JSON form, in order."""
    status: str = ""
    trouble: str = ""
    """Why the newest events are only in memory; empty if they are durable."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What follows from a request, as one sentence for the user."""

    message: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerList:
    """The workers of a job."""

    workers: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """The state of a cluster."""

    cluster_id: str
    pid: int
    workers: int = 0
    """How many are connected."""
    jobs: int = 0
    """How many are active."""
    idle_s: float = 0.0
    """Seconds since the last job ended; 0.0 while one is active."""
    version: str = ""
    """Of etrain-jupyter, in a scheduler that others run; empty elsewhere."""
    unfit: dict[str, str] | None = None
    """Why workers take no part, by name."""


@dataclass(frozen=True, kw_only=True)
class ShuttingDown:
    """The cluster is going down."""

    message: str = ""
    stopped: tuple[str, ...] = ()
    """Jobs that were stopped for it."""


@dataclass(frozen=True, kw_only=True)
class ClusterIdentity:
    """Which cluster replied."""

    cluster_id: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class NodeList:
    """The nodes of a pool."""

    nodes: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class CostList:
    """What the nodes of a pool have cost."""

    costs: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class WorkersPresent:
    """How many workers there are now."""

    num_present: int = 0


# --- requests ---


@dataclass(frozen=True, kw_only=True)
class Request(Generic[R]):
    """Base of the requests to a scheduler; ``R`` is the type of the reply."""

    op: ClassVar[str]
    """Name of the Dask handler."""
    reply: ClassVar[type[Any]] = Done


@dataclass(frozen=True, kw_only=True)
class SubmitJob(Request[Submitted]):
    """Run a job."""

    op: ClassVar[str] = "etrain_submit"
    reply: ClassVar[type[Any]] = Submitted

    job: dict[str, Any]
    """The fields of ``head.jobs.job_spec.JobSpec``."""


@dataclass(frozen=True, kw_only=True)
class PutBundle(Request[Done]):
    """Store a piece of a job's bundle."""

    op: ClassVar[str] = "etrain_put_bundle"

    job: dict[str, Any]
    offset: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class FetchBundle(Request[BundlePiece]):
    """Return the next piece of an active job's bundle. Supervisors call it."""

    op: ClassVar[str] = "etrain_bundle"
    reply: ClassVar[type[Any]] = BundlePiece

    digest: str
    offset: int


@dataclass(frozen=True, kw_only=True)
class ListJobs(Request[JobList]):
    """Return the jobs of the cluster."""

    op: ClassVar[str] = "etrain_jobs"
    reply: ClassVar[type[Any]] = JobList


@dataclass(frozen=True, kw_only=True)
class FetchEvents(Request[EventBatch]):
    """Return the events of a job after ``since``, as soon as there are any."""

    op: ClassVar[str] = "etrain_events"
    reply: ClassVar[type[Any]] = EventBatch

    job_id: str
    since: int = 0
    wait_s: float = 10.0
    """Maximum wait; 0.0 returns at once."""
    limit: int = 5000


@dataclass(frozen=True, kw_only=True)
class ControlJob(Request[Outcome]):
    """Do what a user requests of an active job: stop, pause, scale ..."""

    op: ClassVar[str] = "etrain_request"
    reply: ClassVar[type[Any]] = Outcome

    job_id: str
    request: str
    args: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ListWorkers(Request[WorkerList]):
    """Return the workers of a job."""

    op: ClassVar[str] = "etrain_workers"
    reply: ClassVar[type[Any]] = WorkerList

    job_id: str


@dataclass(frozen=True, kw_only=True)
class DescribeCluster(Request[ClusterFacts]):
    """Return the state of the cluster."""

    op: ClassVar[str] = "etrain_describe"
    reply: ClassVar[type[Any]] = ClusterFacts


@dataclass(frozen=True, kw_only=True)
class ShutDownCluster(Request[ShuttingDown]):
    """Stop all jobs. A cluster of ours ends; in a scheduler that others run, only our jobs do."""

    op: ClassVar[str] = "etrain_down"
    reply: ClassVar[type[Any]] = ShuttingDown

    drain_s: float | None = None
    """Maximum wait for checkpoints; None for the scheduler's own."""


@dataclass(frozen=True, kw_only=True)
class RemoveCoordinator(Request[Done]):
    """Remove our coordinator from a scheduler that others run."""

    op: ClassVar[str] = "etrain_forget"


@dataclass(frozen=True, kw_only=True)
class TouchCluster(Request[ClusterIdentity]):
    """Keep the cluster for its idle time: a job is about to come."""

    op: ClassVar[str] = "etrain_pool_touch"
    reply: ClassVar[type[Any]] = ClusterIdentity


@dataclass(frozen=True, kw_only=True)
class WantWorkers(Request[WorkersPresent]):
    """Have at least that many workers."""

    op: ClassVar[str] = "etrain_pool_want"
    reply: ClassVar[type[Any]] = WorkersPresent

    count: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ListNodes(Request[NodeList]):
    """Return the nodes of the pool."""

    op: ClassVar[str] = "etrain_pool_nodes"
    reply: ClassVar[type[Any]] = NodeList


@dataclass(frozen=True, kw_only=True)
class ListCosts(Request[CostList]):
    """Return what the nodes have cost so far."""

    op: ClassVar[str] = "etrain_pool_costs"
    reply: ClassVar[type[Any]] = CostList


@dataclass(frozen=True, kw_only=True)
class ReleaseWorker(Request[Done]):
    """End a worker gently."""

    op: ClassVar[str] = "etrain_pool_release"

    worker: str
    drain_s: float
    """After it, the worker is killed."""


@dataclass(frozen=True, kw_only=True)
class KillWorker(Request[Done]):
    """Kill a worker."""

    op: ClassVar[str] = "etrain_pool_kill"

    worker: str


# --- the client's end ---


def encode_request(request: Request[Any]) -> dict[str, Any]:
    """Return the arguments of the Dask call."""
    return {**encode_fields(request), VERSION: WIRE_VERSION}


def decode_reply(request: Request[R], reply: Any) -> R:
    """Return the reply to a request.

    Raises:
        RefusedRequestError: If the scheduler refused it, or speaks another version of the wire.
        NotOursError: If the scheduler runs no coordinator of ours.
    """
    if not isinstance(reply, dict):
        raise NotOursError(
            f"the scheduler answered {request.op} with {type(reply).__name__}: it runs no etrain "
            "coordinator, or no longer"
        )
    values = dict(reply)
    try:
        check_version(values.pop(VERSION, None), WIRE_VERSION)
    except WireVersionError as exc:
        raise RefusedRequestError(OTHER_VERSION, _words_of_cluster(exc)) from None
    if "error" in values:
        raise RefusedRequestError(
            str(values["error"]), str(values.get("message") or values["error"])
        )
    try:
        decoded: R = decode_fields(request.reply, values)
    except MalformedMessageError as exc:
        kind = type(exc).__name__
        raise RefusedRequestError(kind, f"the reply to {request.op} is malformed: {exc}") from exc
    return decoded


async def call_scheduler(rpc: Any, request: Request[R]) -> R:
    """Call a scheduler through Dask's ``rpc``, and return its reply.

    Raises:
        RefusedRequestError: If it refuses.
        NotOursError: If it runs no coordinator of ours.
        OSError: If it cannot be reached.
    """
    return decode_reply(request, await exchange(rpc, request))


async def exchange(rpc: Any, request: Request[Any]) -> Any:
    """Call a scheduler through Dask's ``rpc``, and return what it replies, still encoded.

    Raises:
        RefusedRequestError: If it is older than wire versions.
        OSError: If it cannot be reached.
        UnicodeEncodeError: If the request has text that cannot be encoded.
    """
    try:
        return await getattr(rpc, request.op)(**encode_request(request))
    except (OSError, UnicodeEncodeError):
        raise
    except Exception as exc:
        # A handler of ours replies to every exception. A raw handler of an older cluster raised,
        # because it does not know the argument: Dask then sends a pickled exception, which is not
        # unpickled, and fails itself with an AssertionError.
        older = WireVersionError(None, WIRE_VERSION)
        raise RefusedRequestError(OTHER_VERSION, _words_of_cluster(older)) from exc


def _words_of_cluster(exc: WireVersionError) -> str:
    theirs = exc.theirs if exc.theirs is not None else f"{WIRE_VERSION - 1} or older"
    return (
        f"the cluster speaks wire version {theirs}, and this kernel version {exc.ours} "
        f"(etrain-jupyter {__version__}). Nothing was done, and its jobs keep training. Restart "
        "the kernel with the version of etrain-jupyter that started the cluster, or end the "
        "cluster with %etrain down and run the cell again."
    )


# --- the scheduler's end ---

Q = TypeVar("Q", bound=Request[Any])


def handler_of(
    request_type: type[Q], handle: Callable[[Q], Awaitable[Any]]
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return a Dask handler that checks version and arguments, and replies with plain values.

    An exception becomes a reply as well. Dask would send a pickled traceback, which no kernel
    unpickles.
    """

    async def answer(**arguments: Any) -> dict[str, Any]:
        try:
            check_version(arguments.pop(VERSION, None), WIRE_VERSION)
            request = decode_fields(request_type, arguments)
            reply = encode_fields(await handle(request))
        except WireVersionError as exc:
            reply = {"error": OTHER_VERSION, "message": _words_of_kernel(exc)}
        except RefusedRequestError as exc:
            reply = {"error": exc.kind, "message": str(exc)}
        except Exception as exc:
            if not isinstance(exc, MalformedMessageError):
                logger.exception("a request failed")
            reply = {"error": type(exc).__name__, "message": str(exc)}
        return {**reply, VERSION: WIRE_VERSION}

    return answer


def _words_of_kernel(exc: WireVersionError) -> str:
    theirs = exc.theirs if exc.theirs is not None else f"{WIRE_VERSION - 1} or older"
    return (
        f"this kernel speaks wire version {theirs}, and the cluster version {exc.ours} "
        f"(etrain-jupyter {__version__}). Nothing was done, and the cluster's jobs keep training. "
        f"Install etrain-jupyter {__version__} for the kernel and restart it."
    )
