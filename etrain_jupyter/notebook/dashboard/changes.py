"""What is new in a picture since a channel was last told, said in few bytes.

Ten times a second a snapshot of 200 workers and as many sentences would be 800 kB a second, and
what is new in it is a few numbers. So only facts that changed are sent, and of lists only what
changed in their rows. The front end puts them together again, see ``protocol.ts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LISTS = {"events": "id", "markers": "id", "workers": "worker"}
"""The lists of a snapshot, and the field by which each knows its rows."""

Row = dict[str, Any]


class Told:
    """The picture as the other side has it."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._rows: dict[str, dict[Any, Row]] = {}

    def tell_all(self, snapshot: Mapping[str, Any]) -> None:
        """Take note that the whole of ``snapshot`` is sent."""
        self._facts = {key: value for key, value in snapshot.items() if key not in LISTS}
        self._rows = {name: _by_key(name, snapshot[name]) for name in LISTS}

    def tell_news(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to send of ``snapshot``, and take note of it.

        Args:
            snapshot: A list that it lacks did not change.

        Returns:
            ``snapshot``: the facts that changed. ``lists``, by name: ``rows`` that are new, whole,
            and of those that changed their key and the fields that did; ``gone``, the keys of those
            that are not there any more; ``order``, all keys, where the rows do not stand as before
            with the new ones at the end.
        """
        facts, before = {}, self._facts
        for key, value in snapshot.items():
            if key not in LISTS and (key not in before or before[key] != value):
                facts[key] = before[key] = value
        lists = {name: self._patch(name, snapshot[name]) for name in LISTS if name in snapshot}
        return {"snapshot": facts, "lists": {name: patch for name, patch in lists.items() if patch}}

    def _patch(self, name: str, rows: list[Row]) -> dict[str, Any]:
        before, now = self._rows[name], _by_key(name, rows)
        self._rows[name] = now
        changed = [
            _difference(before.get(key, {}), row, LISTS[name])
            for key, row in now.items()
            if before.get(key) != row
        ]
        gone = [key for key in before if key not in now]
        as_before = [key for key in before if key in now]
        as_before += [key for key in now if key not in before]
        order = [] if as_before == list(now) else list(now)
        patch = {"rows": changed, "gone": gone, "order": order}
        return {part: value for part, value in patch.items() if value}


def _by_key(name: str, rows: list[Row]) -> dict[Any, Row]:
    return {row[LISTS[name]]: row for row in rows}


def _difference(before: Row, now: Row, key: str) -> Row:
    """Return the fields that are others now, and the key."""
    return {
        field: value
        for field, value in now.items()
        if field == key or field not in before or before[field] != value
    }
