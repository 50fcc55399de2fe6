"""Split the lost goodput of a day of ``spot`` by cause. Pure.

The reference is the goodput that the market's capacity would have allowed: at each moment, as many
workers as it has machines for, without boots and admissions. The difference from the measured
goodput is attributed to the machines that were not training at that moment, and to steps that took
longer than undisturbed ones.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from etrain_jupyter.log.events import (
    Event,
    GenerationFormed,
    GenerationReady,
    StepCompleted,
    WorkerJoined,
    WorkerWarmed,
)

CAUSES = {
    "boundary": "change of the workers: until the next generation is ordered",
    "connect": "change: connecting the ranks",
    "transfer": "change: state transfer, and wrapping the model",
    "draining": "machines with a notice that no longer train",
    "admission": "trainers that are warm and not admitted",
    "warm_up": "trainers that start: imports, model, trial pass",
    "boot": "machines from launch until their worker connects",
    "back_off": "capacity that is not requested, because its pools back off",
    "request": "capacity that is not requested yet",
    "beyond": "workers beyond the capacity (negative)",
}
"""Causes, in the order in which they explain a missing worker."""
SLOW_STEPS = "slow_steps"
"""Steps that take longer than undisturbed ones, for example next to boots on the same cores."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A period in which nothing changes."""

    seconds: float
    allowed: int
    """Number of workers for which the market has machines."""
    training: int
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Workers that do not train, by cause."""
    otherwise: str = "request"
    """Cause of missing workers beyond those in ``waiting``."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Goodput of a day, its limit by capacity, and the difference by cause.

    All are relative to the undisturbed cluster.
    """

    goodput: float
    allowed: float
    by_cause: Mapping[str, float]
    """Its sum is ``allowed - goodput``."""

    @property
    def by_allowed(self) -> float:
        """Goodput as a share of what the capacity allowed."""
        return self.goodput / self.allowed if self.allowed else 0.0

    @property
    def trained_by_allowed(self) -> float:
        """The same without ``SLOW_STEPS``: the share of the allowed time in which workers train.

        It does not depend on the load of the machine on which the benchmark runs.
        """
        trained = self.goodput + self.by_cause[SLOW_STEPS]
        return trained / self.allowed if self.allowed else 0.0


def split_losses(moments: Iterable[Moment], *, rates: Sequence[float], goodput: float) -> Losses:
    """Attribute the difference between allowed and measured goodput.

    Args:
        moments: The day.
        rates: Throughput by number of workers, from 0 to the maximum.
        goodput: Measured goodput, relative to the maximum number of workers.

    >>> day = [Moment(seconds=6.0, allowed=2, training=2),
    ...        Moment(seconds=2.0, allowed=2, training=1, waiting={"boot": 1})]
    >>> losses = split_losses(day, rates=(0.0, 1.0, 2.0), goodput=0.75)
    >>> losses.allowed, losses.by_cause["boot"], losses.by_cause["slow_steps"]
    (1.0, 0.125, 0.125)
    """
    total_s = allowed = ideal = 0.0
    lost = dict.fromkeys((*CAUSES, SLOW_STEPS), 0.0)
    for moment in moments:
        total_s += moment.seconds
        allowed += rates[moment.allowed] * moment.seconds
        ideal += rates[moment.training] * moment.seconds
        missing = moment.allowed - moment.training
        if not missing:
            continue
        each = (rates[moment.allowed] - rates[moment.training]) / missing * moment.seconds
        if missing < 0:
            lost["beyond"] += missing * each
            continue
        for cause in CAUSES:
            number = min(missing, moment.waiting.get(cause, 0))
            lost[cause] += number * each
            missing -= number
        lost[moment.otherwise] += missing * each
    full = rates[-1] * total_s
    lost[SLOW_STEPS] = ideal - goodput * full
    return Losses(
        goodput=goodput,
        allowed=allowed / full,
        by_cause={cause: seconds / full for cause, seconds in lost.items()},
    )


@dataclass(frozen=True, kw_only=True)
class DayMachine:
    """A machine of the cloud's record; times in seconds since the epoch."""

    id: str
    zone: str
    launched_at: float
    ended_at: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """An interruption of a machine."""

    id: str
    at: float
    """When the capacity was withdrawn: with the recommendation or the notice, if there is one."""
    notice_at: float
    ends_at: float


@dataclass(frozen=True, kw_only=True)
class DayRecord:
    """A day as the cloud and the job recorded it."""

    begin: float
    end: float
    max_workers: int
    capacities: Sequence[tuple[float, str, int]]
    """Time, zone and capacity without interrupted machines, including those at the beginning."""
    machines: Sequence[DayMachine]
    interruptions: Sequence[Interruption]
    events: Sequence[Event]
    back_offs: Sequence[tuple[float, frozenset[str]]] = ()
    """Times, and the zones whose pools back off from then on."""


