"""Checkpoints of one job in its store, fenced against abandoned generations.

A rank that is cut off from the coordinator does not know that its generation was abandoned, and may
continue to save. Every manifest names the generation that wrote it, and every rank has a list of
the steps at which the generations began::

    generation 1   step 0 ---- 20 ---- 30 ---- 40 (cut off, but still saving)
    generation 2               20 ---------- 35 ...

Generation 2 began at step 20, so the checkpoints of generation 1 up to step 20 belong to the job.
Its checkpoints at steps 30 and 40 do not; they are never restored, and will be replaced.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.rules.membership.lineage import is_of_job
from etrain_jupyter.storage.checkpoints import Manifest, choose_steps_to_keep
from etrain_jupyter.storage.checkpoints.base import CheckpointStore, OpenCheckpoint, open_newest
from etrain_jupyter.trainer.state.parts import NEEDED, check_parts, header_of, optimizer_parts

Writers = Mapping[int, int]
"""Generation that wrote the manifest of each step."""

NONE_REFUSED: Mapping[int, str] = MappingProxyType({})


class JobCheckpoints:
    """The checkpoints of one job.

    Args:
        starts: Step at which each generation of the job began, up to the current one.
    """

    def __init__(self, store: CheckpointStore, job_id: str, starts: Iterable[int] = ()) -> None:
        self.store = store
        self.job_id = job_id
        self.starts = list(starts)
        """Set by the main thread at the start of a generation. The writer thread must read the
        newest value, because a copy may be written after its generation has ended."""

    def is_valid(self, generation: int, step: int) -> bool:
        """Return True if a checkpoint of this generation and step belongs to the job."""
        return is_of_job(generation=generation, step=step, starts=self.starts)

    def has_valid(self, writers: Writers, steps: Collection[int]) -> bool:
        """Return True if a valid checkpoint of one of ``steps`` is among ``writers``."""
        # Check the validity on each call, because a later generation may have begun at an earlier
        # step.
        return any(step in writers and self.is_valid(writers[step], step) for step in steps)

    def read_writers(self) -> Writers:
        """Return the generation that wrote each checkpoint whose manifest can be read."""
        # A manifest may be unreadable, perhaps because another rank is removing it. This must not
        # fail the checkpoint that is about to be written.
        writers = {}
        for step in self.store.list_steps():
            with contextlib.suppress(CheckpointError):
                writers[step] = self.store.read_manifest(step).generation
        return writers

    def claim(self, step: int, generation: int, writers: Writers) -> None:
        """Prepare to write a step, unless a later generation is already writing to the store.

        An invalid checkpoint of the same step is removed, because a commit never replaces a
        checkpoint.

        Raises:
            CheckpointError: If a later generation has already saved a checkpoint, so that this rank
                is cut off.
        """
        # This check is not atomic: a later generation may write right after it. Even in that case,
        # this rank's write is harmless, because ``is_valid`` rejects the checkpoint when it is
        # read.
        newest, known = max(((g, known) for known, g in writers.items()), default=(0, 0))
        if newest > generation:
            raise CheckpointError(
                f"generation {generation} was abandoned: generation {newest} has saved step "
                f"{known}. Nothing was written"
            )
        # For example, generation 1 continued on its own and saved a step 30 that does not belong to
        # the job. Generation 2 now reaches its own step 30.
        if step in writers and not self.is_valid(writers[step], step):
            self.store.prune([other for other in self.store.list_steps() if other != step])

    def prune(self, generation: int, *, keep: int, best: Iterable[int]) -> Writers:
        """Remove old checkpoints and return the remaining ones.

        Args:
            generation: The generation that has just saved.
            keep: Number of newest checkpoints to keep.
            best: Steps of the best evaluations, best first. The first durable one is kept.

        Raises:
            CheckpointError: If the store fails.
        """
        writers = self.read_writers()
        # Once a later generation has saved a checkpoint, this rank is cut off. It does not know
        # that generation's best checkpoint, so it must not remove any checkpoint. Compare
        # generations, not steps, because a later generation may have gone back to an earlier step.
        if max(writers.values(), default=0) > generation:
            return writers
        durable = (s for s in best if s in writers and self.is_valid(writers[s], s))
        protected = set(itertools.islice(durable, 1))
        steps = choose_steps_to_keep(self.store.list_steps(), keep=keep, protected=protected)
        self.store.prune(steps)
        return {step: writer for step, writer in writers.items() if step in steps}

    def open_newest(
        self,
        *,
        logged_step: int,
        is_divided: bool = False,
        refused: Mapping[int, str] = NONE_REFUSED,
    ) -> OpenCheckpoint | None:
        """Open the newest checkpoint that is intact, valid, and contiguous with the log.

        Args:
            logged_step: Last step in the log.
            is_divided: Leave out the optimizer's state, of which each rank reads its own part.
            refused: Steps that cannot be used, with the reason.

        Returns:
            None if the job has no checkpoint.

        Raises:
            CheckpointError: If there are checkpoints, but none can be used.
        """
        if not self.store.list_steps():
            return None

        def choose(manifest: Manifest) -> list[str]:
            if manifest.step in refused:
                raise CheckpointError(refused[manifest.step])
            left_out = optimizer_parts(manifest.parts) if is_divided else []
            return [name for name in manifest.parts if name not in left_out]

        def check(manifest: Manifest, files: dict[str, Path]) -> None:
            if not self.is_valid(manifest.generation, manifest.step):
                raise CheckpointError(
                    f"generation {manifest.generation} wrote it after it had been abandoned"
                )
            check_parts(manifest, files, NEEDED)
            # A checkpoint may be ahead of the log: rank 0 may have died after the checkpoint was
            # durable but before its last steps were logged. The checkpoint contains their records:
            #
            #     log                    ... 97  98
            #     checkpoint of 100      records 1 ... 100: steps 99 and 100 are logged from it
            #     checkpoint of 300      records 201 ... 300: steps 99 to 200 are unknown, skipped
            records = header_of(files)["records"]
            known = {record["step"] for record in records if "eval" not in record}
            missing = set(range(logged_step + 1, manifest.step + 1)) - known
            if missing:
                raise CheckpointError(
                    f"it has no record of step {min(missing)}, and the log ends at {logged_step}"
                )

        return open_newest(self.store, job_id=self.job_id, choose=choose, check=check)
