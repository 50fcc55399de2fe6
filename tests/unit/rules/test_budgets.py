"""How often a machine may fail (for ever, but more and more seldom), and when the job gives up."""

from __future__ import annotations

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from etrain_jupyter.rules.membership.faults import HEALTHY_S, Health, after_fault
from tests.unit.rules.story import Story


def wait_for_start(story: Story, worker: str) -> int:
    """Let seconds pass until the worker's trainer starts; return how many."""
    waited = 0
    while story.state.of_worker(worker) is None:
        assert waited < 100
        story.wait(1.0)
        waited += 1
    return waited


def test_worker_whose_trainers_die_while_they_warm_up_does_not_disturb_the_others():
    story = Story(max_workers=2).start("w1")
    story.send(s.WorkersAssigned(workers=("w1", "w2")))
    waits = []
    for _ in range(9):
        story.lose("w2", "exited with code 1")
        waits.append(wait_for_start(story, "w2"))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (story.state.status, story.state.generation) == ("running", 1)
    assert not story.found(c.AnnounceChange, ever=True)
    lines = [line.text for line in story.found(events.LogLine, ever=True)]
    assert lines[:2] == [
        "w2: its trainer exited; the next one starts in 1 s",
        "w2: its trainer exited 2 times in a row; the next one starts in 2 s",
    ]


def test_warm_up_faults_never_fail_a_job_that_others_train():
    story = Story(min_workers=2, max_workers=3).start("w1", "w2")
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3")))
    for _ in range(5):
        story.lose("w3")
        wait_for_start(story, "w3")
    story.send(s.WorkerGone(worker="w2", cause="gone")).report("w1", step=3, why="failed")
    story.lose("w3")  # w1 waits and holds the state
    assert story.state.status == "waiting"
    for _ in range(5):
        wait_for_start(story, "w3")
        story.lose("w3")
    assert story.state.status == "waiting"


def test_warm_up_faults_do_not_fail_a_job_while_another_trainer_is_ready():
    story = Story(min_workers=2, max_workers=2)
    story.send(s.WorkersAssigned(workers=("w1", "w2"))).warm("w1")
    for _ in range(5):
        story.lose("w2")
        wait_for_start(story, "w2")
    assert not story.state.is_ended  # w1 could warm up, so the notebook's code can


def test_three_attempts_to_start_trainers_before_any_is_ready_fail_the_job():
    story = Story(max_workers=2).send(s.WorkersAssigned(workers=("w1", "w2")))
    for _ in range(2):
        story.lose("w1")
        assert not story.state.is_ended
        wait_for_start(story, "w1")
    story.lose("w1")
    assert story.state.status == "failed"
    assert story.state.reason.startswith("3 trainers in a row exited before they were ready")


def test_one_incident_that_kills_all_warming_trainers_counts_once():
    workers = tuple(f"w{number}" for number in range(6))
    story = Story(max_workers=6).send(s.WorkersAssigned(workers=workers))
    for worker in workers[:5]:
        story.lose(worker)
    story.wait(0.5).lose("w5")  # the operating system kills one after the other
    assert not story.state.is_ended
    assert story.state.faults.num_warm_ups == 1
    for _ in range(2):
        wait_for_start(story, "w1")
        story.lose("w1")
    assert story.state.status == "failed"


def test_warm_up_faults_never_fail_a_job_that_has_trained():
    story = Story(max_workers=1).start("w1")
    story.send(s.WorkerGone(worker="w1", cause="gone"))
    story.send(s.WorkersAssigned(workers=("w2",)))
    for _ in range(5):
        story.lose("w2", "killed by SIGTERM")
        wait_for_start(story, "w2")
    assert not story.state.is_ended


def test_injected_faults_do_not_count():
    story = Story(max_workers=2).start("w1", "w2")
    for _ in range(4):
        story.lose("w2", injected=True)
        assert story.found(c.StartTrainer)  # at once
        story.report("w1", step=0, why="failed").warm("w2").formed()
        story.report("w1", step=0).formed()
    assert story.state.status == "running"
    assert story.state.faults.health == {}
    story = Story().send(s.WorkersAssigned(workers=("w1",)))
    for _ in range(4):
        story.lose("w1", injected=True)
    assert not story.state.is_ended


def test_lost_workers_do_not_count_as_faults():
    story = Story(max_workers=1)
    for number in range(6):
        story.send(s.WorkersAssigned(workers=(f"w{number}",)))
        if number % 2:
            story.warm(f"w{number}")
        story.send(s.WorkerGone(worker=f"w{number}", cause="gone"))
    assert not story.state.is_ended
    assert story.state.faults.num_warm_ups == 0
    assert story.state.faults.at_step == (-1, ())


def test_rank_that_dies_repeatedly_is_restarted_with_back_off():
    story = Story(max_workers=2).start("w1", "w2")
    waits = []
    for step in range(6):
        story.send(s.StepsCommitted(step=step, step_s=0.1))
        story.lose("w2").report("w1", step=step, why="failed").formed()
        waits.append(wait_for_start(story, "w2"))
        story.warm("w2").report("w1", step=step).formed()
        assert story.state.of_worker("w2").phase == "ranked"
    assert waits == [0, 1, 2, 4, 8, 16]


def test_rank_that_trained_for_a_while_is_restarted_immediately():
    story = Story(max_workers=2).start("w1", "w2")
    for step in range(6):
        story.wait(HEALTHY_S + 1).send(s.StepsCommitted(step=step, step_s=0.1))
        story.lose("w2")
        assert [start.worker for start in story.found(c.StartTrainer)] == ["w2"]
        story.report("w1", step=step, why="failed").formed()
        story.warm("w2").report("w1", step=step).formed()


def test_old_faults_are_forgotten():
    old = Health(num_faults=9, last_at=0.0, retry_at=60.0)
    assert after_fault(old, now=100.0, stepped_s=0.0, was_ready=False).num_faults == 10
    assert after_fault(old, now=200.0, stepped_s=0.0, was_ready=False).num_faults == 1


def test_hang_counts_as_a_fault_of_its_step():
    story = Story(min_workers=2, max_workers=2).start("w1", "w2")
    for _ in range(3):
        story.see("w1", 5).see("w2", 4)
        story.now += 31
        story.see("w1", 5).see("w2", 4).send(s.Tick())
        [kill] = story.found(c.KillTrainer)
        story.lose("w2", kill.why).report("w1", step=0, why="failed")
        if not story.state.is_ended:
            wait_for_start(story, "w2")
            story.warm("w2").formed()
    assert story.state.status == "failed"
    assert story.state.reason == (
        "step 1 lost a trainer in 3 generations in a row, "
        "the last on w2: no progress for 31 s at step 1 while 1 rank waited"
    )
