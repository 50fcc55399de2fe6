"""Events of a job, named in the past tense; logs, dashboards and audits are derived from them.

Every event is a frozen dataclass that can be converted to one line of JSON and back without loss.
The coordinator assigns ``seq`` (1, 2, 3 ... without gaps) and appends the line to the log before
any reader sees it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from etrain_jupyter import __version__
from etrain_jupyter.untrusted import plain_line

JobStatus = Literal["submitted", "waiting", "running", "paused", "finished", "stopped", "failed"]
LeaveReason = Literal["preempted", "scaled down"]
ExhibitFormat = Literal["png", "text", "table"]
WarmUpPhase = Literal["build", "trial", "compile"]
"""A trainer builds the model, the optimizer and the data sets, runs a trial pass, and compiles."""
TERMINAL_STATUSES = frozenset({"finished", "stopped", "failed"})

LOG_FORMAT = 1
"""Format of the log, which its ``JobSubmitted`` carries. Increment it if a log cannot be read as
before; a new kind of event or a new field with a default does not need that."""

STACKS_HEADER = "etrain: what the threads of this trainer are doing:"
"""Text of the log line that precedes the stack traces a supervisor has requested from a trainer."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of all events."""

    job_id: str
    time: float
    """Seconds since the epoch, on the clock of the process that observed it."""
    generation: int = 0
    """The generation to which the event belongs; 0 before the first generation."""
    seq: int = 0
    """Position in the job's log, starting at 1; 0 until the event is appended."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Event.kinds[cls.__name__] = cls

    @property
    def kind(self) -> str:
        """Name of the class, for example ``StepCompleted``."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a dict for users: its ``kind``, then its fields.

        >>> WorkerLost(job_id="j", time=1.0, worker="w1", cause="SIGKILL").to_dict()["kind"]
        'WorkerLost'
        """
        fields = dataclasses.fields(self)
        return {"kind": self.kind, **{f.name: getattr(self, f.name) for f in fields}}

    def to_json_dict(self) -> dict[str, Any]:
        """Return the event as a log stores it: its kind comes first, under the key ``event``."""
        fields = dataclasses.fields(self)
        return {"event": self.kind, **{f.name: getattr(self, f.name) for f in fields}}

    def with_seq(self, seq: int) -> Self:
        """Return a copy of the event with a position in the log."""
        return dataclasses.replace(self, seq=seq)


@dataclass(frozen=True, kw_only=True)
class JobSubmitted(Event):
    """A job was submitted to the cluster. It is the first event of a log."""

    format: int = LOG_FORMAT
    name: str
    min_workers: int
    max_workers: int
    pool: str = "local"
    config: dict[str, Any] = field(default_factory=dict)
    """JSON form of its TrainConfig, with defaults filled in."""
    pool_s: float = 0.0
    """Seconds until the scheduler of its pool responded, which includes its start; 0 if it was not
    measured."""


@dataclass(frozen=True, kw_only=True)
class JobResumed(Event):
    """A coordinator resumed a job that had ended or whose cluster was gone.

    The events that follow belong to the same job, so step and generation numbers continue.
    ``generation`` is the last generation of the previous attempt.
    """

    from_status: str
    """Status before the resume; not a terminal status if the coordinator died."""
    step: int
    """The newest step in the log; ``JobRestored`` contains the step of the state that was
    restored."""
    min_workers: int
    max_workers: int
    pool: str = "local"
    config: dict[str, Any] = field(default_factory=dict)
    """JSON form of the TrainConfig that applies from now on."""
    differs: list[str] = field(default_factory=list)
    """Differences from the previous attempt, as text."""
    pool_s: float = 0.0
    """As in ``JobSubmitted``."""


@dataclass(frozen=True, kw_only=True)
class SchedulerRestarted(Event):
    """The scheduler died, and a new one took over the job with the surviving trainers."""

    step: int
    """The newest step in the log at that time; the trainers may have completed later steps."""
    away_s: float
    """Seconds from the scheduler's death until the trainers had reconnected."""
    workers: list[str] = field(default_factory=list)
    """Workers whose trainers survived."""
    lost: list[str] = field(default_factory=list)
    """Workers that did not reconnect."""


