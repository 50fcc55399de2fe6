"""Check the guarantees that hold for every job, for tests of any layer."""

from __future__ import annotations

from collections.abc import Iterable

from etrain_jupyter.log.events import Event, GenerationFormed, JobResumed, WorkerLeft, WorkerLost
from etrain_jupyter.notebook.audit import audit_log


def assert_invariants(log: Iterable[Event]) -> None:
    """Assert I1 to I4 of the design on a job's durable log.

    Args:
        log: All events, in order.

    Raises:
        AssertionError: If a guarantee is violated; the message is the audit's report, or names the
            workers whose process changed.
    """
    events = list(log)
    report = audit_log(events)
    assert report.ok, str(report)
    _assert_survivors_kept_their_process(events)


def _assert_survivors_kept_their_process(events: list[Event]) -> None:
    # I4: a worker that is in two consecutive generations, and was not lost in between, keeps its
    # trainer process.
    lost: set[str] = set()
    before: dict[str, int] = {}
    for event in events:
        if isinstance(event, WorkerLost | WorkerLeft):
            lost.add(event.worker)
        elif isinstance(event, JobResumed):
            before = {}  # a resumed job has new processes
        elif isinstance(event, GenerationFormed):
            now = dict(zip(event.ranks, event.trainer_pids, strict=True))
            for worker in now.keys() & before.keys() - lost:
                assert now[worker] == before[worker], f"{worker} was restarted without need"
            before, lost = now, set()
