"""Settings of a cluster, written by its launcher and read by its head."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from etrain_jupyter.errors import PoolError


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Settings of a cluster whose head runs on this machine; stored as ``settings.json``."""

    idle_s: float = 900.0
    """Seconds without a job after which the cluster shuts down; ``inf`` for never."""
    linger_s: float = 60.0
    """Seconds for which idle workers stay warm for the next job."""
    max_cpu_slots: int = 8
    """Maximum number of workers on a machine without GPUs."""
    workers_per_gpu: int = 1
    """Maximum number of workers that share one GPU. Above 1, they exchange gradients through host
    memory via gloo, because NCCL refuses two ranks on one GPU. Useful for tests, rarely faster."""
    coordinator: str = "etrain_jupyter.head.coordinator.coordinator:Coordinator"
    """Factory for the coordinator, as ``package.module:attribute``."""
    supervisor: str = "etrain_jupyter.worker.supervisor:Supervisor"
    """Factory for the supervisors."""
    pool: str = "local"
    """The pool's name, as used in cells."""
    prefix: str = ""
    """Prefix of the cluster's id; if empty, the prefix of this environment's local pool."""
    environment: dict[str, str] = field(default_factory=dict)
    """Digests of the launcher's environment variables (see ``environment_digests``); empty except
    in local clusters."""
    host: str = "127.0.0.1"
    """Address on which the scheduler listens."""
    port: int = 0
    """Preferred port; 0 for any."""
    nodes: str = "etrain_jupyter.head.local_node_source:LocalHeadNodes"
    """Factory for the node source, which starts and stops workers; see ``head.interfaces``."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Settings of the node source, for example the pool's entry in ``pools.yaml``."""

    @classmethod
    def from_environment(cls) -> ClusterSettings:
        """Return the defaults, with ``ETRAIN_IDLE_S`` and ``ETRAIN_WORKERS_PER_GPU`` if set.

        Raises:
            PoolError: If either is not a positive number.
        """
        settings = cls()
        if (text := os.environ.get("ETRAIN_IDLE_S")) is not None:
            settings = dataclasses.replace(settings, idle_s=_parse_idle_s(text))
        if (text := os.environ.get("ETRAIN_WORKERS_PER_GPU")) is not None:
            workers_per_gpu = _parse_workers_per_gpu(text)
            settings = dataclasses.replace(settings, workers_per_gpu=workers_per_gpu)
        return settings


def _parse_idle_s(text: str) -> float:
    try:
        idle_s = float(text)
    except ValueError:
        idle_s = 0.0
    if not idle_s > 0:  # also refuses NaN
        raise PoolError(
            f"ETRAIN_IDLE_S={text!r} is not a positive number of seconds. No cluster was started. "
            "Set it to 900, for example, or to inf for a cluster that only `%etrain down` ends."
        )
    return idle_s


def _parse_workers_per_gpu(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise PoolError(
            f"ETRAIN_WORKERS_PER_GPU={text!r} is not a whole number of at least 1. No cluster was "
            "started. Set it to 2, for example, or unset it for one worker per GPU."
        )
    return int(text)
