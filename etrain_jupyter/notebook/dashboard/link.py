"""Comm between this kernel and JupyterLab with our extension.

JupyterLab draws a job from its saved output and requests updates through this comm. It therefore
still shows the job after the kernel has died. Messages about one job have a ``job_id``; ``feed``
describes them. Messages of the kind ``session`` are about all jobs; ``side_panel`` describes them.
"""

# The kernel opens the comm and the browser finds it, never the reverse:
#
#   kernel    comm_open (etrain.jobs) ........... hello ->  reset ->  update ->
#   browser        lists the kernel's comms, finds it  ^
#
# If the front end opened it, every kernel without our package would log an error.

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from etrain_jupyter.notebook.dashboard.browser import Receive, keep_subshell
from etrain_jupyter.notebook.dashboard.side_panel import SidePanel

LINK_TARGET = "etrain.jobs"
MAX_LINKED_JOBS = 32
SESSION = "session"


class PanelComm:
    """The kernel's comm with our JupyterLab extension.

    Attributes:
        panel: The side panel's messages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._comm: Any | None = None
        self._receivers: dict[str, Receive] = {}
        self.panel = SidePanel(self._post)

    def register(self, job_id: str, receive: Receive) -> None:
        """Route messages about ``job_id`` to ``receive``, replacing any previous receiver."""
        with self._lock:
            # Remove and add the entry, so that the dict is in order of registration and the oldest
            # job is dropped first.
            self._receivers.pop(job_id, None)
            self._receivers[job_id] = receive
            if len(self._receivers) > MAX_LINKED_JOBS:
                del self._receivers[next(iter(self._receivers))]
            # The panel and the comm have their own locks, so call them without holding this one.
            kept = set(self._receivers)
        self.panel.keep_only(kept)
        self.open()

    def unregister(self, job_id: str, receive: Receive) -> None:
        """Stop routing messages to ``receive``, unless another receiver has replaced it."""
        with self._lock:
            # A job that was attached again has a new dashboard, and the old one closes later.
            if self._receivers.get(job_id) == receive:
                del self._receivers[job_id]

    def send(self, job_id: str, receive: Receive, content: dict[str, Any], buffers: Any) -> None:
        """Send to every view of ``job_id``, if ``receive`` is still its receiver."""
        with self._lock:
            comm = self._comm if self._receivers.get(job_id) == receive else None
        if comm is not None:
            comm.send({**content, "job_id": job_id}, buffers=buffers)

    def open(self) -> None:
        """Open the comm if it is closed, so that a front end can find it."""
        with self._lock:
            if self._comm is not None:
                return
        # Import here, because a process without a kernel needs no comm.
        import comm

        opened = comm.create_comm(target_name=LINK_TARGET)
        keep_subshell(opened)
        opened.on_msg(self._on_message)
        opened.on_close(self._on_close)
        with self._lock:
            self._comm = opened

    def _on_message(self, message: dict[str, Any]) -> None:
        content = message["content"]["data"]
        if content.get("kind") == SESSION:
            self.panel.receive(content)
            return
        job_id = str(content.get("job_id", ""))
        with self._lock:
            receive, comm = self._receivers.get(job_id), self._comm
        if receive is not None:
            receive(content)
        # A saved notebook shows a job that this kernel does not know. The view then stops waiting.
        elif comm is not None:
            comm.send({"kind": "unknown", "job_id": job_id, "to": content.get("view", "")})

    def _post(self, content: dict[str, Any]) -> None:
        with self._lock:
            comm = self._comm
        if comm is not None:
            comm.send({**content, "kind": SESSION})

    def _on_close(self, _message: dict[str, Any]) -> None:
        # A front end without our extension closes the comm. The next `open` creates another one.
        with self._lock:
            self._comm = None


@cache
def link() -> PanelComm:
    """Return this kernel's link."""
    return PanelComm()