def describe_parameters(num_trained: int, num_parameters: int) -> str:
    """Return the size of a model as text; empty if it is unknown.

    >>> describe_parameters(32_768, 8_937_728), describe_parameters(10, 10)
    ('32,768 of 8,937,728 parameters trained', '10 parameters')
    """
    if num_trained == num_parameters:
        return f"{num_parameters:,} parameters" if num_parameters else ""
    return f"{num_trained:,} of {num_parameters:,} parameters trained"


@dataclass(frozen=True, kw_only=True)
class JobPlanned(Event):
    """The first warm trainer reported the length of the job; repeated after each ``JobResumed``."""

    num_train_samples: int
    num_eval_samples: int
    """0 if there is no evaluation set."""
    global_batch_size: int
    """Samples per step; with ``per_worker_batch_size``, at the base number of workers."""
    steps_per_epoch: int
    """Steps per epoch at that batch size."""
    total_steps: int
    """Total steps at that batch size."""
    num_parameters: int
    """Parameters of the model."""
    num_trained_parameters: int
    """Parameters that require a gradient and whose gradients are exchanged."""
    total_samples: int
    """Number of samples that the whole job trains on, over all epochs."""
    per_worker_batch_size: int = 0
    """Samples per step and worker; 0 if the batch size never changes."""
    train_layout: str = ""
    """Blocks of the training set (see ``rules.samples.block_order.BlockLayout``), which determine
    the order of the samples; empty if the set is in memory."""
    train_digest: str = ""
    """Digest of the training set's content, hexadecimal; empty if it is in memory."""

    @property
    def model_size(self) -> str:
        """The parameters as text; empty if the model has none."""
        return describe_parameters(self.num_trained_parameters, self.num_parameters)

    def batch_size_of(self, world_size: int) -> int:
        """Return the number of samples in a full step of ``world_size`` ranks."""
        return self.per_worker_batch_size * world_size or self.global_batch_size

    def total_steps_after(self, step: StepCompleted) -> int:
        """Return the total steps of the job if the number of workers remains as in ``step``."""
        if not self.per_worker_batch_size:
            return self.total_steps
        # | epoch 0       | epoch 1       | epoch 2       | ep 3   each part needs its own steps,
        #                 | done  | here  | epochs = 1    | rest   the last of them a smaller one
        size, length = self.batch_size_of(step.world_size), self.num_train_samples
        done = step.first + step.samples  # in its epoch
        left = self.total_samples - step.epoch * length - done
        here = min(length - done, left)  # no step crosses the end of an epoch
        epochs, rest = divmod(left - here, length)
        return step.step + epochs * -(-length // size) + sum(-(-n // size) for n in (here, rest))


@dataclass(frozen=True, kw_only=True)
class JobStatusChanged(Event):
    """The job's status changed."""

    status: JobStatus
    reason: str = ""
    """Reason as text for users; empty if the status needs no explanation."""


@dataclass(frozen=True, kw_only=True)
class WorkersScaled(Event):
    """The user changed the minimum and maximum number of workers."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, kw_only=True)
class WorkersSized(Event):
    """``workers.target: goodput`` chose another number of workers, or its reason changed."""

    workers: int
    offered: int
    """Maximum number of workers of the job."""
    limit: str
    """Reason for this number of workers; see ``rules.sizing.goodput.Limit``."""
    goodputs: list[float]
    """Expected goodput in samples per second by number of workers, from 0 to ``workers``; empty
    before it was measured."""
    measured: list[int]
    """Numbers of workers whose speed was measured; the others are predictions."""
    reason: str
    """Explanation as text, with the assumptions."""


@dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    """A Dask worker was assigned to this job; its trainer is starting."""

    worker: str
    """The worker's name, unique within the lifetime of the cluster."""
    address: str = ""
    device: str = "cpu"
    machine: str = ""
    """Type of its machine, for example ``g5.xlarge``; empty if the pool has no types."""
    zone: str = ""
    lifecycle: str = ""
    """``spot``, ``on-demand`` or a batch system; empty if the pool has no machines of its own."""
    usd_per_h: float | None = None
    """The worker's share of the machine's hourly price when it joined; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class WarmUpReached(Event):
    """A trainer was the first of the current attempt to begin this phase of its warm-up."""

    worker: str
    phase: WarmUpPhase


@dataclass(frozen=True, kw_only=True)
class WorkerWarmed(Event):
    """A worker's trainer is ready: it has built the model, and has run and undone a trial pass."""

    worker: str
    trainer_pid: int
    warm_s: float
    """Seconds from the request to start it until it was ready."""


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(Event):
    """The ranks of a generation were chosen and instructed to form it."""

    why: str
    """``start``, ``join``, ``leave``, ``lost``, ``stalled`` (no rank made progress, and there was
    no clear straggler), ``broken`` (a collective failed, and no rank was lost), ``restart`` (the
    scheduler died while the previous generation formed), ``resume``, ``save`` (only to save a state
    of which each rank has a part: ``shard: optimizer``); several reasons are joined by
    ``+``.
    """
    world_size: int
    ranks: list[str]
    """Worker names in rank order, length ``world_size``."""
    trainer_pids: list[int] = field(default_factory=list)
    """Process ids in rank order, length ``world_size``."""
    behind: list[int] = field(default_factory=list)
    """Ranks that receive their state from rank 0."""
    step: int = 0
    """The newest committed step, after which all ranks continue."""
    backend: str
    """The backend that sums the gradients, ``nccl`` or ``gloo``."""
    stall_s: float = 0.0
    """Seconds since the end of the previous generation's last step, as observed by the
    coordinator."""


@dataclass(frozen=True, kw_only=True)
class GenerationReady(Event):
    """All ranks of a generation are connected, hold the newest state, and have started training.

    Each duration is the maximum over the ranks.
    """

    world_size: int
    connect_s: float
    """Seconds from the request to form the generation until the process group was connected."""
    sync_s: float
    """Seconds to transfer the state to the ranks that were behind; 0 if no rank was."""
    wrap_s: float
    """Seconds to wrap the model."""


@dataclass(frozen=True, kw_only=True)
class StepCompleted(Event):
    """One optimizer update was committed."""

    step: int
    """Number of updates so far, including this one."""
    epoch: int
    """The epoch to which its samples belong, starting at 0."""
    first: int
    """Position of its first sample in the epoch's sample order."""
    samples: int
    """Number of samples in the forward and backward passes of all ranks together."""
    sample_checksum: int
    """Sum of ``ledger.checksum_of(index)`` over those samples, with which an audit verifies
    them."""
    loss: float
    """Mean over the step's samples."""
    lr: float
    """Learning rate of the first parameter group."""
    world_size: int
    samples_per_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean of each metric over the step's samples."""
    ranks_agree: bool
    """True if all ranks had the same weights, according to the fingerprints of this step."""
    skipped: bool
    """True if the gradients overflowed in fp16, so that no rank changed its weights."""
    data_s: float
    """Seconds that rank 0 waited for its samples."""
    compute_s: float
    """Seconds that rank 0 spent in forward and backward passes."""
    communication_s: float
    """Seconds that rank 0 waited for other ranks and for communication not overlapped with a
    backward pass."""
    optimizer_s: float
    """Seconds that rank 0 spent in the update."""


@dataclass(frozen=True, kw_only=True)
class RankTimed(Event):
    """Times of one rank, summed over several steps.

    Reported at the end of each epoch and each generation, and at a fixed interval in between.
    """

    worker: str
    rank: int
    world_size: int
    step: int
    """The last of these steps."""
    num_steps: int
    samples: int
    """Samples that this rank trained on in these steps."""
    elapsed_s: float
    """Total duration of these steps, in seconds."""
    data_s: float
    """Part of ``elapsed_s``: waiting for samples."""
    compute_s: float
    """Part of ``elapsed_s``: forward and backward passes."""
    communication_s: float
    """Part of ``elapsed_s``: waiting for other ranks and for communication not overlapped with a
    backward pass."""
    optimizer_s: float
    """Part of ``elapsed_s``: updates."""
    evaluation_s: float
    """Seconds spent in evaluations between the steps, including interrupted ones; not in
    ``elapsed_s``."""
    checkpoint_s: float
    """Seconds that checkpoints blocked training; not in ``elapsed_s``."""
    wait_s: float
    """Part of ``communication_s``: waiting for a slower rank. The last step of a generation is not
    included."""
    metrics_s: float | None
    """Part of ``compute_s``: the functions in ``metrics``. None on a GPU, where the host does not
    wait for them."""
    core_wait_s: float | None
    """Seconds since the last report in which the training thread was ready to run without a core.
    None if the system does not report them."""
    cpu_s: float
    """Processor seconds that the trainer's threads used since the last report, without the
    processes that load data."""
    noise_variance: float | None = None
    """Variance of the mean gradient of one worker, summed over its components; None if the job does
    not measure it (``scaling.rule: adascale`` does)."""
    noise_square_norm: float | None = None
    """Squared norm of the true gradient, estimated together with ``noise_variance``."""


@dataclass(frozen=True, kw_only=True)
class StepUndone(Event):
    """The current step was undone because a rank was lost; it is repeated with the same samples."""

    step: int
    workers: list[str]
    """Surviving workers that had begun the step."""


@dataclass(frozen=True, kw_only=True)
class EvalCompleted(Event):
    """All ranks together completed one pass over the evaluation set."""

    step: int
    epoch: int
    samples: int
    loss: float
    duration_s: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The loss and the metrics, by name."""
        return {"loss": self.loss, **self.metrics}


@dataclass(frozen=True, kw_only=True)
class EvalScored(Event):
    """``eval.score`` has scored the records of an evaluation."""

    step: int
    """Step of the weights; later steps may precede this event."""
    samples: int
    """Number of records: one per sample of the evaluation set."""
    duration_s: float
    """Seconds from the start of the scoring process to its result."""
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The scores, by name."""
        return self.scores


@dataclass(frozen=True, kw_only=True)
class ExhibitStored(Event):
    """A figure, text or table that ``eval.score`` returned was stored with the job.

    The exhibit is in the file ``exhibits/step_00000120/NAME.png`` (or ``.txt``, ``.json``) of the
    run folder or bucket, not in the log. A later event with the same step and name replaces it.
    """

    step: int
    """Step of the weights that were evaluated."""
    name: str
    format: ExhibitFormat
    """``png``, ``text`` or ``table``."""
    size_bytes: int
    digest: str
    """SHA-256 of the file, hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class ExhibitsRemoved(Event):
    """The exhibits of an evaluation were removed."""

    step: int
    files: list[str]
    """The files, relative to the run folder."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class BestReached(Event):
    """An evaluation was better than all earlier evaluations; see ``checkpoint.best``.

    The weights of that step are saved in the background; ``CheckpointCommitted`` follows.
    """

    step: int
    metric: str
    """``loss``, or the name of a metric."""
    value: float


@dataclass(frozen=True, kw_only=True)
class EarlyStopped(Event):
    """Early stopping ended the job because its evaluations no longer improved."""

    step: int
    metric: str
    best: float | None
    """Best value; None if no value was finite."""
    best_step: int
    num_evals: int
    """Evaluations since the best one."""
    reason: str
    """Explanation as text."""


@dataclass(frozen=True, kw_only=True)
class LossNotFinite(Event):
    """The mean loss of a step was NaN or infinite, so all ranks undid it before the update."""

    step: int
    loss: float
    ranks: list[int]
    """Ranks whose own share of the loss was not finite."""
    workers: list[str]
    """Their workers, in the same order."""
    saved_step: int = 0
    """Step of the newest durable checkpoint at that time; 0 if there was none."""


@dataclass(frozen=True, kw_only=True)
class PreemptionNoticed(Event):
    """A worker received a notice that its machine will be interrupted."""

    worker: str
    deadline: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class RebalanceRecommended(Event):
    """A worker, which continues to train, was notified that its machine may be interrupted."""

    worker: str


@dataclass(frozen=True, kw_only=True)
class WorkerLeft(Event):
    """A worker left at a step boundary; no work was lost."""

    worker: str
    reason: LeaveReason


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker or its trainer exited without a notice."""

    worker: str
    cause: str
    detected_s: float = 0.0
    """Seconds from its exit until the coordinator detected it; 0.0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class FaultInjected(Event):
    """Fault injection caused a fault; the consequences do not count as failures."""

    worker: str
    fault: str
    """``kill``, ``stop``, ``hold_gil``, ``preempt`` ..."""
    step: int
    """The newest committed step at that time."""


@dataclass(frozen=True, kw_only=True)
class WeightsHashed(Event):
    """One rank reported the digest of its weights at a step; all ranks must report the same."""

    step: int
    worker: str
    rank: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint's manifest was written: the checkpoint is complete and durable."""

    step: int
    manifest: str
    """Path relative to the job's folder."""
    size_bytes: int
    stall_s: float
    """Seconds for which it blocked training."""
    duration_s: float
    """Seconds from the step boundary until it was durable."""
    slowed_s: float = 0.0
    """Seconds by which it slowed down the steps while it was being written, as measured by rank
    0."""


@dataclass(frozen=True, kw_only=True)
class CheckpointIntervalChosen(Event):
    """``checkpoint.every: auto`` changed the checkpoint interval by a quarter or more."""

    interval_s: float
    cost_s: float
    """Training time that a checkpoint costs, in seconds; 0 before the first checkpoint."""
    loss_rate_per_h: float
    """Expected rate at which all ranks that hold the state are lost."""
    limit: str = ""
    """The bound that applies (see ``rules.checkpoint_interval``); empty if none."""
    reason: str = ""
    """Explanation as text."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; training continues."""

    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class JobRestored(Event):
    """All ranks that held the newest steps were lost, so training continues from an older state.

    The older state is the newest checkpoint, or the state of a survivor that lacks the newest
    steps.
    """

    step: int
    """The step of that state; 0 if no state was left and training starts over."""
    num_undone: int
    """Number of logged steps after that step, which are repeated."""
    reason: str = ""
    """Why the state of the survivors could not be used: with ``shard: optimizer``, part of it was
    lost. Empty without such a state."""


@dataclass(frozen=True, kw_only=True)
class UserErrorRaised(Event):
    """The notebook's code raised an exception on a rank, so the job fails."""

    error: str
    """``ValueError: ...``, one line."""
    traceback: str
    """Traceback that refers to the notebook's cells as ``Cell In[n], line m``."""
    workers: list[str]
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class CostUpdated(Event):
    """Cost of the job's machines so far; logged only if the pool has prices."""

    spent_usd: float
    on_demand_usd: float
    """Cost of the same machine hours at on-demand prices."""
    wasted_usd: float = 0.0
    """The part of ``spent_usd`` for machines that booted, warmed up or drained after the first
    step: the cost of preemptions."""
    usd_by_type: dict[str, float] = field(default_factory=dict)
    """``spent_usd`` by machine type; empty if the pool has no types."""
    samples_by_type: dict[str, float] = field(default_factory=dict)
    """Samples that the workers on each machine type trained on, from the reports of the ranks."""


@dataclass(frozen=True, kw_only=True)
class LogLine(Event):
    """A line that a trainer printed, or a message from the coordinator."""

    level: str
    """``info``, ``warning`` or ``error``."""
    worker: str
    """The worker's name; empty for the coordinator."""
    text: str


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event from a newer version, kept so that sequence numbers have no gaps."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)


class LogFormatError(ValueError):
    """The first event of a log in another format."""


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Rebuild an event from ``Event.to_json_dict`` or ``Event.to_dict``.

    Fields that this version does not know are dropped, and kinds that it does not know become
    ``UnknownEvent``, so that an older kernel can show a newer job.

    Raises:
        LogFormatError: If it is the first event of a log in another format.
        TypeError: If a value does not have the type of its field. This is checked because a log may
            come from any user, and the code that reads it relies on the types.
        KeyError: If it does not have a kind.
    """
    values = dict(data)
    name = values.pop("event" if "event" in values else "kind")
    kind = Event.kinds.get(name)
    if kind is JobSubmitted and values.get("format") != LOG_FORMAT:
        raise LogFormatError(
            f"the log of job {plain_line(str(values.get('job_id')), 60)} has format "
            f"{plain_line(str(values.get('format')), 20)}, and etrain-jupyter {__version__} reads "
            f"format {LOG_FORMAT}. Nothing was changed. Read it with the version that wrote it."
        )
    if kind is None:
        common: dict[str, Any] = {
            k: values[k] for k in ("job_id", "time", "generation", "seq") if k in values
        }
        check_types("UnknownEvent", {"name": name, **common})
        return UnknownEvent(name=name, data=values, **common)
    known = _field_names(name)
    if values.keys() == known:  # the usual case; only events from other versions differ
        check_types(name, values)
        # Three times as fast as ``__init__``, which matters because a log may have 200,000 lines.
        event: Event = object.__new__(kind)
        vars(event).update(values)
        return event
    values = {key: value for key, value in values.items() if key in known}
    check_types(name, values)
    return kind(**values)


def check_types(kind: str, values: Mapping[str, Any]) -> None:
    """Reject values whose types do not match the fields of a kind, or that no job can have.

    Raises:
        KeyError: If a name is unknown.
        TypeError: If a value has the wrong type, is too large, or is 0 where a job divides by it.
    """
    integers, lists = _fields_to_check(kind, tuple(values), tuple(map(type, values.values())))
    for name in integers:
        if not (1 if name in _POSITIVE else -_TOO_LARGE) <= values[name] < _TOO_LARGE:
            raise TypeError(f"{name} of {kind} is out of range")
    for name, items in lists:
        value = values[name]
        for item in value.values() if isinstance(value, dict) else value:
            if not isinstance(item, items) or (type(item) is int and abs(item) >= _TOO_LARGE):
                raise TypeError(f"{name} of {kind} has an item of the wrong type")


@functools.lru_cache(maxsize=4096)
def _fields_to_check(
    kind: str, names: tuple[str, ...], types: tuple[type, ...]
) -> tuple[list[str], list[tuple[str, tuple[type, ...]]]]:
    # Checks the types of the values themselves. Returns the integers, and the fields whose items
    # must be checked. Nearly all events of a kind have the same types, so the cache limits this to
    # a few calls per log.
    annotations = {f.name: str(f.type) for f in dataclasses.fields(Event.kinds[kind])}
    integers, lists = [], []
    for name, kind_of_value in zip(names, types, strict=True):
        fitting, items = _TYPES[annotations[name]]
        if not issubclass(kind_of_value, fitting):
            raise TypeError(f"{name} of {kind} is {kind_of_value.__name__}")
        if items:
            lists.append((name, items))
        elif kind_of_value is int:
            integers.append(name)
    return integers, lists


_TOO_LARGE = 1 << 64
"""Larger integers, which JSON may contain, do not fit a float or an array."""
_POSITIVE = frozenset({"num_train_samples", "global_batch_size"})
# Maps the annotation of a field to the types allowed for its value and for the value's items.
# JSON may contain 1 for 1.0, and a bool is an int.
_NUMBER: tuple[type, ...] = (int, float)
_TYPES: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "int": ((int,), ()),
    "float": (_NUMBER, ()),
    "bool": ((int,), ()),
    "float | None": ((*_NUMBER, type(None)), ()),
    "str": ((str,), ()),
    "JobStatus": ((str,), ()),
    "ExhibitFormat": ((str,), ()),
    "WarmUpPhase": ((str,), ()),
    "LeaveReason": ((str,), ()),
    "list[str]": ((list, tuple), (str,)),
    "list[int]": ((list, tuple), (int,)),
    "list[float]": ((list, tuple), _NUMBER),
    "dict[str, float]": ((dict,), _NUMBER),
    "dict[str, Any]": ((dict,), ()),
}


@functools.cache
def _field_names(kind: str) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(Event.kinds[kind]))
