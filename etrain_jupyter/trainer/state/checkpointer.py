"""Saves a trainer's state in the background, from a copy taken at a step boundary."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.rules.membership.lineage import is_of_job
from etrain_jupyter.storage.checkpoints import Manifest, Part, choose_steps_to_keep, manifest_key
from etrain_jupyter.storage.checkpoints.base import CheckpointStore, open_newest
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.group.rendezvous import BroadcastStore
from etrain_jupyter.trainer.loop.schedule import CheckpointPace, Every, Mark
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.state.capture import take_state
from etrain_jupyter.trainer.state.checkpoint_metadata import about, config_digest
from etrain_jupyter.trainer.state.model_config import config_of
from etrain_jupyter.trainer.state.parts import (
    CONFIG_PART,
    MODEL_PART,
    NEEDED,
    STATE_PART,
    check_parts,
    header_of,
)
from etrain_jupyter.trainer.state.restoring import restore
from etrain_jupyter.trainer.state.sharded_write import (
    LEAST_PATIENCE_S,
    Helper,
    Spread,
    files_of,
    is_worth_it,
    num_shards_of,
)
from etrain_jupyter.trainer.state.slowdown import Slowdown
from etrain_jupyter.trainer.state.staging import StagedFile, stage
from etrain_jupyter.wire.messages import CheckpointNotWritten, CheckpointWritten, TextLogged

KEEP_RECORDS = 100
"""Records of the last steps that a checkpoint keeps: it may be durable before the log has them."""

BEST_WAITS_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""When the weights of the best evaluation are tried again that could not be written: after the
first time, and so on."""