def moments_of(record: DayRecord) -> Iterator[Moment]:
    """Yield the periods of a day in which nothing changes."""
    generations = _generations_of(record.events)
    joined = {e.worker: e.time for e in record.events if isinstance(e, WorkerJoined)}
    warmed = {e.worker: e.time for e in record.events if isinstance(e, WorkerWarmed)}
    ends = {one.id: one for one in record.interruptions}
    times = {record.begin, record.end, *joined.values(), *warmed.values()}
    times |= {at for at, _, _ in record.capacities} | {at for at, _ in record.back_offs}
    times |= {at for m in record.machines for at in (m.launched_at, m.ended_at)}
    times |= {at for one in record.interruptions for at in (one.at, one.notice_at, one.ends_at)}
    times |= {at for one in generations for at in one.times}
    inside = sorted(at for at in times if record.begin <= at <= record.end)
    for at, until in pairwise(inside):
        # A moment includes its beginning.
        phase, ranks = _training_at(generations, at)
        capacity = {zone: number for when, zone, number in record.capacities if when <= at}
        still = [one for one in record.interruptions if one.at <= at < one.ends_at]
        allowed = min(record.max_workers, sum(capacity.values()) + len(still))
        here = [m for m in record.machines if m.launched_at <= at < m.ended_at]
        # The steps of ranks whose machine is gone are not committed.
        if not phase and not ranks <= {machine.id for machine in here}:
            phase = "boundary"
        waiting: Counter[str] = Counter()
        for machine in here:
            known = ends.get(machine.id)
            if machine.id in ranks:
                if phase:
                    waiting[phase] += 1
            elif known and known.notice_at <= at:
                waiting["draining"] += 1
            elif machine.id in warmed and warmed[machine.id] <= at:
                waiting["admission"] += 1
            elif machine.id in joined and joined[machine.id] <= at:
                waiting["warm_up"] += 1
            else:
                waiting["boot"] += 1
        closed = next((zones for when, zones in reversed(record.back_offs) if when <= at), ())
        used = Counter(machine.zone for machine in here)
        has_room = {zone for zone, number in capacity.items() if number > used[zone]}
        yield Moment(
            seconds=until - at,
            allowed=allowed,
            training=0 if phase else min(len(ranks), record.max_workers),
            waiting=waiting,
            otherwise="back_off" if has_room and has_room <= set(closed) else "request",
        )


@dataclass(frozen=True, kw_only=True)
class _Generation:
    ranks: frozenset[str]
    """Workers that were training before the change and after it."""
    all_ranks: frozenset[str]
    stopped_at: float
    """Last step of the previous generation."""
    formed_at: float
    connected_at: float
    ready_at: float

    @property
    def times(self) -> tuple[float, float, float, float]:
        return self.stopped_at, self.formed_at, self.connected_at, self.ready_at


def _generations_of(events: Sequence[Event]) -> list[_Generation]:
    formed = {e.generation: e for e in events if isinstance(e, GenerationFormed)}
    ready = {e.generation: e for e in events if isinstance(e, GenerationReady)}
    last_step: dict[int, float] = {}
    for event in events:
        if isinstance(event, StepCompleted):
            last_step[event.generation] = event.time
    found: list[_Generation] = []
    before: frozenset[str] = frozenset()
    stopped_at = 0.0
    # A generation without a step is part of the change to the next one.
    for number in sorted(set(last_step) & set(ready) & set(formed)):
        begin, done = formed[number], ready[number]
        ranks = frozenset(begin.ranks)
        found.append(
            _Generation(
                ranks=ranks & before,
                all_ranks=ranks,
                stopped_at=min(stopped_at or begin.time, begin.time),
                formed_at=begin.time,
                connected_at=min(begin.time + done.connect_s, done.time),
                ready_at=done.time,
            )
        )
        before, stopped_at = ranks, last_step[number]
    return found


def _training_at(generations: Sequence[_Generation], at: float) -> tuple[str, frozenset[str]]:
    """Return the phase of a change, empty while the ranks train, and the ranks."""
    current: frozenset[str] = frozenset()
    for one in generations:
        if at < one.stopped_at:
            break
        if at < one.formed_at:
            return "boundary", one.ranks
        if at < one.connected_at:
            return "connect", one.ranks
        if at < one.ready_at:
            return "transfer", one.ranks
        current = one.all_ranks
    return "", current


def full_rate(events: Sequence[Event], *, world_size: int, begin: float, end: float) -> float:
    """Return the median steps per second of generations of full size; 0 if there are none."""
    steps = [e for e in events if isinstance(e, StepCompleted) and begin <= e.time <= end]
    times = [
        b.time - a.time
        for a, b in pairwise(steps)
        if a.generation == b.generation and b.world_size == world_size
    ]
    return 1 / statistics.median(times) if times else 0.0


def quantized_rates(global_batch: int, max_workers: int) -> tuple[float, ...]:
    """Return relative rates if a step takes as long as the largest share of its samples.

    >>> quantized_rates(32, 4)[2:]
    (2.0, 2.909090909090909, 4.0)
    """
    shares = (-(-global_batch // w) for w in range(1, max_workers + 1))
    return (0.0, *(global_batch / share for share in shares))
