"""Time variants of a step between the steps of a running job, on a copy of its state.

Rounds alternate with steps of the job itself, so that a change of the machine's load affects both
alike::

    step header with rank 0's request
    | trial steps of each variant, undone | steps of the job | trial steps | steps of the job | ...

The samples of the next step are fetched once, for the trials and then for the step, so the order
of the samples does not change. A rank that dies ends the generation as it would within a step:
the others restore their state, and the experiment is abandoned.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import NoReturn

import psutil
import torch

from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.trainer.control.device_errors import device_error_in
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.data import Delivered
from etrain_jupyter.trainer.gradients.step import Gradients, Step
from etrain_jupyter.trainer.group.process_group import CommunicationError, RankGroup
from etrain_jupyter.trainer.loop.trial_steps import (
    COSTS,
    FACTOR,
    TrialSteps,
    copy_batches,
)
from etrain_jupyter.trainer.loop.update import Update
from etrain_jupyter.trainer.micro_batch import free_memory, in_gib, memory_of
from etrain_jupyter.trainer.places import Places
from etrain_jupyter.trainer.state.backup import num_state_bytes, restored
from etrain_jupyter.trainer.state.running_buffers import RunningBuffers
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.wire.messages import ExperimentEnded, RequestExperiment, TextLogged

EXPERIMENT_FAILED = "an experiment failed"
"""Failure of a generation in which a trial step raised."""
NUM_ROUNDS = 8
ROUND_S = 0.05
"""Minimum duration of the trial steps of one variant in a round, unless the limit is reached."""
MAX_STEPS = 20
"""Maximum number of trial steps of one variant in a round."""
MIN_STEPS = 3
NOT_MEASURED = 0.0
"""Time of a variant that cannot be tried."""
MARGIN = 1.2
"""Factor for the memory of a backup."""
SETTLE_STEPS = 2
"""Steps of the job after a round that do not count: their samples were fetched before or during
the round."""


@dataclass(kw_only=True)
class _Active:
    """An experiment in progress; the same on all ranks."""

    variants: tuple[str, ...]
    left_out: tuple[int, ...]
    seconds: float
    num_steps: int
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds of a step of each variant, by round."""
    own_s: list[float] = field(default_factory=list)
    """Seconds of a step of the job, by round."""
    data_s: list[float] = field(default_factory=list)
    window: list[tuple[float, float]] = field(default_factory=list)
    """``step_s`` and ``data_s`` of the job's steps since the last round."""
    num_skipped: int = 0
    stall_s: float = 0.0

    @property
    def is_round_due(self) -> bool:
        return len(self.own_s) == len(self.rounds)

    @property
    def is_complete(self) -> bool:
        # Another round takes as long as the mean of the previous ones.
        mean_s = self.stall_s / max(1, len(self.rounds))
        is_over = len(self.rounds) >= NUM_ROUNDS or self.stall_s + mean_s > self.seconds
        return bool(self.rounds) and self.is_round_due and is_over

    def add_step(self, step_s: float, data_s: float, *, num_settling: int) -> None:
        if self.is_round_due:
            return
        if self.num_skipped < num_settling:
            self.num_skipped += 1
            return
        self.window.append((step_s, data_s))
        if len(self.window) == self.num_steps:
            self.own_s.append(fmean(one for one, _ in self.window))
            self.data_s.append(fmean(one for _, one in self.window))
            self.window, self.num_skipped = [], 0


