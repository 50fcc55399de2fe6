from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.errors import TraceError
from etrain_jupyter.plugins.planner.simulation.trace import Slot, SpotTrace
from etrain_jupyter.plugins.planner.simulation.trace_files import read_trace


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def spans(path: Path, **options: str) -> list[tuple[str, float, float]]:
    trace = read_trace(path, **options)  # type: ignore[arg-type]
    return [(slot.zone, slot.since_s, slot.until_s) for slot in trace.slots]


def test_own_format_gives_capacity_and_prices_by_zone(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "seconds,zone,capacity,spot_usd\n0,a,2,0.40\n0,b,1,0.50\n600,a,1,\n900,b,0,0.60\n1200,a,1,\n",
    )

    trace = read_trace(path)

    assert trace.length_s == 1200.0
    assert trace.zones == ("a", "b")
    assert sorted(spans(path)) == [("a", 0.0, 600.0), ("a", 0.0, 1200.0), ("b", 0.0, 900.0)]
    assert trace.prices == {"a": ((0.0, 0.4),), "b": ((0.0, 0.5), (900.0, 0.6))}


def test_zone_and_price_are_optional_in_the_own_format(tmp_path: Path) -> None:
    path = write(tmp_path, "seconds,capacity\n100,3\n700,0\n1300,0\n")

    trace = read_trace(path)

    assert trace.prices == {}
    assert (trace.length_s, trace.mean_capacity, trace.max_capacity) == (1200.0, 1.5, 3)


def test_bamboo_format_gives_machines_by_name(tmp_path: Path) -> None:
    path = write(
        tmp_path, "0,add,n1\n60000,add,n2\n120000,remove,n1\n180000,add,n3\n240000,add,n4\n"
    )

    assert spans(path) == [
        ("zone-a", 0.0, 120.0),
        ("zone-a", 60.0, 240.0),
        ("zone-a", 180.0, 240.0),
    ]


def test_parcae_formats_agree_on_the_same_machines(tmp_path: Path) -> None:
    counts = write(tmp_path, "0,1\n0,2\n60000,1\n120000,1\n", "counts.csv")
    rows = [(0, "add", ["a", "b"]), (60000, "remove", ["a"]), (60001, "no-op", ["b"])]
    lines = [json.dumps([at, kind, {"nodes": names}]) for at, kind, names in rows]
    events = write(tmp_path, "\n".join(lines), "events.txt")

    assert read_trace(counts).mean_capacity == 1.5
    assert spans(events) == [("zone-a", 0.0, 60.0), ("zone-a", 0.0, 120.001)]


def test_skypilot_format_has_a_fixed_interval(tmp_path: Path) -> None:
    data = {"metadata": {"gap_seconds": 300}, "data": [1, 1, 0, 1]}
    path = write(tmp_path, json.dumps(data), "trace.json")

    assert spans(path) == [("zone-a", 0.0, 600.0), ("zone-a", 900.0, 1200.0)]


POLLED = """2021-12-10, 13:00:00, 4
2021-12-10, 13:10:00, 4
2021-12-10, 13:20:00, 2
2021-12-10, 13:30:00, 2
2021-12-10, 17:00:00, 2
2021-12-10, 17:10:00, 4
"""


def test_later_line_of_a_polled_trace_replaces_times_that_lie_ahead(tmp_path: Path) -> None:
    text = "2021-12-10, 13:00:00, 4\n2021-12-10, 13:02:00, 4\n2021-12-10, 13:01:00, 2\n"
    path = write(tmp_path, f"{text}2021-12-10, 13:02:00, 2\n")

    trace = read_trace(path)

    assert (trace.length_s, trace.mean_capacity) == (120.0, 3.0)


def test_trace_with_a_gap_is_refused_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, POLLED)

    with pytest.raises(
        TraceError, match=r"has 1 gap, 3.3 h of 4.2 h: .* from 0.67 h to 4.00 h"
    ) as e:
        read_trace(path)

    assert "--gaps hold" in e.value.hint


def test_gap_is_held_or_cut_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, POLLED)

    held, cut = read_trace(path, gaps="hold"), read_trace(path, gaps="cut")

    assert (held.length_s, cut.length_s) == (15000.0, 3000.0)
    # 4 machines for 20 min, then 2: for 3 h 50 min, or for 30 min without the gap.
    assert held.mean_capacity * held.length_s == pytest.approx(4 * 1200 + 2 * 13800)
    assert cut.mean_capacity * cut.length_s == pytest.approx(4 * 1200 + 2 * 1800)


