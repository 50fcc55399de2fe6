"""``config.json``: what the agent of a node is told by whoever launches nodes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a node is to be; keys that this version does not know are ignored."""

    cluster_id: str
    region: str
    role_env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the workers."""
    imds_poll_s: float = 2.0
    lease_ttl_s: float = 300.0
    """Age of a lease from which it does not hold any more."""
    lease_check_s: float = 30.0
    lifetime_s: float = 43_200.0
    """The machine is off so long after it was launched, whatever happens."""
    drain_s: float = 90.0
    """How long before that its workers are given notice, and how long they may take to end."""
    first_hour: str = "wait-for-ec2"
    """What a spot machine does that was noticed in its first hour and whose workers have ended:
    ``wait-for-ec2`` (what EC2 takes then is not charged) or ``power-off``."""
    workers_per_node: int = 0
    """0 is one a GPU, or one where there is none."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """What is installed where the notebook runs, see ``node.fingerprint``."""
    supervisor: str = "etrain_jupyter.worker.supervisor:Supervisor"

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return what an object says.

        Raises:
            ValueError: If it is no such object.
        """
        told = json.loads(text)
        if not isinstance(told, dict):
            raise ValueError("config.json holds no mapping")
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            return cls(**{key: value for key, value in told.items() if key in known})
        except TypeError as exc:
            raise ValueError(f"config.json is not complete: {exc}") from exc
