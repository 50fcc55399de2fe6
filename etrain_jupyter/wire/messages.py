"""Every message between the coordinator, the supervisors and the trainers.

::

    coordinator ── ToSupervisor, ToTrainer ──▶ supervisor ── ToTrainer ────▶ trainer
                ◀─ FromSupervisor, FromTrainer ──         ◀─ FromTrainer ──

The coordinator sends a message for a trainer to the trainer's supervisor, which passes it on. A
supervisor puts the trainer's name and a number on each report of a trainer, and keeps the report
until the coordinator acknowledges the number. ``wire.requests`` has what a kernel may ask.

The encoded form is ``wire.codec``'s. A receiver dispatches with ``match`` and ``assert_never``, so
that mypy names each place that must handle a new message.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from etrain_jupyter.log import events
from etrain_jupyter.wire.codec import EventFields, Vocabulary
from etrain_jupyter.wire.versions import WIRE_VERSION

Fault = dict[str, Any]
"""A planned fault: ``id``, ``kind``, ``rank``, ``step``, ``at``; see ``testing.FaultPlan``."""

StepRecord = Annotated[dict[str, Any], EventFields(events.StepCompleted, has_time=True)]
"""The fields of one ``StepCompleted``. A plain dict, because a fast job has thousands a second."""

Why = Literal["planned", "done", "failed", "nan"]
"""Why a rank left its generation: its members change, all steps are trained, a collective broke, or
the mean loss is not finite."""

Progress = tuple[int, int]
"""Committed steps and evaluations of the state that a trainer holds; (-1, 0) without a state."""


class Fence(enum.Enum):
    """Until when a message about a trainer counts."""

    GENERATION = "generation"
    """While its generation is the current one: a rank speaks for its generation only."""
    GENERATION_IF_ANY = "generation_if_any"
    """As ``GENERATION``; with generation 0, which is outside of any generation, as ``MEMBER``."""
    MEMBER = "member"
    """While the trainer is a member of its job."""
    NEVER = "never"
    """Always: a checkpoint is durable, even if its writer was released meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages."""


@dataclass(frozen=True, kw_only=True)
class TrainerMessage(Message):
    """Base of the messages to and from a trainer."""

    trainer: str = ""
    """Name of the trainer, ``JOB/WORKER/NUMBER``. Empty on the channel between a trainer and its
    supervisor, which is the trainer's own."""
    generation: int = 0
    """The generation that the message belongs to; 0 outside of any."""

    fence: ClassVar[Fence] = Fence.MEMBER

    @property
    def job_id(self) -> str:
        """The job of the trainer: part of its name, so that the two cannot disagree."""
        return self.trainer.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class TrainerReport(TrainerMessage):
    """Base of what a supervisor keeps until the coordinator acknowledges it."""

    number: int = 0
    """Sequence number of the supervisor, from 1; 0 before the supervisor has numbered it."""


def is_current(message: TrainerMessage, *, generation: int, is_member: bool = True) -> bool:
    """Return whether a message still counts: THE fence of all messages about trainers.

    ::

        generation 3 ──── broken ──── generation 4
        rank 1: steps 7, 8 ─ ─ ─ ─ ─ ─ ─▶ arrive here: dropped, generation 4 trains them again
        rank 1: checkpoint of 6 ─ ─ ─ ─ ▶ arrives here: counts, since it is durable

    Args:
        message: The message.
        generation: The current generation of the receiver.
        is_member: Whether the trainer is still a member of its job.
    """
    match message.fence:
        case Fence.NEVER:
            return True
        case Fence.MEMBER:
            return is_member
        case Fence.GENERATION:
            return is_member and message.generation == generation
        case Fence.GENERATION_IF_ANY:
            return is_member and message.generation in (0, generation)


# --- coordinator to supervisor ---


@dataclass(frozen=True, kw_only=True)
class AcknowledgeReports(Message):
    """The facts of all reports up to this number are in the logs of their jobs."""

    number: int


@dataclass(frozen=True, kw_only=True)
class WakeSupervisor(Message):
    """A job is about to start: send heartbeats and keep a spare trainer."""


