from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.head.jobs.exhibits import choose_removed

all_sizes = st.dictionaries(st.integers(0, 99), st.integers(0, 50), max_size=12)


def test_oldest_are_removed_first() -> None:
    sizes = {step: 10 for step in range(0, 60, 10)}

    assert choose_removed(sizes, max_bytes=40, max_evaluations=9) == [10, 20]
    assert choose_removed(sizes, max_bytes=99, max_evaluations=4) == [10, 20]
    assert choose_removed(sizes, max_bytes=60, max_evaluations=6) == []


@given(sizes=all_sizes, max_bytes=st.integers(0, 300), max_evaluations=st.integers(0, 12))
def test_limits_hold_and_the_first_and_the_newest_are_kept(
    sizes: dict[int, int], max_bytes: int, max_evaluations: int
) -> None:
    removed = choose_removed(sizes, max_bytes=max_bytes, max_evaluations=max_evaluations)

    kept = {step: size for step, size in sizes.items() if step not in removed}
    if sizes:
        assert {min(sizes), max(sizes)} <= kept.keys()
    fits = sum(kept.values()) <= max_bytes and len(kept) <= max_evaluations
    assert fits or len(kept) <= 2
    if removed:  # no more than necessary
        last = removed[-1]
        assert sum(kept.values()) + sizes[last] > max_bytes or len(kept) + 1 > max_evaluations
