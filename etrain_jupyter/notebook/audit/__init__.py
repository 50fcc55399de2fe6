"""Prove from the durable log that every sample was trained on exactly once and no step was lost."""

from __future__ import annotations

from etrain_jupyter.notebook.audit.report import AuditReport, EpochCoverage
from etrain_jupyter.notebook.audit.rules import audit_log

__all__ = ["AuditReport", "EpochCoverage", "audit_log"]
