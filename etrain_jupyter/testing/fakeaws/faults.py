"""What goes wrong with requests to the fake cloud's services other than S3, as data.

S3's faults are :class:`~etrain_jupyter.testing.s3_faults.S3Fault`.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from etrain_jupyter.testing.fakeaws.wire import ApiError, Call


@dataclass(frozen=True, kw_only=True)
class ApiFault:
    """Something that goes wrong with requests, from now on.

    Usual codes: ``RequestLimitExceeded`` (throttled), ``InternalError``, ``Unavailable``,
    ``InsufficientInstanceCapacity``, ``InvalidAMIID.NotFound``, ``UnauthorizedOperation``,
    ``AuthFailure``, ``ExpiredToken``.
    """

    service: str = "ec2"
    """As boto3 calls it; empty for every service."""
    action: str = ""
    """As ``CreateFleet``; empty for every action."""
    code: str = ""
    """The error that is answered instead of a result; empty for none."""
    status: int = 0
    """Its HTTP status; 0 for the one that EC2 answers it with."""
    skip: int = 0
    """How many requests pass before the first that it concerns."""
    count: int = 0
    """How many requests it concerns at most; 0 for all."""
    match: str = ""
    """Concerns requests that have this in ``METHOD PATH ACCESS_KEY_ID BODY``."""
    seconds: float = 0.0
    """How long the request waits first."""
    is_answer_lost: bool = False
    """Whether the request is carried out and the connection closed without an answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        return asdict(self)

    def concerns(self, call: Call) -> bool:
        """Tell whether it is about such a request."""
        return (
            self.service in ("", call.service)
            and self.action in ("", call.action)
            and self.match in call.line
        )

    @property
    def error(self) -> ApiError | None:
        """What is answered."""
        return ApiError(self.code, "on purpose", self.status) if self.code else None


class FaultList:
    """The faults that are set, and what was asked since. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the three below."""
        self._faults: tuple[ApiFault, ...] = ()
        self._seen: Counter[int] = Counter()
        self._calls: Counter[str] = Counter()

    def set(self, faults: tuple[ApiFault, ...]) -> None:
        """Replace all; counts begin anew."""
        with self._lock:
            self._faults = faults
            self._seen.clear()
            self._calls.clear()

    def calls(self) -> dict[str, int]:
        """Return how often each ``service.Action`` was asked for."""
        with self._lock:
            return dict(self._calls)

    def choose(self, call: Call) -> list[ApiFault]:
        """Count a request and return what goes wrong with it."""
        chosen = []
        with self._lock:
            self._calls[f"{call.service}.{call.action}"] += 1
            for place, fault in enumerate(self._faults):
                if not fault.concerns(call):
                    continue
                number = self._seen[place] - fault.skip
                self._seen[place] += 1
                if number >= 0 and (not fault.count or number < fault.count):
                    chosen.append(fault)
        return chosen
