"""State that the fleet's rules keep between ticks: launches in progress, back-offs, failures.

Plain data, written to disk before each launch. A launch goes through these states::

    sent          answered              listed
     |  unanswered   |        acks         |  a row in EC2's listing
     |---------------|---------------------|----------------------------->
     |  no answer: repeat with its token   |
                     |  not listed after VISIBLE_S: query by id (looked_up)
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

FIRST_BACK_OFF_S = 5.0
BACK_OFF_GROWTH = 1.25
MAX_BACK_OFF_S = 60.0
"""Longest back-off of a pool without capacity, in seconds. Until then, the back-off is about a
quarter of the time without capacity, so that little time with capacity is lost."""
QUOTA_BACK_OFF_S = 300.0
"""Back-off after a refusal because of a quota, in seconds."""
URGENT_BACK_OFF_S = 30.0
"""Longest back-off of machines that a deadline depends on, in seconds."""
UNSUPPORTED_S = 3600.0
"""Back-off for a type that a zone does not have, in seconds."""
VISIBLE_S = 120.0
"""Time within which EC2 should list a machine that it has acknowledged, in seconds."""
MAX_REFUSALS = 3
"""Number of consecutive permanent refusals after which launches stop."""

STATE_FILE = "fleet.json"
"""In the cluster's folder; written before each launch."""

PoolKey = tuple[str, str, str]
"""Type, zone and lifecycle, which identify one of EC2's capacity pools."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A request for machines that have the same lifecycle and number of workers."""

    token: str
    """Makes the request idempotent: EC2 returns the same machines for the same token."""
    lifecycle: str
    num_nodes: int
    workers_each: int
    overrides: tuple[tuple[str, str], ...]
    """Acceptable types and zones."""
    is_urgent: bool = False
    """A deadline depends on it: without capacity, retry at least every ``URGENT_BACK_OFF_S``."""

    @property
    def num_workers(self) -> int:
        """Total number of workers on its machines."""
        return self.num_nodes * self.workers_each

    @property
    def keys(self) -> tuple[PoolKey, ...]:
        """The capacity pools from which EC2 may fill the request."""
        return tuple((type, zone, self.lifecycle) for type, zone in self.overrides)


@dataclass(frozen=True, kw_only=True)
class Ack:
    """A machine that EC2 has acknowledged but does not list yet."""

    id: str
    type: str
    zone: str
    lifecycle: str
    workers: int
    at: float


