"""Records for a table of a job's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from etrain_jupyter.storage.checkpoints import ListedCheckpoint
from etrain_jupyter.storage.checkpoints.manifest import folder_key


def records_of(
    listed: Sequence[ListedCheckpoint],
    *,
    best: int | None,
    where: str,
    now: float,
    stalls: Mapping[int, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return one record per checkpoint; unknown values are None.

    Args:
        listed: The checkpoints in the store, newest first.
        best: Step of the best checkpoint.
        where: URL or path of the store.
        now: Current time, in seconds since the epoch.
        stalls: How long each checkpoint blocked training, in seconds, by step; only if logged.
    """
    # The checkpoint that a resume would load, unless `verify` finds that it is damaged.
    newest = next((row.step for row in listed if not row.problem), None)
    records = []
    for row in listed:
        manifest = row.manifest
        # A damaged manifest does not contain the location of the parts, so derive the folder from
        # the step.
        keys = [part.key for part in manifest.parts.values()] if manifest else []
        folder = keys[0].rpartition("/")[0] if keys else folder_key(row.step)
        records.append(
            {
                "step": row.step,
                "age_s": max(0.0, now - manifest.created) if manifest else None,
                "size_bytes": manifest.size_bytes if manifest else None,
                "stall_s": stalls.get(row.step),
                "generation": manifest.generation if manifest else None,
                "is_newest": row.step == newest,
                "is_best": row.step == best,
                "verified": row.is_verified,
                "problem": row.problem,
                "where": f"{where.rstrip('/')}/{folder}",
            }
        )
    return records
