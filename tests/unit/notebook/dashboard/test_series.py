from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.notebook.dashboard.curves import Series, between, means, thin


def series_of(points: list[tuple[float, float]]) -> Series:
    series = Series()
    for x, y in points:
        series.append(x, y)
    return series


def test_a_series_keeps_every_point_beyond_its_first_capacity() -> None:
    series = series_of([(step, step / 2) for step in range(1000)])

    assert len(series) == 1000
    assert series.x[-1] == 999
    assert series.y[500] == 250


def test_a_million_points_are_held_in_24_bytes_each_at_most() -> None:
    series = Series()
    for start in range(0, 1_000_000, 5000):
        steps = np.arange(start, start + 5000)
        series.extend(steps, steps / 7)

    held = sum(array.base.nbytes for array in (series.x, series.y) if array.base is not None)
    assert len(series) == 1_000_000
    assert 12 * len(series) <= held <= 24 * len(series)


def test_cutting_removes_the_points_from_a_step_on() -> None:
    series = series_of([(1, 1), (2, 2), (3, 3)])

    assert series.cut_from(2)
    assert not series.cut_from(2)
    assert series.x.tolist() == [1]


def test_thinning_keeps_ends_peaks_and_dips_at_their_places() -> None:
    x = np.arange(100_000, dtype=np.float64)
    y = np.ones(100_000, np.float32)
    y[31_234], y[77_001] = 9, -5

    kept_x, kept_y = thin(x, y, 500)

    assert len(kept_x) <= 502
    assert {0, 31_234, 77_001, 99_999} <= set(kept_x.tolist())
    assert kept_y[kept_x == 31_234] == 9
    assert kept_y[kept_x == 77_001] == -5


@given(
    y=st.lists(st.floats(width=32), min_size=1, max_size=300),
    max_points=st.integers(min_value=4, max_value=50),
)
def test_thinning_is_ordered_bounded_and_adds_no_values(y: list[float], max_points: int) -> None:
    values = np.array(y, np.float32)
    x = np.arange(len(y), dtype=np.float64)

    kept_x, kept_y = thin(x, values, max_points)

    assert len(kept_x) <= max(max_points + 2, 4)
    assert (np.diff(kept_x) > 0).all()
    np.testing.assert_array_equal(kept_y, values[kept_x.astype(int)])
    if not np.isnan(values).all():
        assert np.nanmax(kept_y) == np.nanmax(values)
        assert np.nanmin(kept_y) == np.nanmin(values)


def test_loss_too_large_for_float32_is_infinite_without_a_warning() -> None:
    assert series_of([(1, 1e300)]).y[0] == pytest.approx(float("inf"))


def test_means_of_neighbours_are_close_to_most_points() -> None:
    y = np.where(np.arange(1000) % 100 == 0, 50.0, 1.0).astype(np.float32)

    x, mean = means(np.arange(1000.0), y, 10)

    assert x.tolist() == [49.5 + 100 * i for i in range(10)]
    assert mean.tolist() == pytest.approx([1.49] * 10)


def test_means_ignore_nan() -> None:
    y = np.array([1, np.nan, 3, 3, np.nan, np.nan, np.inf], np.float32)

    x, mean = means(np.arange(7.0), y, 4)

    assert x.tolist() == [0.5, 2.5, 4.5, 6.0]
    np.testing.assert_array_equal(mean, np.array([1, 3, np.nan, np.nan], np.float32))


@pytest.mark.parametrize(
    ("first", "last", "kept"),
    [(3, 4, [2, 3, 4, 5]), (-5, 0, [0, 1]), (8.5, 99, [8, 9]), (20, 30, [9])],
)
def test_range_has_one_more_point_at_each_end(first: float, last: float, kept: list[int]) -> None:
    x, y = between(np.arange(10.0), np.arange(10, dtype=np.float32), first, last)

    assert x.tolist() == y.tolist() == kept
