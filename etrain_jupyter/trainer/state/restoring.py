"""Load the files of a checkpoint into a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import Part
from etrain_jupyter.storage.checkpoints.base import CheckpointStore, OpenCheckpoint
from etrain_jupyter.storage.checkpoints.blocks import PartBlocks
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.group.gathering import gather_json
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.sharding.held_state import COUNTERS, NewShard
from etrain_jupyter.trainer.sharding.shard_files import (
    ShardFiles,
    Table,
    header_of_state,
    join_parts,
    read_table,
)
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer
from etrain_jupyter.trainer.state.capture import MODEL, OPTIMIZER
from etrain_jupyter.trainer.state.checkpoint_metadata import is_of_optimizer, put_checkpoint
from etrain_jupyter.trainer.state.job_checkpoints import JobCheckpoints
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.parts import (
    DIVIDED,
    EXTRA_PART,
    MODEL_PART,
    header_of,
    optimizer_parts,
)
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.trainer.workload import Workload
from etrain_jupyter.wire.messages import TextLogged


def restore(
    state: TrainState,
    files: dict[str, Path],
    *,
    config: TrainConfig | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Load the parts of one checkpoint and return the records of its last steps.

    A divided optimizer state is not loaded; see ``read_shards``.

    Raises:
        CheckpointError: If the checkpoint belongs to another model.
    """
    header = header_of(files)
    # Tensors have no prefix in these files, because other programs also read model.safetensors.
    tensors = {MODEL + k: v for k, v in load_file(files[MODEL_PART]).items()}
    header = _load_optimizer(state.workload, header, files, tensors)
    if EXTRA_PART in files:
        tensors |= load_file(files[EXTRA_PART])
    put_checkpoint(state.workload, header, tensors, config=config, warn=warn)
    # Set the counters last, so that a checkpoint that does not fit leaves them unchanged.
    state.set_counters(header["counters"])
    records: list[dict[str, Any]] = header["records"]
    return records


def _load_optimizer(
    workload: Workload, header: dict[str, Any], files: dict[str, Path], tensors: Tensors
) -> dict[str, Any]:
    """Add the optimizer's tensors, unless its state is divided; return the matching header."""
    if workload.shards is not None:
        return header | {"optimizer": {**header["optimizer"], "state": []}}
    found: Tensors = {}
    for name in optimizer_parts(files):
        found |= load_file(files[name])
    if header.get(DIVIDED) and is_of_optimizer(header, workload.optimizer):
        groups = workload.optimizer.param_groups
        found = join_parts(found, [p.shape for group in groups for p in group["params"]])
        follows = any(g.get("capturable") or g.get("fused") for g in groups)
        counters = [k for k in found if k.rpartition(".")[2] in COUNTERS and not follows]
        state = header_of_state(found, OPTIMIZER)
        header = header | {
            "optimizer": {**header["optimizer"], "state": state},
            "host": [*header["host"], *(OPTIMIZER + name for name in counters)],
        }
    tensors |= {OPTIMIZER + k: v for k, v in found.items()}
    return header


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """Result of a restore, the same on all ranks."""

    error: str = ""
    """Reason why a rank could not read its shards; empty if all ranks have their shards."""
    num_bytes: tuple[int, ...] = ()
    """Bytes that each rank has read."""


def read_shards(
    group: RankGroup,
    shards: ShardedOptimizer,
    store: CheckpointStore,
    parts: Mapping[str, Part],
    beat: Callable[[], None],
) -> ReadReport:
    """Replace this rank's shards with those of a checkpoint. Every rank must call this function.

    Args:
        group: The generation's process group.
        shards: The optimizer; its old state is dropped first, to free the memory.
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


class Restorer:
    """Load a job's newest usable checkpoint into its state.

    Args:
        beat: Sends a heartbeat.
    """

    def __init__(
        self,
        checkpoints: JobCheckpoints,
        state: TrainState,
        *,
        send: Send,
        beat: Callable[[], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._send = send
        self._beat = beat

    def newest(self, *, logged_step: int) -> list[dict[str, Any]] | None:
        """Load the newest usable checkpoint and return the records of its last steps.

        Returns:
            None, with the state unchanged, if there is no checkpoint.

        Raises:
            CheckpointError: If there are checkpoints, but none can be used.
        """
        found = self._checkpoints.open_newest(logged_step=logged_step)
        return None if found is None else self._load(found, set())

    def together(self, group: RankGroup, *, logged_step: int) -> list[dict[str, Any]] | None:
        """Load the newest usable checkpoint; each rank reads its part of the optimizer's state.

        Rank 0 also loads everything else, which it then sends to the other ranks.

        Returns:
            As ``newest`` on rank 0; an empty list on the other ranks.

        Raises:
            CheckpointError: As ``newest``.
            CommunicationError: A peer is lost.
        """
        # rank 0   open the newest ── load the weights ── offer ──┐
        # all                                                     read own part ── all have theirs?
        #          open the next older one  ◄───────────────────────── no ────────────┘
        shards = self._state.workload.shards
        assert shards is not None
        refused: dict[int, str] = {}
        warned: set[str] = set()
        while True:
            records: list[dict[str, Any]] | None = []
            offer: dict[str, Any] = {"parts": {}}
            if group.rank == 0:
                found = self._checkpoints.open_newest(
                    logged_step=logged_step, is_divided=True, refused=refused
                )
                records = None if found is None else self._load(found, warned)
                if found is not None:
                    offer = self._offer(found)
            [offer, *_] = gather_json(group, offer)
            parts = {name: Part.from_json(part) for name, part in offer["parts"].items()}
            if not parts:
                # Without a checkpoint, or with that of another optimizer, rank 0's initial
                # state applies.
                if group.rank == 0:
                    shards.restart()
                else:
                    shards.drop()
                return records
            report = read_shards(group, shards, self._checkpoints.store, parts, self._beat)
            if not report.error:
                if group.rank == 0:
                    self._log_read(report, parts)
                return records
            refused[offer["step"]] = report.error

    def _load(self, found: OpenCheckpoint, warned: set[str]) -> list[dict[str, Any]]:
        for reason in found.skipped:
            if reason not in warned:
                self._warn(f"checkpoint skipped: {reason}")
                warned.add(reason)
        return restore(self._state, found.files, config=self._state.config, warn=self._warn)

    def _offer(self, found: OpenCheckpoint) -> dict[str, Any]:
        # The other ranks do not read the manifest, so that all of them read the same checkpoint.
        parts = found.manifest.parts
        names = optimizer_parts(parts)
        if not is_of_optimizer(header_of(found.files), self._state.workload.optimizer):
            names = []
        return {
            "step": found.manifest.step,
            "parts": {name: vars(parts[name]) for name in names},
        }

    def _log_read(self, report: ReadReport, parts: Mapping[str, Part]) -> None:
        read = ", ".join(f"{num / 1e6:.0f}" for num in report.num_bytes)
        total = sum(part.size for part in parts.values())
        text = f"each rank read its part of the optimizer's state: {read} of {total / 1e6:.0f} MB"
        self._send(TextLogged(level="info", text=text))

    def _warn(self, text: str) -> None:
        self._send(TextLogged(level="warning", text=text))
