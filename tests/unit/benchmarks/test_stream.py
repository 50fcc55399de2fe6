from __future__ import annotations

from benchmarks.screen.stream import delays


def test_delay_of_a_step_ends_with_the_first_frame_that_shows_it() -> None:
    committed = {1: 10.0, 2: 10.1, 3: 10.2, 4: 10.3}

    found = delays(committed, [(1, 10.05), (3, 10.25), (4, 10.5)])

    assert found == {"p50_ms": 150.0, "p95_ms": 200.0, "steps": 3}
