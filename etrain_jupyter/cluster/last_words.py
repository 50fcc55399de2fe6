"""What a trainer that crashed printed last, as a person should see it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from etrain_jupyter.bundle.sources import CellSource, is_of_this_package

MAX_LINES = 10

_FATAL = re.compile(r"Fatal Python error: (?P<what>.*)")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def last_words(worker: str, lines: Iterable[str], cells: Mapping[str, CellSource]) -> str:
    """Return the end of what was printed; empty if nothing was.

    Of Python's own report of a crash only the thread that crashed is shown, in the order of a
    traceback, from the first frame of the notebook's on.
    """
    printed = list(lines)
    crash = max((i for i, text in enumerate(printed) if _FATAL.match(text)), default=None)
    before = [text for text in printed[:crash] if text.strip()][-MAX_LINES:]
    parts = [f"{worker} printed last:", *(f"  {text}" for text in before)] if before else []
    if crash is not None:
        found = _FATAL.match(printed[crash])
        parts.append(f"{worker} crashed: {found['what'] if found else printed[crash]}")
        parts += _frames(printed[crash:], cells)
    return "\n".join(parts)


def _frames(report: list[str], cells: Mapping[str, CellSource]) -> list[str]:
    """Return the frames of the thread that crashed, the innermost last."""
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
