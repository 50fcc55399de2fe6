"""Policies for jobs that need all workers at once, for comparison.

These are the policies of Wu et al., "Can't Be Late" (NSDI 2024). They do not run the pool's rules,
and the simulation is generous to them: a gang knows the capacity before it launches, so it never
pays for a part of its machines. It replaces a machine at its notice, and trains until the machine
is gone.
"""

from __future__ import annotations

from itertools import islice

from etrain_jupyter.plugins.planner.simulation.job import Outcome, Progress, SimulatedJob
from etrain_jupyter.plugins.planner.simulation.market import VirtualMarket, VirtualNode


def run_gang(market: VirtualMarket, job: SimulatedJob, *, is_uniform: bool) -> Outcome:
    """Run a job on all of its workers or none.

    Args:
        market: The market at the start of the job.
        job: The job.
        is_uniform: Follow a line from start to deadline, on demand when behind it; otherwise stay
            on spot machines until the deadline requires on-demand machines to the end.
    """
    progress = Progress(job)
    boot_s = job.boot_s[1]
    margin_s = boot_s + 3 * job.tick_s + job.gang_restart_s
    per_s = job.work / max(job.tick_s, job.deadline_s - margin_s)
    waiting_s = job.gang_restart_s
    members: tuple[VirtualNode, ...] = ()
    is_forced = False
    for now in job.ticks():
        market.advance(now)
        usable_s = job.deadline_s - now - margin_s
        is_forced |= progress.left >= job.rates[-1] * usable_s
        spot, owned = _of(market, "spot"), _of(market, "on-demand")
        is_on_demand = is_forced
        if is_uniform and not is_forced:
            done = job.work - progress.left
            is_behind = done < per_s * now and len(spot) < job.workers
            is_on_demand = is_behind or (bool(owned) and done < per_s * (now + 2 * boot_s))
        _fill(market, job.workers, now, is_on_demand=is_on_demand)
        ready = (node for node in market.nodes.values() if node.ready_at <= now)
        running = tuple(islice(ready, job.workers))  # the oldest, so that spare machines wait
        is_whole = len(running) == job.workers
        # A new gang, and one with a replaced machine, restarts from its last checkpoint.
        if not is_whole or running != members:
            waiting_s = job.gang_restart_s
        members = running
        stall_s = min(waiting_s, job.tick_s)
        waiting_s -= stall_s if is_whole else 0.0
        if progress.advance(now, running if is_whole else (), stall_s=stall_s):
            break
    return progress.outcome(market)


def _of(market: VirtualMarket, lifecycle: str) -> list[VirtualNode]:
    return [node for node in market.nodes.values() if node.lifecycle == lifecycle]


def _fill(market: VirtualMarket, workers: int, now: float, *, is_on_demand: bool) -> None:
    """Hold all machines of one lifecycle, or none."""
    spot, owned = _of(market, "spot"), _of(market, "on-demand")
    for node in spot if is_on_demand else owned:
        market.end(node.id, now)
    zones = market.trace.zones
    if is_on_demand:
        if len(owned) < workers:
            market.launch("on-demand", zones, workers - len(owned), now)
        return
    staying = [node for node in spot if now < node.notice_at]
    if market.capacity(now) - (len(spot) - len(staying)) >= workers:
        if len(staying) < workers:
            market.launch("spot", zones, workers - len(staying), now)
    elif len(spot) < workers:
        for node in spot:
            market.end(node.id, now)
