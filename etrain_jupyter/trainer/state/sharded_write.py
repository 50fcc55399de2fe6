"""Write one checkpoint from several ranks, each with its own connection to the store.

All ranks have the same state, or, with ``shard: optimizer``, each has a part of it.

::

    step header   rank 0 sets "save": all ranks copy the state at the same boundary
    rank 0        begins a folder and announces it through the rendezvous store
    ranks 1 ...   write one file each, and report its size and digest
    rank 0        writes its own files, waits for the reports, and commits the manifest

If rank 0 has a copy of everything, it writes any file that another rank does not deliver in time.
Otherwise, the checkpoint has failed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import Part
from etrain_jupyter.storage.checkpoints.base import CheckpointStore
from etrain_jupyter.trainer.compiled import heartbeats
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore, CommunicationError
from etrain_jupyter.trainer.state.capture import MODEL, OPTIMIZER
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.parts import EXTRA_PART, MODEL_PART, shard_name
from etrain_jupyter.trainer.state.staging import StagedFile, stage

SHARDED_BYTES = 64 << 20
"""Rank 0 writes smaller states alone, because messages between the ranks take time, too."""
MAX_HELPERS = 7
"""Maximum number of other ranks that help rank 0."""
MIN_TIMEOUT_S = 30.0
"""Minimum time for which rank 0 waits for the other ranks after writing its own files."""


def is_worth_it(store: CheckpointStore, num_bytes: int, world_size: int) -> bool:
    """Return True if several ranks write faster than a single rank.

    They do if each has its own connection to the store; a folder is on a single disk or server.
    """
    return store.is_remote and world_size > 1 and num_bytes >= SHARDED_BYTES


def files_of(tensors: Tensors, *, num_shards: int = 1) -> dict[str, Tensors]:
    """Return the tensors of each file. Deterministic: every rank gets the same result.

    The weights are always one file, which any safetensors reader can open. The optimizer's state is
    split into files of about equal size: each tensor, largest first, goes into the smallest file.
    """
    files = {MODEL_PART: _strip(tensors, MODEL)}
    # Only the optimizer's state is split: for Adam it is twice as large as the weights.
    optimizer = _strip(tensors, OPTIMIZER)
    shards: list[Tensors] = [{} for _ in range(num_shards)]
    filled = [0] * num_shards
    # Sorted by size and name, because the order in the dict may differ between ranks.
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
    """Return the number of files for the optimizer's state: one per rank, except rank 0."""
    return min(MAX_HELPERS, max(1, world_size - 1))


def part_of_rank(rank: int, world_size: int) -> str | None:
    """Return the name of the file that this rank writes for rank 0; None if there is none."""
    num_shards = num_shards_of(world_size)
    return shard_name(rank - 1, num_shards) if 1 <= rank <= num_shards else None