@dataclass(frozen=True, kw_only=True)
class RestSupervisor(Message):
    """No job is active: stop the heartbeats and the spare trainer."""


@dataclass(frozen=True, kw_only=True)
class ResetSupervisor(Message):
    """The coordinator declared this worker dead: kill all trainers and register again."""

    incarnation: int
    """The incarnation that was declared dead. A later one ignores the message."""


@dataclass(frozen=True, kw_only=True)
class RemoveBundle(Message):
    """No job uses this bundle any more."""

    digest: str


@dataclass(frozen=True, kw_only=True)
class BundleRef(Message):
    """Where a trainer finds the notebook's objects."""

    digest: str
    """SHA-256, hexadecimal."""
    size: int
    """In bytes."""
    path: str
    """In the job's folder, or the supervisor's own copy on the machine."""


@dataclass(frozen=True, kw_only=True)
class LaunchTrainer(TrainerMessage):
    """Start a trainer. The supervisor passes it on with ``host`` and its own bundle path."""

    config: dict[str, Any]
    """The JSON form of the TrainConfig."""
    bundle: BundleRef
    cwd: str
    """The notebook's working folder."""
    checkpoints: str
    """Folder or URL of the job's checkpoints."""
    faults: tuple[Fault, ...] = ()
    host: str = ""
    """Address at which other ranks reach this machine."""


@dataclass(frozen=True, kw_only=True)
class TerminateTrainer(TrainerMessage):
    """Kill a trainer's process."""

    why: str
    dumps_stacks: bool = False
    """Log first what each of its threads is doing."""


@dataclass(frozen=True, kw_only=True)
class LogStacks(TrainerMessage):
    """Log what each thread of a trainer is doing."""


# --- coordinator to trainer, passed on by the supervisor ---


@dataclass(frozen=True, kw_only=True)
class InjectFault(TrainerMessage):
    """Commit a fault now. The supervisor commits those kinds that need no help of the trainer."""

    kind_of_fault: str


@dataclass(frozen=True, kw_only=True)
class PaceUpdate(Message):
    """When ``checkpoint.every: auto`` is due."""

    interval_s: float
    age_s: float | None = None
    """Age of the newest checkpoint; None if the trainer knows better."""


@dataclass(frozen=True, kw_only=True)
class JoinGeneration(TrainerMessage):
    """Become a rank of a generation."""

    rank: int
    world_size: int
    is_guarded: bool = False
    """Whether ranks admit only announced connections, which takes longer."""
    behind: tuple[int, ...]
    """Ranks that receive rank 0's state before the first step."""
    restore: bool
    """Whether rank 0 loads the newest checkpoint first, because no trainer holds the state."""
    logged_step: int
    """Newest step that the log has, up to the one where the generation begins."""
    log_end: int
    """Newest step that the log has."""
    backend: str
    """``nccl`` or ``gloo``."""
    faults: tuple[Fault, ...] = ()
    starts: tuple[int, ...] = ()
    """The step at which each earlier generation began, see ``rules.membership.lineage``."""
    pace: PaceUpdate | None = None
    """None if the cell says how often to save, or no checkpoint has shown its cost yet."""


@dataclass(frozen=True, kw_only=True)
class LeaveGeneration(TrainerMessage):
    """All ranks leave the generation after the same step, because its members change."""

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class BreakGeneration(TrainerMessage):
    """Abort the collectives: a rank is lost, and the step in flight cannot complete."""

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class SaveState(TrainerMessage):
    """Save the state that this trainer holds; it was the generation's last."""

    logged_step: int
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RequestCheckpoint(TrainerMessage):
    """Save in the background at the next step boundary."""


@dataclass(frozen=True, kw_only=True)
class SetPace(TrainerMessage):
    """Save that often from now on."""

    pace: PaceUpdate


@dataclass(frozen=True, kw_only=True)
class ShutDownTrainer(TrainerMessage):
    """End by itself, after the checkpoint in flight."""


@dataclass(frozen=True, kw_only=True)
class StoreEntry(TrainerReport):
    """A key of the generation's rendezvous store. Relayed to all other ranks."""

    key: str
    value: bytes

    fence: ClassVar[Fence] = Fence.GENERATION


