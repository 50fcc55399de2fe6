"""``python -m benchmarks NAME [--quick] --json FILE``; NAME ``all`` runs one after the other."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import (
    aggregation,
    bundle,
    checkpoint,
    churn,
    code_table,
    dashboard,
    forming,
    log,
    ours,
    recovery,
    report,
    reproducible,
    spot,
    steady,
    strangers,
    stream,
)

BENCHMARKS: dict[str, ModuleType] = {
    "steady": steady,
    "aggregation": aggregation,
    "recovery": recovery,
    "forming": forming,
    "churn": churn,
    "reproducible": reproducible,
    "log": log,
    "checkpoint": checkpoint,
    "bundle": bundle,
    "stream": stream,
    "dashboard": dashboard,
    "spot": spot,
    "strangers": strangers,
    "code": code_table,
}

APART = frozenset({"strangers", "code"})
"""Not in ``all``: ``strangers`` attacks every listener on the machine, ``code`` times nothing."""


def main() -> int:
    """Run what the command line names, print its table and write its JSON."""
    options = parse()
    ours.prepare()
    if options.name == "all":
        names = [name for name in BENCHMARKS if name not in APART]
        results = {name: run(name, parse([name, *sys.argv[2:]])) for name in names}
        result: dict[str, Any] = {"benchmark": "all", **results}
    else:
        result = run(options.name, options)
    report.write(options.json, result)
    print(f"\nJSON: {options.json}")
    return 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; every benchmark has options of its own."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, required=True, help="where the figures are written")
    common.add_argument("--quick", action="store_true", help="a few minutes, rougher figures")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(commands.add_parser(name, parents=[common], help=summary))
    commands.add_parser("all", parents=[common], help="All of them.")
    return parser.parse_args(arguments)


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one benchmark and print its table."""
    result: dict[str, Any] = BENCHMARKS[name].measure(options)
    print(f"\n{name}\n{BENCHMARKS[name].table_of(result)}\n", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
