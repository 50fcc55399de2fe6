from __future__ import annotations

from etrain_jupyter.trainer.state.checkpoint_writer import Slowdown


def slowdown(*usual: float) -> Slowdown:
    found = Slowdown()
    for seconds in usual:
        found.take_step(seconds, is_writing=False)
    found.begin()
    return found


def test_slowdown_is_the_time_beyond_usual_steps():
    found = slowdown(1.0, 1.0, 5.0, 1.0, 1.0)
    for seconds in (1.5, 2.0, 0.75):
        found.take_step(seconds, is_writing=True)
    assert found.extra_s == 1.25


def test_faster_steps_are_no_slowdown():
    found = slowdown(*[1.0] * 5)
    found.take_step(0.5, is_writing=True)
    assert found.extra_s == 0.0


def test_no_slowdown_is_reported_before_the_usual_time_is_known():
    found = slowdown(1.0, 1.0)
    found.take_step(9.0, is_writing=True)
    assert found.extra_s == 0.0


def test_each_checkpoint_is_counted_separately():
    found = slowdown(*[1.0] * 5)
    found.take_step(3.0, is_writing=True)
    found.begin()
    found.take_step(1.5, is_writing=True)
    assert found.extra_s == 0.5
