"""Test that the synthetic days of ``spot`` have the statistics of the public traces."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks.cloud.spot_trace import HOUR_S, Change, make_day

ZONES = ("a", "b")
DAYS = [make_day(seed=seed, zones=ZONES, num_nodes=12) for seed in range(60)]


def falls(day: tuple[Change, ...], zone: str) -> list[tuple[float, int]]:
    """Return time and size of each capacity loss of a zone."""
    room, found = 12, []
    for change in day:
        if change.zone == zone and change.capacity is not None:
            if change.capacity < room:
                found.append((change.at_s, room - change.capacity))
            room = change.capacity
    return found


def shortages(day: tuple[Change, ...], zone: str) -> list[tuple[float, int]]:
    """Return duration and minimum capacity of each shortage that ends within the day."""
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


def test_same_seed_gives_the_same_day_and_different_seeds_give_different_days() -> None:
    assert make_day(seed=3, zones=ZONES, num_nodes=4) == make_day(seed=3, zones=ZONES, num_nodes=4)
    assert len(set(DAYS)) == len(DAYS)


def test_changes_are_sorted_and_within_the_day_and_the_capacity() -> None:
    for day in DAYS:
        assert [change.at_s for change in day] == sorted(change.at_s for change in day)
        assert all(0 < change.at_s < 24 * HOUR_S for change in day)
        rooms = [change.capacity for change in day if change.capacity is not None]
        assert all(0 <= room <= 12 for room in rooms)


def test_day_has_half_as_many_shortages_as_the_recorded_day() -> None:
    numbers = [len(shortages(day, zone)) for day in DAYS for zone in ZONES]

    # The trace has 16 shortages in 18.5 hours, or 21 per day.
    assert 7 < statistics.mean(numbers) < 14


def test_shortages_come_in_spells() -> None:
    gaps = [
        later - sooner
        for day in DAYS
        for zone in ZONES
        for (sooner, _), (later, _) in itertools.pairwise(falls(day, zone))
    ]

    # For a memoryless process, the standard deviation of the gaps would equal their mean.
    assert statistics.stdev(gaps) > 1.5 * statistics.mean(gaps)
    assert statistics.median(gaps) < 30 * 60 < statistics.mean(gaps)


def test_median_shortage_takes_half_the_machines_for_some_minutes() -> None:
    found = [one for day in DAYS for zone in ZONES for one in shortages(day, zone)]

    assert 4 <= statistics.median(least for _, least in found) <= 8
    assert 10 * 60 < statistics.median(long for long, _ in found) < 35 * 60


def test_droughts_occur_about_once_a_day_and_last_for_hours() -> None:
    droughts = [
        long for day in DAYS for zone in ZONES for long, least in shortages(day, zone) if least == 0
    ]

    assert 0.3 < len(droughts) / (len(DAYS) * len(ZONES)) < 1.5
    assert max(droughts) > 3 * HOUR_S


def test_shortages_of_different_zones_are_independent() -> None:
    for day in DAYS:
        assert {at for at, _ in falls(day, "a")}.isdisjoint(at for at, _ in falls(day, "b"))


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_small_clusters_lose_whole_machines(num_nodes: int) -> None:
    day = make_day(seed=0, zones=ZONES, num_nodes=num_nodes)
    rooms = {change.capacity for change in day} - {None}

    assert rooms <= set(range(num_nodes + 1))
    assert rooms > {num_nodes}
