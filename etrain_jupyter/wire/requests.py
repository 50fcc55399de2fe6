"""Every request to a scheduler, with its reply. All but one come from kernels.

A request is a call to a Dask RPC handler. ``process.peers`` decides by the handler's name whether a
peer may call it. The arguments are the request's fields and the wire version. Each reply also
contains the version, so that both ends detect a peer with another version::

    kernel 3 ── etrain_describe(wire_version=3) ──▶ cluster 3     the reply has wire_version=3
    kernel 3 ── etrain_describe(wire_version=3) ──▶ cluster 2     refused: the reply is an error
                                                                  with wire_version=2
"""

from __future__ import annotations

import logging
import typing
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

SAVE_S = 60.0
"""Timeout in seconds for the last checkpoints of a cluster that is being shut down."""

R = TypeVar("R")


class RefusedRequestError(Exception):
    """A scheduler refused a request.

    Attributes:
        kind: Kind of refusal, for example ``UNKNOWN_JOB``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NotOursError(Exception):
    """The scheduler that replied does not run our coordinator."""


UNKNOWN_JOB = "JobNotFoundError"
"""Kind of refusal: the job is unknown to the scheduler."""

OTHER_VERSION = "WireVersionError"
"""Kind of refusal: kernel and cluster use different wire versions."""


# --- replies ---


@dataclass(frozen=True, kw_only=True)
class Done:
    """The request was carried out."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The job was submitted, unless its bundle must be sent first."""

    job_id: str = ""
    wants_bundle: bool = False
    """True if the scheduler cannot read the bundle: send it with ``PutBundle``, then retry."""


@dataclass(frozen=True, kw_only=True)
class BundlePiece:
    """A piece of a bundle."""

    data: bytes
    """Empty at the end of the bundle."""


@dataclass(frozen=True, kw_only=True)
class JobList:
    """The jobs of a cluster."""

    jobs: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class EventBatch:
    """A job's new events."""

    events: tuple[dict[str, Any], ...]
    """In their JSON form, in order."""
    status: str = ""
    trouble: str = ""
    """Why the newest events are not durable yet but only in memory; empty if they are durable."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Effect of a request, as a sentence for the user."""

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
    """Number of connected workers."""
    jobs: int = 0
    """Number of active jobs."""
    idle_s: float = 0.0
    """Seconds since the last job ended; 0.0 while one is active."""
    version: str = ""
    """Version of etrain-jupyter in a foreign scheduler; empty in our own clusters."""
    unfit: dict[str, str] | None = None
    """Reasons why workers cannot be used, by worker."""


@dataclass(frozen=True, kw_only=True)
class ShuttingDown:
    """The jobs have ended, and the cluster is shutting down."""


@dataclass(frozen=True, kw_only=True)
class ClusterIdentity:
    """Identity of the cluster that replied."""

    cluster_id: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class NodeList:
    """The nodes of a pool."""

    nodes: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class CostList:
    """Cost of each node in a pool."""

    costs: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class WorkersPresent:
    """Current number of workers."""

    num_present: int = 0


# --- requests ---


@dataclass(frozen=True, kw_only=True)
class Request(Generic[R]):
    """Base of requests to a scheduler; ``R`` is the reply type."""

    op: ClassVar[str]
    """Name of the Dask handler."""
    reply: ClassVar[type[Any]]

    def __init_subclass__(cls, *, op: str = "") -> None:
        super().__init_subclass__()
        cls.op = op or cls.op
        (cls.reply,) = typing.get_args(cls.__dict__["__orig_bases__"][0])


@dataclass(frozen=True, kw_only=True)
class SubmitJob(Request[Submitted], op="etrain_submit"):
    """Submit a job."""

    job: dict[str, Any]
    """The fields of ``head.jobs.job_spec.JobSpec``."""


@dataclass(frozen=True, kw_only=True)
class PutBundle(Request[Done], op="etrain_put_bundle"):
    """Store a piece of a job's bundle."""

    job: dict[str, Any]
    offset: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class FetchBundle(Request[BundlePiece], op="etrain_bundle"):
    """Return the next piece of an active job's bundle. Sent by supervisors."""

    digest: str
    offset: int


@dataclass(frozen=True, kw_only=True)
class ListJobs(Request[JobList], op="etrain_jobs"):
    """Return the cluster's jobs."""


@dataclass(frozen=True, kw_only=True)
class FetchEvents(Request[EventBatch], op="etrain_events"):
    """Return a job's events after ``since``; wait until there is one."""

    job_id: str
    since: int = 0
    wait_s: float = 10.0
    """Maximum wait in seconds; 0.0 to return immediately."""
    limit: int = 5000


@dataclass(frozen=True, kw_only=True)
class ControlJob(Request[Outcome], op="etrain_request"):
    """Control an active job: stop, pause, scale ..."""

    job_id: str
    request: str
    args: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ListWorkers(Request[WorkerList], op="etrain_workers"):
    """Return a job's workers."""

    job_id: str


