"""Source text of notebook cells, so that a traceback on a rank shows the user's own lines.

A kernel compiles each cell under a unique file name that does not exist on disk
(``/tmp/ipykernel_123/456.py``), and keeps the text in ``linecache``. The bundle contains both, and
also the text of modules next to the notebook.
"""

from __future__ import annotations

import ast
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import etrain_jupyter

MAX_LIBRARY_FRAMES = 3
"""Maximum number of library frames shown below the user's last frame."""

MAX_USER_FRAMES = 20
"""Maximum number of user frames shown. An infinite recursion has more: the middle is omitted."""

_OURS = str(Path(etrain_jupyter.__file__).parent) + os.sep
_WRAPPERS = frozenset({"_wrapped_call_impl", "_call_impl", "_modified_open"})
"""Wrapper functions of torch and IPython that appear between user frames and add no information."""
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """Text of one cell or module when the job was submitted."""

    label: str
    """``Cell In[3]``, or the file name of a module."""
    text: str


def is_library(filename: str) -> bool:
    """Return True if a file belongs to Python or to an installed package."""
    parts = Path(filename).parts
    return filename.startswith(_LIBRARIES) or "site-packages" in parts or "dist-packages" in parts


def is_of_this_package(filename: str) -> bool:
    """Return True if a file belongs to etrain-jupyter."""
    return filename.startswith(_OURS)


def collect_sources(
    filenames: Iterable[str], cell_numbers: Mapping[str, int]
) -> dict[str, CellSource]:
    """Return the text of the user's files and cells that contain captured code.

    ``cell_numbers`` has the execution count of each cell, by the file name that the kernel gave it.
    """
    found = {}
    for name in sorted(set(filenames)):
        # These files exist on each rank anyway.
        if is_library(name) or is_of_this_package(name):
            continue
        # Empty for code that `exec` or `eval` compiled from a string: its traceback has no lines.
        text = "".join(linecache.getlines(name))
        if text:
            found[name] = CellSource(label=_label_of(name, cell_numbers), text=text)
    return found


def _label_of(filename: str, cell_numbers: Mapping[str, int]) -> str:
    if filename in cell_numbers:
        return f"Cell In[{cell_numbers[filename]}]"
    path = Path(filename)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return filename


def defining_cell(name: str, value: Any, cell_numbers: Mapping[str, int]) -> str:
    """Return ``Cell In[3]`` for the cell that defines ``value`` or assigns ``name``, if any."""
    for code in _codes_of(value):
        if code.co_filename in cell_numbers:
            return f"Cell In[{cell_numbers[code.co_filename]}]"
    # Data has no code: search the cells, latest first, because a later assignment takes precedence.
    for filename, number in sorted(cell_numbers.items(), key=lambda item: -item[1]):
        if name in _assigned_in("".join(linecache.getlines(filename))):
            return f"Cell In[{number}]"
    return ""


def _codes_of(value: Any) -> list[CodeType]:
    # A class has no code object: take those of its methods.
    held = [value, *vars(value).values()] if isinstance(value, type) else [value]
    codes = (getattr(getattr(item, "__func__", item), "__code__", None) for item in held)
    return [code for code in codes if isinstance(code, CodeType)]


def _assigned_in(text: str) -> set[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


def install_sources(cells: Mapping[str, CellSource]) -> None:
    """Register the cells with ``linecache``, so that tracebacks find their lines."""
    for name, cell in cells.items():
        lines = cell.text.splitlines(keepends=True)
        # linecache.checkcache() keeps an entry that has no modification time.
        linecache.cache[name] = (len(cell.text), None, lines, name)


# --------------------------------------------------------------------------------------- tracebacks


def format_user_traceback(exc: BaseException, cells: Mapping[str, CellSource]) -> str:
    """Return a traceback that shows the user's frames, with the causes of the exception first.

    It omits frames of this package, library frames between the user's frames, and all but
    ``MAX_LIBRARY_FRAMES`` below the user's last frame. If there is no user frame, it shows all
    frames except those of this package.
    """
    parts: list[str] = []
    # Python prints the oldest exception first; the chain starts with the newest.
    for link, transition in reversed(list(_chain_of(exc))):
        parts.append(_format_one(link, cells))
        if transition:
            parts.append(f"\n{transition}\n")
    return "\n".join(parts)


def _chain_of(exc: BaseException) -> Iterator[tuple[BaseException, str]]:
    """Yield the exception and its causes, newest first, each with the line to print below it."""
    # A cycle of causes is legal in Python: stop at an exception that was already yielded.
    seen: set[int] = set()
    link: BaseException | None = exc
    transition = ""
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link, transition
        if link.__cause__ is not None:
            transition = "The above exception was the direct cause of the following exception:"
            link = link.__cause__
        else:
            transition = "During handling of the above exception, another exception occurred:"
            link = None if link.__suppress_context__ else link.__context__


def _format_one(exc: BaseException, cells: Mapping[str, CellSource]) -> str:
    frames = _shown_frames(exc.__traceback__, cells)
    lines = ["Traceback (most recent call last):"] if frames else []
    lines += [_format_frame(frame, cells) for frame in frames]
    return "\n".join([*lines, "".join(traceback.format_exception_only(exc)).rstrip()])


Frame = traceback.FrameSummary | int
"""A frame, or the number of omitted frames."""


def _shown_frames(trace: TracebackType | None, cells: Mapping[str, CellSource]) -> list[Frame]:
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not is_of_this_package(frame.filename) and frame.name not in _WRAPPERS
    ]
    # If there is no user frame, the error is in a library: hide only our own frames.
    user_frames = [i for i, frame in enumerate(frames) if _is_users(frame.filename, cells)]
    if not user_frames:
        return [*frames]
    # user frame                  shown; beyond MAX_USER_FRAMES, the middle is replaced by a number
    # library between them        hidden: torch.nn.Module.__call__ and similar frames
    # library below the last      the last MAX_LIBRARY_FRAMES, where the exception was raised
    shown: list[Frame] = [frames[i] for i in user_frames]
    if len(shown) > MAX_USER_FRAMES:
        half = MAX_USER_FRAMES // 2
        shown[half:-half] = [len(shown) - MAX_USER_FRAMES]
    return [*shown, *frames[user_frames[-1] + 1 :][-MAX_LIBRARY_FRAMES:]]


def _is_users(filename: str, cells: Mapping[str, CellSource]) -> bool:
    # Generated code (``<frozen importlib>``, ``<__array_function__ internals>``) has no file.
    return filename in cells or not (is_library(filename) or filename.startswith("<"))


def _format_frame(frame: Frame, cells: Mapping[str, CellSource]) -> str:
    if isinstance(frame, int):
        return f"  ... {frame} more frames ..."
    cell = cells.get(frame.filename)
    place = cell.label if cell else f'File "{frame.filename}"'
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    head = f"  {place}, line {frame.lineno}{inside}"
    text = _line_of(cell, frame)
    if not text.strip():
        return head
    return f"{head}\n    {text.strip()}"


def _line_of(cell: CellSource | None, frame: traceback.FrameSummary) -> str:
    if cell is None:
        return linecache.getline(frame.filename, frame.lineno or 0).rstrip("\n")
    lines = cell.text.splitlines()
    return lines[frame.lineno - 1] if frame.lineno and frame.lineno <= len(lines) else ""
