"""Prove which samples the job trained on, one epoch at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.log.events import StepCompleted
from etrain_jupyter.notebook.audit.report import EpochCoverage
from etrain_jupyter.rules.samples.block_order import BlockLayout, BlockOrder
from etrain_jupyter.rules.samples.ledger import (
    StepRange,
    checksum_terms,
    epoch_order,
    position_after,
    range_at,
    steps_per_epoch,
)

_NUM_EXAMPLES = 5
_TOP = 1 << 32
"""Exclusive upper bound on a sample's term in the checksum."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The parameters from which the ledger derives the samples of each step."""

    seed: int
    num_samples: int
    global_batch_size: int
    per_worker_batch_size: int = 0
    """Samples per rank in each step; 0 if the global batch size is constant."""
    total_samples: int = 0
    """Number of samples of the whole job, over all epochs; 0 if unknown."""
    layout: str = ""
    """Blocks of a training set in shards (see ``BlockLayout``); empty if the set is in memory."""
    base_step: int = 0
    """The step from which these parameters apply; above 0 after a resume with another batch or data
    set."""
    base_position: int = 0
    """Number of samples up to that step, over all epochs."""

    def position_after(self, step: int) -> int:
        """Return the number of samples in the first ``step`` steps, for a constant batch size."""
        if not self.base_step:
            return position_after(step, self.num_samples, self.global_batch_size)
        # First comes the rest of the epoch that was in progress at the resume, then whole epochs.
        # Each ends with a batch that may be smaller:
        #   base_position   num_in_rest steps   end of the epoch   steps_per_epoch steps   ...
        rest = -self.base_position % self.num_samples
        num_in_rest = steps_per_epoch(rest, self.global_batch_size)
        count = step - self.base_step
        if count < num_in_rest:
            return self.base_position + count * self.global_batch_size
        after = position_after(count - num_in_rest, self.num_samples, self.global_batch_size)
        return self.base_position + rest + after

    def order_of(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch's samples, shape ``(num_samples,)``."""
        if not self.layout:
            return epoch_order(seed=self.seed, epoch=epoch, num_samples=self.num_samples)
        order = BlockOrder(BlockLayout.decode(self.layout), seed=self.seed, epoch=epoch)
        return order.samples(0, self.num_samples)

    def due_at(self, position: int, world_size: int) -> StepRange:
        """Return the samples of the step that starts at ``position`` with ``world_size`` ranks."""
        return range_at(
            position,
            num_samples=self.num_samples,
            global_batch_size=self.per_worker_batch_size * world_size or self.global_batch_size,
            end=self.total_samples or None,
        )


MAX_SAMPLES = 1 << 31
"""Maximum size of a data set whose order is compared, at 32 bytes of memory per sample."""
MAX_EMPTY_EPOCHS = 1000
"""Maximum number of epochs without a step that are reported one by one."""


def check_samples(
    steps: Sequence[StepCompleted], start: int, work: Work
) -> tuple[tuple[EpochCoverage, ...], list[str]]:
    """Compare the samples of the steps with those that the ledger requires.

    Returns:
        A row for each epoch that was started, and the problems as text.
    """
    begun = position = work.base_position if work.base_step else work.position_after(start)
    due: dict[int, StepRange] = {}
    by_epoch: dict[int, list[StepCompleted]] = defaultdict(list)
    for step in sorted(steps, key=lambda step: step.step):
        by_epoch[step.epoch].append(step)
        if not work.per_worker_batch_size:  # known even if steps are missing
            position = work.position_after(step.step - 1)
        if step.step not in due:
            due[step.step] = work.due_at(position, step.world_size)
            position += due[step.step].samples
    first, last = divmod(begun, work.num_samples), divmod(position, work.num_samples)
    rows: list[EpochCoverage] = []
    problems: list[str] = []
    if work.num_samples > MAX_SAMPLES:
        return (), [f"the samples were not checked: {work.num_samples:,} do not fit into memory"]
    between = range(first[0], last[0] + 1)
    if last[0] - first[0] > len(by_epoch) + MAX_EMPTY_EPOCHS:
        problems.append(
            f"the job has steps of {len(by_epoch)} of the epochs {first[0]} to {last[0]}"
        )
        between = range(0)
    for epoch in sorted({*by_epoch, *between}):
        begin = first[1] if epoch == first[0] else 0
        end = last[1] if epoch == last[0] else work.num_samples
        if begin < end or epoch in by_epoch:
            check = _EpochCheck(work, epoch)
            for step in by_epoch[epoch]:
                problems += check.take(step, due[step.step])
            row, row_problems = check.close(begin, end)
            rows.append(row)
            problems += row_problems
    return tuple(rows), problems


class _EpochCheck:
    """Count how often each sample of one epoch was trained on, by position in its order."""

    def __init__(self, work: Work, epoch: int) -> None:
        self._work, self._epoch = work, epoch
        self._order = work.order_of(epoch)
        self._terms = checksum_terms(self._order).astype(np.int64)
        # Prefix sums reduce the checksum of any range to a single subtraction.
        self._sums = np.concatenate(([0], np.cumsum(self._terms)))
        self._counts = np.zeros(work.num_samples, dtype=np.int64)

    def take(self, step: StepCompleted, due: StepRange) -> Iterator[str]:
        """Count the samples of a step, and yield how they differ from the samples that were due."""
        if (step.epoch, step.first) != (due.epoch, due.first):
            yield (
                f"step {step.step} began at sample {step.first} of epoch {step.epoch}, "
                f"expected {due.first} of epoch {due.epoch}"
            )
        position = StepRange(step.epoch, step.first, step.samples).position(self._work.num_samples)
        num_due = self._work.due_at(position, step.world_size).samples
        if step.samples != num_due:
            yield f"step {step.step} trained {step.samples} samples, expected {num_due}"
        # The checksum is a sum of hashes of the sample indices. If it equals the checksum of the
        # range, the ranks trained on each sample of the range once. The probability that this is
        # wrong is about 2**-32.
        if self._sum_of(step.first, step.first + step.samples) == step.sample_checksum:
            self._counts[step.first : step.first + step.samples] += 1
        else:
            yield self._explain(step, step.first, step.first + num_due)

    def close(self, begin: int, end: int) -> tuple[EpochCoverage, list[str]]:
        """Return the epoch's row and problems; positions from ``begin`` to ``end`` were due."""
        repeated = self._order[self._counts > 1]
        missing = self._order[begin:end][self._counts[begin:end] == 0]
        row = EpochCoverage(
            epoch=self._epoch,
            samples=int(self._counts.sum()),
            seen_once=int((self._counts == 1).sum()),
            repeated=len(repeated),
            missing=len(missing),
            is_complete=end == self._work.num_samples,
        )
        problems = []
        if len(missing):
            problems.append(f"epoch {self._epoch}: {_name(missing)} never trained")
        if len(repeated):
            problems.append(f"epoch {self._epoch}: {_name(repeated)} trained more than once")
        return row, problems

    def _sum_of(self, first: int, end: int) -> int | None:
        is_inside = 0 <= first <= end <= len(self._counts)
        return int(self._sums[end] - self._sums[first]) if is_inside else None

    def _explain(self, step: StepCompleted, first: int, end: int) -> str:
        """Find the single sample that explains a wrong checksum, and adjust the counts."""
        expected = self._sum_of(first, end)
        if expected is None:
            return f"step {step.step} trained samples outside of the epoch"
        # The difference from the expected sum identifies a single wrong sample:
        #   expected - found = term of one sample in the range    that sample is missing
        #   found - expected = term of any sample                 that sample is extra
        #   found - expected = term of one - term of another      one replaces the other
        # The report then counts exactly these samples, instead of the whole step.
        lost = self._lookup(expected - step.sample_checksum, first, end)
        if lost is not None:
            self._counts[first:end] += 1
            self._counts[lost] -= 1
            return f"step {step.step} did not train sample {self._order[lost]}"
        extra = self._lookup(step.sample_checksum - expected, 0, len(self._counts))
        if extra is not None:
            self._counts[first:end] += 1
            self._counts[extra] += 1
            return f"step {step.step} trained sample {self._order[extra]} once too often"
        return self._explain_exchange(step, first, end, expected)

    def _explain_exchange(self, step: StepCompleted, first: int, end: int, expected: int) -> str:
        # Clip to the range of int64; a difference of this size matches no term.
        difference = max(-_TOP, min(_TOP, step.sample_checksum - expected))
        wanted = self._terms[first:end] + difference
        matches = np.flatnonzero(np.isin(wanted, self._terms))
        if len(matches) != 1:
            return (
                f"step {step.step} trained other samples than expected "
                f"(checksum {step.sample_checksum} instead of {expected}); none of them counts"
            )
        lost = first + int(matches[0])
        extra = int(np.flatnonzero(self._terms == wanted[matches[0]])[0])
        self._counts[first:end] += 1
        self._counts[lost] -= 1
        self._counts[extra] += 1
        return (
            f"step {step.step} trained sample {self._order[extra]} "
            f"in place of sample {self._order[lost]}"
        )

    def _lookup(self, term: int, first: int, end: int) -> int | None:
        """Return the position of the sample with this term; None unless exactly one has it."""
        if not 0 <= term < _TOP:
            return None
        positions = np.flatnonzero(self._terms[first:end] == term)
        return first + int(positions[0]) if len(positions) == 1 else None


def _name(samples: NDArray[np.int64]) -> str:
    listed = ", ".join(map(str, sorted(samples.tolist())[:_NUM_EXAMPLES]))
    if len(samples) == 1:
        return f"sample {listed} was"
    more = " ..." if len(samples) > _NUM_EXAMPLES else ""
    return f"{len(samples)} samples ({listed}{more}) were"
