"""Simulate capacity policies in virtual time on recorded spot markets.

``policies`` runs one job, and ``sizing`` runs one or more jobs that choose their size. ``fleet``
applies the pool's own rules to the ``market``, and ``trace_files`` reads recorded markets.
"""

from __future__ import annotations

from etrain_jupyter.plugins.planner.simulation.job import SimulatedJob
from etrain_jupyter.plugins.planner.simulation.policies import (
    POLICIES,
    Simulation,
    simulate,
    simulate_sizes,
)
from etrain_jupyter.plugins.planner.simulation.sizing import ring_rates
from etrain_jupyter.plugins.planner.simulation.table import rows_of, table_of, to_dict
from etrain_jupyter.plugins.planner.simulation.trace_files import read_trace

__all__ = [
    "POLICIES",
    "SimulatedJob",
    "Simulation",
    "read_trace",
    "ring_rates",
    "rows_of",
    "simulate",
    "simulate_sizes",
    "table_of",
    "to_dict",
]
