"""Count generations that break although no worker was lost, and decide when to retry.

A generation that breaks because a worker was lost does not count as a failure. Otherwise, the
connections between the ranks are the cause: retry, at most twice with NCCL, and fail the job when
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

from etrain_jupyter.rules.membership.health import HEALTHY_S, wait_after
from etrain_jupyter.rules.policy.backend import GLOO, NCCL

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
