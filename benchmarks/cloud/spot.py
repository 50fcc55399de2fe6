"""Goodput and cost of training through a simulated day of a spot market, in minutes.

The real system (head, agents, trainers, reconciler, ledger) runs on the fake cloud, which plays a
day of ``spot_trace``: it interrupts machines in bulk, lacks capacity for minutes or hours, and
changes prices. The benchmark plays the same day again under a policy that replaces no machine
(``control``): after the first fleet, the cloud has no capacity for another machine.

``goodput`` is the number of steps in the day, divided by the number that the same cluster would
commit in the same time undisturbed. The undisturbed rate is the one before the day, or the median
of the day at full size, whichever is higher. ``spot_losses`` divides the goodput by what the
capacity of the market allowed, and attributes the difference to its causes. Boots, notices and the
pool's back-off are not scaled: they take real seconds, and each second represents minutes of the
day. So the simulated day is harder than the recorded days that it is modeled on.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cloud.spot_cloud import (
    NOTICE_S,
    ON_DEMAND_USD,
    REBALANCE_S,
    SPOT_USD,
    ZONES,
    run_day,
)
from benchmarks.cloud.spot_losses import CAUSES, SLOW_STEPS
from benchmarks.cloud.spot_simulated import (
    MINUTES,
    NUM_RUNS,
    OWN_TIME,
    Pace,
    simulate_day,
    trace_of,
)
from benchmarks.cloud.spot_trace import HOUR_S, Change, make_day
from benchmarks.common import report

ARMS = {"replaced": True, "control": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--rounds", type=int, default=1, help="days per policy (default 1)")
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of the first day (default 1)"
    )
    parser.add_argument(
        "--workers", type=int, default=4, help="maximum number of workers (default 4)"
    )
    parser.add_argument("--arm", choices=ARMS, help="only this policy (default: both)")
    parser.add_argument("--simulate", type=int, default=0, help="only simulate this many days")
    parser.add_argument(
        "--own-time", action="store_true", help="with --simulate: days that are not shortened"
    )
    parser.add_argument("--hours", type=float, help="length of the day (default 24; quick: 6)")
    parser.add_argument(
        "--minutes", type=float, help="real time to play it (default 6; quick: 1.5)"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Play the same days under both policies, in turns."""
    if options.simulate:
        return simulate_many(options)
    hours = options.hours or (6.0 if options.quick else 24.0)
    day_s = 60 * (options.minutes or (1.5 if options.quick else 6.0))
    scale = hours * HOUR_S / day_s
    arms = [options.arm] if options.arm else sorted(ARMS)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS if name in arms}
    for number in range(options.rounds):
        day = make_day(
            seed=options.seed + number, zones=ZONES, num_nodes=options.workers, hours=hours
        )
        for name in sorted(arms, reverse=number % 2 == 0):
            with tempfile.TemporaryDirectory(prefix="etrain-bench-") as folder:
                found = run_day(
                    day,
                    folder=Path(folder),
                    replaces=ARMS[name],
                    num_nodes=options.workers,
                    day_s=day_s,
                    calm_s=min(30.0, day_s / 4),
                    scale=scale,
                )
            if ARMS[name]:
                found["simulated"] = simulated(day, found, options.workers, scale)
            rounds[name].append(found)
            print(f"spot, round {number + 1}, {name}: goodput {found['goodput']:.3f}", flush=True)
    return {
        "benchmark": "spot",
        "policies": {name: {**medians(done), "rounds": done} for name, done in rounds.items()},
        "hours": hours,
        "scale": scale,
        "seed": options.seed,
        "workers": options.workers,
        "days": [
            [vars(one) for one in make_day(seed=seed, zones=ZONES, num_nodes=4, hours=hours)]
            for seed in range(options.seed, options.seed + options.rounds)
        ],
    }


def simulated(
    day: Sequence[Change], found: dict[str, Any], num_nodes: int, scale: float
) -> dict[str, float]:
    """Simulate the same day; the measured boot times are the only figures of the run."""
    pace = Pace(
        day_s=found["day_s"],
        scale=scale,
        notice_s=NOTICE_S,
        risk_s=REBALANCE_S,
        boots_s=tuple(found["boots_s"]),
    )
    return simulate_of(day, num_nodes, pace)


def simulate_of(
    day: Sequence[Change], num_nodes: int, pace: Pace, num_runs: int = NUM_RUNS
) -> dict[str, float]:
    """Simulate a day with the zones and prices of the benchmark."""
    trace = trace_of(day, zones=ZONES, num_nodes=num_nodes, spot_usd=SPOT_USD, pace=pace)
    return simulate_day(
        trace, num_nodes=num_nodes, on_demand_usd=ON_DEMAND_USD, pace=pace, num_runs=num_runs
    )