# --- trainer to supervisor, passed on to the coordinator ---


@dataclass(frozen=True, kw_only=True)
class SpareReady(Message):
    """Hello of a trainer process to its supervisor: it has imported everything."""

    wire_version: int = WIRE_VERSION
    pid: int


@dataclass(frozen=True, kw_only=True)
class TrainerHello(TrainerReport):
    """The trainer is warm: model and data are built, and one pass was tried."""

    pid: int
    warm_s: float
    device: str
    gpu: str = ""
    """Identifier of its GPU; empty without one."""
    gpu_memory_bytes: int = 0
    plan: Annotated[dict[str, Any], EventFields(events.JobPlanned, without=("time", "generation"))]


@dataclass(frozen=True, kw_only=True)
class GenerationJoined(TrainerReport):
    """The rank is connected and holds the state."""

    step: int = 0
    """The step that its state has."""
    connect_s: float = 0.0
    sync_s: float = 0.0
    wrap_s: float = 0.0
    sync_bytes: int = 0

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class GenerationLeft(TrainerReport):
    """The rank has left its generation."""

    progress: Progress
    why: Why
    undone: bool
    """Whether a step in flight was undone."""
    error: str = ""
    backend: str = ""
    """The backend that failed; empty if none did."""
    is_excused: bool = False
    """Whether the failure counts against no rank."""
    ended_early: (
        Annotated[dict[str, Any], EventFields(events.EarlyStopped, without=("time", "generation"))]
        | None
    ) = None
    loss: float | None = None
    """The mean loss that was not finite; None unless ``why`` is ``nan``."""
    is_source: bool = False
    """Whether this rank's own share of that loss was not finite."""

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class StepsTrained(TrainerReport):
    """Rank 0 has committed steps; one message has all of some 50 ms."""

    records: tuple[StepRecord, ...]

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class EvalFinished(TrainerReport):
    """Rank 0 reports an evaluation."""

    record: Annotated[dict[str, Any], EventFields(events.EvalCompleted)]

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class BestFound(TrainerReport):
    """Rank 0 reports the best evaluation so far."""

    record: Annotated[dict[str, Any], EventFields(events.BestReached)]

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class WeightsFingerprinted(TrainerReport):
    """A rank reports the fingerprint of its weights: all ranks must agree."""

    step: int
    rank: int
    digest: str

    fence: ClassVar[Fence] = Fence.GENERATION


@dataclass(frozen=True, kw_only=True)
class RankTimesMeasured(TrainerReport):
    """A rank reports how long its steps took."""

    record: Annotated[dict[str, Any], EventFields(events.RankTimed, without=("worker",))]


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(TrainerReport):
    """A checkpoint is durable."""

    record: Annotated[dict[str, Any], EventFields(events.CheckpointCommitted)]

    fence: ClassVar[Fence] = Fence.NEVER


@dataclass(frozen=True, kw_only=True)
class CheckpointNotWritten(TrainerReport):
    """A checkpoint could not be written."""

    step: int
    error: str

    fence: ClassVar[Fence] = Fence.NEVER


@dataclass(frozen=True, kw_only=True)
class UserCodeFailed(TrainerReport):
    """The notebook's code raised an exception."""

    progress: Progress
    error: str
    traceback: str

    fence: ClassVar[Fence] = Fence.GENERATION_IF_ANY


@dataclass(frozen=True, kw_only=True)
class TextLogged(TrainerReport):
    """A line for the log: printed by the notebook's code, or a remark of the trainer."""

    level: str
    """``info``, ``warning`` or ``error``."""
    text: str
    is_printed: bool = False
    """Whether the code printed it; the job's log takes a bounded number of these."""

    fence: ClassVar[Fence] = Fence.NEVER


@dataclass(frozen=True, kw_only=True)
class FaultFired(TrainerReport):
    """A planned fault is about to happen here."""

    fault_id: int


# --- supervisor to coordinator ---


@dataclass(frozen=True, kw_only=True)
class TrainerStarted(TrainerReport):
    """A trainer got its job."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class TrainerExited(TrainerReport):
    """A trainer's process has ended."""

    cause: str


