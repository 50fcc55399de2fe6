"""How a job is shown: what draws it, and the plain table where nothing does."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any, Protocol

from etrain_jupyter.log.events import Event
from etrain_jupyter.notebook.job.history import LatestValues


class Screen(Protocol):
    """What draws a job: the dashboard, which knows events and no jobs."""

    def show(self) -> None:
        """Display it in the running cell."""

    def add_events(self, events: Iterable[Event]) -> None:
        """Take the next events of the job; those that it has had it passes over."""

    def settle(self) -> None:
        """Refresh what is saved of it in the notebook."""

    def _repr_mimebundle_(self, **_kwargs: Any) -> Any:
        """Return the representations."""


def table_of(view: LatestValues, job_id: str, status: str) -> str:
    """Return a job's latest values as an HTML table."""
    rows = {
        "job": job_id,
        "status": status,
        "step": f"{view.step} of {view.total_steps}" if view.total_steps else str(view.step),
        "workers": str(view.world_size),
        **{name: f"{value:.4g}" for name, value in view.metrics.items()},
    }
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{cells}</table>"
