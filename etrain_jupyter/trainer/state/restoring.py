"""Load the files of a checkpoint into a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.state.capture import MODEL, OPTIMIZER
from etrain_jupyter.trainer.state.checkpoint_metadata import put_checkpoint
from etrain_jupyter.trainer.state.parts import EXTRA_PART, MODEL_PART, header_of, optimizer_parts
from etrain_jupyter.trainer.state.train_state import TrainState


def restore(
    state: TrainState,
    files: dict[str, Path],
    *,
    config: TrainConfig | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Load the parts of one checkpoint and return the records of its last steps.

    Raises:
        CheckpointError: If the checkpoint belongs to another model.
    """
    header = header_of(files)
    # Tensors have no prefix in these files, because other programs also read model.safetensors.
    tensors = {MODEL + k: v for k, v in load_file(files[MODEL_PART]).items()}
    for name in optimizer_parts(files):
        tensors |= {OPTIMIZER + k: v for k, v in load_file(files[name]).items()}
    if EXTRA_PART in files:
        tensors |= load_file(files[EXTRA_PART])
    put_checkpoint(state.workload, header, tensors, config=config, warn=warn)
    # Set the counters last, so that a checkpoint that does not fit leaves them unchanged.
    state.set_counters(header["counters"])
    records: list[dict[str, Any]] = header.get("records", [])
    return records
