"""Run ``python -m benchmarks NAME [--quick] --json FILE``; NAME ``all`` runs nearly all of them."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.common import ours, report

FOLDERS: dict[str, tuple[str, ...]] = {
    "steps": (
        "steady",
        "paired",
        "aggregation",
        "sums",
        "reproducible",
        "gpu",
        "zero",
        "accounting",
        "uneven",
    ),
    "faults": (
        "recovery",
        "forming",
        "starts",
        "churn",
        "restore",
    ),
    "scale": ("scale",),
    "cloud": (
        "boot",
        "account",
        "spot",
    ),
    "storage": (
        "log",
        "checkpoint",
        "bundle",
        "shards",
        "scores",
        "shuffle",
    ),
    "screen": (
        "stream",
        "dashboard",
    ),
    "advice": (
        "policies",
        "sizing",
        "plan",
        "diagnose",
    ),
    "models": (
        "search",
        "squad",
        "pretraining",
        "vision",
    ),
}
"""Names of the benchmarks; ``steps/steady.py`` is the benchmark ``steady``."""

BENCHMARKS: dict[str, ModuleType] = {
    name: import_module(f"benchmarks.{folder}.{name}")
    for folder, names in FOLDERS.items()
    for name in names
} | {"code": import_module("benchmarks.code_table")}

APART = frozenset({"code", "gpu", "squad", "pretraining", "vision"})
"""Excluded from ``all``: ``code`` measures no time, ``gpu`` belongs to ``make gpu``, and ``squad``,
``pretraining`` and ``vision`` need data sets."""


def main() -> int:
    """Run the requested benchmark, print its table and write its JSON."""
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
    """Parse the command line; every benchmark adds its own options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, required=True, help="output file for the figures")
    common.add_argument(
        "--quick", action="store_true", help="fewer runs: a few minutes, less precise"
    )
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or "").splitlines()[0].replace("%", "%%")
        module.add_arguments(commands.add_parser(name, parents=[common], help=summary))
    every = f"All benchmarks except {', '.join(sorted(APART))}."
    commands.add_parser("all", parents=[common], help=every)
    return parser.parse_args(arguments)


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one benchmark and print its table."""
    result: dict[str, Any] = BENCHMARKS[name].measure(options)
    print(f"\n{name}\n{BENCHMARKS[name].table_of(result)}\n", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
