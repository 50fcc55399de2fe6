"""Saves a trainer's state in the background, from a copy taken at a step boundary."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from etrain_jupyter.checkpoints import Manifest, choose_steps_to_keep, manifest_key
from etrain_jupyter.checkpoints.base import CheckpointStore, open_newest
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.elastic.lineage import is_of_job
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.ranks.group.process_group import RankGroup
from etrain_jupyter.ranks.schedule import Every
from etrain_jupyter.ranks.state.capture import MODEL, OPTIMIZER, copy_to_cpu, put_state, take_state
from etrain_jupyter.ranks.state.packing import Tensors
from etrain_jupyter.ranks.train_loop import Send, TrainLoop

MODEL_PART, OPTIMIZER_PART, EXTRA_PART, STATE_PART = (
    "model.safetensors",
    "optimizer.safetensors",
    "extra.safetensors",
    "state.json",
)

KEEP_RECORDS = 100
"""Records of the last steps that a checkpoint keeps: it may be durable before the log has them."""


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """The state at one step boundary, which training does not touch any more."""

    step: int
    generation: int
    header: dict[str, Any]
    tensors: Tensors
    started: float
    stall_s: float


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
    ) -> None:
        self._store = store
        self._loop = loop
        self._job_id = job_id
        self._config = config
        self._send = send
        self._records_after = records_after
        self.starts: list[int] = []
        """The step at which each generation of the job began, up to the present one."""
        self._writer: threading.Thread | None = None
        self._lock = threading.Lock()
        """Guards the next two: the writer takes what the main thread leaves."""
        self._writing: _Copy | None = None
        self._queued: _Copy | None = None
        """A best state that waits for the writer; a better one takes its place."""
        self._durable: set[int] = set()
        """Steps that were seen to be durable in the generation ``_durable_in``."""
        self._durable_in = 0
        self._asked = threading.Event()
        self._owed = False
        self._is_waited_for = False
        every = config.checkpoint.every
        self._every = Every(every, loop.plan) if every is not None else None

    def ask(self) -> None:
        """Save at the next step boundary, if this is rank 0 then. Safe from any thread."""
        self._asked.set()

    def after_step(self, group: RankGroup) -> None:
        """Start to save if that is due; the coordinator asks for the last step's checkpoint."""
        if self._is_due():
            self._owed = True
        if not self._owed or group.rank != 0 or self._loop.is_done:
            return
        if self._writer is not None and self._writer.is_alive():
            return  # one in flight; this one begins at the first boundary after it
        self._owed = False
        self._asked.clear()
        self._start(group.generation)

    def after_eval(self, group: RankGroup) -> None:
        """Start to save the present state if it was evaluated better than all that is durable.

        What is durable counts, not what was measured: the weights of the best may have been lost
        with a rank 0 that was saving them. The job's last state is saved in any case.
        """
        if self._durable_in != group.generation:
            self._durable_in, self._durable = group.generation, set()
        if group.rank != 0 or self._loop.is_done or not self._is_best():
            return
        self._start(group.generation)

    def _is_best(self) -> bool:
        steps = [known.step for known in self._loop.judge.best]
        if self._loop.step not in steps:
            return False
        place = steps.index(self._loop.step)
        is_kept = any(self._is_kept(step) for step in steps[: place + 1])
        if place and not is_kept:
            text = (
                f"step {self._loop.step} is saved as the best that is left: the weights of step "
                f"{steps[0]} never became durable"
            )
            self._send({"op": "log", "level": "warning", "text": text})
        return not is_kept

    def _is_kept(self, step: int) -> bool:
        """Whether a step of this job is durable, or about to be."""
        with self._lock:
            under_way = [copy.step for copy in (self._writing, self._queued) if copy is not None]
        if step in under_way or step in self._durable:
            return True
        try:
            is_there = step in self._store.list_steps() and self._is_of_job(
                self._store.read_manifest(step).generation, step
            )
        except CheckpointError:
            return False
        if is_there:
            self._durable.add(step)
        return is_there

    def _is_due(self) -> bool:
        if self._asked.is_set():
            return True
        if self._every is None:
            return self._loop.plan.is_boundary(self._loop.position)
        if self._every.is_due(*self._loop.marks):
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

    def _start(self, generation: int) -> None:
        started = time.monotonic()
        workload = self._loop.workload
        header, tensors = take_state(workload.model, workload.optimizer, workload.extras)
        records = self._records_after(self._loop.step - KEEP_RECORDS)
        header = {"counters": self._loop.counters(), "records": records, **header}
        tensors = copy_to_cpu(tensors)
        stall_s = time.monotonic() - started
        copy = _Copy(
            step=self._loop.step,
            generation=generation,
            header=header,
            tensors=tensors,
            started=started,
            stall_s=stall_s,
        )
        with self._lock:
            if self._writing is not None:
                self._queued = copy
                return
            self._writing = copy
        # Not a daemon: the process does not end while a checkpoint is being written.
        self._writer = threading.Thread(target=self._write_all, name="etrain-checkpoint")
        self._writer.start()

    def _write_all(self) -> None:
        """Write the copy that is there, and what is queued meanwhile."""
        try:
            while (copy := self._writing) is not None:
                self._write(copy)
                with self._lock:
                    self._writing, self._queued = self._queued, None
        except BaseException:
            with self._lock:
                self._writing = self._queued = None
            raise

    def _write(self, copy: _Copy) -> None:
        try:
            manifest = self._commit(copy)
        except CheckpointError as exc:
            self._send({"op": "checkpoint_failed", "step": copy.step, "error": str(exc)})
            return
        facts = {
            "step": copy.step,
            "manifest": manifest_key(copy.step),
            "size_bytes": manifest.size_bytes,
            "stall_s": copy.stall_s,
            "duration_s": time.monotonic() - copy.started,
        }
        self._send({"op": "checkpoint_committed", "generation": copy.generation, "record": facts})

    def _commit(self, copy: _Copy) -> Manifest:
        self._check_manifests(copy.step, copy.generation)
        folder = self._store.begin(copy.step)
        contents: dict[str, Callable[[], bytes]] = {
            MODEL_PART: lambda: save(_strip(copy.tensors, MODEL), {"format": "pt"}),
            OPTIMIZER_PART: lambda: save(_strip(copy.tensors, OPTIMIZER)),
            STATE_PART: lambda: json.dumps(copy.header).encode(),
        }
        rest = {k: v for k, v in copy.tensors.items() if not k.startswith((MODEL, OPTIMIZER))}
        if rest:
            contents[EXTRA_PART] = lambda: save(rest)
        parts = {}
        for name, make in contents.items():
            parts[name] = self._store.put_part(folder, name, make())
            self._beat_if_waited_for()
        manifest = Manifest(
            step=copy.step,
            job_id=self._job_id,
            generation=copy.generation,
            config_digest=config_digest(self._config),
            created=time.time(),
            parts=parts,
        )
        if not self._store.commit(manifest):
            # Another rank was as far, with the same weights.
            return self._store.read_manifest(copy.step)
        self._prune(copy.generation)
        return manifest

    def _prune(self, generation: int) -> None:
        """Remove old checkpoints: not the best one, and none once a later generation writes."""
        writers = self._writers()
        if max(writers.values(), default=0) > generation:
            return
        known = [best.step for best in self._loop.judge.best]
        kept = (s for s in known if s in writers and self._is_of_job(writers[s], s))
        protected = set(itertools.islice(kept, 1))
        keep = self._config.checkpoint.keep
        steps = self._store.list_steps()
        self._store.prune(choose_steps_to_keep(steps, keep=keep, protected=protected))

    def _check_manifests(self, step: int, generation: int) -> None:
        """Leave the store alone once a later generation writes to it: this rank is cut off.

        What an earlier one wrote of this very step after it had been given up makes room.

        Raises:
            CheckpointError: If a later generation writes.
        """
        writers = self._writers()
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
            known = {record["step"] for record in _header_of(files).get("records", [])}
            missing = set(range(logged_step + 1, manifest.step + 1)) - known
            if missing:
                raise CheckpointError(
                    f"nobody can tell the log of its step {min(missing)}, which ends at "
                    f"{logged_step}"
                )

        found = open_newest(self._store, job_id=self._job_id, check=check)
        for reason in found.skipped:
            text = f"checkpoint passed over: {reason}"
            self._send({"op": "log", "level": "warning", "text": text})
        return restore(self._loop, found.files)


def restore(loop: TrainLoop, files: dict[str, Path]) -> list[dict[str, Any]]:
    """Load the parts of one checkpoint into a trainer; return its last steps' records."""
    header = _header_of(files)
    tensors = {MODEL + k: v for k, v in load_file(files[MODEL_PART]).items()}
    tensors |= {OPTIMIZER + k: v for k, v in load_file(files[OPTIMIZER_PART]).items()}
    if EXTRA_PART in files:
        tensors |= load_file(files[EXTRA_PART])
    workload = loop.workload
    put_state(workload.model, workload.optimizer, header, tensors, workload.extras)
    loop.set_counters(header["counters"])
    records: list[dict[str, Any]] = header.get("records", [])
    return records


def config_digest(config: TrainConfig) -> str:
    """Return the SHA-256 of a configuration's JSON form."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _header_of(files: dict[str, Path]) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(files[STATE_PART].read_text())
    return header


def _strip(tensors: Tensors, prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