@dataclass(frozen=True, kw_only=True)
class DescribeCluster(Request[ClusterFacts], op="etrain_describe"):
    """Return the cluster's state."""


@dataclass(frozen=True, kw_only=True)
class ShutDownCluster(Request[ShuttingDown], op="etrain_down"):
    """Save and stop all jobs, and shut down the cluster unless it has a foreign scheduler."""

    drain_s: float = SAVE_S
    """Maximum wait for checkpoints in seconds; the reply is sent after it."""
    by: str = ""
    """User, notebook, process and host of the request; logged with the end of each job."""


@dataclass(frozen=True, kw_only=True)
class RemoveCoordinator(Request[Done], op="etrain_forget"):
    """Remove our coordinator from a foreign scheduler."""


@dataclass(frozen=True, kw_only=True)
class TouchCluster(Request[ClusterIdentity], op="etrain_pool_touch"):
    """Reset the cluster's idle timer, because a job is about to be submitted."""


@dataclass(frozen=True, kw_only=True)
class WantWorkers(Request[WorkersPresent], op="etrain_pool_want"):
    """Keep at least ``count`` workers, even if the jobs need fewer."""

    count: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ListNodes(Request[NodeList], op="etrain_pool_nodes"):
    """Return the pool's nodes."""


@dataclass(frozen=True, kw_only=True)
class ListCosts(Request[CostList], op="etrain_pool_costs"):
    """Return each node's cost so far."""


@dataclass(frozen=True, kw_only=True)
class ReleaseWorker(Request[Done], op="etrain_pool_release"):
    """Stop a worker gracefully."""

    worker: str
    drain_s: float
    """Seconds after which the worker is killed."""


@dataclass(frozen=True, kw_only=True)
class KillWorker(Request[Done], op="etrain_pool_kill"):
    """Kill a worker."""

    worker: str


# --- the client's end ---


def decode_reply(request: Request[R], reply: Any) -> R:
    """Return the reply to a request.

    Raises:
        RefusedRequestError: If the scheduler refused it, or has another wire version.
        NotOursError: If the scheduler does not run our coordinator.
    """
    if not isinstance(reply, dict):
        raise NotOursError(
            f"the scheduler replied to {request.op} with {type(reply).__name__}: it runs no etrain "
            "coordinator, or no longer runs one"
        )
    values = dict(reply)
    # Check the version before the error, as a refusal by another version may have different keys.
    try:
        check_version(values.pop(VERSION, None), WIRE_VERSION)
    except WireVersionError as exc:
        raise RefusedRequestError(OTHER_VERSION, _explain_cluster_version(exc)) from None
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
        RefusedRequestError: If the scheduler refuses it.
        NotOursError: If it does not run our coordinator.
        OSError: If it cannot be reached.
    """
    return decode_reply(request, await exchange(rpc, request))


async def exchange(rpc: Any, request: Request[Any]) -> Any:
    """Call a scheduler through Dask's ``rpc``, and return its reply, still encoded.

    Raises:
        OSError: If it cannot be reached.
        UnicodeEncodeError: If the request contains text that cannot be encoded.
    """
    return await getattr(rpc, request.op)(**encode_fields(request), **{VERSION: WIRE_VERSION})


def _explain_cluster_version(exc: WireVersionError) -> str:
    return (
        f"the cluster uses wire version {exc.theirs}, and this kernel version {exc.ours} "
        f"(etrain-jupyter {__version__}). Nothing was done, and its jobs keep training. Restart "
        "the kernel with the version of etrain-jupyter that started the cluster, or shut down "
        "the cluster with %etrain down and run the cell again."
    )


# --- the scheduler's end ---

Q = TypeVar("Q", bound=Request[Any])


def handler_of(
    request_type: type[Q], handle: Callable[[Q], Awaitable[Any]]
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return a Dask handler that checks the version and arguments, and replies with plain values.

    Exceptions become replies too: Dask would send a pickle, which kernels do not unpickle.
    """

    async def answer(**arguments: Any) -> dict[str, Any]:
        try:
            check_version(arguments.pop(VERSION, None), WIRE_VERSION)
            request = decode_fields(request_type, arguments)
            reply = encode_fields(await handle(request))
        except WireVersionError as exc:
            reply = {"error": OTHER_VERSION, "message": _explain_kernel_version(exc)}
        except RefusedRequestError as exc:
            reply = {"error": exc.kind, "message": str(exc)}
        except Exception as exc:
            # A malformed request is a defect in the kernel; anything else is a defect here or a
            # disk error. In both cases, the reply contains the error message.
            if not isinstance(exc, MalformedMessageError):
                logger.exception("a request failed")
            reply = {"error": type(exc).__name__, "message": str(exc)}
        return {**reply, VERSION: WIRE_VERSION}

    return answer


def _explain_kernel_version(exc: WireVersionError) -> str:
    return (
        f"this kernel uses wire version {exc.theirs}, and the cluster version {exc.ours} "
        f"(etrain-jupyter {__version__}). Nothing was done, and the cluster's jobs keep training. "
        f"Install etrain-jupyter {__version__} for the kernel and restart it."
    )
