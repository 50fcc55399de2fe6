"""Several ranks write one checkpoint: each of them holds the same state, and its own line to S3.

Rank 0 decides, with the sum that every step makes, so that all copy at the same boundary. It takes
a folder and names it to the others, through the store in which the ranks of a generation found each
other; each writes its file there, and tells what the manifest must say of it. Rank 0 has a copy of
everything: whatever the others do not deliver it writes itself, and it alone commits.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from datetime import timedelta

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import Part
from etrain_jupyter.storage.checkpoints.base import CheckpointStore
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore, CommunicationError
from etrain_jupyter.trainer.state.capture import MODEL, OPTIMIZER
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.parts import EXTRA_PART, MODEL_PART, shard_name
from etrain_jupyter.trainer.state.staging import StagedFile, stage

SPREAD_BYTES = 64 << 20
"""Smaller states are written by rank 0 alone: what the ranks tell each other takes a while, too."""
MOST_HELPERS = 7
LEAST_PATIENCE_S = 30.0
"""How long rank 0 waits for the others after it has written its own part, at least."""


def is_worth_it(store: CheckpointStore, num_bytes: int, world_size: int) -> bool:
    """Whether several ranks write faster than one.

    They do where each has a line of its own to the store. A folder is one disk, or one server's.
    """
    return store.is_remote and world_size > 1 and num_bytes >= SPREAD_BYTES


def files_of(tensors: Tensors, *, num_shards: int = 1) -> dict[str, Tensors]:
    """Return what goes into each file, as every rank finds it for itself.

    The weights are one file in any case, so that whatever reads safetensors opens them. The
    optimizer's state may be several of about the same size.

    Args:
        tensors: The state.
        num_shards: Into how many files the optimizer's state goes.
    """
    files = {MODEL_PART: _strip(tensors, MODEL)}
    optimizer = _strip(tensors, OPTIMIZER)
    shards: list[Tensors] = [{} for _ in range(num_shards)]
    filled = [0] * num_shards
    for name in sorted(optimizer, key=lambda name: (-optimizer[name].nbytes, name)):
        number = filled.index(min(filled))
        shards[number][name] = optimizer[name]
        filled[number] += optimizer[name].nbytes
    for number, shard in enumerate(shards):
        files[shard_name(number, num_shards)] = shard
    rest = {k: v for k, v in tensors.items() if not k.startswith((MODEL, OPTIMIZER))}
    if rest:
        files[EXTRA_PART] = rest
    return files


def num_shards_of(world_size: int) -> int:
    """Return into how many files the optimizer's state goes: one for each rank but the first."""
    return min(MOST_HELPERS, max(1, world_size - 1))


def part_of_rank(rank: int, world_size: int) -> str | None:
    """Return the file that a rank writes, of those that rank 0 does not; None if it has none."""
    num_shards = num_shards_of(world_size)
    return shard_name(rank - 1, num_shards) if 1 <= rank <= num_shards else None


class Spread:
    """What one rank has to do with the checkpoints that its generation writes together."""

    def __init__(self, *, board: BroadcastStore, rank: int, world_size: int) -> None:
        self._board = board
        self.rank = rank
        self.world_size = world_size

    def close(self) -> None:
        """The generation is over: nobody delivers anything any more."""
        self._board.abort()

    # --- rank 0 ---

    def helped_parts(self) -> list[str]:
        """Return the files that the others write."""
        names = (part_of_rank(rank, self.world_size) for rank in range(1, self.world_size))
        return [name for name in names if name is not None]

    def announce(self, step: int, folder: str) -> None:
        """Tell the others where to."""
        self._tell(f"{_topic(step)}/folder", {"folder": folder})

    def wait_for(self, step: int, name: str, patience_s: float) -> Part | None:
        """Return a part that another rank has written; None if it did not."""
        key = f"{_topic(step)}/{name}"
        try:
            self._board.wait([key], timedelta(seconds=patience_s))
        except CommunicationError:
            return None
        told = json.loads(self._board.get(key))
        return Part(**told["part"]) if "part" in told else None

    def forget(self, step: int) -> None:
        """Drop what was told of a checkpoint."""
        self._board.drop(f"{_topic(step)}/")

    # --- the others ---

    def help(
        self,
        store: CheckpointStore,
        step: int,
        file: StagedFile,
        *,
        progress: Callable[[int], None],
    ) -> None:
        """Write this rank's file, and tell rank 0 of it. Runs in a thread of its own."""
        name = part_of_rank(self.rank, self.world_size)
        assert name is not None
        try:
            told = json.loads(self._board.get(f"{_topic(step)}/folder"))
        except CommunicationError:
            return  # rank 0 is gone
        if not told["folder"]:
            return  # it could not begin
        try:
            part = store.put_part(told["folder"], name, file.data, progress=progress)
        except CheckpointError as exc:
            self._tell(f"{_topic(step)}/{name}", {"error": str(exc)})
        else:
            self._tell(f"{_topic(step)}/{name}", {"part": dataclasses.asdict(part)})
        self.forget(step)

    def _tell(self, key: str, values: dict[str, object]) -> None:
        self._board.set(key, json.dumps(values))


class Helper:
    """The thread in which a rank other than 0 writes its part, one checkpoint at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        progress: Callable[[int], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._progress = progress
        self._beat = beat
        self.thread: threading.Thread | None = None
        self._spare: dict[str, StagedFile] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a part is being written."""
        return self.thread is not None and self.thread.is_alive()

    def begin(self, spread: Spread, step: int, tensors: Tensors) -> None:
        """Copy what is this rank's to write, and write it in the background.

        If the part before is still under way, rank 0 writes this one.
        """
        name = part_of_rank(spread.rank, spread.world_size)
        if name is None or self.is_busy:
            return
        files = files_of(tensors, num_shards=num_shards_of(spread.world_size))
        self._spare = stage({name: files[name]}, self._spare, beat=self._beat)
        self.thread = threading.Thread(
            target=spread.help,
            args=(self._store, step, self._spare[name]),
            kwargs={"progress": self._progress},
            name="etrain-checkpoint-part",
        )
        self.thread.start()


def _topic(step: int) -> str:
    return f"checkpoint/{step}"


def _strip(tensors: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
