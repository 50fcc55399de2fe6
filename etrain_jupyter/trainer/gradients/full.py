"""Gradients for ``shard: full``: FSDP2 sums them, and each rank receives its rows of the sum."""

from __future__ import annotations

from typing import Any

from torch import nn

from etrain_jupyter.trainer.gradients.averaged import AveragedGradients
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.sharding.full_shards import FullShards


class FullGradients(AveragedGradients):
    """Gradients of one generation of several ranks; they are not in the parameters' ``grad``.

    Each pass collects the weights of one block at a time, and sums its gradients in the backward
    pass. So every rank needs the same number of passes.

    Args:
        shards: The weights; see ``AveragedGradients`` for the other arguments.
    """

    def __init__(
        self,
        group: RankGroup,
        module: nn.Module,
        *,
        shards: FullShards,
        watch: Stopwatch,
        **more: Any,
    ) -> None:
        self._shards = shards
        super().__init__(group, module, has_unused=False, watch=watch, **more)
        shards.wrap(module, group, watch)

    has_equal_passes = True

    def _wrap(self, module: nn.Module, has_unused: bool) -> nn.Module:
        return module

    def close(self) -> None:
        """Remove FSDP2 from the model."""
        self._shards.unwrap()
