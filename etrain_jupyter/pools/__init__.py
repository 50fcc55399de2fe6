"""Where workers come from: ``get_pool(name).up()`` gives the address of a scheduler."""

from __future__ import annotations

from etrain_jupyter.pools.base import CostReport, Leftovers, Node, Pool, SchedulerAddress
from etrain_jupyter.pools.registry import POOLS, get_pool

__all__ = [
    "POOLS",
    "CostReport",
    "Leftovers",
    "Node",
    "Pool",
    "SchedulerAddress",
    "get_pool",
]
