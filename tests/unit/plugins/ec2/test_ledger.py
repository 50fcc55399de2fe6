"""Money: the integral of the price, a minute at least, the first hour, disks."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.ec2.ledger import (
    Charge,
    Ledger,
    PriceBook,
    Row,
    charge_of,
)

T = 1_800_000_000.0
POOL = ("g5.xlarge", "us-east-1a")
BOOK = PriceBook(
    spot={POOL: [(T - 9000, 0.36), (T + 1800, 0.72)]}, on_demand={"g5.xlarge": 1.0, "t3.small": 0.1}
)
ROW = Row(id="i-1", type=POOL[0], zone=POOL[1], lifecycle="spot", launched_at=T)
TAKEN = "Server.SpotInstanceTermination"


def test_price_in_force_is_charged_by_the_second() -> None:
    charge = charge_of(ROW, BOOK, T + 3600)

    assert charge.spent == pytest.approx(0.18 + 0.36)
    assert charge.on_demand == pytest.approx(1.0)
    assert charge.saved == pytest.approx(0.46)
    assert charge.hours == 1.0


def test_minimum_charge_is_one_minute() -> None:
    ended = dataclasses.replace(ROW, ended_at=T + 1)

    assert charge_of(ended, BOOK, T + 9999).spent == pytest.approx(60 / 3600 * 0.36)


@pytest.mark.parametrize(
    ("lifecycle", "seconds", "reason", "is_free"),
    [
        ("spot", 3599, TAKEN, True),
        ("spot", 3599, "Server.SpotInstanceShutdown", True),
        ("spot", 3600, TAKEN, False),
        ("spot", 600, "Client.InstanceInitiatedShutdown", False),
        ("spot", 600, "Client.UserInitiatedShutdown", False),
        ("on-demand", 600, TAKEN, False),
    ],
)
def test_only_machines_reclaimed_by_ec2_in_the_first_hour_are_free(
    lifecycle: str, seconds: float, reason: str, is_free: bool
) -> None:
    row = dataclasses.replace(ROW, lifecycle=lifecycle, ended_at=T + seconds, reason=reason)

    charge = charge_of(row, BOOK, T + 9999)

    assert (charge.spent == 0.0) == is_free
    assert (charge.waived > 0.0) == is_free


def test_on_demand_is_charged_at_its_rate_and_saves_nothing() -> None:
    row = dataclasses.replace(ROW, lifecycle="on-demand")

    charge = charge_of(row, BOOK, T + 7200)

    assert (charge.spent, charge.saved) == (pytest.approx(2.0), 0.0)


def test_disk_is_charged_although_the_machine_is_free() -> None:
    row = dataclasses.replace(ROW, ended_at=T + 1800, reason=TAKEN, volume_gib=100)

    charge = charge_of(row, BOOK, T + 9999)

    assert charge.spent == charge.volume == pytest.approx(100 * 0.08 / 730 * 0.5)
    assert charge.waived == pytest.approx(0.18)


def test_unknown_spot_price_is_bounded_by_the_full_price() -> None:
    elsewhere = dataclasses.replace(ROW, zone="us-east-1f")

    assert charge_of(elsewhere, BOOK, T + 3600).spent == pytest.approx(1.0)


def test_missing_price_is_marked_as_unknown() -> None:
    strange = dataclasses.replace(ROW, type="x9.huge")

    assert charge_of(strange, BOOK, T + 3600) == Charge(hours=1.0, is_known=False)
    assert not Ledger().with_rows([ROW, strange]).total(BOOK, T + 3600).is_known


def test_rate_counts_only_running_machines() -> None:
    ended = dataclasses.replace(ROW, id="i-2", ended_at=T + 5)
    head = Row(id="i-3", type="t3.small", zone="z", lifecycle="on-demand", launched_at=T)

    ledger = Ledger().with_rows([ROW, ended, head])

    assert ledger.rate(BOOK, T + 10) == pytest.approx(0.36 + 0.1)
    assert ledger.rate(BOOK, T + 1801) == pytest.approx(0.72 + 0.1)


def test_budgets_count_the_whole_first_minute_of_machines_that_run() -> None:
    ledger = Ledger().with_rows([ROW])

    assert ledger.total(BOOK, T + 6).spent == pytest.approx(0.36 * 6 / 3600)
    assert ledger.committed(BOOK, T + 6) == pytest.approx(0.36 * 60 / 3600)
    assert ledger.committed(BOOK, T + 600) == pytest.approx(ledger.total(BOOK, T + 600).spent)


def test_end_time_is_kept_when_a_late_listing_shows_the_machine() -> None:
    ended = dataclasses.replace(ROW, ended_at=T + 50)
    with_reason = dataclasses.replace(ROW, ended_at=T + 90, reason=TAKEN)

    ledger = Ledger().with_rows([ended]).with_rows([ROW]).with_rows([with_reason])

    assert ledger.rows["i-1"] == dataclasses.replace(ended, reason=TAKEN)


seconds = st.floats(0, 200_000)
prices = st.lists(
    st.tuples(st.floats(-50_000, 200_000), st.floats(0.01, 50)), min_size=1, max_size=8
).map(lambda points: [(T + at, usd) for at, usd in sorted(points)])
rows = st.builds(
    Row,
    id=st.sampled_from(["i-1", "i-2", "i-3"]),
    type=st.just(POOL[0]),
    zone=st.just(POOL[1]),
    lifecycle=st.sampled_from(["spot", "on-demand"]),
    launched_at=seconds.map(lambda s: T + s),
    ended_at=st.none() | seconds.map(lambda s: T + 200_000 + s),
    reason=st.sampled_from(["", TAKEN, "Client.UserInitiatedShutdown"]),
    volume_gib=st.floats(0, 500),
)


@given(row=rows, points=prices, now=seconds)
def test_cost_of_a_machine_is_between_the_lowest_and_the_highest_price(
    row: Row, points: list[tuple[float, float]], now: float
) -> None:
    book = PriceBook(spot={POOL: points}, on_demand={POOL[0]: 60.0})
    charge = charge_of(row, book, T + now)
    end = max(row.launched_at, row.ended_at if row.ended_at is not None else T + now)
    least = 0.0 if row.ended_at is None else 60.0  # EC2 charges a minute of what ends before
    hours = max(least, end - row.launched_at) / 3600
    usd = [60.0] if row.lifecycle == "on-demand" else [usd for _, usd in points]

    assert min(usd) * hours <= charge.spent - charge.volume + charge.waived + 1e-6
    assert charge.spent - charge.volume + charge.waived <= max(usd) * hours + 1e-6
    assert charge.spent >= 0
    assert charge.waived == 0 or row.is_waived


@given(row=rows, points=prices, cuts=st.lists(seconds, min_size=2, max_size=6).map(sorted))
def test_cost_of_an_interval_is_the_sum_of_its_parts(
    row: Row, points: list[tuple[float, float]], cuts: list[float]
) -> None:
    book = PriceBook(spot={POOL: points})
    parts = [book.spot_between(*POOL, T + begin, T + end) or 0.0 for begin, end in pairwise(cuts)]

    assert sum(parts) == pytest.approx(book.spot_between(*POOL, T + cuts[0], T + cuts[-1]))


@given(seen=st.lists(rows, max_size=8), now=seconds)
def test_restarted_head_computes_the_same_costs(seen: list[Row], now: float) -> None:
    ledger = Ledger().with_rows(seen)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))

    assert again == ledger
    assert again.total(BOOK, T + now) == ledger.total(BOOK, T + now)
