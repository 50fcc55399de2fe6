from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.plugins.planner.simulation.trace import Slot, SpotTrace


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


spans = st.lists(
    st.tuples(st.integers(0, 98), st.integers(1, 99)).filter(lambda span: span[0] < span[1]),
    min_size=1,
    max_size=6,
)


@given(spans=spans, at_ends=st.integers(0, 2), start=st.integers(0, 99), later=st.integers(0, 250))
def test_window_has_the_capacity_of_the_circular_trace(
    spans: list[tuple[int, int]], at_ends: int, start: int, later: int
) -> None:
    both = [(0, 10 + n) for n in range(at_ends)] + [(80 + n, 100) for n in range(at_ends)]
    trace = trace_of(*((float(a), float(b)) for a, b in (*spans, *both)))

    window = trace.from_time(float(start), 300.0)

    assert capacity_at(window, later + 0.5) == capacity_at(trace, (start + later) % 100 + 0.5)
