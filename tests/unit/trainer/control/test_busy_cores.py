"""Whether training needs all cores, from readings of the clocks."""

from __future__ import annotations

import pytest

from etrain_jupyter.trainer.control.busy_cores import BusyCores, Usage, read_usage


class Machine:
    """Two cores, and the process that measures."""

    def __init__(self) -> None:
        self.usage = Usage(now_s=100.0, own_s=5.0, idle_s=40.0, total_s=200.0)

    def read(self) -> Usage:
        return self.usage

    def run(self, seconds: float, *, own: float, others: float) -> None:
        """Let time pass, with this number of busy cores."""
        now_s, own_s, idle_s, total_s = self.usage
        idle = 2 - own - others
        self.usage = Usage(
            now_s + seconds, own_s + own * seconds, idle_s + idle * seconds, total_s + 2 * seconds
        )


@pytest.mark.parametrize(
    ("own", "others", "are_busy"),
    [
        (1.0, 0.9, True),  # another rank
        (1.0, 0.5, False),  # cores are left
        (0.05, 1.95, False),  # a GPU trains, and other programs compute
        (2.0, 0.0, True),  # a rank with two threads
    ],
)
def test_cores_are_busy_if_none_is_left_and_this_process_computes(own, others, are_busy):
    machine = Machine()
    cores = BusyCores(machine.read)
    machine.run(0.5, own=own, others=others)
    assert cores.are_busy() == are_busy


def test_short_times_are_measured_together():
    machine = Machine()
    cores = BusyCores(machine.read)
    machine.run(0.2, own=1.0, others=1.0)
    assert not cores.are_busy(), "nothing has been measured yet"
    machine.run(0.2, own=1.0, others=1.0)
    assert cores.are_busy()
    machine.run(0.2, own=0.0, others=0.0)
    assert cores.are_busy(), "the last measurement"
    machine.run(0.2, own=0.0, others=0.0)
    assert not cores.are_busy()


def test_pause_in_the_training_is_not_measured():
    machine = Machine()
    cores = BusyCores(machine.read)
    machine.run(0.5, own=1.0, others=1.0)
    assert cores.are_busy()
    machine.run(30.0, own=0.0, others=0.0)
    assert cores.are_busy()
    machine.run(0.3, own=0.0, others=0.0)
    assert not cores.are_busy()


def test_readings_of_this_machine_advance():
    before = read_usage()
    while read_usage().own_s < before.own_s + 0.05:
        pass
    after = read_usage()
    assert after.now_s > before.now_s
    assert after.total_s > before.total_s
    assert 0 <= after.idle_s - before.idle_s <= after.total_s - before.total_s + 0.02
