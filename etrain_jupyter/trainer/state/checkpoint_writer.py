"""Write checkpoints in a background thread.

The main thread and the writer thread share two queues and no lock. One queue carries copies of the
state to the writer, and the other carries results back::

    main thread      copy 10 ....... copy 12 (best)   copy 13 (best)      take_results()
                        |                |  waits        |  replaces 12        ^
    writer thread       +--- write 10 ---+---------------+--- write 13 --------+

At most one copy waits, because each copy needs as much memory as the state.
"""

from __future__ import annotations

import contextlib
import json
import queue
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, replace

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.storage.checkpoints import Manifest, Part, manifest_key
from etrain_jupyter.trainer.control.reporter import Send
from etrain_jupyter.trainer.state.checkpoint_metadata import config_digest
from etrain_jupyter.trainer.state.job_checkpoints import JobCheckpoints, Writers
from etrain_jupyter.trainer.state.parts import CONFIG_PART, STATE_PART, config_of
from etrain_jupyter.trainer.state.sharded_write import MIN_TIMEOUT_S
from etrain_jupyter.trainer.state.state_copy import StateCopy
from etrain_jupyter.trainer.state.train_state import TrainState
from etrain_jupyter.wire.messages import CheckpointNotWritten, CheckpointWritten, TextLogged

BEST_RETRY_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Back-off before each retry to write the best weights; the last value repeats."""


NUM_USUAL = 31
"""Number of steps without a checkpoint whose median duration is the usual step time."""
MIN_USUAL = 5
"""With fewer steps, there is no usual step time yet, and no slowdown is reported."""


class Slowdown:
    """Compare the steps during a checkpoint with the steps before it.

    The main thread writes; the writer thread reads ``extra_s``, a single number.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=NUM_USUAL)
        self._extra_s = 0.0

    def begin_generation(self) -> None:
        """Forget the usual step time, which depends on the number of ranks."""
        self._usual.clear()
        self._extra_s = 0.0

    def begin(self) -> None:
        """Record that the writer has started a checkpoint."""
        self._extra_s = 0.0

    def take_step(self, seconds: float, *, is_writing: bool) -> None:
        """Record the duration of a step, and whether a checkpoint was being written."""
        if not is_writing:
            self._usual.append(seconds)
        elif len(self._usual) >= MIN_USUAL:
            # Steps shorter than usual are subtracted, so that random variations cancel out.
            self._extra_s += seconds - statistics.median(self._usual)

    @property
    def extra_s(self) -> float:
        """Seconds by which the steps since ``begin`` took longer than usual."""
        return max(0.0, self._extra_s)


@dataclass(frozen=True, kw_only=True)
class StoreListed:
    """The writer has listed the durable checkpoints."""

    writers: Writers


@dataclass(frozen=True, kw_only=True)
class CopyDone:
    """A copy needs no further attempt: it is durable, or no longer needed."""

    copy: StateCopy


@dataclass(frozen=True, kw_only=True)
class CopyFailed:
    """A copy was not written."""

    copy: StateCopy
    """The copy, with its failure count incremented."""
    failed_at: float
    """Time of the failure, a ``time.monotonic`` value."""
    retry_after_s: float
    """Back-off before the next attempt; only for the best weights."""


@dataclass(frozen=True, kw_only=True)
class CopyPostponed:
    """A retry was not attempted, because the checkpoint before it failed."""

    copy: StateCopy


Result = StoreListed | CopyDone | CopyFailed | CopyPostponed


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    """A copy that is waiting for the writer thread."""

    copy: StateCopy
    generation: int
    """Generation for which it is written."""
    is_retry: bool = False
    needs_success: bool = False


