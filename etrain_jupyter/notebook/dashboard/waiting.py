"""Derive how a worker spends its time and what it waits for, without I/O."""

from __future__ import annotations

from etrain_jupyter.log.events import RankTimed
from etrain_jupyter.notebook.dashboard.snapshot import TimeSplit

MIN_SHARE = 0.2
"""Minimum share of the time for a worker to be shown as waiting."""

_BEFORE_TRAINING = {
    "starting": "its trainer to start",
    "warm": "the next generation",
    "leaving": "the next step boundary",
}


def split_of(timing: RankTimed | None) -> TimeSplit | None:
    """Return the shares of a worker's time and its throughput; None before its first report."""
    if timing is None or timing.elapsed_s <= 0:
        return None
    parts = {
        "data": timing.data_s,
        "compute": timing.compute_s,
        "communication": timing.communication_s,
        "optimizer": timing.optimizer_s,
    }
    # Separate clock readings can add up to slightly more than the elapsed time, but shares must not
    # exceed 1.
    whole = max(timing.elapsed_s, sum(parts.values()))
    shares = {name: spent / whole for name, spent in parts.items()}
    return TimeSplit(
        step=timing.step,
        num_steps=timing.num_steps,
        samples_per_s=timing.samples / timing.elapsed_s,
        shares=shares | {"other": max(0.0, 1.0 - sum(shares.values()))},  # time between the parts
    )


def waiting_reason(state: str, note: str, timing: RankTimed | None) -> str:
    """Return why a worker is not computing; empty if it is.

    >>> what_it_waits_for("warm", "", None)
    'the next generation'
    """
    if state == "waiting":
        return "the job to be resumed" if note == "paused" else "more workers"
    if state != "training":
        return _BEFORE_TRAINING.get(state, "")
    split = split_of(timing)
    if split is None:
        return ""
    # A rank that reaches the gradient exchange first waits there for the slowest rank, so
    # most of its communication time is waiting.
    data, communication = split.shares["data"], split.shares["communication"]
    if max(data, communication) < MIN_SHARE:
        return ""
    what, share = ("data", data) if data >= communication else ("other ranks", communication)
    return f"{what}, {share * 100:.0f} %"
