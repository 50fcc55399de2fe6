"""What can happen to a job, as values: the input of the state machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Progress = tuple[int, int]
"""How far a trainer's state is: ``(committed steps, evaluations done)``.

``NO_PROGRESS`` before it holds any."""

NO_PROGRESS: Progress = (-1, 0)


@dataclass(frozen=True, kw_only=True)
class WorkersAssigned:
    """These workers, in order of preference, and no others belong to the job from now on."""

    workers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerNoticed:
    """A worker's machine will be taken away: it leaves at the next step boundary."""

    worker: str
    deadline: float = math.inf
    """When it will be taken, by the clock of the state machine; infinite if nobody knows."""


@dataclass(frozen=True, kw_only=True)
class WorkerGone:
    """A worker's connection closed, or its machine vanished; its trainer is gone with it."""

    worker: str
    cause: str
    detected_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainerWarm:
    """A trainer is ready to be admitted."""

    trainer: str
    warm_s: float = 0.0
    """How long it took to build all and run one pass; 0 if nobody knows."""
    device: str = ""
    """What it trains on, as torch names it."""
    gpu: str = ""
    """The GPU's identifier; empty without one."""


@dataclass(frozen=True, kw_only=True)
class TrainerFormed:
    """A rank has its process group and the newest state, and goes on stepping."""

    trainer: str
    generation: int
    connect_s: float = 0.0
    sync_s: float = 0.0
    wrap_s: float = 0.0
    """How long the parts took it, see ``events.GenerationReady``."""
    step: int = 0
    """Where it goes on from; only the ranks know which checkpoint could be read."""


@dataclass(frozen=True, kw_only=True)
class TrainerReported:
    """A rank has left its generation and stands at a step boundary.

    ``why`` is ``planned`` (a change was pending), ``failed`` (its collectives broke or were
    aborted; ``undone`` tells whether a step had been begun) or ``done`` (nothing is left to train).
    """

    trainer: str
    generation: int
    progress: Progress
    why: Literal["planned", "failed", "done"]
    undone: bool = False
    ending: str = ""
    """Why nothing is left to train, if that is so before the planned end."""
    error: str = ""
    """If ``failed``, the text of the failure; empty if this rank only saw the abort."""
    backend: str = ""
    """The backend that the failure came from, ``nccl`` or ``gloo``; empty if unknown."""
    is_excused: bool = False
    """The failure says nothing about the connections: memory ran out, or a fault was injected."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteLoss:
    """A rank has undone a step whose mean loss is NaN or infinite, and left its generation.

    All ranks of the generation do so by themselves, unless they are lost.
    """

    trainer: str
    generation: int
    rank: int
    progress: Progress
    """Of the step before."""
    loss: float
    is_source: bool
    """Whether its own share of the loss was not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainerLost:
    """A trainer's process ended while its worker lives."""

    trainer: str
    cause: str
    detected_s: float = 0.0
    last_words: str = ""
    """What it printed at the end, as a person should see it."""
    injected: bool = False
    """Somebody did it on purpose: it says nothing about the notebook or the machine."""


@dataclass(frozen=True, kw_only=True)
class ProgressSeen:
    """What a supervisor read on a trainer's progress page, once a second.

    See ``ranks.control.progress.TrainerProgress`` for the numbers.
    """

    trainer: str
    generation: int
    collectives: int
    beats: int
    phase: str = "idle"
    alive_age_s: float = 0.0
    process: str = ""
    """The process as the system sees it, asked for only if it seems frozen: ``stopped`` ..."""


@dataclass(frozen=True, kw_only=True)
class UserErrorSeen:
    """The notebook's code raised in a trainer, which stands at the last good step now."""

    trainer: str
    generation: int
    progress: Progress
    error: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class StepsCommitted:
    """The newest committed step that the log has, and how long a step takes at present."""

    step: int
    step_s: float
    committed_at: float = 0.0
    """When rank 0 made it, by the coordinator's clock as far as is known; 0.0 if it is not."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint of this step is durable (``ok``), or the trainer could not write it."""

    step: int
    ok: bool = True
    trainer: str = ""
    """Who wrote it; empty stands for whoever was asked to."""
    error: str = ""
    """Why it could not be written."""
    duration_s: float = 0.0
    """From the step boundary until it was durable."""


@dataclass(frozen=True, kw_only=True)
class BoundsChanged:
    """Somebody asked for other bounds of the number of workers."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, kw_only=True)
class PauseAsked:
    """Stop stepping at the next boundary; ranks keep their state."""


@dataclass(frozen=True, kw_only=True)
class ResumeAsked:
    """Go on after a pause."""


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """End the job: at the next step boundary with a checkpoint, or ``now`` without either."""

    now: bool = False


@dataclass(frozen=True, kw_only=True)
class SurvivorFound:
    """A trainer that has outlived the scheduler which started it, as its supervisor knows it."""

    trainer: str
    worker: str
    generation: int = 0
    """The newest that it was told to form; 0 if none."""
    is_inside: bool = False
    """Whether it has neither reported from that one nor failed in it."""
    is_warm: bool = False
    warm_s: float = 0.0
    device: str = ""
    gpu: str = ""
    progress: Progress = NO_PROGRESS
    """As it reported last; inside a generation it may be further by now."""


@dataclass(frozen=True, kw_only=True)
class TrainersFound:
    """Another scheduler has taken the job over, and these of its trainers are there."""

    found: tuple[SurvivorFound, ...]
    lost: tuple[str, ...] = ()
    """Workers that are not there any more, or not with the job's trainer."""
    world_size: int = 0
    """Ranks of the newest generation when it was formed."""
    is_ready: bool = False
    """Whether all of them had stepped in it."""
    backend: str = "gloo"
    """The backend that sums its gradients."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""

    asleep_s: float = 0.0
    """Of it, what the coordinator itself slept through: nobody could be heard meanwhile, so that
    nobody's silence or standstill counts."""


Stimulus = (
    WorkersAssigned
    | WorkerNoticed
    | WorkerGone
    | TrainerWarm
    | TrainerFormed
    | TrainerReported
    | NonFiniteLoss
    | TrainerLost
    | ProgressSeen
    | UserErrorSeen
    | StepsCommitted
    | CheckpointSaved
    | BoundsChanged
    | PauseAsked
    | ResumeAsked
    | StopAsked
    | TrainersFound
    | Tick
)
