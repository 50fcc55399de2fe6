"""What this rank's time was spent on, told now and then; evaluations and checkpoints apart."""

from __future__ import annotations

import time
from dataclasses import asdict

from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.gradients.stopwatch import StepTimes
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.wire.messages import RankTimesMeasured

TELL_FIRST_S = 2.5
"""The first time of a generation; each later one after twice as long, up to ``TELL_EVERY_S``."""
TELL_EVERY_S = 30.0
TELL_EPOCH_AFTER_S = 10.0
"""At the end of an epoch, if so much has passed; short epochs are told of together."""


class RankTimes:
    """Adds up the times of this rank's steps until it tells them.

    Args:
        send: Sends a message to the coordinator.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._generation, self._rank, self._world_size = 0, 0, 1
        self._step = 0
        self._stall_s = 0.0
        """Of the last checkpoint, if no step has come after it."""
        self.last_step_s = 0.0
        """How long the last step took, without checkpoints and evaluations."""
        self._patience_s = TELL_FIRST_S
        self._clear()

    def _clear(self) -> None:
        self._began_at = time.perf_counter()
        self._num_steps = self._samples = 0
        self._spent = dict.fromkeys(("elapsed_s", "evaluation_s", "checkpoint_s"), 0.0)
        self._spent |= asdict(StepTimes())

    def begin(self, group: RankGroup) -> None:
        """Begin a generation; what is left of one that broke is told as it was."""
        self.tell()
        self._clear()
        self._patience_s = TELL_FIRST_S
        self._generation, self._rank = group.generation, group.rank
        self._world_size = group.world_size

    def add_step(self, step: int, times: StepTimes, *, samples: int, elapsed_s: float) -> None:
        """Add a step.

        Args:
            step: Its number.
            times: Its parts.
            samples: How many of them this rank passed.
            elapsed_s: All of its time since the last step or evaluation: also what lies between
                the parts, and a checkpoint.
        """
        self._step, self._num_steps = step, self._num_steps + 1
        self._samples += samples
        for name, seconds in asdict(times).items():
            self._spent[name] += seconds
        self.last_step_s = max(0.0, elapsed_s - self._stall_s)
        self._spent["elapsed_s"] += self.last_step_s
        self._stall_s = 0.0

    def add_evaluation(self, seconds: float) -> None:
        """Add the time of an evaluation."""
        self._spent["evaluation_s"] += seconds
        self._stall_s = 0.0

    def add_checkpoint(self, seconds: float) -> None:
        """Add time in which training stood still for a checkpoint."""
        self._spent["checkpoint_s"] += seconds
        self._stall_s = seconds

    def is_due(self, *, epoch_ends: bool) -> bool:
        """Whether nothing was told for long."""
        passed_s = time.perf_counter() - self._began_at
        if epoch_ends:
            return passed_s >= min(TELL_EPOCH_AFTER_S, self._patience_s)
        return passed_s >= self._patience_s

    def tell(self) -> None:
        """Tell what has been added up, and begin anew."""
        if self._num_steps or self._spent["evaluation_s"]:
            record = {
                "rank": self._rank,
                "world_size": self._world_size,
                "step": self._step,
                "num_steps": self._num_steps,
                "samples": self._samples,
                **{name: round(seconds, 6) for name, seconds in self._spent.items()},
            }
            self._send(RankTimesMeasured(generation=self._generation, record=record))
            self._patience_s = min(2 * self._patience_s, TELL_EVERY_S)
        self._clear()
