"""Save a trainer's state in the background, from a copy taken at a step boundary.

``CheckpointPolicy`` decides when to save, ``copy_state`` copies the state, and ``CheckpointWriter``
writes the copy in its thread. This module connects the three in the main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from etrain_jupyter.storage.checkpoints.base import CheckpointStore
from etrain_jupyter.trainer.boundary import Boundary, BoundaryHooks
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore
from etrain_jupyter.trainer.state.capture import take_state
from etrain_jupyter.trainer.state.checkpoint_policy import CheckpointPace, CheckpointPolicy
from etrain_jupyter.trainer.state.checkpoint_writer import (
    CheckpointWriter,
    CopyDone,
    CopyFailed,
    CopyPostponed,
    Slowdown,
    StoreListed,
)
from etrain_jupyter.trainer.state.job_checkpoints import JobCheckpoints, Writers
from etrain_jupyter.trainer.state.restoring import Restorer
from etrain_jupyter.trainer.state.sharded_write import ShardedWrite, ShardWriter, is_worth_it
from etrain_jupyter.trainer.state.staging import StagedFile
from etrain_jupyter.trainer.state.state_copy import StateCopy, copy_state
from etrain_jupyter.trainer.state.train_state import Mark, TrainState
from etrain_jupyter.wire.messages import CheckpointNotWritten, TextLogged
from etrain_jupyter.wire.progress_page import ProgressPage

KEEP_RECORDS = 100
"""Number of step records in a checkpoint. The checkpoint may become durable before these records
are in the log."""

CLOSE_LOG_AFTER_S = 5.0
"""After this many seconds, a trainer that is shutting down logs that it is waiting for its
checkpoint."""


class Checkpointer(BoundaryHooks):
    """Save checkpoints if this trainer is rank 0; otherwise help write them."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        state: TrainState,
        job_id: str,
        send: Send,
        records_after: Callable[[int], list[dict[str, Any]]] = lambda step: [],
        code_digest: str = "",
        starts: Collection[int] = (),
        page: ProgressPage | None = None,
    ) -> None:
        self._state = state
        self._send = send
        self._records_after = records_after
        self._code_digest = code_digest
        self._page = page
        self._checkpoints = JobCheckpoints(store, job_id, starts)
        every = state.config.checkpoint.every
        self._policy = CheckpointPolicy(every, state.plan, now=time.monotonic())
        self._slowdown = Slowdown()
        self._writer = CheckpointWriter(
            self._checkpoints, state, send=send, slowdown=self._slowdown, beat=self._beat_saving
        )
        self._shard_writer = ShardWriter(store, self._writer.count_written, self._beat)
        self._sharded: ShardedWrite | None = None
        self._was_writing = False
        """True if a checkpoint was being written when the newest step began."""
        self._num_bytes = 0
        """Size of the last copy; 0 if there is none yet."""
        self._spare: dict[str, StagedFile] = {}
        """Memory of the last copy written, for reuse by the next one."""
        self._unsaved_best: StateCopy | None = None
        """The best weights if they could not be written; this is the only copy."""
        self._retry_at = 0.0
        """Time of the next attempt to write them, a ``time.monotonic`` value."""
        self._durable: Writers = {}
        """Durable checkpoints that the writer reported in generation ``_durable_in``. The main
        thread never queries the store, which may be slow."""
        self._durable_in = 0
        self.restorer = Restorer(self._checkpoints, state, send=send, beat=self._beat)
        """Loads the job's checkpoints."""

    @property
    def pace(self) -> CheckpointPace:
        """Timer for ``checkpoint.every: auto``, set by the coordinator."""
        return self._policy.pace

    @property
    def starts(self) -> list[int]:
        """Step at which each generation of the job began, up to the current one."""
        return self._checkpoints.starts

    @starts.setter
    def starts(self, starts: list[int]) -> None:
        self._checkpoints.starts = starts

    # --- one generation ---

    def begin(self, group: RankGroup, board: BroadcastStore) -> None:
        """Begin a generation; ``board`` is its rendezvous store."""
        self._slowdown.begin_generation()
        self._was_writing = self._writer.is_busy
        self._sharded = ShardedWrite(
            board=board,
            rank=group.rank,
            world_size=group.world_size,
            is_divided=self._state.workload.shards is not None,
        )

    def leave(self) -> None:
        """End the generation; rank 0 then writes any files that the other ranks did not deliver."""
        if self._sharded is not None:
            self._sharded.close()
            self._sharded = None

    # --- what is due ---

    def request(self) -> None:
        """On rank 0, request a checkpoint at the next boundary. Can be called from any thread."""
        self._policy.request()

    def wants_save(self, before: Mark, after: Mark) -> bool:
        """Return True if all ranks should jointly write a checkpoint of the state after this step.

        Called on rank 0, within the step.
        """
        # All ranks must copy the state at the same boundary, so rank 0 requests the copy in the
        # header of the step before it. A checkpoint that rank 0 writes alone needs no agreement.
        if not self._is_sharding_worth_it() or self._writer.is_busy:
            return False
        return self._policy.is_due(before, after, is_rank_0=True, now=time.monotonic())

    def after_step(self, boundary: Boundary) -> None:
        """Start a checkpoint if it is due. The coordinator requests the job's last checkpoint."""
        # interval       due at 10          due at 20             due at 30
        # main thread    copy 10 ......     owed ...... copy 23   copy 30
        # writer              +-- write 10 -----------+    +- write 23 -+
        rank, generation = boundary.group.rank, boundary.group.generation
        # Read this before the results, so that no result is missing if the writer has finished.
        is_writing = self._writer.is_busy
        self._take_results()
        self._slowdown.take_step(boundary.step_s, is_writing=self._was_writing)
        self._was_writing = is_writing
        is_done = self._state.is_done
        # Rank 0 does not start a checkpoint after the last step either; see below.
        if boundary.is_save_agreed and rank != 0 and not is_done:
            self._write_shard()
        now = time.monotonic()
        self._policy.take_step(
            *self._state.marks, is_rank_0=rank == 0, is_agreed=boundary.is_save_agreed, now=now
        )
        if rank != 0 or is_done or is_writing:
            return  # a due checkpoint starts at the first boundary after the one in flight
        # If all ranks should write, they must have agreed on it in this step. If the checkpoint
        # became due only after the header was sent, it remains owed, and the next step's header
        # requests it.
        if self._policy.is_owed and (boundary.is_save_agreed or not self._is_sharding_worth_it()):
            self._policy.take_start()
            sharded = self._sharded if boundary.is_save_agreed else None
            self._start(generation, sharded=sharded)
        elif self._unsaved_best is not None and now >= self._retry_at:
            copy, self._unsaved_best = self._unsaved_best, None
            self._writer.retry(copy, generation=generation)
            self._was_writing = True

    def after_eval(self, group: RankGroup) -> None:
        """Save the current state if it has a better evaluation than any durable checkpoint."""
        # Compare with durable checkpoints, not with all evaluations: if rank 0 dies while it saves
        # the best weights, they are lost, and the next best ones are worth saving (mode: max):
        #
        #     evaluation   step 4: 0.90       step 8: 0.85               step 12: 0.80
        #     rank 0       saving 4 ... dies
        #     rank 1                          4 is not durable: save 8   8 is durable: nothing
        self._take_results()
        if self._durable_in != group.generation:
            # Meanwhile, another rank may have been rank 0 and removed checkpoints.
            self._durable_in, self._durable = group.generation, {}
        # The coordinator requests the checkpoint of the job's last state.
        if self._state.is_done:
            return
        steps = [known.step for known in self._state.best_tracker.best]
        best_steps: tuple[int, ...] = ()
        if self._state.step in steps:
            best_steps = tuple(steps[: steps.index(self._state.step) + 1])
        if self._has_divided_state():
            self._save_best_together(group, best_steps)
        # A copy stalls training, so none is made if equally good weights are already safe.
        elif group.rank == 0 and best_steps and not self._is_kept(best_steps):
            self._start(group.generation, best_steps=best_steps)

    def _save_best_together(self, group: RankGroup, best_steps: tuple[int, ...]) -> None:
        # All ranks have the same evaluations, but only rank 0 knows which checkpoints are durable.
        if not best_steps:
            return
        is_needed = torch.zeros(1)
        if group.rank == 0:
            is_needed[0] = not self._is_kept(best_steps)
        group.all_reduce(is_needed).wait()
        if not is_needed:
            return
        if group.rank == 0:
            self._start(group.generation, best_steps=best_steps, sharded=self._sharded)
        else:
            self._write_shard()

    def _has_divided_state(self) -> bool:
        shards = self._state.workload.shards
        return shards is not None and shards.world_size > 1

    def _is_kept(self, steps: Collection[int]) -> bool:
        # True if, as far as this thread knows, a checkpoint of one of these steps is durable, being
        # written, or waiting for a retry. The writer checks the store again before writing.
        if self._unsaved_best is not None and self._unsaved_best.step in steps:
            return True
        return self._writer.has_under_way(steps) or self._checkpoints.has_valid(
            self._durable, steps
        )

    def _is_sharding_worth_it(self) -> bool:
        sharded = self._sharded
        if sharded is not None and self._has_divided_state():
            return True
        return sharded is not None and is_worth_it(
            self._checkpoints.store, self._num_bytes, sharded.world_size
        )

    # --- saving ---

    def save_now(self, generation: int) -> None:
        """Save the current state, and return when it is durable or has failed."""
        if self._has_divided_state():
            error = "this worker has only a part of the optimizer's state"
            self._send(CheckpointNotWritten(step=self._state.step, error=error))
            return
        self.wait()
        with self._writer.beating():
            self._start(generation)
            self.wait()

    def save_together(self, group: RankGroup) -> None:
        """Save a state of which each rank has a part; return when it is durable or has failed.

        Raises:
            CommunicationError: A peer is lost.
        """
        with self._writer.beating():
            if group.rank == 0:
                self.wait()
                self._start(group.generation, sharded=self._sharded)
                self.wait()
            else:
                self._write_shard()
                self._shard_writer.wait()
        # Wait until rank 0 has committed the checkpoint, because leaving would end the exchange
        # with rank 0.
        group.all_reduce(torch.zeros(1)).wait()

    def wait(self) -> None:
        """Wait for the checkpoint in flight, if there is one."""
        self._writer.wait()
        self._take_results()

    def close(self) -> None:
        """Wait for writes in progress before the process exits; log it if this takes long."""
        with self._writer.beating():
            is_written = self._writer.wait(CLOSE_LOG_AFTER_S)
            is_written &= self._shard_writer.wait(CLOSE_LOG_AFTER_S)
            if not is_written:
                num_written = self._writer.num_written
                done = f"{num_written / 1e6:.0f} of {self._num_bytes / 1e6:.0f} MB"
                text = f"this trainer exits once its checkpoint is written ({done} so far)"
                self._send(TextLogged(level="info", text=text))
            self._writer.wait()
            self._shard_writer.wait()

    def _start(
        self,
        generation: int,
        *,
        best_steps: tuple[int, ...] = (),
        sharded: ShardedWrite | None = None,
    ) -> None:
        self._take_results()
        # Reuse the memory of the last copy if its write is complete. Otherwise ``_spare`` is empty,
        # and new memory is allocated.
        spare, self._spare = self._spare, {}
        copy = copy_state(
            self._state,
            generation=generation,
            records=self._records_after(self._state.step - KEEP_RECORDS),
            code_digest=self._code_digest,
            spare=spare,
            beat=self._beat,
            best_steps=best_steps,
            sharded=sharded,
        )
        self._num_bytes = sum(len(file.data) for file in copy.files.values())
        self._policy.pace.restart(time.monotonic())
        self._writer.submit(copy)
        # The rest of this boundary and the next step overlap with the write.
        self._was_writing = True
        unsaved, self._unsaved_best = self._unsaved_best, None
        if unsaved is not None and not best_steps:
            # If this checkpoint succeeds, the store is available again, so do not wait for
            # ``_retry_at``. If this copy has ``best_steps``, it is better than the unsaved one,
            # which is dropped.
            self._writer.retry(unsaved, generation=generation, needs_success=True)

    def _take_results(self) -> None:
        # Runs in the main thread, so these fields need no lock.
        for result in self._writer.take_results():
            match result:
                case StoreListed():
                    self._durable = result.writers
                case CopyDone():
                    self._spare = result.copy.files
                case CopyPostponed():
                    self._unsaved_best = result.copy
                case CopyFailed():
                    self._take_failure(result)

    def _take_failure(self, failure: CopyFailed) -> None:
        copy = failure.copy
        # A scheduled checkpoint is not retried with this copy, because a newer state will exist by
        # then. The best weights exist only in this copy, so it is kept until it is durable or
        # superseded.
        if not copy.best_steps or copy.is_partial:
            self._spare = copy.files
            self._policy.pace.retry_soon(failure.failed_at)
        elif self._writer.has_better(copy):
            self._spare = copy.files
        else:
            self._unsaved_best = copy
            self._retry_at = failure.failed_at + failure.retry_after_s

    def _write_shard(self) -> None:
        assert self._sharded is not None
        workload = self._state.workload
        if workload.shards is not None:
            own = workload.shards.own_part()
            self._shard_writer.begin_own(self._sharded, self._state.step, own)
            return
        _, tensors = take_state(workload.model, workload.optimizer, workload.extras)
        self._shard_writer.begin(self._sharded, self._state.step, tensors)

    def _beat(self) -> None:
        if self._page is not None:
            self._page.beat()

    def _beat_saving(self) -> None:
        # Called in the writing thread while the main thread waits for it.
        if self._page is not None:
            self._page.beat(phase="saving")
