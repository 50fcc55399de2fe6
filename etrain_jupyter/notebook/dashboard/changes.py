"""Changes to a snapshot since a channel's last message.

A message contains only changed fields and, for lists, only the changed fields of rows. At ten
messages per second, whole snapshots of a job with 200 workers would take 800 kB per second.
``lists.ts`` merges them in the front end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LISTS = {"events": "id", "markers": "id", "workers": "worker"}
"""The lists of a snapshot, each with the field that identifies its rows."""

JsonRow = dict[str, Any]


class SentSnapshot:
    """The snapshot as last sent to the views of a channel, in its JSON form."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._rows: dict[str, dict[Any, JsonRow]] = {}

    def record_all(self, snapshot: Mapping[str, Any]) -> None:
        """Record the whole snapshot as sent."""
        self._facts = {key: value for key, value in snapshot.items() if key not in LISTS}
        self._rows = {name: _by_key(name, snapshot[name]) for name in LISTS}

    def record_changes(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a snapshot to send, and record them as sent.

        Args:
            snapshot: The current snapshot. A list that is not in the message has not changed.

        Returns:
            ``snapshot`` contains the changed fields. ``lists`` contains, by name: ``rows``, new
            rows with all fields and changed rows with their key and the changed fields; ``gone``,
            the keys of removed rows; ``order``, all keys, unless the order is unchanged and new
            rows are at the end.
        """
        facts, previous = {}, self._facts
        for key, value in snapshot.items():
            # NaN arrives here as the text "NaN", so an unchanged NaN compares as equal.
            if key not in LISTS and (key not in previous or previous[key] != value):
                facts[key] = previous[key] = value
        lists = {name: self._patch(name, snapshot[name]) for name in LISTS if name in snapshot}
        return {"snapshot": facts, "lists": {name: patch for name, patch in lists.items() if patch}}

    def _patch(self, name: str, rows: list[JsonRow]) -> dict[str, Any]:
        previous, current = self._rows[name], _by_key(name, rows)
        self._rows[name] = current
        changed = [
            _difference(previous.get(key, {}), row, LISTS[name])
            for key, row in current.items()
            if previous.get(key) != row
        ]
        gone = [key for key in previous if key not in current]
        # The order of the rows after the front end has merged the message: kept rows, then new
        # ones. Most messages need no `order`, since new workers and events usually come last.
        default_order = [key for key in previous if key in current]
        default_order += [key for key in current if key not in previous]
        order = [] if default_order == list(current) else list(current)
        patch = {"rows": changed, "gone": gone, "order": order}
        # lists.ts treats an empty `order` as "unchanged", so an empty part can be omitted.
        return {part: value for part, value in patch.items() if value}


def _by_key(name: str, rows: list[JsonRow]) -> dict[Any, JsonRow]:
    return {row[LISTS[name]]: row for row in rows}


def _difference(previous: JsonRow, current: JsonRow, key: str) -> JsonRow:
    return {
        field: value
        for field, value in current.items()
        if field == key or field not in previous or previous[field] != value
    }
