"""Checkpoint metadata, and loading a checkpoint into a job that has changed in the meantime.

There is no RNG state: random numbers depend only on the seed, the step and the rank or shard, and
the order of the samples depends only on the seed and the epoch. ``seed`` and the counters are
sufficient.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from etrain_jupyter import __version__
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import CheckpointError
from etrain_jupyter.trainer.state.capture import put_state
from etrain_jupyter.trainer.state.packing import StateError, Tensors
from etrain_jupyter.trainer.state.parts import AVERAGE
from etrain_jupyter.trainer.state.weight_average import WeightAverage
from etrain_jupyter.trainer.workload import Workload

Warn = Callable[[str], None]


def about(
    config: TrainConfig, optimizer: torch.optim.Optimizer, code_digest: str
) -> dict[str, Any]:
    """Return the metadata in ``state.json``."""
    return {
        "versions": {
            "etrain_jupyter": __version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "config": config.model_dump(mode="json"),
        "config_digest": config_digest(config),
        "code_digest": code_digest,
        "seed": config.seed,
        "optimizer": _kind_of(optimizer),
    }


def config_digest(config: TrainConfig) -> str:
    """Return the SHA-256 digest of a config in JSON form."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def put_checkpoint(
    workload: Workload,
    header: dict[str, Any],
    tensors: Tensors,
    *,
    config: TrainConfig | None,
    warn: Warn,
) -> None:
    """Load a checkpoint's state; components that were added or replaced start from scratch.

    Args:
        workload: The workload to load the state into.
        header: Contents of ``state.json``.
        tensors: The tensors by name.
        config: The cell's config; None to keep the optimizer options from the checkpoint.
        warn: Called with the text of each warning.

    Raises:
        CheckpointError: If the checkpoint belongs to another model.
    """
    # changed in the cell     what happens
    # the model               refused: no part of the state would fit
    # the optimizer's class   warning: the weights are loaded, the optimizer starts from scratch
    # its options             warning: its state is loaded, then the cell's options are put back
    # an extra is gone        warning: its state is ignored
    # an extra is new         it starts from scratch
    metadata = header["about"]
    header = _without_lost_parts(workload, header, warn)
    optimizer = workload.optimizer
    rates = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    is_same_kind = is_of_optimizer(header, optimizer)
    target = optimizer
    if not is_same_kind:
        change = f"from {metadata['optimizer']} to {_kind_of(optimizer)}"
        warn(f"the optimizer has changed {change}: its state starts from scratch")
        # Load into a placeholder, so that the new optimizer keeps its initial state.
        target = torch.optim.SGD(workload.model.parameters(), lr=0.0)
        groups = target.state_dict()["param_groups"]
        header = header | {"optimizer": {"state": [], "param_groups": groups}}
    try:
        put_state(workload.model, target, header, tensors, workload.extras)
    except (StateError, RuntimeError, KeyError) as exc:
        reason = " ".join(str(exc).split())
        raise CheckpointError(
            f"the checkpoint does not fit this model ({reason}). Nothing was trained, and all "
            "checkpoints are kept. Resume with the model that the checkpoint was written with"
        ) from exc
    average = workload.extras.get(AVERAGE)
    if isinstance(average, WeightAverage) and AVERAGE not in header["extras"]:
        average.restart()  # from the restored weights, not from the initial ones
    if not is_same_kind or config is None:
        return
    if metadata["config"]["optimizer"] != config.optimizer.model_dump(mode="json"):
        warn("the optimizer's options have changed: training uses the cell's options")
        # The state was loaded with its old options, so restore the cell's options.
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group.update(own)


def is_of_optimizer(header: dict[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a checkpoint's optimizer state belongs to this class of optimizers."""
    return bool(header["about"]["optimizer"] == _kind_of(optimizer))


def _without_lost_parts(workload: Workload, header: dict[str, Any], warn: Warn) -> dict[str, Any]:
    extras = header["extras"]
    removed = sorted(set(extras) - set(workload.extras))
    for name in removed:
        warn(f"the checkpoint's state of '{name}' is ignored: this job no longer uses it")
    return header | {"extras": {k: v for k, v in extras.items() if k not in removed}}


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__qualname__
