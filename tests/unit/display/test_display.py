from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.display.charts import Curve, Mark, _ticks, image, line_chart
from etrain_jupyter.display.numbers import dollars, number, seconds, size
from etrain_jupyter.display.tables import Html, align_columns, html_list, html_table

HOSTILE = '"><script>alert(1)</script>\x1b'


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(0.123456), "0.1235"),
        (number(98765.4), "98,765"),
        (number(float("nan")), "nan"),
        (number(float("-inf")), "-inf"),
        (seconds(0.0314), "31 ms"),
        (seconds(95), "1.6 min"),
        (seconds(132_192), "36.7 h"),
        (size(812), "812 B"),
        (size(2.5e12), "2.5 TB"),
        (dollars(0.00123), "$0.00123"),
        (dollars(1234.5), "$1,234.50"),
    ],
)
def test_numbers_have_few_digits_and_a_unit(shown: str, text: str) -> None:
    assert shown == text


def test_columns_are_aligned() -> None:
    lines = [["A", "NUMBER"], ["long name", "1"]]

    assert align_columns(lines) == "A          NUMBER\nlong name  1"
    assert align_columns(lines, num_left=1) == "A          NUMBER\nlong name       1"


def test_text_in_html_is_escaped_unless_it_is_html() -> None:
    html = html_table([HOSTILE], [[HOSTILE, Html("<b>1</b>")]], tooltips=[HOSTILE])

    assert "<script" not in html + html_list([HOSTILE]) + image("<svg/>", HOSTILE)
    assert "\x1b" not in html
    assert "<td><b>1</b></td>" in html


def test_chart_is_escaped_and_draws_a_mark_beyond_its_end() -> None:
    curve = Curve(index=0, label=HOSTILE, x=np.array([1.0, 2.0]), y=np.array([3.0, 3.0]))
    mark = Mark(x=9.0, color="red", label=HOSTILE)

    svg = line_chart(HOSTILE, [curve], x_label="step", marks=[mark])

    assert "<script" not in svg
    assert 'd="M436.0 26V214" stroke="red"' in svg


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=5))
def test_ticks_include_all_values_and_are_few(values: list[float]) -> None:
    ticks = _ticks(values)

    span = max(map(abs, [*values, *ticks, 1e-9]))
    assert ticks[0] <= min(values) + 1e-6 * span
    assert ticks[-1] >= max(values) - 1e-6 * span
    assert 2 <= len(ticks) <= 8
    assert np.all(np.diff(ticks) > 0)
