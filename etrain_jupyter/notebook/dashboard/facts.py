"""What a snapshot of a job is made of, as JSON-able data."""

from __future__ import annotations

import math
from typing import Any

from etrain_jupyter.log.events import Event


def first_facts(job_id: str) -> dict[str, Any]:
    """What is known of a job before its first event; every key of a snapshot is always there."""
    return {
        "job_id": job_id,
        "name": job_id,
        "status": "submitted",
        "reason": "",
        "pool": "",
        "submitted_at": None,
        "started_at": None,
        "updated_at": 0.0,
        "ended_at": None,
        "step": 0,
        "total_steps": None,
        "epoch": 0,
        "epochs": None,
        "loss": None,
        "lr": None,
        "metrics": {},
        "eval": None,
        "best": None,
        "global_batch_size": None,
        "num_parameters": None,
        "world_size": 0,
        "min_workers": None,
        "max_workers": None,
        "generation": 0,
        "num_generations": 0,
        "num_lost": 0,
        "num_preempted": 0,
        "num_undone": 0,
        "stall_s": None,
        "checkpoint": None,
        "cost": None,
        "error": None,
        "charts": {"metrics": [], "has_eval": False},
    }


def marker_of(event: Event, kind: str, step: int, text: str) -> dict[str, Any]:
    """Return what the charts draw at ``step``."""
    return {"seq": event.seq, "step": step, "time": event.time, "kind": kind, "text": text}


def json_able(value: Any) -> Any:
    """Copy ``value``, with floats that JSON lacks as strings that JavaScript's Number() reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: json_able(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(item) for item in value]
    return value
