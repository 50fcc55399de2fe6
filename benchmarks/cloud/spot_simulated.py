"""Simulate a day of ``spot`` with the engine of ``etrain simulate``, next to the real run.

The simulation of a real run uses the real seconds of the benchmark, because boots, notices and
back-offs are not scaled there. It knows the changes of the day with their kinds of interruption,
the boot times that the run measured, and nothing else of the run.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cloud.spot_losses import Moment, split_losses
from benchmarks.cloud.spot_trace import Change
from etrain_jupyter.plugins.ec2.head.view import Rules
from etrain_jupyter.plugins.ec2.ledger import FIRST_HOUR_S
from etrain_jupyter.plugins.planner.simulation.fleet import VirtualFleet
from etrain_jupyter.plugins.planner.simulation.job import Progress, SimulatedJob
from etrain_jupyter.plugins.planner.simulation.market import INTERRUPTED, VirtualMarket
from etrain_jupyter.plugins.planner.simulation.trace import Slot, SpotTrace

NUM_RUNS = 20
"""Simulated runs; they differ in their boot times."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Times of a simulated day, in seconds."""

    day_s: float
    scale: float
    """Seconds of the day per simulated second."""
    notice_s: float
    """From the notice to the termination."""
    risk_s: float
    """From the recommendation to the notice."""
    boots_s: tuple[float, ...]
    """Boot times to draw from."""
    prelude_s: float = 120.0
    """Time before the day, in which the first machines boot."""
    tick_s: float = 1.0
    linger_s: float = 5.0
    stall_s: float = 0.2
    """Without steps in a change of the workers."""


OWN_TIME = Pace(
    day_s=86_400.0,
    scale=1.0,
    notice_s=120.0,
    risk_s=300.0,
    boots_s=(120.0, 150.0, 180.0, 210.0, 240.0, 300.0),
    prelude_s=900.0,
    tick_s=5.0,
    linger_s=120.0,
    stall_s=1.0,
)
"""A day that is not shortened, with the times of EC2. Boots are an assumption."""
MINUTES = Pace(
    day_s=360.0,
    scale=240.0,
    notice_s=8.0,
    risk_s=4.0,
    boots_s=(8.0, 9.0, 10.0, 10.0, 11.0, 12.0, 14.0),
)
"""A day in six minutes, as in the real runs."""


def trace_of(
    day: Sequence[Change],
    *,
    zones: Sequence[str],
    num_nodes: int,
    spot_usd: float,
    pace: Pace,
) -> SpotTrace:
    """Return a day of the benchmark as a trace, with the kinds of its interruptions.

    Args:
        day: Changes of capacity and price, at seconds of the day.
        zones: Zones of the day.
        num_nodes: Capacity of each zone at the beginning.
        spot_usd: Hourly price at the beginning.
        pace: Times of the simulation.
    """
    end_s = pace.prelude_s + pace.day_s
    slots: list[Slot] = []
    prices = {zone: [(0.0, spot_usd)] for zone in zones}
    since = {zone: [0.0] * num_nodes for zone in zones}  # start of each open slot, by rank
    for change in day:
        at, zone = pace.prelude_s + change.at_s / pace.scale, change.zone
        if change.price_factor is not None:
            prices[zone].append((at, spot_usd * change.price_factor))
        if change.capacity is None:
            continue
        lead_s, before_s = 0.0 if change.way == "silent" else pace.notice_s, 0.0
        if change.way == "rebalance":
            before_s = pace.risk_s
        while len(since[zone]) > change.capacity:
            began = since[zone].pop()
            slots.append(
                Slot(zone=zone, since_s=began, until_s=at + lead_s + before_s, notice_s=lead_s,
                     risk_s=before_s, rank=len(since[zone]))
            )  # fmt: skip
        since[zone] += [at] * (change.capacity - len(since[zone]))
    for zone, starts in since.items():
        slots += [
            Slot(zone=zone, since_s=began, until_s=2 * end_s, rank=rank)
            for rank, began in enumerate(starts)
        ]
    return SpotTrace(
        name="spot day",
        length_s=2 * end_s,
        slots=tuple(sorted(slots, key=lambda slot: slot.since_s)),
        prices={zone: tuple(points) for zone, points in prices.items()},
        all_zones=tuple(zones),
    )


