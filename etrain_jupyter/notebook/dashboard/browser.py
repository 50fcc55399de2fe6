"""This kernel's shell and its displays, and the anywidget: the way into most front ends.

JupyterLab with our extension has another way, see ``link``. Nothing here imports IPython: where it
was never imported, nobody is looking.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Receive = Callable[[dict[str, Any]], None]

WIDGET_SCRIPT = Path(__file__).parents[2] / "static" / "widget.js"


def current_shell() -> Any | None:
    """Return the IPython shell that runs in this process, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def cell_numbers() -> Mapping[str, int]:
    """Return the execution count of each cell of this kernel by the file name of its code."""
    return dict(getattr(getattr(current_shell(), "compile", None), "_filename_map", {}))


def has_front_end() -> bool:
    """Tell whether the shell belongs to a Jupyter kernel, not to a terminal."""
    return hasattr(current_shell(), "kernel")


def publish(bundle: dict[str, Any], display_id: str, *, update: bool) -> None:
    """Display ``bundle`` in the running cell, or refresh what has this ``display_id``.

    A refresh is published on behalf of whichever cell runs now. Front ends find its place by the
    display id alone; nbclient passes over whatever is not of the cell that it waits for.
    """
    shell = current_shell()
    if shell is not None:
        shell.display_pub.publish(
            data=bundle, metadata={}, transient={"display_id": display_id}, update=update
        )


def keep_subshell(comm: Any) -> None:
    """Let requests from the browser reach the thread that the front end chose for them.

    ipykernel 7.4 hands a message from the front end to the shell that last published on its comm.
    We publish from a background thread, which counts as the main shell, and there a press of Stop
    would wait for the busy cell.
    """
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


class WidgetChannel:
    """One anywidget.

    Raises OSError where its script was not built, ImportError where anywidget is not installed.
    """

    def __init__(self, saved: dict[str, Any], receive: Receive) -> None:
        self._widget = _widget_class()(saved=saved)
        keep_subshell(self._widget.comm)
        self._widget.on_msg(lambda _widget, content, _buffers: receive(content))

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        """Send to every view of it."""
        self._widget.send(content, buffers=buffers)

    def save(self, saved: dict[str, Any]) -> None:
        """Set the picture that a view starts from when no kernel answers."""
        self._widget.saved = saved

    def mime(self) -> dict[str, Any]:
        """Return its representation in a display."""
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self._widget.model_id,
            }
        }

    def close(self) -> None:
        """Close it and its views."""
        self._widget.close()


@cache
def _widget_class() -> Any:
    """Make the widget's class; late, because anywidget takes a while to import."""
    import anywidget
    import traitlets

    script = WIDGET_SCRIPT.read_text(encoding="utf-8")

    class JobWidget(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
        """A view of a job for front ends without our extension."""

        _esm = script
        saved = traitlets.Dict().tag(sync=True)

    return JobWidget
