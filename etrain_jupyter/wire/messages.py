"""Every message between the coordinator, the supervisors and the trainers.

::

    coordinator ── ToSupervisor, ToTrainer ──▶ supervisor ── ToTrainer ────▶ trainer
                ◀─ FromSupervisor, FromTrainer ──         ◀─ FromTrainer ──

The coordinator sends a message for a trainer to the trainer's supervisor, which forwards it. The
supervisor sets the trainer's name and a sequence number in each report from a trainer, and keeps
the report until the coordinator acknowledges that number. Requests from kernels are in
``wire.requests``.

A supervisor checks the kind of each message that it forwards, and decodes only messages that it
acts on. The receiver checks the fields. ``wire.codec`` defines the encoding. Receivers dispatch
with ``match`` and ``assert_never``, so mypy finds each place that must handle a new message.
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
"""The fields of one ``StepCompleted``; a plain dict, since fast jobs send thousands per second."""

Why = Literal["planned", "done", "failed", "nan"]
"""Why a rank left its generation: a planned membership change, completion of the last step, a
failed collective, or a mean loss that is not finite."""

Progress = tuple[int, int]
"""Committed steps and evaluations in a trainer's state; (-1, 0) if it has none."""


REBALANCE = "rebalance"
"""The machine is at elevated risk of an interruption."""
INTERRUPTION = "interruption"
"""The machine will be reclaimed at a known time."""


class Fence(enum.Enum):
    """Condition under which a message about a trainer is accepted."""

    GENERATION = "generation"
    """Its generation is the current one."""
    GENERATION_IF_ANY = "generation_if_any"
    """Like ``GENERATION``, or like ``MEMBER`` if the message belongs to no generation (0)."""
    MEMBER = "member"
    """The trainer is a member of its job."""
    NEVER = "never"
    """No condition, because a checkpoint is durable even if its writer has been released."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages."""


@dataclass(frozen=True, kw_only=True)
class TrainerMessage(Message):
    """Base of the messages to and from a trainer."""

    trainer: str = ""
    """Name of the trainer, ``JOB/WORKER/NUMBER``. Empty in a trainer's reports: its supervisor
    fills it in, so that no trainer can report in another trainer's name."""
    generation: int = 0
    """The generation that the message belongs to; 0 if it belongs to none."""

    fence: ClassVar[Fence] = Fence.MEMBER

    def __init_subclass__(cls, *, fence: Fence | None = None) -> None:
        super().__init_subclass__()
        cls.fence = fence or cls.fence

    @property
    def job_id(self) -> str:
        """The trainer's job."""
        # Derived from the name rather than sent separately, so that the two cannot disagree.
        return self.trainer.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class TrainerReport(TrainerMessage):
    """Base of reports, which a supervisor keeps until the coordinator acknowledges them."""

    number: int = 0
    """Sequence number among the supervisor's reports, from 1; 0 until the supervisor sets it."""


def is_current(message: TrainerMessage, *, generation: int, is_member: bool = True) -> bool:
    """Return True if a message should be accepted; all messages about trainers are fenced here.

    ::

        generation 3 ──── aborted ─── generation 4
        rank 1: steps 7, 8 ─ ─ ─ ─ ─ ─ ─▶ arrive here: dropped, generation 4 trains them again
        rank 1: checkpoint of 6 ─ ─ ─ ─ ▶ arrives here: accepted, because it is durable

    Args:
        message: The message.
        generation: The receiver's current generation.
        is_member: True if the trainer is still a member of its job.
    """
    # Both ends use this: the coordinator for trainers' reports, a trainer for messages to it.
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
#
# An evicted supervisor may still be running, with trainers inside an old generation. Only its next
# incarnation, which has killed them, is accepted again:
#
#     supervisor     (unreachable for 10 s)   heartbeat ──▶            kills trainers, hello 1 ──▶
#     coordinator      evicts incarnation 0     ResetSupervisor(0) ──▶                  accepts it


@dataclass(frozen=True, kw_only=True)
class AcknowledgeReports(Message):
    """All reports up to this number have been handled, and their events are in the jobs' logs."""

    number: int


@dataclass(frozen=True, kw_only=True)
class WakeSupervisor(Message):
    """A job is about to start: send heartbeats and start the fork server."""


