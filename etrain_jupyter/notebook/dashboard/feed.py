"""Messages on one channel to a browser: full resets and incremental updates.

Each message has a sequence number ``seq``. An ``update`` contains the changed fields of the
snapshot, the changed rows of its ``lists`` (see ``SentSnapshot``) and, for each curve that grew, a
block ``{name, rows}`` with one binary buffer: ``rows`` float64 positions, then ``rows`` float32
values.
With ``reset``, it contains the whole snapshot and all curves from their start.

A view that starts, or that sees a gap in ``seq``, sends ``hello`` with a name that it has chosen.
The kernel answers with a reset addressed ``to`` that view; other views ignore it. A view that zooms
requests ``detail`` between two steps and receives the curves there, as blocks of a ``detail``
message.

If a curve had to be thinned, a block ``mean.NAME`` contains averages of neighbouring points, from
which a view draws its smoothed line. Otherwise it smooths the points themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etrain_jupyter.notebook.dashboard.curves import (
    BY_TIME,
    Floats,
    SmallFloats,
    between,
    means,
    thin,
)
from etrain_jupyter.notebook.dashboard.job_view import JobView

Send = Callable[[dict[str, Any], list[bytes]], None]
Curves = dict[str, tuple[Floats, SmallFloats]]

MAX_RESET_POINTS = 4000
"""Approximate maximum number of points per curve in a reset: more than a chart has pixels."""
MEAN = "mean."
"""Prefix for the names of curves that contain means."""
LISTS_OF_EVENTS = ("events", "markers")
"""Fields of a snapshot that change only with ``JobView.lists_version``."""
LISTS = {"events": "id", "markers": "id", "workers": "worker"}
"""The lists of a snapshot, each with the field that identifies its rows."""

JsonRow = dict[str, Any]


class ViewFeed:
    """Send a ``JobView`` through one channel: first the whole view, then its changes.

    It sends nothing until a view sends ``hello``, so a channel without a view costs nothing. Not
    thread-safe, so the owner holds a lock.
    """

    # Two views share a channel, for example a notebook and a second browser window:
    #
    #   view A  hello ->  <- reset to A (seq 1)   <- update (2)  <- update (3)   <- reset to B (4)
    #   view B                                           hello ->  <- update (3)  <- reset to B (4)
    #
    # A ignores the reset that is addressed to B, and B ignores updates before its reset.

    def __init__(self, send: Send) -> None:
        self._send = send
        self._seq = 0
        self._num_sent: dict[str, int] = {}
        self._sent = SentSnapshot()
        self._lists_version = -1
        self._rewinds = 0
        self.is_open = False

    def greet(self, view: JobView, to: str) -> None:
        """Answer the hello of the view ``to``."""
        # The reset marks everything as sent. The other views ignore the reset, so first send them
        # the changes that it contains.
        self.flush(view)
        self.is_open = True
        self._reset(view, to)

    def flush(self, view: JobView) -> None:
        """Send the changes since the last message."""
        if not self.is_open:
            return
        # An update can only append points, and a rewind has removed some.
        if view.rewinds != self._rewinds:
            self._reset(view, "")
            return
        curves = view.curves.to_dict()
        starts = {name: self._num_sent.get(name, 0) for name in curves}
        unsent = {name: (x[starts[name] :], y[starts[name] :]) for name, (x, y) in curves.items()}
        # After the kernel was busy, or after a replay of the log, there may be more points than a
        # chart can show.
        unsent = thin_all(unsent, MAX_RESET_POINTS)
        # The event list is the longest part of a snapshot and changes least often.
        is_unchanged = view.lists_version == self._lists_version
        snapshot = view.snapshot().to_json(without=LISTS_OF_EVENTS if is_unchanged else ())
        grown = {name: curve for name, curve in unsent.items() if len(curve[0])}
        self._post_update(view, self._sent.record_changes(snapshot), grown)

    def detail(self, view: JobView, to: str, first: float, last: float) -> None:
        """Send the curves from step ``first`` to ``last`` to the view ``to``."""
        # A zoom selects a range of steps, and curves over time have no steps.
        over_steps = {k: v for k, v in view.curves.to_dict().items() if not k.startswith(BY_TIME)}
        near = {name: between(*curve, first, last) for name, curve in over_steps.items()}
        curves = thin_all(near, MAX_RESET_POINTS)
        self._seq += 1
        content = {"kind": "detail", "seq": self._seq, "to": to, "first": first, "last": last}
        self._send(content | {"blocks": _blocks(curves)}, _buffers(curves))

    def post(self, content: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """Send a message that is not an update, such as the answer to a request."""
        self._seq += 1
        self._send({**content, "seq": self._seq}, list(buffers))

    def _reset(self, view: JobView, to: str) -> None:
        curves = thin_all(view.curves.to_dict(), MAX_RESET_POINTS)
        snapshot = view.snapshot().to_json()
        self._sent.record_all(snapshot)
        self._post_update(view, {"reset": True, "snapshot": snapshot}, curves, to=to)

    def _post_update(
        self, view: JobView, content: dict[str, Any], curves: Curves, *, to: str = ""
    ) -> None:
        self._seq += 1
        envelope = {"kind": "update", "seq": self._seq, "to": to}
        self._send(envelope | content | {"blocks": _blocks(curves)}, _buffers(curves))
        # Count the points before thinning, because the next update starts after them.
        self._num_sent = {name: len(x) for name, (x, _) in view.curves.to_dict().items()}
        self._lists_version, self._rewinds = view.lists_version, view.rewinds


def thin_all(curves: Curves, max_points: int) -> Curves:
    """Thin curves, and add the means of those that a view can smooth."""
    thinned = {name: thin(*curve, max_points) for name, curve in curves.items()}
    for name, curve in curves.items():
        # Only these curves are smoothed; a learning rate or a world size is exact.
        is_noisy = name in ("loss", "samples_per_s") or name.startswith("metrics.")
        if len(curve[0]) > max_points and is_noisy:
            thinned[MEAN + name] = means(*curve, max_points // 2)
    return thinned


def _blocks(curves: Curves) -> list[dict[str, Any]]:
    return [{"name": name, "rows": len(x)} for name, (x, _) in curves.items()]


def _buffers(curves: Curves) -> list[bytes]:
    return [x.tobytes() + y.tobytes() for x, y in curves.values()]


class SentSnapshot:
    """The snapshot as last sent to the views of a channel, in its JSON form.

    A message contains only changed fields and, for lists, only the changed fields of rows. At ten
    messages per second, whole snapshots of a job with 200 workers would take 800 kB per second.
    ``lists.ts`` merges the changes in the front end.
    """

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._rows: dict[str, dict[Any, JsonRow]] = {}

    def record_all(self, snapshot: Mapping[str, Any]) -> None:
        """Record the whole snapshot as sent."""
        self._facts = {key: value for key, value in snapshot.items() if key not in LISTS}
        self._rows = {name: _by_key(name, snapshot[name]) for name in LISTS}

    def record_changes(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a snapshot to send, and record them as sent.

        Args:
            snapshot: The current snapshot. A list that is not in the message has not changed.

        Returns:
            ``snapshot`` contains the changed fields. ``lists`` contains, by name: ``rows``, new
            rows with all fields and changed rows with their key and the changed fields; ``gone``,
            the keys of removed rows; ``order``, all keys, unless the order is unchanged and new
            rows are at the end.
        """
        facts, previous = {}, self._facts
        for key, value in snapshot.items():
            # NaN arrives here as the text "NaN", so an unchanged NaN compares as equal.
            if key not in LISTS and (key not in previous or previous[key] != value):
                facts[key] = previous[key] = value
        lists = {name: self._patch(name, snapshot[name]) for name in LISTS if name in snapshot}
        return {"snapshot": facts, "lists": {name: patch for name, patch in lists.items() if patch}}

    def _patch(self, name: str, rows: list[JsonRow]) -> dict[str, Any]:
        previous, current = self._rows[name], _by_key(name, rows)
        self._rows[name] = current
        changed = [
            _difference(previous.get(key, {}), row, LISTS[name])
            for key, row in current.items()
            if previous.get(key) != row
        ]
        gone = [key for key in previous if key not in current]
        # The order of the rows after the front end has merged the message: kept rows, then new
        # ones. Most messages need no `order`, since new workers and events usually come last.
        default_order = [key for key in previous if key in current]
        default_order += [key for key in current if key not in previous]
        order = [] if default_order == list(current) else list(current)
        patch = {"rows": changed, "gone": gone, "order": order}
        # lists.ts treats an empty `order` as "unchanged", so an empty part can be omitted.
        return {part: value for part, value in patch.items() if value}


def _by_key(name: str, rows: list[JsonRow]) -> dict[Any, JsonRow]:
    return {row[LISTS[name]]: row for row in rows}


def _difference(previous: JsonRow, current: JsonRow, key: str) -> JsonRow:
    return {
        field: value
        for field, value in current.items()
        if field == key or field not in previous or previous[field] != value
    }
