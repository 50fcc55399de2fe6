"""A job's checkpoints as records, and as the table of ``%etrain checkpoints``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from etrain_jupyter.display.numbers import MISSING, counted, seconds, size
from etrain_jupyter.display.tables import align_columns
from etrain_jupyter.storage.checkpoints import ListedCheckpoint
from etrain_jupyter.storage.checkpoints.manifest import folder_key

HEAD = ("STEP", "AGE", "SIZE", "STALL", "GENERATION", "MARK", "STATE")


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


def table_of_saved(job_id: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, followed by a description of the problem of each damaged checkpoint."""
    if not records:
        return (
            f"Job {job_id} has no checkpoint yet. Checkpoints are written at the interval of "
            "checkpoint.every, at the end of the job, and by %etrain checkpoint."
        )
    lines = [align_columns([HEAD, *map(_row, records)])]
    lines += [f"step {r['step']}: {r['problem']}" for r in records if r["problem"]]
    store = str(records[0]["where"]).rsplit("/", 2)[0]
    return "\n".join([f"{counted(len(records), 'checkpoint')} of {job_id} in {store}", *lines])


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    marks = [word for word in ("newest", "best") if record[f"is_{word}"]]
    state = "broken" if record["problem"] else "whole" if record["verified"] else "not read"
    return (
        str(record["step"]),
        MISSING if record["age_s"] is None else seconds(record["age_s"]),
        MISSING if record["size_bytes"] is None else size(record["size_bytes"]),
        MISSING if record["stall_s"] is None else seconds(record["stall_s"]),
        MISSING if record["generation"] is None else str(record["generation"]),
        ", ".join(marks) or MISSING,
        state,
    )