@dataclass(frozen=True, kw_only=True)
class RestSupervisor(Message):
    """No job is active: stop the heartbeats and the fork server."""


@dataclass(frozen=True, kw_only=True)
class ResetSupervisor(Message):
    """The coordinator evicted this worker: kill all trainers and register again."""

    incarnation: int
    """The evicted incarnation. Later incarnations ignore the message, which may arrive several
    times."""


@dataclass(frozen=True, kw_only=True)
class SetHeartbeatInterval(Message):
    """Send heartbeats at this interval; the coordinator of a large cluster asks for fewer."""

    interval_s: float


@dataclass(frozen=True, kw_only=True)
class RemoveBundle(Message):
    """Release a bundle that jobs no longer use."""

    digest: str


@dataclass(frozen=True, kw_only=True)
class BundleRef(Message):
    """Reference to the file with the notebook's objects."""

    digest: str
    """SHA-256, hexadecimal."""
    size: int
    """In bytes."""
    path: str
    """The file in the job's folder; for the trainer, possibly the machine's own copy."""


@dataclass(frozen=True, kw_only=True)
class LaunchTrainer(TrainerMessage):
    """Start a trainer. The supervisor forwards it with ``host`` and the bundle's local path."""

    config: dict[str, Any]
    """The TrainConfig as JSON."""
    bundle: BundleRef
    cwd: str
    """The notebook's working folder."""
    checkpoints: str
    """Folder or URL for the job's checkpoints."""
    faults: tuple[Fault, ...] = ()
    host: str = ""
    """Address of this machine for the other ranks."""


@dataclass(frozen=True, kw_only=True)
class TerminateTrainer(TrainerMessage):
    """Kill a trainer's process."""

    why: str
    dumps_stacks: bool = False
    """True to log its threads' stacks first."""


@dataclass(frozen=True, kw_only=True)
class LogStacks(TrainerMessage):
    """Log the stack of each of a trainer's threads."""


# --- coordinator to trainer, forwarded by the supervisor ---
#
# A planned change loses no steps. Here w3 joins w1 and w2:
#
#     coordinator   LeaveGeneration 3 ──▶ w1, w2            JoinGeneration 4 ──▶ w1, w2, w3
#     w1, w2          leave after the same step ── GenerationLeft(planned) ──▶
#     w1, w2, w3                    RankKey ──▶  ◀── RankKeys, connect, GenerationJoined ──▶
#     w1, rank 0                    sends its state to w3, which is ``behind``; then StepsTrained
#
# A lost rank: w2 dies in step 8; w1 holds the state of step 7 and undoes its part of step 8:
#
#     w2's supervisor   TrainerExited ──▶
#     coordinator         BreakGeneration 3 ──▶ w1                         JoinGeneration 4 ──▶
#     w1                    GenerationLeft(failed, progress=(7, 0), undone) ──▶
#
# w1 may report first, if its collective fails before the coordinator learns of the death.


@dataclass(frozen=True, kw_only=True)
class InjectFault(TrainerMessage):
    """Inject a fault now.

    The supervisor itself injects the kinds of faults that need no code in the trainer.
    """

    kind_of_fault: str


@dataclass(frozen=True, kw_only=True)
class PaceUpdate(Message):
    """Checkpoint interval for ``checkpoint.every: auto``."""

    interval_s: float
    age_s: float | None = None
    """Age of the newest checkpoint in seconds; None to keep the trainer's own value."""


@dataclass(frozen=True, kw_only=True)
class JoinGeneration(TrainerMessage):
    """Become a rank of a generation."""

    rank: int
    world_size: int
    behind: tuple[int, ...]
    """Ranks that receive rank 0's state before the first step."""
    restore: bool
    """True if rank 0 loads the newest checkpoint first, because no trainer holds the state."""
    logged_step: int
    """Newest step in the log, but no later than the generation's start. Rank 0 sends its records of
    later steps, which the previous rank 0 may not have sent."""
    log_end: int
    """Newest step in the log. With ``restore``, the checkpoint may be from an earlier step."""
    backend: str
    """``nccl`` or ``gloo``."""
    faults: tuple[Fault, ...] = ()
    starts: tuple[int, ...] = ()
    """The step at which each earlier generation began (see ``rules.membership.lineage``), except
    the first ``num_starts`` of them, which the trainer already knows."""
    num_starts: int = 0
    secret: bytes = b""
    """Random bytes of this generation, known only to its ranks; see ``group.authentication``."""
    pace: PaceUpdate | None = None
    """None if the cell sets the interval, or until the first checkpoint reveals its cost."""
    saves: bool = False
    """True if the ranks form only to save the state, of which each has a part (``shard``)."""


