"""Choose how the ranks of a generation compute gradients."""

from __future__ import annotations

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.gradients.averaged import AveragedGradients
from etrain_jupyter.trainer.gradients.sharded import ShardedGradients
from etrain_jupyter.trainer.gradients.step import Gradients
from etrain_jupyter.trainer.gradients.stopwatch import Stopwatch
from etrain_jupyter.trainer.group.process_group import RankGroup
from etrain_jupyter.trainer.warm_up import PassEffects
from etrain_jupyter.trainer.workload import Workload


def make_gradients(
    group: RankGroup,
    workload: Workload,
    config: TrainConfig,
    *,
    effects: PassEffects,
    micro_batch_size: int | None,
    watch: Stopwatch,
    measures_noise: bool,
) -> Gradients:
    """Return sharded gradients for a ``reproducible`` job; otherwise averaged gradients.

    Raises:
        ConfigError: If some rank would have nothing to do.
    """
    num_shards = config.num_shards()
    # With ``batch.per_worker`` the step grows with the number of ranks.
    batch_size = config.batch.size(group.world_size)
    if num_shards is not None:
        return ShardedGradients(
            group,
            workload.module,
            moving=effects.moving,
            num_shards=num_shards,
            global_batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            num_passes=config.batch.aggregation_frequency,
            watch=watch,
        )
    return AveragedGradients(
        group,
        workload.module,
        moving=effects.moving,
        has_unused=effects.has_unused,
        global_batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        num_passes=config.batch.aggregation_frequency,
        watch=watch,
        compression=config.compression,
        measures_noise=measures_noise,
    )
