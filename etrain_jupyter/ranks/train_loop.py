"""The step: forward, backward, one exact average over samples, one update. The only commit point.

Shapes: ``P`` parts (micro steps) of this rank's share, ``M`` metrics, ``W`` ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.elastic import batch_plan, ledger
from etrain_jupyter.elastic.stimuli import Progress
from etrain_jupyter.ranks.process_group import Pending, RankGroup
from etrain_jupyter.ranks.schedule import Every, WorkPlan
from etrain_jupyter.ranks.state import digest_of
from etrain_jupyter.ranks.workload import Workload, seed_all

Send = Callable[[dict[str, Any]], None]

# torch 2.13 renamed the flag. Buffers are averaged by ``_start_moves`` instead.
_DDP_FLAGS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in _DDP_FLAGS
    else {"broadcast_buffers": False}
)

PENDING, EVAL_ASKED, CHECKSUM, COUNT, LOSS = range(5)
"""Places in the vector that is summed over the ranks in every step; the metrics follow."""


class TrainLoop:
    """Steps a workload through its plan, generation after generation."""

    def __init__(self, workload: Workload, config: TrainConfig, plan: WorkPlan, send: Send) -> None:
        self.workload = workload
        self.config = config
        self.plan = plan
        self.step = 0
        self.num_evals = 0
        self.change_pending = threading.Event()
        """Set by the control thread; carried to all ranks by the next step."""
        self.in_step = False
        """Whether a step has been begun and not committed."""
        self._send = send
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        self._moving: list[torch.Tensor] = []
        self._has_unused = False
        self._eval_every = Every(config.eval_every, plan)
        self.num_timed_evals = 0
        """Evaluations that were asked for by rank 0's clock so far."""
        self._committed_at = 0.0
        self.after_step: list[Callable[[RankGroup], None]] = []
        """Called at each step boundary, for example to save a checkpoint."""

    def counters(self) -> dict[str, int]:
        """Return what belongs to the state besides weights and optimizer."""
        names = ("step", "num_evals", "num_timed_evals")
        return {name: getattr(self, name) for name in names}

    def set_counters(self, counters: dict[str, int]) -> None:
        """Take over another trainer's ``counters``."""
        for name, value in counters.items():
            setattr(self, name, int(value))

    @property
    def progress(self) -> Progress:
        """Committed steps and evaluations done."""
        return (self.step, self.num_evals)

    # --- one generation ---

    def wrap(self, group: RankGroup) -> nn.Module:
        """Return the model as this generation's ranks run it."""
        if group.world_size == 1:
            return self.workload.model
        module = DistributedDataParallel(
            self.workload.model,
            init_sync=False,
            find_unused_parameters=self._has_unused,
            **_NO_BUFFER_SYNC,
        )
        # A lambda, because torch insists that annotations be classes and ours are strings.
        module.register_comm_hook(None, lambda _, bucket: group.ddp_hook(bucket))
        return module

    def run(self, group: RankGroup, module: nn.Module) -> str:
        """Step until a change is pending (``planned``) or nothing is left (``done``).

        Raises:
            CommunicationError: A peer is lost. The step in flight is undone.
            Exception: The notebook's code raised. The step in flight is undone.
        """
        batches = self.workload.train.batches(self._shares(group))
        self._committed_at = time.perf_counter()
        while True:
            if self._is_eval_due():
                self._evaluate(group)
            if self.step >= self.plan.total_steps:
                return "done"
            is_pending = self._train_step(group, module, batches)
            self._tell_digest(group)
            for call in self.after_step:
                call(group)
            if is_pending:
                return "planned"

    def _shares(self, group: RankGroup) -> Iterator[NDArray[np.int64]]:
        """Yield the sample indices of every part of this rank's steps, from the present step on."""
        for step in range(self.step, self.plan.total_steps):
            span = self.plan.span(step)
            order = self._order_of(span.epoch)
            for part in _parts(self._plan_of(span, group), group.rank):
                yield order[span.first + part.start : span.first + part.stop]

    def _plan_of(self, span: ledger.StepRange, group: RankGroup) -> batch_plan.StepPlan:
        return batch_plan.plan_step(
            count=span.samples,
            world_size=group.world_size,
            micro_batch_size=self.config.batch.micro_batch_size,
            min_share=min(2, max(1, self.plan.global_batch_size // group.world_size)),
        )

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            order = ledger.epoch_order(
                seed=self.config.seed, epoch=epoch, num_samples=self.plan.num_train
            )
            self._order = (epoch, order)
        return self._order[1]

    # --- one step ---

    def _train_step(self, group: RankGroup, module: nn.Module, batches: Iterator[Any]) -> bool:
        span = self.plan.span(self.step)
        buffers = [b.clone() for b in self._moving]
        self.in_step = True
        try:
            stats, moves = self._forward_backward(group, module, batches, span, buffers)
        except BaseException:
            self._undo(buffers)
            raise
        if moves is not None:
            self._apply_moves(buffers, moves)
        if self.config.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.workload.model.parameters(), self.config.clip_grad_norm)
        self.workload.optimizer.step()
        self.workload.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.num_timed_evals += bool(stats[EVAL_ASKED] > 0)
        self.in_step = False
        self._tell_step(group, span, stats)
        return bool(stats[PENDING] > 0)

    def _forward_backward(
        self,
        group: RankGroup,
        module: nn.Module,
        batches: Iterator[Any],
        span: ledger.StepRange,
        buffers: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the gradient of the step's mean loss; return statistics and buffers' moves."""
        plan = self._plan_of(span, group)
        parts = _parts(plan, group.rank)
        # Without samples of its own a rank passes somebody else's, to take part, and counts for
        # nothing.
        counts = plan.counts[group.rank] > 0
        group.contributes = counts
        seed_all(self.config.seed, step=self.step + 1, rank=group.rank)
        sums_M = torch.zeros(LOSS + 1 + len(self.workload.metrics), dtype=torch.float64)
        stats = moved = None
        for number in range(1, len(parts) + 1):
            is_last = number == len(parts)
            with contextlib.nullcontext() if is_last else _no_sync(module):
                indices, batch = next(batches)
                loss, metrics = self.workload.forward(module, batch, len(indices), span.samples)
                if counts:
                    # What was delivered, not what was planned: the audit compares the two.
                    sums_M[CHECKSUM] += float(ledger.checksum_of(indices))
                    sums_M[COUNT] += float(len(indices))
                    sums_M[LOSS:] += torch.stack([loss.detach().double().cpu(), *metrics])
                if is_last:
                    # Started before the backward pass, which hides them.
                    self._ask(sums_M, group)
                    stats = group.all_reduce(sums_M)
                    weight = plan.counts[group.rank] / span.samples
                    moved = self._start_moves(group, buffers, weight)
                loss.backward()  # type: ignore[no-untyped-call]
        group.raise_if_failed()
        assert stats is not None
        stats.wait()
        if moved is None:
            return sums_M, None
        moved[1].wait()
        return sums_M, moved[0]

    def _ask(self, sums: torch.Tensor, group: RankGroup) -> None:
        """Write into the statistics what this rank asks all others to do after the step."""
        sums[PENDING] = float(self.change_pending.is_set())
        sums[EVAL_ASKED] = float(group.rank == 0 and self._eval_every.is_time_over())

    def _start_moves(
        self, group: RankGroup, before: list[torch.Tensor], weight: float
    ) -> tuple[torch.Tensor, Pending] | None:
        """Start to average how buffers (BatchNorm's statistics) moved: all ranks keep the same.

        The moves are averaged, not the values: a buffer that did not move stays as it is to the
        last bit.
        """
        if not self._moving or group.world_size == 1:
            return None
        moves = [
            ((now.double() - old.double()) * weight).reshape(-1).cpu()
            for now, old in zip(self._moving, before, strict=True)
        ]
        flat = torch.cat(moves)
        return flat, group.all_reduce(flat)

    @torch.no_grad()
    def _apply_moves(self, before: list[torch.Tensor], flat: torch.Tensor) -> None:
        sizes = [b.numel() for b in before]
        for now, old, move in zip(self._moving, before, torch.split(flat, sizes), strict=True):
            value = old.double() + move.view_as(old).to(old.device)
            now.copy_(value if now.is_floating_point() else value.round())

    @torch.no_grad()
    def _undo(self, buffers: list[torch.Tensor]) -> None:
        for now, old in zip(self._moving, buffers, strict=True):
            now.copy_(old)
        self.workload.optimizer.zero_grad(set_to_none=True)

    def _tell_step(self, group: RankGroup, span: ledger.StepRange, stats: torch.Tensor) -> None:
        now = time.perf_counter()
        values = stats.tolist()
        record = {
            "step": self.step,
            "epoch": span.epoch,
            "first": span.first,
            "samples": int(values[COUNT]),
            "sample_checksum": int(values[CHECKSUM]),
            "loss": values[LOSS],
            "lr": float(self.workload.optimizer.param_groups[0]["lr"]),
            "world_size": group.world_size,
            "samples_per_s": span.samples / max(now - self._committed_at, 1e-9),
            "metrics": dict(zip(self.workload.metrics, values[LOSS + 1 :], strict=True)),
            "time": time.time(),
        }
        self._committed_at = now
        self._send({"op": "step", "generation": group.generation, "record": record})

    def _tell_digest(self, group: RankGroup) -> None:
        """At the end of each epoch and of the job, tell the weights' digest: ranks must agree."""
        if self.step % self.plan.steps_per_epoch and self.step != self.plan.total_steps:
            return
        digest = digest_of(self.workload.model)
        values = {"step": self.step, "rank": group.rank, "digest": digest}
        self._send({"op": "weights", "generation": group.generation, **values})

    # --- evaluation ---

    def _is_eval_due(self) -> bool:
        if self.workload.eval is None or not self.step:
            return False
        due = self._eval_every.times_until(self.step) + self.num_timed_evals
        if self.step == self.plan.total_steps and not self._eval_every.is_at(self.step):
            due += 1  # the last state is always evaluated
        return self.num_evals < due

    def _evaluate(self, group: RankGroup) -> None:
        """Go through the evaluation set once over all ranks, each sample on exactly one of them."""
        assert self.workload.eval is not None
        started = time.perf_counter()
        sums_M = torch.zeros(2 + len(self.workload.metrics), dtype=torch.float64)
        with _eval_mode(self.workload.model), torch.no_grad():
            for indices, batch in self.workload.eval.batches(self._eval_shares(group)):
                loss, metrics = self.workload.forward(
                    self.workload.model, batch, len(indices), self.plan.num_eval
                )
                sums_M[1:] += torch.stack([loss.double().cpu(), *metrics])
                sums_M[0] += len(indices)
                group.raise_if_failed()
        group.all_reduce(sums_M).wait()
        self.num_evals += 1
        self._eval_every.restart()
        self._committed_at = time.perf_counter()
        if group.rank == 0:
            self._tell_eval(group, sums_M.tolist(), time.perf_counter() - started)

    def _eval_shares(self, group: RankGroup) -> Iterator[list[int]]:
        mine = batch_plan.share_range(self.plan.num_eval, group.rank, group.world_size)
        size = self.config.batch.micro_batch_size or self.plan.global_batch_size
        for first in range(mine.start, mine.stop, size):
            yield list(range(first, min(first + size, mine.stop)))

    def _tell_eval(self, group: RankGroup, sums: list[float], duration_s: float) -> None:
        count, loss, *metrics = sums
        record = {
            "step": self.step,
            "epoch": (self.step - 1) // self.plan.steps_per_epoch,
            "samples": int(count),
            "loss": loss,
            "metrics": dict(zip(self.workload.metrics, metrics, strict=True)),
            "duration_s": duration_s,
            "time": time.time(),
        }
        self._send({"op": "eval", "generation": group.generation, "record": record})

    # --- before the first generation ---

    def warm_up(self) -> None:
        """Run one forward and backward pass and undo it: finds errors, and what a pass changes.

        Raises:
            Exception: Whatever the notebook's code raises on its own data.
        """
        model = self.workload.model
        buffers = list(model.buffers())
        before = [b.clone() for b in buffers]
        size = self.config.batch.micro_batch_size or self.plan.global_batch_size
        count = min(size, self.plan.num_train, max(2, self.plan.span(0).samples))
        share = self._order_of(0)[:count]
        _, batch = next(iter(self.workload.train.batches([share])))
        loss, _ = self.workload.forward(model, batch, count, count)
        loss.backward()  # type: ignore[no-untyped-call]
        trainable = [p for p in model.parameters() if p.requires_grad]
        self._has_unused = any(p.grad is None for p in trainable)
        self._moving = [
            now for now, old in zip(buffers, before, strict=True) if not torch.equal(now, old)
        ]
        with torch.no_grad():
            for now, old in zip(buffers, before, strict=True):
                now.copy_(old)
        self.workload.optimizer.zero_grad(set_to_none=True)


def _parts(plan: batch_plan.StepPlan, rank: int) -> list[range]:
    """Return the non-empty parts of a rank's share, as offsets within the step, shape ``(P,)``.

    A rank without samples gets the first part of rank 0's.
    """
    owner = rank if plan.counts[rank] else 0
    start = plan.starts[owner]
    shares = batch_plan.share_samples(plan.counts[owner], plan.num_micro_steps)
    parts = []
    for count in shares:
        if count:
            parts.append(range(start, start + count))
        start += count
    return parts if owner == rank else parts[:1]


def _no_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode and every module back into its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
