"""What one channel into a browser has been told so far, and so what to tell it next.

A channel carries messages with a sequence number ``seq``. An ``update`` has what is new in the
snapshot and in its ``lists`` (see ``changes``) and, for each curve that grew, a block
``{name, rows}`` with one binary buffer: ``rows`` float64 positions, then ``rows`` float32 values.
With ``reset`` it has the whole snapshot, and the curves begin anew. A view that starts, or that
sees a gap in ``seq``, says ``hello`` with a name of its own choice and gets a reset addressed
``to`` it; the others pass that one over. A view that zooms asks for ``detail`` between two steps
and gets the curves there, as blocks in a message of that kind.

Where a curve had to be thinned, a block ``mean.NAME`` has the means of neighbours, from which a
view draws its smoothed line; otherwise the points themselves serve for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from etrain_jupyter.notebook.dashboard.changes import Told
from etrain_jupyter.notebook.dashboard.series import Floats, SmallFloats, between, means, thin
from etrain_jupyter.notebook.dashboard.snapshot import BY_TIME, JobView

Send = Callable[[dict[str, Any], list[bytes]], None]
Curves = dict[str, tuple[Floats, SmallFloats]]

MAX_RESET_POINTS = 4000
"""A view that starts gets at most about so many points a curve: more than it has pixels."""
MEAN = "mean."
"""How the names of curves of means begin."""


class ViewFeed:
    """Sends a ``JobView`` through one channel, first whole and then what is new.

    It brings no news until a view says hello, so a channel that nobody listens to costs nothing.
    Not thread-safe: its owner holds a lock.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._seq = 0
        self._sent: dict[str, int] = {}
        self._told = Told()
        self._lists_version = -1
        self._rewinds = 0
        self.is_open = False

    def greet(self, view: JobView, to: str) -> None:
        """Answer the hello of the view called ``to``."""
        self.flush(view)  # the others must not miss what the newcomer's reset already has
        self.is_open = True
        self._reset(view, to)

    def flush(self, view: JobView) -> None:
        """Send what is new since the last time."""
        if not self.is_open:
            return
        if view.rewinds != self._rewinds:
            self._reset(view, "")
            return
        curves = view.series()
        news = {name: self._unsent(name, *curve) for name, curve in curves.items()}
        news = thin_all(news, MAX_RESET_POINTS)
        snapshot = view.snapshot(has_lists=view.lists_version != self._lists_version)
        grown = {name: curve for name, curve in news.items() if len(curve[0])}
        self._post(view, self._told.tell_news(snapshot), grown)

    def detail(self, view: JobView, to: str, first: float, last: float) -> None:
        """Send the view called ``to`` the curves from step ``first`` to ``last``."""
        over_steps = {k: v for k, v in view.series().items() if not k.startswith(BY_TIME)}
        near = {name: between(*curve, first, last) for name, curve in over_steps.items()}
        curves = thin_all(near, MAX_RESET_POINTS)
        self._seq += 1
        content = {"kind": "detail", "seq": self._seq, "to": to, "first": first, "last": last}
        self._send(content | {"blocks": _names(curves)}, _buffers(curves))

    def say(self, content: dict[str, Any]) -> None:
        """Send a message that is no update, to whoever asked: for example how a request went."""
        self._seq += 1
        self._send({**content, "seq": self._seq}, [])

    def _reset(self, view: JobView, to: str) -> None:
        curves = thin_all(view.series(), MAX_RESET_POINTS)
        snapshot = view.snapshot()
        self._told.tell_all(snapshot)
        self._post(view, {"reset": True, "snapshot": snapshot}, curves, to=to)

    def _unsent(self, name: str, x: Floats, y: SmallFloats) -> tuple[Floats, SmallFloats]:
        start = self._sent.get(name, 0)
        return x[start:], y[start:]

    def _post(
        self, view: JobView, picture: dict[str, Any], curves: Curves, *, to: str = ""
    ) -> None:
        self._seq += 1
        content = {"kind": "update", "seq": self._seq, "to": to, **picture}
        self._send(content | {"blocks": _names(curves)}, _buffers(curves))
        self._sent = {name: len(x) for name, (x, _) in view.series().items()}
        self._lists_version, self._rewinds = view.lists_version, view.rewinds


def thin_all(curves: Curves, max_points: int) -> Curves:
    """Thin curves, and add the means of those that a view can smooth."""
    thinned = {name: thin(*curve, max_points) for name, curve in curves.items()}
    for name, curve in curves.items():
        if len(curve[0]) > max_points and _is_noisy(name):
            thinned[MEAN + name] = means(*curve, max_points // 2)
    return thinned


def _is_noisy(name: str) -> bool:
    return name in ("loss", "samples_per_s") or name.startswith("metrics.")


def _names(curves: Curves) -> list[dict[str, Any]]:
    return [{"name": name, "rows": len(x)} for name, (x, _) in curves.items()]


def _buffers(curves: Curves) -> list[bytes]:
    return [x.tobytes() + y.tobytes() for x, y in curves.values()]
