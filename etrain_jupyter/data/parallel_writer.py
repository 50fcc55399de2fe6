"""Write a shuffled set with several workers.

::

    ranges of rows  -> gather       one task each: rows in buckets, in the shared folder
    large buckets   -> divide       one task each, until every group fits into memory
    groups          -> count_blocks one task each: so each file knows its blocks
    files           -> write_files  one task for a few consecutive files

The notebook's process sends the tasks and keeps the state; the result of a finished task is kept,
so a worker that is lost, or an interruption, costs only the tasks that ran. The files are equal to
those of a single process: ``spill`` describes the order of the rows.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any, TextIO

import cloudpickle

from etrain_jupyter.data.parts import (
    SOURCE,
    PlannedFile,
    SharedWrite,
    count_blocks,
    divide,
    gather,
    part_name,
    read_buckets,
    read_written,
    write_files,
)
from etrain_jupyter.data.shard_files import BLOCKS_PER_FILE
from etrain_jupyter.data.sources import Source
from etrain_jupyter.data.spill import Group, LargeBucket, RowBucket, plan_groups
from etrain_jupyter.data.workers import Workers
from etrain_jupyter.data.write_state import Progress
from etrain_jupyter.errors import ShardError

PART_BYTES = 1 << 30
"""Estimated size of a range of rows, the most that must be repeated if a worker is lost."""
PARTS_PER_WORKER = 4
"""Minimum number of tasks per worker, so that all workers finish at about the same time."""
MAX_FILES_PER_TASK = 8
"""Consecutive files share a group, which one task loads only once."""

Found = Group | LargeBucket


def plan_ranges(num_rows: int, row_bytes: float, num_workers: int) -> list[tuple[int, int]]:
    """Return ranges of rows, each the work of one task, given the estimated size of a row."""
    by_size = int(max(1, PART_BYTES // max(1.0, row_bytes)))
    by_count = -(-num_rows // (PARTS_PER_WORKER * num_workers))
    size = max(1, min(by_size, by_count))
    return [(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]


def plan_files(groups: Sequence[Group], num_blocks: Sequence[int]) -> list[PlannedFile]:
    """Return the files of a set, given the number of blocks of each group."""
    blocks = [(group, number) for group, count in enumerate(num_blocks) for number in range(count)]
    files: list[PlannedFile] = []
    for first in range(0, len(blocks), BLOCKS_PER_FILE):
        members = blocks[first : first + BLOCKS_PER_FILE]
        runs = []
        for group, found in itertools.groupby(members, key=lambda member: member[0]):
            numbers = [block for _, block in found]
            runs.append((groups[group], numbers[0], numbers[-1] + 1))
        files.append(PlannedFile(number=len(files), runs=tuple(runs)))
    return files


@dataclass(frozen=True, kw_only=True)
class ParallelWriter:
    """Sends the tasks of one write to its workers."""

    write: SharedWrite
    workers: Workers
    out: TextIO | None
    """Where to print the progress; None for nowhere."""

    def gather(self, source: Source, ranges: Sequence[tuple[int, int]]) -> list[RowBucket]:
        """Read the source, and return the buckets of all rows.

        Raises:
            ShardError: If the source cannot be sent, or a row cannot be read or stored.
        """
        progress = Progress("shuffling", source.num_rows, self.out)
        found: dict[int, list[RowBucket]] = {}

        def keep(number: int, buckets: list[RowBucket]) -> None:
            found[number] = buckets
            num_bytes = sum(bucket.num_bytes for bucket in buckets)
            progress.add(sum(bucket.num_rows for bucket in buckets), num_bytes)

        for number in range(len(ranges)):
            if (known := read_buckets(self.write, part_name(number))) is not None:
                keep(number, known)
        missing = [number for number in range(len(ranges)) if number not in found]
        digest = self._send(source) if missing else ""
        calls = [(self.write, digest, number, *ranges[number]) for number in missing]
        for call, buckets in self._run(gather, calls):
            keep(missing[call], buckets)
        progress.finish()
        parts = [found[number] for number in range(len(ranges))]
        return [RowBucket.joined(same) for same in zip(*parts, strict=True)]

    def plan_groups(self, buckets: Sequence[RowBucket]) -> list[Group]:
        """Return the groups, after the large buckets were divided."""
        found: list[Found] = list(plan_groups(buckets, self.write.seed))
        while large := [item for item in found if isinstance(item, LargeBucket)]:
            divided: dict[str, list[Found]] = {}
            for number, inner in self._run(divide, [(self.write, item) for item in large]):
                item = large[number]
                divided[item.name] = list(plan_groups(inner, item.seed, item.name))
            found = [
                inner
                for item in found
                for inner in (divided[item.name] if isinstance(item, LargeBucket) else [item])
            ]
        return [item for item in found if isinstance(item, Group)]

    def count_blocks(self, groups: Sequence[Group], num_rows: int) -> list[int]:
        """Return the number of blocks of each group."""
        progress = Progress("counting", num_rows, self.out)
        counts = [0] * len(groups)
        for number, (rows, blocks) in self._run(
            count_blocks, [(self.write, group) for group in groups]
        ):
            counts[number] = blocks
            progress.add(rows, 0)
        progress.finish()
        return counts

    def write_files(
        self, files: Sequence[PlannedFile], known: Sequence[list[Any]], num_rows: int
    ) -> list[list[Any]]:
        """Write the files that are missing; return name, size and blocks of each file.

        ``known`` describes the first files, which are already written.
        """
        progress = Progress("writing", num_rows, self.out)
        done = dict(enumerate(known))
        for file in files[len(known) :]:
            if (written := read_written(self.write, file.number)) is not None:
                done[file.number] = written
        for written in done.values():
            progress.add(sum(block[2] for block in written[2]), 0)
        missing = [file for file in files if file.number not in done]
        # Consecutive files in one task, but enough tasks for all workers.
        per_worker = len(missing) // (PARTS_PER_WORKER * self.workers.num_workers)
        size = min(max(per_worker, 1), MAX_FILES_PER_TASK)
        runs = [missing[first : first + size] for first in range(0, len(missing), size)]
        for number, _ in self._run(write_files, [(self.write, run) for run in runs]):
            for file in runs[number]:
                written = read_written(self.write, file.number)
                assert written is not None, f"file {file.number} has no result"
                done[file.number] = written
                blocks = written[2]
                progress.add(sum(b[2] for b in blocks), sum(b[3] for b in blocks))
        progress.finish()
        return [done[file.number] for file in files]

    def _send(self, source: Source) -> str:
        try:
            data = cloudpickle.dumps(source.tables)
        except Exception as exc:  # code of the user's classes, in which anything can fail
            raise ShardError(
                f"the source cannot be sent to the workers: {type(exc).__name__}: {exc}. Nothing "
                "was written. Open files and connections when a row is read, or leave out pool and "
                "workers."
            ) from exc
        path = self.write.path(SOURCE)
        partial = path.with_name(f"{SOURCE}.{os.urandom(4).hex()}.partial")
        # Readable only by the user: the notebook's objects may contain secrets.
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        os.replace(partial, path)
        return hashlib.sha256(data).hexdigest()

    def _run(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the number and the result of each call, as they finish; raise the first error."""
        submit = self.workers.executor.submit
        futures = {submit(function, *call): number for number, call in enumerate(calls)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()
