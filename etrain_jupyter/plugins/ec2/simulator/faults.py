"""Faults of the simulated cloud's services other than S3, as data.

S3's faults are :class:`~etrain_jupyter.testing.s3_faults.S3Fault`.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from etrain_jupyter.plugins.ec2.simulator.wire import ApiError, Call


@dataclass(frozen=True, kw_only=True)
class ApiFault:
    """A fault that affects requests from now on.

    Common codes: ``RequestLimitExceeded`` (throttled), ``InternalError``, ``Unavailable``,
    ``InsufficientInstanceCapacity``, ``InvalidAMIID.NotFound``, ``UnauthorizedOperation``,
    ``AuthFailure``, ``ExpiredToken``.
    """

    service: str = "ec2"
    """boto3's name for the service; empty for all."""
    action: str = ""
    """Action such as ``CreateFleet``; empty for all."""
    code: str = ""
    """Error code to respond with; empty for none."""
    status: int = 0
    """HTTP status of the error; 0 for EC2's own."""
    message: str = "injected fault"
    """Text of the error."""
    skip: int = 0
    """Number of matching requests before the first affected one."""
    count: int = 0
    """Maximum number of affected requests; 0 for all."""
    match: str = ""
    """Affects only requests with this text in ``METHOD PATH ACCESS_KEY_ID BODY``."""
    seconds: float = 0.0
    """Delay of the request in seconds."""
    is_answer_lost: bool = False
    """The request is executed, but the connection is closed without a response."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    def concerns(self, call: Call) -> bool:
        """Return whether it affects a request."""
        return (
            self.service in ("", call.service)
            and self.action in ("", call.action)
            and self.match in call.line
        )

    @property
    def error(self) -> ApiError | None:
        """The error to respond with."""
        return ApiError(self.code, self.message, self.status) if self.code else None


class FaultList:
    """The current faults, and counters of requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the next three attributes."""
        self._faults: tuple[ApiFault, ...] = ()
        self._seen: Counter[int] = Counter()
        self._calls: Counter[str] = Counter()

    def set(self, faults: tuple[ApiFault, ...]) -> None:
        """Replace all faults and reset the counters."""
        with self._lock:
            self._faults = faults
            self._seen.clear()
            self._calls.clear()

    def calls(self) -> dict[str, int]:
        """Return the number of requests by ``service.Action``."""
        with self._lock:
            return dict(self._calls)

    def choose(self, call: Call) -> list[ApiFault]:
        """Count a request and return the faults that affect it."""
        chosen = []
        with self._lock:
            self._calls[f"{call.service}.{call.action}"] += 1
            for place, fault in enumerate(self._faults):
                if not fault.concerns(call):
                    continue
                # The first `skip` matching requests pass, and the next `count` are affected.
                number = self._seen[place] - fault.skip
                self._seen[place] += 1
                if number >= 0 and (not fault.count or number < fault.count):
                    chosen.append(fault)
        return chosen
