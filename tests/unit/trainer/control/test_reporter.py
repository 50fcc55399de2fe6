"""The log gets each step's record, whichever rank is left to tell of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from etrain_jupyter.trainer.control import reporter as reporter_module
from etrain_jupyter.trainer.control.reporter import BusyCores, Reporter
from etrain_jupyter.wire import messages


class Channel:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def steps(self) -> list[int]:
        batches = [m for m in self.sent if isinstance(m, messages.StepsTrained)]
        return [record["step"] for batch in batches for record in batch.records]

    def kinds(self) -> list[tuple[str, int, int]]:
        """Kind, generation and step of everything sent, in order."""
        return [
            (type(m).__name__, m.generation, record["step"])
            for m in self.sent
            for record in (m.records if isinstance(m, messages.StepsTrained) else [m.record])
        ]


def evaluation(number: int, *, generation: int = 1) -> messages.EvalFinished:
    return messages.EvalFinished(generation=generation, record={"step": number, "loss": 0.5})


def step(number: int) -> dict[str, Any]:
    return {"generation": 1, "step": number}


def reporter_at(channel: Channel, *steps: int, rank: int) -> Reporter:
    reporter = Reporter(channel)
    reporter.begin(generation=1, rank=rank, logged_step=0)
    for number in steps:
        reporter.send(step(number))
    return reporter


def test_next_rank_0_sends_records_that_the_dead_one_did_not():
    channel = Channel()
    reporter = reporter_at(channel, 1, 2, 3, rank=1)
    reporter.begin(generation=2, rank=0, logged_step=1)
    reporter.close()
    assert channel.steps() == [2, 3]


def test_newcomer_sends_the_records_received_with_the_state():
    """The only rank that had made steps 2 and 3 died before it could tell of them."""
    ours, theirs = Channel(), Channel()
    dying = reporter_at(theirs, 1, 2, 3, rank=1)
    newcomer = Reporter(ours)
    newcomer.adopt(dying.records_after(1))
    newcomer.begin(generation=3, rank=0, logged_step=1)
    newcomer.close()
    dying.close()
    assert ours.steps() == [2, 3]


def test_records_of_a_replaced_state_are_dropped():
    channel = Channel()
    reporter = reporter_at(channel, 1, 2, 3, rank=1)
    reporter.adopt([])
    reporter.begin(generation=2, rank=0, logged_step=0)
    reporter.close()
    assert channel.steps() == []


def test_first_record_after_a_pause_is_sent_immediately_and_later_ones_together(monkeypatch):
    monkeypatch.setattr(reporter_module, "FLUSH_EVERY_S", 3600.0)
    channel = Channel()
    reporter = reporter_at(channel, 1, rank=0)
    while not channel.sent:
        time.sleep(0.001)
    assert channel.steps() == [1]
    for number in (2, 3, 4):
        reporter.send(step(number))
    reporter.close()
    assert [len(message.records) for message in channel.sent] == [1, 3]


def test_batches_are_rarer_while_training_needs_all_cores(monkeypatch):
    monkeypatch.setattr(reporter_module, "FLUSH_EVERY_S", 0.0)
    monkeypatch.setattr(reporter_module, "BUSY_FLUSH_EVERY_S", 3600.0)
    channel = Channel()
    are_busy = [False, False, True]
    reporter = Reporter(channel, are_cores_busy=lambda: are_busy.pop(0))
    reporter.begin(generation=1, rank=0, logged_step=0)
    while len(are_busy) == 3:  # ``begin`` has woken the thread
        time.sleep(0.001)
    for number in (1, 2):
        reporter.send(step(number))
        while len(channel.sent) < number or len(are_busy) > 2 - number:
            time.sleep(0.001)
    for number in (3, 4):
        reporter.send(step(number))
    reporter.close()
    assert [len(message.records) for message in channel.sent] == [1, 1, 2]


def test_evaluations_that_were_fenced_are_sent_again_in_the_next_generation_in_order():
    """The scheduler was away while the last generation trained to its end, and evaluated twice."""
    ours, theirs = Channel(), Channel()
    survivor = reporter_at(ours, 1, rank=1)
    for number in (1, 2, 3):
        if number > 1:
            survivor.send(step(number))
        survivor.send(evaluation(number))
    assert ours.sent == [], "rank 0 sends them"

    newcomer = Reporter(theirs)
    newcomer.adopt(survivor.records_after(1))
    newcomer.begin(generation=2, rank=0, logged_step=1)
    newcomer.close()
    survivor.begin(generation=2, rank=0, logged_step=1)
    survivor.close()

    expected = [
        ("EvalFinished", 2, 1),
        ("StepsTrained", 2, 2),
        ("EvalFinished", 2, 2),
        ("StepsTrained", 2, 3),
        ("EvalFinished", 2, 3),
    ]
    assert ours.kinds() == theirs.kinds() == expected


def test_scores_that_were_fenced_are_sent_again_in_the_next_generation():
    """Each became known two steps after its evaluation; the log ends with step 4."""
    channel = Channel()
    reporter = reporter_at(channel, 1, rank=1)
    for number in (3, 4, 5, 6):
        reporter.send(step(number))
        if number % 2 == 0:
            reporter.send({"step": number, "scored": {"step": number - 2}})

    reporter.begin(generation=2, rank=0, logged_step=4)
    reporter.close()

    assert channel.kinds() == [
        ("EvalScoreFound", 2, 2),
        ("StepsTrained", 2, 5),
        ("StepsTrained", 2, 6),
        ("EvalScoreFound", 2, 4),
    ]


def test_rank_0_sends_an_evaluation_at_once_after_its_step():
    channel = Channel()
    reporter = reporter_at(channel, 1, rank=0)
    reporter.send(evaluation(1))
    assert channel.kinds() == [("StepsTrained", 1, 1), ("EvalFinished", 1, 1)]
    reporter.close()


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
    monkeypatch.setattr(reporter_module, "MAX_IDLE", 1.0)
    while not cores.are_busy():
        pass
    monkeypatch.setattr(reporter_module, "MAX_IDLE", -1.0)
    while cores.are_busy():
        pass
    monkeypatch.setattr(reporter_module, "MAX_IDLE", 1.0)
    while not cores.are_busy():
        time.sleep(0.0)
    monkeypatch.setattr(reporter_module, "MIN_OWN_CORES", 1000.0)
    while cores.are_busy():
        pass
