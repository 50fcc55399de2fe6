"""Explore the state machine: any order of joins, losses, notices, hangs and requests.

No processes and no time: simulated ranks obey the state machine, and hypothesis or a random
generator chooses the next event, between any two messages and any two actions of a rank. The
invariants are asserted all the time (``simulated.promises``); at the end each job is treated fairly
and must end. ``ETRAIN_SCHEDULES=10000 pytest -m slow`` on this file explores as many more
schedules.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from etrain_jupyter.log import events
from etrain_jupyter.notebook.audit import audit_log
from etrain_jupyter.testing.invariants import assert_invariants
from tests.unit.rules.simulated.cluster import Cluster
from tests.unit.rules.simulated.job import Job
from tests.unit.rules.simulated.promises import MOST_SAVES
from tests.unit.rules.simulated.schedule import MOST_WORKERS, Schedule
from tests.unit.rules.simulated.trainer import TOTAL_STEPS

VARIABLE = "ETRAIN_SCHEDULES"
MANY = int(os.environ.get(VARIABLE, "0"))
ANY = st.integers(0, 2**16)
BOUNDS = st.tuples(st.integers(1, 3), st.integers(0, 4)).map(lambda t: (t[0], t[0] + t[1]))


def assert_good_end(cluster: Cluster) -> None:
    """Assert that each job ended as it should, and that its log proves what it trained."""
    for job in cluster.jobs:
        state = job.state
        assert_invariants(job.log)
        if job.raised and not job.stop_now_asked:
            assert state.status == "failed"
        if state.status == "failed":
            is_unsaved = job.num_failed_saves >= MOST_SAVES
            is_nan = job.had_nan and not state.pauses_on_nan
            earned = job.raised or is_nan or job.is_failure_earned() or is_unsaved
            assert earned, state.reason
        elif state.status == "stopped":
            assert job.stop_asked
        else:
            assert state.status == "finished"
            assert state.step == job.record.logged_step == TOTAL_STEPS
            assert TOTAL_STEPS in job.store


class Explored(RuleBasedStateMachine):
    """All that can happen to up to two jobs that share up to six workers."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()

    @initialize(bounds=st.lists(BOUNDS, min_size=1, max_size=2), workers=st.integers(0, 4))
    def begin(self, bounds, workers):
        self.cluster = Cluster(*bounds)
        for _ in range(workers):
            self.cluster.join()

    # --- what goes on by itself ---

    @rule(picks=st.lists(ANY, min_size=1, max_size=12))
    def go_on(self, picks):
        """Let some of the things happen that can happen, in an order of hypothesis' choice."""
        for pick in picks:
            acts = self.cluster.acts()
            if acts:
                acts[pick % len(acts)]()

    @rule(rounds=st.integers(1, 12))
    def go_on_fairly(self, rounds):
        for _ in range(rounds):
            self.cluster.play_round()

    @rule(seconds=st.sampled_from((0.25, 1.0, 5.0, 31.0, 61.0)))
    def let_time_pass(self, seconds):
        self.cluster.tick(seconds)

    # --- faults ---

    @precondition(lambda self: len(self.cluster.workers) < MOST_WORKERS)
    @rule()
    def join(self):
        self.cluster.join()

    @precondition(lambda self: self.cluster.workers)
    @rule(pick=ANY)
    def lose_a_worker(self, pick):
        self.cluster.vanish(self.one_of(list(self.cluster.workers), pick))

    @precondition(lambda self: self.cluster.workers)
    @rule(pick=ANY, seconds=st.sampled_from((0.5, 5.0, 120.0)), trains_on=st.booleans())
    def give_notice(self, pick, seconds, trains_on):
        worker = self.one_of(list(self.cluster.workers), pick)
        self.cluster.notice(worker, seconds, trains_on=trains_on)

    @precondition(lambda self: self.cluster.processes())
    @rule(pick=ANY)
    def kill_a_trainer(self, pick):
        self.cluster.kill(self.one_of(self.cluster.processes(), pick))

    @precondition(lambda self: self.cluster.processes())
    @rule(pick=ANY, kind=st.sampled_from(("stopped", "stuck")))
    def hang_a_trainer(self, pick, kind):
        self.cluster.hang(self.one_of(self.cluster.processes(), pick), kind)

    @precondition(lambda self: self.cluster.workers)
    @rule(pick=ANY, is_back=st.booleans())
    def cut_a_worker_off_or_reconnect_it(self, pick, is_back):
        name = self.one_of(list(self.cluster.workers), pick)
        (self.cluster.reconnect if is_back else self.cluster.cut_off)(name)

    @precondition(lambda self: self.cluster.raisers())
    @rule(pick=ANY)
    def raise_in_the_notebooks_code(self, pick):
        self.one_of(self.cluster.raisers(), pick).raise_user_error()

    @precondition(lambda self: self.cluster.raisers())
    @rule(pick=ANY)
    def spoil_the_loss_of_a_step(self, pick):
        self.one_of(self.cluster.raisers(), pick).is_spoilt = True

    @rule(pick=ANY)
    def hear_an_old_message_again(self, pick):
        self.a_job(pick).hear_again(pick)

    # --- requests ---

    @rule(pick=ANY, is_pause=st.booleans())
    def pause_or_resume(self, pick, is_pause):
        self.cluster.pause(self.a_job(pick), is_pause)

    @rule(pick=ANY, bounds=BOUNDS)
    def scale(self, pick, bounds):
        self.cluster.scale(self.a_job(pick), *bounds)

    @rule(pick=ANY, now=st.booleans())
    def stop(self, pick, now):
        self.cluster.stop(self.a_job(pick), now=now)

    @rule(pick=ANY, saves_fail=st.booleans())
    def save(self, pick, saves_fail):
        self.cluster.ask_to_save(self.a_job(pick), saves_fail)

    # --- the end ---

    def teardown(self):
        self.cluster.finish()
        assert_good_end(self.cluster)

    def a_job(self, pick) -> Job:
        return self.one_of(self.cluster.jobs, pick)

    @staticmethod
    def one_of(things, pick):
        return things[pick % len(things)]


