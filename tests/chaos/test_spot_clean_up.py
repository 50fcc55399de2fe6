"""Nothing keeps running on EC2: test each safeguard alone, with all others disabled.

The safeguards are ``down``, the lease that nodes check, the timers of the operating system and of
the agent, and ``reap`` by tag. A safeguard is disabled by not calling it or by setting it to hours.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import etrain_jupyter
from etrain_jupyter.plugins.ec2.simulator import ApiFault
from etrain_jupyter.testing.s3_faults import S3Fault
from tests.capabilities import LONG, long
from tests.chaos.spot import Spot

pytestmark = [pytest.mark.aws, pytest.mark.timeout(240)]

NEVER = {"lease_ttl": "10 h", "max": "20 h", "boot": "600 min"}
"""Settings under which no lease expires and no timer fires."""
MACHINES = ("instances", "volumes", "processes", "cables")


def hold(spot: Spot, workers: int = 1) -> list[str]:
    """Start machines with connected workers, without a job; return their ids."""
    spot.pool().up()
    spot.pool().want(workers, reason="test")
    return await_workers(spot, workers)


def await_workers(spot: Spot, workers: int) -> list[str]:
    """Wait until that many workers are connected; return their machines."""

    def serving() -> list[str]:
        return [node.id for node in spot.pool().nodes() if node.state == "running"]

    spot.until(lambda: len(serving()) == workers, f"{workers} workers")
    return serving()


def await_end(spot: Spot) -> float:
    """Wait until all machines and their resources are gone; return the elapsed seconds."""
    began = time.time()
    spot.until(lambda: not spot.living(), "the machines' end")
    spot.until(lambda: not set(spot.cloud.leftovers()) & set(MACHINES), "the end of what they had")
    return max(one.ended_at or 0.0 for one in spot.cloud.instances()) - began


def elsewhere(spot: Spot, folder: Path) -> dict[str, str]:
    """Return the environment of a process that has credentials but no state of this user."""
    folder.mkdir()
    empty = {"HOME": str(folder), "ETRAIN_STATE": str(folder / "state")}
    return empty | {"ETRAIN_POOLS": str(folder / "no-pools.yaml")} | spot.cloud.environment


def test_down_by_cluster_id_from_another_process_removes_everything(
    spot: Spot, tmp_path: Path
) -> None:
    spot.configure(lifetime=NEVER)
    hold(spot)
    [cluster] = spot.ids()
    # The process has the user's state folder but no pools.yaml.
    (tmp_path / "away").mkdir()
    gone = {"ETRAIN_POOLS": str(tmp_path / "away" / "none.yaml")}
    told = spot.run("down", cluster, environment=gone, cwd=tmp_path / "away")

    assert told.strip() == f"{cluster} has ended"
    assert spot.cloud.leftovers() == {}
    assert spot.ids() == []
    spot.check_costs()


@pytest.mark.parametrize("how", [pytest.param("killed", marks=LONG), "frozen"])
def test_lease_alone_terminates_machines_without_a_head(spot: Spot, how: str) -> None:
    spot.configure(lifetime={**NEVER, "lease_ttl": "6 s"})
    hold(spot)
    [cluster] = spot.ids()
    heads = spot.heads_of(cluster)
    if how == "killed":
        spot.kill_heads()
    else:  # as if its machine had lost power: connections stay open without a reply
        for pid in heads:
            os.kill(pid, signal.SIGSTOP)
    spot.figures[f"head {how} to all machines off"] = await_end(spot)

    [one] = spot.cloud.instances()
    assert "lease" in spot.cloud.console(one.instance_id).split("turning off:")[1].splitlines()[0]
    if how == "frozen":
        for pid in heads:
            os.kill(pid, signal.SIGKILL)


@long
def test_lease_alone_terminates_machines_that_train(spot: Spot) -> None:
    spot.configure(lifetime={**NEVER, "lease_ttl": "8 s"})
    job = spot.train()
    spot.kill_heads()
    spot.figures["head killed to all machines off"] = await_end(spot)

    # A later kernel attaches, and the job resumes from its checkpoint on new machines.
    spot.pool().up()
    again = etrain_jupyter.attach(job.id)
    spot.jobs = [again]
    step = again.step
    spot.until(lambda: again.world_size == 2 and again.step > step, "steps", again)
    assert len(spot.cloud.instances()) == 4
    spot.finish()


@long
def test_boot_timer_alone_terminates_a_machine_whose_agent_never_starts(spot: Spot) -> None:
    spot.configure(image={"setup": ["sleep 3600"]}, lifetime={**NEVER, "boot": "10 min"})
    spot.pool().up()
    spot.pool().want(1, reason="test")
    spot.until(lambda: spot.cloud.instances("running"), "a machine")
    spot.kill_heads()
    spot.figures["boot timer of 10 min, at 1 s each"] = await_end(spot)

    assert "turning off" not in spot.cloud.console(spot.cloud.instances()[0].instance_id)
    assert len(spot.cloud.instances()) == 1


@long
def test_lifetime_timer_alone_terminates_a_machine_that_cannot_read_its_lease(
    spot: Spot,
) -> None:
    """The agent's clock is not accelerated, so the system's timer terminates the machine."""
    spot.configure(lifetime={**NEVER, "max": "15 min"})
    hold(spot)
    spot.until(lambda: spot.cloud.instances()[0].off_at, "the agent's timer")
    spot.cloud.set_faults(S3Fault(kind="slow_down", match="lease.json"))
    spot.kill_heads()
    await_end(spot)

    [one] = spot.cloud.instances()
    assert "turning off" not in spot.cloud.console(one.instance_id)


def test_reap_by_tag_alone_removes_an_expired_cluster(spot: Spot, tmp_path: Path) -> None:
    spot.configure(lifetime=NEVER)
    hold(spot)
    [cluster] = spot.ids()
    spot.kill_heads()
    away = tmp_path / "away"
    variables = elsewhere(spot, away)
    look = ["reap", "--region", spot.account.region]
    told = spot.run(*look, environment=variables, cwd=away)

    assert f"kept, not expired: {cluster}" in told
    assert len(spot.living()) == 1
    told = spot.run(*look, environment=variables, cwd=away, days_later=2)
    assert told.strip() == f"{cluster} has ended"
    assert spot.cloud.leftovers() == {}


# --- processes killed at each stage of a launch ---

KERNEL = """
from etrain_jupyter.pools import get_pool
pool = get_pool("spot")
pool.up()
pool.want(2, reason="test")
"""


def reach(spot: Spot, stage: str) -> None:
    """Start two machines from a kernel, and return when the launch has reached a stage."""
    cloud = spot.cloud
    if stage == "before the template":
        cloud.set_faults(ApiFault(action="CreateLaunchTemplate", seconds=4.0))
    elif stage == "after the template":
        cloud.set_faults(ApiFault(action="CreateFleet", seconds=4.0))
    elif stage == "fleet acknowledged":
        cloud.set_lag(6)
        cloud.set_boot(2)
    elif stage == "answer lost":
        cloud.set_faults(ApiFault(action="CreateFleet", is_answer_lost=True))
    elif stage == "nodes boot":
        cloud.set_boot(4)
    else:
        cloud.set_faults()
    spot.open_kernel(KERNEL)
    if stage == "before the template":
        spot.until(lambda: cloud.calls().get("ec2.CreateLaunchTemplate"), stage)
    elif stage == "after the template":
        spot.until(lambda: cloud.calls().get("ec2.CreateFleet"), stage)
    elif stage == "after hello":
        spot.until(lambda: len(cloud.instances("running")) == 2, stage)
        await_workers(spot, 2)
    else:
        spot.until(lambda: len(cloud.instances()) == 2, stage)


STAGES = (
    "before the template",
    "after the template",
    "fleet acknowledged",
    "answer lost",
    "nodes boot",
    "after hello",
)


def stages(*always: str) -> list[object]:
    """Return all stages as parameters; those not in ``always`` run in ``make endurance`` only."""
    return [pytest.param(one, marks=() if one in always else LONG) for one in STAGES]


def kill_all(spot: Spot) -> None:
    """Kill the kernel and the head at once."""
    spot.kill_kernels()
    spot.kill_heads()


@pytest.mark.parametrize("stage", stages("fleet acknowledged"))
@long
def test_next_up_adopts_the_machines_of_a_head_and_kernel_killed_during_launch(
    spot: Spot, stage: str
) -> None:
    spot.configure(lifetime=NEVER)
    reach(spot, stage)
    kill_all(spot)
    before = {one.instance_id for one in spot.living()}
    spot.cloud.set_faults()
    workers = hold(spot, 2)

    # Existing machines are adopted; none is launched twice.
    assert before <= set(workers) or stage == "before the template"
    assert {one.instance_id for one in spot.living()} == set(workers)
    assert len(spot.cloud.instances()) == 2
    spot.settle()


@pytest.mark.parametrize("stage", stages())
def test_reap_finds_everything_of_a_head_and_kernel_killed_during_launch(
    spot: Spot, stage: str, tmp_path: Path
) -> None:
    spot.configure(lifetime=NEVER)
    reach(spot, stage)
    kill_all(spot)
    spot.cloud.set_faults()
    spot.cloud.set_lag(0)
    away = tmp_path / "away"
    variables = elsewhere(spot, away)
    if stage in ("before the template", "after the template"):
        time.sleep(5.0)  # the cloud executes the request that was sent before the kill
    spot.run("reap", "--region", spot.account.region, "--all", environment=variables, cwd=away)

    left = spot.cloud.leftovers()
    assert set(left) <= {"objects"}
    # If nothing was tagged, only the user's folder has a reference to its objects.
    assert not left or stage == "before the template"
    spot.end_clusters()
    assert spot.cloud.leftovers() == {}


@pytest.mark.parametrize("stage", stages()[:3])
@long
def test_head_continues_when_only_the_kernel_is_killed_during_launch(
    spot: Spot, stage: str
) -> None:
    spot.configure(lifetime=NEVER)
    reach(spot, stage)
    spot.kill_kernels()
    workers = hold(spot, 2)

    assert len(spot.cloud.instances()) == 2
    assert len(workers) == 2
    assert len(spot.ids()) == 1
    spot.settle()
