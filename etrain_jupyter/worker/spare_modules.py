"""Modules that the next spare imports: those that the jobs of this worker have imported."""

from __future__ import annotations

from collections.abc import Iterable

from etrain_jupyter.wire.fork_records import MAX_MODULES_BYTES


class SpareModules:
    """The modules of future spares, and whether a spare that has imported them can fork."""

    def __init__(self) -> None:
        self.current: tuple[str, ...] = ()
        """Modules that each new spare imports, in order."""
        self._refused: set[str] = set()
        self._previous: tuple[str, ...] = ()

    def learn(self, modules: Iterable[str]) -> bool:
        """Add modules, in order; return False if all are known, or if they do not fit.

        Modules that have prevented forks before are not added.
        """
        known = {*self.current, *self._refused}
        added = tuple(name for name in modules if name not in known)
        size = sum(len(name) + 1 for name in (*self.current, *added))
        if not added or size > MAX_MODULES_BYTES:
            return False
        self._previous, self.current = self.current, (*self.current, *added)
        return True

    def refuse_newest(self) -> None:
        """Remove the modules added last: a spare that has imported them cannot fork."""
        self._refused |= set(self.current) - set(self._previous)
        self.current = self._previous
