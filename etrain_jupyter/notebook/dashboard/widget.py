"""``Dashboard``: the display of one job in one notebook."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from etrain_jupyter.log.events import Event, ExhibitStored
from etrain_jupyter.notebook.dashboard import browser
from etrain_jupyter.notebook.dashboard.curves import UNDONE, Floats, SmallFloats
from etrain_jupyter.notebook.dashboard.feed import Curves, ViewFeed, thin_all
from etrain_jupyter.notebook.dashboard.html import render_html, render_text
from etrain_jupyter.notebook.dashboard.job_view import JobView
from etrain_jupyter.notebook.dashboard.link import link
from etrain_jupyter.notebook.dashboard.saved_exhibits import (
    MAX_BYTES,
    MAX_BYTES_RUNNING,
    ExhibitCache,
    ReadExhibit,
    SavedExhibits,
    answer_request,
    choose_saved,
)
from etrain_jupyter.notebook.dashboard.side_panel import row_of
from etrain_jupyter.notebook.dashboard.snapshot import Snapshot

MIME = "application/vnd.etrain.job+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
FLUSH_EVERY_S = 0.05
"""Minimum interval between two messages, in seconds. A higher rate is not visible."""
SAVE_EVERY_S = 5.0
"""Interval between updates of the saved output, in seconds."""
SAVE_SELDOM_S = 60.0
"""The interval if only an anywidget draws the job, because each update remounts its view."""
LINGER_S = 1.0
"""Seconds after the end of a job during which late events are still shown."""
EXHIBITS_S = 2.0
"""Maximum time in seconds to wait for a job's exhibits before its dashboard is displayed."""
MAX_SAVED_POINTS = 2000
"""Maximum points of all curves together in a saved notebook: about 40 kB."""
MAX_SAVED_CURVES = 20
MAX_SAVED_EVENTS = 50

OnRequest = Callable[[str, dict[str, Any]], object]


