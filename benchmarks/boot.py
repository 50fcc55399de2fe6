"""Boot of a node to its first step, with the kernel's environment: cold, cached, from a snapshot.

Each case is one run of `etrain pools check` on the fake cloud, with IAM enforced:

- cold: nothing is in the bucket. This machine makes the wheels of its own environment and uploads
  them, and the node installs them;
- cached: the bucket has all wheels, and the node starts with an empty disk;
- snapshot: the node's image was made from a node with this environment.

It also measures a whole life of a pool in an empty account: init, check, a cell, remove.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3

from benchmarks import report
from etrain_jupyter import cli
from etrain_jupyter.notebook.commands import pool_accounts
from etrain_jupyter.pools.ec2.environment.packages import read_packages, without
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.testing.fakeaws.cloud import Account, FakeAws

TYPE = "m5.large"
CASES = ("cold", "cached", "snapshot")
QUICK = (
    "jupyter*", "playwright", "pyarrow", "transformers", "scikit-learn", "pandas", "mlflow*",
    "moto", "cfn-lint", "mkdocs*", "wandb", "mypy", "ruff", "tensorboard", "matplotlib",
)  # fmt: skip
"""Packages that the quick run leaves out: a training job needs none of them."""
ADMIN = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["*"], "Resource": ["*"]}],
}


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
        _user_of(cloud, Path(folder)) as account,
    ):
        steps = _Steps(cloud, found)
        surface = _Quiet()
        flags = ["--region", account.region, "--types", TYPE, "--ami", account.image, "--yes"]
        steps.run("init", lambda: cli.main(["pools", "init", "spot", *flags]))
        with Path("pools.yaml").open("a") as stream:
            stream.write(
                f"  head_host: {cloud.host_address}\n  tick: 1 s\n"
                "  lifetime: {lease_ttl: 60 s, linger: 1 s, boot: 60 min}\n"
            )
        _set_image(account.image, exclude)
        for case in CASES:
            if case == "snapshot":
                _set_image(steps.run("make the image", _make_image), exclude)
            text = steps.run(f"check, {case}", lambda: pool_accounts.check(surface, "spot"))
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


class _Steps:
    def __init__(self, cloud: FakeAws, found: dict[str, Any]) -> None:
        self._cloud = cloud
        self._steps: list[dict[str, Any]] = found.setdefault("steps", [])

    def run(self, name: str, act: Callable[[], Any]) -> Any:
        """Run a step; record its seconds and its requests to AWS."""
        self._cloud.set_faults()  # resets the counters
        started = time.monotonic()
        result = act()
        seconds, calls = time.monotonic() - started, sum(self._cloud.calls().values())
        self._steps.append({"step": name, "seconds": seconds, "calls": calls})
        print(f"boot {name}: {seconds:.1f} s, {calls} requests", flush=True)
        return result


@contextlib.contextmanager
def _user_of(cloud: FakeAws, folder: Path) -> Iterator[Account]:
    """Become the administrator of an account with an image and a market."""
    spot = {"instance_type": TYPE, "zone": "us-east-1a", "capacity": 4, "price_usd": 0.036}
    cloud.set_market([spot], [{"instance_type": TYPE, "price_usd": 0.1}])
    account = cloud.make_account()
    before, place = dict(os.environ), Path.cwd()
    for name in [name for name in os.environ if name.startswith(("AWS_", "ETRAIN_"))]:
        del os.environ[name]
    os.environ.update(cloud.environment, **cloud.make_user("admin", ADMIN))
    for name in ("ETRAIN_STATE", "ETRAIN_RUNS"):
        os.environ[name] = str(folder / name.lower())
    os.environ["ETRAIN_POOLS"] = str(folder / "pools.yaml")
    os.chdir(folder)
    cloud.enforce_iam()
    try:
        yield account
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)


def _set_image(image: str, exclude: tuple[str, ...]) -> None:
    """Change the pool's image in pools.yaml."""
    file = Path("pools.yaml")
    lines = [line for line in file.read_text().splitlines() if not line.startswith("  image:")]
    names = ", ".join(f"'{name}'" for name in exclude)
    lines.append(f"  image: {{ami: {image}, environment: {{exclude: [{names}]}}}}")
    file.write_text("\n".join(lines) + "\n")


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
