"""Facts about a job, in the past tense: the durable log, and all that the screen shows.

Every event is a frozen dataclass that survives a round trip through one line of JSON. The
coordinator gives out ``seq`` (1, 2, 3 ... without gaps) and appends the line to the log before
anybody else sees it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

STATUSES = ("submitted", "waiting", "running", "paused", "finished", "stopped", "failed")
TERMINAL_STATUSES = frozenset({"finished", "stopped", "failed"})

STACKS_ASKED = "etrain: what the threads of this trainer are doing:"
"""The log line before the stacks that a supervisor has asked a trainer for."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every fact carries."""

    job_id: str
    time: float
    """Seconds since the epoch, by the clock of the process that saw it happen."""
    generation: int = 0
    """The generation it belongs to; 0 before the first one formed."""
    seq: int = 0
    """Place in the job's log, from 1; 0 until the log has taken it."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Event.kinds[cls.__name__] = cls

    @property
    def kind(self) -> str:
        """The name of the class, which is also the key ``event`` of its JSON form."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the key ``event`` first."""
        return {"event": self.kind} | {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self)
        }

    def with_seq(self, seq: int) -> Self:
        """Return the same fact at its place in the log."""
        return dataclasses.replace(self, seq=seq)


@dataclass(frozen=True, kw_only=True)
class JobSubmitted(Event):
    """A job entered the cluster."""

    name: str
    min_workers: int
    max_workers: int
    pool: str = "local"
    config: dict[str, Any] = field(default_factory=dict)
    """The JSON form of its TrainConfig, defaults filled in."""


@dataclass(frozen=True, kw_only=True)
class JobResumed(Event):
    """A coordinator took over the run folder of a job that nobody trained any more.

    What follows belongs to the same job: steps and generations go on counting. ``generation`` is
    the last one before.
    """

    from_status: str
    """The last status before; not a terminal one if the coordinator died."""
    step: int
    """The newest step in the log; ``JobRestored`` tells which state was there to go on from."""
    min_workers: int
    max_workers: int
    pool: str = "local"
    config: dict[str, Any] = field(default_factory=dict)
    """The JSON form of the TrainConfig that holds from now on."""
    differs: list[str] = field(default_factory=list)
    """What is not as it was in the life before, in words."""


@dataclass(frozen=True, kw_only=True)
class SchedulerRestarted(Event):
    """The scheduler had died; another one has taken the job over, with the trainers that live."""

    step: int
    """The newest step in the log then; the trainers may be further."""
    away_s: float
    """How long nobody could be told anything: until the trainers were found again."""
    workers: list[str] = field(default_factory=list)
    """Those whose trainers live."""
    lost: list[str] = field(default_factory=list)
    """Those that did not come back."""


