"""True step times from which the tests make logs."""

from __future__ import annotations

import math

import numpy as np

from etrain_jupyter.rules.sizing.step_time import Exchange, Placement, StepTimeModel

MLP_BYTES = 4e7


def model_of(
    placement: Placement, *, fixed_s: float, sample_s: float, s_per_byte: float
) -> StepTimeModel:
    """Return a model that overlaps half of the exchange with the backward pass."""
    return StepTimeModel(
        placement=placement,
        exchange=Exchange(num_bytes=MLP_BYTES, num_buckets=2),
        values=np.array([*map(math.log, (fixed_s, sample_s, 2e-4, s_per_byte)), 0.0]),
        covariance=np.zeros((5, 5)),
    )


CPU = model_of(Placement(cores=2), fixed_s=0.01, sample_s=0.001, s_per_byte=1 / 1.4e9)
"""Workers that share two cores."""
GPUS = model_of(Placement(workers_per_machine=1), fixed_s=0.01, sample_s=0.02, s_per_byte=8 / 2.5e9)
"""One GPU per machine, and 2.5 Gbit/s between them."""
