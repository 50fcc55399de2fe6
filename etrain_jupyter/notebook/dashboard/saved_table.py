"""Table of ``%etrain checkpoints``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etrain_jupyter.notebook.dashboard.event_text import seconds, size

HEAD = ("STEP", "AGE", "SIZE", "STALL", "GENERATION", "MARK", "STATE")


def table_of_saved(job_id: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, followed by a description of the problem of each damaged checkpoint."""
    if not records:
        return (
            f"Job {job_id} has no checkpoint yet. Checkpoints are written at the interval of "
            "checkpoint.every, at the end of the job, and by %etrain checkpoint."
        )
    rows = [HEAD, *(_row(record) for record in records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"step {r['step']}: {r['problem']}" for r in records if r["problem"]]
    store = str(records[0]["where"]).rsplit("/", 2)[0]
    count = f"{len(records)} checkpoint{'' if len(records) == 1 else 's'}"
    return "\n".join([f"{count} of {job_id} in {store}", *lines])


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    marks = [word for word in ("newest", "best") if record[f"is_{word}"]]
    state = "broken" if record["problem"] else "whole" if record["verified"] else "not read"
    return (
        str(record["step"]),
        "-" if record["age_s"] is None else seconds(record["age_s"]),
        "-" if record["size_bytes"] is None else size(record["size_bytes"]),
        "-" if record["stall_s"] is None else seconds(record["stall_s"]),
        "-" if record["generation"] is None else str(record["generation"]),
        ", ".join(marks) or "-",
        state,
    )
