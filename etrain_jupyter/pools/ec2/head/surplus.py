"""Which machines to let go: those that nobody wants, that have become too dear, or stand apart."""

from __future__ import annotations

from etrain_jupyter.pools.ec2.fleet_state import FleetState
from etrain_jupyter.pools.ec2.head.view import Count, Machine, Rules, View
from etrain_jupyter.pools.ec2.placement import usable


def too_dear(
    count: Count, rules: Rules, view: View, warnings: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Let the dearest go until the rest is within ``max_hourly``; prices have risen."""
    prices = {(offer.type, offer.zone): offer for offer in view.offers}
    rate, ends = view.rate_usd, []
    limit = rules.max_hourly or 0.0

    def usd(machine: Machine) -> float:
        offer = prices.get((machine.type, machine.zone))
        return (offer.usd(machine.lifecycle) or 0.0) if offer else 0.0

    # What leaves already is still paid for, but not for long.
    rate -= sum(usd(m) + rules.disk_usd for m in view.machines if m.is_leaving)
    for machine in sorted(count.staying, key=lambda m: (m.is_at_risk, usd(m)), reverse=True):
        if rate <= limit + 1e-9:
            break
        rate -= usd(machine) + rules.disk_usd
        ends.append(machine)
    if not ends:
        return []
    count.staying = [m for m in count.staying if m not in ends]
    text = (
        f"The nodes cost {view.rate_usd:.2f} US dollars an hour, more than budget.max_hourly="
        f"{limit:g}: prices have risen. {len(ends)} of them are released. Raise the budget in "
        "pools.yaml to keep more."
    )
    warnings.append(("too dear", text))
    return [(machine.id, "above budget.max_hourly") for machine in ends]


def surplus(count: Count, memory: FleetState, rules: Rules, target: int) -> list[tuple[str, str]]:
    """Pick machines that nobody wants: those not ready, elsewhere, dear, and new first."""
    ends = []
    too_many = count.num_sure - target
    num_on_demand = sum(m.workers for m in count.staying if m.lifecycle == "on-demand")
    num_base = min(rules.on_demand_base, target)
    order = sorted(
        (m for m in count.staying if not m.is_busy),
        key=lambda m: (
            not m.is_at_risk,
            m.is_ready,
            m.zone == memory.zone,
            m.lifecycle == "spot",
            -m.launched_at,
            m.id,
        ),
    )
    for machine in order:
        if machine.workers > too_many:
            continue
        if machine.lifecycle == "on-demand":
            if num_on_demand - machine.workers < num_base:
                continue
            num_on_demand -= machine.workers
        too_many -= machine.workers
        ends.append((machine.id, "not wanted any more"))
    return ends


def stranger(memory: FleetState, view: View, count: Count) -> list[tuple[str, str]]:
    """Let one worker outside the zone go once everybody is there: another one comes in the zone."""
    is_settled = not count.coming and all(m.is_ready for m in count.staying)
    strangers = [m for m in count.staying if m.zone != memory.zone]
    if not (memory.zone and strangers and is_settled):
        return []
    here = [
        offer
        for offer in usable(view.offers, memory, "spot", view.now, must_know_price=True)
        if offer.zone == memory.zone
    ]
    if not here or not any(m.zone == memory.zone for m in count.staying):
        return []
    machine = min(strangers, key=lambda m: (m.is_busy, -m.launched_at, m.id))
    return [(machine.id, f"the others are in {memory.zone}")]
