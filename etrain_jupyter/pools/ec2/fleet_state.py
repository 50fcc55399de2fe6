"""What the rules of the fleet remember from one look at EC2 to the next, and how it changes.

Plain data, written to disk before each launch: a head that is killed between asking for machines
and hearing of them asks again under the same token, and so gets the same machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

FIRST_BACK_OFF_S = 15.0
MAX_BACK_OFF_S = 300.0
UNSUPPORTED_S = 3600.0
"""A type that a zone does not have is not asked for again so soon."""
VISIBLE_S = 120.0
"""After that time EC2 lists what it has acknowledged; until then it counts as coming."""
MAX_REFUSALS = 3
"""A request that is refused so often in a row, for reasons that do not pass, is given up."""

MEMORY_FILE = "fleet.json"
"""Where it lies in the cluster's folder, written before each launch."""

PoolKey = tuple[str, str, str]
"""Type, zone and lifecycle: what has capacity or has none."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Machines to ask for, all of one lifecycle and with equally many workers."""

    token: str
    """EC2 answers the same token with the same machines, however often it is sent."""
    lifecycle: str
    num_nodes: int
    workers_each: int
    overrides: tuple[tuple[str, str], ...]
    """Types and zones that will do."""

    @property
    def num_workers(self) -> int:
        """Of all its machines together."""
        return self.num_nodes * self.workers_each

    @property
    def keys(self) -> tuple[PoolKey, ...]:
        """Where it may be filled from."""
        return tuple((type, zone, self.lifecycle) for type, zone in self.overrides)


@dataclass(frozen=True, kw_only=True)
class Ack:
    """A machine that EC2 has acknowledged and does not list yet."""

    id: str
    type: str
    zone: str
    lifecycle: str
    workers: int
    at: float