@dataclass(frozen=True, kw_only=True)
class LeaveGeneration(TrainerMessage, fence=Fence.GENERATION):
    """Leave the generation after the step that all ranks agree on; its membership is changing."""


@dataclass(frozen=True, kw_only=True)
class BreakGeneration(TrainerMessage, fence=Fence.GENERATION):
    """Abort the collectives, because a rank is lost and the current step cannot complete."""


@dataclass(frozen=True, kw_only=True)
class SaveState(TrainerMessage):
    """Save this trainer's state, between or after generations, and report it.

    Sent to one trainer at a time: before the last holder of the newest state leaves, or at the end
    of the job.
    """

    logged_step: int
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RequestCheckpoint(TrainerMessage):
    """Save a checkpoint in the background at the next step boundary."""


@dataclass(frozen=True, kw_only=True)
class SetPace(TrainerMessage):
    """Change the checkpoint interval."""

    pace: PaceUpdate


@dataclass(frozen=True, kw_only=True)
class ShutDownTrainer(TrainerMessage):
    """Exit once any checkpoint in progress is written."""


@dataclass(frozen=True, kw_only=True)
class StoreEntry(TrainerReport, fence=Fence.GENERATION):
    """A key of the generation's rendezvous store. The coordinator relays it to the other ranks."""

    key: str
    value: bytes


@dataclass(frozen=True, kw_only=True)
class RankKeys(TrainerMessage, fence=Fence.GENERATION):
    """The values that all ranks of a generation have published under a topic; see ``RankKey``."""

    topic: str
    values: bytes
    """In rank order, as packed by ``wire.rank_values``."""


# --- trainer to supervisor, forwarded to the coordinator ---
#
# Rank 0 alone reports steps and evaluations. If it dies, the next rank 0 sends those missing from
# the log, so a record may arrive twice; the coordinator keeps the first.


@dataclass(frozen=True, kw_only=True)
class RankKey(TrainerReport, fence=Fence.GENERATION):
    """A value that every rank of the generation publishes once, to connect.

    The coordinator collects the values of all W ranks and sends them to each rank in one message,
    so that forming takes 2 W messages for each topic. Entries in the store would take W^2 messages.
    """

    topic: str
    value: bytes


@dataclass(frozen=True, kw_only=True)
class SpareReady(Message):
    """A trainer process's hello to its supervisor: all imports are done."""

    wire_version: int = WIRE_VERSION
    pid: int


@dataclass(frozen=True, kw_only=True)
class PackagesImported(Message):
    """Modules of installed packages that a job has imported; the fork server imports them, too."""

    modules: tuple[str, ...]
    """Names in the order of the imports."""


@dataclass(frozen=True, kw_only=True)
class WarmUpBegun(TrainerReport):
    """The trainer begins a phase of its warm-up, which ends with its ``TrainerHello``."""

    phase: events.WarmUpPhase


@dataclass(frozen=True, kw_only=True)
class TrainerHello(TrainerReport):
    """The trainer is warm: model and data are built, and one pass has succeeded."""

    pid: int
    warm_s: float
    device: str
    gpu: str = ""
    """Identifier of its GPU; empty if it has none."""
    gpu_memory_bytes: int = 0
    plan: Annotated[dict[str, Any], EventFields(events.JobPlanned, without=("time", "generation"))]


@dataclass(frozen=True, kw_only=True)
class GenerationJoined(TrainerReport, fence=Fence.GENERATION):
    """The rank is connected and holds the state."""

    step: int = 0
    """The state's step. After a restore, the first report defines the generation's start."""
    connect_s: float = 0.0
    sync_s: float = 0.0
    wrap_s: float = 0.0
    sync_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerationLeft(TrainerReport, fence=Fence.GENERATION):
    """The rank has left its generation."""

    progress: Progress
    why: Why
    undone: bool
    """True if a step in progress was undone."""
    error: str = ""
    backend: str = ""
    """The backend that failed; empty if none did."""
    is_excused: bool = False
    """True if the failure was not caused by the connections, so that they are not blamed."""
    ended_early: (
        Annotated[dict[str, Any], EventFields(events.EarlyStopped, without=("time", "generation"))]
        | None
    ) = None
    loss: float | None = None
    """The mean loss that was not finite; None unless ``why`` is ``nan``."""
    is_source: bool = False
    """True if this rank's own share of that loss was not finite."""


