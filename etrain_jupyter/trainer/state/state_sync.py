"""Give every rank of a forming generation the newest state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from etrain_jupyter.rules.membership.stimuli import NO_PROGRESS, Progress
from etrain_jupyter.trainer.control.faults import FaultInjector
from etrain_jupyter.trainer.control.reporter import Reporter
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.sharding.shard_sync import (
    NO_STEP,
    RankReport,
    ShardsLostError,
    ShardSync,
)
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state.capture import put_state, take_state
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.transfer import Transferred, receive_state, send_state
from etrain_jupyter.wire.messages import JoinGeneration, TextLogged
from etrain_jupyter.wire.progress_page import ProgressPage


class StateSync:
    """This rank's state, and its exchange with the other ranks.

    Args:
        loop: Trains the state.
        has_state: True if the rank has a state that other ranks may continue from.
    """

    def __init__(
        self,
        loop: TrainLoop,
        reporter: Reporter,
        *,
        faults: FaultInjector,
        page: ProgressPage | None,
        has_state: bool = False,
    ) -> None:
        self._loop = loop
        self._reporter = reporter
        self._faults = faults
        self._page = page
        self.has_state = has_state
        self.is_fresh = True
        """True while the model has the initial weights from the notebook's code."""

    @property
    def progress(self) -> Progress:
        """Progress of this rank's state."""
        # The rank with the highest progress becomes the next rank 0, which sends its state to the
        # others. The progress of a rank without a state must not count.
        return self._loop.progress if self.has_state else NO_PROGRESS

    def drop(self) -> None:
        """Forget the state, whose tensors are about to be overwritten."""
        self.has_state = self.is_fresh = False

    def free(self) -> None:
        """Forget the state, and free the memory of the optimizer's tensors."""
        self.drop()
        workload = self._loop.workload
        workload.optimizer.state.clear()
        if workload.shards is not None:
            workload.shards.drop()

    def drop_torn(self) -> None:
        """Forget a state of which some weights have been updated and others have not."""
        # The optimizer raised midway, and there is no copy of the old weights. The next generation
        # sends the state to this rank.
        steps = self._loop.steps
        if steps.is_torn:
            self.has_state = steps.in_step = steps.is_torn = False

    def take(self) -> tuple[dict[str, Any], Tensors]:
        """Return the header and the tensors of the state.

        Raises:
            StateError: If it cannot be sent or saved.
        """
        workload = self._loop.workload
        header, tensors = take_state(workload.model, workload.optimizer, workload.extras)
        return {"counters": self._loop.state.counters(), **header}, tensors

    def share(self, group: RankGroup, message: JoinGeneration, step: int) -> Transferred | None:
        """Send or receive the state; every rank must call it.

        Args:
            group: The generation's process group.
            message: Names the ranks that are behind.
            step: The step to which planned faults refer.

        Returns:
            The size and duration of the transfer; None if nothing was transferred.

        Raises:
            CommunicationError: A peer is lost.
        """
        shards = self._loop.workload.shards
        if shards is None:
            moved = self._share_whole(group, message, step)
        else:
            moved = self._share_shards(shards, group, message, step)
        self.has_state = True
        return moved

    def _share_whole(
        self, group: RankGroup, message: JoinGeneration, step: int
    ) -> Transferred | None:
        behind = list(message.behind)
        if not behind:
            return None
        takes_part = group.rank in (0, *behind)
        if takes_part:
            self._faults.at("sync", rank=group.rank, step=step)
        # Count it on every rank; otherwise, ranks that do not take part would look like stragglers.
        if self._page is not None:
            self._page.count_collective()
        if not takes_part:
            return None
        if group.rank == 0:
            return self._send_state(group, message, behind)
        # If every other rank is behind, the sender has the only copy of the newest state. If it
        # dies, the newest remaining state is that of a rank that is behind.
        keep = self.has_state and group.world_size == 1 + len(behind)
        return self._receive_state(group, behind, keep=keep, on_overwrite=self.drop)

    def _send_state(
        self, group: RankGroup, message: JoinGeneration, behind: Sequence[int]
    ) -> Transferred:
        header, tensors = self.take()
        # If rank 0 dies before it sends these records to the log, any receiver can send them.
        header["records"] = self._reporter.records_after(message.logged_step)
        return send_state(group, header, tensors, behind)

    def _receive_state(
        self,
        group: RankGroup,
        behind: Sequence[int],
        *,
        keep: bool,
        on_overwrite: Callable[[], None],
    ) -> Transferred:
        workload = self._loop.workload
        header, tensors, moved = receive_state(
            group,
            workload.model,
            behind,
            optimizer=workload.optimizer,
            extras=workload.extras,
            keep=keep,
            on_overwrite=on_overwrite,
        )
        put_state(workload.model, workload.optimizer, header, tensors, workload.extras)
        self._loop.state.set_counters(header["counters"])
        self._reporter.adopt(header["records"])
        return moved

    def _share_shards(
        self, shards: ShardedOptimizer, group: RankGroup, message: JoinGeneration, step: int
    ) -> Transferred | None:
        # See ``shard_sync`` for the order, and for the cases in which state is lost.
        loop, steps = self._loop, self._loop.steps
        started = time.monotonic()
        self._faults.at("sync", rank=group.rank, step=step)
        sync = ShardSync(group, shards, loop.places.beat)
        has_state = self.has_state or (message.restore and group.rank == 0)
        report = RankReport(
            step=loop.step if has_state else NO_STEP,
            num_evals=loop.state.num_evals,
            is_prepared=steps.prepared is not None,
            is_stale=shards.is_stale,
            spans=tuple(shards.spans),
        )
        try:
            plan = sync.agree(report, is_restored=message.restore)
        except ShardsLostError as exc:
            if group.rank == 0:
                self._reporter.send(TextLogged(level="warning", text=str(exc)))
            steps.drop_prepared()
            self.drop()
            raise
        if group.rank in plan.completing:
            steps.complete_prepared()
        steps.drop_prepared()
        is_holder = group.rank in plan.held
        if not is_holder:
            shards.drop()
        sync.repair(plan)
        if is_holder:
            steps.finish()
        shards.is_stale = False
        num_bytes = 0
        if group.rank == 0 and plan.behind:
            num_bytes = self._send_state(group, message, plan.behind).num_bytes
        elif group.rank in plan.behind:
            # A holder receives weights that it already has, with newer counters. After a restore,
            # however, it has only its part of the optimizer's state.
            has_weights = is_holder and not message.restore
            drop = (lambda: None) if has_weights else self.drop
            self._receive_state(group, plan.behind, keep=False, on_overwrite=drop)
        num_bytes += sync.divide(plan)
        shards.connect(group)
        if not num_bytes:
            return None
        return Transferred(num_bytes=num_bytes, duration_s=time.monotonic() - started)
