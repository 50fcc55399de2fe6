"""What a worker's time goes into, and what it waits for: rules without I/O."""

from __future__ import annotations

from typing import Any

from etrain_jupyter.log.events import RankTimed

MUCH = 0.2
"""A share of its time that is worth a word."""

_BEFORE_TRAINING = {
    "starting": "its trainer to start",
    "warm": "the next generation",
    "leaving": "the next step boundary",
}


def split_of(timing: RankTimed | None) -> dict[str, Any] | None:
    """Return the shares of a worker's time, which add up to 1, and its throughput.

    ``other`` is what lies between the parts. None before the worker has told anything.
    """
    if timing is None or timing.elapsed_s <= 0:
        return None
    parts = {
        "data": timing.data_s,
        "compute": timing.compute_s,
        "communication": timing.communication_s,
        "optimizer": timing.optimizer_s,
    }
    whole = max(timing.elapsed_s, sum(parts.values()))
    shares = {name: spent / whole for name, spent in parts.items()}
    return {
        "step": timing.step,
        "num_steps": timing.num_steps,
        "samples_per_s": timing.samples / timing.elapsed_s,
        "shares": shares | {"other": max(0.0, 1.0 - sum(shares.values()))},
    }


def what_it_waits_for(state: str, note: str, timing: RankTimed | None) -> str:
    """Say in a few words what keeps a worker from computing; nothing where it computes.

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
    data, others = split["shares"]["data"], split["shares"]["communication"]
    if max(data, others) < MUCH:
        return ""
    what, share = ("data", data) if data >= others else ("other ranks", others)
    return f"{what}, {share * 100:.0f} %"
