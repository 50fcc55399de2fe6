"""Prove from the log, as far as possible, that all ranks had equal weights.

In each step, every rank computes a fingerprint of a part of its weights, and the step's record
contains whether they were equal. At the end of each epoch and of the job, every rank reports a
SHA-256 of all its weights. A single rank has nothing to compare with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from etrain_jupyter.log.events import Event, StepCompleted, WeightsHashed
from etrain_jupyter.notebook.audit.history import WeightHistory


@dataclass(frozen=True, kw_only=True)
class WeightsProof:
    """The evidence in the log about the ranks' weights."""

    problems: tuple[str, ...]
    num_compared: int
    """Committed steps of several ranks with equal fingerprints."""
    num_alone: int
    """Committed steps of a single rank."""
    num_digests: int
    """Digests that were compared with another rank's digest at the same step."""
    newest_step: int
    """The newest step with a digest; 0 if there is none."""
    newest: str
    """The newest digest and its step, for comparison with another job; empty if there is none."""


def compare_weights(log: Sequence[Event], history: WeightHistory) -> WeightsProof:
    """Compare the ranks' fingerprints and digests in the steps that led to the newest weights."""
    groups = _digests_by_step(log, history)
    shared = [step for step in history.steps if step.world_size > 1]
    agreed = [step for step in shared if step.ranks_agree]
    return WeightsProof(
        problems=(*_check_fingerprints(shared, history), *_check_digests(groups, history)),
        num_compared=len(agreed),
        num_alone=len(history.steps) - len(shared),
        num_digests=sum(len(group) for group in groups.values() if len(group) > 1),
        newest_step=max(groups, default=0),
        newest=f"{groups[max(groups)][0].digest} at step {max(groups)}" if groups else "",
    )


def _check_fingerprints(steps: Sequence[StepCompleted], history: WeightHistory) -> Iterator[str]:
    """Report each generation's first step in which ranks differ; later ones follow from it."""
    reported: set[int] = set()
    for step in steps:
        if not step.ranks_agree and step.generation not in reported:
            reported.add(step.generation)
            formed = history.formed.get(step.generation)
            names = ", ".join(formed.ranks) if formed else f"generation {step.generation}"
            yield f"at step {step.step} the ranks ({names}) had different fingerprints"


def _digests_by_step(
    log: Sequence[Event], history: WeightHistory
) -> dict[int, list[WeightsHashed]]:
    """Return the digests of the steps in ``history``; undone steps have different digests."""
    # Undone steps are excluded, so a step that was trained twice has the generation of its second
    # run.
    committed_by = {step.step: step.generation for step in history.steps}
    groups: dict[int, list[WeightsHashed]] = defaultdict(list)
    for event in log:
        if isinstance(event, WeightsHashed) and committed_by.get(event.step) == event.generation:
            groups[event.step].append(event)
    return groups


def _check_digests(groups: dict[int, list[WeightsHashed]], history: WeightHistory) -> Iterator[str]:
    for step, hashed in sorted(groups.items()):
        by_digest: dict[str, list[str]] = defaultdict(list)
        for event in hashed:
            by_digest[event.digest].append(f"rank {event.rank} on {event.worker}")
            formed = history.formed.get(event.generation)
            if formed is not None and event.worker not in formed.ranks:
                yield (
                    f"at step {step} {event.worker} reported its weights as a rank of generation "
                    f"{event.generation}, which it was not in"
                )
        if len(by_digest) > 1:
            # The larger group comes first, because the minority is more likely to be wrong.
            sides = sorted(by_digest.items(), key=lambda side: -len(side[1]))
            found = "; ".join(f"{digest[:12]} on {', '.join(who)}" for digest, who in sides)
            yield f"at step {step} the ranks had different weights: {found}"
