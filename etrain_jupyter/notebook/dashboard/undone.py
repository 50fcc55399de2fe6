"""The part of the curves that did not happen: what came after the step that a job went back to.

It is drawn faintly, so that a person sees what a rewind cost and whether the second time is alike.
"""

from __future__ import annotations

import numpy as np

from etrain_jupyter.notebook.dashboard.series import Floats, Series, SmallFloats, thin

UNDONE = "undone."
"""How the names of these curves begin."""
MAX_POINTS = 1000
"""Of each; a job may go back as often as it wants to."""


class Undone:
    """Keeps, thinned, the newest value that each step had before it was undone."""

    def __init__(self) -> None:
        self._curves: dict[str, tuple[Floats, SmallFloats]] = {}

    def keep(self, name: str, series: Series, step: int) -> None:
        """Take what a curve is about to lose after ``step``, and its point at that step."""
        if name != "loss" and not name.startswith("metrics."):
            return
        start = int(np.searchsorted(series.x, step))
        x, y = series.x[start:].copy(), series.y[start:].copy()
        if not len(x) or x[-1] <= step:
            return
        before = self._curves.get(name)
        if before is not None:
            is_beyond = before[0] > x[-1]
            x, y = np.append(x, before[0][is_beyond]), np.append(y, before[1][is_beyond])
        self._curves[name] = thin(x, y, MAX_POINTS)

    def curves(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return them by name."""
        return {UNDONE + name: curve for name, curve in self._curves.items()}
