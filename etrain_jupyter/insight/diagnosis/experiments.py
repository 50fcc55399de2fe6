"""Judge a suspect by the times of an experiment in the running job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.insight.diagnosis.rules import NAMED_FROM, NOTED_FROM
from etrain_jupyter.insight.diagnosis.step_parts import (
    Cause,
    StepParts,
    split_stragglers,
    transfer_s,
)
from etrain_jupyter.log.events import ExperimentCompleted

Outcome = Literal["confirmed", "refuted", "undecided", "abandoned", "not_run"]
"""``abandoned``: it began, or the workers refused it; ``not_run``: it could not be requested."""

VARIANTS: Mapping[Cause, tuple[str, ...]] = {
    "input": ("cached",),
    "communication": ("cached", "local", "accumulated", "wide"),
    "optimizer": ("cached", "frozen", "accumulated", "local", "wide"),
    "overhead": ("cached", "large"),
    "metrics": ("local", "bare"),
    "straggler": ("cached", "left_out"),
    "compute": ("cached", "local", "wide"),
}
"""Variants of a step that confirm or refute each cause. Evaluations and checkpoints run between
the steps, where their time is measured directly."""
OPTIONAL = frozenset({"wide"})
"""Variants without which an experiment still decides."""
MIN_ROUNDS = 3
"""Number of rounds from which an experiment decides."""
FACTOR = 4
"""Factor of the variants ``accumulated``, ``large`` and ``wide``."""

Floats = NDArray[np.float64]


class Run(Protocol):
    """Runs an experiment on the job's workers."""

    def __call__(
        self,
        cause: Cause,
        *,
        variants: Sequence[str],
        left_out: Sequence[int],
        generation: int,
    ) -> ExperimentCompleted:
        """Return its result; ``left_out`` are ranks of ``generation``.

        Raises:
            EtrainError: If there is none.
        """


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A suspect after an experiment."""

    cause: Cause
    outcome: Outcome
    share: float = math.nan
    """Part of a step that is saved without the cause."""
    interval: tuple[float, float] | None = None
    """Range of the share, two standard errors in each direction."""
    gain: float | None = None
    """Gain of the remedy, if the experiment tried it; for a straggler, with its samples on the
    other workers."""
    fixed_s: float | None = None
    """Part of the passes that does not depend on the number of samples, if measured."""
    num_rounds: int = 0
    num_steps: int = 0
    """Number of trial steps of each variant in a round."""
    stall_s: float = 0.0
    """Time for which training waited."""
    reason: str = ""
    """Why the result is missing or has fewer rounds."""


def judge_experiment(
    event: ExperimentCompleted, cause: Cause, workers: Sequence[StepParts]
) -> Tested:
    """Return whether an experiment confirms a cause.

    Args:
        event: The result of the experiment with the variants of ``VARIANTS[cause]``.
        cause: The suspect.
        workers: The mean parts of a step by worker, for the time between the steps.
    """
    table = _table(event)
    num_rounds = len(table["own"])
    facts = {
        "num_rounds": num_rounds,
        "num_steps": event.num_steps,
        "stall_s": event.stall_s,
        "reason": event.reason,
    }
    missing = [name for name in VARIANTS[cause] if name not in table and name not in OPTIONAL]
    if num_rounds < MIN_ROUNDS or missing:
        reason = event.reason or f"only {num_rounds} rounds fit into the time limit"
        if missing and num_rounds >= MIN_ROUNDS:
            reason = f"its trial steps ({', '.join(missing)}) failed; %etrain logs has the reason"
        return Tested(cause=cause, outcome="abandoned", **{**facts, "reason": reason})  # type: ignore[arg-type]
    # Each round is compared with the job's steps of the same round, because the load of the
    # machine varies from round to round.
    between_s = float(np.mean([one.evaluation_s + one.checkpoint_s for one in workers]))
    whole = table["own"] + between_s
    shares = _saved(cause, table, event.data_s, workers) / whole
    share = float(shares.mean())
    half = 2 * float(shares.std(ddof=1)) / math.sqrt(num_rounds)
    interval = (share - half, share + half)
    gain = _gain(cause, table, whole, event.data_s + between_s)
    if cause == "straggler":
        gain = float(np.median(1 / (1 - np.minimum(shares, 0.99)))) - 1
    return Tested(
        cause=cause,
        outcome=_outcome(cause, interval),
        share=share,
        interval=interval,
        gain=gain,
        fixed_s=_fixed_s(table, workers),
        **facts,  # type: ignore[arg-type]
    )


def _table(event: ExperimentCompleted) -> dict[str, Floats]:
    names = ("own", *event.variants)
    times = np.array(event.times_s, dtype=np.float64)
    rows = times[: len(times) // len(names) * len(names)].reshape(-1, len(names))
    columns = dict(zip(names, rows.T, strict=True))
    # 0.0: the variant could not be tried. The log may come from another user.
    return {
        name: column
        for name, column in columns.items()
        if name == "own" or (len(column) and np.isfinite(column).all() and (column > 0).all())
    }


def _saved(
    cause: Cause, table: Mapping[str, Floats], data_s: float, workers: Sequence[StepParts]
) -> Floats:
    """Return the seconds that a step saves without the cause, by round."""
    own = table["own"]
    match cause:
        case "input":
            return own - table["cached"]
        case "communication":
            return table["cached"] - table["local"]
        case "optimizer":
            return table["cached"] - table["frozen"]
        case "metrics":
            return table["local"] - table["bare"]
        case "overhead":
            # The time of a step is a line over the number of samples.
            return table["cached"] - (table["large"] - table["cached"]) / (FACTOR - 1)
        case "straggler":
            _, others = split_stragglers(workers)
            transfer = (transfer_s(workers) or 0.0) if len(others) > 1 else 0.0
            loading_s = max((one.data_s for one in others), default=0.0)
            return own - table["left_out"] - transfer - loading_s
        case _:
            # Compute: what remains without waiting for samples and for other workers.
            return own - data_s - (table["cached"] - table["local"])


def _fixed_s(table: Mapping[str, Floats], workers: Sequence[StepParts]) -> float | None:
    if "wide" not in table:
        return None
    # The time of the passes is a line over the number of samples; the update is needed once.
    local_s, wide_s = float(np.median(table["local"])), float(np.median(table["wide"]))
    update_s = float(np.mean([one.optimizer_s for one in workers]))
    return max(0.0, local_s - (wide_s - local_s) / (FACTOR - 1) - update_s)


def _outcome(cause: Cause, interval: tuple[float, float]) -> Outcome:
    # | cause    | interval of its share        | outcome
    # |----------|------------------------------|-----------
    # | compute  | above one half               | confirmed
    # | others   | below 20 %                   | refuted
    # | others   | above 10 %                   | confirmed
    # | any      | anything else                | undecided
    low, high = interval
    if cause == "compute":
        return "confirmed" if low >= 0.5 else "undecided"
    if high < NAMED_FROM:
        return "refuted"
    return "confirmed" if low >= NOTED_FROM else "undecided"


def _gain(
    cause: Cause, table: Mapping[str, Floats], whole: Floats, unchanged_s: float
) -> float | None:
    """Return the gain of a remedy that is one of the variants; None if none of them is."""
    remedy = {
        "communication": "accumulated", "optimizer": "accumulated", "overhead": "large",
    }.get(cause)  # fmt: skip
    if remedy is None:
        return None
    # The trial has its samples in memory; waiting for them and the work between the steps remain.
    after = table[remedy] + FACTOR * unchanged_s
    return float(np.median(FACTOR * whole / after)) - 1
