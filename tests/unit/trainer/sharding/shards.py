"""Helpers for the tests of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from etrain_jupyter.config.schema import OptimizerConfig
from etrain_jupyter.rules.optimizer_shards import Range, overlap
from etrain_jupyter.trainer.optimizers import build_optimizer
from etrain_jupyter.trainer.sharding.held_state import Form, NewShard
from etrain_jupyter.trainer.sharding.sharded_optimizer import ShardedOptimizer


def optimizer_of(model: nn.Module, name: str, **options: Any) -> torch.optim.Optimizer:
    config = OptimizerConfig.model_validate({"name": name, "lr": 0.01, **options})
    return build_optimizer(config, None, model)  # type: ignore[arg-type]


def filled(span: Range, forms: dict[int, Form], ranks: Sequence[ShardedOptimizer]) -> NewShard:
    """Return a shard with the values that the ranks hold."""
    shard = NewShard(ranks[0].layout, span, forms)
    for other in ranks:
        for held in other.spans:
            if common := overlap(held, span):
                values = other.read_span(common, forms)
                for slot, value in zip(shard.slots(common), values, strict=True):
                    slot.copy_(value)
    return shard
