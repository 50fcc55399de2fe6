"""Checks of ``%etrain doctor`` for SLURM, without a request to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from etrain_jupyter.errors import EtrainError
from etrain_jupyter.notebook.commands.doctor import Finding, fault_of
from etrain_jupyter.plugins.slurm.client.pool import SlurmPool
from etrain_jupyter.pools.catalog import PoolEntry


def check(entries: Sequence[PoolEntry]) -> Iterator[Finding]:
    """Check that this machine can submit jobs."""
    for entry in entries:
        try:
            SlurmPool.from_entry(entry).check_machine()
        except EtrainError as exc:
            yield fault_of(exc)
