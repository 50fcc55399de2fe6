from __future__ import annotations

import pytest

from benchmarks.storage.checkpoint import NUM_WARM, cost_of, counted


def test_start_up_and_the_last_incomplete_interval_are_discarded() -> None:
    every = 2
    times = [float(step) for step in range(1, 11)]
    stalls = {2: 0.2, 4: 0.4, 6: 0.6, 8: 0.8, 10: 1.0}

    run = counted(times, stalls, every)

    assert NUM_WARM == 2
    assert run == {"times": [6.0, 7.0, 8.0, 9.0, 10.0], "stalls": [0.6, 0.8]}


def test_cost_is_the_extra_time_per_checkpoint_over_median_steps() -> None:
    steps = [1.0, 1.0, 1.5, 1.0, 1.0, 1.75, 1.0]
    times = [sum(steps[:count]) for count in range(len(steps) + 1)]

    assert cost_of({"times": times, "stalls": [0.5, 0.5]}) == pytest.approx(0.625)
