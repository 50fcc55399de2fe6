"""The synthetic days of ``spot``: their shape is what the open records have."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks.spot_trace import HOUR_S, Change, make_day

ZONES = ("a", "b")
DAYS = [make_day(seed=seed, zones=ZONES, num_nodes=12) for seed in range(60)]


def falls(day: tuple[Change, ...], zone: str) -> list[tuple[float, int]]:
    """When a zone lost room, and how much of it."""
    room, found = 12, []
    for change in day:
        if change.zone == zone and change.capacity is not None:
            if change.capacity < room:
                found.append((change.at_s, room - change.capacity))
            room = change.capacity
    return found


def shortages(day: tuple[Change, ...], zone: str) -> list[tuple[float, int]]:
    """How long each shortage that ends within the day lasts, and how little is left in it."""
    found, begin, least = [], None, 12
    for change in day:
        if change.zone != zone or change.capacity is None:
            continue
        if change.capacity < 12:
            begin = change.at_s if begin is None else begin
            least = min(least, change.capacity)
        elif begin is not None:
            found.append((change.at_s - begin, least))
            begin, least = None, 12
    return found


def test_a_seed_gives_the_same_day_and_another_one_gives_another() -> None:
    assert make_day(seed=3, zones=ZONES, num_nodes=4) == make_day(seed=3, zones=ZONES, num_nodes=4)
    assert len(set(DAYS)) == len(DAYS)


def test_changes_are_in_order_within_the_day_and_within_the_room() -> None:
    for day in DAYS:
        assert [change.at_s for change in day] == sorted(change.at_s for change in day)
        assert all(0 < change.at_s < 24 * HOUR_S for change in day)
        rooms = [change.capacity for change in day if change.capacity is not None]
        assert all(0 <= room <= 12 for room in rooms)


def test_a_day_has_half_the_shortages_of_the_record_it_follows() -> None:
    numbers = [len(shortages(day, zone)) for day in DAYS for zone in ZONES]

    # 16 in 18.5 hours, so 21 a day, were counted there.
    assert 7 < statistics.mean(numbers) < 14


def test_shortages_come_in_spells() -> None:
    gaps = [
        later - sooner
        for day in DAYS
        for zone in ZONES
        for (sooner, _), (later, _) in itertools.pairwise(falls(day, zone))
    ]

    # Without memory, the deviation of the gaps would be their mean.
    assert statistics.stdev(gaps) > 1.5 * statistics.mean(gaps)
    assert statistics.median(gaps) < 30 * 60 < statistics.mean(gaps)


def test_a_shortage_takes_half_in_the_median_and_is_over_in_minutes() -> None:
    found = [one for day in DAYS for zone in ZONES for one in shortages(day, zone)]

    assert 4 <= statistics.median(least for _, least in found) <= 8
    assert 10 * 60 < statistics.median(long for long, _ in found) < 35 * 60


def test_droughts_leave_nothing_for_hours_about_once_a_day() -> None:
    droughts = [
        long for day in DAYS for zone in ZONES for long, least in shortages(day, zone) if least == 0
    ]

    assert 0.3 < len(droughts) / (len(DAYS) * len(ZONES)) < 1.5
    assert max(droughts) > 3 * HOUR_S


def test_zones_have_shortages_of_their_own() -> None:
    for day in DAYS:
        assert {at for at, _ in falls(day, "a")}.isdisjoint(at for at, _ in falls(day, "b"))


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_small_clusters_lose_whole_machines(num_nodes: int) -> None:
    day = make_day(seed=0, zones=ZONES, num_nodes=num_nodes)
    rooms = {change.capacity for change in day} - {None}

    assert rooms <= set(range(num_nodes + 1))
    assert rooms > {num_nodes}
