"""What happens to machines, as the logs of jobs and the screen say it."""

from __future__ import annotations

from etrain_jupyter.pools.ec2.fleet_state import FleetState
from etrain_jupyter.pools.ec2.head.view import Rules
from etrain_jupyter.pools.ec2.ledger import TAKEN_BY_EC2


def why_gone(reason: str) -> str:
    """Return why a machine has ended, of EC2's code for it.

    >>> why_gone("Server.SpotInstanceTermination")
    'EC2 took the spot machine back (Server.SpotInstanceTermination)'
    """
    if reason.startswith(TAKEN_BY_EC2):
        words = "EC2 took the spot machine back"
    elif reason.startswith("Client.InstanceInitiated"):
        words = "the machine turned itself off"
    elif reason.startswith(("Client.UserInitiated", "User initiated")):
        words = "somebody terminated it"
    else:
        words = "EC2 does not list it any more" if not reason else "the machine has ended"
    return f"{words} ({reason})" if reason else words


def boot_failure(node: str, why: str, error: str, console: str) -> str:
    """Return what is known of a node that never said hello."""
    text = f"Node {node} never said hello: {error or why}."
    return f"{text} Its console ends with:\n{console}" if console else text


def why_halted(
    memory: FleetState, rules: Rules, *, spent_usd: float, rate_usd: float, detail: str
) -> str:
    """Return why nothing is launched any more, and what to do."""
    if memory.halted == "budget":
        return (
            f"The budget is nearly spent: {spent_usd:.3g} of budget.max_total="
            f"{rules.max_total or 0:g} US dollars, at {rate_usd:.3g} an hour, with "
            f"{rules.reserve_s:g} s kept for stopping. No node is launched any more. Raise "
            "budget.max_total in pools.yaml to go on there."
        )
    if memory.halted == "boot":
        return (
            f"{memory.num_boot_failures} nodes in a row never said hello. No more are launched. "
            "Correct image and iam in pools.yaml, and start the cluster again. "
            f"{detail}"
        ).rstrip()
    return (
        f"EC2 has refused {memory.num_refusals} launches in a row. No more are tried. {detail}"
    ).rstrip()
