"""Where workers come from: ``get_pool(name).up()`` gives the address of a scheduler."""

from __future__ import annotations

from etrain_jupyter.pools.base import CostReport, Leftovers, Node, Pool, SchedulerAddress
from etrain_jupyter.pools.registry import KINDS, get_pool

__all__ = [
    "KINDS",
    "CostReport",
    "Leftovers",
    "Node",
    "Pool",
    "SchedulerAddress",
    "get_pool",
]
