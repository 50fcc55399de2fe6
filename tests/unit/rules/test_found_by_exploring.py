"""Stories that the exploration of the state machine has told us, kept as it told them."""

from __future__ import annotations

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from tests.unit.rules.story import Story


def test_worker_scaled_down_and_up_again_before_it_left_stays():
    """It used to leave, and nobody started another trainer: the job waited below min for ever."""
    story = Story(min_workers=2, max_workers=3).start("w1", "w2")
    story.send(s.WorkersAssigned(workers=("w1",)))
    story.send(s.WorkersAssigned(workers=("w1", "w2")))
    story.report("w1", step=3).report("w2", step=3)
    assert story.ranks() == ["w1", "w2"]
    assert not story.found(c.ReleaseTrainer)


def test_job_is_not_finished_if_all_holders_of_its_end_died_before_it_was_saved():
    story = Story().start("w1")
    story.send(s.CheckpointSaved(step=4))
    story.report("w1", step=9, why="done")
    assert story.found(c.SaveCheckpoint)
    story.lose("w1")
    assert story.state.status == "waiting"
    story.send(s.WorkersAssigned(workers=("w1",)))
    story.wait(5.0).warm("w1").wait(5.0)
    form = [x for x in story.all if isinstance(x, c.FormGeneration)][-1]
    assert (form.generation, form.restore, form.step) == (2, True, 4)


def test_survivor_without_the_last_step_repeats_it_after_the_others_died():
    """w1 has finished step 9 and dies; w2 had not seen its end: the job is not done yet."""
    story = Story().start("w1", "w2")
    story.report("w1", step=9, why="done")
    story.report("w2", step=8, why="failed")
    assert story.found(c.SaveCheckpoint)
    story.lose("w1")
    assert story.ranks() == ["w2"]
    [form] = story.found(c.FormGeneration)
    assert (form.step, form.restore) == (8, False)


def test_immediate_stop_while_the_end_is_saved_results_in_stopped():
    story = Story().start("w1").report("w1", step=9, why="done")
    story.send(s.StopRequested(now=True))
    assert story.state.status == "stopped"


def test_step_that_only_its_dead_holder_had_committed_is_logged_as_undone():
    story = Story().start("w1", "w2").send(s.PauseRequested())
    for worker, step in (("w2", 4), ("w1", 5)):  # w1 saw the end of step 5, w2 did not
        told = {"trainer": story.trainer(worker), "generation": 1, "why": "failed"}
        undone = worker == "w2"
        story.send(s.TrainerReported(progress=(step, 0), undone=undone, **told))
    assert not story.found(events.StepUndone)  # w1 has it and can hand it over
    story.lose("w1")
    [fact] = story.found(events.StepUndone)
    assert (fact.generation, fact.step, fact.workers) == (1, 5, ["w2"])


def test_rank_that_freezes_during_a_long_step_is_killed_after_the_limit():
    """It had computed for long when it froze: that says nothing for it."""
    story = Story().start("w1", "w2")
    story.see("w1", 3).see("w2", 3)
    limit_s = story.state.hang_s
    story.now += 10 * limit_s
    frozen_s = limit_s + 1
    story.see("w1", 3).see("w2", 3, alive_age_s=frozen_s)
    story.wait(0.25)
    [kill] = story.found(c.KillTrainer)
    assert kill.trainer == story.trainer("w2")


def test_generation_after_one_that_broke_without_a_loss_has_reason_broken():
    story = Story().start("w1", "w2")
    story.report("w1", step=4, why="failed").report("w2", step=4, why="failed")
    [fact] = story.found(events.GenerationFormed)
    assert (fact.generation, fact.why) == (2, "broken")
