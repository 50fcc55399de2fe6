"""The weights that a job has committed, read without its cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
NEVER_EVALUATED = "nothing was evaluated before its newest checkpoint"


def load_newest_weights(record: JobRecord) -> dict[str, Any]:
    """Return the tensors of the newest checkpoint that verifies, by parameter name.

    Raises:
        CheckpointError: If there is none, with the reason for each that was refused.
    """
    return _load(_open_newest(record).files)


def load_best_weights(record: JobRecord, reached: Sequence[int]) -> dict[str, Any]:
    """Return the tensors of the best checkpoint, by parameter name.

    Which ones are the best is in the log, and in the state of the newest checkpoint: that knows
    what is left if the very best could not be saved.

    Args:
        record: The job.
        reached: Steps that were the best when they were evaluated, the very best first.

    Raises:
        CheckpointError: If there is none.
    """
    if not (record.config.get("checkpoint") or {}).get("best"):
        raise CheckpointError(
            f"job {record.job_id} keeps no best checkpoint: its cell asks for none. Write "
            "checkpoint: {best: {metric: loss}} and run it again; which='last' loads the newest."
        )
    newest = _open_newest(record)
    state = json.loads(newest.files[STATE_PART].read_text())
    known = [step for step, _ in (state["extras"].get("judge") or {"best": []})["best"]]
    # The log may be ahead of the checkpoint by what was better than all that this knows.
    ahead = [step for step in reached if step not in known]
    store, refused = _store_of(record), []
    for step in [*ahead, *known]:
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
