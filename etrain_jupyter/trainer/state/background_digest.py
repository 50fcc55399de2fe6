"""Hash the weights of one step boundary in the background, while training continues.

At the boundary, the weights are copied into host memory, and the next copy reuses this memory. All
ranks do this at the end of each epoch and of the job, and the audit compares their digests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from etrain_jupyter.trainer.micro_batch import is_out_of_memory
from etrain_jupyter.trainer.state.capture import digest_of_tensors, named_tensors
from etrain_jupyter.trainer.state.packing import Tensors
from etrain_jupyter.trainer.state.pieces import copy_in_pieces

NO_TENSORS: Mapping[str, torch.Tensor] = MappingProxyType({})

WAIT_S = 0.25
"""Interval at which a waiting main thread checks the progress of the hashing thread."""


class BackgroundDigest:
    """Compute one digest at a time, in a thread.

    Args:
        beat: Sends a heartbeat; called by the main thread only.
    """

    def __init__(self, beat: Callable[[], None], warn: Callable[[str], None]) -> None:
        self._beat = beat
        self._warn = warn
        self._copies: Tensors = {}
        self._thread: threading.Thread | None = None
        self._num_pieces = 0
        """Number of pieces hashed so far; shows whether the thread is making progress."""

    def begin(
        self,
        model: nn.Module,
        report: Callable[[str], None],
        *,
        others: Mapping[str, torch.Tensor] = NO_TENSORS,
    ) -> None:
        """Hash the current weights in a background thread, which calls ``report`` with the digest.

        If there is no memory for a copy, the weights are hashed in the calling thread.

        Args:
            model: The model.
            report: Called with the digest.
            others: Other tensors to hash, for example averaged weights.
        """
        self.finish()
        living = {**named_tensors(model), **others}
        try:
            self._copies = self._copy(living)
        except (MemoryError, RuntimeError) as exc:
            if not (isinstance(exc, MemoryError) or is_out_of_memory(exc)):
                raise
            # The copy is incomplete and must not be reused.
            self._copies = {}
            report(digest_of_tensors(living.items(), self._beat))
            return
        self._thread = threading.Thread(
            target=self._hash,
            args=(self._copies.items(), report),
            name="etrain-digest",
            daemon=True,
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for the digest, sending heartbeats as long as the thread makes progress."""
        # Send no heartbeat without progress, so that this rank is detected as hung if hashing
        # hangs.
        thread, seen = self._thread, -1
        while thread is not None and thread.is_alive():
            if self._num_pieces != seen:
                seen = self._num_pieces
                self._beat()
            thread.join(WAIT_S)
        self._thread = None

    def _copy(self, living: Tensors) -> Tensors:
        copies: Tensors = {}
        made: dict[tuple[object, ...], torch.Tensor] = {}  # tied weights have several names
        for name, value in living.items():
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            copy = made.get(key) if value.numel() else None
            if copy is None:
                # Reuse the previous copy's memory: allocating takes longer than copying.
                copy = self._copies.get(name)
                if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
                    copy = torch.empty(value.shape, dtype=value.dtype)
                copy_in_pieces(copy, value, self._beat)
                made[key] = copy
            copies[name] = copy
        return copies

    def _hash(
        self, copies: Iterable[tuple[str, torch.Tensor]], report: Callable[[str], None]
    ) -> None:
        try:
            report(digest_of_tensors(copies, self._count))
        except OSError:
            pass  # the supervisor is gone, and this process exits with it
        except Exception as exc:  # training continues; the audit reports the missing digest
            self._warn(f"the weights could not be hashed ({type(exc).__name__}: {exc})")

    def _count(self) -> None:
        self._num_pieces += 1