def test_empty_capacity_marks_a_gap_in_the_own_format(tmp_path: Path) -> None:
    path = write(tmp_path, "seconds,capacity\n0,2\n600,\n1200,1\n1800,1\n")

    with pytest.raises(TraceError, match=r"1 gap, 0\.2 h of 0\.5 h"):
        read_trace(path)
    assert read_trace(path, gaps="cut").length_s == 1200.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello\n", "starts with 'hello'"),
        ("seconds,capacity\n0,2\n", "contains no machine over any time"),
        ("seconds,capacity\n0,0\n600,0\n", "contains no machine over any time"),
        ("seconds,capacity\n0,2\n-5,1\n", "Line 3 .* seconds '-5' is not a number of 0 or more"),
        ("seconds,capacity\n60,2\n0,1\n", "Line 3 .* seconds 0 is before 60"),
        ("seconds,capacity\n0,1.5\n", "Line 2 .* capacity 1.5 is not a whole number"),
        ("0,add,n1\n5,vanish,n1\n", "Line 2 .* is not milliseconds,add"),
        ("0,1\n60000,x\n", "Line 2 .* machines 'x' is not a number"),
        ('[0, "add", {}]\n', "Line 1 .* is not"),
        ('{"data": [1]}\n', "not of SkyPilot's spot-traces"),
        ("2021-12-10, 13:00:00, 4\n2021-12-10, 13:01\n", "Line 2 .* is not date, time, machines"),
    ],
)
def test_invalid_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, text))


def test_missing_file_is_named_with_the_traces_next_to_it(tmp_path: Path) -> None:
    write(tmp_path, "0,1\n", "p3.csv")

    with pytest.raises(TraceError, match=r"p4.csv does not exist.* Its folder contains p3.csv"):
        read_trace(tmp_path / "p4.csv")
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


def test_losses_are_counted_without_the_end_of_the_trace(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "seconds,capacity\n0,2\n1800,1\n3600,1\n"))

    assert trace.losses_per_node_hour == pytest.approx(1 / 1.5)
    assert trace.scaled(3).max_capacity == 6
    assert Slot(zone="zone-a", since_s=0.0, until_s=3600.0, rank=0) in trace.slots


# --- windows of a circular trace ---


def trace_of(*spans: tuple[float, float], length_s: float = 100.0) -> SpotTrace:
    slots = [Slot(zone="a", since_s=a, until_s=b) for a, b in sorted(spans)]
    return SpotTrace(name="t", length_s=length_s, slots=tuple(slots))


def capacity_at(trace: SpotTrace, at: float) -> int:
    return sum(slot.since_s <= at < slot.until_s for slot in trace.slots)


def test_machine_that_runs_throughout_is_never_lost_in_a_repeated_trace() -> None:
    window = trace_of((0.0, 100.0)).from_time(30.0, 1000.0)

    assert [(slot.since_s, slot.until_s) for slot in window.slots] == [(0.0, 1000.0)]


def test_prices_start_with_the_one_in_force() -> None:
    trace = SpotTrace(
        name="t",
        length_s=100.0,
        slots=(Slot(zone="a", since_s=0.0, until_s=100.0),),
        prices={"a": ((0.0, 1.0), (50.0, 2.0))},
    )

    assert trace.from_time(60.0, 100.0).prices == {"a": ((0.0, 2.0), (40.0, 1.0), (90.0, 2.0))}


SPANS = st.lists(
    st.tuples(st.integers(0, 98), st.integers(1, 99)).filter(lambda span: span[0] < span[1]),
    min_size=1,
    max_size=6,
)


@given(spans=SPANS, at_ends=st.integers(0, 2), start=st.integers(0, 99), later=st.integers(0, 250))
def test_window_has_the_capacity_of_the_circular_trace(
    spans: list[tuple[int, int]], at_ends: int, start: int, later: int
) -> None:
    both = [(0, 10 + n) for n in range(at_ends)] + [(80 + n, 100) for n in range(at_ends)]
    trace = trace_of(*((float(a), float(b)) for a, b in (*spans, *both)))

    window = trace.from_time(float(start), 300.0)

    assert capacity_at(window, later + 0.5) == capacity_at(trace, (start + later) % 100 + 0.5)
