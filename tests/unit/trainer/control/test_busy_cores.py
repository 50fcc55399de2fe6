"""Whether training needs all cores, from readings of the clocks."""

from __future__ import annotations

import time

import pytest

from etrain_jupyter.trainer.control import busy_cores
from etrain_jupyter.trainer.control.busy_cores import BusyCores


class Machine:
    """Two cores, and the process that measures."""

    def __init__(self) -> None:
        self.now_s, self.own_s = 100.0, 5.0
        self.busy_s = self.total_s = 0.0
        """Since the last reading, of both cores."""
        self.cores = BusyCores(
            now_s=lambda: self.now_s, own_s=lambda: self.own_s, busy_percent=self.busy_percent
        )

    def busy_percent(self) -> float:
        busy_s, total_s, self.busy_s, self.total_s = self.busy_s, self.total_s, 0.0, 0.0
        return 100 * busy_s / total_s if total_s else 0.0

    def run(self, seconds: float, *, own: float, others: float) -> None:
        """Let time pass, with this number of busy cores."""
        self.now_s += seconds
        self.own_s += own * seconds
        self.busy_s += (own + others) * seconds
        self.total_s += 2 * seconds


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
    cores = machine.cores
    machine.run(0.5, own=own, others=others)
    assert cores.are_busy() == are_busy


def test_short_times_are_measured_together():
    machine = Machine()
    cores = machine.cores
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
    cores = machine.cores
    machine.run(0.5, own=1.0, others=1.0)
    assert cores.are_busy()
    machine.run(30.0, own=0.0, others=0.0)
    assert cores.are_busy()
    machine.run(0.3, own=0.0, others=0.0)
    assert not cores.are_busy()


def test_computing_process_is_measured_on_this_machine(monkeypatch):
    cores = BusyCores()
    monkeypatch.setattr(busy_cores, "MAX_IDLE", 1.0)
    while not cores.are_busy():
        pass
    monkeypatch.setattr(busy_cores, "MAX_IDLE", -1.0)
    while cores.are_busy():
        pass
    monkeypatch.setattr(busy_cores, "MAX_IDLE", 1.0)
    while not cores.are_busy():
        time.sleep(0.0)
    monkeypatch.setattr(busy_cores, "MIN_OWN_CORES", 1000.0)
    while cores.are_busy():
        pass