@dataclass(frozen=True, kw_only=True)
class StepsTrained(TrainerReport, fence=Fence.GENERATION):
    """Rank 0 has committed steps; one message covers about 50 ms."""

    records: tuple[StepRecord, ...]


@dataclass(frozen=True, kw_only=True)
class EvalFinished(TrainerReport, fence=Fence.GENERATION):
    """Rank 0 reports an evaluation."""

    record: Annotated[dict[str, Any], EventFields(events.EvalCompleted)]


@dataclass(frozen=True, kw_only=True)
class EvalScoreFound(TrainerReport, fence=Fence.GENERATION):
    """A rank reports the scores of an evaluation."""

    record: Annotated[dict[str, Any], EventFields(events.EvalScored)]


@dataclass(frozen=True, kw_only=True)
class EvalScoreLost(TrainerReport, fence=Fence.GENERATION):
    """No rank holds the records of an evaluation any more, and its weights have moved on."""

    step: int


@dataclass(frozen=True, kw_only=True)
class ExhibitFound(TrainerReport):
    """A rank reports a figure, text or table from ``eval.score``, before the scores.

    It is sent only once, so it is accepted from any generation of a member.
    """

    step: int
    name: str
    format: events.ExhibitFormat
    data: bytes


@dataclass(frozen=True, kw_only=True)
class BestFound(TrainerReport, fence=Fence.GENERATION):
    """Rank 0 reports the best evaluation so far."""

    record: Annotated[dict[str, Any], EventFields(events.BestReached)]


@dataclass(frozen=True, kw_only=True)
class WeightsFingerprinted(TrainerReport, fence=Fence.GENERATION):
    """A rank reports the fingerprint of its weights, on which all ranks must agree."""

    step: int
    rank: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class RankTimesMeasured(TrainerReport):
    """A rank reports the durations of its steps."""

    record: Annotated[dict[str, Any], EventFields(events.RankTimed, without=("worker",))]


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(TrainerReport, fence=Fence.NEVER):
    """A checkpoint is durable."""

    record: Annotated[dict[str, Any], EventFields(events.CheckpointCommitted)]


@dataclass(frozen=True, kw_only=True)
class CheckpointNotWritten(TrainerReport, fence=Fence.NEVER):
    """A checkpoint could not be written."""

    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class UserCodeFailed(TrainerReport, fence=Fence.GENERATION_IF_ANY):
    """The notebook's code raised an exception."""

    progress: Progress
    error: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class TextLogged(TrainerReport, fence=Fence.NEVER):
    """A line for the log: printed by the notebook's code, or a message from the trainer."""

    level: str
    """``info``, ``warning`` or ``error``."""
    text: str
    is_printed: bool = False
    """True if the notebook's code printed it; the log limits the number of such lines."""


@dataclass(frozen=True, kw_only=True)
class FaultFired(TrainerReport):
    """A planned fault is about to happen in this trainer."""

    fault_id: int


# --- supervisor to coordinator ---


@dataclass(frozen=True, kw_only=True)
class TrainerStarted(TrainerReport):
    """A trainer process has received its job."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class TrainerExited(TrainerReport):
    """A trainer's process has exited."""

    cause: str


@dataclass(frozen=True, kw_only=True)
class TrainerSummary(Message):
    """A trainer's state, which a restarted coordinator needs to adopt it."""

    started_at: float
    """In seconds since the epoch, because two machines' monotonic clocks differ."""
    pid: int = 0
    generation: int = 0
    """The newest generation in a ``JoinGeneration`` sent to it; 0 if there was none."""
    hello: TrainerHello | None = None
    """Its hello; None until it is warm."""
    left: GenerationLeft | UserCodeFailed | None = None
    """Why it left that generation; None while it is still in it."""
    progress: Progress = (-1, 0)
    """Progress in that report."""
    ended_with: int = 0
    """Number of its ``TrainerExited`` report; 0 while its process is running."""