class CheckpointWriter:
    """Writes copies of the state to the store, one at a time, and prunes old checkpoints.

    All public methods except ``count_written`` are for the main thread.

    Args:
        state: Provides the config, the model's own config and the best evaluations.
        slowdown: Measures the slowdown of steps during the write.
        beat: Sends a heartbeat from the writer thread; called only while the main thread waits.
    """

    def __init__(
        self,
        checkpoints: JobCheckpoints,
        state: TrainState,
        *,
        send: Send,
        slowdown: Slowdown,
        beat: Callable[[], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._state = state
        self._send = send
        self._slowdown = slowdown
        self._beat = beat
        # An executor's thread is not a daemon, so the process does not exit before a write is done.
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="etrain-checkpoint")
        self._tasks: list[futures.Future[None]] = []
        self._waiting: queue.Queue[_Waiting] = queue.Queue(maxsize=1)
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._under_way: list[StateCopy] = []
        self._is_awaited = False
        self._has_succeeded = False
        """True if the last write succeeded. Writer thread only."""
        self._warned_about = ""
        """The last reported reason why old checkpoints were not removed. Writer thread only."""
        self.num_written = 0
        """Number of bytes written so far for the checkpoint in flight."""

    # --- main thread ---

    @property
    def is_busy(self) -> bool:
        """True while a copy is being written or waiting."""
        return any(not task.done() for task in self._tasks)

    def has_under_way(self, steps: Collection[int]) -> bool:
        """Return True if a copy of one of these steps has been submitted and is not done."""
        return any(copy.step in steps for copy in self._under_way)

    def has_better(self, copy: StateCopy) -> bool:
        """Return True if better weights than those in the failed ``copy`` are being saved.

        A copy with ``best_steps`` is submitted only if it is better than the copies before it.
        """
        return any(other.best_steps and other is not copy for other in self._under_way)

    def submit(self, copy: StateCopy) -> None:
        """Write a copy as soon as the thread is free; it replaces a copy that is still waiting."""
        self._enter(_Waiting(copy=copy, generation=copy.generation))

    def retry(self, copy: StateCopy, *, generation: int, needs_success: bool = False) -> None:
        """Try again to write the best weights after a failed attempt.

        Args:
            copy: The copy that failed.
            generation: The current generation, for which the copy is written.
            needs_success: Write the copy only if the checkpoint before it succeeds, which proves
                that the store is available again.
        """
        self._enter(
            _Waiting(copy=copy, generation=generation, is_retry=True, needs_success=needs_success)
        )

    def _enter(self, waiting: _Waiting) -> None:
        if not self.is_busy:
            self._slowdown.begin()
            self._run(lambda: self._take(waiting))
        else:
            # A waiting copy is older than this one, so it is dropped. If the writer takes it at the
            # same moment, both are written.
            with contextlib.suppress(queue.Empty):
                self._forget(self._waiting.get_nowait().copy)
            self._waiting.put_nowait(waiting)
            # Submit one task per copy. A task whose copy was replaced finds the queue empty and
            # ends.
            self._run(self._take_waiting)
        self._under_way.append(waiting.copy)

    def _run(self, work: Callable[[], None]) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(self._thread.submit(work))

    def take_results(self) -> Iterator[Result]:
        """Yield the results that have arrived since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._results.get_nowait()
                # Every other result ends this attempt to write the copy.
                if not isinstance(result, StoreListed):
                    self._forget(result.copy)
                yield result

    def _forget(self, copy: StateCopy) -> None:
        # Compare the files, because a copy's generation and failure count may have changed in the
        # meantime.
        self._under_way = [known for known in self._under_way if known.files is not copy.files]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all copies are written; return False if ``timeout_s`` elapses first."""
        return not futures.wait(self._tasks, timeout_s).not_done

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats from the writing threads while the main thread waits for them."""
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    # --- writer thread ---

    def _take_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self._waiting.get_nowait())

    def _take(self, waiting: _Waiting) -> None:
        copy = waiting.copy
        try:
            # The checkpoint before this copy has just failed, so the store is still unavailable.
            if waiting.needs_success and not self._has_succeeded:
                self._results.put(CopyPostponed(copy=copy))
            elif waiting.is_retry and not self._checkpoints.is_valid(copy.generation, copy.step):
                # Since the first attempt, the job has gone back to an earlier step.
                self._results.put(CopyDone(copy=copy))
            else:
                self._write(replace(copy, generation=waiting.generation))
        except BaseException:
            # The thread's outermost handler. Training continues without this checkpoint, and the
            # copy must not remain in progress forever.
            self._results.put(CopyDone(copy=copy))
            traceback.print_exc()
            raise

    def _write(self, copy: StateCopy) -> None:
        # Send two reports: a result for the main thread, which manages the copy's memory, and a
        # message to the coordinator, which may be waiting for this checkpoint.
        try:
            manifest = self._commit(copy)
        except CheckpointError as exc:
            self._fail(copy, str(exc))
            return
        except Exception as exc:
            # Even after a bug in the store or in this package, the coordinator waits for a report.
            traceback.print_exc()
            self._fail(copy, f"{type(exc).__name__}: {exc}")
            return
        self._has_succeeded = True
        if manifest is not None:
            record = {
                "step": copy.step,
                "manifest": manifest_key(copy.step),
                "size_bytes": manifest.size_bytes,
                "stall_s": copy.stall_s,
                "slowed_s": self._slowdown.extra_s,
                "duration_s": time.monotonic() - copy.started_at,
            }
            # The checkpoint is now durable, whether or not old checkpoints can be removed.
            self._prune(copy.generation)
            self._send(CheckpointWritten(generation=copy.generation, record=record))
        self._results.put(CopyDone(copy=copy))

    def _fail(self, copy: StateCopy, error: str) -> None:
        self._has_succeeded = False
        # The other ranks may be waiting for a folder; an empty name means that there is none.
        if copy.sharded is not None:
            copy.sharded.announce(copy.step, "")
        retry_after_s = BEST_RETRY_S[min(copy.num_failures, len(BEST_RETRY_S) - 1)]
        # A copy of a divided state is useless without the other ranks' parts.
        if copy.best_steps and not copy.is_partial:
            error += (
                f". These are the best weights so far; the next attempt is in {retry_after_s:g} s"
            )
        self._results.put(
            CopyFailed(
                copy=replace(copy, num_failures=copy.num_failures + 1),
                failed_at=time.monotonic(),
                retry_after_s=retry_after_s,
            )
        )
        self._send(CheckpointNotWritten(step=copy.step, error=error))

    def _commit(self, copy: StateCopy) -> Manifest | None:
        # writers known ── claim ── begin folder ── parts ── commit manifest
        #      |             |                                   |
        #      |             a later generation writes: refuse   the checkpoint exists only now
        #      weights as good are durable: not needed (None)
        #
        # A crash before the commit leaves parts without a manifest, which readers ignore.
        writers = self._checkpoints.read_writers()
        self._results.put(StoreListed(writers=writers))
        # The main thread made this copy without querying the store. The store has now been listed.
        if copy.best_steps and self._is_superseded(copy, writers):
            return None
        store = self._checkpoints.store
        self._checkpoints.claim(copy.step, copy.generation, writers)
        folder = store.begin(copy.step)
        self.num_written = 0
        contents: dict[str, bytes | memoryview] = {
            STATE_PART: json.dumps(copy.header).encode(),
            **{name: file.data for name, file in copy.files.items()},
        }
        if (config := config_of(self._state.workload.model)) is not None:
            contents[CONFIG_PART] = config
        manifest = Manifest(
            step=copy.step,
            job_id=self._checkpoints.job_id,
            generation=copy.generation,
            config_digest=config_digest(self._state.config),
            created=time.time(),
            parts=self._put_parts(copy, folder, contents),
        )
        if not store.commit(manifest):
            # Another rank has already saved this step, with the same weights.
            return store.read_manifest(copy.step)
        return manifest

    def _is_superseded(self, copy: StateCopy, writers: Writers) -> bool:
        if self._checkpoints.has_valid(writers, copy.best_steps):
            return True
        # ``best_steps`` ends with the copy's own step. If it contains other steps, they were
        # better.
        if len(copy.best_steps) > 1:
            text = (
                f"step {copy.step} is saved as the best remaining step: the weights of step "
                f"{copy.best_steps[0]} never became durable"
            )
            self._send(TextLogged(level="warning", text=text))
        return False

    def _put_parts(
        self, copy: StateCopy, folder: str, contents: Mapping[str, bytes | memoryview]
    ) -> dict[str, Part]:
        # rank 0      announce folder ── write own files ── wait ── late ones ── manifest
        # other rank       └─ write its file ── report size and digest ┘
        if copy.sharded is None:
            return {name: self._put_part(folder, name, data) for name, data in contents.items()}
        sharded, began_at = copy.sharded, time.monotonic()
        helped = sharded.helped_parts()
        sharded.announce(copy.step, folder)
        parts = {
            name: self._put_part(folder, name, data)
            for name, data in contents.items()
            if name not in helped
        }
        # The other ranks started at the same boundary and write no more data than this rank did.
        own_s = time.monotonic() - began_at
        deadline = time.monotonic() + max(MIN_TIMEOUT_S, 3 * own_s)
        missing = []
        for name in helped:
            part = sharded.wait_for(copy.step, name, max(0.0, deadline - time.monotonic()))
            if part is None:
                missing.append(name)
            else:
                parts[name] = part
        if missing and copy.is_partial:
            raise CheckpointError(
                f"step {copy.step} was not saved: {len(missing)} of {len(helped)} other workers "
                f"did not write their part of the optimizer's state ({', '.join(missing)})"
            )
        if missing:
            # The late rank may still be writing to its key, so the part goes into a new folder.
            folder = self._checkpoints.store.begin(copy.step)
            parts |= {name: self._put_part(folder, name, contents[name]) for name in missing}
        sharded.forget(copy.step)
        return parts

    def _put_part(self, folder: str, name: str, data: bytes | memoryview) -> Part:
        part = self._checkpoints.store.put_part(folder, name, data, progress=self.count_written)
        self._beat_if_awaited()
        return part

    def count_written(self, num_bytes: int) -> None:
        """Count bytes that the store has accepted. Called in the writing thread."""
        self.num_written += num_bytes
        self._beat_if_awaited()

    def _beat_if_awaited(self) -> None:
        if self._is_awaited:
            self._beat()

    def _prune(self, generation: int) -> None:
        # ``best`` is safe to read here, because it is a tuple that the main thread only replaces as
        # a whole.
        best = [known.step for known in self._state.best_tracker.best]
        keep = self._state.config.checkpoint.keep
        try:
            writers = self._checkpoints.prune(generation, keep=keep, best=best)
            self._results.put(StoreListed(writers=writers))
            complaint = self._checkpoints.store.notice
        except CheckpointError as exc:
            complaint = str(exc)
        # Warn once per problem, not once per checkpoint.
        if complaint and complaint != self._warned_about:
            self._send(TextLogged(level="warning", text=f"{complaint}. Training continues"))
        self._warned_about = complaint
