"""The metrics of best checkpoints and early stopping must be evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.trainer.state.train_state import BestTracker


def tracker(**keys: Any) -> BestTracker:
    config = {"model": "Net", "data": {"train": "d", "eval": "d"}, "step": "f", **keys}
    return BestTracker(TrainConfig.model_validate(config))


@pytest.mark.parametrize("key", ["checkpoint.best", "early_stopping"])
def test_metric_that_step_does_not_return_is_refused_by_name(key):
    asked = {"metric": "f1", "mode": "max"}
    tracking = tracker(
        **({key: asked} if key == "early_stopping" else {"checkpoint": {"best": asked}})
    )
    with pytest.raises(WorkloadError, match=rf"{key} names the metric 'f1', .* loss, accuracy\."):
        tracking.check(["accuracy"])
    tracking.check(["accuracy", "f1"])


def test_loss_is_always_a_valid_metric():
    tracker(early_stopping={"metric": "loss"}).check([])