class Dashboard:
    """Fold a job's events and keep every view of the job up to date.

    ``add_events`` only folds, so a slow, dead or missing view never blocks its caller. One
    background thread, ``etrain-dashboard-JOB``, sends the changes and ends with the job. Another
    one updates the saved output, which is slow in a busy kernel. Without a Jupyter front end, the
    display is a line of text.

    Args:
        job_id: The job.
        on_request: Called with a request (``stop``, ``scale`` ...) and its arguments when a button
            is pressed. It runs on a kernel thread, even while a cell is running. The text that it
            returns, or the error that it raises, is shown below the button.
        read_exhibit: Called with a name and a step when a view displays an exhibit, on a kernel
            thread as well.
    """

    def __init__(
        self,
        *,
        job_id: str,
        on_request: OnRequest,
        read_exhibit: ReadExhibit | None = None,
    ) -> None:
        self._job_id = job_id
        self._on_request = on_request
        self._read_exhibit = read_exhibit
        self._exhibits = ExhibitCache(read_exhibit)
        self._display_id = f"etrain-{uuid.uuid4().hex}"
        # Three locks, taken in this order. Messages of the feeds are sent without _changed:
        #
        #   _saving   one publisher of the saved output at a time
        #   _sending  one sender of the outbox at a time, so that messages keep their order
        #   _changed  the view, the feeds and the flags below
        #
        # Reentrant, because show() holds the lock while it opens the widget, which takes a
        # snapshot.
        self._changed = threading.Condition(threading.RLock())
        self._view = JobView(job_id, browser.cell_numbers)
        self._thread: threading.Thread | None = None
        self._version = 0
        self._is_unsent = self._is_unsaved = self._is_shown = self._is_closed = False
        self._widget: Any = None  # an anywidget while the job runs
        self._outbox: deque[Callable[[], None]] = deque()  # filled under _changed, emptied without
        self._sending, self._saving = threading.Lock(), threading.Lock()
        self._saver: threading.Thread | None = None
        self._widget_feed = ViewFeed(self._send_to_widget)
        self._link_feed = ViewFeed(self._send_to_link)
        self.num_errors = 0
        """Failures to send to a browser. They are counted and never raised."""

    def add_events(self, events: Iterable[Event]) -> None:
        """Fold the next events of the job. Any one thread may call this."""
        with self._changed:
            self._view.add(events)
            self._version += 1
            self._is_unsent = self._is_unsaved = True
            self._start_thread()
            self._changed.notify_all()
        link().panel.wake()

    def follow(self) -> None:
        """List the job in JupyterLab's side panel, which shows it without a display."""
        if browser.has_front_end():
            link().register(self._job_id, self._receive_from_link)
            link().panel.add(self._job_id, self)

    def show(self) -> None:
        """Display the job in the running cell. Several cells may display the same job."""
        if not browser.has_front_end():
            print(self.text())
            return
        self.follow()
        self._read_exhibits()
        with self._changed:
            # A job that has ended needs no live view, because its saved output shows everything.
            if self._widget is None and not self._view.is_terminal:
                self._widget = self._open_widget()
            self._is_shown = True
            self._start_thread()
        # Hold the lock, so that a save of an older state cannot be published after this one.
        with self._saving:
            browser.publish(self.bundle(), self._display_id, update=False)

    def settle(self) -> None:
        """Update the saved output now, before the cell that waits for the job ends."""
        # nbclient ignores updates after the end of the cell that they belong to.
        self._save()

    def close(self) -> None:
        """Stop updating the display, and leave it as it is."""
        with self._changed:
            self._is_closed = True
            threads = self._thread, self._saver
            self._changed.notify_all()
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                # Use a timeout, because the thread may be blocked while sending a message to a
                # front end.
                thread.join(timeout=5.0)
        self._close_widget()
        link().unregister(self._job_id, self._receive_from_link)
        link().panel.remove(self._job_id, self)

    def snapshot(self) -> Snapshot:
        """Return the current state of the job."""
        with self._changed:
            return self._view.snapshot()

    def version(self) -> int:
        """Return a number that grows with each batch of events."""
        return self._version

    def row(self) -> dict[str, Any]:
        """Return the job as a row of a list; see ``side_panel.row_of``."""
        with self._changed:
            return row_of(self._view)

    def text(self) -> str:
        """Return the job as one line."""
        return render_text(self.snapshot())

    def bundle(self) -> dict[str, Any]:
        """Return the representations of the job, for any front end, by MIME type."""
        snapshot, curves, exhibits = self._saved_state()
        bundle: dict[str, Any] = {
            "text/plain": render_text(snapshot),
            "text/html": render_html(snapshot, curves, exhibits),
            MIME: _saved(snapshot, curves, exhibits),
        }
        if (widget := self._widget) is not None:
            model = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
            bundle[WIDGET_MIME] = model
        return bundle

    def _saved_state(self) -> tuple[Snapshot, Curves, SavedExhibits]:
        with self._changed:
            snapshot, chosen = self._view.snapshot(), self._chosen_exhibits()
            num_exhibits = sum(map(len, self._view.exhibits.values()))
            # Copy the arrays, because the next event may change them once the lock is released.
            curves = self._view.curves.to_dict().items()
            copied = {name: (x.copy(), y.copy()) for name, (x, y) in curves}
        exhibits = SavedExhibits(exhibits=self._exhibits.select(chosen), total=num_exhibits)
        return snapshot, copied, exhibits

    def _chosen_exhibits(self) -> list[ExhibitStored]:
        with self._changed:
            max_bytes = MAX_BYTES if self._view.is_terminal else MAX_BYTES_RUNNING
            return choose_saved(self._view.exhibits, max_bytes=max_bytes)

    def _repr_mimebundle_(self, **_kwargs: Any) -> dict[str, Any]:
        return self.bundle()

    # --- the background threads ---
    #
    #   add_events     fold, notify ----------------------------------> returns at once
    #   etrain-dashboard-JOB         wait, flush, sleep 50 ms, wait ... until the job has ended
    #   etrain-dashboard-save-JOB    read exhibits, bundle, publish (every 5 or 60 s, one at a time)
    #   etrain-dashboard-read-JOB    read the exhibits for the first display
    #   kernel (comm)                hello, detail, exhibit, request -> outbox -> _send_out

    def _start_thread(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(
                target=self._run, name=f"etrain-dashboard-{self._job_id}", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        saved_at = time.monotonic()
        while True:
            if not self._wait_for_changes(saved_at):
                break
            self._guarded(self._flush)
            if self._view.is_terminal:
                # Save in this thread: _start_saver skips a save while another one is running, but
                # the last state must not be skipped.
                self._guarded(self._save)
            elif time.monotonic() - saved_at >= self._save_every_s():
                self._start_saver()
                saved_at = time.monotonic()
            time.sleep(FLUSH_EVERY_S)
        self._guarded(self._close_widget)

    def _wait_for_changes(self, saved_at: float) -> bool:
        """Wait for changes or for the next save; return False if the thread must end."""
        with self._changed:
            wait_s = None
            if self._view.is_terminal:
                wait_s = LINGER_S
            elif self._is_unsaved:
                wait_s = max(0.0, saved_at + self._save_every_s() - time.monotonic())
            self._changed.wait_for(lambda: self._is_unsent or self._is_closed, timeout=wait_s)
            has_ended = self._view.is_terminal and not self._is_unsent
            if has_ended or self._is_closed:
                self._thread = None  # from now on, add_events starts a new one
            return self._thread is not None

    def _save_every_s(self) -> float:
        is_only_widget = self._widget_feed.is_open and not self._link_feed.is_open
        return SAVE_SELDOM_S if is_only_widget else SAVE_EVERY_S

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:  # a broken view must not stop the updates of the others
            self.num_errors += 1

    def _flush(self) -> None:
        with self._changed:
            if self._is_unsent:
                self._is_unsent = False
                self._link_feed.flush(self._view)
                self._widget_feed.flush(self._view)
        self._send_out()

    def _send_out(self) -> None:
        # Do not hold _changed here, because a slow front end must not block add_events.
        with self._sending:
            while self._outbox:
                self._guarded(self._outbox.popleft())

    def _start_saver(self) -> None:
        # Use a separate thread, because rendering and publishing would delay the next update of the
        # views.
        with self._changed:
            if self._is_closed or (self._saver is not None and self._saver.is_alive()):
                return
            name = f"etrain-dashboard-save-{self._job_id}"
            self._saver = threading.Thread(target=self._save_running, name=name, daemon=True)
            self._saver.start()

    def _save_running(self) -> None:
        if not self._is_shown:
            return
        # Read first, because each update of the output may remount a widget.
        self._guarded(lambda: self._exhibits.load(self._chosen_exhibits()))
        self._guarded(self._update_output)

    def _save(self) -> None:
        self._update_output()
        # Afterwards, because reading exhibits from a bucket may take seconds.
        if self._is_shown:
            self._save_exhibits()

    def _save_exhibits(self) -> None:
        if self._exhibits.load(self._chosen_exhibits()):
            self._update_output()

    def _read_exhibits(self) -> None:
        """Read the exhibits. If that takes long, return, and update the output later."""
        if not self._exhibits.is_complete(self._chosen_exhibits()):
            thread = threading.Thread(
                target=self._guarded,
                args=(self._save_exhibits,),
                name=f"etrain-dashboard-read-{self._job_id}",
                daemon=True,
            )
            thread.start()
            thread.join(EXHIBITS_S)

    def _update_output(self) -> None:
        with self._saving:
            with self._changed:
                # A job that is only listed in the side panel has no display to update.
                if not self._is_shown:
                    return
                # Clear it before building the bundle, so that an event that arrives in the meantime
                # sets it again.
                self._is_unsaved = False
                is_terminal, widget = self._view.is_terminal, self._widget
            bundle = self.bundle()
            if is_terminal:
                # The widget ends with the kernel. A saved notebook must show the HTML instead.
                bundle.pop(WIDGET_MIME, None)
            if widget is not None:
                widget.saved = bundle[MIME]
            browser.publish(bundle, self._display_id, update=True)

    # --- the channels ---

    def _open_widget(self) -> Any:
        try:
            return browser.open_widget(
                _saved(*self._saved_state()),
                lambda content: self._receive(self._widget_feed, content),
            )
        except (OSError, ImportError):
            return None  # not built or not installed: front ends show the HTML instead

    def _close_widget(self) -> None:
        with self._changed:
            # Close it outside the lock, because closing sends a message to the browser.
            widget, self._widget = self._widget, None
            self._widget_feed.is_open = False
        if widget is not None:
            widget.close()

    def _send_to_widget(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        widget = self._widget
        if widget is not None:
            # Runs under _changed, so only queue the message; _send_out sends it.
            about = {**content, "job_id": self._job_id}
            self._outbox.append(lambda: widget.send(about, buffers=buffers))

    def _send_to_link(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        message = self._job_id, self._receive_from_link, content, buffers
        self._outbox.append(lambda: link().send(*message))

    def _receive_from_link(self, content: dict[str, Any]) -> None:
        self._receive(self._link_feed, content)

    def _receive(self, feed: ViewFeed, content: dict[str, Any]) -> None:
        # Runs on a kernel thread, if possible that of the subshell that the front end has chosen.
        if content.get("kind") == "hello":
            with self._changed:
                feed.greet(self._view, str(content.get("view", "")))
        elif content.get("kind") == "detail":
            first, last = float(content.get("first", 0)), float(content.get("last", 0))
            with self._changed:
                # Flush first, so that no points are missing between the last update and the detail.
                feed.flush(self._view)
                feed.detail(self._view, str(content.get("view", "")), first, last)
        elif content.get("kind") == "exhibit":
            # Do not hold _changed while reading, which may take seconds for a job in a bucket.
            message, buffers = answer_request(self._read_exhibit, content)
            with self._changed:
                feed.post(message, buffers)
        elif content.get("kind") == "request":
            self._carry_out(feed, content)
        self._send_out()

    def _carry_out(self, feed: ViewFeed, content: dict[str, Any]) -> None:
        request, args = str(content.get("request", "")), dict(content.get("args") or {})
        # Do not hold _changed here, because a request waits for the scheduler's reply, and
        # add_events must not wait for it.
        try:
            answer, level = self._on_request(request, args), "info"
        except Exception as error:
            answer, level = str(error), "error"
        notice = {"kind": "notice", "request": request, "to": str(content.get("view", ""))}
        with self._changed:
            feed.post(notice | {"level": level, "text": answer if isinstance(answer, str) else ""})


def _written(numbers: Floats | SmallFloats, digits: str) -> str:
    # A single string, because JupyterLab saves a list with one line per number.
    return " ".join(map(digits.format, numbers.tolist()))


def _saved(snapshot: Snapshot, curves: Curves, exhibits: SavedExhibits) -> dict[str, Any]:
    """Return the snapshot with thinned curves and the newest exhibits, as a notebook saves it."""
    drawn = (item for item in curves.items() if item[0] != "lr" and not item[0].startswith(UNDONE))
    kept = list(itertools.islice(drawn, MAX_SAVED_CURVES))
    # Points per curve: at most a fifth of the total, even if there are fewer than five curves.
    share = MAX_SAVED_POINTS // max(5, len(kept))
    return {
        "version": 1,
        "snapshot": replace(snapshot, events=snapshot.events[-MAX_SAVED_EVENTS:]).to_json(),
        "exhibits": [one.to_json() for one in exhibits.exhibits],
        "series": {
            name: {"x": _written(x, "{:.9g}"), "y": _written(y, "{:.5g}")}
            for name, (x, y) in thin_all(dict(kept), share).items()
        },
    }
