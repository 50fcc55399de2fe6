"""Back off on workers whose trainers keep exiting, and on generations that keep breaking.

A job survives any number of machine faults. Each consecutive fault doubles the wait, so that a
broken machine that keeps coming back does not disturb the other machines each time.

A generation that breaks because a worker was lost does not count as a failure. Otherwise, the cause
is the connections between the ranks. The job then retries, at most twice with NCCL, and fails when
another attempt is useless.

========================  =====================  =======================================
the generation broke ...  consecutive failures   consecutive NCCL failures
========================  =====================  =======================================
and a worker was lost     0                      unchanged
for an excused reason     unchanged              unchanged
after a committed step    1                      +1; 1 if it stepped for ``HEALTHY_S``
with different workers    1                      as above
otherwise                 +1                     as above
========================  =====================  =======================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from etrain_jupyter.rules.membership.backend import GLOO, NCCL

MAX_FAILED_FORMS = 8
"""Consecutive failures after which the job fails; the waits between them total about a minute."""

MAX_NCCL_FAILURES = 2
"""Consecutive NCCL failures after which ``backend: auto`` switches to gloo."""


@dataclass(frozen=True, kw_only=True)
class Break:
    """One rank's report that its generation broke."""

    worker: str
    error: str = ""
    """Error message of the failure; empty if the rank only saw the abort."""
    backend: str = ""
    """The backend that failed on this rank; empty if unknown."""
    is_excused: bool = False
    """True if the connections are not the cause: out of memory, or an injected fault."""


@dataclass(frozen=True, kw_only=True)
class FailedForms:
    """Consecutive generations that broke although no worker was lost."""

    num: int = 0
    """Number of such generations, with the same workers and no committed step in between."""
    workers: frozenset[str] = frozenset()
    """The workers of the last such generation."""
    error: str = ""
    """Why the last one broke, according to its ranks; empty if no rank reported an error."""
    num_nccl: int = 0
    """Consecutive NCCL failures, even if steps were committed between them."""
    nccl_workers: frozenset[str] = frozenset()
    """The workers of the last NCCL failure."""
    nccl_error: str = ""

    @property
    def is_final(self) -> bool:
        """True if another attempt is useless."""
        return self.num >= MAX_FAILED_FORMS

    @property
    def wait_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return wait_after(self.num - 1)

    def avoids_nccl(self, workers: Sequence[str]) -> bool:
        """Return whether these workers must use gloo, because NCCL has failed among them."""
        return self.num_nccl >= MAX_NCCL_FAILURES and self.nccl_workers <= set(workers)

    def after_loss(self) -> FailedForms:
        """Return the count after a generation that lost a worker."""
        return dataclasses.replace(self, num=0, error="")

    def after_failure(
        self,
        breaks: Sequence[Break],
        *,
        backend: str,
        has_stepped: bool,
        stepped_s: float,
    ) -> FailedForms:
        """Count a generation that broke although no worker was lost.

        Args:
            breaks: Reports from all its ranks.
            backend: The backend that summed its gradients.
            has_stepped: True if it has committed a step.
            stepped_s: Seconds for which all its ranks had been stepping; 0.0 if they never did.
        """
        # Different workers have different connections; a committed step proves that they work.
        workers = frozenset(found.worker for found in breaks)
        is_repeated = workers == self.workers and not has_stepped
        after = dataclasses.replace(
            self,
            num=self.num + 1 if is_repeated else 1,
            workers=workers,
            error=_cause(breaks, backend),
        )
        if not is_of_nccl(breaks, backend):
            return after
        # Unlike above, a step does not reset this count: NCCL may break in the first steps again.
        num_before = self.num_nccl if stepped_s < HEALTHY_S else 0
        # If NCCL last failed with a worker that has since left, one more failure suffices.
        if not self.nccl_workers <= workers:
            num_before = min(num_before, MAX_NCCL_FAILURES - 1)
        return dataclasses.replace(
            after, num_nccl=num_before + 1, nccl_workers=workers, nccl_error=after.error
        )


NO_FAILED_FORMS = FailedForms()


def is_of_nccl(breaks: Sequence[Break], backend: str) -> bool:
    """Return whether NCCL broke a generation: a rank reports it, or none reports an error.

    When a rank leaves, its gloo connections close, and this may be all that the other ranks report.
    """
    # NCCL reports an error              {"nccl", "gloo"}, {"nccl"}     yes
    # only gloo does                     {"gloo"}                       no: its own connections
    # none does, or without a backend    {}, {""}                       yes
    backends = {found.backend for found in breaks if found.error}
    return backend == NCCL and (NCCL in backends or GLOO not in backends)


def _cause(breaks: Sequence[Break], backend: str) -> str:
    # The most specific error comes from the generation's own backend; gloo connections also close
    # when a rank leaves for another reason.
    found = [b for b in breaks if b.error]
    found.sort(key=lambda b: b.backend != backend)  # stable, so the first report comes first
    return f"{found[0].worker}: {found[0].error}" if found else ""


HEALTHY_S = 10.0
"""If a trainer stepped for this many seconds, its exit is unrelated to the previous one."""

FORGET_S = 180.0
"""Faults at least this many seconds apart are unrelated; longer than any back-off."""

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Health:
    """Fault count and back-off for a worker whose trainer exited on its own."""

    num_faults: int
    """Consecutive faults."""
    last_at: float
    """Time of the last fault."""
    retry_at: float
    """When the next trainer may start."""


def after_fault(
    previous: Health | None, *, now: float, stepped_s: float, was_ready: bool
) -> Health:
    """Count a fault and return when the next trainer may start.

    Args:
        previous: The worker's earlier faults; None if there are none.
        now: When the trainer exited.
        stepped_s: Seconds for which it had been stepping in its generation.
        was_ready: True if it had ever been ready to train. Such a trainer restarts immediately
            after its first fault, because the other ranks wait for it.

    >>> first = after_fault(None, now=0.0, stepped_s=0.0, was_ready=False)
    >>> first.retry_at, after_fault(first, now=5.0, stepped_s=0.0, was_ready=False).retry_at
    (1.0, 7.0)
    """
    num_faults = 1
    # Faults are consecutive unless a long healthy phase or a long pause is between them.
    if previous is not None and stepped_s < HEALTHY_S and now - previous.last_at < FORGET_S:
        num_faults = previous.num_faults + 1
    wait_s = wait_after(num_faults - was_ready)  # no wait after the first fault if it was ready
    return Health(num_faults=num_faults, last_at=now, retry_at=now + wait_s)


def wait_after(num_faults: int) -> float:
    """Return the back-off in seconds after ``num_faults`` consecutive faults.

    >>> [wait_after(n) for n in (0, 1, 2, 3, 7, 99)]
    [0.0, 1.0, 2.0, 4.0, 60.0, 60.0]
    """
    if num_faults < 1:
        return 0.0
    # The exponent is bounded, because a float overflows at 2.0 ** 1024.
    return min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(num_faults - 1, 10))
