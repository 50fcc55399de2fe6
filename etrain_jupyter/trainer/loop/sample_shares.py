"""Select the samples that this rank trains on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.rules.samples.block_order import BlockOrder
from etrain_jupyter.rules.samples.ledger import StepRange
from etrain_jupyter.trainer.control.faults import Places
from etrain_jupyter.trainer.data import Indices, Share
from etrain_jupyter.trainer.gradients.step import Gradients
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.seeds import seed_of
from etrain_jupyter.trainer.state.train_state import TrainState


class SampleShares:
    """This rank's shares of the samples, in training order."""

    def __init__(self, state: TrainState, places: Places) -> None:
        self._state = state
        self._places = places
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        """An epoch and the order of its samples."""
        self._block_order: tuple[int, BlockOrder | None] = (-1, None)
        """An epoch and the order of its samples in blocks."""

    def stream(self, group: RankGroup, gradients: Gradients, *, batch_size: int) -> Iterator[Share]:
        """Yield every micro-batch of this rank, from the current step to the end of the job."""
        # Loader processes read ahead of the loop, so the stream computes its own position. Samples
        # read ahead are dropped with the generation, and the next generation starts a new stream
        # from the committed position.
        #
        #     committed     step 7
        #     stream        step 8 (in progress), 9, 10 (prefetched)
        #     after abort   step 8 again, from the next generation's stream
        state = self._state
        position = state.position
        for step in itertools.count(state.step + 1):
            # Otherwise, loader processes would prefetch samples that no step trains on.
            if position >= state.plan.end:
                return
            span = state.plan.span(position, batch_size)
            position += span.samples
            samples = self._samples_of(span, gradients)
            for part in gradients.parts(span):
                indices = samples[part.samples.start : part.samples.stop]
                # Seeded by the step and the shard or rank, not by the fetching process: a step that
                # is repeated after a fault gets the same random augmentations.
                yield Share(
                    self._places.faults.corrupt_indices(indices, rank=group.rank, step=step),
                    seed_of(state.config.seed, "train", step, part.stream, part.number),
                    job_seed=state.config.seed,
                    epoch=span.epoch,
                )

    def trial_order(self) -> Indices:
        """Return samples for trial passes, in the order in which to use them."""
        # With blocks, the first samples of an epoch are in all blocks of a window, which each rank
        # would read for its trial. The first rows of the set are in one block.
        if self._state.plan.layout is not None:
            return range(self._state.plan.num_train)
        return self._epoch_order(0)

    def _samples_of(self, span: StepRange, gradients: Gradients) -> NDArray[np.int64]:
        # The samples of a step in the order of its shares.
        if self._state.plan.layout is None:
            return self._epoch_order(span.epoch)[span.first : span.first + span.samples]
        # Sorted by block, so that each share needs few of them. With ``reproducible``, the shares
        # are those of the shards, so they do not depend on the number of ranks.
        return self._order_of_blocks(span.epoch).arrange(span.first, gradients.counts(span))

    def _order_of_blocks(self, epoch: int) -> BlockOrder:
        known, order = self._block_order
        if order is None or known != epoch:
            assert self._state.plan.layout is not None
            order = BlockOrder(self._state.plan.layout, seed=self._state.config.seed, epoch=epoch)
            self._block_order = (epoch, order)
        return order

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        # Cached; shape ``(num_train,)``.
        if self._order[0] != epoch:
            order = ledger.epoch_order(
                seed=self._state.config.seed, epoch=epoch, num_samples=self._state.plan.num_train
            )
            self._order = (epoch, order)
        return self._order[1]
