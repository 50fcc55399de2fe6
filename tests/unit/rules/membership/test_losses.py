"""Losses at the worst moments: while a generation forms, while it is left, several at once, all."""

from __future__ import annotations

import pytest

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from tests.unit.rules.story import Story


def gone(story: Story, *workers: str) -> Story:
    for worker in workers:
        story.send(s.WorkerGone(worker=worker, cause="gone"))
    return story


def forming(*workers: str, **bounds: int) -> Story:
    """The generation was ordered to form; nobody has said that it steps."""
    return Story(**bounds).send(s.WorkersAssigned(workers=workers)).warm(*workers)


# --- below min, and back ---


def test_waiting_job_names_the_missing_workers_and_continues_by_itself():
    story = gone(Story(min_workers=3, max_workers=3).start("w1", "w2", "w3"), "w2")
    story.report("w1", step=5, why="failed").report("w3", step=5, why="failed")
    assert story.state.status == "waiting"
    assert story.state.reason == "2 of min 3 workers available (w2 was lost: gone)"
    story.send(s.WorkersAssigned(workers=("w1", "w3", "w4")))
    assert story.state.reason == (
        "2 of min 3 workers available (w4 is warming up; w2 was lost: gone)"
    )
    story.warm("w4")
    assert story.ranks() == ["w1", "w3", "w4"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind, form.restore) == (5, (2,), False)
    assert story.state.status == "running"


def test_returning_trainer_is_no_longer_listed_as_missing():
    story = Story(min_workers=2, max_workers=2).start("w1", "w2").lose("w2")
    story.report("w1", step=5, why="failed")
    assert story.state.reason == "1 of min 2 workers available (w2 is warming up)"


def test_survivor_that_was_lost_while_the_job_waited_is_named_too():
    story = gone(Story(min_workers=2, max_workers=2).start("w1", "w2"), "w2")
    story.report("w1", step=5, why="failed")
    gone(story, "w1").send(s.Tick())
    assert story.state.reason == (
        "0 of min 2 workers available (w2 was lost: gone; w1 was lost: gone)"
    )


def test_replaced_workers_are_not_missing():
    story = gone(Story(min_workers=1, max_workers=2).start("w1", "w2"), "w2")
    story.report("w1", step=5, why="failed").send(s.WorkersAssigned(workers=("w1", "w3")))
    story.formed().warm("w3").report("w1", step=6).formed()
    gone(story, "w1", "w3")
    assert "w2" not in story.state.reason


def test_paused_job_that_loses_a_worker_stays_paused_and_resumes_with_the_rest():
    story = Story().start("w1", "w2").send(s.PauseRequested())
    story.report("w1", step=4).report("w2", step=4)
    gone(story, "w1")
    assert story.state.status == "paused"
    story.send(s.ResumeRequested())
    assert story.ranks() == ["w2"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.restore) == (4, False)


def test_paused_job_below_its_minimum_waits_when_it_is_resumed():
    story = Story(min_workers=2).start("w1", "w2").send(s.PauseRequested())
    story.report("w1", step=4).report("w2", step=4)
    gone(story, "w2").send(s.ResumeRequested())
    assert story.state.status == "waiting"
    assert story.state.reason == "1 of min 2 workers available (w2 was lost: gone)"


def test_paused_job_that_loses_all_workers_restores_when_it_is_resumed():
    story = Story().start("w1").send(s.CheckpointSaved(step=3)).send(s.PauseRequested())
    story.report("w1", step=4)
    gone(story, "w1").send(s.WorkersAssigned(workers=("w2",))).warm("w2")
    assert story.state.status == "paused"
    story.send(s.ResumeRequested())
    [form] = story.found(c.FormGeneration)
    assert (form.restore, form.step) == (True, 3)


def test_newcomer_does_not_form_alone_while_survivors_have_yet_to_report():
    story = gone(Story().start("w1", "w2"), "w1")
    story.send(s.WorkersAssigned(workers=("w2", "w3"))).warm("w3")
    assert not story.found(c.FormGeneration)
    story.report("w2", step=7, why="failed")
    assert story.ranks() == ["w2", "w3"]


# --- who is left ---


def test_loss_of_rank_0_loses_nothing_that_another_rank_holds():
    story = gone(Story().start("w1", "w2", "w3"), "w1")
    story.report("w2", step=5, why="failed").report("w3", step=5, why="failed")
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind, form.restore) == (5, (), False)
    assert story.ranks() == ["w2", "w3"]


def test_loss_of_all_ranks_but_one_keeps_its_state():
    story = gone(Story().start("w1", "w2", "w3", "w4"), "w1", "w2", "w4")
    story.report("w3", step=5, why="failed")
    assert story.ranks() == ["w3"]
    [form] = story.found(c.FormGeneration)
    assert not form.restore


def test_loss_of_all_restores_the_newest_checkpoint_on_their_successors():
    story = Story(max_workers=2).start("w1", "w2").send(s.CheckpointSaved(step=4))
    gone(story, "w1", "w2")
    assert story.state.reason == (
        "0 of min 1 workers available (w1 was lost: gone; w2 was lost: gone)"
    )
    story.send(s.WorkersAssigned(workers=("w3", "w4"))).warm("w3", "w4")
    [form] = story.found(c.FormGeneration)
    assert (form.restore, form.step, form.behind) == (True, 4, (1,))


def test_second_loss_during_the_recovery_shrinks_the_next_generation():
    story = gone(Story().start("w1", "w2", "w3"), "w1")
    story.report("w3", step=5, why="failed")
    gone(story, "w2")  # it had not reported yet
    assert story.ranks() == ["w3"]