@dataclass(frozen=True, kw_only=True)
class JobPlanned(Event):
    """The first warm trainer told how much work there is; again after each ``JobResumed``."""

    num_train_samples: int
    num_eval_samples: int
    """0 without an evaluation set."""
    global_batch_size: int
    """Samples of a step; with ``per_worker_batch_size`` those of the base workers."""
    steps_per_epoch: int
    """At that batch size."""
    total_steps: int
    """At that batch size."""
    num_parameters: int = 0
    total_samples: int = 0
    """Samples that the whole job trains, over all epochs; 0 in older logs."""
    per_worker_batch_size: int = 0
    """Samples of a step that each worker has; 0 if the step's batch never changes."""

    def batch_size_of(self, world_size: int) -> int:
        """Return the samples of a full step of so many ranks."""
        return self.per_worker_batch_size * world_size or self.global_batch_size

    def total_steps_after(self, step: StepCompleted) -> int:
        """Return how many steps the job will have made if its workers stay as in this one."""
        if not self.per_worker_batch_size:
            return self.total_steps
        size, length = self.batch_size_of(step.world_size), self.num_train_samples
        done = step.first + step.samples
        left = self.total_samples - step.epoch * length - done
        here = min(length - done, left)  # no step crosses the end of an epoch
        epochs, rest = divmod(left - here, length)
        parts = (here, *((length,) * epochs), rest)
        return step.step + sum(-(-part // size) for part in parts)


@dataclass(frozen=True, kw_only=True)
class JobStatusChanged(Event):
    """The job's status is another one now."""

    status: str
    """One of ``STATUSES``."""
    reason: str = ""
    """Why, in words for a person; empty where the status says it all."""


@dataclass(frozen=True, kw_only=True)
class WorkersScaled(Event):
    """Somebody asked for other bounds of the number of workers."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    """A Dask worker was given to this job; its trainer is starting."""

    worker: str
    """The worker's name, unique in the cluster's life."""
    address: str = ""
    device: str = "cpu"
    machine: str = ""
    """Type of its machine, for example ``g5.xlarge``; empty where the pool knows none."""
    zone: str = ""
    lifecycle: str = ""
    """``spot`` or ``on-demand``; empty where the pool knows no prices."""
    usd_per_h: float | None = None
    """Its share of what the machine cost an hour when it joined; None if nobody knows."""


@dataclass(frozen=True, kw_only=True)
class WorkerWarmed(Event):
    """A worker's trainer is ready to be admitted: model built, one pass done and undone."""

    worker: str
    trainer_pid: int
    warm_s: float
    """Seconds from the order to start until it was ready."""


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(Event):
    """A membership was fixed and its ranks told to go on."""

    why: str
    """``start``, ``join``, ``leave``, ``lost``, ``stalled`` (nobody moved, with none to blame),
    ``broken`` (a collective failed, and nobody was lost),
    ``restart`` (the scheduler had died while the one before formed),
    ``resume``; several joined by ``+``."""
    world_size: int
    ranks: list[str]
    """Worker names in rank order, length ``world_size``."""
    trainer_pids: list[int] = field(default_factory=list)
    """Process ids in rank order, length ``world_size``."""
    behind: list[int] = field(default_factory=list)
    """Ranks that must receive the state of rank 0 before they hold any."""
    step: int = 0
    """The newest committed step, from which all go on."""
    backend: str = ""
    """``nccl`` or ``gloo``, whichever sums the gradients; empty in logs of older versions."""
    stall_s: float = 0.0
    """Seconds from the end of the previous generation's last step, as the coordinator saw it."""


@dataclass(frozen=True, kw_only=True)
class GenerationReady(Event):
    """All ranks of a generation are connected, hold the newest state, and step.

    Each duration is that of the slowest rank.
    """

    world_size: int
    connect_s: float
    """From the order to form until the process group stood."""
    sync_s: float
    """For handing the state to the ranks that were behind; 0 if none was."""
    wrap_s: float
    """For wrapping the model."""


@dataclass(frozen=True, kw_only=True)
class StepCompleted(Event):
    """One optimizer update was committed."""

    step: int
    """Updates so far, from 1."""
    epoch: int
    """The epoch its samples belong to, from 0."""
    first: int
    """Where its samples begin in the order of the epoch."""
    samples: int
    """How many samples the ranks together put through forward and backward for it."""
    sample_checksum: int
    """Sum over those samples of ``ledger.checksum_of(index)``: proof of which ones they were."""
    loss: float
    """Mean over the step's samples."""
    lr: float
    """Learning rate of the first parameter group."""
    world_size: int
    samples_per_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean over the step's samples of each metric."""
    ranks_agree: bool = True
    """Whether all ranks held the same weights, by what they told of them with this step."""
    skipped: bool = False
    """Whether the gradients overflowed in fp16, so that all ranks kept their weights."""
    data_s: float = 0.0
    """How long rank 0 waited for its samples."""
    compute_s: float = 0.0
    """Its forward and backward passes."""
    communication_s: float = 0.0
    """How long it waited for the other ranks, and for what no backward pass hid."""
    optimizer_s: float = 0.0
    """Its update."""


@dataclass(frozen=True, kw_only=True)
class RankTimed(Event):
    """What some steps of one rank took it, until an epoch or a generation ended or for a while."""

    worker: str
    rank: int
    world_size: int
    step: int
    """The last of the steps."""
    num_steps: int
    samples: int
    """How many this rank passed in them."""
    elapsed_s: float
    """All of the steps' time."""
    data_s: float
    """Of it: waiting for samples."""
    compute_s: float
    """Of it: forward and backward passes."""
    communication_s: float
    """Of it: waiting for the other ranks, and for what no backward pass hid."""
    optimizer_s: float
    """Of it: updates."""
    evaluation_s: float = 0.0
    """Evaluations between them, not in ``elapsed_s``; one that was cut short too."""
    checkpoint_s: float = 0.0
    """How long training stood still for checkpoints, not in ``elapsed_s``."""


@dataclass(frozen=True, kw_only=True)
class StepUndone(Event):
    """A step in flight was undone because a rank was lost; its samples are trained again."""

    step: int
    workers: list[str]
    """Survivors that had begun it."""


@dataclass(frozen=True, kw_only=True)
class EvalCompleted(Event):
    """The evaluation set was gone through once over all ranks."""

    step: int
    epoch: int
    samples: int
    loss: float
    duration_s: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BestReached(Event):
    """An evaluation was better than all before it: see ``checkpoint.best``.

    The weights of that step are saved in the background; ``CheckpointCommitted`` tells when.
    """

    step: int
    metric: str
    """``loss``, or the name of a metric."""
    value: float


@dataclass(frozen=True, kw_only=True)
class EarlyStopped(Event):
    """The evaluations have not improved for long enough: the job ends at this step."""

    step: int
    metric: str
    best: float | None
    """None if it never was a finite number."""
    best_step: int
    num_evals: int
    """Evaluations since the best one."""
    reason: str
    """All of that in words."""


@dataclass(frozen=True, kw_only=True)
class LossNotFinite(Event):
    """The mean loss of a step was NaN or infinite: all ranks undid it before its update."""

    step: int
    loss: float
    ranks: list[int]
    """Those whose own share was not finite."""
    workers: list[str]
    """Their workers, in the same order."""
    saved_step: int = 0
    """Step of the newest durable checkpoint then; 0 if there was none."""


@dataclass(frozen=True, kw_only=True)
class PreemptionNoticed(Event):
    """A worker was told that its machine will be taken."""

    worker: str
    deadline: float
    """Seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class RebalanceRecommended(Event):
    """A worker was told that its machine is likely to be taken; it trains on."""

    worker: str


@dataclass(frozen=True, kw_only=True)
class WorkerLeft(Event):
    """A worker left at a step boundary, nothing lost."""

    worker: str
    reason: str
    """``preempted``, ``scaled down``, ``job ended`` ..."""


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker or its trainer ended unannounced."""

    worker: str
    cause: str
    detected_s: float = 0.0
    """Seconds from its end until the coordinator knew, where that can be told."""


@dataclass(frozen=True, kw_only=True)
class FaultInjected(Event):
    """A fault was committed on purpose; what follows from it is nobody's failure."""

    worker: str
    fault: str
    """``kill``, ``stop``, ``hold_gil``, ``preempt`` ..."""
    step: int
    """The newest committed step then."""


@dataclass(frozen=True, kw_only=True)
class WeightsHashed(Event):
    """One rank told the digest of its weights at a step: all ranks of a step must agree."""

    step: int
    worker: str
    rank: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint's manifest was written: it exists."""

    step: int
    manifest: str
    """Path relative to the job's folder."""
    size_bytes: int
    stall_s: float
    """How long training stood still for it."""
    duration_s: float
    """From the step boundary until it was durable."""
    slowed_s: float = 0.0
    """How much longer the steps took meanwhile than ordinary ones, all together, as far as rank 0
    could tell."""


@dataclass(frozen=True, kw_only=True)
class CheckpointIntervalChosen(Event):
    """How often ``checkpoint.every: auto`` saves from now on; told when it changes by a quarter."""

    interval_s: float
    cost_s: float
    """What a checkpoint takes of training; 0 before the first."""
    loss_rate_per_h: float
    """How often all holders of the state are expected to be lost."""
    limit: str = ""
    """The bound that it is at, see ``elastic.checkpoint_interval``; empty if it is at none."""
    reason: str = ""
    """All of that in words."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; training goes on."""

    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class JobRestored(Event):
    """Every rank that held the newest steps was lost: training goes on from an older state.

    That is the newest checkpoint, or a survivor's state from before the step in which they died.
    """

    step: int
    """The step of that state; 0 if there was none and training starts over."""
    num_undone: int
    """Logged steps after it, which are trained again."""


@dataclass(frozen=True, kw_only=True)
class UserErrorRaised(Event):
    """The notebook's own code raised on a rank: the job fails."""

    error: str
    """``ValueError: ...``, one line."""
    traceback: str
    """With the notebook's cells named as ``Cell In[n], line m``."""
    workers: list[str]
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class CostUpdated(Event):
    """What the machines of the job have cost so far, where their pool knows prices."""

    spent_usd: float
    on_demand_usd: float
    """What the same hours would have cost without spot prices."""
    wasted_usd: float = 0.0
    """The part of ``spent_usd`` in which machines booted, warmed up or drained after the first
    step: what preemptions cost."""


@dataclass(frozen=True, kw_only=True)
class LogLine(Event):
    """A line that a trainer printed, or a remark of the coordinator's."""

    level: str
    """``info``, ``warning`` or ``error``."""
    worker: str
    """Empty for the coordinator."""
    text: str


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """A fact written by a newer version; kept so that sequence numbers stay whole."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Rebuild the event that ``Event.to_dict`` wrote.

    Fields that this version does not know are dropped, and kinds that it does not know become
    ``UnknownEvent``, so that an older kernel can show a newer job.

    Raises:
        TypeError: If a value is of another type than its field: a log may be anybody's, and what
            is folded and drawn relies on the types.
        KeyError: If it does not say of which kind it is.
    """
    values = dict(data)
    name = values.pop("event")
    kind = Event.kinds.get(name)
    if kind is None:
        common: dict[str, Any] = {
            k: values[k] for k in ("job_id", "time", "generation", "seq") if k in values
        }
        check_types("UnknownEvent", {"name": name, **common})
        return UnknownEvent(name=name, data=values, **common)
    known = _field_names(name)
    if values.keys() == known:
        check_types(name, values)
        # What ``__init__`` would do in three times the time: a log may have 200,000 lines.
        event: Event = object.__new__(kind)
        vars(event).update(values)
        return event
    values = {key: value for key, value in values.items() if key in known}
    check_types(name, values)
    return kind(**values)


def check_types(kind: str, values: Mapping[str, Any]) -> None:
    """Refuse values of other types than the fields of a kind. Unknown names are a ``KeyError``.

    Raises:
        TypeError: For the first one.
    """
    for name, items in _fields_with_items(kind, tuple(values), tuple(map(type, values.values()))):
        value = values[name]
        inner = value.values() if isinstance(value, dict) else value
        if not all(isinstance(item, items) for item in inner):
            raise TypeError(f"{name} of {kind} holds something else than it should")


@functools.lru_cache(maxsize=4096)
def _fields_with_items(
    kind: str, names: tuple[str, ...], types: tuple[type, ...]
) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Check the types of the values themselves; return the fields whose items are to be checked.

    Nearly all events of a kind have the same types, so that this runs a few times a log.
    """
    annotations = {f.name: str(f.type) for f in dataclasses.fields(Event.kinds[kind])}
    found = []
    for name, kind_of_value in zip(names, types, strict=True):
        fitting, items = _TYPES[annotations[name]]
        if not issubclass(kind_of_value, fitting):
            raise TypeError(f"{name} of {kind} is {kind_of_value.__name__}")
        if items:
            found.append((name, items))
    return tuple(found)


_NUMBER: tuple[type, ...] = (int, float)
_TYPES: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "int": (_NUMBER, ()),
    "float": (_NUMBER, ()),
    "bool": (_NUMBER, ()),
    "float | None": ((*_NUMBER, type(None)), ()),
    "str": ((str,), ()),
    "list[str]": ((list, tuple), (str,)),
    "list[int]": ((list, tuple), _NUMBER),
    "dict[str, float]": ((dict,), _NUMBER),
    "dict[str, Any]": ((dict,), ()),
}
"""Annotation of a field: the types that a value may have, and those of its items."""


@functools.cache
def _field_names(kind: str) -> frozenset[str]:
    """Return the names of a kind's fields; a log of many steps asks for them once a line."""
    return frozenset(f.name for f in dataclasses.fields(Event.kinds[kind]))
