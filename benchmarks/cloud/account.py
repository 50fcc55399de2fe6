"""From an empty AWS account to the quickstart's cell on spot machines, and back to nothing.

On the fake cloud, with and without IAM: seconds and requests of ``init``, ``check``, the cell,
``down`` and ``remove``, with the kernel's environment on the nodes. Then ``check`` and the cell's
kernel are killed with SIGKILL at each stage and run again, each time from an empty account.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cloud.empty_account import (
    QUICK,
    Steps,
    User,
    await_deleted_disks,
    quickstart,
    user_of,
    without_packages,
)
from benchmarks.common import report
from etrain_jupyter.plugins.ec2.simulator.cloud import Account, FakeAws
from etrain_jupyter.plugins.ec2.simulator.faults import ApiFault

REACH_S = 300.0
"""Time for a killed command to reach a stage, in seconds."""
NUM_UPLOADED = 20
"""Number of stored wheels at which a command is killed during the upload."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A moment at which a command is killed."""

    name: str
    is_reached: Callable[[User], object]
    delays: Sequence[ApiFault] = ()
    """Slow requests, so that the command is at this stage long enough."""
    boot_s: float = 0.0
    """Time for which a machine is pending, in seconds."""


def _num_fleets(user: User) -> int:
    return user.cloud.calls().get("ec2.CreateFleet", 0)


def _is_ready(user: User) -> bool:
    reports = (user.cloud.s3.read(user.bucket, key) for key in user.keys("etrain/clusters/")
               if "/nodes/" in key)  # fmt: skip
    return any(b'"ready"' in one for one in reports)


def _has_steps(user: User) -> bool:
    logs = Path(os.environ["ETRAIN_RUNS"]).glob("*/events.jsonl")
    return any(one.read_bytes().count(b'"StepCompleted"') >= 3 for one in logs)


UPLOAD = Stage(
    name="upload",
    is_reached=lambda user: len(user.keys("etrain/environments/wheels/")) >= NUM_UPLOADED,
)
BOOTING = Stage(
    name="booting", is_reached=lambda user: user.cloud.instances("pending", "running"), boot_s=5.0
)
SLOW_LAUNCH = (ApiFault(action="CreateFleet", seconds=3.0),)
STAGES: Mapping[str, Sequence[Stage]] = {
    "check": (
        UPLOAD,
        Stage(name="launch", is_reached=_num_fleets, delays=SLOW_LAUNCH),
        BOOTING,
        Stage(name="training", is_reached=_is_ready),
    ),
    "cell": (
        UPLOAD,
        Stage(name="launch", is_reached=_num_fleets, delays=SLOW_LAUNCH),
        BOOTING,
        Stage(name="training", is_reached=_has_steps),
    ),
}
"""Stages by command, in their order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("--rounds", type=int, default=1, help="rounds of both lives (0 for none)")
    parser.add_argument(
        "--kills",
        nargs="*",
        choices=tuple(STAGES),
        default=tuple(STAGES),
        help="commands to kill at each of their stages (default: all; without a name: none)",
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both lives of a pool, and kill its commands."""
    exclude = QUICK if options.quick else ()
    lives = [
        one_life(exclude, enforces=enforces)
        for _ in range(options.rounds)
        for enforces in (False, True)
    ]
    # Without the packages that no node needs: each case uploads the environment again.
    kills = [
        one_kill(command, stage)
        for command in options.kills
        for stage in (STAGES[command][-2:-1] if options.quick else STAGES[command])
    ]
    return {"benchmark": "account", "lives": lives, "kills": kills}


@contextmanager
def opened(*, enforces: bool = True, exclude: Sequence[str] = ()) -> Iterator[User]:
    """Provide a user in a new cloud, whose nodes install the kernel's environment."""
    with (
        tempfile.TemporaryDirectory(prefix="etrain-account-") as folder,
        # Without the path to this package, a node can only import what it has installed.
        FakeAws(minute_s=5.0, variables={"PYTHONPATH": ""}) as cloud,
        user_of(cloud, Path(folder), enforces=enforces) as account,
        closing(User(cloud, account, image=_image(account, exclude))) as user,
    ):
        yield user


def _image(account: Account, exclude: Sequence[str]) -> str:
    return without_packages(account.image, exclude) if exclude else ""


def one_life(exclude: Sequence[str], *, enforces: bool) -> dict[str, Any]:
    """Measure one pool, from an empty account to an empty account."""
    found: dict[str, Any] = {"iam": enforces}
    with opened(enforces=enforces, exclude=exclude) as user:
        steps = Steps(user.cloud, found)
        steps.run("init", user.init)
        user.prepare()
        steps.run("check", lambda: user.etrain("pools", "check", "spot"))
        await_deleted_disks(user.cloud)
        notebook = steps.run("kernel, first cell", user.open_notebook)
        steps.run("cell to its first step", lambda: user.train(notebook, "job.step >= 1"))
        steps.run("cell to its end", lambda: user.finish(notebook))
        found["audit"] = user.show(notebook, "print(job.audit().ok)")
        steps.run("down", user.down)
        steps.run("remove", user.remove)
        found["left"] = str(user.remains())
    return found


