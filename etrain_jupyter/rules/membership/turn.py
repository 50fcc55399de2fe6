"""One call to the state machine: the state as it changes, and the transitions that rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from etrain_jupyter.log import events
from etrain_jupyter.rules.membership.commands import (
    AbortGeneration,
    Command,
    Publish,
    ReleaseTrainer,
    StartTrainer,
)
from etrain_jupyter.rules.membership.members import Member, replace
from etrain_jupyter.rules.membership.membership import (
    Failing,
    Faults,
    Finishing,
    FormReason,
    GenerationState,
    JobPhase,
    JobState,
    Pause,
    Saving,
    Stopping,
    Timings,
    UserError,
)


class Turn:
    """One call to ``handle``: the state as it changes, and the commands so far.

    The state changes only through these methods, each of which is one transition.
    """

    def __init__(self, state: JobState, now: float, wall: float) -> None:
        self.state = state
        self.now = now
        self.wall = wall
        """Seconds since the epoch, for the log only, because the wall clock may jump."""
        self.commands: list[Command] = []

    # --- outputs ---

    def do(self, command: Command) -> None:
        """Add a command."""
        self.commands.append(command)

    def publish(self, kind: Callable[..., events.Event], **values: Any) -> None:
        """Add an event for the log."""
        state = self.state
        event = kind(job_id=state.job_id, time=self.wall, generation=state.generation, **values)
        self.do(Publish(event=event))

    def log(self, text: str, *, level: str = "warning", worker: str = "") -> None:
        """Add a message for the log."""
        self.publish(events.LogLine, level=level, worker=worker, text=text)

    # --- status and phase ---

    def enter_phase(self, phase: JobPhase) -> None:
        """Enter a phase now; entering ``running`` again restarts its clock."""
        if phase != self.state.phase or phase == "running":
            self.state = replace(self.state, phase=phase, since=self.now)  # ``stalls`` reads it

    def set_status(self, status: events.JobStatus, reason: str = "") -> None:
        """Change the job's status and log it, unless it is the current one."""
        if (status, reason) != (self.state.status, self.state.reason):
            self.state = replace(self.state, status=status, reason=reason)
            self.publish(events.JobStatusChanged, status=status, reason=reason)

    def pause(self, reason: str = "") -> None:
        """Pause the job. A user's request has no reason and does not replace an earlier reason."""
        if reason or self.state.pause is None:
            self.state = replace(self.state, pause=Pause(reason=reason))

    def unpause(self) -> None:
        """Let the job step again."""
        self.state = replace(self.state, pause=None)

    def finish(self, reason: str) -> None:
        """Plan to end the job as ``finished``, unless it is being stopped or is failing."""
        if isinstance(self.state.ending, Finishing | None):
            self.state = replace(self.state, ending=Finishing(reason=reason))

    def stop(self, reason: str) -> None:
        """Plan to end the job as ``stopped``."""
        self.state = replace(self.state, ending=Stopping(reason=reason))

    def fail(self, error: UserError) -> None:
        """Plan to end the job as ``failed``, in place of any other planned end."""
        self.state = replace(self.state, ending=Failing(error=error))

    def train_on(self) -> None:
        """Cancel the planned end. The coordinator assigns workers again."""
        self.state = replace(self.state, ending=None, assigned=(), saving=Saving())

    # --- workers and trainers ---

    def set_bounds(self, *, min_workers: int, max_workers: int) -> None:
        """Change the minimum and maximum number of workers."""
        self.state = replace(self.state, min_workers=min_workers, max_workers=max_workers)

    def assign(self, workers: Iterable[str]) -> None:
        """Replace the workers that the job may use, in order of preference."""
        self.state = replace(self.state, assigned=tuple(workers))

    def unassign(self, worker: str) -> None:
        """Remove a worker from those that the job may use."""
        self.assign(w for w in self.state.assigned if w != worker)

    def put(self, member: Member) -> None:
        """Add a member, or replace the one with this name."""
        self.state = self.state.with_member(member)

    def remove(self, member: Member) -> None:
        """Remove a member."""
        self.state = self.state.without_member(member.trainer)

    # --- generations ---

    def add_why(self, why: FormReason) -> None:
        """Add a reason for the next generation."""
        if why not in self.state.next_whys:
            self.state = replace(self.state, next_whys=(*self.state.next_whys, why))

    def begin_generation(self, current: GenerationState) -> None:
        """Make this the newest generation, which starts from its first step.

        Checkpoints after that step are dropped, because they are not part of the job's history; see
        ``lineage``.
        """
        step = current.first_step
        self.state = replace(
            self.state,
            current=current,
            next_whys=(),
            step=step,
            saved_steps=tuple(saved for saved in self.state.saved_steps if saved <= step),
            saving=Saving(),
        )

    def adopt_generation(self, current: GenerationState) -> None:
        """Take over the newest generation from a previous scheduler."""
        self.state = replace(self.state, current=current, next_whys=())

    def update_generation(self, current: GenerationState) -> None:
        """Replace the record of the newest generation."""
        self.state = replace(self.state, current=current)

    def restored_at(self, step: int) -> None:
        """Start the newest generation from the checkpoint that its ranks could read."""
        # Newer checkpoints could not be read, and their steps are repeated.
        known = tuple(saved for saved in self.state.saved_steps if saved <= step)
        current = replace(self.state.current, first_step=step)
        self.state = replace(self.state, step=step, saved_steps=known, current=current)

    def ready(self) -> None:
        """Record that all ranks of the newest generation have formed."""
        # From now on, an error on a newcomer is attributed to the newcomer's worker; see
        # ``state_machine._is_dispensable``.
        current = replace(self.state.current, ready_at=self.now)
        self.state = replace(self.state, current=current, has_trained=True, ring=current.trainers)

    # --- training state ---

    def committed(self, step: int) -> None:
        """Record that a step is committed; an older step changes nothing."""
        self.state = replace(self.state, step=max(self.state.step, step))

    def saved(self, steps: Iterable[int]) -> None:
        """Replace the steps of the durable checkpoints, oldest first."""
        self.state = replace(self.state, saved_steps=tuple(steps))

    def update_saving(self, saving: Saving) -> None:
        """Replace the progress of the checkpoint that blocks the job."""
        self.state = replace(self.state, saving=saving)

    def update_timings(self, timings: Timings) -> None:
        """Replace the durations that determine timeouts."""
        self.state = replace(self.state, timings=timings)

    def update_faults(self, faults: Faults) -> None:
        """Replace the record of failures."""
        self.state = replace(self.state, faults=faults)

    def excuse_sleep(self, asleep_s: float) -> None:
        """Shift the start of the phase by the time for which the coordinator was suspended."""
        self.state = replace(self.state, since=self.state.since + asleep_s)


