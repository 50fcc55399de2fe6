"""Services of plug-ins, which run in the scheduler's process and may submit jobs of their own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from etrain_jupyter import plugin
from etrain_jupyter.head.jobs.hosted_job import HostedJob
from etrain_jupyter.head.jobs.job_spec import JobSpec
from etrain_jupyter.log.events import Event
from etrain_jupyter.rules.sizing.allocation import Claim
from etrain_jupyter.wire.requests import Request

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Any]]
"""Handler for one kind of kernel request."""


class ServiceHost(Protocol):
    """The part of the coordinator that services use."""

    @property
    def is_ready(self) -> bool:
        """False while a restarted scheduler waits for its workers."""

    @property
    def capacity(self) -> int:
        """Number of workers that can train at the same time without slowing each other down."""

    async def check_submission(self, folder: Path) -> None:
        """Raise a ``RequestError`` if no jobs can run, or no jobs in folders next to ``folder``."""

    def find_job(self, job_id: str) -> HostedJob | None:
        """Return a job of this scheduler, even one that has ended."""

    async def host_job(self, spec: JobSpec) -> None:
        """Start or resume a job."""

    def after_change(self) -> None:
        """Free the resources of ended jobs, and share the workers again."""


class Service(Protocol):
    """The part of a plug-in in the scheduler's process. All calls are made on its event loop."""

    @property
    def is_active(self) -> bool:
        """True while it may submit jobs. During that time, the cluster is not idle."""

    def handlers(self) -> dict[type[Request[Any]], Handler]:
        """Return the handler for each kind of request that its kernels send."""

    def replay(self, folder: Path) -> None:
        """Keep records in a folder, and read those of the previous scheduler."""

    def start(self) -> None:
        """Continue the replayed work. Called at each tick."""

    def take_events(self, job_id: str, new: Sequence[Event]) -> None:
        """Handle new events of any job."""

    def limit_claims(self, claims: Sequence[Claim], workers: Sequence[str]) -> Sequence[Claim]:
        """Return the jobs' claims to the workers, with lower limits for some of its own jobs."""

    def stop_all(self, reason: str) -> None:
        """Stop submitting jobs; all jobs are stopped next."""

    async def close(self) -> None:
        """Wait until everything is stored. Called as the scheduler closes."""


class GuardedService:
    """A service of a plug-in whose errors do not reach the jobs. Each is logged once."""

    def __init__(self, name: str, service: Service) -> None:
        self._name = name
        self.service = service
        self._failed: set[str] = set()

    def _note(self, doing: str) -> None:
        if doing not in self._failed:
            self._failed.add(doing)
            logger.exception("the service of the plug-in '%s' failed in %s", self._name, doing)

    def _call(self, method: str, *args: Any, default: Any = None) -> Any:
        try:
            return getattr(self.service, method)(*args)
        except Exception:
            self._note(method)
            return default

    @property
    def is_active(self) -> bool:
        """See ``Service``."""
        try:
            return self.service.is_active
        except Exception:
            self._note("is_active")
            return False

    def handlers(self) -> dict[type[Request[Any]], Handler]:
        """See ``Service``."""
        found: dict[type[Request[Any]], Handler] = self._call("handlers", default={})
        return found

    def replay(self, folder: Path) -> None:
        """See ``Service``."""
        self._call("replay", folder)

    def start(self) -> None:
        """See ``Service``."""
        self._call("start")

    def take_events(self, job_id: str, new: Sequence[Event]) -> None:
        """See ``Service``."""
        self._call("take_events", job_id, new)

    def limit_claims(self, claims: Sequence[Claim], workers: Sequence[str]) -> Sequence[Claim]:
        """See ``Service``."""
        limited: Sequence[Claim] = self._call("limit_claims", claims, workers, default=claims)
        return limited

    def stop_all(self, reason: str) -> None:
        """See ``Service``."""
        self._call("stop_all", reason)

    async def close(self) -> None:
        """See ``Service``."""
        try:
            await self.service.close()
        except Exception:
            self._note("close")


def load_services(host: ServiceHost) -> list[GuardedService]:
    """Return the services of the installed plug-ins.

    A service that cannot be loaded is left out, because jobs must not depend on it.
    """
    services = []
    for name, one in plugin.installed().items():
        try:
            if one.service:
                services.append(GuardedService(name, plugin.load(one.service)(host)))
        except Exception:  # of another package
            logger.exception("the service of the plug-in '%s' is not used", name)
    return services
