"""Stimuli: the input of the state machine, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Progress = tuple[int, int]
"""Progress of a trainer's state: ``(committed steps, evaluations done)``.

``NO_PROGRESS`` while it holds no state."""

NO_PROGRESS: Progress = (-1, 0)


@dataclass(frozen=True, kw_only=True)
class WorkersAssigned:
    """The only workers that the job may use from now on, in order of preference."""

    workers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerNoticed:
    """A worker's machine will be interrupted: the worker leaves at a step boundary before that."""

    worker: str
    deadline: float = math.inf
    """Time of the interruption, on the state machine's clock; infinite if unknown."""
    trains_on: bool = False
    """True if its replacement runs elsewhere: the worker trains until it has been replaced, or
    until shortly before the deadline. Otherwise it leaves at the next step boundary."""


@dataclass(frozen=True, kw_only=True)
class WorkerGone:
    """A worker's connection closed, or its machine is gone; its trainer is gone as well."""

    worker: str
    cause: str
    detected_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainerWarm:
    """A trainer is ready to be admitted."""

    trainer: str
    warm_s: float = 0.0
    """Seconds to build everything and run one pass; 0 if unknown."""
    device: str = ""
    """The device that it trains on, as torch names it."""
    gpu: str = ""
    """Identifier of the GPU; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class TrainerFormed:
    """A rank has its process group and the newest state, and is stepping."""

    trainer: str
    generation: int
    connect_s: float = 0.0
    sync_s: float = 0.0
    wrap_s: float = 0.0
    """Durations of the phases of forming; see ``events.GenerationReady``."""
    step: int = 0
    """The step that it continues from; only the ranks know which checkpoint could be read."""


@dataclass(frozen=True, kw_only=True)
class TrainerReported:
    """A rank has left its generation and is at a step boundary.

    ``why`` is ``planned`` (a change was pending), ``failed`` (its collectives broke or were
    aborted; ``undone`` if a step had begun) or ``done`` (nothing is left to train).
    """

    trainer: str
    generation: int
    progress: Progress
    why: Literal["planned", "failed", "done"]
    undone: bool = False
    ending: str = ""
    """Why training ends before its planned end; empty if it does not."""
    error: str = ""
    """If ``failed``, the error message; empty if this rank only saw the abort."""
    backend: str = ""
    """The backend that the failure came from, ``nccl`` or ``gloo``; empty if unknown."""
    is_excused: bool = False
    """True if the connections did not cause the failure: out of memory, or an injected fault."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteLossSeen:
    """A rank has undone a step whose mean loss is NaN or infinite, and left its generation.

    All ranks of the generation do so unless they are lost, because they compute the same mean.
    """

    trainer: str
    generation: int
    rank: int
    progress: Progress
    """Its progress before that step."""
    loss: float
    is_source: bool
    """True if its own share of the loss was not finite."""


@dataclass(frozen=True, kw_only=True)
class TrainerLost:
    """A trainer's process exited while its worker is alive."""

    trainer: str
    cause: str
    detected_s: float = 0.0
    last_words: str = ""
    """The end of its output, formatted for users."""
    injected: bool = False
    """True if fault injection caused it, so neither the notebook nor the machine is at fault."""


@dataclass(frozen=True, kw_only=True)
class ProgressSeen:
    """One reading of a trainer's progress page; see ``wire.progress_page.TrainerProgress``.

    A supervisor reports it with each heartbeat, once a second.
    """

    trainer: str
    generation: int
    collectives: int
    beats: int
    phase: str = "idle"
    alive_age_s: float = 0.0
    process: str = ""
    """State of the process in the OS, for example ``stopped``; queried only if it seems frozen."""


@dataclass(frozen=True, kw_only=True)
class UserErrorSeen:
    """The notebook's code raised an exception; the trainer has the state of the last good step."""

    trainer: str
    generation: int
    progress: Progress
    error: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class StepsCommitted:
    """The newest committed step in the log, and the current duration of a step."""

    step: int
    step_s: float
    committed_at: float = 0.0
    """When rank 0 committed it, on the coordinator's clock; 0.0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint of this step is durable (``ok``), or the trainer could not write it."""

    step: int
    ok: bool = True
    trainer: str = ""
    """The trainer that wrote it; if empty, the one that was ordered to write it."""
    error: str = ""
    """The error, if it could not be written."""
    duration_s: float = 0.0
    """Seconds from the step boundary until it was durable."""


@dataclass(frozen=True, kw_only=True)
class BoundsChanged:
    """The user has changed the minimum and maximum number of workers."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, kw_only=True)
class PauseRequested:
    """The user pauses the job at the next step boundary; ranks keep their state."""


@dataclass(frozen=True, kw_only=True)
class ResumeRequested:
    """The user ends a pause."""


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """The user stops the job: at the next step boundary with a checkpoint, or ``now`` without."""

    now: bool = False
    reason: str = ""
    """Reason that is logged with the job's end; a later one replaces it."""


@dataclass(frozen=True, kw_only=True)
class SurvivorFound:
    """A trainer that has outlived its scheduler, as reported by its supervisor."""

    trainer: str
    worker: str
    generation: int = 0
    """The newest generation that it was ordered to form; 0 if none."""
    is_inside: bool = False
    """True if it is still in that generation: it has neither reported nor failed."""
    is_warm: bool = False
    warm_s: float = 0.0
    device: str = ""
    gpu: str = ""
    progress: Progress = NO_PROGRESS
    """Its newest reported progress; inside a generation it may have advanced since."""


@dataclass(frozen=True, kw_only=True)
class TrainersFound:
    """A new scheduler has taken over the job and found these trainers."""

    found: tuple[SurvivorFound, ...]
    lost: tuple[str, ...] = ()
    """Workers that are gone, or whose trainers are gone."""
    world_size: int = 0
    """Number of ranks of the newest generation when it was formed."""
    is_ready: bool = False
    """True if all of its ranks had stepped."""
    backend: str = "gloo"
    """The backend that sums its gradients."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time has passed."""

    asleep_s: float = 0.0
    """Seconds of that time for which the coordinator itself was suspended. It could not receive
    messages in this time, so the time does not count towards heartbeat and stall timeouts."""


Stimulus = (
    WorkersAssigned
    | WorkerNoticed
    | WorkerGone
    | TrainerWarm
    | TrainerFormed
    | TrainerReported
    | NonFiniteLossSeen
    | TrainerLost
    | ProgressSeen
    | UserErrorSeen
    | StepsCommitted
    | CheckpointSaved
    | BoundsChanged
    | PauseRequested
    | ResumeRequested
    | StopRequested
    | TrainersFound
    | Tick
)
