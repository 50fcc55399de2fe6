"""Faults planted in the logs of simulated jobs that went through many generations.

The simulation of the state machine writes the logs as the coordinator does, with torn steps,
losses, joins, pauses and restores in every order. The audit must pass each of them, and name what
is planted in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    JobRestored,
    StepCompleted,
    StepUndone,
    WeightsHashed,
    WorkerLost,
)
from etrain_jupyter.notebook.audit import audit_log
from etrain_jupyter.notebook.audit.history import follow_history
from etrain_jupyter.rules.samples.ledger import checksum_terms, epoch_order
from tests.unit.rules.simulated.schedule import Schedule
from tests.unit.rules.simulated.trainer import NUM_SAMPLES, SEED

SEEDS = st.integers(0, 10**6)
NUM_PLANTED, MOST_SEEDS = 50, 400
Planted = tuple[list[Event], str]
"""A log with a fault in it, and what the audit must say of it."""


def logs_of(seed: int) -> list[list[Event]]:
    rate = random.Random(seed).choice((0.0, 0.1, 0.3, 0.5))
    return [job.log for job in Schedule(seed, fault_rate=rate).play().jobs]


def renumbered(log: list[Event]) -> list[Event]:
    return [event.with_seq(seq) for seq, event in enumerate(log, start=1)]


def exchanged(log: list[Event], old: Event, *new: Event) -> list[Event]:
    """Replace one event, and number the lines anew: whoever lies can count."""
    place = log.index(old)
    return renumbered([*log[:place], *new, *log[place + 1 :]])


def steps_that_count(log: list[Event]) -> list[StepCompleted]:
    return follow_history(log).steps


def term_of(sample: int) -> int:
    return int(checksum_terms(epoch_order(seed=0, epoch=0, num_samples=1) * 0 + sample)[0])


def samples_of(step: StepCompleted) -> list[int]:
    order = epoch_order(seed=SEED, epoch=step.epoch, num_samples=NUM_SAMPLES)
    return [int(n) for n in order[step.first : step.first + step.samples]]


# --- the faults: each yields the ways in which it can be planted in a log -------------------------


def lose_a_sample(log: list[Event]) -> Iterator[Planted]:
    for step in steps_that_count(log):
        lost = samples_of(step)[1]
        checksum = step.sample_checksum - term_of(lost)
        bad = replace(step, samples=step.samples - 1, sample_checksum=checksum)
        yield exchanged(log, step, bad), f"step {step.step} did not train sample {lost}"


def repeat_a_sample(log: list[Event]) -> Iterator[Planted]:
    for step in steps_that_count(log):
        twice = samples_of(step)[0]
        checksum = step.sample_checksum + term_of(twice)
        bad = replace(step, samples=step.samples + 1, sample_checksum=checksum)
        yield exchanged(log, step, bad), f"step {step.step} trained sample {twice} once too often"


def train_another_sample(log: list[Event]) -> Iterator[Planted]:
    for step in steps_that_count(log):
        due = samples_of(step)
        other = next(n for n in range(NUM_SAMPLES) if n not in due)
        checksum = step.sample_checksum - term_of(due[0]) + term_of(other)
        yield (
            exchanged(log, step, replace(step, sample_checksum=checksum)),
            f"step {step.step} trained sample {other} in place of sample {due[0]}",
        )


def train_in_the_wrong_epoch(log: list[Event]) -> Iterator[Planted]:
    for step in steps_that_count(log):
        order = epoch_order(seed=SEED, epoch=step.epoch + 1, num_samples=NUM_SAMPLES)
        trained = order[step.first : step.first + step.samples]
        bad = replace(
            step, epoch=step.epoch + 1, sample_checksum=int(checksum_terms(trained).sum())
        )
        yield (
            exchanged(log, step, bad),
            f"step {step.step} began at sample {step.first} of epoch {step.epoch + 1}",
        )


def skip_a_step(log: list[Event]) -> Iterator[Planted]:
    steps = steps_that_count(log)
    for step in steps[:-1]:
        yield exchanged(log, step), f"step {step.step} is missing before step {step.step + 1}"


def make_a_step_twice(log: list[Event]) -> Iterator[Planted]:
    for step in steps_that_count(log):
        yield (
            exchanged(log, step, step, step),
            f"step {step.step} was committed again after step {step.step}",
        )


def go_back_although_somebody_knew_better(log: list[Event]) -> Iterator[Planted]:
    for place, event in enumerate(log):
        if not isinstance(event, GenerationFormed) or not event.step:
            continue
        number = event.generation - 1
        told = [e for e in log[:place] if e.generation == number]
        pids = {pid for e in told if isinstance(e, GenerationFormed) for pid in e.trainer_pids}
        is_known = any(isinstance(e, StepCompleted) and e.step == event.step for e in told)
        if event.trainer_pids[0] in pids and is_known:
            bad = replace(event, step=event.step - 1)
            yield (
                exchanged(log, event, bad),
                f"generation {event.generation} went back from step {event.step} to {bad.step} "
                "although ",
            )


def diverge(log: list[Event]) -> Iterator[Planted]:
    counts = {(step.step, step.generation) for step in steps_that_count(log)}
    hashed = [e for e in log if isinstance(e, WeightsHashed)]
    for event in hashed:
        key = (event.step, event.generation)
        if key in counts and [(e.step, e.generation) for e in hashed].count(key) > 1:
            text = f"bad on rank {event.rank} on {event.worker}"
            yield exchanged(log, event, replace(event, digest="bad")), text


def disagree(log: list[Event]) -> Iterator[Planted]:
    formed = {e.generation: e for e in log if isinstance(e, GenerationFormed)}
    for step in steps_that_count(log):
        if step.world_size > 1:
            names = ", ".join(formed[step.generation].ranks)
            text = f"at step {step.step} the ranks ({names}) had different fingerprints"
            yield exchanged(log, step, replace(step, ranks_agree=False)), text


def undo_a_step_without_a_loss(log: list[Event]) -> Iterator[Planted]:
    for event in log:
        if not isinstance(event, GenerationFormed) or event.why not in ("join", "leave"):
            continue
        number = event.generation - 1
        if any(isinstance(e, WorkerLost) and e.generation == number for e in log):
            continue
        undone = StepUndone(
            job_id=event.job_id,
            time=event.time,
            generation=number,
            step=event.step + 1,
            workers=event.ranks[:1],
        )
        text = f"step {event.step + 1} was undone although no worker had been lost"
        yield exchanged(log, event, undone, event), text


def go_on_in_the_generation_before(log: list[Event]) -> Iterator[Planted]:
    begins = {e.generation: e for e in log if isinstance(e, GenerationFormed)}
    told = {e.generation for e in log if isinstance(e, JobRestored)}
    for step in steps_that_count(log):
        number = step.generation
        if number > 1 and number not in told and step.step > begins[number].step:
            bad = replace(step, generation=number - 1)
            text = f"step {step.step} was committed by generation {number - 1} a"  # although, after
            yield exchanged(log, step, bad), text


def remove_a_line(log: list[Event]) -> Iterator[Planted]:
    for place in range(len(log) - 1):
        text = f"the log has event {place + 2} where {place + 1} was expected"
        yield [*log[:place], *log[place + 1 :]], text


def repeat_a_line(log: list[Event]) -> Iterator[Planted]:
    for place in range(len(log)):
        text = f"the log has event {place + 1} where {place + 2} was expected"
        yield [*log[: place + 1], *log[place:]], text


def swap_two_lines(log: list[Event]) -> Iterator[Planted]:
    for place in range(len(log) - 1):
        text = f"the log has event {place + 2} where {place + 1} was expected"
        yield [*log[:place], log[place + 1], log[place], *log[place + 2 :]], text


FAULTS: list[Callable[[list[Event]], Iterator[Planted]]] = [
    lose_a_sample,
    repeat_a_sample,
    train_another_sample,
    train_in_the_wrong_epoch,
    skip_a_step,
    make_a_step_twice,
    go_back_although_somebody_knew_better,
    diverge,
    disagree,
    undo_a_step_without_a_loss,
    go_on_in_the_generation_before,
    remove_a_line,
    repeat_a_line,
    swap_two_lines,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_named_wherever_it_is_planted(fault) -> None:
    num_planted = 0
    for seed in range(MOST_SEEDS):
        for log in logs_of(seed):
            for bad, text in fault(log):
                problems = audit_log(bad).problems
                assert any(text in problem for problem in problems), (seed, text, problems)
                num_planted += 1
        if num_planted >= NUM_PLANTED:
            return
    raise AssertionError(f"planted only {num_planted} times in {MOST_SEEDS} schedules")


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_correct_logs_of_random_schedules_pass(seed: int) -> None:
    for log in logs_of(seed):
        report = audit_log(log)
        assert report.problems == ()
        assert len(report.epochs) <= 3
        done = report.steps_compared + report.steps_alone
        assert done == report.steps_committed


def test_log_truncated_after_any_event_passes() -> None:
    """A log may end anywhere: what the coordinator had no time to write did not happen."""
    for log in logs_of(7):
        for end in range(len(log)):
            assert audit_log(log[:end]).problems == ()
