"""How the fake cloud is started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the cloud is started."""

    mode: Literal["auto", "namespaces", "loopback"] = "auto"
    region: str = "us-east-1"
    minute_s: float = 60.0
    """How long the minute of an instance's ``shutdown -h +1`` is."""
    boot_s: float = 0.0
    """How long an instance is pending."""
    variables: dict[str, str] = field(default_factory=dict)
    """More variables of the instances' environment."""

    def to_json(self) -> str:
        """Write it as one word."""
        return json.dumps(asdict(self))
