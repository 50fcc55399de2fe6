"""The state of one job's membership, as an immutable value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from etrain_jupyter.log.events import TERMINAL_STATUSES, JobStatus
from etrain_jupyter.rules.membership.faults import NO_FAILED_FORMS, Break, FailedForms, Health
from etrain_jupyter.rules.membership.members import Member, MemberPhase, Members, replace

JobPhase = Literal["gathering", "running", "changing", "collecting", "closing"]
Outcome = Literal["finished", "stopped", "failed"]
FormReason = Literal["start", "join", "leave", "lost", "stalled", "restart", "resume"]
"""Why the next generation forms. If no worker was lost, the log has ``broken`` instead of
``lost``."""

KEEP_LOST = 8
"""Maximum number of lost workers that the status of a waiting job lists."""


@dataclass(frozen=True, kw_only=True)
class NanLoss:
    """A step that all ranks discarded before its update because the loss was not finite."""

    step: int
    loss: float
    """The mean over the ranks: NaN, or infinite."""
    sources: tuple[tuple[int, str], ...] = ()
    """Rank and worker of each rank that has reported a non-finite loss on its own samples."""

    def to_text(self, saved_step: int) -> str:
        """Describe what happened, where, and which state remains.

        Args:
            saved_step: The newest durable checkpoint; below 0 if there is none.

        >>> NanLoss(step=12, loss=float("nan"), sources=((1, "w1"),)).to_text(8)
        'the loss of step 12 is nan on rank 1 (w1); no rank updated its weights, which are those \
of step 11; the newest checkpoint is of step 8'
        """
        # All ranks report the mean, but only the ranks that caused it report themselves as sources,
        # and these may be lost.
        named = [f"rank {rank} ({worker})" for rank, worker in self.sources]
        where = f" on {', '.join(named)}" if named else " (the ranks that computed it were lost)"
        newest = f"the newest checkpoint is of step {saved_step}"
        return (
            f"the loss of step {self.step} is {self.loss}{where}; no rank updated its weights, "
            f"which are those of step {self.step - 1}; "
            f"{newest if saved_step >= 0 else 'there is no checkpoint yet'}"
        )


@dataclass(frozen=True, kw_only=True)
class UserError:
    """The exception that the notebook's code raised, and where."""

    error: str
    traceback: str
    workers: tuple[str, ...]
    step: int
    nan_loss: NanLoss | None = None
    """The loss that was not finite, if that is the error; None for an exception."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Progress of a checkpoint that blocks the job, because its state could otherwise be lost."""

    trainer: str = ""
    """The trainer that was instructed to write it and has not responded; empty if there is none."""
    since: float = 0.0
    """When the checkpoint was requested; 0.0 if none was requested."""
    failed: tuple[str, ...] = ()
    """Trainers that could not write it in the current round."""
    num_rounds: int = 0
    """Rounds in which no holder of the state could write it."""
    retry_at: float = 0.0
    """Earliest time of the next attempt."""
    error: str = ""
    """Error of the newest failed attempt; empty if none has failed."""


