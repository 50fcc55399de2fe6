"""Settings of the simulated cloud's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the process."""

    mode: Literal["auto", "namespaces", "loopback"] = "auto"
    region: str = "us-east-1"
    minute_s: float = 60.0
    """Duration of a minute of an instance's ``shutdown -h +1``, in seconds."""
    boot_s: float = 0.0
    """Time for which an instance is pending, in seconds."""
    variables: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the instances."""

    def to_json(self) -> str:
        """Return the JSON form, as one argument."""
        return json.dumps(asdict(self))
