"""What the fake cloud tells a test of an instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class InstanceRecord:
    """One instance, as a test sees it."""

    instance_id: str
    instance_type: str
    zone: str
    lifecycle: str
    address: str
    state: str
    """As EC2 tells it."""
    reason: str
    """Why it ended, a code of EC2; empty while it lives."""
    launched_at: float
    ended_at: float | None
    tags: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    """The first process, while it runs."""
    off_at: float | None = None
    """When the timer of its ``shutdown -h +N`` turns it off; None for no timer."""
