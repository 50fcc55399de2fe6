"""The weights that a job has committed, read without its cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etrain_jupyter.checkpoints import open_newest, open_store
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.job.run_store import JobRecord

MODEL_PART = "model.safetensors"


def load_newest_weights(record: JobRecord) -> dict[str, Any]:
    """Return the tensors of the newest checkpoint that verifies, by parameter name.

    Raises:
        CheckpointError: If there is none, with the reason for each that was refused.
    """
    elsewhere = (record.config.get("checkpoint") or {}).get("to")
    # Several jobs may share checkpoint.to: the coordinator gives each a folder in it.
    place = Path(elsewhere) / record.job_id if elsewhere else record.folder
    try:
        found = open_newest(open_store(str(place)), job_id=record.job_id)
    except CheckpointError as exc:
        raise CheckpointError(
            f"job {record.job_id} has no weights to load: {exc} A checkpoint is written at the "
            "end of each epoch, at the end, and by %etrain checkpoint."
        ) from exc
    # torch comes with this import; a kernel that only looks at jobs never needs it.
    from etrain_jupyter.ranks.state.capture import load_model_state

    return load_model_state(found.files[MODEL_PART])


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
