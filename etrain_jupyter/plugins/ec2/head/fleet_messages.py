"""Messages about machines, for the jobs' logs and the screen."""

from __future__ import annotations

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.plugins.ec2.fleet_state import FleetState
from etrain_jupyter.plugins.ec2.head.view import Rules, View
from etrain_jupyter.plugins.ec2.ledger import TAKEN_BY_EC2


def why_gone(reason: str) -> str:
    """Return why a machine has ended, based on EC2's code.

    >>> why_gone("Server.SpotInstanceTermination")
    'EC2 reclaimed the spot machine (Server.SpotInstanceTermination)'
    """
    # StateReason codes of DescribeInstances; `_instance` falls back to StateTransitionReason, which
    # contains "User initiated".
    if reason.startswith(TAKEN_BY_EC2):
        cause = "EC2 reclaimed the spot machine"
    elif reason.startswith("Client.InstanceInitiated"):
        cause = "the machine turned itself off"
    elif reason.startswith(("Client.UserInitiated", "User initiated")):
        cause = "it was terminated by a request to EC2"
    else:
        cause = "EC2 no longer lists it" if not reason else "the machine has ended"
    return f"{cause} ({reason})" if reason else cause


def boot_failure(node: str, why: str, error: str, console: str) -> str:
    """Return the report on a node whose workers never connected."""
    text = f"The workers of node {node} never connected: {error or why}."
    return f"{text} Its console ends with:\n{console}" if console else text


def why_halted(
    state: FleetState, rules: Rules, *, spent_usd: float, rate_usd: float, detail: str
) -> str:
    """Return why launches have stopped, and what to do."""
    if state.halted == "budget":
        return (
            f"The budget is nearly spent: {spent_usd:.3g} of budget.max_total="
            f"{rules.max_total or 0:g} US dollars, at {rate_usd:.3g} an hour, with "
            f"{rules.reserve_s:g} s reserved for stopping. No more nodes are launched. Raise "
            "budget.max_total in pools.yaml to continue."
        )
    if state.halted == "boot":
        return (
            f"The workers of {state.num_boot_failures} nodes in a row never connected. No more "
            "nodes are launched. Correct image and iam in pools.yaml, and start the cluster again. "
            f"{detail}"
        ).rstrip()
    return (
        f"EC2 has refused {state.num_refusals} launches in a row. No more nodes are launched. "
        f"{detail}"
    ).rstrip()


def over_hourly_budget(rate_usd: float, limit: float, num_released: int) -> str:
    """Return the warning that machines are released because prices have risen."""
    return (
        f"The nodes cost {rate_usd:.2f} US dollars an hour, more than budget.max_hourly={limit:g}: "
        f"prices have risen. {num_released} of them are released. Raise the budget in pools.yaml "
        "to keep more."
    )


def budget_too_small(rules: Rules, view: View, num_nodes: int, num_fit: int) -> str:
    """Return the warning that the budget allows fewer machines than needed."""
    bounds = []
    if rules.max_hourly is not None:
        bounds.append(f"budget.max_hourly is {rules.max_hourly:g}")
    if rules.max_total is not None:
        bounds.append(f"budget.max_total is {rules.max_total:g}, spent {view.spent_usd:.2f}")
    return (
        f"The budget allows {num_fit} of {num_nodes} more nodes: {view.rate_usd:.2f} US dollars "
        f"an hour now, {' and '.join(bounds)}. Training continues with fewer. Raise the budget in "
        "pools.yaml, or lower workers.max."
    )


def no_capacity(state: FleetState, rules: Rules, view: View, missing: int, short_s: float) -> str:
    """Return the warning that EC2 has no capacity, and when the next attempt is."""
    since = f" for {short_s:.0f} s" if short_s >= 1 else " now"
    refused = {key: one for key, one in state.back_offs.items() if one.until > view.now}
    where = ""
    if refused:
        types = sorted({type for type, _, _ in refused})
        zones = sorted({zone for _, zone, _ in refused})
        # The pool whose back-off ends first is requested next.
        wait_s = min(one.until for one in refused.values()) - view.now
        where = (
            f" ({', '.join(types)} in {', '.join(zones)}). The next attempt is in {wait_s:.0f} s"
        )
    after = f"after {rules.on_demand_after_s:g} s without capacity"
    if view.on_demand is not None:
        more = (
            "Workers are launched on demand only if a job falls behind schedule (capacity.policy: "
            "deadline)"
        )
    elif rules.most_on_demand:
        more = (
            f"At most {rules.most_on_demand} are launched on demand {after}. Add types or zones to "
            "capacity"
        )
    else:
        more = (
            "Add types or zones to capacity, or set capacity.on_demand.max to pay the full price "
            f"{after}"
        )
    return (
        f"EC2 has no capacity for {counted(missing, 'worker')}{since}{where}. Launches are retried "
        f"until it has. {more}."
    )


def full_price(rules: Rules, type: str, num_nodes: int, short_s: float) -> str:
    """Return the warning that on-demand machines replace spot machines."""
    return (
        f"EC2 has had no spot capacity for {short_s:.0f} s: requesting "
        f"{counted(num_nodes, 'node')} of {type} on demand, at the full price "
        f"(capacity.on_demand: after {rules.on_demand_after_s:g} s, max {rules.most_on_demand})."
    )
