"""Pools provide workers: ``get_pool(name).up()`` returns the address of a scheduler."""

from __future__ import annotations

from etrain_jupyter.pools.base import CostReport, Leftovers, Node, Pool
from etrain_jupyter.pools.registry import get_pool
from etrain_jupyter.process.address import SchedulerAddress

__all__ = [
    "CostReport",
    "Leftovers",
    "Node",
    "Pool",
    "SchedulerAddress",
    "get_pool",
]
