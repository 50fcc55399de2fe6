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
        ConfigError: If there is no such pool, or its entry in ``pools.yaml`` is invalid; with the
            position of the error.
    """
    name, known = parsed.config.pool, pool_names()
    if name not in known and "://" not in name:
        message = f"there is no pool '{name}'. Known pools: {', '.join(known)}"
        raise parsed.source.error(("pool",), message, hint=advice_on(name, known))
    return get_pool(name)


def with_shared_checkpoints(config: TrainConfig, pool: Pool, *, has_bucket: bool) -> TrainConfig:
    """Store checkpoints where all the pool's workers can reach them, unless the cell names a place.

    ``has_bucket``: the run store is in a bucket, which every machine can reach.
    """
    place = pool.shared_place()
    # If the run is stored in a bucket, checkpoints go there by default, too.
    if not place or has_bucket or config.checkpoint.to is not None:
        return config
    checkpoint = config.checkpoint.model_copy(update={"to": place})
    return config.model_copy(update={"checkpoint": checkpoint})


def checkpoint_warnings(config: TrainConfig, pool: Pool, *, has_bucket: bool) -> tuple[str, ...]:
    """Return a warning if checkpoints go to a folder that the machines may not share."""
    place, to = pool.shared_place(), config.checkpoint.to
    if not place or has_bucket or to is None or "://" in to:
        return ()
    return (
        f"checkpoint.to is the folder {to}: all machines of pool {config.pool} must share that "
        f"disk. Without the key, checkpoints go to {place}.",
    )
