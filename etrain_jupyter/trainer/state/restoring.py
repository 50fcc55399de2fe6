"""Loads the files of a checkpoint into a trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.trainer.loop.train_loop import TrainLoop
from etrain_jupyter.trainer.state.capture import MODEL, OPTIMIZER
from etrain_jupyter.trainer.state.checkpoint_metadata import put_checkpoint
from etrain_jupyter.trainer.state.parts import EXTRA_PART, MODEL_PART, header_of, optimizer_parts


def restore(
    loop: TrainLoop,
    files: dict[str, Path],
    *,
    config: TrainConfig | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Load the parts of one checkpoint into a trainer; return its last steps' records.

    Raises:
        CheckpointError: If it is the state of another model.
    """
    header = header_of(files)
    tensors = {MODEL + k: v for k, v in load_file(files[MODEL_PART]).items()}
    for name in optimizer_parts(files):
        tensors |= {OPTIMIZER + k: v for k, v in load_file(files[name]).items()}
    if EXTRA_PART in files:
        tensors |= load_file(files[EXTRA_PART])
    put_checkpoint(loop.workload, header, tensors, config=config, warn=warn)
    loop.set_counters(header["counters"])
    records: list[dict[str, Any]] = header.get("records", [])
    return records
