"""Which checkpoints are kept: a rule without I/O."""

from __future__ import annotations

from collections.abc import Collection


def choose_steps_to_keep(
    steps: Collection[int], *, keep: int, protected: Collection[int] = ()
) -> set[int]:
    """Return the newest ``keep`` of ``steps``, and those that are protected.

    Args:
        steps: Steps that have a manifest, in any order.
        keep: How many of the newest stay, at least 1: the newest is never removed.
        protected: Steps that stay however old they are, for example the best one.

    >>> sorted(choose_steps_to_keep([100, 200, 300, 400], keep=2, protected=[100]))
    [100, 300, 400]
    """
    return set(sorted(steps)[-max(1, keep) :]) | (set(steps) & set(protected))
