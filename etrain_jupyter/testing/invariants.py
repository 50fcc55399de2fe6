"""One check of what every job promises, for tests of any layer."""

from __future__ import annotations

from collections.abc import Iterable

from etrain_jupyter.events.types import (
    Event,
    GenerationFormed,
    StepUndone,
    WorkerLost,
)
from etrain_jupyter.job.audit import audit_log


def assert_invariants(log: Iterable[Event], *, max_undone_per_loss: int = 1) -> None:
    """Assert I1 to I4 of the design from a job's durable log.

    Args:
        log: All events, in order.
        max_undone_per_loss: Steps in flight that one lost worker may cost.

    Raises:
        AssertionError: With the audit's report, or with the survivors whose process changed.
    """
    events = list(log)
    report = audit_log(events)
    assert report.ok, str(report)
    losses = sum(isinstance(e, WorkerLost) for e in events)
    undone = len({(e.generation, e.step) for e in events if isinstance(e, StepUndone)})
    assert undone <= losses * max_undone_per_loss, f"{undone} steps undone by {losses} losses"
    _assert_survivors_kept_their_process(events)


def _assert_survivors_kept_their_process(events: list[Event]) -> None:
    """I4: a worker that is in two generations running, and was not lost, has the same trainer."""
    lost: set[str] = set()
    before: dict[str, int] = {}
    for event in events:
        if isinstance(event, WorkerLost):
            lost.add(event.worker)
        elif isinstance(event, GenerationFormed):
            now = dict(zip(event.ranks, event.trainer_pids, strict=True))
            for worker in now.keys() & before.keys() - lost:
                assert now[worker] == before[worker], f"{worker} was started again without need"
            before, lost = now, set()
