"""Boot of a node to its first step, with the kernel's environment: cold, cached, from a snapshot.

Each case is one run of `etrain pools check` on the fake cloud, with IAM enforced:

- cold: nothing is in the bucket. This machine downloads the wheels of its own environment and
  uploads them, and the node installs them;
- cached: the bucket has all wheels, and the node starts with an empty disk;
- snapshot: the node's image was made from a node with this environment.

It also measures a whole life of a pool in an empty account: init, check, a cell, remove.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3

from benchmarks.cloud.empty_account import (
    QUICK,
    TYPE,
    Steps,
    await_deleted_disks,
    set_image,
    shorten,
    user_of,
    without_packages,
)
from benchmarks.common import report
from etrain_jupyter import cli
from etrain_jupyter.plugins.ec2 import account_commands
from etrain_jupyter.plugins.ec2.environment.packages import read_packages, without
from etrain_jupyter.plugins.ec2.simulator.cloud import FakeAws
from etrain_jupyter.pools.registry import get_pool

CASES = ("cold", "cached", "snapshot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all cases (default 1)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all cases, in turns."""
    exclude = QUICK if options.quick else ()
    rounds = [one_round(exclude) for _ in range(options.rounds)]
    sent = without(read_packages(), exclude)
    return {"benchmark": "boot", "packages": len(sent), "rounds": rounds}


def one_round(exclude: tuple[str, ...]) -> dict[str, Any]:
    """Measure the life of one pool, from an empty account to an empty account."""
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="etrain-boot-") as folder,
        # Without the path to this package, a node can only import what it has installed.
        FakeAws(minute_s=5.0, variables={"PYTHONPATH": ""}) as cloud,
        user_of(cloud, Path(folder)) as account,
    ):
        steps = Steps(cloud, found)
        surface = _Quiet()
        flags = ["--region", account.region, "--types", TYPE, "--ami", account.image, "--yes"]
        steps.run("init", lambda: cli.main(["pools", "init", "spot", *flags]))
        shorten(cloud)
        set_image(without_packages(account.image, exclude))
        num_images = 0
        for case in CASES:
            if case == "snapshot":
                image = steps.run("make the image", _make_image)
                set_image(without_packages(image, exclude))
                num_images = 1
            # The disk of the previous node is deleted meanwhile, which delays this one.
            await_deleted_disks(cloud, num_kept=num_images)
            text = steps.run(f"check, {case}", lambda: account_commands.check(surface, "spot"))
            print(f"{case}:\n{text}", flush=True)
            found[case] = phases_of(text)
        steps.run("quickstart cell", lambda: _train(surface))
        remove = ["pools", "remove", "spot", "--yes", "--delete-objects"]
        steps.run("remove", lambda: cli.main(remove))
        found["left"] = cloud.leftovers()
    return found


class _Quiet(cli.Terminal):
    """A terminal whose lines are not shown."""

    def __init__(self) -> None:
        super().__init__(None)

    def say(self, line: str) -> None:
        print(line, flush=True)


def _make_image() -> str:
    """Boot a node, and make an image from its disk; return the image's id."""
    pool = get_pool("spot")
    pool.up()
    pool.want(1, reason="image")
    deadline = time.monotonic() + 600
    while not (nodes := [one for one in pool.nodes() if one.state == "running"]):
        if time.monotonic() > deadline:
            raise TimeoutError("no node is ready after 10 min")
        time.sleep(1)
    image = boto3.Session().client("ec2").create_image(InstanceId=nodes[0].id, Name="etrain")
    pool.down(timeout_s=240.0)
    return str(image["ImageId"])


def _train(surface: cli.Terminal) -> None:
    """Train as the quickstart does, on one node."""
    body = {
        "model": "etrain_jupyter.recipes.probe:Probe",
        "data": {"train": "etrain_jupyter.recipes.probe:samples"},
        "loss": "torch.nn.functional:cross_entropy",
        "batch": {"global": 4},
        "epochs": 3,
        "workers": {"min": 1, "max": 1},
        "pool": "spot",
    }
    job = surface.submit(body)
    if job.wait(600) != "finished":
        raise RuntimeError(f"{job!r} did not finish: {job.reason}")
    get_pool("spot").down(timeout_s=240.0)


def phases_of(text: str) -> dict[str, float]:
    """Return the seconds of each phase in the output of `pools check`.

    >>> phases_of("install                      6.1 s    0.006 cents")
    {'install': 6.1}
    """
    found = re.findall(r"^(.+?) +([\d.]+) s +[\d.]+ cents$", text, re.MULTILINE)
    return {name: float(seconds) for name, seconds in found}


def table_of(result: Mapping[str, Any]) -> str:
    """Return a table of the phases by case, and one of the steps."""
    rounds = result["rounds"]
    names = list(dict.fromkeys(name for case in CASES for name in rounds[0][case]))
    rows = [
        [name, *(_median([one[case].get(name, 0.0) for one in rounds]) for case in CASES)]
        for name in names
    ]
    steps = [
        [
            step["step"],
            _median([one["steps"][number]["seconds"] for one in rounds]),
            str(step["calls"]),
        ]
        for number, step in enumerate(rounds[0]["steps"])
    ]
    return "\n\n".join(
        (
            report.table(["phase, s", *CASES], rows),
            report.table(["step", "seconds", "requests to AWS"], steps),
            f"left behind: {rounds[0]['left'] or 'nothing'}",
        )
    )


def _median(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.1f}"
