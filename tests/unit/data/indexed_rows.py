"""Rows and functions for worker processes, which start fast because this imports little."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

NUM_ROWS = 300


class Rows:
    """Rows with an index, of different sizes, some of them null."""

    def __init__(self, num_rows: int = NUM_ROWS, fail_at: int = -1, delay_s: float = 0.0) -> None:
        self.num_rows = num_rows
        self.fail_at = fail_at
        self.delay_s = delay_s

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self.fail_at:
            raise ValueError("a broken image")
        time.sleep(self.delay_s)
        return {
            "id": number,
            "text": None if number % 7 == 3 else "x" * (number * 37 % 50),
            # Its type is that of the first rows, whatever the first rows of a range are.
            "weight": 0.5 if number % 50 == 0 else number,
            "tokens": [number] * (number % 5),
        }


class ExitingRows(Rows):
    """Rows of which one ends the process that reads it, but not the first process."""

    def __init__(self, exit_at: int) -> None:
        super().__init__()
        self.exit_at = exit_at
        self.pid = os.getpid()

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == self.exit_at and os.getpid() != self.pid:
            os._exit(3)
        return super().__getitem__(number)


def wait_for(path: Path) -> int:
    """Wait for a file, and return the id of this process."""
    path.with_name(f"{path.name}.waits").write_text(str(os.getpid()))
    while not path.exists():
        time.sleep(0.02)
    return os.getpid()


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a set."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
