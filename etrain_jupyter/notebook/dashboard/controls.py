"""Decide which requests a job accepts and why it rejects the others, without I/O."""

from __future__ import annotations

from etrain_jupyter.log.events import TERMINAL_STATUSES

REQUESTS = ("pause", "resume", "checkpoint", "scale", "preempt", "stop")
"""The requests that have a button."""

_ENDED = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}


def controls_of(status: str, *, num_training: int) -> dict[str, str]:
    """Return the reason why each request is not possible now; empty if it is possible.

    Args:
        status: Status of the job.
        num_training: Workers that are training, including those about to leave.
    """
    if status in TERMINAL_STATUSES:
        ended = dict.fromkeys(REQUESTS, f"The job {_ENDED[status]}.")
        # Stopped and failed jobs resume where they stopped. A finished job has no steps left.
        # Resuming it requires a new length, which a button cannot supply.
        longer = "The job has finished. To train longer, run %etrain resume --epochs N."
        return ended | {"resume": longer if status == "finished" else ""}
    refused = dict.fromkeys(REQUESTS, "")
    if status == "paused":
        refused["pause"] = "The job is paused."
    else:
        refused["resume"] = "The job is not paused."
    if status != "running" or not num_training:
        refused["checkpoint"] = "No worker is training, so there is nothing new to save."
    if not num_training:
        refused["preempt"] = "No worker is training."
    return refused
