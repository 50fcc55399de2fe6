"""Format a crashed trainer's last output for users."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from etrain_jupyter.bundle.sources import CellSource, is_of_this_package
from etrain_jupyter.log.events import STACKS_HEADER

MAX_LINES = 10

_FATAL = re.compile(r"Fatal Python error: (?P<what>.*)")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def last_words(worker: str, lines: Iterable[str], cells: Mapping[str, CellSource]) -> str:
    """Return the end of a trainer's output; empty if it printed nothing.

    Python's report on a crash or hang is reduced to the thread that crashed, or the main thread.
    Its frames are in traceback order, starting with the first one in the notebook.
    """
    # faulthandler's output, after the lines printed by the notebook's code:
    #
    #     Fatal Python error: Segmentation fault
    #
    #     Thread 0x00007f... (most recent call first):
    #       ...
    #     Current thread 0x00007f... (most recent call first):
    #       File "ipykernel_1/2.py", line 7 in forward       innermost first
    #       File ".../etrain_jupyter/...", line 80 in run         our own code: omit the rest
    printed = list(lines)
    report = max((i for i, text in enumerate(printed) if _begins_report(text)), default=None)
    before = [text for text in printed[:report] if text.strip()][-MAX_LINES:]
    parts = [f"{worker} printed last:", *(f"  {text}" for text in before)] if before else []
    if report is not None:
        found = _FATAL.match(printed[report])
        frames = _frames(printed[report:], cells)
        if found:
            parts.append(f"{worker} crashed: {found['what']}")
        elif frames:
            parts.append(f"{worker} was doing:")
        parts += frames
    return "\n".join(parts)


def _begins_report(text: str) -> bool:
    return text == STACKS_HEADER or _FATAL.match(text) is not None


def _frames(report: list[str], cells: Mapping[str, CellSource]) -> list[str]:
    start = next((i for i, text in enumerate(report) if text.startswith("Current thread")), None)
    if start is None:
        return []
    found = []
    for text in report[start + 1 :]:
        frame = _FRAME.match(text)
        if frame is None or is_of_this_package(frame["file"]):
            break
        cell = cells.get(frame["file"])
        place = cell.label if cell else f'File "{frame["file"]}"'
        found.append(f"  {place}, line {frame['line']}, in {frame['name']}")
    return found[::-1][-MAX_LINES:]