@dataclass(frozen=True, kw_only=True)
class LaunchFailure:
    """Why a capacity pool, or the whole request, was refused."""

    type: str
    """Empty for the whole request."""
    zone: str
    code: str
    message: str
    kind: str
    """``capacity``, ``quota``, ``unsupported`` or ``fatal``; see ``aws_messages.kind_of``."""


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """The answer to a request."""

    acks: tuple[Ack, ...] = ()
    refusals: tuple[LaunchFailure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BackOff:
    """Exponential back-off of a capacity pool that had no capacity."""

    until: float
    num: int


@dataclass(frozen=True, kw_only=True)
class FleetState:
    """State that the rules keep in addition to EC2's listing."""

    life: int = 1
    """Incarnation number of the head; part of the tokens."""
    seq: int = 0
    """Number of the last request."""
    acks: tuple[Ack, ...] = ()
    unanswered: tuple[tuple[LaunchRequest, float], ...] = ()
    """Requests without an answer, and when they were last sent."""
    back_offs: Mapping[PoolKey, BackOff] = field(default_factory=dict)
    zone: str = ""
    """With ``placement: single-az``, the zone of all workers."""
    short_since: float | None = None
    """Time at which workers began to be missing; None if none are missing."""
    surplus_since: float | None = None
    """Time at which there began to be more workers than desired; None otherwise."""
    num_refusals: int = 0
    """Consecutive requests with permanent refusals."""
    num_boot_failures: int = 0
    """Consecutive nodes whose workers never connected."""
    blamed: frozenset[str] = frozenset()
    """Nodes already counted as boot failures."""
    halted: str = ""
    """Why launches have stopped: ``budget``, ``boot`` or ``refused``; empty if they have not."""
    halted_at: float = 0.0

    # --- requests ---

    def sent(self, request: LaunchRequest, now: float) -> FleetState:
        """Record a request before it is sent or repeated."""
        # A repeated request keeps its number, and so its token; only its time changes.
        is_new = all(known.token != request.token for known, _ in self.unanswered)
        rest = tuple(one for one in self.unanswered if one[0].token != request.token)
        return self.with_(seq=self.seq + is_new, unanswered=(*rest, (request, now)))

    def answered(self, request: LaunchRequest, answer: FleetResult, now: float) -> FleetState:
        """Record the answer to a request: machines, and pools without capacity."""
        # A repeated request may return machines that an earlier answer has already acknowledged.
        known = {ack.id for ack in self.acks}
        acks = (*self.acks, *(ack for ack in answer.acks if ack.id not in known))
        back_offs = dict(self.back_offs)
        for ack in answer.acks:
            # The pool has capacity again, so the next refusal starts with the shortest back-off.
            back_offs.pop((ack.type, ack.zone, ack.lifecycle), None)
        refusals = answer.refusals
        # EC2 returned neither machines nor errors: back off from all pools to avoid a busy loop.
        if not refusals and not answer.acks:
            refusals = (LaunchFailure(type="", zone="", code="", message="", kind="capacity"),)
        for refusal in refusals:
            for key in _keys_of(refusal, request):
                back_offs[key] = _next_back_off(
                    self.back_offs.get(key), refusal.kind, now, request.is_urgent, key
                )
        # A request that launched anything shows that credentials, image and template work.
        is_fatal = not answer.acks and any(one.kind == "fatal" for one in refusals)
        state = self.with_(
            acks=acks, back_offs=back_offs, num_refusals=self.num_refusals + 1 if is_fatal else 0
        ).forgot(request)
        return state.halt("refused", now) if state.num_refusals >= MAX_REFUSALS else state

    def forgot(self, request: LaunchRequest) -> FleetState:
        """Drop an unanswered request."""
        rest = tuple(one for one in self.unanswered if one[0].token != request.token)
        return self.with_(unanswered=rest)

    # --- machines ---

    def listed(self, ids: Iterable[str]) -> FleetState:
        """Record which machines EC2 lists, in any state."""
        seen = set(ids)
        # From now on, these machines are counted in the listing; in `acks`, they would be counted
        # twice.
        return self.with_(acks=tuple(ack for ack in self.acks if ack.id not in seen))

    def looked_up(self, found: Iterable[str], missing: Iterable[str], now: float) -> FleetState:
        """Record the result of querying machines that EC2 should have listed by now."""
        there, gone = set(found), set(missing)
        # EC2 finds the machine by id but does not list it yet, so allow another VISIBLE_S.
        acks = (dataclasses.replace(a, at=now) if a.id in there else a for a in self.acks)
        return self.with_(acks=tuple(ack for ack in acks if ack.id not in gone))

    def boot_succeeded(self) -> FleetState:
        """Record that a node's workers have connected, so the image and configuration work."""
        return self.with_(num_boot_failures=0) if self.num_boot_failures else self

    def failed_to_boot(self, node: str, limit: int, now: float) -> FleetState:
        """Count a consecutive boot failure of a node; stop launches after ``limit`` of them."""
        if node in self.blamed:
            return self
        num = self.num_boot_failures + 1
        state = self.with_(num_boot_failures=num, blamed=self.blamed | {node})
        return state.halt("boot", now) if num >= limit else state

    def halt(self, why: str, now: float) -> FleetState:
        """Stop launches; keep the first reason."""
        return self if self.halted else self.with_(halted=why, halted_at=now)

    def with_(self, **changes: Any) -> FleetState:
        """Return a copy with changed fields."""
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
        """Parse the JSON form."""
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
    # A quota limits a family's vCPUs across all zones, so no pool in the request would succeed.
    if refusal.kind == "quota" or not refusal.type:
        return request.keys
    return tuple(
        key for key in request.keys if key[0] == refusal.type and refusal.zone in ("", key[1])
    )


def _next_back_off(
    known: BackOff | None, kind: str, now: float, is_urgent: bool, key: PoolKey
) -> BackOff:
    # 5 s, 6 s, 8 s ... 60 s, 60 s. A request is small and cheap, and capacity often returns within
    # minutes. min(num, 20) keeps the power finite after weeks of refusals.
    num = known.num if known else 0
    if kind == "unsupported":
        return BackOff(until=now + UNSUPPORTED_S, num=num)
    if kind == "quota":
        return BackOff(until=now + QUOTA_BACK_OFF_S, num=num)
    longest_s = URGENT_BACK_OFF_S if is_urgent else MAX_BACK_OFF_S
    wait_s = min(longest_s, FIRST_BACK_OFF_S * BACK_OFF_GROWTH ** min(num, 20))
    return BackOff(until=now + wait_s * _jitter(key, num), num=num + 1)


def _jitter(key: PoolKey, num: int) -> float:
    """Return 0.8 to 1.0, so that the requests for several pools spread over time."""
    # A checksum instead of a random number, because the rules are pure.
    return 0.8 + 0.2 * (zlib.crc32(f"{key} {num}".encode()) / 2**32)
