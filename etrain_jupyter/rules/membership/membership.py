"""The state of one job's membership, as a value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from etrain_jupyter.rules.membership.failed_forms import NO_FAILED_FORMS, Break, FailedForms
from etrain_jupyter.rules.membership.health import Health
from etrain_jupyter.rules.membership.nan_loss import NanLoss
from etrain_jupyter.rules.membership.stimuli import NO_PROGRESS, Progress, ProgressSeen

MemberPhase = Literal["starting", "warm", "ranked", "reported"]
JobPhase = Literal["gathering", "running", "changing", "collecting", "closing", "ended"]


@dataclass(frozen=True, kw_only=True)
class LifeSigns:
    """What a trainer's progress page said last."""

    seen: ProgressSeen
    heard_at: float
    """When it said so."""
    moved_at: float
    """When it last said something new of collectives and beats."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One trainer process of the job."""

    trainer: str
    worker: str
    order: int
    """Counts the job's trainers: older ones get the lower ranks."""
    device: str = ""
    """As torch names it; empty until it is warm."""
    gpu: str = ""
    """The GPU's identifier; empty without one."""
    phase: MemberPhase = "starting"
    """``starting`` until warm; ``ranked`` in the living generation;
    ``reported`` between two of them."""
    since: float = 0.0
    """When it entered this phase."""
    progress: Progress = NO_PROGRESS
    leaving: str = ""
    """Why it shall leave at the next step boundary; empty if it shall stay."""
    save_at: float = math.inf
    """When it stops to step at the latest, so that its state is durable before its machine goes;
    infinite if nobody takes the machine, or nobody knows when."""
    formed: bool = False
    """It has said that it is stepping in the living generation."""
    steps_since: float = 0.0
    """When it said so for the first time; 0.0 before that."""
    form_times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """How long it took for that to connect, to sync and to wrap, in seconds."""
    signs: LifeSigns | None = None
    """None until its supervisor has told."""
    is_warned_of: bool = False
    """Whether the log says already that it stands still."""
    killed_at: float = 0.0
    """When its supervisor was told to kill it; 0.0 if it was not."""
    killed_why: str = ""


@dataclass(frozen=True, kw_only=True)
class UserError:
    """What the notebook's code raised, and where."""

    error: str
    traceback: str
    workers: tuple[str, ...]
    step: int
    nan_loss: NanLoss | None = None
    """The loss that was not finite, if it was that and no exception."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A checkpoint that is waited for, because its state may be gone afterwards."""

    trainer: str = ""
    """Who was asked to write it and has not answered; empty if nobody was."""
    since: float = 0.0
    """When it was asked."""
    failed: tuple[str, ...] = ()
    """Those that could not write it, since the last wait."""
    num_rounds: int = 0
    """How often nobody could, of all that hold the state."""
    retry_at: float = 0.0
    """When the next one may try."""
    error: str = ""
    """Why the last one could not; empty if none has failed."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Everything that decides what happens next to one job."""

    job_id: str
    min_workers: int
    max_workers: int
    status: str = "submitted"
    reason: str = ""
    phase: JobPhase = "gathering"
    """``gathering``: no generation lives. ``running``: one does. ``changing``: its ranks were told
    to leave after a step. ``collecting``: it was aborted, reports are awaited. ``closing``: a last
    checkpoint is being written."""
    since: float = 0.0
    """When this phase began."""
    generation: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()
    num_started: int = 0
    """Trainers started so far: gives each a name of its own."""
    whys: tuple[str, ...] = ("start",)
    """Reasons of the next generation."""
    step: int = 0
    """Newest step known to be committed."""
    step_s: float = 0.0
    """How long a step takes at present; 0 while nobody knows."""
    warm_s: float = 0.0
    """The longest that a trainer needed to warm up: no pass takes longer."""
    hang_s: float = 30.0
    """How long ranks may stand still, at least; see ``stalls``."""
    world_size: int = 0
    """Ranks of the newest generation when it was formed."""
    is_restoring: bool = False
    """Whether the newest generation began with a checkpoint."""
    backend: str = "auto"
    """What the cell says: ``auto``, ``nccl`` or ``gloo``."""
    used_backend: str = "gloo"
    """The backend that sums the gradients of the newest generation."""
    first_step: int = 0
    """The step that the newest generation began with."""
    ready_at: float = 0.0
    """When all its ranks had formed; see ``is_ready``."""
    breaks: tuple[Break, ...] = ()
    """Its ranks' reports that it broke."""
    failed_forms: FailedForms = NO_FAILED_FORMS
    """Generations in a row that broke although no worker was lost."""
    form_at: float = 0.0
    """When the next one may be tried."""
    is_ready: bool = False
    """Whether all ranks of the newest generation have stepped."""
    has_trained: bool = False
    """Whether that was so in any generation: the notebook's code works."""
    has_lost: bool = False
    """Whether any of them was lost."""
    lost: tuple[tuple[str, str], ...] = ()
    """Workers that are missing because they were lost, and the causes."""
    health: Mapping[str, Health] = field(default_factory=dict)
    """Workers whose trainers ended by themselves."""
    undone: tuple[tuple[int, str], ...] = ()
    """Steps that survivors had begun and undone, and their workers; until the log is told."""
    last_step_at: float = 0.0
    """When the newest step was committed, as far as the log knows."""
    saved_steps: tuple[int, ...] = ()
    """Steps of the newest durable checkpoints, oldest first."""
    save_s: float = 0.0
    """How long a checkpoint takes from the step boundary until it is durable, lately; 0 while
    nobody knows."""
    saving: Saving = Saving()
    """The checkpoint without which the newest state may not leave."""
    backed_up: int = 0
    """The generation that was asked for a checkpoint because all its ranks will leave."""
    paused: bool = False
    pause_reason: str = ""
    """Why, where nobody asked for it."""
    pauses_on_nan: bool = False
    """Whether a loss that is not finite pauses the job, instead of failing it."""
    nan_loss: NanLoss | None = None
    """The step that the newest generation ended with, if its loss was that."""
    outcome: str = ""
    """Terminal status that the job is heading for; empty while it trains."""
    ending: str = ""
    """Why it is finished before its time; empty if it is not."""
    user_error: UserError | None = None
    warm_faults: int = 0
    """Trainers that ended in a row before any was warm, while nobody held the state."""
    same_step_faults: tuple[int, tuple[int, ...]] = (-1, ())
    """A step, and the generations that broke in it by the fault of a trainer, or of nobody."""
    last_fault: UserError | None = None
    """How the newest of these faults came; what fails the job if it goes on like that."""

    def replace(self, **changes: Any) -> JobState:
        """Return a copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    def with_member(self, member: Member) -> JobState:
        """Return a copy that holds ``member`` under its name."""
        return self.replace(members={**self.members, member.trainer: member})

    def without_member(self, trainer: str) -> JobState:
        """Return a copy that knows no such trainer."""
        return self.replace(members={k: v for k, v in self.members.items() if k != trainer})

    def in_phase(self, *phases: MemberPhase) -> list[Member]:
        """Return the members in one of these phases, oldest first."""
        found = [m for m in self.members.values() if m.phase in phases]
        return sorted(found, key=lambda m: m.order)

    def of_worker(self, worker: str) -> Member | None:
        """Return the worker's trainer, if it has one."""
        return next((m for m in self.members.values() if m.worker == worker), None)

    @property
    def saved_step(self) -> int:
        """Step of the newest durable checkpoint; -1 if there is none."""
        return max(self.saved_steps, default=-1)

    @property
    def is_ended(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self.phase == "ended"
