"""This kernel's shell and displays, and the anywidget shown by most front ends.

JupyterLab with our extension uses ``link`` instead.
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
    """Return the IPython shell of this process, or None."""
    # Do not import IPython: if the process has not loaded it, there cannot be a front end.
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def cell_numbers() -> Mapping[str, int]:
    """Return the execution count of each cell of this kernel, by the file name of its code."""
    # This attribute of ipykernel's compiler is private. If it is missing, stack dumps show "a cell"
    # instead of a number.
    return dict(getattr(getattr(current_shell(), "compile", None), "_filename_map", {}))


def has_front_end() -> bool:
    """Return True if the shell belongs to a Jupyter kernel, False if it belongs to a terminal."""
    # IPython in a terminal has a shell too, but only ipykernel's shell has a kernel.
    return hasattr(current_shell(), "kernel")


def publish(bundle: dict[str, Any], display_id: str, *, update: bool) -> None:
    """Display ``bundle`` in the running cell, or update the display with this ``display_id``."""
    # The parent of an update is the cell that is running at that time. Front ends find the display
    # by its ID alone, but nbclient ignores updates whose parent is not the cell it is waiting for.
    shell = current_shell()
    if shell is not None:
        shell.display_pub.publish(
            data=bundle, metadata={}, transient={"display_id": display_id}, update=update
        )


def keep_subshell(comm: Any) -> None:
    """Deliver requests from the browser on the subshell that the front end has chosen."""
    # ipykernel 7.4 delivers a message from a front end to the shell that last published on its
    # comm. The dashboard publishes from a background thread, which counts as the main shell. There,
    # a stop request would wait until the running cell ends:
    #
    #   cell runs ....................................| ends
    #   Stop pressed -> main shell, queued ............ handled now: too late
    #   Stop pressed -> subshell, handled at once
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


def open_widget(saved: dict[str, Any], receive: Receive) -> Any:
    """Create an anywidget with which messages can be exchanged.

    Its trait ``saved`` is the state that a view shows if no kernel answers.

    Raises:
        OSError: If its script was not built.
        ImportError: If anywidget is not installed.
    """
    widget = _widget_class()(saved=saved)
    keep_subshell(widget.comm)
    widget.on_msg(lambda _widget, content, _buffers: receive(content))
    return widget


@cache
def _widget_class() -> Any:
    # The class is defined on first use, because importing anywidget is slow.
    import anywidget
    import traitlets

    script = WIDGET_SCRIPT.read_text(encoding="utf-8")

    class JobWidget(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
        """A view of a job for front ends without our extension."""

        _esm = script
        saved = traitlets.Dict().tag(sync=True)

    return JobWidget
