"""Report how this rank spends its time: steps, evaluations and checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.feature import Step, StepFeature
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.times import StepTimes
from etrain_jupyter.wire.messages import RankTimesMeasured

FIRST_REPORT_S = 2.5
"""Interval before the first report of a generation. It is then doubled, up to
``REPORT_EVERY_S``."""
REPORT_EVERY_S = 30.0
"""Longest interval between two reports."""
RANKS_PER_INTERVAL = 250
"""In a larger generation, all intervals grow with the number of ranks, which bounds the number of
reports per second."""
EPOCH_REPORT_S = 10.0
"""Minimum interval before a report at the end of an epoch; shorter epochs share one report."""

_TASKS = Path("/proc/self/task")


class CoreWait:
    """Measure how long the current thread was ready to run but had no core, as Linux reports it.

    A thread that computes waits for a core if the machine has more busy threads than cores. A
    thread that sleeps, or waits for data or for another rank, does not.
    """

    def __init__(self) -> None:
        self._since = _read()

    def take(self) -> float | None:
        """Return the seconds since the last call; None if the system does not report them."""
        before, self._since = self._since, _read()
        # The first call after a move to another thread has nothing to compare with.
        if before is None or self._since is None or before[0] != self._since[0]:
            return None
        return max(0.0, self._since[1] - before[1])


def _read() -> tuple[int, float] | None:
    """Return this thread and its total wait in seconds; None if the system does not report it."""
    # The file has three numbers: nanoseconds on a core, nanoseconds spent waiting for a core, and
    # how often the thread ran. Other systems and some containers do not have the file.
    thread = threading.get_native_id()
    try:
        text = (_TASKS / str(thread) / "schedstat").read_text(encoding="ascii")
        return thread, int(text.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class RankTimes(StepFeature):
    """Accumulates the times of this rank's steps between two reports."""

    def __init__(
        self, send: Send, more: Callable[[], Mapping[str, float]] = dict[str, float]
    ) -> None:
        self._send = send
        self._more = more
        """Returns additional fields of a report."""
        self._generation, self._rank, self._world_size = 0, 0, 1
        self._communication_s = 0.0
        """Exposed communication of the previous step in this generation."""
        self._step = 0
        self._stall_s = 0.0
        """Stall caused by the last checkpoint; reset after the next step."""
        self.last_step_s = 0.0
        """Duration of the last step in seconds, without checkpoints and evaluations."""
        self._interval_s = FIRST_REPORT_S
        self._core_wait = CoreWait()
        self._cpu_began_s = 0.0
        """Processor time of this process at the last report."""
        self._clear()

    def _clear(self) -> None:
        self._began_at = time.perf_counter()
        self._num_steps = self._samples = 0
        self._spent = dict.fromkeys(("elapsed_s", "evaluation_s", "checkpoint_s"), 0.0)
        self._spent |= vars(StepTimes())
        self._spent["wait_s"] = 0.0
        self._metrics_s: float | None = 0.0
        self._core_wait.take()
        self._cpu_began_s = time.process_time()

    def begin(self, group: RankGroup) -> None:
        """Begin a generation."""
        # If the previous generation failed before reporting its last steps, report them now, under
        # that generation's number.
        self.report()
        self._clear()
        self._interval_s = FIRST_REPORT_S
        self._generation, self._rank = group.generation, group.rank
        self._world_size = group.world_size
        # Ranks that have just joined have no previous step, so the first step reports no wait.
        self._communication_s = 0.0

    def num_fields(self, world_size: int) -> int:
        """Return the number of fields: the exposed communication of each rank's previous step."""
        return world_size

    def header_fields(self, step: Step, fields_F: NDArray[np.float64]) -> None:
        """Set this rank's exposed communication; each rank sets only its own entry."""
        fields_F[step.group.rank] = self._communication_s

    def after_report(self, step: Step) -> None:
        """Add a step."""
        # The last rank to reach the exchange waits for no other rank, so its exposed communication
        # is the transfer. Any additional time on another rank is a wait for the slowest rank.
        wait_s = self._communication_s - min(step.fields_of(self))
        self.add_step(
            step.number,
            step.times,
            samples=step.num_own,
            elapsed_s=step.elapsed_s,
            wait_s=wait_s,
            metrics_s=step.metrics_s,
        )
        self._communication_s = step.times.communication_s

    def add_step(
        self,
        step: int,
        times: StepTimes,
        *,
        samples: int,
        elapsed_s: float,
        wait_s: float = 0.0,
        metrics_s: float | None = 0.0,
    ) -> None:
        """Add a step.

        Args:
            step: Its number.
            times: Times of its parts.
            samples: Number of samples that this rank processed.
            elapsed_s: Time since the end of the last step or evaluation.
            wait_s: Time for which this rank waited for a slower rank in the previous step.
            metrics_s: Time in the cell's metric functions; None if it cannot be measured.
        """
        # elapsed_s of step 8, whose parts are in ``times``:
        #
        #     step 7 ends | checkpoint (_stall_s) | fetch, compute, sum, update | step 8 ends
        self._step, self._num_steps = step, self._num_steps + 1
        self._samples += samples
        # Avoid ``asdict``, because its copies would take half of the accounting's time.
        for name, seconds in vars(times).items():
            self._spent[name] += seconds
        # The step header carries the times of the previous step.
        self._spent["wait_s"] += wait_s
        if metrics_s is None or self._metrics_s is None:
            self._metrics_s = None
        else:
            self._metrics_s += metrics_s
        # ``add_checkpoint`` has already counted the checkpoint.
        self.last_step_s = max(0.0, elapsed_s - self._stall_s)
        self._spent["elapsed_s"] += self.last_step_s
        self._stall_s = 0.0

    def add_evaluation(self, seconds: float) -> None:
        """Add the time of an evaluation."""
        # The loop restarts its clock after an evaluation, so an earlier stall is not in the next
        # step's ``elapsed_s``.
        self._spent["evaluation_s"] += seconds
        self._stall_s = 0.0

    def add_checkpoint(self, seconds: float) -> None:
        """Add the time for which a checkpoint stalled training."""
        self._spent["checkpoint_s"] += seconds
        self._stall_s = seconds

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Add the duration of the context, in which the hooks of a boundary are called."""
        started_at = time.perf_counter()
        yield
        self.add_checkpoint(time.perf_counter() - started_at)

    def is_due(self, *, epoch_ends: bool) -> bool:
        """Return True if the interval since the last report has elapsed."""
        passed_s = time.perf_counter() - self._began_at
        passed_s /= max(1.0, self._world_size / RANKS_PER_INTERVAL)
        # The end of an epoch is a natural place to report, unless epochs are very short.
        if epoch_ends:
            return passed_s >= min(EPOCH_REPORT_S, self._interval_s)
        return passed_s >= self._interval_s

    def report(self) -> None:
        """Report the accumulated times and reset them."""
        if self._num_steps or self._spent["evaluation_s"]:
            core_wait_s = self._core_wait.take()
            record = {
                "rank": self._rank,
                "world_size": self._world_size,
                "step": self._step,
                "num_steps": self._num_steps,
                "samples": self._samples,
                **{name: round(seconds, 6) for name, seconds in self._spent.items()},
                "metrics_s": None if self._metrics_s is None else round(self._metrics_s, 6),
                "core_wait_s": None if core_wait_s is None else round(core_wait_s, 6),
                "cpu_s": round(time.process_time() - self._cpu_began_s, 6),
                **self._more(),
            }
            self._send(RankTimesMeasured(generation=self._generation, record=record))
            self._interval_s = min(2 * self._interval_s, REPORT_EVERY_S)
        self._clear()
