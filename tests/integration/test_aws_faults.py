"""AWS failures of a spot cluster: reactions of the system and messages for the user."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.client.pool import AwsSpotPool
from etrain_jupyter.plugins.ec2.fleet_launch import create_fleet
from etrain_jupyter.plugins.ec2.simulator import ApiFault, FakeAws
from tests.capabilities import LONG
from tests.integration.aws_head import *  # noqa: F403
from tests.integration.aws_head import PATIENCE_S, make_spec

pytestmark = pytest.mark.aws

LAUNCHING = (
    "DescribeInstanceTypes",
    "DescribeSubnets",
    "CreateSecurityGroup",
    "DescribeImages",
    "CreateLaunchTemplate",
    "DescribeInstances",
    "DescribeSpotPriceHistory",
    "CreateFleet",
)
"""EC2 actions that a launch calls."""


# --- before the launch, in the cell ---


@pytest.mark.parametrize(
    ("fault", "keys", "words"),
    [
        (
            ApiFault(service="", code="AuthFailure"),
            {},
            ("does not accept these credentials", "~/.aws"),
        ),
        (
            ApiFault(service="", code="ExpiredToken"),
            {},
            ("the credentials have expired", "aws sso login"),
        ),
        (
            ApiFault(code="UnauthorizedOperation"),
            {},
            ("AWS does not allow it", "%etrain pools policy"),
        ),
        (
            ApiFault(action="CreateSecurityGroup", code="UnauthorizedOperation"),
            {},
            ("the network of us-east-1", "AWS does not allow it", "%etrain pools policy"),
        ),
        (None, {"image": {"ami": "ami-0123456789abcdef0"}}, ("no such image", "image.ami")),
        (
            None,
            {"image": {"ami": "ssm:/no/such/parameter"}},
            ("ssm:/no/such/parameter", "Correct image.ami"),
        ),
        (None, {"bucket": "no-such-bucket"}, ("no-such-bucket", "Set bucket in pools.yaml")),
        (
            None,
            {"network": {"subnets": ["subnet-0a1b2c3d"]}},
            ("no such subnet", "Correct network.subnets"),
        ),
        (
            None,
            {"endpoint_url": "http://127.0.0.1:9"},
            ("http://127.0.0.1:9", "Nothing was launched"),
        ),
        (None, {"profile": "nobody"}, ("nobody", "Nothing was launched")),
    ],
    ids=[
        "wrong-credentials",
        "expired-credentials",
        "not-allowed",
        "not-allowed-later",
        "no-image",
        "no-parameter",
        "no-bucket",
        "no-subnet",
        "no-endpoint",
        "no-profile",
    ],
)
def test_cell_reports_the_problem_and_nothing_is_left(
    cloud: FakeAws,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: ApiFault | None,
    keys: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path / "state"))
    spec = make_spec(cloud, **keys)
    if fault is not None:
        cloud.set_faults(fault)

    with pytest.raises(PoolError, match="Nothing was launched") as caught:
        AwsSpotPool("spot", spec).up()

    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert cloud.instances() == []
    assert [found for found in (tmp_path / "state").glob("*") if found.is_dir()] == []


# --- during a launch ---


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "Unavailable"])
async def test_errors_of_every_request_only_delay_the_nodes(
    open_head: Any, cloud: FakeAws, code: str
) -> None:
    # After throttling, boto3 slows down all its requests, more with each error.
    count = 1 if code == "RequestLimitExceeded" else 2
    cloud.set_faults(*(ApiFault(action=action, code=code, count=count) for action in LAUNCHING))
    head = await open_head()
    head.nodes.want(2, reason="test")
    await head.until(lambda: len(head.running()) == 2)

    asked = cloud.calls()
    assert [action for action in LAUNCHING if asked[f"ec2.{action}"] <= count] == []
    assert len(head.launched()) == 2
    assert (head.gone, head.halts) == ({}, [])


async def test_long_ec2_outage_keeps_the_nodes_and_warns(open_head: Any, cloud: FakeAws) -> None:
    head = await open_head()
    head.nodes.want(1, reason="test")
    await head.until(head.running)
    cloud.set_faults(ApiFault(code="Unavailable"))
    head.nodes.want(2, reason="test")
    await head.until(lambda: head.warnings)

    assert "EC2 cannot be reached" in head.warnings[0]
    assert "Nodes keep running; the next check retries" in head.warnings[0]
    assert (len(head.living()), head.gone, head.halts) == (1, {}, [])

    cloud.set_faults()
    await head.until(lambda: len(head.running()) == 2)
    assert len(head.launched()) == 2


async def test_long_throttled_launch_warns_and_launches_once(
    open_head: Any, cloud: FakeAws
) -> None:
    head = await open_head()
    cloud.set_faults(ApiFault(action="CreateFleet", code="RequestLimitExceeded"))
    head.nodes.want(2, reason="test")
    await head.until(lambda: head.warnings)

    assert "not answered a request for 2 nodes" in head.warnings[0]
    cloud.set_faults()
    await head.until(lambda: len(head.running()) == 2)
    assert len(head.launched()) == 2


async def test_wake_up_does_not_shorten_the_pauses_between_attempts(
    open_head: Any, cloud: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = await open_head()
    ended_early = []

    def launch_awake(*args: Any, pause: Any, **kwargs: Any) -> Any:
        def pause_awake(seconds: float) -> None:
            head.nodes._reconciler.wake()
            ended_early.append(pause(min(seconds, 0.1)))

        return create_fleet(*args, pause=pause_awake, **kwargs)

    monkeypatch.setattr("etrain_jupyter.plugins.ec2.head.reconciler.create_fleet", launch_awake)
    cloud.set_faults(ApiFault(action="CreateFleet", code="RequestLimitExceeded"))
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.warnings)

    assert ended_early
    assert not any(ended_early)


async def test_new_capacity_is_used(
    open_head: Any, cloud: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etrain_jupyter.plugins.ec2.fleet_state.FIRST_BACK_OFF_S", 0.5)
    cloud.set_capacity(0)
    head = await open_head(capacity={"types": ["g5.xlarge"], "zones": ["us-east-1a"]})
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.warnings)
    cloud.set_capacity(1)
    await head.until(head.running)

    assert len(head.launched()) == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("MaxSpotInstanceCountExceeded", ("quota of spot", "Service Quotas", "L-3819A6DF")),
        ("VcpuLimitExceeded", ("quota of on-demand vCPUs", "Service Quotas")),
        ("UnauthorizedOperation", ("does not allow it", "%etrain pools policy")),
        ("InvalidAMIID.NotFound", ("no such image", "Correct image.ami")),
    ],
)
async def test_refused_launch_warns_with_the_remedy(
    open_head: Any, cloud: FakeAws, code: str, words: tuple[str, ...]
) -> None:
    head = await open_head()
    cloud.set_faults(ApiFault(action="CreateFleet", code=code))
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.warnings)

    for word in (*words, code):
        assert word in head.warnings[0], head.warnings[0]
    assert head.launched() == []


async def test_repeatedly_denied_launches_halt_the_pool(
    open_head: Any, cloud: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etrain_jupyter.plugins.ec2.fleet_state.FIRST_BACK_OFF_S", 0.1)
    head = await open_head()
    cloud.set_faults(ApiFault(action="CreateFleet", code="UnauthorizedOperation"))
    head.nodes.want(1, reason="test")
    await head.until(lambda: head.halts)

    assert "refused 3 launches in a row. No more nodes are launched." in head.halts[0]
    assert "%etrain pools policy" in head.halts[0]
    assert cloud.calls()["ec2.CreateFleet"] == 3


# --- while nodes run ---


async def test_expired_credentials_warn_and_renewed_ones_are_reloaded(
    open_head: Any, cloud: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "aws_credentials"  # the file that the fixture sets for boto3
    keys = "[default]\naws_access_key_id = {}\naws_secret_access_key = testing\n"
    file.write_text(keys.format("AKIAOLD"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    head = await open_head()
    head.nodes.want(1, reason="test")
    await head.until(head.running)

    cloud.set_faults(ApiFault(service="", code="ExpiredToken", match="AKIAOLD"))
    await head.until(lambda: any("credentials have expired" in text for text in head.warnings))
    told = next(text for text in head.warnings if "credentials have expired" in text)
    assert "Nodes keep running, but not for long" in told
    assert "8 s after the last renewal they turn themselves off" in told
    assert "aws sso login" in told
    assert (len(head.living()), head.gone, head.halts) == (1, {}, [])

    file.write_text(keys.format("AKIANEW"))
    renewals = head.nodes._reconciler._renewals
    head.nodes.want(2, reason="test")
    await head.until(lambda: len(head.running()) == 2)
    await head.until(lambda: head.nodes._reconciler._renewals > renewals + 1)
    assert any("EC2 answers again" in text for text in head.warnings)
    assert head.gone == {}


@pytest.mark.parametrize("skew_s", [pytest.param(600, marks=LONG), -600])
async def test_clock_skew_of_ten_minutes_neither_ends_nor_extends_the_lease(
    open_head: Any, cloud: FakeAws, skew_s: float
) -> None:
    cloud.set_clock_skew(skew_s)
    head = await open_head(image={"ami": cloud.make_account().image, "python": sys.executable})
    head.nodes.want(1, reason="test")
    await head.until(head.running)
    (node,) = head.launched()
    await asyncio.to_thread(
        cloud.wait_until, lambda: "the scheduler is at" in cloud.console(node), within_s=PATIENCE_S
    )
    renewals = head.nodes._reconciler._renewals
    # The head renews the lease four times per lease duration.
    await head.until(lambda: head.nodes._reconciler._renewals >= renewals + 5)
    assert head.living() == [node]

    await asyncio.to_thread(head.nodes._reconciler.stop)
    await asyncio.to_thread(cloud.wait_until, lambda: not head.living(), within_s=PATIENCE_S)
    assert "the lease is" in cloud.console(node)