def simulate_many(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate the days of many seeds, without a real run."""
    pace = OWN_TIME if options.own_time else MINUTES
    seeds = range(options.seed, options.seed + options.simulate)
    days = [make_day(seed=seed, zones=ZONES, num_nodes=options.workers) for seed in seeds]
    num_runs = 1 if options.own_time else 2
    found = [simulate_of(day, options.workers, pace, num_runs) for day in days]
    return {
        "benchmark": "spot",
        "simulated_days": found,
        "mean": {name: statistics.mean(one[name] for one in found) for name in found[0]},
        "worst": min(one["goodput_by_allowed"] for one in found),
        "full_price_usd": options.workers * ON_DEMAND_USD * 24,
    }


def table_of_many(result: dict[str, Any]) -> str:
    """Format the means of many simulated days."""
    mean = result["mean"]
    cost = mean["day_spent_usd"] / result["full_price_usd"] / mean["goodput"]
    rows = [(name, f"{value:.4f}") for name, value in mean.items() if abs(value) >= 5e-5]
    rows += [("worst goodput / allowed", f"{result['worst']:.4f}")]
    rows += [("cost per step / its cost on demand", f"{cost:.4f}")]
    return report.table((f"{len(result['simulated_days'])} simulated days", "mean"), rows)


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over the rounds."""
    numbers = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    return {name: statistics.median(done[name] for done in rounds) for name in numbers}


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as a Markdown table."""
    if "simulated_days" in result:
        return table_of_many(result)
    columns = (
        ("goodput", "goodput", "{:.3f}"),
        ("goodput that the capacity allowed", "allowed_goodput", "{:.3f}"),
        ("goodput / allowed", "goodput_by_allowed", "{:.3f}"),
        ("the same without slower steps", "trained_by_allowed", "{:.3f}"),
        ("steps per second, undisturbed", "undisturbed_steps_per_s", "{:.2f}"),
        ("steps per second, before the day", "calm_steps_per_s", "{:.2f}"),
        ("mean boot, s", "mean_boot_s", "{:.1f}"),
        ("steps", "useful_steps", "{:.0f}"),
        ("committed / executed steps", "committed_by_executed", "{:.4f}"),
        ("steps wasted", "wasted_steps", "{:.0f}"),
        ("machines interrupted", "num_preemptions", "{:.0f}"),
        ("machines launched", "num_launched", "{:.0f}"),
        ("mean world size", "mean_world_size", "{:.2f}"),
        ("time without any worker", "share_without_worker", "{:.0%}"),
        ("samples lost", "samples_lost", "{:.0f}"),
        ("samples repeated", "samples_repeated", "{:.0f}"),
        ("spent, ledger, USD", "spent_usd_ledger", "{:.4f}"),
        ("spent, bill, USD", "spent_usd_bill", "{:.4f}"),
        ("ledger / bill", "ledger_by_bill", "{:.3f}"),
        ("saved, compared with on demand", "saved_share", "{:.0%}"),
        ("the day: spent, USD", "day_spent_usd", "{:.2f}"),
        ("the day: the same hours on demand, USD", "day_on_demand_usd", "{:.2f}"),
        ("the day: saved", "day_saved_share", "{:.0%}"),
        ("the day: all machines on demand, USD", "full_price_usd", "{:.2f}"),
        ("cost per step / its cost on demand", "usd_a_step_by_full_price", "{:.2f}"),
    )
    rows = []
    for title, name, form in columns:
        found = [policy[name] for policy in result["policies"].values()]
        rows.append((title, *("-" if one is None else form.format(one) for one in found)))
    about = (
        f"{result['hours']:g} h of seed {result['seed']}, {result['scale']:.0f} s of the day per "
        f"second; at most {result['workers']} workers."
    )
    table = report.table(("", *result["policies"]), rows)
    parts = [about, table, losses_of(result)]
    if "replaced" in result["policies"]:
        parts.append(simulation_of(result))
    return "\n\n".join(parts)


def losses_of(result: dict[str, Any]) -> str:
    """Format the losses by cause, as shares of the allowed goodput."""
    policies = result["policies"].values()
    rows = []
    for cause, about in (*CAUSES.items(), (SLOW_STEPS, "steps that took longer than undisturbed")):
        shares = [
            statistics.median(
                one["lost_by_cause"][cause] / one["allowed_goodput"] for one in rounds
            )
            for rounds in (policy["rounds"] for policy in policies)
        ]
        rows.append((about, *(f"{share:.1%}" for share in shares)))
    return report.table(("lost, of the allowed goodput", *result["policies"]), rows)


def simulation_of(result: dict[str, Any]) -> str:
    """Format the simulation of the same days next to the real runs."""
    rounds = result["policies"]["replaced"]["rounds"]
    rows = []
    for title, name in (
        ("goodput", "goodput"),
        ("goodput / allowed", "goodput_by_allowed"),
        ("the same without slower steps", "trained_by_allowed"),
        ("mean world size", "mean_world_size"),
        ("the day: spent, USD", "day_spent_usd"),
        ("machines launched", "num_launched"),
    ):
        real = statistics.median(one[name] for one in rounds)
        virtual = statistics.median(one["simulated"][name] for one in rounds)
        cells = (f"{real:.2f}", f"{virtual:.2f}", f"{virtual / real - 1:+.1%}")
        rows.append((title, *cells))
    return report.table(("replaced", "real", "simulated", "error"), rows)
