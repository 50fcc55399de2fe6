"""The key or value at the cursor in a cell body, and the keys around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from etrain_jupyter.config.keys import KeyPath


@dataclass(frozen=True, kw_only=True)
class CursorContext:
    """The key or value at the cursor."""

    path: KeyPath
    """For a key: the path of its group. For a value: the path of its key."""
    is_key: bool
    start: int
    """Offset at which the key or value starts."""
    word: str
    """Its text before the cursor, without an opening quote."""
    rest: str = ""
    """Its text after the cursor."""
    name: str = ""
    """For a key: its whole text."""
    has_colon: bool = False
    """For a key: True if it already has a colon."""
    is_computed: bool = False
    """For a value: True after ``!py``."""
    lacks_space: bool = False
    """For a value: True if it would touch the colon, so that a completion must add a space."""
    is_whole: bool = False
    """True if a complete value follows the cursor, so that nothing can be inserted."""


@dataclass
class Outline:
    """Keys and values of a body that may be incomplete."""

    context: CursorContext | None = None
    """The key or value at the cursor; None in a comment, or where neither is possible."""
    values: dict[KeyPath, str] = field(default_factory=dict)
    """Every key with the part of its value on the same line; empty for a group."""

    def given(self, group: KeyPath) -> dict[str, str]:
        """Return the keys of a group with their values, except the key at the cursor."""
        found = {path[-1]: text for path, text in self.values.items() if path[:-1] == group}
        if self.context is not None and self.context.is_key and self.context.path == group:
            found.pop(self.context.name, None)
        return found
