"""The pure rules of the fake cloud beside its market: what is charged, what ``shutdown`` means."""

from __future__ import annotations

import pytest

from etrain_jupyter.plugins.ec2.simulator.bill import Usage, make_bill
from etrain_jupyter.plugins.ec2.simulator.hypervisor import parse_shutdown
from etrain_jupyter.plugins.ec2.simulator.market import CapacityPool, Lifecycle, Market
from etrain_jupyter.plugins.ec2.simulator.wire import listed, nested, read_call

POOL = CapacityPool("g5", "us-east-1a")


def usd_of(
    seconds: float | None, *, reason: str, lifecycle: Lifecycle = "spot", now: float = 7200.0
) -> tuple[float, float]:
    """What a machine at 3.6 USD an hour (7.2 on demand) is charged, and what is waived."""
    market = Market()
    market.set_pool(POOL, at=0.0, capacity=1, price_usd=3.6)
    market.set_on_demand("g5", price_usd=7.2)
    usage = Usage(
        instance_id="i-1",
        pool=POOL,
        lifecycle=lifecycle,
        launched_at=0.0,
        ended_at=seconds,
        reason=reason,
    )
    (row,) = make_bill([usage], market, now).rows
    return round(row.compute_usd, 6), round(row.waived_usd, 6)


@pytest.mark.parametrize(
    ("seconds", "reason", "expected"),
    [
        (10.0, "Client.UserInitiatedShutdown", (0.06, 0.0)),  # a minute at least
        (100.0, "Client.UserInitiatedShutdown", (0.1, 0.0)),
        (100.0, "Client.InstanceInitiatedShutdown", (0.1, 0.0)),
        (100.0, "Server.SpotInstanceTermination", (0.0, 0.1)),
        (3599.0, "Server.SpotInstanceShutdown", (0.0, 3.599)),
        (3601.0, "Server.SpotInstanceTermination", (3.601, 0.0)),
        (None, "", (7.2, 0.0)),  # it runs still
    ],
)
def test_spot_machines_are_charged_by_the_second_unless_ec2_took_them_in_an_hour(
    seconds: float | None, reason: str, expected: tuple[float, float]
) -> None:
    assert usd_of(seconds, reason=reason) == expected


def test_on_demand_machines_are_always_charged() -> None:
    assert usd_of(100.0, reason="Server.InternalError", lifecycle="on-demand") == (0.2, 0.0)


def test_disk_is_charged_as_long_as_it_exists() -> None:
    market = Market()
    usage = Usage(
        instance_id="i-1",
        pool=POOL,
        lifecycle="on-demand",
        launched_at=0.0,
        ended_at=60.0,
        disk_gb=730,
    )

    bill = make_bill([usage], market, 3600.0)

    assert bill.usd == pytest.approx(0.08)
    assert bill.num_alive == 0


@pytest.mark.parametrize(
    ("words", "minutes"),
    [("-h now", 0), ("-h +15", 15), ("-P +0", 0), ("--poweroff 3", 3), ("", 1), ("-c", None)],
)
def test_arguments_of_shutdown_are_parsed(words: str, minutes: int | None) -> None:
    assert parse_shutdown(words.split()) == minutes


@pytest.mark.parametrize("words", ["-h soon", "-r now", "-h 23:00"])
def test_other_arguments_of_shutdown_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"shutdown: unsupported option|Failed to parse time"):
        parse_shutdown(words.split())


def test_a_query_becomes_lists_in_the_order_of_their_numbers() -> None:
    body = "&".join(f"Id.{number}=i-{number}" for number in (10, 9, 1)).encode()

    assert nested(body) == {"Id": ["i-1", "i-9", "i-10"]}
    assert listed({"Id": "i-1"}, "Ids", "Id") == ["i-1"]


def test_the_service_and_the_region_are_read_from_the_signature() -> None:
    scope = "AWS4-HMAC-SHA256 Credential=AKIA1/20260101/eu-west-1/ec2/aws4_request, Signature=x"
    environ = {"HTTP_AUTHORIZATION": scope, "REQUEST_METHOD": "POST", "PATH_INFO": "/"}

    call = read_call(environ, b"Action=CreateFleet&Version=2016-11-15")

    assert (call.service, call.region, call.action) == ("ec2", "eu-west-1", "CreateFleet")
    assert call.access_key == "AKIA1"
