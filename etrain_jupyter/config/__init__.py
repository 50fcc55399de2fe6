"""From the text of a cell to a frozen ``TrainConfig``, with the place of every fault.

``parse_cell`` and ``parse_mapping`` give a ``ParsedJob``; ``check_references`` looks at the
notebook's names;
``template`` prints a body to start from.
"""

from __future__ import annotations

from etrain_jupyter.config.cell import ParsedJob, parse_cell, parse_mapping
from etrain_jupyter.config.references import check_references
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.config.template import template

__all__ = [
    "ParsedJob",
    "TrainConfig",
    "check_references",
    "parse_cell",
    "parse_mapping",
    "template",
]
