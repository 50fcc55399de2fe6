"""Events with plain values, for tests that need only some of the fields."""

from __future__ import annotations

from typing import Any, TypeVar

from etrain_jupyter.log.events import Event, GenerationFormed, JobPlanned, StepCompleted

Kind = TypeVar("Kind", bound=Event)

NOTHING_ELSE: dict[str, Any] = {
    **dict.fromkeys(("evaluation_s", "checkpoint_s", "wait_s", "metrics_s", "cpu_s"), 0.0),
    "core_wait_s": None,
}
PLAIN_STEP: dict[str, Any] = {
    **{"ranks_agree": True, "skipped": False},
    **dict.fromkeys(("data_s", "compute_s", "communication_s", "optimizer_s"), 0.0),
}
_COMMON: dict[str, Any] = {"job_id": "job", "time": 1.0}
_VALUES: dict[type[Event], dict[str, Any]] = {
    StepCompleted: {
        **{"step": 1, "epoch": 0, "first": 0, "samples": 32, "sample_checksum": 7},
        **{"loss": 0.5, "lr": 0.1, "world_size": 1, "samples_per_s": 1.0},
        **PLAIN_STEP,
    },
    JobPlanned: {
        **{"num_train_samples": 100, "num_eval_samples": 0, "global_batch_size": 10},
        **{"steps_per_epoch": 10, "total_steps": 20, "total_samples": 200},
        **{"num_parameters": 10, "num_trained_parameters": 10},
    },
    GenerationFormed: {"generation": 1, "why": "start", "backend": "gloo"},
}


def made(kind: type[Kind], **values: Any) -> Kind:
    """Return an event with these values; the size of a generation is that of its ``ranks``."""
    if kind is GenerationFormed:
        values.setdefault("world_size", len(values["ranks"]))
    return kind(**_COMMON | _VALUES[kind] | values)
