"""Control plane of ``aws-spot`` on the fake cloud, with simulated worker connections."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.head.coordinator.nodes import JobProgress
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.simulator import ApiFault, FakeAws
from etrain_jupyter.process.cluster_dir import ClusterDir
from etrain_jupyter.process.cluster_settings import ClusterSettings
from etrain_jupyter.process.tls import mint_certificates, write_certificates
from tests.integration.aws_head import *  # noqa: F403
from tests.integration.aws_head import make_head, make_spec

pytestmark = pytest.mark.aws


async def test_lagging_api_lists_launch_no_machine_twice(open_head: Any, cloud: FakeAws) -> None:
    cloud.set_lag(6)
    head = await open_head()
    head.nodes.want(2, reason="test")
    await head.until(lambda: len(head.running()) == 2)

    assert len(head.launched()) == 2
    assert cloud.calls()["ec2.CreateFleet"] == 1


async def test_throttling_and_lost_replies_launch_no_machine_twice(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head()
    cloud.set_faults(
        ApiFault(action="CreateFleet", code="RequestLimitExceeded", count=2),
        ApiFault(action="CreateFleet", is_answer_lost=True, skip=2, count=1),
        ApiFault(action="DescribeInstances", code="InternalError", skip=3, count=1),
    )
    head.nodes.want(2, reason="test")
    await head.until(lambda: len(head.running()) == 2)

    assert len(head.launched()) == 2


async def test_without_capacity_the_pool_warns_waits_and_then_launches_on_demand(
    open_head: Any, cloud: FakeAws
) -> None:
    cloud.set_capacity(0)
    keys = {"types": ["g5.xlarge"], "on_demand": {"after": "1 s", "max": 1}}
    head = await open_head(capacity=keys)
    head.nodes.want(2, reason="test")
    await head.until(head.running)
    # On a busy machine, the 1 s can pass before the first reply; then the warning comes later.
    await head.until(lambda: any("EC2 has no capacity for" in text for text in head.warnings))

    (node,) = head.nodes.nodes()
    assert (node["lifecycle"], node["price_usd_per_h"]) == ("on-demand", 1.006)
    told = " ".join(head.warnings)
    assert "At most 1 are launched on demand after 1 s without capacity" in told
    assert "requesting 1 node of g5.xlarge on demand, at the full price" in told


async def test_deadline_policy_starts_a_job_on_demand_and_then_replaces_it_by_spot(
    open_head: Any, cloud: FakeAws
) -> None:
    cloud.set_capacity(0)
    deadline = {"policy": "deadline", "finish_by": "1 h", "on_demand": {"after": "1 s"}}
    head = await open_head(capacity={"types": ["g5.xlarge"], **deadline})
    waiting = JobProgress(
        job_id="digits-1",
        attempt_at=time.time() - 60,
        first_step=0,
        step=0,
        total_steps=0,
        num_workers=0,
        min_workers=1,
        max_workers=2,
    )
    head.jobs = [waiting]
    head.nodes.want(2, reason="test")
    await head.until(head.running)
    (first,) = head.running()
    (node,) = head.nodes.nodes()
    assert node["lifecycle"] == "on-demand"

    # The job has ended, another one can use spot machines, and the first machine is in use.
    head.busy.add(first)
    head.jobs = []
    cloud.set_capacity(2)
    await head.until(lambda: first in head.gone)
    await head.until(lambda: len(head.running()) == 2)
    assert {node["lifecycle"] for node in head.nodes.nodes()} == {"spot"}


async def test_nodes_that_never_boot_halt_the_launches(open_head: Any, cloud: FakeAws) -> None:
    account = cloud.make_account()
    broken = {"ami": account.image, "setup": ["echo no such driver", "shutdown -h now"]}
    head = await open_head(image=broken)
    head.is_serving = False
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.halts)

    assert "3 nodes in a row never connected" in head.halts[0]
    assert "no such driver" in head.halts[0]
    assert len(head.launched()) == 3


async def test_dead_machine_is_reported_immediately_and_replaced(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head()
    head.nodes.want(2, reason="test")
    await head.until(lambda: len(head.running()) == 2)
    (first, second) = head.running()
    cloud.preempt(first, silent=True)
    await head.until(lambda: first in head.gone)

    assert "EC2 reclaimed the spot machine" in head.gone[first]
    await head.until(lambda: len(head.running()) == 2)
    assert second in head.running()
    costs = {cost.node_id: cost for cost in head.nodes.costs()}
    assert (costs[first].spent_usd < 0.001, costs[first].is_alive) == (True, False)
    assert costs[second].on_demand_usd > costs[second].spent_usd > 0.0


async def test_noticed_machine_is_replaced_beyond_max_and_left_to_ec2(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head(workers={"max": 2})
    head.nodes.want(5, reason="test")
    await head.until(lambda: len(head.running()) == 2)
    old = head.running()[0]
    deadline = cloud.instances()[0].launched_at + 1000
    head.nodes.note_notice(old, kind="interruption", deadline=deadline)
    await head.until(lambda: len(head.running()) == 3)
    cloud.set_faults()  # resets the call counts
    head.nodes.release(old, drain_s=0.0)
    await head.until(lambda: cloud.calls().get("ec2.DescribeInstances", 0) >= 5)
    assert len(head.living()) == 3
    cloud.preempt(old, silent=True)
    await head.until(lambda: old in head.gone)

    assert "EC2 reclaimed the spot machine" in head.gone[old]
    assert len(head.living()) == 2
    cost = next(cost for cost in head.nodes.costs() if cost.node_id == old)
    assert cost.spent_usd < 0.001


async def test_noticed_machine_with_first_hour_power_off_is_terminated(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head(interruption={"drain": "1 s", "first_hour": "power-off"})
    head.nodes.want(1, reason="test")
    await head.until(head.running)
    (old,) = head.running()
    head.nodes.note_notice(
        old, kind="interruption", deadline=cloud.instances()[0].launched_at + 1000
    )
    head.nodes.release(old, drain_s=1.0)
    await head.until(lambda: old in head.gone)

    assert head.gone[old] == "released"


async def test_node_that_refuses_to_join_is_terminated_with_its_reason(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head(lifetime={"max_boot_failures": 2, "linger": "0.2 s"})
    head.is_serving = False
    head.nodes.want(1, reason="test")
    bucket = Clients(make_spec(cloud)).bucket
    home = f"clusters/{head.nodes._dir.cluster_id}/nodes"
    refused: set[str] = set()

    def refuse() -> bool:
        for one in set(head.living()) - refused:
            report = json.dumps({"state": "refused", "error": "torch 2.6 there, 2.7 here"})
            bucket.put(f"{home}/{one}.json", report.encode(), "test")
            refused.add(one)
        return bool(head.halts)

    await head.until(refuse)

    assert "torch 2.6 there, 2.7 here" in head.warnings[0]
    assert "2 nodes in a row never connected" in head.halts[0]
    assert len(head.launched()) == 2
    await head.until(lambda: not head.living())


async def test_prices_above_max_hourly_give_the_jobs_a_notice(
    open_head: Any, cloud: FakeAws
) -> None:
    cloud.set_price(0.5)
    keys = {"max_hourly": 1.1}
    head = await open_head(budget=keys, lifetime={"lease_ttl": "8 s", "linger": "0.2 s"})
    head.nodes.want(4, reason="test")
    await head.until(lambda: len(head.running()) == 2)
    head.busy = set(head.running())
    thread = head.nodes._reconciler
    assert thread is not None
    cloud.set_price(0.8)
    thread._accounts.prices.fetched_at = 1.0  # as if the prices were stale
    await head.until(lambda: len(head.gone) == 1)

    assert set(head.gone) == set(head.notices)
    assert len(head.launched()) == 2
    assert any("prices have risen" in text for text in head.warnings)


async def test_lease_is_renewed_and_contains_the_scheduler_address(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head(lifetime={"lease_ttl": "2 s"})
    bucket = Clients(make_spec(cloud)).bucket
    key = f"clusters/{head.nodes._dir.cluster_id}/lease.json"

    def lease() -> dict[str, Any]:
        lease_record: dict[str, Any] = json.loads(bucket.get(key, "test") or b"{}")
        return lease_record

    await head.until(lambda: lease()["renewals"] >= 3)

    assert lease()["num_lives"] == 1
    assert lease()["scheduler"] == "tls://127.0.0.1:1"


async def test_released_and_surplus_machines_terminate_when_no_job_uses_them(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head()
    head.nodes.want(3, reason="test")
    await head.until(lambda: len(head.running()) == 3)
    one, two, three = head.running()
    head.busy = {one, two}
    head.nodes.want(2, reason="test")
    await head.until(lambda: set(head.living()) == {one, two})
    head.nodes.release(one, drain_s=1000.0)
    await head.until(lambda: len(head.living()) == 3)  # the replacement joins before the release
    assert one in head.living()
    head.busy = {two}
    await head.until(lambda: {one, three} <= set(head.gone))

    assert head.gone[three] == head.gone[one] == "released"
    head.nodes.kill(two)
    await head.until(lambda: two in head.gone)


@pytest.mark.timeout(
    240
)  # each machine is charged for a minute first, so the cost grows only after that
async def test_budget_is_not_exceeded_and_terminates_the_machines(
    open_head: Any, cloud: FakeAws, cluster_dir: ClusterDir
) -> None:
    cloud.set_price(36.0)
    # Each machine costs at least $0.60, the charge for one minute.
    head = await open_head(budget={"max_total": 1.25})
    head.nodes.want(4, reason="test")
    await head.until(lambda: head.halts)
    await head.until(lambda: not head.living())

    assert "budget.max_total=1.25" in head.halts[0]
    assert len(head.launched()) == 2
    assert cloud.bill().usd <= 1.25


async def test_next_head_adopts_the_machines_of_a_killed_head(
    open_head: Any, cloud: FakeAws, cluster_dir: ClusterDir
) -> None:
    first = await open_head()
    first.nodes.want(2, reason="test")
    await first.until(lambda: len(first.running()) == 2)
    old = first.running()
    await asyncio.to_thread(first.nodes._reconciler.stop)  # without clean-up, like SIGKILL
    second = await open_head()
    second.nodes.want(2, reason="test")
    await second.until(lambda: second.running() == old)
    second.nodes.want(3, reason="test")
    await second.until(lambda: len(second.running()) == 3)

    assert len(second.launched()) == 3
    assert {cost.node_id for cost in second.nodes.costs()} >= set(old)
    bucket = Clients(make_spec(cloud)).bucket
    home = f"clusters/{cluster_dir.cluster_id}"
    lease = json.loads(bucket.get(f"{home}/lease.json", "test") or b"")
    assert (lease["num_lives"], lease["scheduler"]) == (2, "tls://127.0.0.1:1")


async def test_two_clusters_do_not_affect_each_other(
    open_head: Any, cloud: FakeAws, tmp_path: Path
) -> None:
    one = await open_head()
    (tmp_path / "other").mkdir()
    other_dir = ClusterDir.create(tmp_path / "other", ClusterSettings())
    write_certificates(other_dir.tls, mint_certificates(other_dir.cluster_id))
    two = make_head(cloud, other_dir, make_spec(cloud))
    await two.nodes.start("tls://127.0.0.1:2")
    for head in (one, two):
        head.nodes.want(1, reason="test")
    await one.until(one.running)
    await two.until(two.running)
    await two.nodes.close(grace_s=0.0)

    assert one.living() == one.running()
    assert cloud.leftovers(other_dir.cluster_id) == {}


async def test_ledger_equals_the_bill_and_outlives_the_cluster(
    cloud: FakeAws, cluster_dir: ClusterDir
) -> None:
    spec = make_spec(cloud)
    head = make_head(cloud, cluster_dir, spec)
    await head.nodes.start("tls://127.0.0.1:1")
    head.nodes.want(2, reason="test")
    await head.until(lambda: len(head.running()) == 2)
    cloud.preempt(head.running()[0], silent=True)
    await head.until(lambda: len(head.gone) == 1)
    await head.until(lambda: len(head.running()) == 2)
    await head.nodes.close(grace_s=0.0)

    bill = cloud.bill()
    kept = Clients(spec).bucket.get(f"ledgers/{cluster_dir.cluster_id}.json", "test")
    ledger = json.loads(kept or b"")
    assert {row["id"] for row in ledger["rows"]} == {row.instance_id for row in bill.rows}
    assert all(row["ended_at"] for row in ledger["rows"])
    assert ledger["spent_usd"] - ledger["volumes_usd"] == pytest.approx(bill.compute_usd, rel=0.05)
    assert ledger["waived_usd"] > 0
    # The head's final costs are the same.
    assert sum(cost.spent_usd for cost in head.nodes.costs()) == pytest.approx(ledger["spent_usd"])
    assert not any(cost.is_alive for cost in head.nodes.costs())


async def test_missing_instance_profile_warns_with_the_remedy(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head()
    cloud.set_faults(ApiFault(action="CreateFleet", code="InvalidIamInstanceProfileName.NotFound"))
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.warnings)

    assert "Create it with the policy that `%etrain pools policy` prints" in head.warnings[0]
    assert head.launched() == []