COMMON = {
    "deadline": None,
    "stateful_step_count": 50,
    "suppress_health_check": list(HealthCheck),
}


def test_no_order_of_events_breaks_a_job():
    few = settings(max_examples=300, derandomize=True, database=None, **COMMON)
    run_state_machine_as_test(Explored, settings=few)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not MANY, reason=f"endurance: set {VARIABLE} to the number of schedules")
def test_no_order_of_events_breaks_a_job_in_very_many_schedules():
    many = settings(max_examples=MANY, database=None, print_blob=True, **COMMON)
    run_state_machine_as_test(Explored, settings=many)


def explore(seeds: range) -> None:
    for seed in seeds:
        try:
            assert_good_end(Schedule(seed).play())
        except Exception as exc:
            exc.add_note(f"in Schedule(seed={seed})")
            raise


@pytest.mark.parametrize("first_seed", [0, 100])
def test_random_schedules_never_break_a_job(first_seed):
    """Chance goes deeper than hypothesis, and each schedule is told by its seed."""
    explore(range(first_seed, first_seed + 100))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not MANY, reason=f"endurance: set {VARIABLE} to the number of schedules")
def test_very_many_random_schedules_never_break_a_job():
    first_seed = random.SystemRandom().randrange(10**9)
    explore(range(first_seed, first_seed + MANY))


@pytest.mark.parametrize("seed", range(20))
def test_without_faults_no_step_is_repeated(seed):
    cluster = Schedule(seed, fault_rate=0.0).play()
    for job in cluster.jobs:
        report = audit_log(job.log)
        assert (report.status, report.ok) == ("finished", True)
        assert report.steps_executed == report.steps_committed == TOTAL_STEPS


@pytest.mark.parametrize("trains_on", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_machines_that_are_taken_after_a_notice_cost_no_step(seed, trains_on):
    """However few there are, the state is saved or taken over in time."""
    dice = random.Random(seed)
    low = dice.choice((1, 1, 2))
    cluster = Cluster((low, low + dice.randint(0, 1)))
    [job] = cluster.jobs
    for _ in range(low):
        cluster.join()
    while not job.state.is_ended and cluster.now < 1300.0:
        for _ in range(dice.randint(1, 12)):
            cluster.play_round()
        if cluster.workers and dice.random() < 0.4:
            name, seconds = dice.choice(list(cluster.workers)), dice.choice((4.0, 8.0, 30.0))
            cluster.notice(name, seconds, trains_on=trains_on)
        if len(cluster.workers) < 2 and dice.random() < 0.3:
            cluster.join()
        if dice.random() < 0.05:
            cluster.pause(job, dice.random() < 0.3)
    cluster.finish()
    report = audit_log(job.log)
    assert (report.status, report.ok) == ("finished", True)
    assert report.steps_executed == report.steps_committed == TOTAL_STEPS
    assert not [e for e in job.log if isinstance(e, events.WorkerLost)]