@dataclass(frozen=True, kw_only=True)
class SupervisorHello(Message):
    """A supervisor's hello to the coordinator, after each connection."""

    wire_version: int = WIRE_VERSION
    device: str
    """Torch device of its trainers."""
    pid: int
    incarnation: int = 0
    """Number of resets so far; see ``ResetSupervisor``."""
    fingerprint: dict[str, str]
    """Installed versions; see ``wire.versions``."""
    trainers: dict[str, TrainerSummary]
    """Its trainers by name."""


@dataclass(frozen=True, kw_only=True)
class PageCopy(Message):
    """A copy of a trainer's progress page; see ``wire.progress_page``."""

    generation: int
    step: int
    collectives: int
    beats: int
    phase: str
    alive_age_s: float
    process: str = ""
    """Process state from the operating system, such as ``stopped``; empty while it is pulsing."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    """The supervisor is alive; includes its trainers' progress."""

    trainers: dict[str, PageCopy]
    """By trainer name."""
    is_stuck: bool = False
    """True if its outbox is full; its trainers then wait."""


@dataclass(frozen=True, kw_only=True)
class MachineNotice(Message):
    """The worker's machine will or may be reclaimed."""

    notice: str
    """``INTERRUPTION`` or ``REBALANCE``."""
    left_s: float
    """Seconds until the machine is reclaimed. A duration rather than an instant, because the
    machines' clocks differ."""


ForwardedMessage = (
    JoinGeneration
    | LeaveGeneration
    | BreakGeneration
    | SaveState
    | RequestCheckpoint
    | SetPace
    | ShutDownTrainer
    | StoreEntry
    | RankKeys
)
"""Messages to a trainer that its supervisor forwards undecoded."""

ToTrainer = LaunchTrainer | InjectFault | ForwardedMessage
ToSupervisor = (
    AcknowledgeReports
    | WakeSupervisor
    | RestSupervisor
    | ResetSupervisor
    | SetHeartbeatInterval
    | RemoveBundle
    | LaunchTrainer
    | InjectFault
    | TerminateTrainer
    | LogStacks
)
"""Messages that a supervisor acts on; it passes the contents of two of them on to a trainer."""

FromTrainer = (
    SpareReady
    | PackagesImported
    | TrainerHello
    | WarmUpBegun
    | StoreEntry
    | RankKey
    | GenerationJoined
    | GenerationLeft
    | StepsTrained
    | EvalFinished
    | EvalScoreFound
    | EvalScoreLost
    | ExhibitFound
    | BestFound
    | WeightsFingerprinted
    | RankTimesMeasured
    | CheckpointWritten
    | CheckpointNotWritten
    | UserCodeFailed
    | TextLogged
    | FaultFired
)
StatusReport = TrainerHello | GenerationLeft | UserCodeFailed
"""Reports that a supervisor decodes as well, because its own hello repeats them."""

FromSupervisor = SupervisorHello | Heartbeat | MachineNotice
AnyReport = (
    TrainerStarted
    | TrainerExited
    | TrainerHello
    | WarmUpBegun
    | StoreEntry
    | RankKey
    | GenerationJoined
    | GenerationLeft
    | StepsTrained
    | EvalFinished
    | EvalScoreFound
    | EvalScoreLost
    | ExhibitFound
    | BestFound
    | WeightsFingerprinted
    | RankTimesMeasured
    | CheckpointWritten
    | CheckpointNotWritten
    | UserCodeFailed
    | TextLogged
    | FaultFired
)
"""Reports from a trainer and its supervisor that the coordinator acknowledges."""

AboutTrainer = ToTrainer | TerminateTrainer | LogStacks
"""Messages from the coordinator about one trainer."""

TO_TRAINER = Vocabulary[ToTrainer](ToTrainer, version=WIRE_VERSION)
FROM_TRAINER = Vocabulary[FromTrainer](FromTrainer, version=WIRE_VERSION)
STATUS_REPORT = Vocabulary[StatusReport](StatusReport, version=WIRE_VERSION)
FORWARDED = Vocabulary[ForwardedMessage](ForwardedMessage, version=WIRE_VERSION)
TO_SUPERVISOR = Vocabulary[ToSupervisor](ToSupervisor, version=WIRE_VERSION)
FROM_SUPERVISOR = Vocabulary[FromSupervisor | AnyReport](
    FromSupervisor | AnyReport, version=WIRE_VERSION
)
