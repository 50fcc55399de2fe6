"""The text of notebook cells, so that a traceback on a rank shows the user's own lines."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import etrain_jupyter

MAX_LIBRARY_FRAMES = 3
"""Library frames that are shown below the user's last one."""

_OURS = str(Path(etrain_jupyter.__file__).parent)
_PLUMBING = frozenset({"_wrapped_call_impl", "_call_impl", "_modified_open"})
"""Functions of torch and IPython that stand between any two frames and explain nothing."""


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """One cell's text at the time of submit."""

    label: str
    """``Cell In[3]``, or the file's name where it was no cell."""
    text: str


def collect_sources(
    values: Iterable[Any], cell_numbers: Mapping[str, int]
) -> dict[str, CellSource]:
    """Return the text of every cell that defines one of ``values`` or what they hold, by file name.

    Args:
        values: Functions, classes, modules, anything.
        cell_numbers: File name that the kernel compiled a cell under to its execution count.
    """
    names = set(cell_numbers)
    for value in values:
        names |= {code.co_filename for code in _codes_of(value)}
    found = {}
    for name in sorted(names):
        lines = linecache.getlines(name)
        if not lines or Path(name).is_file():
            continue
        label = f"Cell In[{cell_numbers[name]}]" if name in cell_numbers else name
        found[name] = CellSource(label=label, text="".join(lines))
    return found


def cell_of(value: Any, cell_numbers: Mapping[str, int]) -> str:
    """Return ``Cell In[3]`` for the cell that defines ``value``, or an empty string."""
    for code in _codes_of(value):
        if code.co_filename in cell_numbers:
            return f"Cell In[{cell_numbers[code.co_filename]}]"
    return ""


def _codes_of(value: Any) -> list[CodeType]:
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        return [code]
    owner = value if isinstance(value, type) else type(value)
    members = vars(owner).values()
    return [m.__code__ for m in members if isinstance(getattr(m, "__code__", None), CodeType)]


def install_sources(cells: Mapping[str, CellSource]) -> None:
    """Make tracebacks in this process find the cells' lines."""
    for name, cell in cells.items():
        lines = cell.text.splitlines(keepends=True)
        linecache.cache[name] = (len(cell.text), None, lines, name)


def format_user_traceback(exc: BaseException, cells: Mapping[str, CellSource]) -> str:
    """Return the traceback as the user should see it.

    Frames of this package are left out, so are those of libraries above the user's first frame, and
    all but the last few below the user's last one.
    """
    parts: list[str] = []
    if exc.__cause__ is not None:
        parts.append(format_user_traceback(exc.__cause__, cells))
        parts.append("The above exception was the direct cause of the following exception:\n")
    frames = _shown_frames(exc.__traceback__, cells)
    if frames:
        parts.append("Traceback (most recent call last):")
        parts += [_format_frame(frame, cells) for frame in frames]
    parts.append("".join(traceback.format_exception_only(exc)).rstrip())
    return "\n".join(parts)


def _shown_frames(
    trace: TracebackType | None, cells: Mapping[str, CellSource]
) -> list[traceback.FrameSummary]:
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not is_of_this_package(frame.filename) and frame.name not in _PLUMBING
    ]
    theirs = [i for i, f in enumerate(frames) if _is_users(f.filename, cells)]
    if not theirs:
        return frames[-MAX_LIBRARY_FRAMES:]
    below = frames[theirs[-1] + 1 :]
    return frames[theirs[0] : theirs[-1] + 1] + below[-MAX_LIBRARY_FRAMES:]


def is_of_this_package(filename: str) -> bool:
    """Whether a frame is ours, which tells a user nothing."""
    return filename.startswith(_OURS)


def _is_users(filename: str, cells: Mapping[str, CellSource]) -> bool:
    if filename in cells:
        return True
    is_library = any(part in filename for part in ("site-packages", "dist-packages", "/lib/python"))
    return not is_library and not filename.startswith("<frozen")


def _format_frame(frame: traceback.FrameSummary, cells: Mapping[str, CellSource]) -> str:
    cell = cells.get(frame.filename)
    place = cell.label if cell else f'File "{frame.filename}"'
    text = f"  {place}, line {frame.lineno}, in {frame.name}"
    line = (frame.line or "").strip()
    return f"{text}\n    {line}" if line else text
