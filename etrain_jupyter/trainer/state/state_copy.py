"""Copy of the state at one step boundary, which training no longer changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.trainer.state.capture import take_state
from etrain_jupyter.trainer.state.checkpoint_metadata import about
from etrain_jupyter.trainer.state.parts import DIVIDED, MODEL_PART, OPTIMIZER_PART, shard_name
from etrain_jupyter.trainer.state.sharded_write import ShardedWrite, files_of, num_shards_of
from etrain_jupyter.trainer.state.staging import StagedFile, stage
from etrain_jupyter.trainer.state.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """A state to be written as a checkpoint."""

    step: int
    """Number of committed steps."""
    generation: int
    """Generation for which it is written."""
    header: dict[str, Any]
    """Contents of ``state.json``."""
    files: dict[str, StagedFile]
    """Tensor files by part name."""
    started_at: float
    """Start of the copy, a ``time.monotonic`` value."""
    stall_s: float
    """Seconds for which training waited for the copy."""
    best_steps: tuple[int, ...] = ()
    """Steps whose evaluations are at least as good as this copy's, best first; the last is this
    copy's own step. If one of them is durable, this copy is dropped. Empty for a scheduled
    checkpoint, which is always written."""
    sharded: ShardedWrite | None = None
    """Coordinates the write with the other ranks; None if rank 0 writes alone."""
    is_partial: bool = False
    """True if the other ranks have the rest of the state, with ``shard: optimizer``."""
    num_failures: int = 0
    """Number of failed attempts to write it."""


def copy_state(
    state: TrainState,
    *,
    generation: int,
    records: list[dict[str, Any]],
    code_digest: str,
    spare: Mapping[str, StagedFile],
    beat: Callable[[], None],
    best_steps: tuple[int, ...] = (),
    sharded: ShardedWrite | None = None,
) -> StateCopy:
    """Copy the current state while training waits."""
    # Hashing and writing happen later, in the writer thread. Only the copy must be complete before
    # the next step changes the tensors.
    started_at = time.monotonic()
    workload = state.workload
    header, tensors = take_state(workload.model, workload.optimizer, workload.extras)
    header = {
        "counters": state.counters(),
        "records": records,
        "about": about(state.config, workload.optimizer, code_digest),
        **header,
    }
    # All ranks must split the optimizer's state in the same way, so the number of shards depends
    # only on the number of ranks.
    num_shards = num_shards_of(sharded.world_size) if sharded is not None else 1
    shards = workload.shards
    files = files_of(tensors, num_shards=num_shards if shards is None else 1)
    if shards is not None:
        del files[OPTIMIZER_PART]
        files[shard_name(shards.rank, shards.world_size)] = shards.own_part()
        header |= {DIVIDED: True}
    staged = stage(files, spare, {MODEL_PART: {"format": "pt"}}, beat=beat)
    return StateCopy(
        step=state.step,
        generation=generation,
        header=header,
        files=staged,
        started_at=started_at,
        stall_s=time.monotonic() - started_at,
        best_steps=best_steps,
        sharded=sharded,
        is_partial=shards is not None and shards.world_size > 1,
    )
