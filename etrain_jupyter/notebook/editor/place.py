"""What stands at the cursor in a body, and around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from etrain_jupyter.config.keys import KeyPath


@dataclass(frozen=True, kw_only=True)
class CursorContext:
    """What stands at the cursor: a key, or a value, written as far as the cursor."""

    path: KeyPath
    """Of a key: the group that it stands in. Of a value: its key."""
    is_key: bool
    start: int
    """Offset at which the key or the value begins."""
    word: str
    """What is written of it before the cursor, a quote at its beginning left out."""
    rest: str = ""
    """What is written of it after the cursor."""
    name: str = ""
    """Of a key: the whole of it."""
    has_colon: bool = False
    """Of a key: whether its colon is there already."""
    is_computed: bool = False
    """Of a value: whether it stands after ``!py``."""
    lacks_space: bool = False
    """Of a value: whether it would touch the colon."""
    is_whole: bool = False
    """Whether the value is a group in braces that opens after the cursor, or a text of lines."""


@dataclass
class Outline:
    """What a body says so far."""

    place: CursorContext | None = None
    """None in a comment, and where neither a key nor a value can stand."""
    values: dict[KeyPath, str] = field(default_factory=dict)
    """Every key with its value, as far as that is on its line; empty for a group."""

    def given(self, group: KeyPath) -> dict[str, str]:
        """Return the keys of a group but for the one at the cursor, with their values."""
        found = {path[-1]: text for path, text in self.values.items() if path[:-1] == group}
        if self.place is not None and self.place.is_key and self.place.path == group:
            found.pop(self.place.name, None)
        return found
