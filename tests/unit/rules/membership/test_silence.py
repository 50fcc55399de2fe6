"""Who has been silent for too long, and who only seems so because nobody listened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etrain_jupyter.rules.membership.silence import (
    BEATS_PER_LIMIT,
    BEATS_PER_S,
    HeartbeatMonitor,
    choose_beat_s,
)


def hearing(*names: str) -> HeartbeatMonitor:
    heard = HeartbeatMonitor(limit_s=10.0, tick_s=0.25)
    heard.tick(100.0)
    for name in names:
        heard.hear(name, 100.0)
    return heard


def tick_until(heard: HeartbeatMonitor, end: float, *alive: str) -> None:
    now = 100.0
    while now < end:
        now += 0.25
        assert heard.tick(now) == 0.0
        for name in alive:
            heard.hear(name, now)


def test_supervisor_without_messages_for_the_timeout_is_silent_and_the_others_are_not():
    heard = hearing("w1", "w2")
    tick_until(heard, 110.25, "w1")
    assert heard.silent(110.25) == {"w2": 10.25}


def test_after_the_coordinator_itself_was_suspended_no_supervisor_is_silent():
    heard = hearing("w1", "w2")
    assert heard.tick(3700.25) == 3600.0
    assert heard.silent(3700.25) == {}
    heard.hear("w1", 3700.5)
    assert heard.silent(3710.25) == {"w2": 10.25}


def test_clock_set_back_keeps_the_silence_measured_so_far():
    heard = hearing("w1")
    tick_until(heard, 108.0)
    heard.tick(50.0)  # instead of 108.25
    assert heard.silent(51.0) == {}
    assert heard.silent(53.0) == {"w1": 8.25 + 3.0}


def test_forgotten_supervisor_is_not_silent():
    heard = hearing("w1")
    heard.forget("w1")
    heard.forget("w1")
    assert heard.silent(1000.0) == {}


# --- heartbeat interval ---


@given(st.integers(0, 5000), st.floats(1.0, 4.0), st.floats(0.5, 60.0))
def test_interval_leaves_several_heartbeats_until_the_timeout(num, current_s, limit_s):
    beat_s = choose_beat_s(num, current_s=current_s, limit_s=limit_s)
    assert beat_s == 1.0 or BEATS_PER_LIMIT * beat_s <= limit_s * (1 + 1e-9)
    assert 1.0 <= beat_s <= 4.0
    # Asked again, it stays: every change is a message to each supervisor.
    assert choose_beat_s(num, current_s=beat_s, limit_s=limit_s) == beat_s


def test_interval_bounds_the_number_of_heartbeats_and_does_not_follow_each_worker():
    beat_s, changes = 1.0, []
    for num in range(1, 1001):
        new_s = choose_beat_s(num, current_s=beat_s, limit_s=10.0)
        if new_s != beat_s:
            changes.append(num)
        beat_s = new_s
        assert num / beat_s <= 1.5 * BEATS_PER_S
    assert changes == [375, 563, 845]
    assert choose_beat_s(4, current_s=beat_s, limit_s=10.0) == 1.0
