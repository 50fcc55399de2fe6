"""Values shared by the cluster's head and a node's agent: ``config.json``, and workers' names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Configuration of a node; unknown keys are ignored."""

    cluster_id: str
    region: str
    role_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the workers."""
    imds_poll_s: float = 2.0
    lease_ttl_s: float = 300.0
    """Age from which a lease is no longer valid."""
    lease_check_s: float = 30.0
    lifetime_s: float = 43_200.0
    """Maximum lifetime of the machine, from its launch."""
    drain_s: float = 90.0
    """Time before the end of the lifetime at which workers get a notice to leave."""
    first_hour: str = "wait-for-ec2"
    """Behavior of a spot machine that got a notice in its first hour, once its workers have exited:
    ``wait-for-ec2`` (a machine reclaimed by EC2 is free) or ``power-off``."""
    workers_per_node: int = 0
    """0 for one per GPU, or one on a machine without GPUs."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Package versions in the notebook; see ``wire.versions``."""
    supervisor: str = "etrain_jupyter.worker.supervisor:Supervisor"

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse the object.

        Raises:
            ValueError: If it is not a valid configuration.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("config.json is not a mapping")
        # The image may have an older version than the head, so ignore keys that it does not know.
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as exc:
            raise ValueError(f"config.json is incomplete: {exc}") from exc


def worker_names(node: str, count: int) -> tuple[str, ...]:
    """Return the names of a node's workers; ``node_of`` is the inverse.

    >>> worker_names("i-1", 1), worker_names("i-1", 2)
    (('i-1',), ('i-1:0', 'i-1:1'))
    """
    return (node,) if count == 1 else tuple(f"{node}:{number}" for number in range(count))


def node_of(worker: str) -> str:
    """Return the node of a worker."""
    return worker.partition(":")[0]
