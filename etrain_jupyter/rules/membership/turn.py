"""One call of the state machine: the state as it changes, and what every rule may do to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership.commands import (
    AbortGeneration,
    Command,
    Publish,
    ReleaseTrainer,
    StartTrainer,
)
from etrain_jupyter.rules.membership.membership import JobState, Member


class Turn:
    """One call of ``handle``: the state as it changes, and the commands so far."""

    def __init__(self, state: JobState, now: float, wall: float) -> None:
        self.state = state
        self.now = now
        self.wall = wall
        """Seconds since the epoch, for the log only: the wall clock may be set at any time."""
        self.commands: list[Command] = []

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = self.state.replace(**changes)

    def set_member(self, member: Member, **changes: Any) -> None:
        """Change fields of one member; a new phase begins now."""
        if "phase" in changes and changes["phase"] != member.phase:
            changes.setdefault("since", self.now)
        self.state = self.state.with_member(dataclasses.replace(member, **changes))

    def do(self, command: Command) -> None:
        """Add a command."""
        self.commands.append(command)

    def publish(self, kind: Callable[..., events.Event], **values: Any) -> None:
        """Add a fact for the log."""
        state = self.state
        fact = kind(job_id=state.job_id, time=self.wall, generation=state.generation, **values)
        self.do(Publish(event=fact))

    def log(self, text: str, *, level: str = "warning", worker: str = "") -> None:
        """Add a remark for the log."""
        self.publish(events.LogLine, level=level, worker=worker, text=text)

    def set_status(self, status: str, reason: str = "") -> None:
        """Change the job's status and say so, if it is another one."""
        if (status, reason) != (self.state.status, self.state.reason):
            self.set(status=status, reason=reason)
            self.publish(events.JobStatusChanged, status=status, reason=reason)

    def add_why(self, why: str) -> None:
        """Add a reason for the next generation."""
        if why not in self.state.whys:
            self.set(whys=(*self.state.whys, why))


def start_missing(turn: Turn) -> None:
    """Start a trainer on every worker of the job that has none, and may have one now."""
    for worker in turn.state.assigned:
        if turn.state.of_worker(worker) is not None:
            continue
        health = turn.state.health.get(worker)
        if health is not None and health.retry_at > turn.now:
            continue
        number = turn.state.num_started + 1
        trainer = f"{turn.state.job_id}/{worker}/{number}"
        turn.set(num_started=number)
        fresh = Member(trainer=trainer, worker=worker, order=number, since=turn.now)
        turn.state = turn.state.with_member(fresh)
        turn.do(StartTrainer(trainer=trainer, worker=worker))


def ask_to_leave(turn: Turn, member: Member, reason: str) -> None:
    """Mark a member; one that holds no state yet leaves at once."""
    if member.phase in ("starting", "warm"):
        let_go(turn, member, reason)
    else:
        turn.set_member(member, leaving=reason)


def let_go(turn: Turn, member: Member, reason: str) -> None:
    """Release a member that nobody waits for."""
    turn.do(ReleaseTrainer(trainer=member.trainer))
    turn.state = turn.state.without_member(member.trainer)
    turn.publish(events.WorkerLeft, worker=member.worker, reason=reason)


def begin_collecting(turn: Turn, why: str = "lost") -> None:
    """Free the ranks that wait for one that will never answer."""
    if turn.state.phase not in ("running", "changing"):
        return
    turn.add_why(why)
    ranked = turn.state.in_phase("ranked")
    enter_phase(turn, "collecting")
    if ranked:
        names = tuple(m.trainer for m in ranked)
        turn.do(AbortGeneration(generation=turn.state.generation, trainers=names))


def newest_step(state: JobState) -> int:
    """Return the step of the newest state that anybody at a step boundary holds; -1 if none."""
    return max((m.progress[0] for m in state.in_phase("reported")), default=-1)


def publish_undone(turn: Turn) -> None:
    """Tell of the step in flight once, with all survivors that had begun it.

    A step that one survivor has committed is not lost, though another one had to undo its part; it
    may still be lost with that survivor, until the next generation has taken it over.
    """
    newest = newest_step(turn.state)
    known = turn.state.undone
    lost = sorted({step for step, _ in known if step > newest})
    for step in lost:
        workers = sorted(worker for begun, worker in known if begun == step)
        turn.publish(events.StepUndone, step=step, workers=workers)
    if lost:
        turn.set(undone=tuple(told for told in known if told[0] <= newest))


def end_job(turn: Turn, *, unsaved: str = "") -> None:
    """Release everybody and tell how the job ended.

    Args:
        turn: The job.
        unsaved: Why its last checkpoint is missing; a job without its weights has not finished.
    """
    for member in list(turn.state.members.values()):
        turn.do(ReleaseTrainer(trainer=member.trainer))
    outcome = turn.state.outcome or "stopped"
    if unsaved and outcome == "finished":
        outcome = "failed"
    error = turn.state.user_error
    if error is not None and error.nan_loss is not None:
        words = error.nan_loss.to_words(turn.state.saved_step)  # there may be a newer one now
        error = dataclasses.replace(error, error=words)
    if error is not None:
        turn.publish(
            events.UserErrorRaised,
            error=error.error,
            traceback=error.traceback,
            workers=sorted(set(error.workers)),
            step=error.step,
        )
    turn.set(members={})
    enter_phase(turn, "ended")
    ending = turn.state.ending if turn.state.outcome == "finished" else ""
    reasons = [error.error if error is not None else "", ending, unsaved]
    turn.set_status(outcome, "; ".join(reason for reason in reasons if reason))


def enter_phase(turn: Turn, phase: str) -> None:
    """Enter a phase now."""
    if phase != turn.state.phase:
        turn.set(phase=phase, since=turn.now)
    elif phase == "running":
        turn.set(since=turn.now)
