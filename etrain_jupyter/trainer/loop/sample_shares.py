"""Select the samples that this rank trains on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from etrain_jupyter.rules.samples import ledger
from etrain_jupyter.trainer.data import Share
from etrain_jupyter.trainer.gradients.step import Gradients
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.places import Places
from etrain_jupyter.trainer.seeds import seed_of
from etrain_jupyter.trainer.state.train_state import TrainState


class SampleShares:
    """This rank's shares of the samples, in training order."""

    def __init__(self, state: TrainState, places: Places) -> None:
        self._state = state
        self._places = places
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        """An epoch and the order of its samples."""

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
            order = self.epoch_order(span.epoch)
            for part in gradients.parts(span):
                first = span.first + part.samples.start
                indices = order[first : first + len(part.samples)]
                # Seeded by the step and the shard or rank, not by the fetching process: a step that
                # is repeated after a fault gets the same random augmentations.
                yield Share(
                    self._places.faults.corrupt_indices(indices, rank=group.rank, step=step),
                    seed_of(state.config.seed, "train", step, part.stream, part.number),
                )

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Return the (cached) order of an epoch's samples, shape ``(num_train,)``."""
        if self._order[0] != epoch:
            order = ledger.epoch_order(
                seed=self._state.config.seed, epoch=epoch, num_samples=self._state.plan.num_train
            )
            self._order = (epoch, order)
        return self._order[1]
