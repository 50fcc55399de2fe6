"""Choose machines to release: idle, over budget, ahead of schedule, or outside the zone."""

from __future__ import annotations

from etrain_jupyter.plugins.ec2.fleet_state import FleetState
from etrain_jupyter.plugins.ec2.head.view import Count, Machine, Rules, View
from etrain_jupyter.plugins.ec2.placement import usable

Release = tuple[str, str]
"""Id of a machine, and why it is released."""


def over_budget(count: Count, rules: Rules, view: View) -> list[Release]:
    """Release the most expensive machines until the rest costs at most ``max_hourly``."""
    prices = {(offer.type, offer.zone): offer for offer in view.offers}
    limit = rules.max_hourly or 0.0

    def usd(machine: Machine) -> float:
        offer = prices.get((machine.type, machine.zone))
        return (offer.usd(machine.lifecycle) or 0.0) if offer else 0.0

    # Machines that are leaving are still charged for, but not for long.
    leaving_usd = sum(usd(m) + rules.disk_usd for m in view.machines if m.is_leaving)
    rate, releases = view.rate_usd - leaving_usd, []
    # Release machines with a notice first, because EC2 is likely to reclaim them anyway.
    for machine in sorted(count.staying, key=lambda m: (m.is_at_risk, usd(m)), reverse=True):
        if rate <= limit + 1e-9:
            break
        rate -= usd(machine) + rules.disk_usd
        releases.append((machine.id, "above budget.max_hourly"))
    return releases


def surplus(count: Count, state: FleetState, rules: Rules, target: int) -> list[Release]:
    """Release machines beyond ``target`` workers.

    Busy machines stay. Release order: at risk of an interruption, not ready, outside the zone, on
    demand, newest. ``on_demand_base`` workers stay on demand.
    """
    releases = []
    too_many = count.num_sure - target
    num_on_demand = sum(m.workers for m in count.staying if m.lifecycle == "on-demand")
    num_base = min(rules.on_demand_base, target)
    candidates = sorted(
        (m for m in count.staying if not m.is_busy),
        key=lambda m: (
            not m.is_at_risk,
            m.is_ready,
            m.zone == state.zone,
            m.lifecycle == "spot",
            -m.launched_at,
            m.id,
        ),
    )
    for machine in candidates:
        # Releasing it would leave too few workers; a smaller machine may come later in the order.
        if machine.workers > too_many:
            continue
        if machine.lifecycle == "on-demand":
            # Spot machines beyond the target are released instead, even if they come later.
            if num_on_demand - machine.workers < num_base:
                continue
            num_on_demand -= machine.workers
        too_many -= machine.workers
        releases.append((machine.id, "no longer needed"))
    return releases


def off_schedule(count: Count, target: int, already: set[str]) -> list[Release]:
    """Release on-demand machines beyond ``target`` workers, which the deadlines no longer need.

    Machines that still boot are released first, then the newest. A machine in use is released, too:
    its workers leave at a step boundary, and the job continues on spot workers.
    """
    # Machines of an unanswered request may not exist, so they do not replace running ones.
    here = [m for m in count.staying if m.lifecycle == "on-demand" and m.id not in already]
    too_many = sum(m.workers for m in here) - target
    releases = []
    for machine in sorted(here, key=lambda m: (m.is_ready, -m.launched_at, m.id)):
        if machine.workers <= too_many:
            too_many -= machine.workers
            releases.append((machine.id, "the job is on schedule without it"))
    return releases


def outside_zone(state: FleetState, view: View, count: Count) -> list[Release]:
    """Release one machine outside the zone once all are ready; it is replaced inside the zone."""
    # One at a time, and only from a settled fleet: the job loses at most one machine's workers, and
    # the next move waits until the replacement is training.
    is_settled = not count.coming and all(m.is_ready for m in count.staying)
    outside = [m for m in count.staying if m.zone != state.zone]
    if not (state.zone and outside and is_settled):
        return []
    offers = usable(view.offers, state, "spot", view.now, must_know_price=True)
    # Without capacity in the zone, the release would only shrink the job. If the zone has no other
    # machine, `launch_plan` may still choose another zone.
    has_offer = any(offer.zone == state.zone for offer in offers)
    if not has_offer or not any(m.zone == state.zone for m in count.staying):
        return []
    machine = min(outside, key=lambda m: (m.is_busy, -m.launched_at, m.id))
    return [(machine.id, f"the others are in {state.zone}")]
