"""Send a rank's reports in order: step records in batches, all others immediately.

Records of steps and evaluations are kept until they are in the log, whichever rank survives.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from itertools import groupby
from typing import Any

import psutil

from etrain_jupyter.wire.channel import Channel
from etrain_jupyter.wire.messages import EvalFinished, EvalScoreFound, StepsTrained, TrainerReport

FLUSH_EVERY_S = 0.05
"""Minimum interval between two batches. Records of steps longer than this are sent immediately."""
BUSY_FLUSH_EVERY_S = 0.2
"""Minimum interval while training needs all cores of the machine. Each batch then delays the next
step, because it wakes the worker, the scheduler and the kernel, which may run on this machine."""
KEEP_RECORDS = 10_000
"""Number of records that a rank keeps in case rank 0 dies before sending them."""

KeptRecord = dict[str, Any]
"""The record of a step; or a ``step`` together with what became known after it: the record of an
evaluation under ``eval``, or the record of its scores under ``scored``."""

Report = TrainerReport | KeptRecord
"""A report from a rank. A batch of step records becomes one ``StepsTrained``."""

Send = Callable[[Report], None]

MIN_OWN_CORES = 0.1
"""A process that uses fewer cores than this does not compete for cores, because it waits or uses a
GPU."""

MAX_IDLE = 0.15
"""Maximum idle share of all cores of a busy machine."""

WINDOW_S = 0.25
"""Minimum length of a measurement in seconds."""

MAX_WINDOW_S = 1.0
"""Maximum length of a measurement in seconds. A longer one contains a pause in training and is
discarded."""


class Reporter:
    """Send reports over the control channel.

    Args:
        are_cores_busy: Returns whether training needs all cores of this machine.
    """

    # Every rank keeps the records of its latest steps and evaluations, which are the same on all
    # ranks. Rank 0 sends the records. If it dies, the next rank 0 sends those missing from the log.
    # The same rank 0 sends them again if its reports were fenced because they reached a restarted
    # scheduler that had already formed the next generation:
    #
    #     rank 0   step 7 ── sent ──▶ log      step 8 ── (dies)
    #     rank 1   step 7, step 8 kept ── becomes rank 0, logged_step=7 ── sends step 8 ──▶ log
    def __init__(
        self, channel: Channel, *, are_cores_busy: Callable[[], bool] | None = None
    ) -> None:
        self._channel = channel
        self._are_cores_busy = are_cores_busy or BusyCores().are_busy
        self._lock = threading.Lock()
        self._kept: deque[KeptRecord] = deque(maxlen=KEEP_RECORDS)
        self._unsent: list[KeptRecord] = []
        self._is_rank_0 = False
        self._generation = 0
        self._thread = threading.Thread(target=self._flush_often, name="etrain-report", daemon=True)
        self._ended = threading.Event()
        self._has_unsent = threading.Event()
        self._thread.start()

    def begin(self, *, generation: int, rank: int, logged_step: int) -> None:
        """Start a generation. Rank 0 sends all records that are not in the log yet."""
        with self._lock:
            self._generation = generation
            self._is_rank_0 = rank == 0
            self._unsent = []
            if self._is_rank_0:
                self._unsent = [r for r in self._kept if _is_after(r, logged_step)]
                self._has_unsent.set()

    def records_after(self, step: int) -> list[KeptRecord]:
        """Return the kept records after the record of ``step``, to send or save with the state."""
        with self._lock:
            return [r for r in self._kept if _is_after(r, step)]

    def adopt(self, records: list[KeptRecord]) -> None:
        """Replace the kept records with those of a state that was received or restored."""
        # This rank's own records may describe steps that were undone. Without the sender's records,
        # a step that rank 0 had committed but not reported would never reach the log.
        with self._lock:
            self._kept.clear()
            self._kept.extend(records)
            self._unsent = []

    def send(self, report: Report) -> None:
        """Send a report. A step's record may wait for the next batch.

        Every rank passes the records of steps and evaluations, which only rank 0 sends.
        """
        # Only a lock and an append, because this is called in every step.
        if isinstance(report, dict):
            self._keep(report)
            return
        if isinstance(report, EvalFinished):
            self._keep({"step": report.record["step"], "eval": report.record})
        # Reports keep their order, so an evaluation of step 8 arrives after the record of step 8.
        self.flush()
        if not isinstance(report, EvalFinished):
            self._channel.send(report)

    def _keep(self, record: KeptRecord) -> None:
        with self._lock:
            self._kept.append(record)
            if self._is_rank_0:
                self._unsent.append(record)
                self._has_unsent.set()

    def flush(self) -> None:
        """Send the pending records."""
        with self._lock:
            records, self._unsent = self._unsent, []
            generation, send = self._generation, self._channel.send
            for is_step, part in groupby(records, _is_of_step):
                if is_step:
                    send(StepsTrained(generation=generation, records=tuple(part)))
                    continue
                for record in part:
                    if "eval" in record:
                        send(EvalFinished(generation=generation, record=record["eval"]))
                    else:
                        send(EvalScoreFound(generation=generation, record=record["scored"]))

    def close(self) -> None:
        """Send the pending records, and end the thread."""
        self._ended.set()
        self._has_unsent.set()
        with contextlib.suppress(OSError):
            self.flush()
        self._thread.join()

    def _flush_often(self) -> None:
        # If this thread fails, the process exits: otherwise, steps would silently be missing from
        # the log.
        try:
            while not self._ended.is_set():
                self._has_unsent.wait()
                # Cleared first, so that a record that arrives during the flush sets the event
                # again.
                self._has_unsent.clear()
                with contextlib.suppress(OSError):
                    self.flush()
                self._ended.wait(BUSY_FLUSH_EVERY_S if self._are_cores_busy() else FLUSH_EVERY_S)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def _is_after(record: KeptRecord, step: int) -> bool:
    """Return True if a record may be missing from a log that ends with the record of ``step``."""
    return bool(record["step"] > step or (record["step"] == step and not _is_of_step(record)))


def _is_of_step(record: KeptRecord) -> bool:
    return "eval" not in record and "scored" not in record


class BusyCores:
    """Measure whether all cores are busy and whether this process helps to keep them busy.

    Args:
        now_s: Returns the time, in seconds.
        own_s: Returns the processor time of this process, in seconds.
        busy_percent: Returns the busy share of all cores since the last call, in percent.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] = time.process_time,
        busy_percent: Callable[[], float] = psutil.cpu_percent,
    ) -> None:
        self._now_s, self._own_s, self._busy_percent = now_s, own_s, busy_percent
        self._since_s, self._own_since_s = now_s(), own_s()
        self._are_busy = False

    def are_busy(self) -> bool:
        """Return the result for the last fraction of a second."""
        now_s = self._now_s()
        elapsed_s = now_s - self._since_s
        if elapsed_s < WINDOW_S:
            return self._are_busy
        own_s, idle = self._own_s(), 1 - self._busy_percent() / 100
        own_cores = (own_s - self._own_since_s) / elapsed_s
        self._since_s, self._own_since_s = now_s, own_s
        if elapsed_s <= MAX_WINDOW_S:
            self._are_busy = own_cores >= MIN_OWN_CORES and idle <= MAX_IDLE
        return self._are_busy
