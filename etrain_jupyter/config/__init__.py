"""Parse and validate the text of a cell into a frozen ``TrainConfig``.

``parse_cell`` and ``parse_mapping`` return a ``ParsedJob``; their errors point at the line and
column. ``check_references`` checks the expressions against the notebook's names. ``template``
returns a commented body to start from.
"""

from __future__ import annotations

from etrain_jupyter.config.cell import ParsedJob, parse_cell, parse_mapping
from etrain_jupyter.config.describe import template
from etrain_jupyter.config.references import check_references
from etrain_jupyter.config.schema import TrainConfig

__all__ = [
    "ParsedJob",
    "TrainConfig",
    "check_references",
    "parse_cell",
    "parse_mapping",
    "template",
]