@dataclass(frozen=True, kw_only=True)
class GenerationState:
    """The newest generation, which is running or was the last to run."""

    number: int = 0
    """Counted from 1; 0 before the first generation."""
    world_size: int = 0
    """Number of ranks when it was formed."""
    first_step: int = 0
    """The step that it started from."""
    backend: str = "gloo"
    """The backend that sums its gradients, ``nccl`` or ``gloo``."""
    is_restoring: bool = False
    """True if it started from a checkpoint."""
    why_restored: str = ""
    """Why it started from a checkpoint although trainers of the previous generation remain."""
    is_saving: bool = False
    """True if its ranks only save the state; see ``JobState.is_sharded``."""
    trainers: tuple[str, ...] = ()
    """Its trainers in rank order."""
    ready_at: float | None = None
    """When all its ranks had formed; None before."""
    has_lost: bool = False
    """True if one of its ranks was lost."""
    has_backup: bool = False
    """True if a checkpoint was requested from its ranks because all of them will leave."""
    breaks: tuple[Break, ...] = ()
    """Reports from its ranks that it broke."""
    undone: tuple[tuple[int, str], ...] = ()
    """Pairs of an undone step and the worker of a survivor that had begun it; kept until logged."""
    nan_loss: NanLoss | None = None
    """The step that it ended with, if the loss of that step was not finite."""

    @property
    def is_ready(self) -> bool:
        """True if all its ranks have formed."""
        return self.ready_at is not None


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Failures that count against a budget or delay a retry, and the workers that are missing."""

    failed_forms: FailedForms = NO_FAILED_FORMS
    """Consecutive generations that broke although no worker was lost."""
    form_at: float = 0.0
    """Earliest time of the next attempt to form after such a failure."""
    health: Mapping[str, Health] = field(default_factory=dict)
    """Workers whose trainers exited on their own."""
    lost: tuple[tuple[str, str], ...] = ()
    """Lost workers that are still missing, each with the cause; at most ``KEEP_LOST``."""
    num_warm_ups: int = 0
    """Consecutive incidents in which trainers exited during the warm-up, before any completed
    it."""
    warm_up_at: float = -math.inf
    """When the newest of these incidents began."""
    at_step: tuple[int, tuple[int, ...]] = (-1, ())
    """A step, and the generations that broke in it: a trainer exited, or the cause is unknown."""
    last: UserError | None = None
    """The newest of the faults above; the job fails with it when a budget is used up."""

    def with_lost(self, worker: str, cause: str) -> Faults:
        """Return a copy that lists ``worker`` as the newest lost one."""
        # A worker is listed once, with its newest cause.
        others = tuple(pair for pair in self.lost if pair[0] != worker)
        return replace(self, lost=(*others, (worker, cause))[-KEEP_LOST:])

    def with_warm_up_fault(self, fault: UserError, *, since: float, now: float) -> Faults:
        """Return a copy that counts a trainer that exited during its warm-up.

        Args:
            fault: Its exit.
            since: When it was started.
            now: When it exited.
        """
        # One incident may kill all trainers that are warming up, for example if memory runs out:
        #
        #     w1  started ──── exits       started ──── exits
        #     w2  started ────── exits           started ──── exits
        #                      1     same              2     same: started before w1's exit
        if since <= self.warm_up_at:
            return replace(self, last=fault)
        return replace(self, num_warm_ups=self.num_warm_ups + 1, warm_up_at=now, last=fault)

    def with_step_fault(self, fault: UserError, *, generation: int) -> Faults:
        """Return a copy that counts one more generation broken in the step after ``fault.step``."""
        step, generations = self.at_step
        known = generations if step == fault.step else ()  # another step starts a new count
        if generation not in known:  # several ranks may exit in one generation
            known = (*known, generation)
        return replace(self, at_step=(fault.step, known), last=fault)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Measured durations, from which deadlines and timeouts follow."""

    step_s: float = 0.0
    """Current duration of a step; 0 while it is unknown."""
    warm_s: float = 0.0
    """The longest warm-up of a trainer; an upper bound for a forward and backward pass."""
    save_s: float = 0.0
    """Recent duration of a checkpoint, from the step boundary until it is durable; 0 while it is
    unknown."""
    change_s: float = 0.0
    """Duration of the newest change: connecting, state transfer and wrapping; 0 before one."""
    last_step_at: float = 0.0
    """When the newest step was committed, according to the log; 0.0 before the first."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """The job must not step."""

    reason: str = ""
    """Why the job paused automatically; empty if the user paused it."""


@dataclass(frozen=True, kw_only=True)
class Finishing:
    """All steps are trained, or early stopping has ended training."""

    reason: str = ""
    """Why the job ends early; empty if it was trained to its planned end."""


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """The user has stopped the job."""

    reason: str = ""
    """Logged with the end of the job; empty for a request that concerns only this job."""


@dataclass(frozen=True, kw_only=True)
class Failing:
    """The job cannot succeed."""

    error: UserError


Ending = Finishing | Stopping | Failing


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Everything that determines what happens next to one job."""

    # --- given by the user ---

    job_id: str
    min_workers: int
    max_workers: int
    hang_s: float = 30.0
    """Minimum time without progress after which ranks count as stalled; see ``stalls``."""
    backend: str = "auto"
    """``backend`` of the configuration: ``auto``, ``nccl`` or ``gloo``."""
    is_sharded: bool = False
    """True if each rank has only a part of the state (``shard``): the ranks save it together."""
    pauses_on_nan: bool = False
    """True if a loss that is not finite pauses the job instead of failing it."""

    # --- its status and phase ---

    status: JobStatus = "submitted"
    """The status that the log shows; a terminal one if and only if the job has ended."""
    reason: str = ""
    phase: JobPhase = "gathering"
    """``gathering``: no generation is formed. ``running``: one is forming or stepping.
    ``changing``: its ranks leave at the next agreed step boundary. ``collecting``: it was aborted,
    and not all ranks have reported. ``closing``: no generation follows; the last checkpoint is
    written, or the job has ended."""
    since: float = 0.0
    """When this phase began."""
    pause: Pause | None = None
    """None unless the job is paused, or will be at the next step boundary."""
    ending: Ending | None = None
    """Planned end of the job; None while it trains."""

    # --- its trainers and generations ---

    members: Members = field(default_factory=Members)
    assigned: tuple[str, ...] = ()
    num_started: int = 0
    """Trainers started so far; makes their names unique."""
    current: GenerationState = GenerationState()
    next_whys: tuple[FormReason, ...] = ("start",)
    """Reasons for the next generation."""
    ring: tuple[str, ...] = ()
    """Trainers among which the state is divided, in rank order; only if ``is_sharded``. Empty if
    unknown."""
    has_trained: bool = False
    """True once all ranks of some generation have stepped: the notebook's code works."""
    faults: Faults = Faults()

    # --- its training state ---

    step: int = 0
    """Newest step known to be committed."""
    saved_steps: tuple[int, ...] = ()
    """Steps of the newest durable checkpoints, oldest first."""
    saving: Saving = Saving()
    """Checkpoint that must finish before the last holder of the newest state may leave."""
    timings: Timings = Timings()

    def with_member(self, member: Member) -> JobState:
        """Return a copy with ``member``, which replaces any member of the same name."""
        return replace(self, members=self.members.with_member(member))

    def without_member(self, trainer: str) -> JobState:
        """Return a copy without this trainer."""
        return replace(self, members=self.members.without(trainer))

    def in_phase(self, *phases: MemberPhase) -> list[Member]:
        """Return the members in one of these phases, oldest first."""
        return self.members.in_phase(*phases)

    def of_worker(self, worker: str) -> Member | None:
        """Return the worker's trainer, or None."""
        return self.members.of_worker(worker)

    @property
    def generation(self) -> int:
        """Number of the newest generation; 0 before the first."""
        return self.current.number

    @property
    def saved_step(self) -> int:
        """Step of the newest durable checkpoint; -1 if there is none."""
        return max(self.saved_steps, default=-1)

    @property
    def is_paused(self) -> bool:
        """True if the job must not step."""
        return self.pause is not None

    @property
    def outcome(self) -> Outcome | Literal[""]:
        """The terminal status that the job is heading for; empty while it trains."""
        match self.ending:
            case None:
                return ""
            case Finishing():
                return "finished"
            case Stopping():
                return "stopped"
            case Failing():
                return "failed"

    @property
    def is_ended(self) -> bool:
        """True if the job has ended: nothing changes any more."""
        return self.status in TERMINAL_STATUSES