class Experiments:
    """The experiments of one rank, at most one at a time.

    Args:
        update: The update of the job's steps.
        change_pending: Set if this rank knows of a planned change, which ends a round.
    """

    def __init__(
        self,
        state: TrainState,
        update: Update,
        *,
        send: Send,
        places: Places,
        change_pending: threading.Event,
    ) -> None:
        self._state = state
        self._update = update
        self._send = send
        self._places = places
        self._change_pending = change_pending
        self._requested: RequestExperiment | None = None
        """The newest request; rank 0's counts."""
        self._current: RequestExperiment | None = None
        self._active: _Active | None = None

    # --- control thread ---

    def request(self, message: RequestExperiment) -> None:
        """Begin an experiment after the next step. Called by the control thread."""
        self._requested = message

    # --- main thread ---

    @property
    def is_requested(self) -> bool:
        """True if this rank has received a request that no experiment has served."""
        return self._requested is not None and self._active is None

    @property
    def is_active(self) -> bool:
        """True while an experiment is in progress; the same on all ranks."""
        return self._active is not None

    def abandon(self, group: RankGroup, reason: str) -> None:
        """End the experiment in progress, or a request, because the generation ends."""
        if self._requested is not None:
            self._current, self._requested = self._requested, None
        if self._current is not None:
            self._report(group, reason)

    def after_step(
        self,
        step: Step,
        gradients: Gradients,
        *,
        moving: RunningBuffers,
        step_s: float,
        data_s: float,
    ) -> Iterator[Delivered] | None:
        """Begin, continue or complete an experiment at a step boundary.

        Args:
            step: The step that has been committed.
            gradients: The generation's gradients.
            moving: The running buffers.
            step_s: Duration of the step.
            data_s: Part of it: waiting for samples.

        Returns:
            The batches from the next step on if trial steps were made; otherwise None.

        Raises:
            CommunicationError: A peer is lost, or a trial step failed on this rank.
        """
        group = step.group
        if step.header.is_experiment_requested and self._active is None:
            self._begin(group, step_s)
        active = self._active
        if active is None:
            return None
        num_loaders = self._state.config.data.num_workers
        # The last step of an epoch has fewer samples.
        if step.span.samples == self._state.config.batch.size(group.world_size):
            active.add_step(step_s, data_s, num_settling=SETTLE_STEPS + 2 * num_loaders)
        if active.is_complete:
            self._report(group, "")
            return None
        span = self._next_full_span(step)
        if not active.is_round_due or span is None:
            return None
        return self._try_on(span, active, step, gradients=gradients, moving=moving)

    def _try_on(
        self,
        span: StepRange,
        active: _Active,
        step: Step,
        *,
        gradients: Gradients,
        moving: RunningBuffers,
    ) -> Iterator[Delivered]:
        # The trial steps use copies of the next step's batches, which the job's own step uses, too.
        group = step.group
        parts = gradients.parts(span)
        fetched = list(itertools.islice(step.batches, len(parts)))
        rest = itertools.chain(fetched, step.batches)
        try:
            trials = TrialSteps(
                state=self._state,
                update=self._update,
                group=group,
                gradients=gradients,
                moving=moving,
                places=self._places,
                span=span,
                batches=copy_batches(fetched),
                left_out=active.left_out,
            )
            self._run_round(active, trials)
        except CommunicationError:
            raise
        except Exception as exc:
            if device_error_in(exc) is not None:
                raise
            self._give_up(group, exc)
        return rest

    def _next_full_span(self, step: Step) -> StepRange | None:
        if self._state.is_done:
            return None
        size = self._state.config.batch.size(step.group.world_size)
        span = self._state.plan.span(self._state.position, size)
        return span if span.samples == size else None

    def _begin(self, group: RankGroup, step_s: float) -> None:
        # Only rank 0's request counts: another rank may have received a different one.
        message, self._requested = self._requested, None
        names = list(COSTS)
        spec = torch.zeros(4 + group.world_size, dtype=torch.float64)
        if group.rank == 0 and message is not None:
            self._current = message
            spec[0] = sum(1 << names.index(name) for name in message.variants)
            spec[1], spec[2] = message.seconds, step_s
            for rank in message.left_out:
                if 0 <= rank < group.world_size:
                    spec[4 + rank] = 1
        workload = self._state.workload
        needed = MARGIN * num_state_bytes(workload)
        # Ranks on CPUs may share a machine.
        sharing = 1 if workload.device.type == "cuda" else group.world_size
        free = memory_of(workload.device).free
        spec[3] = float(needed * sharing > free)
        group.all_reduce(spec).wait()
        bits, seconds, slowest_s, num_short = spec[:4].tolist()
        variants = tuple(name for i, name in enumerate(names) if int(bits) >> i & 1)
        cost_s = slowest_s * sum(COSTS[name] for name in variants)
        # The first step of each variant does not count.
        num_steps = math.floor(seconds / MIN_STEPS / max(cost_s, 1e-9)) - 1
        wanted = min(MAX_STEPS, max(MIN_STEPS, math.ceil(ROUND_S / max(slowest_s, 1e-9))))
        if num_short:
            need = f"{in_gib(int(needed))} per worker"
            self._report(group, f"a copy of the state does not fit into memory ({need})")
        elif workload.shards is not None:
            mode = workload.shards.mode
            self._report(group, f"shard: {mode} has no copy of the state to return to")
        elif self._state.config.compression == "powersgd":
            self._report(group, "compression: powersgd carries a residual from step to step")
        elif num_steps < 1:
            self._report(
                group,
                f"trial steps would hold training for more than {seconds:g} s, because a step "
                f"takes {slowest_s:.2g} s",
            )
        else:
            self._active = _Active(
                variants=variants,
                left_out=tuple(i for i, flag in enumerate(spec[4:].tolist()) if flag),
                seconds=seconds,
                num_steps=min(num_steps, wanted),
            )

    def _report(self, group: RankGroup, reason: str) -> None:
        message, active = self._current, self._active
        self._current = self._active = None
        if message is None or group.rank != 0:
            return
        num_rounds = min(len(active.own_s), len(active.rounds)) if active is not None else 0
        record = {
            "request": message.request,
            "cause": message.cause,
            "step": self._state.step,
            "world_size": group.world_size,
            "variants": list(active.variants if active is not None else message.variants),
            "times_s": [],
            "data_s": 0.0,
            "num_steps": active.num_steps if active is not None else 0,
            "stall_s": round(active.stall_s, 6) if active is not None else 0.0,
            "reason": reason,
        }
        if active is not None and num_rounds:
            rows = zip(active.own_s, active.rounds, strict=False)
            record["times_s"] = [round(one, 9) for own, row in rows for one in (own, *row)]
            record["data_s"] = round(fmean(active.data_s), 9)
        self._send(ExperimentEnded(generation=group.generation, record=record))

    # --- a round ---

    def _run_round(self, active: _Active, trials: TrialSteps) -> None:
        began_at = time.perf_counter()
        # Alternate the order, so that a drift of the machine's load affects all variants.
        order = active.variants[:: -1 if len(active.rounds) % 2 else 1]
        found: dict[str, float] = {}
        reason = ""
        with restored(self._state.workload, self._mark_torn):
            for variant in order:
                found[variant], reason = self._measure(variant, active, trials)
                if reason:
                    break
        free_memory_if_cuda(self._state.workload.device)
        active.stall_s += self._share_duration(trials.group, time.perf_counter() - began_at)
        if reason:
            self._report(trials.group, reason)
        else:
            active.rounds.append([found[variant] for variant in active.variants])

    def _mark_torn(self, is_torn: bool) -> None:
        # A rank whose state cannot be restored receives another rank's.
        self._update.is_torn = is_torn

    def _share_duration(self, group: RankGroup, seconds: float) -> float:
        # All ranks must agree on when the experiment is complete, so rank 0's clock counts.
        value = torch.tensor([seconds if group.rank == 0 else 0.0], dtype=torch.float64)
        group.all_reduce(value).wait()
        return float(value)

    def _measure(self, variant: str, active: _Active, trials: TrialSteps) -> tuple[float, str]:
        # Returns the seconds of a step on the slowest rank, and why the round must end.
        is_large = variant in ("large", "wide")
        if is_large and (reason := self._agree(trials, self._try_large(trials))[1]):
            self._log_once(trials.group, variant, reason)
            return NOT_MEASURED, ""
        trials.run(variant)  # caches are filled, memory is allocated
        self._agree(trials, "")
        began_at = time.perf_counter()
        for _ in range(active.num_steps):
            trials.run(variant)
        if trials.state.workload.device.type == "cuda":
            torch.cuda.synchronize()
        return self._agree(trials, "", (time.perf_counter() - began_at) / active.num_steps)

    def _log_once(self, group: RankGroup, variant: str, reason: str) -> None:
        is_first = self._active is not None and not self._active.rounds
        if group.rank == 0 and is_first:
            text = f"experiment: {variant} was not measured, because {reason}"
            self._send(TextLogged(level="info", text=text))

    def _give_up(self, group: RankGroup, exc: Exception) -> NoReturn:
        # The other ranks wait for this one in a collective:
        #
        #     this rank   trial step raises ── restore ── abort ── left ──────┐
        #     others      waiting in all_reduce ── failed ── restore ── left ─┴─ next generation
        error = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        text = f"experiment: a trial step raised {error}; training continues without it"
        self._send(TextLogged(level="warning", text=text))
        group.abort(EXPERIMENT_FAILED)
        raise CommunicationError(EXPERIMENT_FAILED) from None

    def _try_large(self, trials: TrialSteps) -> str:
        workload = trials.state.workload
        if workload.device.type != "cuda":
            # A process that needs more than the free memory is killed rather than refused.
            used = psutil.Process().memory_info().rss * FACTOR * trials.group.world_size
            if used > memory_of(workload.device).free:
                return "there may not be enough memory for a batch four times as large"
        try:
            trials.try_large()
        except Exception as exc:
            if device_error_in(exc) is not None:
                raise
            return f"{type(exc).__name__}: {exc}".partition("\n")[0]
        return ""

    def _agree(self, trials: TrialSteps, error: str, own_s: float = 0.0) -> tuple[float, str]:
        """Wait for all ranks; return the time of the slowest one and a reason to end the round."""
        group = trials.group
        values = torch.zeros(2 + group.world_size, dtype=torch.float64)
        values[0] = bool(error)
        values[1] = self._change_pending.is_set()
        values[2 + group.rank] = own_s
        group.all_reduce(values).wait()
        num_failed, num_pending, *times = values.tolist()
        if num_failed:
            return math.nan, error or "a trial step failed on another worker"
        return max(times), "the workers are about to change" if num_pending else ""


def free_memory_if_cuda(device: torch.device) -> None:
    """Return the memory of the trial steps to the device, which another process may need."""
    if device.type == "cuda":
        free_memory()