def test_survivor_that_dies_after_its_report_is_excluded():
    story = gone(Story().start("w1", "w2", "w3"), "w1")
    story.report("w3", step=5, why="failed").lose("w3")
    story.report("w2", step=4, why="failed")
    assert story.ranks() == ["w2"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.restore) == (4, False)


# --- while a generation forms ---


@pytest.mark.parametrize("victim", ["w1", "w2", "w3"])
def test_rank_that_dies_while_the_first_generation_forms_delays_no_other_rank(victim):
    story = forming("w1", "w2", "w3")
    gone(story, victim)
    assert story.found(c.AbortGeneration)
    left = [worker for worker in ("w1", "w2", "w3") if worker != victim]
    for worker in left:
        story.report(worker, step=-1, why="failed")
    assert story.ranks() == left
    [form] = story.found(c.FormGeneration)
    assert form.step == 0


def test_newcomer_that_dies_during_its_admission_costs_no_step():
    story = Story().start("w1", "w2")
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3"))).warm("w3")
    story.report("w1", step=6).report("w2", step=6)
    assert story.ranks() == ["w1", "w2", "w3"]
    gone(story, "w3")
    story.report("w2", step=6, why="failed").report("w1", step=6, why="failed")
    assert story.ranks() == ["w1", "w2"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind) == (6, ())
    assert not story.found(events.StepUndone, ever=True)


def test_source_of_the_state_that_dies_while_it_sends_is_replaced_by_another_holder():
    story = Story().start("w1", "w2")
    story.send(s.WorkersAssigned(workers=("w1", "w2", "w3"))).warm("w3")
    story.report("w1", step=6).report("w2", step=6)
    gone(story, "w1")
    story.report("w3", step=-1, why="failed").report("w2", step=6, why="failed")
    assert story.ranks() == ["w2", "w3"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.behind) == (6, (1,))


def test_death_of_the_only_holder_during_the_transfer_restores_a_checkpoint():
    story = Story(max_workers=2).start("w1").send(s.CheckpointSaved(step=5))
    story.send(s.WorkersAssigned(workers=("w1", "w2"))).warm("w2").report("w1", step=6)
    gone(story, "w1").report("w2", step=-1, why="failed")
    [form] = story.found(c.FormGeneration)
    assert (form.restore, form.step) == (True, 5)


# --- notices ---


def test_notice_while_a_generation_forms_waits_until_it_has_formed():
    story = forming("w1", "w2").send(s.WorkerNoticed(worker="w2"))
    assert not story.found(c.AnnounceChange)
    story.formed()
    assert story.found(c.AnnounceChange)
    story.report("w1", step=1).report("w2", step=1)
    assert story.ranks() == ["w1"]


def test_kill_before_the_end_of_the_notice_is_an_ordinary_loss():
    story = Story().start("w1", "w2").send(s.WorkerNoticed(worker="w2"))
    assert story.found(c.AnnounceChange)
    gone(story, "w2")
    assert story.found(c.AbortGeneration)
    story.report("w1", step=4, why="failed")
    assert story.ranks() == ["w1"]


def test_noticed_worker_that_dies_after_its_report_delays_no_other_rank():
    story = Story().start("w1", "w2").send(s.WorkerNoticed(worker="w2"))
    story.report("w2", step=4)
    gone(story, "w2").report("w1", step=4)
    assert story.ranks() == ["w1"]
    assert not story.found(c.AbortGeneration, ever=True)


def test_two_notices_at_once_are_one_change():
    story = Story().start("w1", "w2", "w3")
    story.send(s.WorkerNoticed(worker="w2")).send(s.WorkerNoticed(worker="w3"))
    for worker in ("w1", "w2", "w3"):
        story.report(worker, step=4)
    assert story.ranks() == ["w1"]
    assert len(story.found(c.AnnounceChange, ever=True)) == 1


def test_if_all_workers_are_noticed_they_train_until_a_newcomer_can_take_over():
    story = Story(max_workers=2).start("w1", "w2")
    story.send(s.WorkerNoticed(worker="w1")).send(s.WorkerNoticed(worker="w2"))
    story.report("w1", step=4).report("w2", step=4)
    assert story.ranks() == ["w1", "w2"]  # nobody else holds the state
    assert not story.formed().found(c.AnnounceChange)
    story.send(s.WorkersAssigned(workers=("w3",))).warm("w3")
    assert story.found(c.AnnounceChange)


# --- the phases of a recovery ---


def test_generation_is_ready_when_its_last_rank_steps_and_logs_the_slowest_of_each_phase():
    story = forming("w1", "w2")
    times = {"w1": (0.01, 0.0, 0.002), "w2": (0.02, 0.3, 0.001)}
    for worker, (connect_s, sync_s, wrap_s) in times.items():
        assert not story.found(events.GenerationReady)
        story.send(
            s.TrainerFormed(
                trainer=story.trainer(worker),
                generation=1,
                connect_s=connect_s,
                sync_s=sync_s,
                wrap_s=wrap_s,
            )
        )
    [ready] = story.found(events.GenerationReady)
    assert (ready.generation, ready.world_size) == (1, 2)
    assert (ready.connect_s, ready.sync_s, ready.wrap_s) == (0.02, 0.3, 0.002)


def test_generation_that_lost_a_rank_before_it_stepped_was_never_ready():
    story = forming("w1", "w2")
    story.send(s.TrainerFormed(trainer=story.trainer("w1"), generation=1))
    gone(story, "w2")
    assert not story.found(events.GenerationReady, ever=True)