def simulate_day(
    trace: SpotTrace,
    *,
    num_nodes: int,
    on_demand_usd: float,
    pace: Pace,
    num_runs: int = NUM_RUNS,
) -> dict[str, float]:
    """Return goodput, mean world size and the cost in the day's time, as means over several runs.

    Args:
        trace: See ``trace_of``.
        num_nodes: Maximum number of workers.
        on_demand_usd: Hourly price on demand.
        pace: Times of the simulation, as for the trace.
        num_runs: Number of runs; they differ in their boot times.
    """
    end_s = pace.prelude_s + pace.day_s
    job = SimulatedJob(
        workers=num_nodes, duration_s=10 * end_s, deadline_s=end_s, spot_usd=0.0,
        on_demand_usd=on_demand_usd, boot_s=(min(pace.boots_s), max(pace.boots_s)),
        tick_s=pace.tick_s, stall_s=pace.stall_s,
    )  # fmt: skip
    found = [_run(job, trace, pace, seed) for seed in range(num_runs)]
    return {name: statistics.mean(one[name] for one in found) for name in found[0]}


def _run(job: SimulatedJob, trace: SpotTrace, pace: Pace, seed: int) -> dict[str, float]:
    day_s, begin_s, num_nodes = pace.day_s, pace.prelude_s, job.workers
    end_s = begin_s + day_s
    market = VirtualMarket(trace, rng=random.Random(seed), boot_s=job.boot_s, boots_s=pace.boots_s)
    rules = Rules(cluster_id="simulated", max_workers=num_nodes, is_single_zone=False,
                  linger_s=pace.linger_s, boot_s=7200.0)  # fmt: skip
    prices = job.prices(trace)
    fleet = VirtualFleet(rules=rules, market=market, prices=prices)
    progress, before, worker_s = Progress(job), job.work, 0.0
    moments: list[Moment] = []
    for number in range(int(end_s / pace.tick_s)):
        now = number * pace.tick_s
        market.advance(now)
        if now == begin_s:
            before = progress.left
        fleet.tick(now, wanted=num_nodes, on_demand=None)
        training = fleet.groups(now).training[:num_nodes]
        if now >= begin_s:
            worker_s += len(training) * pace.tick_s
            moments.append(_moment_of(fleet, trace, now, job))
        progress.advance(now, training)
    usd = 0.0
    for node in (*market.ended, *market.nodes.values()):
        ended = min(end_s, node.ended_at if node.ended_at is not None else end_s)
        began = max(begin_s, node.launched_at)
        is_free = node.reason == INTERRUPTED and (
            (ended - node.launched_at) * pace.scale < FIRST_HOUR_S
        )
        if ended > began and not is_free:
            hourly = prices.rate("machine", node.zone, node.lifecycle, (began + ended) / 2) or 0.0
            usd += hourly * (ended - began) * pace.scale / 3600
    losses = split_losses(
        moments, rates=job.rates, goodput=(before - progress.left) / (job.rates[-1] * day_s)
    )
    return {
        "goodput": losses.goodput,
        "allowed_goodput": losses.allowed,
        "goodput_by_allowed": losses.by_allowed,
        "trained_by_allowed": losses.trained_by_allowed,
        **{f"lost_{cause}": share for cause, share in losses.by_cause.items()},
        "mean_world_size": worker_s / day_s,
        "day_spent_usd": usd,
        "num_launched": float(market.num_launched),
    }


def _moment_of(fleet: VirtualFleet, trace: SpotTrace, now: float, job: SimulatedJob) -> Moment:
    """Return what the machines do in the tick that begins now."""
    groups, state = fleet.groups(now), fleet.state
    allowed = sum(slot.since_s <= now < slot.until_s for slot in trace.slots)
    num_booting = sum(node.ready_at > now for node in fleet.market.nodes.values())
    closed = {key[1] for key, one in state.back_offs.items() if now < one.until}
    return Moment(
        seconds=job.tick_s,
        allowed=min(job.workers, allowed),
        training=min(job.workers, len(groups.training)),
        waiting=Counter(draining=len(groups.noticed) - groups.num_leaving, boot=num_booting),
        otherwise="back_off" if closed else "request",
    )
