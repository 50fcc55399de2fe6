"""A job whose ranks each have a part of the state: saved together, and handed over in turn."""

from __future__ import annotations

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership import commands as c
from etrain_jupyter.rules.membership import stimuli as s
from tests.unit.rules.story import Story

FOUR = ("w1", "w2", "w3", "w4")


def started(*workers: str) -> Story:
    return Story(is_sharded=True).start(*workers)


def finish(story: Story, *workers: str, step: int = 7) -> Story:
    """All ranks have trained the last step."""
    for worker in workers:
        story.report(worker, step, why="done")
    return story


def test_ranks_save_the_last_state_together_in_a_generation_of_their_own():
    story = finish(started("w1", "w2"), "w1", "w2")
    [form] = story.found(c.FormGeneration)
    assert form.saves
    assert len(form.trainers) == 2
    assert not story.found(c.SaveCheckpoint, ever=True)
    [formed] = story.found(events.GenerationFormed)
    assert formed.why == "save"

    story.formed().send(s.CheckpointSaved(step=7, ok=True))
    story.report("w1", 7).report("w2", 7)
    assert story.state.status == "finished"


def test_state_that_could_not_be_saved_is_retried_until_the_job_gives_up():
    story = finish(started("w1", "w2"), "w1", "w2")
    for wait_s in (5.0, 10.0, 20.0, 20.0):
        assert story.state.phase == "running"
        story.formed().send(s.CheckpointSaved(step=7, ok=False, error="disk full"))
        story.report("w1", 7).report("w2", 7)
        story.wait(wait_s + 0.1)
    assert story.state.status == "failed"
    assert "disk full" in story.state.reason


def test_survivors_save_at_once_if_a_rank_is_lost_while_they_save():
    story = finish(started("w1", "w2", "w3"), "w1", "w2", "w3")
    story.formed().lose("w3")
    story.report("w1", 7, why="failed").report("w2", 7, why="failed")
    [form] = story.found(c.FormGeneration)
    assert form.saves
    assert len(form.trainers) == 2


def test_newest_state_is_saved_after_an_error_of_the_notebook():
    story = started("w1", "w2").send(
        s.UserErrorSeen(
            trainer="j/w1/1", generation=1, progress=(7, 0), error="ValueError", traceback=""
        )
    )
    story.report("w2", 7, why="failed")
    [form] = story.found(c.FormGeneration)
    assert form.saves


def test_neighbors_leave_one_after_the_other():
    story = started(*FOUR)
    story.send(s.WorkersAssigned(workers=("w1", "w2")))
    for worker in FOUR:
        story.report(worker, 3)
    assert story.ranks() == ["w1", "w2", "w4"]

    story.formed()
    for worker in ("w1", "w2", "w4"):
        story.report(worker, 4)
    assert story.ranks() == ["w1", "w2"]


def test_ranks_that_are_no_neighbors_leave_at_once():
    story = started(*FOUR)
    story.send(s.WorkersAssigned(workers=("w1", "w3")))
    for worker in FOUR:
        story.report(worker, 3)
    assert story.ranks() == ["w1", "w3"]


def test_reason_of_a_restore_is_that_a_part_of_the_state_was_lost():
    story = started(*FOUR).lose("w2").lose("w3")
    story.report("w1", 7, why="failed").report("w4", 7, why="failed")
    for worker in ("w1", "w4"):
        story.send(
            s.TrainerReported(
                trainer=story.trainer(worker),
                generation=story.state.generation,
                progress=s.NO_PROGRESS,
                why="failed",
                error="shards are lost",
                is_excused=True,
            )
        )
    [form] = story.found(c.FormGeneration)
    assert form.restore
    assert story.state.current.why_restored == "shards are lost"