class ShardedWrite:
    """One rank's part in the checkpoints that a generation's ranks write together.

    Args:
        is_divided: True if each rank has a part of the optimizer's state that no other rank can
            write.
    """

    def __init__(
        self, *, board: BroadcastStore, rank: int, world_size: int, is_divided: bool = False
    ) -> None:
        self._board = board
        self.rank = rank
        self.world_size = world_size
        self.is_divided = is_divided

    def part_of(self, rank: int) -> str | None:
        """Return the name of the file that a rank writes for rank 0; None if there is none."""
        if self.is_divided:
            return shard_name(rank, self.world_size) if rank else None
        return part_of_rank(rank, self.world_size)

    def close(self) -> None:
        """End the generation: rank 0 stops waiting for files that were not delivered."""
        # From now on, every wait on the store raises, so rank 0's writer writes the files itself,
        # and a helper that has no folder yet gives up.
        self._board.abort()

    # --- rank 0 ---

    def helped_parts(self) -> list[str]:
        """Return the names of the files that the other ranks write."""
        names = (self.part_of(rank) for rank in range(1, self.world_size))
        return [name for name in names if name is not None]

    def announce(self, step: int, folder: str) -> None:
        """Announce the folder to the other ranks; an empty name means that rank 0 failed."""
        self._publish(f"{_topic(step)}/folder", {"folder": folder})

    def wait_for(self, step: int, name: str, timeout_s: float) -> Part | None:
        """Return a part that another rank has written; None if it failed or timed out."""
        key = f"{_topic(step)}/{name}"
        try:
            self._board.wait([key], timedelta(seconds=timeout_s))
        except CommunicationError:
            return None
        report = json.loads(self._board.get(key))
        return Part.from_json(report["part"]) if "part" in report else None

    def forget(self, step: int) -> None:
        """Drop the messages about a checkpoint."""
        self._board.drop(f"{_topic(step)}/")

    # --- other ranks ---

    def help(
        self,
        store: CheckpointStore,
        step: int,
        file: StagedFile,
        *,
        progress: Callable[[int], None],
    ) -> None:
        """Write this rank's file and report it to rank 0. Runs in its own thread."""
        name = self.part_of(self.rank)
        assert name is not None
        # Blocks until the writer thread of rank 0 announces the folder.
        try:
            folder = json.loads(self._board.get(f"{_topic(step)}/folder"))["folder"]
        except CommunicationError:
            return  # rank 0 is lost, or the generation has ended
        if not folder:
            return  # rank 0 could not begin the checkpoint
        try:
            part = store.put_part(folder, name, file.data, progress=progress)
        except CheckpointError as exc:
            # Without this report, rank 0 would wait until its timeout.
            self._publish(f"{_topic(step)}/{name}", {"error": str(exc)})
        else:
            self._publish(f"{_topic(step)}/{name}", {"part": vars(part)})
        self.forget(step)

    def _publish(self, key: str, values: dict[str, object]) -> None:
        self._board.set(key, json.dumps(values))


class ShardWriter:
    """Thread in which a rank other than rank 0 writes its files, one checkpoint at a time.

    Args:
        progress: Called in the thread with the number of bytes that the store has accepted.
        beat: Sends a heartbeat from the main thread, which copies the state.
    """

    def __init__(
        self,
        store: CheckpointStore,
        progress: Callable[[int], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._progress = progress
        self._beat = beat
        self._thread: threading.Thread | None = None
        self._spare: dict[str, StagedFile] = {}

    @property
    def is_busy(self) -> bool:
        """True while a file is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the file in flight; return False if ``timeout_s`` elapses first."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_busy

    def begin(self, sharded: ShardedWrite, step: int, tensors: Tensors) -> None:
        """Copy this rank's tensors and write its file in the background."""
        name = sharded.part_of(sharded.rank)
        # While the previous file is in flight, its memory cannot be reused. This file is then
        # skipped; rank 0 notices that the file is missing, and writes it.
        if name is None or self.is_busy:
            return
        files = files_of(tensors, num_shards=num_shards_of(sharded.world_size))
        self._write(sharded, step, name, files[name])

    def begin_own(self, sharded: ShardedWrite, step: int, tensors: Tensors) -> None:
        """Write this rank's part of a state that is divided, after the file in flight."""
        # Only this rank can write it, so it is not skipped while another file is in flight. That
        # happens only if rank 0 no longer waits for the other file.
        name = sharded.part_of(sharded.rank)
        assert name is not None
        if self.is_busy:
            with heartbeats(self._beat):
                self.wait()
        self._write(sharded, step, name, tensors)

    def _write(self, sharded: ShardedWrite, step: int, name: str, tensors: Tensors) -> None:
        self._spare = stage({name: tensors}, self._spare, beat=self._beat)
        self._thread = threading.Thread(
            target=sharded.help,
            args=(self._store, step, self._spare[name]),
            kwargs={"progress": self._progress},
            name="etrain-checkpoint-part",
        )
        self._thread.start()


def _topic(step: int) -> str:
    return f"checkpoint/{step}"


def _strip(tensors: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