def one_kill(command: str, stage: Stage) -> dict[str, Any]:
    """Kill a command at a stage, in an empty account, and run it again."""
    with opened(exclude=QUICK) as user:
        user.init()
        user.prepare()
        found = killed_and_run_again(user, command, stage)
    print(f"account {command} killed at {stage.name}: {found}", flush=True)
    return found


def killed_and_run_again(
    user: User, command: str, stage: Stage, *, finishes: bool = True
) -> dict[str, Any]:
    """Kill ``check`` or the cell's kernel at a stage, and run it again; then remove the pool.

    Args:
        user: A user with a pool on which nothing has run.
        command: ``check`` or ``cell``.
        stage: When to kill it.
        finishes: Wait for the end of the second cell's job, instead of its first step.

    Returns:
        Clusters and machines that were started, what was left after the second run, and what was
        left after the pool was removed.
    """
    user.cloud.set_faults(*stage.delays)
    user.cloud.set_boot(stage.boot_s)
    kill = start_check(user) if command == "check" else start_cell(user)
    user.cloud.wait_until(lambda: stage.is_reached(user), within_s=REACH_S)
    kill()
    user.cloud.set_faults()
    user.cloud.set_boot(0.0)
    started = time.monotonic()
    if command == "check":
        user.etrain("pools", "check", "spot")
    else:
        notebook = user.open_notebook()
        user.train(notebook, "job.step >= 1")
        if finishes:
            user.finish(notebook)
    seconds = time.monotonic() - started
    clusters = {one.tags["etrain:cluster"] for one in user.cloud.instances()}
    num_running = len(user.cloud.instances("pending", "running"))
    user.down()
    second = user.remains()
    orphans = [*second.running, *second.objects]
    orphans += [one for names in second.others.values() for one in names]
    if command == "cell":
        # The cost records of a cluster are kept on purpose.
        orphans = [one for one in orphans if not one.startswith("etrain/ledgers/")]
    user.remove()
    return {
        "command": command,
        "stage": stage.name,
        "again_s": seconds,
        "clusters": len(clusters),
        "machines": len(user.cloud.instances()),
        "running_after": num_running,
        "orphans": orphans,
        "uploads": len(second.uploads),
        "left": str(user.remains()),
    }


def start_check(user: User) -> Callable[[], None]:
    """Start ``check``; return what kills it."""
    child = user.start("pools", "check", "spot")

    def kill() -> None:
        child.send_signal(signal.SIGKILL)
        child.communicate()

    return kill


def start_cell(user: User) -> Callable[[], None]:
    """Start the cell; return what kills its kernel."""
    notebook = user.open_notebook()
    notebook.send(quickstart()[1])
    return notebook.kill


def table_of(result: Mapping[str, Any]) -> str:
    """Return a table of the lives, and one of the killed commands."""
    parts = _parts_of_lives(result["lives"]) if result["lives"] else []
    if result["kills"]:
        parts.append(_table_of_kills(result["kills"]))
    return "\n\n".join(parts)


def _parts_of_lives(lives: Sequence[Mapping[str, Any]]) -> list[str]:
    sides = [[one for one in lives if one["iam"] is enforces] for enforces in (False, True)]
    rows = []
    for number, step in enumerate(sides[0][0]["steps"]):
        row = [step["step"]]
        for side in sides:
            seconds = sorted(one["steps"][number]["seconds"] for one in side)
            one = side[0]["steps"][number]
            by_service = ", ".join(f"{name} {n}" for name, n in sorted(one["services"].items()))
            row += [f"{seconds[len(seconds) // 2]:.1f}", f"{one['calls']} ({by_service})"]
        rows.append(row)
    head = ["step", "seconds", "requests", "with IAM: seconds", "requests"]
    left = [f"left behind, IAM {one['iam']}: {one['left']}" for one in lives]
    return [report.table(head, rows), *left]


def _table_of_kills(kills: Sequence[Mapping[str, Any]]) -> str:
    names = (
        "command",
        "stage",
        "again_s",
        "clusters",
        "machines",
        "running_after",
        "uploads",
        "left",
    )
    rows = [
        [*(f"{one[name]:.1f}" if name == "again_s" else str(one[name]) for name in names),
         str(len(one["orphans"]))]
        for one in kills
    ]  # fmt: skip
    return report.table([*names, "orphans"], rows)
