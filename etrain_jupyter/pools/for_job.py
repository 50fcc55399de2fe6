"""Resolve the pool that a job names, and adapt the job to what the pool's machines can reach."""

from __future__ import annotations

from etrain_jupyter.config import ParsedJob
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.pools.base import Pool
from etrain_jupyter.pools.catalog import advice_on
from etrain_jupyter.pools.registry import get_pool, pool_names


def find_pool(parsed: ParsedJob) -> Pool:
    """Return the pool that a cell names; nothing is started yet.

    Raises:
        ConfigError: If there is no such pool, or its entry in ``pools.yaml`` is invalid. The
            exception contains the position of the error.
    """
    name, known = parsed.config.pool, pool_names()
    if name not in known and "://" not in name:
        message = f"there is no pool '{name}'. Known pools: {', '.join(known)}"
        raise parsed.source.error(("pool",), message, hint=advice_on(name, known))
    return get_pool(name)


def with_shared_checkpoints(
    config: TrainConfig, pool: Pool, *, has_bucket: bool
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Store checkpoints where all the pool's workers can reach them, if the cell names no place.

    Args:
        config: The job.
        pool: Its pool.
        has_bucket: True if the run store is in a bucket. Every machine can reach that, and
            checkpoints go there by default, too.

    Returns:
        The config, and a warning if the cell names a folder that the machines may not share.
    """
    place, to = pool.shared_place(), config.checkpoint.to
    if not place or has_bucket or (to is not None and "://" in to):
        return config, ()
    if to is None:
        checkpoint = config.checkpoint.model_copy(update={"to": place})
        return config.model_copy(update={"checkpoint": checkpoint}), ()
    warning = (
        f"checkpoint.to is the folder {to}: all machines of pool {config.pool} must share that "
        f"disk. Without the key, checkpoints go to {place}."
    )
    return config, (warning,)
