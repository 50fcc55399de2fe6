"""What a rank tells the coordinator: step records in batches, the rest at once, in order."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections import deque
from typing import Any

from etrain_jupyter.wire.channel import Channel

FLUSH_EVERY_S = 0.05
"""Least time between two batches: the record of a step that took longer is sent at once."""
KEEP_RECORDS = 10_000
"""Records that a rank keeps in case rank 0 dies before it could send its own."""


class Reporter:
    """Sends messages up the control channel.

    Every rank keeps the records of its latest steps, because a step's statistics are the same on
    all of them. Rank 0 sends them; if it dies, the next rank 0 sends those that the log does not
    have yet.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEEP_RECORDS)
        self._unsent: list[dict[str, Any]] = []
        self._is_rank_0 = False
        self._generation = 0
        self._thread = threading.Thread(target=self._flush_often, name="etrain-report", daemon=True)
        self._ended = threading.Event()
        self._has_news = threading.Event()
        self._thread.start()

    def begin(self, *, generation: int, rank: int, logged_step: int) -> None:
        """Start a generation; rank 0 owes the log every step that it does not have yet."""
        with self._lock:
            self._generation = generation
            self._is_rank_0 = rank == 0
            self._unsent = []
            if self._is_rank_0:
                self._unsent = [r for r in self._kept if r["step"] > logged_step]
                self._has_news.set()

    def records_after(self, step: int) -> list[dict[str, Any]]:
        """Return the kept records of the steps after this one: they belong to the state."""
        with self._lock:
            return [r for r in self._kept if r["step"] > step]

    def adopt(self, records: list[dict[str, Any]]) -> None:
        """Keep these and no others: the state that they led to was taken over.

        Else a step that only its dead rank 0 could tell of would be missing from the log for ever.
        """
        with self._lock:
            self._kept.clear()
            self._kept.extend(records)
            self._unsent = []

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a step's record may wait for the next batch."""
        if message["op"] == "step":
            record = {"generation": message["generation"], **message["record"]}
            with self._lock:
                self._kept.append(record)
                if self._is_rank_0:
                    self._unsent.append(record)
                    self._has_news.set()
            return
        self.flush()
        self._channel.send(message)

    def flush(self) -> None:
        """Send the records that wait."""
        with self._lock:
            records, self._unsent = self._unsent, []
            if records:
                self._channel.send(
                    {"op": "steps", "generation": self._generation, "records": records}
                )

    def close(self) -> None:
        """Send what waits and end the thread."""
        self._ended.set()
        self._has_news.set()
        with contextlib.suppress(OSError):
            self.flush()
        self._thread.join()

    def _flush_often(self) -> None:
        """Send what waits, in a thread; end the process if that fails by a defect of ours.

        Without this thread steps would be missing from the log, and nobody would know.
        """
        try:
            self._flush_until_ended()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _flush_until_ended(self) -> None:
        while not self._ended.is_set():
            self._has_news.wait()
            self._has_news.clear()
            with contextlib.suppress(OSError):
                self.flush()
            self._ended.wait(FLUSH_EVERY_S)
