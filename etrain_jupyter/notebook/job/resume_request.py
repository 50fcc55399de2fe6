"""The changes to make when an ended job is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etrain_jupyter.config.schema import TrainConfig

if TYPE_CHECKING:
    from etrain_jupyter.bundle.capture import Bundle
    from etrain_jupyter.pools import Pool


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """The user's changes to a resumed job: individual values, or a whole cell."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Any of ``pool``, ``min``, ``max``, ``epochs``, ``steps``."""
    config: TrainConfig | None = None
    """The configuration of the cell; None keeps the job's own."""
    bundle: Bundle | None = None
    """The notebook's objects captured with the cell."""
    pool: Pool | None = None
    """The cell's pool if already resolved; None to resolve the pool from its name."""
    cell: str = ""
    """The text of the cell."""
    is_forced: bool = False
    """True to resume even if a changed setting affects the rest of the curve."""
    is_trusted: bool = False
    """True to run a job that another user may have submitted."""