@dataclass(frozen=True, kw_only=True)
class LaunchFailure:
    """Why one pool, or all of a request's, gave nothing."""

    type: str
    """Empty for all of the request."""
    zone: str
    code: str
    message: str
    kind: str
    """``capacity``, ``quota``, ``unsupported`` or ``fatal``, see ``aws_words.kind_of``."""


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """What came of a request."""

    acks: tuple[Ack, ...] = ()
    refusals: tuple[LaunchFailure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BackOff:
    """A pool that had no capacity is left alone for a while, each time for longer."""

    until: float
    num: int


@dataclass(frozen=True, kw_only=True)
class FleetState:
    """What the rules know besides what EC2 lists."""

    life: int = 1
    """Which of the cluster's heads it is; part of tokens."""
    seq: int = 0
    """Number of the last request."""
    acks: tuple[Ack, ...] = ()
    unanswered: tuple[tuple[LaunchRequest, float], ...] = ()
    """Requests whose answers never came, and when they were last sent."""
    back_offs: Mapping[PoolKey, BackOff] = field(default_factory=dict)
    zone: str = ""
    """Where single-az keeps the workers."""
    short_since: float | None = None
    """Since when workers are missing."""
    surplus_since: float | None = None
    """Since when there are more than anybody wants."""
    num_refusals: int = 0
    """Requests in a row that were refused for reasons that do not pass."""
    num_boot_failures: int = 0
    """Nodes in a row that never said hello."""
    blamed: frozenset[str] = frozenset()
    """Nodes that count as boot failures already."""
    halted: str = ""
    """Why nothing is launched any more: ``budget``, ``boot`` or ``refused``; empty if it may."""
    halted_at: float = 0.0

    # --- what is known of requests ---

    def sent(self, request: LaunchRequest, now: float) -> FleetState:
        """Note a request before it goes out, for the first time or once more."""
        is_new = all(known.token != request.token for known, _ in self.unanswered)
        rest = tuple(one for one in self.unanswered if one[0].token != request.token)
        return self._with(seq=self.seq + is_new, unanswered=(*rest, (request, now)))

    def answered(self, request: LaunchRequest, answer: FleetResult, now: float) -> FleetState:
        """Note what came of a request: machines that are coming, pools that have none."""
        known = {ack.id for ack in self.acks}
        acks = (*self.acks, *(ack for ack in answer.acks if ack.id not in known))
        back_offs = dict(self.back_offs)
        for ack in answer.acks:
            back_offs.pop((ack.type, ack.zone, ack.lifecycle), None)
        refusals = answer.refusals
        if not refusals and not answer.acks:
            refusals = (LaunchFailure(type="", zone="", code="", message="", kind="capacity"),)
        for refusal in refusals:
            for key in _keys_of(refusal, request):
                back_offs[key] = _longer(self.back_offs.get(key), refusal.kind, now)
        is_fatal = not answer.acks and any(one.kind == "fatal" for one in refusals)
        memory = self._with(
            acks=acks, back_offs=back_offs, num_refusals=self.num_refusals + 1 if is_fatal else 0
        ).forgot(request)
        return memory.halt("refused", now) if memory.num_refusals >= MAX_REFUSALS else memory

    def forgot(self, request: LaunchRequest) -> FleetState:
        """Give up waiting for the answer to a request."""
        rest = tuple(one for one in self.unanswered if one[0].token != request.token)
        return self._with(unanswered=rest)

    # --- what is known of machines ---

    def listed(self, ids: Iterable[str]) -> FleetState:
        """Note which machines EC2 lists, in whatever state."""
        seen = set(ids)
        return self._with(acks=tuple(ack for ack in self.acks if ack.id not in seen))

    def looked_up(self, found: Iterable[str], missing: Iterable[str], now: float) -> FleetState:
        """Note what EC2 says of single machines that it should have listed long ago."""
        there, gone = set(found), set(missing)
        acks = (dataclasses.replace(a, at=now) if a.id in there else a for a in self.acks)
        return self._with(acks=tuple(ack for ack in acks if ack.id not in gone))

    def said_hello(self) -> FleetState:
        """Note that a node works, so that the image and the rest of the set-up do."""
        return self._with(num_boot_failures=0) if self.num_boot_failures else self

    def failed_to_boot(self, node: str, limit: int, now: float) -> FleetState:
        """Count a node that never said hello; after ``limit`` in a row nothing is launched."""
        if node in self.blamed:
            return self
        num = self.num_boot_failures + 1
        memory = self._with(num_boot_failures=num, blamed=self.blamed | {node})
        return memory.halt("boot", now) if num >= limit else memory

    def halt(self, why: str, now: float) -> FleetState:
        """Launch nothing any more; the first reason stays."""
        return self if self.halted else self._with(halted=why, halted_at=now)

    def with_(self, **changes: Any) -> FleetState:
        """Return it with other values."""
        return self._with(**changes)

    def _with(self, **changes: Any) -> FleetState:
        return dataclasses.replace(self, **changes)

    # --- JSON ---

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        data = dataclasses.asdict(self)
        data["back_offs"] = [[*key, one.until, one.num] for key, one in self.back_offs.items()]
        data["blamed"] = sorted(self.blamed)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from the JSON form."""
        requests = (
            (LaunchRequest(**one | {"overrides": tuple(map(tuple, one["overrides"]))}), at)
            for one, at in data["unanswered"]
        )
        return cls(
            **dict(data)
            | {
                "acks": tuple(Ack(**ack) for ack in data["acks"]),
                "unanswered": tuple(requests),
                "back_offs": {
                    (type, zone, lifecycle): BackOff(until=until, num=num)
                    for type, zone, lifecycle, until, num in data["back_offs"]
                },
                "blamed": frozenset(data["blamed"]),
            }
        )


def _keys_of(refusal: LaunchFailure, request: LaunchRequest) -> tuple[PoolKey, ...]:
    if refusal.kind == "quota" or not refusal.type:
        return request.keys
    return tuple(
        key for key in request.keys if key[0] == refusal.type and refusal.zone in ("", key[1])
    )


def _longer(known: BackOff | None, kind: str, now: float) -> BackOff:
    num = known.num if known else 0
    if kind == "unsupported":
        return BackOff(until=now + UNSUPPORTED_S, num=num)
    if kind == "quota":
        return BackOff(until=now + MAX_BACK_OFF_S, num=num)
    wait_s = min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(num, 10))
    return BackOff(until=now + wait_s, num=num + 1)
