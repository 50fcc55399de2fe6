"""Interface of a job's display, and a plain HTML table as a fallback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from etrain_jupyter.display.tables import html_table
from etrain_jupyter.log.events import Event
from etrain_jupyter.notebook.job.history import LatestValues


class Screen(Protocol):
    """The display of a job: the dashboard, which receives events and no job objects."""

    def show(self) -> None:
        """Display the job in the running cell."""

    def add_events(self, events: Iterable[Event]) -> None:
        """Receive the next events of the job; known events are skipped."""

    def settle(self) -> None:
        """Update the static copy in the saved notebook."""

    def _repr_mimebundle_(self, **_kwargs: Any) -> Any:
        """Return the MIME representations."""


def table_of(view: LatestValues, job_id: str, status: str) -> str:
    """Return a job's latest values as an HTML table."""
    rows = {
        "job": job_id,
        "status": status,
        "step": f"{view.step} of {view.total_steps}" if view.total_steps else str(view.step),
        "workers": str(view.world_size),
        **{name: f"{value:.4g}" for name, value in view.metrics.items()},
    }
    return html_table([], list(rows.items()), has_row_heads=True)
