"""Curves of undone steps, which a rewind has discarded.

The charts draw them faintly, to show how much a rewind discarded and whether the repeated steps
have similar values.
"""

from __future__ import annotations

import numpy as np

from etrain_jupyter.notebook.dashboard.series import Floats, Series, SmallFloats, thin

UNDONE = "undone."
"""Name prefix of these curves."""
MAX_POINTS = 1000
"""Maximum points per curve, since the number of rewinds is not limited."""


class UndoneCurves:
    """Keep the last value of each step before it was undone, with a limited number of points."""

    def __init__(self) -> None:
        self._curves: dict[str, tuple[Floats, SmallFloats]] = {}

    def keep(self, name: str, series: Series, step: int) -> None:
        """Store the points from ``step`` on, before the curve removes them."""
        #   before          1 2 3 4 5 6 7
        #   rewind to 4     1 2 3 4              undone: 4 5 6 7, so that it starts on the curve
        #   5, then to 2    1 2                  undone: 2 3 4 5 (new) and 6 7 (of the first rewind)
        #
        # Keep only the curves that the charts draw faintly: the loss and the metrics.
        if name != "loss" and not name.startswith("metrics."):
            return
        start = int(np.searchsorted(series.x, step))
        x, y = series.x[start:].copy(), series.y[start:].copy()
        # The curve has no point after the step, so nothing is lost.
        if not len(x) or x[-1] <= step:
            return
        previous = self._curves.get(name)
        if previous is not None:
            # An earlier rewind may have discarded steps beyond those of this one.
            is_beyond = previous[0] > x[-1]
            x, y = np.append(x, previous[0][is_beyond]), np.append(y, previous[1][is_beyond])
        self._curves[name] = thin(x, y, MAX_POINTS)

    def to_dict(self) -> dict[str, tuple[Floats, SmallFloats]]:
        """Return the curves by name."""
        return {UNDONE + name: curve for name, curve in self._curves.items()}
