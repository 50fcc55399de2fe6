"""The weights that a job has committed, read without its cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etrain_jupyter.checkpoints import (
    CheckpointStore,
    OpenCheckpoint,
    open_newest,
    open_step,
    open_store,
)
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.job.run_store import JobRecord

MODEL_PART = "model.safetensors"
STATE_PART = "state.json"
NOTHING: dict[str, list[Any]] = {"best": []}
NEVER_EVALUATED = "nothing was evaluated before its newest checkpoint"


def load_newest_weights(record: JobRecord) -> dict[str, Any]:
    """Return the tensors of the newest checkpoint that verifies, by parameter name.

    Raises:
        CheckpointError: If there is none, with the reason for each that was refused.
    """
    return _load(_open_newest(record).files)


def load_best_weights(record: JobRecord, reached: Mapping[int, float]) -> dict[str, Any]:
    """Return the tensors of the best checkpoint, by parameter name.

    Which ones are the best is in the state of the newest checkpoint, which knows what is left if
    the very best could not be saved; and in the log, which may be ahead of it.

    Args:
        record: The job.
        reached: What the log says: steps that were the best when they were evaluated, with that.

    Raises:
        CheckpointError: If there is none.
    """
    asked = (record.config.get("checkpoint") or {}).get("best")
    if not asked:
        raise CheckpointError(
            f"job {record.job_id} keeps no best checkpoint: its cell asks for none. Write "
            "checkpoint: {best: {metric: loss}} and run it again; which='last' loads the newest."
        )
    newest = _open_newest(record)
    state = json.loads(newest.files[STATE_PART].read_text())
    values = {step: value for step, value in (state["extras"].get("judge") or NOTHING)["best"]}
    values |= reached
    sign = -1 if asked["mode"] == "max" else 1
    store, refused = _store_of(record), []
    for step in sorted(values, key=lambda step: (sign * values[step], step)):
        try:
            return _load(open_step(store, step, job_id=record.job_id)[1])
        except CheckpointError as exc:
            refused.append(f"step {step}: {exc}")
    raise CheckpointError(
        f"job {record.job_id} has no best weights to load: {'; '.join(refused) or NEVER_EVALUATED}"
        ". which='last' loads the newest ones."
    )


def _open_newest(record: JobRecord) -> OpenCheckpoint:
    try:
        return open_newest(_store_of(record), job_id=record.job_id)
    except CheckpointError as exc:
        raise CheckpointError(
            f"job {record.job_id} has no weights to load: {exc} A checkpoint is written at the "
            "end of each epoch, at the end, and by %etrain checkpoint."
        ) from exc


def _store_of(record: JobRecord) -> CheckpointStore:
    elsewhere = (record.config.get("checkpoint") or {}).get("to")
    # Several jobs may share checkpoint.to: the coordinator gives each a folder in it.
    place = Path(elsewhere) / record.job_id if elsewhere else record.folder
    return open_store(str(place))


def _load(files: dict[str, Path]) -> dict[str, Any]:
    # torch comes with this import; a kernel that only looks at jobs never needs it.
    from etrain_jupyter.ranks.state.capture import load_model_state

    return load_model_state(files[MODEL_PART])


def put_weights(state: dict[str, Any], model: Any, record: JobRecord) -> None:
    """Load ``state`` into ``model``.

    Raises:
        CheckpointError: If the model is another one than the job's.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as exc:
        raise CheckpointError(
            f"the checkpoint of {record.job_id} does not fit {type(model).__name__}: {exc}. "
            f"The job trained {record.config.get('model', 'another model')}."
        ) from exc
