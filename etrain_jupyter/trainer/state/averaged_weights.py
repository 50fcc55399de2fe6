"""Read the averaged weights of a checkpoint, for ``load_into`` and ``export``.

``model.safetensors`` contains the weights that are trained; their averages are in the file of the
other components. Reading them never runs code from the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.trainer.state.packing import Tensors, unpack
from etrain_jupyter.trainer.state.parts import AVERAGE, EXTRA_PART, MODEL_PART, header_of


@torch.no_grad()
def load_averaged_state(files: Mapping[str, Path]) -> Tensors:
    """Return the weights by name, averaged where there is an average.

    Raises:
        CheckpointError: If the averages do not fit the weights.
    """
    state = load_file(files[MODEL_PART])
    extra = load_file(files[EXTRA_PART])
    try:
        packed = header_of(dict(files))["extras"][AVERAGE]
        averages: Tensors = unpack(packed, extra.__getitem__)["average"]
        unfit = [name for name, value in averages.items() if state[name].shape != value.shape]
    except (KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"its averaged weights do not fit its weights ({exc!r})") from exc
    if unfit:
        raise CheckpointError(f"its averaged weights differ in shape: {', '.join(unfit[:3])}")
    for name, value in averages.items():
        state[name].copy_(value)  # in the type of the weights
    return state


def write_averaged_file(files: Mapping[str, Path], target: Path) -> None:
    """Write the averaged weights as a safetensors file."""
    save_file(load_averaged_state(files), target, metadata={"format": "pt"})
