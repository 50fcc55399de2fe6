"""Which requests a job can be asked for now, and why not the others: a rule without I/O."""

from __future__ import annotations

from etrain_jupyter.log.events import TERMINAL_STATUSES

REQUESTS = ("pause", "resume", "checkpoint", "scale", "preempt", "stop")
"""What the screen has buttons for."""

_ENDED = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}


def controls_of(status: str, *, num_training: int) -> dict[str, str]:
    """Return for each request why it cannot be made now; empty where it can.

    Args:
        status: The job's.
        num_training: Workers that train, those that are leaving included.
    """
    if status in TERMINAL_STATUSES:
        over = dict.fromkeys(REQUESTS, f"The job {_ENDED[status]}.")
        longer = "The job has finished. %etrain resume --epochs N lets it go on for longer."
        return over | {"resume": longer if status == "finished" else ""}
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