CLOSE_TELLS_S = 5.0
"""When a trainer that ends says that it waits for its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """The state at one step boundary, which training does not touch any more."""

    step: int
    generation: int
    header: dict[str, Any]
    files: dict[str, StagedFile]
    started: float
    stall_s: float
    unless: tuple[int, ...] = ()
    """Steps that were evaluated at least as well, best first, with its own: if one of them is
    durable, this copy is dropped. Empty if it is to be saved in any case."""
    spread: Spread | None = None
    """How the other ranks help to write it; None if they do not."""
    num_failures: int = 0
    """How often it could not be written."""


class Checkpointer:
    """Writes this job's checkpoints when this trainer is rank 0, one at a time."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        loop: TrainLoop,
        job_id: str,
        config: TrainConfig,
        send: Send,
        records_after: Callable[[int], list[dict[str, Any]]] = lambda step: [],
        code_digest: str = "",
    ) -> None:
        self._store = store
        self._loop = loop
        self._job_id = job_id
        self._config = config
        self._send = send
        self._records_after = records_after
        self._code_digest = code_digest
        self.starts: list[int] = []
        """The step at which each generation of the job began, up to the present one."""
        self._writer: threading.Thread | None = None
        self._lock = threading.Lock()
        """Guards the next three: the writer takes what the main thread leaves, and gives back."""
        self._writing: _Copy | None = None
        self._queued: _Copy | None = None
        """A best state that waits for the writer; a better one takes its place."""
        self._spare: dict[str, StagedFile] = {}
        """The copy that was written last, to be written over by the next."""
        self._unsaved_best: _Copy | None = None
        """A best state that could not be written: its weights are nowhere else."""
        self._retry_at = 0.0
        """When that is tried again."""
        self._durable: Mapping[int, int] = {}
        """Which generation wrote the steps that were durable when the writer looked last, in the
        generation ``_durable_in``; replaced as a whole. The main thread never asks the store: it
        may be slow."""
        self._durable_in = 0
        self._complaint = ""
        """Why old checkpoints could not be removed, as it was told last."""
        self._asked = threading.Event()
        self._owed = False
        self._is_waited_for = False
        every = config.checkpoint.every
        self._every = Every(every, loop.plan) if every is not None else None
        self.pace = CheckpointPace()
        """When ``checkpoint.every: auto`` is due."""
        self._slowdown = Slowdown()
        self._was_writing = False
        """Whether one was being written when the newest step began."""
        self._spread: Spread | None = None
        self._num_bytes = 0
        """Of the copy that was made last."""
        self._num_written = 0
        """Of the one in flight."""
        self._helper = Helper(store, self._beat_for_piece, self._beat)

    def begin(self, group: RankGroup, board: BroadcastStore) -> None:
        """Begin a generation."""
        self._slowdown, self._was_writing = Slowdown(), self._is_writing
        self._spread = Spread(board=board, rank=group.rank, world_size=group.world_size)

    def leave(self) -> None:
        """The generation is over: what its other ranks had to write is written here."""
        if self._spread is not None:
            self._spread.close()
            self._spread = None

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def ask(self) -> None:
        """Save at the next step boundary, if this is rank 0 then. Safe from any thread."""
        self._asked.set()

    def after_step(self, group: RankGroup) -> None:
        """Start to save if that is due; the coordinator asks for the last step's checkpoint."""
        is_writing = self._is_writing
        self._slowdown.take_step(self._loop.last_step_s, is_writing=self._was_writing)
        self._was_writing = is_writing
        if self._loop.is_save_agreed and group.rank != 0 and not self._loop.is_done:
            self._help()
        if self._is_due(*self._loop.marks, rank=group.rank):
            self._owed = True
        if group.rank != 0 or self._loop.is_done or is_writing:
            return  # one in flight: the next one begins at the first boundary after it
        if self._owed and (self._loop.is_save_agreed or not self._is_spread_worth_it()):
            self._owed = False
            self._asked.clear()
            self._start(group.generation, spread=self._agreed_spread())
        elif self._unsaved_best is not None and time.monotonic() >= self._retry_at:
            self._retry_best(group.generation)

    def asks_save(self, before: Mark, after: Mark) -> bool:
        """Whether all ranks shall take part in a checkpoint of what the present step leads to.

        The main thread of rank 0 asks within the step; those that are not spread need no such
        agreement.
        """
        if not self._is_spread_worth_it() or self._is_writing:
            return False
        if self._is_due(before, after, rank=0):
            self._owed = True
        return self._owed

    def _is_spread_worth_it(self) -> bool:
        spread = self._spread
        return spread is not None and is_worth_it(self._store, self._num_bytes, spread.world_size)

    def _agreed_spread(self) -> Spread | None:
        return self._spread if self._loop.is_save_agreed else None

    def _help(self) -> None:
        """Write this rank's part of a checkpoint that rank 0 has asked all ranks for."""
        assert self._spread is not None
        workload = self._loop.workload
        _, tensors = take_state(workload.model, workload.optimizer, workload.extras)
        self._helper.begin(self._spread, self._loop.step, tensors)

    def _retry_best(self, generation: int) -> None:
        """Try once more to write the best state."""
        with self._lock:
            copy, self._unsaved_best = self._unsaved_best, None
        if copy is not None and self._is_of_job(copy.generation, copy.step):
            self._write_in_background(replace(copy, generation=generation))

    def after_eval(self, group: RankGroup) -> None:
        """Start to save the present state if it was evaluated better than all that is durable.

        What is durable counts, not what was measured: the weights of the best may have been lost
        with a rank 0 that was saving them. The job's last state is saved in any case.
        """
        if self._durable_in != group.generation:
            self._durable_in, self._durable = group.generation, {}
        if group.rank != 0 or self._loop.is_done:
            return
        steps = [known.step for known in self._loop.judge.best]
        if self._loop.step in steps:
            best = tuple(steps[: steps.index(self._loop.step) + 1])
            if not self._is_known_kept(best):
                self._start(group.generation, unless=best)

    def _is_known_kept(self, steps: Collection[int]) -> bool:
        """Whether one of these steps is durable or about to be, as far as is known here."""
        with self._lock:
            copies = (self._writing, self._queued, self._unsaved_best)
            under_way = {copy.step for copy in copies if copy is not None}
        return not under_way.isdisjoint(steps) or self._has_of_job(self._durable, steps)

    def _has_of_job(self, writers: Mapping[int, int], steps: Collection[int]) -> bool:
        return any(step in writers and self._is_of_job(writers[step], step) for step in steps)

    def _is_needless(self, copy: _Copy, writers: Mapping[int, int]) -> bool:
        """Whether something at least as good is durable already; say so if the best is lost."""
        if self._has_of_job(writers, copy.unless):
            return True
        if len(copy.unless) > 1:
            text = (
                f"step {copy.step} is saved as the best that is left: the weights of step "
                f"{copy.unless[0]} never became durable"
            )
            self._send(TextLogged(level="warning", text=text))
        return False

    def _is_due(self, before: Mark, after: Mark, *, rank: int) -> bool:
        if self._asked.is_set():
            return True
        if self._every is None:
            # Whoever becomes rank 0 is told how old the newest one is.
            return rank == 0 and self.pace.is_due()
        if self._every.is_due(before, after):
            self._every.restart()
            return True
        return False

    def save_now(self, generation: int) -> None:
        """Save the present state and return when it is durable, or known to have failed."""
        self.join()
        self._is_waited_for = True
        self._start(generation)
        self.join()
        self._is_waited_for = False

    def join(self) -> None:
        """Wait for the checkpoint in flight, if there is one."""
        if self._writer is not None:
            self._writer.join()

    def close(self) -> None:
        """Wait for what is in flight, before the process ends; say so if that takes a while."""
        self._is_waited_for = True
        threads = [thread for thread in (self._writer, self._helper.thread) if thread is not None]
        for thread in threads:
            thread.join(CLOSE_TELLS_S)
        if any(thread.is_alive() for thread in threads):
            done = f"{self._num_written / 1e6:.0f} of {self._num_bytes / 1e6:.0f} MB"
            text = f"this trainer ends when its checkpoint is written ({done} so far)"
            self._send(TextLogged(level="info", text=text))
        for thread in threads:
            thread.join()

    def _start(
        self, generation: int, *, unless: tuple[int, ...] = (), spread: Spread | None = None
    ) -> None:
        started = time.monotonic()
        workload = self._loop.workload
        header, tensors = take_state(workload.model, workload.optimizer, workload.extras)
        records = self._records_after(self._loop.step - KEEP_RECORDS)
        header = {
            "counters": self._loop.counters(),
            "records": records,
            "about": about(self._config, workload.optimizer, self._code_digest),
            **header,
        }
        num_shards = num_shards_of(spread.world_size) if spread is not None else 1
        with self._lock:
            spare, self._spare = self._spare, {}
        files = files_of(tensors, num_shards=num_shards)
        staged = stage(files, spare, {MODEL_PART: {"format": "pt"}}, beat=self._beat)
        self._num_bytes = sum(len(file.data) for file in staged.values())
        self.pace.restart()
        copy = _Copy(
            step=self._loop.step,
            generation=generation,
            header=header,
            files=staged,
            started=started,
            stall_s=time.monotonic() - started,
            unless=unless,
            spread=spread,
        )
        self._write_in_background(copy)

    def _write_in_background(self, copy: _Copy) -> None:
        with self._lock:
            if copy.unless and self._unsaved_best is not None:
                self._unsaved_best = None  # this one is better
            if self._writing is not None:
                self._queued = copy
                return
            self._writing = copy
        self._slowdown.begin()
        self._was_writing = True
        # Not a daemon: the process does not end while a checkpoint is being written.
        self._writer = threading.Thread(target=self._write_all, name="etrain-checkpoint")
        self._writer.start()

    def _write_all(self) -> None:
        """Write the copy that is there, and what is queued meanwhile."""
        try:
            while (copy := self._writing) is not None:
                is_written = self._write(copy)
                with self._lock:
                    unsaved = self._unsaved_best
                    if unsaved is None or unsaved.files is not copy.files:
                        self._spare = copy.files
                    self._writing, self._queued = self._queued, None
                    if self._writing is None and is_written and unsaved is not None:
                        # The store is back: do not wait for the next try.
                        self._unsaved_best = None
                        if self._is_of_job(unsaved.generation, unsaved.step):
                            self._writing = replace(unsaved, generation=copy.generation)
        except BaseException:
            with self._lock:
                self._writing = self._queued = None
            raise

    def _write(self, copy: _Copy) -> bool:
        """Write one copy, and tell of it; return whether the store took it."""
        try:
            writers = self._durable = self._writers()
            if copy.unless and self._is_needless(copy, writers):
                return True
            manifest = self._commit(copy, writers)
        except CheckpointError as exc:
            self._take_failure(copy, exc)
            return False
        except Exception as exc:
            # A defect of ours or of the store's: whoever waits for this checkpoint has to hear.
            traceback.print_exc()
            self._take_failure(copy, CheckpointError(f"{type(exc).__name__}: {exc}"))
            return False
        facts = {
            "step": copy.step,
            "manifest": manifest_key(copy.step),
            "size_bytes": manifest.size_bytes,
            "stall_s": copy.stall_s,
            "slowed_s": self._slowdown.extra_s,
            "duration_s": time.monotonic() - copy.started,
        }
        self._prune(copy.generation)
        self._send(CheckpointWritten(generation=copy.generation, record=facts))
        return True

    def _take_failure(self, copy: _Copy, exc: CheckpointError) -> None:
        error = str(exc)
        if copy.spread is not None:
            copy.spread.announce(copy.step, "")
        if copy.unless:
            wait_s = BEST_WAITS_S[min(copy.num_failures, len(BEST_WAITS_S) - 1)]
            error += f". These weights are the best so far, and are tried again in {wait_s:g} s"
            with self._lock:
                if self._queued is None or not self._queued.unless:
                    self._unsaved_best = replace(copy, num_failures=copy.num_failures + 1)
                    self._retry_at = time.monotonic() + wait_s
        else:
            self.pace.hurry()
        self._send(CheckpointNotWritten(step=copy.step, error=error))

    def _commit(self, copy: _Copy, writers: Mapping[int, int]) -> Manifest:
        self._check_manifests(copy.step, copy.generation, writers)
        folder = self._store.begin(copy.step)
        self._num_written = 0
        contents: dict[str, bytes | memoryview] = {
            STATE_PART: json.dumps(copy.header).encode(),
            **{name: file.data for name, file in copy.files.items()},
        }
        if (config := config_of(self._loop.workload.model)) is not None:
            contents[CONFIG_PART] = config
        manifest = Manifest(
            step=copy.step,
            job_id=self._job_id,
            generation=copy.generation,
            config_digest=config_digest(self._config),
            created=time.time(),
            parts=self._put_parts(copy, folder, contents),
        )
        if not self._store.commit(manifest):
            # Another rank was as far, with the same weights.
            return self._store.read_manifest(copy.step)
        return manifest

    def _put_parts(
        self, copy: _Copy, folder: str, contents: Mapping[str, bytes | memoryview]
    ) -> dict[str, Part]:
        """Write all parts, but for those that other ranks deliver."""
        spread, began = copy.spread, time.monotonic()
        helped = spread.helped_parts() if spread is not None else []
        if spread is not None:
            spread.announce(copy.step, folder)
        parts = {}
        for name, data in contents.items():
            if name not in helped:
                parts[name] = self._put_part(folder, name, data)
        deadline = time.monotonic() + max(LEAST_PATIENCE_S, 3 * (time.monotonic() - began))
        missing = []
        for name in helped:
            assert spread is not None
            part = spread.wait_for(copy.step, name, max(0.0, deadline - time.monotonic()))
            if part is None:
                missing.append(name)
            else:
                parts[name] = part
        if missing:
            # Its writer may still be at it: its key is never used twice.
            folder = self._store.begin(copy.step)
            parts |= {name: self._put_part(folder, name, contents[name]) for name in missing}
        if spread is not None:
            spread.forget(copy.step)
        return parts

    def _put_part(self, folder: str, name: str, data: bytes | memoryview) -> Part:
        part = self._store.put_part(folder, name, data, progress=self._beat_for_piece)
        self._beat_if_waited_for()
        return part

    def _prune(self, generation: int) -> None:
        """Remove old checkpoints; the new one is durable, whether that succeeds or not."""
        try:
            self._remove_old(generation)
            complaint = self._store.notice
        except CheckpointError as exc:
            complaint = str(exc)
        if complaint and complaint != self._complaint:
            self._send(TextLogged(level="warning", text=f"{complaint}. Training goes on"))
        self._complaint = complaint

    def _remove_old(self, generation: int) -> None:
        """Remove old checkpoints: not the best one, and none once a later generation writes."""
        writers = self._durable = self._writers()
        if max(writers.values(), default=0) > generation:
            return
        known = [best.step for best in self._loop.judge.best]
        kept = (s for s in known if s in writers and self._is_of_job(writers[s], s))
        protected = set(itertools.islice(kept, 1))
        keep = self._config.checkpoint.keep
        steps = choose_steps_to_keep(self._store.list_steps(), keep=keep, protected=protected)
        self._store.prune(steps)
        self._durable = {step: writer for step, writer in writers.items() if step in steps}

    def _check_manifests(self, step: int, generation: int, writers: Mapping[int, int]) -> None:
        """Leave the store alone once a later generation writes to it: this rank is cut off.

        What an earlier one wrote of this very step after it had been given up makes room.

        Raises:
            CheckpointError: If a later generation writes.
        """
        newest, known = max(((g, known) for known, g in writers.items()), default=(0, 0))
        if newest > generation:
            raise CheckpointError(
                f"generation {generation} was given up: generation {newest} has saved step "
                f"{known}. Nothing was written"
            )
        if step in writers and not self._is_of_job(writers[step], step):
            self._store.prune([other for other in self._store.list_steps() if other != step])

    def _writers(self) -> dict[int, int]:
        """Return which generation wrote each step's manifest, as far as they can be read."""
        writers = {}
        for step in self._store.list_steps():
            with contextlib.suppress(CheckpointError):
                writers[step] = self._store.read_manifest(step).generation
        return writers

    def _is_of_job(self, generation: int, step: int) -> bool:
        return is_of_job(generation=generation, step=step, starts=self.starts)

    def _beat(self) -> None:
        """Send a heartbeat, in the main thread."""
        if self._loop.page is not None:
            self._loop.page.beat()

    def _beat_for_piece(self, num_bytes: int) -> None:
        self._num_written += num_bytes
        self._beat_if_waited_for()

    def _beat_if_waited_for(self) -> None:
        """Give a sign of life for the main thread, while it does nothing but wait for this."""
        if self._is_waited_for and self._loop.page is not None:
            self._loop.page.beat(phase="saving")

    def restore_newest(self, *, logged_step: int) -> list[dict[str, Any]] | None:
        """Load the newest checkpoint that verifies; return its last steps' records.

        One that a generation wrote after it had been given up is passed over, and one whose steps
        the log could not be told of.

        Args:
            logged_step: The newest step in the log.

        Returns:
            None if there is no checkpoint; then nothing was changed.

        Raises:
            CheckpointError: If there are some, but none verifies.
        """
        if not self._store.list_steps():
            return None

        def check(manifest: Manifest, files: dict[str, Path]) -> None:
            if not self._is_of_job(manifest.generation, manifest.step):
                raise CheckpointError(
                    f"generation {manifest.generation} wrote it after it had been given up"
                )
            check_parts(manifest, files, NEEDED)
            known = {record["step"] for record in header_of(files).get("records", [])}
            missing = set(range(logged_step + 1, manifest.step + 1)) - known
            if missing:
                raise CheckpointError(
                    f"nobody can tell the log of its step {min(missing)}, which ends at "
                    f"{logged_step}"
                )

        found = open_newest(self._store, job_id=self._job_id, check=check)
        for reason in found.skipped:
            text = f"checkpoint passed over: {reason}"
            self._send(TextLogged(level="warning", text=text))
        return restore(self._loop, found.files, config=self._config, warn=self._warn)

    def _warn(self, text: str) -> None:
        self._send(TextLogged(level="warning", text=text))
