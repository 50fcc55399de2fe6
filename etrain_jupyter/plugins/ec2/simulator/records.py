"""Description of an instance for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ACCOUNT = "123456789012"
"""The fake cloud's account id: moto's own."""


@dataclass(frozen=True, kw_only=True)
class InstanceRecord:
    """One instance, as a test sees it."""

    instance_id: str
    instance_type: str
    zone: str
    lifecycle: str
    address: str
    state: str
    """EC2's instance state."""
    reason: str
    """EC2's code for why it ended; empty while it runs."""
    launched_at: float
    ended_at: float | None
    tags: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    """The first process, while it runs."""
    off_at: float | None = None
    """When its timer (``shutdown -h +N``) turns it off; None if there is no timer."""
