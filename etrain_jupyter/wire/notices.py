"""Kinds of notices that a worker reports about its machine."""

from __future__ import annotations

REBALANCE = "rebalance"
"""The machine is at elevated risk of an interruption."""
INTERRUPTION = "interruption"
"""The machine will be reclaimed at a known time."""