@dataclass(frozen=True, kw_only=True)
class TrainerSummary(Message):
    """What a restarted coordinator must know of a trainer."""

    started_at: float
    """In seconds since the epoch: another process reads it."""
    pid: int = 0
    generation: int = 0
    """The newest generation that it was told to join; 0 if none."""
    hello: TrainerHello | None = None
    """None until it is warm."""
    left: GenerationLeft | UserCodeFailed | None = None
    """How it left that generation; None while it is inside."""
    progress: Progress = (-1, 0)
    """As reported then."""
    ended_with: int = 0
    """Number of the report of its end; 0 while its process runs."""


@dataclass(frozen=True, kw_only=True)
class SupervisorHello(Message):
    """Hello of a supervisor to the coordinator, after each connection."""

    wire_version: int = WIRE_VERSION
    device: str
    """Where its trainers compute, as torch names it."""
    pid: int
    incarnation: int = 0
    """How often it was reset; see ``ResetSupervisor``."""
    fingerprint: dict[str, str] | None = None
    """Installed versions, see ``wire.versions``; None if unknown."""
    trainers: dict[str, TrainerSummary] | None = None
    """Its trainers by name."""


@dataclass(frozen=True, kw_only=True)
class PageCopy(Message):
    """A copy of a trainer's progress page, see ``wire.progress_page``."""

    generation: int
    step: int
    collectives: int
    beats: int
    phase: str
    alive_age_s: float
    process: str = ""
    """The system's view of the process, if it looks stopped: ``running``, ``stopped`` ..."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    """The supervisor is alive, and so far are its trainers."""

    trainers: dict[str, PageCopy]
    """By name."""
    is_stuck: bool = False
    """Whether its outbox is full, so that its trainers wait."""


@dataclass(frozen=True, kw_only=True)
class MachineNotice(Message):
    """The worker's machine will be reclaimed, or may be."""

    notice: str
    """A kind of ``wire.notices``."""
    left_s: float
    """Seconds until the machine is reclaimed. Not an instant: clocks of machines differ."""


ToTrainer = (
    LaunchTrainer
    | JoinGeneration
    | LeaveGeneration
    | BreakGeneration
    | SaveState
    | RequestCheckpoint
    | SetPace
    | ShutDownTrainer
    | StoreEntry
    | InjectFault
)
ToSupervisor = (
    AcknowledgeReports
    | WakeSupervisor
    | RestSupervisor
    | ResetSupervisor
    | RemoveBundle
    | TerminateTrainer
    | LogStacks
)
FromTrainer = (
    SpareReady
    | TrainerHello
    | StoreEntry
    | GenerationJoined
    | GenerationLeft
    | StepsTrained
    | EvalFinished
    | BestFound
    | WeightsFingerprinted
    | RankTimesMeasured
    | CheckpointWritten
    | CheckpointNotWritten
    | UserCodeFailed
    | TextLogged
    | FaultFired
)
FromSupervisor = SupervisorHello | Heartbeat | MachineNotice
AnyReport = (
    TrainerStarted
    | TrainerExited
    | TrainerHello
    | StoreEntry
    | GenerationJoined
    | GenerationLeft
    | StepsTrained
    | EvalFinished
    | BestFound
    | WeightsFingerprinted
    | RankTimesMeasured
    | CheckpointWritten
    | CheckpointNotWritten
    | UserCodeFailed
    | TextLogged
    | FaultFired
)
"""The reports of a trainer and its supervisor that the coordinator acknowledges."""

AboutTrainer = ToTrainer | TerminateTrainer | LogStacks
"""What the coordinator sends about one trainer."""

TO_TRAINER = Vocabulary[ToTrainer](ToTrainer, version=WIRE_VERSION)
FROM_TRAINER = Vocabulary[FromTrainer](FromTrainer, version=WIRE_VERSION)
TO_SUPERVISOR = Vocabulary[ToSupervisor | ToTrainer](ToSupervisor | ToTrainer, version=WIRE_VERSION)
FROM_SUPERVISOR = Vocabulary[FromSupervisor | AnyReport](
    FromSupervisor | AnyReport, version=WIRE_VERSION
)
