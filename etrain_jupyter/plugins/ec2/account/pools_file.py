"""Add and remove entries of ``pools.yaml`` without changing the rest of the file.

The file is edited as text, and the parser only finds the lines of an entry. Comments, order and
formatting of the user's other entries stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.process.files import write_private

MADE_BY = "made by `etrain pools init`"
"""Comment on the first line of an entry that ``remove_entry`` may remove."""

_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n)$)[A-Za-z/][\w./-]*", re.IGNORECASE)
"""Texts that need no quotes, even in YAML 1.1."""


def entry_text(name: str, keys: Sequence[tuple[str, Any, str]]) -> str:
    """Return an entry; ``keys`` has the key, value and comment of each line.

    >>> print(entry_text("spot", [("region", "us-east-1", "where machines run")]), end="")
    spot:  # made by `etrain pools init`
      region: us-east-1  # where machines run
    """
    lines = [f"{name}:  # {MADE_BY}"]
    lines += [f"  {key}: {_flow(value)}  # {comment}" for key, value, comment in keys]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Return a value as one line of YAML, quoted if it could be read as another value."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    # JSON strings, numbers and booleans mean the same in YAML.
    return json.dumps(value)


def has_entry(file: Path, name: str) -> bool:
    """Return whether the file has an entry with this name."""
    return _span_of(_read(file), file, name) is not None


def has_mark(file: Path, name: str) -> bool:
    """Return whether ``add_entry`` has written the entry."""
    text = _read(file)
    span = _span_of(text, file, name)
    return span is not None and MADE_BY in text.splitlines()[span[0]]


def add_entry(file: Path, name: str, text: str) -> None:
    """Append an entry; do nothing if the file already has one with this name.

    Raises:
        ConfigError: If the file's pools are written on one line, in braces.
        PoolError: If the file cannot be written.
    """
    known = _read(file)
    if _span_of(known, file, name) is not None:
        return
    gap = "" if not known.strip() else "\n" if known.endswith("\n") else "\n\n"
    _write(file, known + gap + text)


def remove_entry(file: Path, name: str) -> None:
    """Remove an entry; delete the file if nothing else is in it.

    Raises:
        ConfigError: If the file's pools are written on one line, in braces.
        PoolError: If the file cannot be written.
    """
    text = _read(file)
    span = _span_of(text, file, name)
    if span is None:
        return
    lines = text.splitlines(keepends=True)
    first, last = span
    rest = "".join([*lines[:first], *lines[last + 1 :]])
    if rest.strip():
        _write(file, rest.lstrip("\n") if first == 0 else rest)
    else:
        file.unlink()


def _span_of(text: str, file: Path, name: str) -> tuple[int, int] | None:
    """Return the first and last line of an entry, counted from 0; None if it does not exist."""
    # The file is valid YAML: the catalog has read it before, and reports errors in invalid files.
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigError(
            f"the pools in {file} are not written as one block per pool. The file was not changed",
            hint="write each pool as 'NAME:' on its own line, with its keys indented below it",
        )
    for key, value in root.value:
        if key.value == name:
            return key.start_mark.line, _last_line(value)
    return None


def _last_line(node: yaml.Node) -> int:
    # The parser's end of a block is the start of the next token, after any comments of the next
    # entry. Use the end of the block's last value instead.
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    mark = node.end_mark
    # A block scalar ends in the first column of the line after it.
    is_after = mark.column == 0 and mark.line > node.start_mark.line
    return int(mark.line - 1 if is_after else mark.line)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _write(file: Path, text: str) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    # Write to the target of a symbolic link, so that the link remains.
    target = file.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        write_private(target, text)
        target.chmod(mode)
    except OSError as exc:
        raise PoolError(
            f"{file} cannot be written ({exc}). Everything else was done. Make it writable, or "
            "name another file with --file, and run the same command again."
        ) from exc


def differing_keys(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the keys of ``wanted`` that have a different value in an existing entry.

    >>> differing_keys({"image": {"ami": "a", "python": "p"}}, {"image": {"ami": "b"}})
    ['image']
    """
    return [key for key, value in wanted.items() if not _contains(known.get(key), value)]


def _contains(known: Any, wanted: Any) -> bool:
    """Return whether an entry contains all values of ``wanted``; it may have additional keys."""
    if isinstance(wanted, Mapping) and isinstance(known, Mapping):
        return all(_contains(known.get(key), value) for key, value in wanted.items())
    return bool(known == wanted)
