"""Time to recover from the loss of a rank, and stall caused by a planned change.

A job runs at full size. The benchmark repeatedly kills one process with SIGKILL and waits until the
job has its full size again. It measures the time from the signal to the first step that the next
generation commits, minus one ordinary step (the median of the steps before the kill). Steps that
the previous generation commits after the signal do not count as recovery. The peers are measured in
the same way, after the first job of etrain-jupyter and at its size.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import report, timeline
from benchmarks.faults.recovery_ours import KILLED, PLANNED, measure_job
from benchmarks.faults.recovery_peers import measure_peer
from benchmarks.peers.systems import System, runnable

TARGETS = (*KILLED, PLANNED)
WORLD_SIZES = (4, 2, 8)
"""The first size gives the headline figures, and the peers run at it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument(
        "--kills", type=int, help="changes per target (default 20; half of it after the first size)"
    )
    parser.add_argument("--peer-kills", type=int, help="kills per peer (default 5)")
    parser.add_argument("--world-size", type=int, action="append", help="default: 4, 2, 8")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--workload", choices=("cnn", "mlp"), action="append", help="default: cnn")
    parser.add_argument("--no-peers", action="store_true", help="only etrain-jupyter")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every target at every size; put the first target at the first size at the top."""
    num_kills = options.kills or (4 if options.quick else 20)
    targets = tuple(options.target or TARGETS)
    world_sizes = options.world_size or ([4] if options.quick else WORLD_SIZES)
    workloads = options.workload or ["cnn"]
    systems, skipped = ([], {}) if options.no_peers else runnable(survivors=True)
    peer_kills = options.peer_kills or (2 if options.quick else 5)
    sizes: dict[str, Any] = {}
    peers: dict[str, Any] = {}
    for workload in workloads:
        for world_size in world_sizes:
            name = f"{workload}, {world_size} ranks"
            is_first = not sizes
            count = num_kills if is_first else -(-num_kills // 2)
            sizes[name] = measure_job(workload, world_size, targets, count)
            if is_first:
                peers = measure_peers(systems, workload, world_size, peer_kills)
    first = next(iter(sizes.values()))["targets"]
    headline = first[targets[0]] if targets[0] != PLANNED else first["leave"]
    return {
        "benchmark": "recovery",
        **{key: headline.get(key) for key in ("median_s", "p95_s", "phases")},
        "world_sizes": by_world_size(sizes, targets[0]),
        "sizes": sizes,
        "peers": peers,
        "skipped": skipped,
    }


def measure_peers(
    systems: list[System], workload: str, world_size: int, num_kills: int
) -> dict[str, Any]:
    """Measure every runnable peer; if one fails, record the error and continue."""
    found: dict[str, Any] = {}
    for system in systems:
        try:
            found[system.name] = measure_peer(system, workload, world_size, num_kills)
        except (TimeoutError, RuntimeError) as exc:
            found[system.name] = {"failed": str(exc)}
            print(f"recovery {system.name} failed: {exc}", flush=True)
    return found


def by_world_size(sizes: dict[str, Any], target: str) -> dict[str, Any]:
    """Return the figures of one target for the first workload, by world size."""
    workload = next(iter(sizes)).split(",")[0]
    return {
        name.split()[1]: {
            key: value
            for key, value in size["targets"].get(target, {}).items()
            if key in ("median_s", "p95_s", "phases")
        }
        for name, size in sizes.items()
        if name.startswith(f"{workload},")
    }


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables, in milliseconds."""
    parts = [
        "Milliseconds beyond an ordinary step, from SIGKILL to the next committed step; phases are "
        "medians.",
        kills_table(result["sizes"]),
        "Planned changes: milliseconds beyond an ordinary step without a commit.",
        stalls_table(result["sizes"]),
        "Peers: until the next committed step, and until the first new step.",
        peers_table(result),
    ]
    return "\n\n".join(part for part in parts if part)


def kills_table(sizes: dict[str, Any]) -> str:
    """Format the kills of etrain-jupyter, one row per size and target."""
    phases = (*(name.removesuffix("_s") for name in timeline.PHASES), "ordinary_step")
    head = ("job", "killed", "kills", "median", "p95", *phases, "audit")
    rows = []
    for name, size in sizes.items():
        for target in KILLED:
            if found := size["targets"].get(target):
                medians = [ms(found["phases"][phase]["median_s"]) for phase in phases]
                audit = "ok" if size["audit_ok"] else "NOT OK"
                times = [ms(found["median_s"]), ms(found["p95_s"])]
                rows.append((name, target, str(len(found["kills"])), *times, *medians, audit))
    return report.table(head, rows) if rows else ""


def stalls_table(sizes: dict[str, Any]) -> str:
    """Format the planned changes of etrain-jupyter, one row per size and change."""
    head = ("job", "change", "count", "median", "p95", "ordinary step")
    rows = []
    for name, size in sizes.items():
        for why in ("leave", "join"):
            found = size["targets"].get(why)
            if found and found["stalls"]:
                ordinary = ms(found["stalls"][-1]["ordinary_s"])
                times = (ms(found["median_s"]), ms(found["p95_s"]))
                rows.append((name, why, str(len(found["stalls"])), *times, ordinary))
            elif found is not None:
                rows.append((name, why, "0", "-", "-", "-"))
    return report.table(head, rows) if rows else ""


def peers_table(result: dict[str, Any]) -> str:
    """Format the peers' figures; for a peer that did not run, give the reason."""
    head = ("system", "version", "killed", "kills", "median", "p95", "new step: median", "p95")
    blank = ("-",) * 5
    rows: list[tuple[str, ...]] = []
    for name, peer in result["peers"].items():
        if "failed" in peer:
            rows.append((name, "-", f"failed: {first_line(peer['failed'])}", *blank))
            continue
        for target, found in peer["targets"].items():
            keys = ("median_s", "p95_s", "regained_median_s", "regained_p95_s")
            times = [ms(found[key]) for key in keys]
            rows.append((name, peer["version"], target, str(len(found["kills"])), *times))
    for name, why in result["skipped"].items():
        rows.append((name, "-", f"not run: {why}", *blank))
    return report.table(head, rows) if rows else ""


def first_line(text: str) -> str:
    """Return the first line of an error."""
    return text.splitlines()[0]


def ms(seconds: float) -> str:
    """Format seconds as whole milliseconds."""
    return f"{seconds * 1e3:.0f}"
