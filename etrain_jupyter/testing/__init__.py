"""Helpers for tests: contract suites, faults described as data, and servers that simulate others.

The rest of the package does not import this subpackage.
"""

from __future__ import annotations

from etrain_jupyter.testing.fault_plan import FaultPlan, PlannedFault, submit_with_faults

__all__ = ["FaultPlan", "PlannedFault", "submit_with_faults"]
