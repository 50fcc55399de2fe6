"""Restore the optimizer's state from a checkpoint: each rank reads its own shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import Part
from etrain_jupyter.storage.checkpoints.base import CheckpointStore
from etrain_jupyter.storage.checkpoints.blocks import PartBlocks
from etrain_jupyter.trainer.group.gathering import gather_json
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.sharding.held_state import NewShard
from etrain_jupyter.trainer.sharding.shard_files import ShardFiles, Table, read_table
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """Result of a restore, the same on all ranks."""

    error: str = ""
    """Why a rank could not read its shards; empty if all of them have theirs."""
    num_bytes: tuple[int, ...] = ()
    """Bytes that each rank has read."""


def read_shards(
    group: RankGroup,
    shards: ShardedOptimizer,
    store: CheckpointStore,
    parts: Mapping[str, Part],
    beat: Callable[[], None],
) -> ReadReport:
    """Replace this rank's state by that of a checkpoint. Every rank must call it.

    Args:
        group: The generation's process group.
        shards: Its state is dropped first, to free the memory.
        store: The store of the checkpoint.
        parts: The files of the optimizer's state.
        beat: Sends a heartbeat.

    Raises:
        CommunicationError: A peer is lost.
    """
    # rank 0    header of file 1 ─┐                ┌─ blocks of its two shards ─┐
    # rank 1    header of file 2 ─┼─ all headers ──┼─ blocks of its two shards ─┼─ all succeeded?
    # rank 2    header of file 3 ─┘                └─ blocks of its two shards ─┘
    shards.drop()
    size = group.world_size
    answer: dict[str, Any] = {}
    try:
        files = {name: PartBlocks(store, part) for name, part in sorted(parts.items())}
        answer["tables"] = {name: read_table(files[name]) for name in [*files][group.rank :: size]}
    except CheckpointError as exc:
        answer["error"] = str(exc)
    answers = gather_json(group, answer)
    if error := next((a["error"] for a in answers if "error" in a), ""):
        return ReadReport(error=error)
    tables: dict[str, Table] = {k: v for a in answers for k, v in a["tables"].items()}
    new, num_bytes, error = [], 0, ""
    try:
        source = ShardFiles(((files[name], table) for name, table in tables.items()), shards.layout)
        layout = shards.layout
        new = [NewShard(layout, span, source.forms) for span in layout.shards(group.rank, size)]
        num_bytes = source.fill(new, beat)
    except CheckpointError as exc:
        error = str(exc)
    results = gather_json(group, [error, num_bytes])
    error = next((error for error, _ in results if error), "")
    if not error:
        shards.replace(new)
    return ReadReport(error=error, num_bytes=tuple(num for _, num in results))