def start_missing(turn: Turn) -> None:
    """Start a trainer on every assigned worker that has none and whose back-off is over."""
    served = {member.worker for member in turn.state.members.values()}
    for worker in turn.state.assigned:
        health = turn.state.faults.health.get(worker)
        is_waiting = health is not None and health.retry_at > turn.now
        if worker in served or is_waiting:
            continue
        served.add(worker)
        # The number is never reused, so late reports cannot be attributed to a successor.
        number = turn.state.num_started + 1
        trainer = f"{turn.state.job_id}/{worker}/{number}"
        turn.state = replace(turn.state, num_started=number)
        turn.put(Member(trainer=trainer, worker=worker, order=number, since=turn.now))
        turn.do(StartTrainer(trainer=trainer, worker=worker))


def request_leave(turn: Turn, member: Member, reason: events.LeaveReason) -> None:
    """Mark a member as leaving; one that holds no state yet leaves immediately."""
    if member.phase in ("starting", "warm"):
        release(turn, member, reason)
    else:
        turn.put(replace(member, leaving=reason))


def release(turn: Turn, member: Member, reason: events.LeaveReason) -> None:
    """Release a member that the job does not need."""
    turn.do(ReleaseTrainer(trainer=member.trainer))
    turn.remove(member)
    turn.publish(events.WorkerLeft, worker=member.worker, reason=reason)


def begin_collecting(turn: Turn, why: FormReason = "lost") -> None:
    """Abort the generation, to free the ranks that wait for a rank that will never respond."""
    # t  rank 0                       rank 1          rank 2
    # |  all-reduce of step 8         same            killed
    # |  waits                        waits
    # |  <---------- BreakGeneration (this command) ----------
    # v  undoes step 8, reports 7     the same        ``_settle`` forms the next one from step 7
    if turn.state.phase not in ("running", "changing"):
        return  # already aborted: several ranks report the same loss
    turn.add_why(why)
    ranked = turn.state.in_phase("ranked")
    turn.enter_phase("collecting")
    if ranked:
        names = tuple(m.trainer for m in ranked)
        turn.do(AbortGeneration(generation=turn.state.generation, trainers=names))


def newest_step(state: JobState) -> int:
    """Return the step of the newest state that a member at a step boundary holds; -1 if none."""
    return max((m.progress[0] for m in state.in_phase("reported")), default=-1)


def publish_undone(turn: Turn) -> None:
    """Log the undone step once, listing all survivors that had started it."""
    # w1 commits step 7 and dies; w2, w3 undo it       lost: StepUndone 7, by w2 and w3
    # w1 commits step 7 and survives; w2 undoes it     not lost: w1 will hand its state over to w2
    # ... but w1 dies before it does                   lost after all: keep the entry until then
    newest = newest_step(turn.state)
    current = turn.state.current
    lost = sorted({step for step, _ in current.undone if step > newest})
    for step in lost:
        workers = sorted(worker for begun, worker in current.undone if begun == step)
        turn.publish(events.StepUndone, step=step, workers=workers)
    if lost:
        kept = tuple(pair for pair in current.undone if pair[0] <= newest)
        turn.update_generation(replace(current, undone=kept))


def end_job(turn: Turn, *, unsaved: str = "") -> None:
    """Release all trainers and log how the job ended.

    Args:
        turn: The job, which has a planned end.
        unsaved: Why its last checkpoint is missing; the job then does not count as finished.
    """
    for member in list(turn.state.members.values()):
        turn.do(ReleaseTrainer(trainer=member.trainer))
    reasons = []
    status: events.JobStatus
    match turn.state.ending:
        case Failing(error=error):
            status = "failed"
            if error.nan_loss is not None:  # a newer checkpoint may have become durable
                text = error.nan_loss.to_text(turn.state.saved_step)
                error = replace(error, error=text)
            turn.publish(
                events.UserErrorRaised,
                error=error.error,
                traceback=error.traceback,
                workers=sorted(set(error.workers)),
                step=error.step,
            )
            reasons.append(error.error)
        case Finishing(reason=reason):
            status = "failed" if unsaved else "finished"
            reasons.append(reason)
        case Stopping(reason=reason):
            status = "stopped"
            reasons.append(reason)
        case None:
            status = "stopped"
    for member in list(turn.state.members.values()):
        turn.remove(member)
    turn.enter_phase("closing")
    turn.set_status(status, "; ".join(text for text in (*reasons, unsaved) if text))
